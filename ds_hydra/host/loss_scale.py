"""Loss scaling for FP16: DeepSpeed's own scalers, and their state as plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from torch import Tensor

from ds_hydra.zero_hetero.errors import NumericsError

_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class Precision(Protocol):
    """What a DeepSpeed engine says of its config's block "fp16"."""

    compute_dtype: torch.dtype

    def loss_scale(self) -> float: ...
    def dynamic_loss_scale_args(self) -> dict[str, Any]: ...


class LossScale:
    """The factor on the loss that keeps FP16 gradients from vanishing; 1 for every other type.

    Dynamic as DeepSpeed's: a step that overflows is skipped and lowers it, `loss_scale_window` good steps raise it.
    """

    def __init__(self, engine: Precision):
        half = engine.compute_dtype == torch.float16
        self.dynamic = half and engine.loss_scale() == 0
        self._scaler: Any = CreateLossScaler(
            engine.compute_dtype, engine.loss_scale() or 1.0, self.dynamic, engine.dynamic_loss_scale_args()
        )

    @property
    def value(self) -> float:
        """The scale of the coming step."""
        return float(self._scaler.cur_scale)

    def unscale(self, grads: Iterable[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        if self.value != 1.0:
            for grad in grads:
                grad.mul_(1.0 / self.value)

    def update(self, *, overflow: bool) -> None:
        """Take in whether a step overflowed, on any rank. NumericsError when the least scale overflows."""
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved numbers; a scale that the config fixes stays."""
        if self.dynamic:
            for key in _STATE:
                setattr(self._scaler, key, type(getattr(self._scaler, key))(state[key]))
