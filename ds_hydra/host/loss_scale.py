"""Loss scaling for FP16: DeepSpeed's own scalers, and their state as plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from torch import Tensor

from ds_hydra.host.precision import DataTypes
from ds_hydra.zero_hetero.errors import CheckpointError, NumericsError

_MOST_SCALE = 2.0**100
_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class Precision(Protocol):
    """The methods of a DeepSpeed engine that give the settings of its block "fp16"."""

    types: DataTypes

    def loss_scale(self) -> float: ...
    def dynamic_loss_scale_args(self) -> dict[str, Any]: ...


class LossScale:
    """The factor on the loss that keeps FP16 gradients from vanishing; 1 for every other type.

    A dynamic scale follows DeepSpeed's rule: a step that overflows is skipped and, after as many of them as
    `hysteresis` says, halves the scale; `loss_scale_window` steps without overflow double it.
    """

    def __init__(self, engine: Precision):
        half = engine.types.compute == torch.float16
        self.dynamic = half and engine.loss_scale() == 0
        self._scaler: Any = CreateLossScaler(
            engine.types.compute, engine.loss_scale() or 1.0, self.dynamic, engine.dynamic_loss_scale_args()
        )

    @property
    def value(self) -> float:
        """The scale of the coming step."""
        return float(self._scaler.cur_scale)

    def unscale(self, grads: Iterable[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        # FP16 holds nothing below 6e-8, so a gradient of 1e-9 would become 0. With a scale of 65536 it is carried as
        # 6.6e-5, and divided here, where gradients are FP32.
        if self.value != 1.0:
            for grad in grads:
                grad.mul_(1.0 / self.value)

    def update(self, *, overflow: bool) -> None:
        """Record whether a step overflowed on any rank. NumericsError if it did even with the least scale."""
        try:
            self._scaler.update_scale(overflow)
        except Exception as error:  # DeepSpeed raises nothing more specific
            raise NumericsError(
                f"the gradient overflows FP16 even at the least loss scale, {self.value:g}: losses or gradients are "
                "not finite whatever the scale; lower the learning rate, look at the data, or use bf16"
            ) from error

    def state_dict(self) -> dict[str, Any] | None:
        """Numbers to save; None for a scale that never changes."""
        return {key: getattr(self._scaler, key) for key in _STATE} if self.dynamic else None

    def check_state(self, state: Mapping[str, Any] | None) -> None:
        """CheckpointError unless `load_state_dict` can go on with these numbers; None is no state of this kind."""
        if state is None or not self.dynamic:
            return
        least = {"cur_scale": 0, "cur_iter": 0, "last_overflow_iter": -1, "cur_hysteresis": 1}
        wrong = [f"the keys are {', '.join(state)[:200]}"] if state.keys() != least.keys() else []
        wrong = wrong or [
            f"{key} is {str(state[key])[:40]}" for key in _STATE if not _fits(key, state[key], least[key])
        ]
        if wrong:
            raise CheckpointError(f"the saved loss scale is damaged: {wrong[0]}; use another tag")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with saved numbers. A fixed scale keeps the config's value."""
        if self.dynamic:
            for key in _STATE:
                setattr(self._scaler, key, type(getattr(self._scaler, key))(state[key]))


def _fits(key: str, value: Any, least: int) -> bool:
    """Whether a number can be that of a scaler: a scale above 0, or a count."""
    if key == "cur_scale":
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _MOST_SCALE
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value % 1 == 0 and least <= value < 2**48
