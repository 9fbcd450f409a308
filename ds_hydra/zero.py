"""`deepspeed.zero` of scripts that this engine trains: no rank's model is cut before `ds_hydra.initialize`.

`Init` does nothing, and `GatheredParameters` gives each rank the values to read; with a config without a block "hydra",
and for parameters that DeepSpeed has cut, both are DeepSpeed's, as all other names [Note: names of DeepSpeed] are.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from contextlib import ContextDecorator, ExitStack
from typing import Any

import deepspeed.runtime.zero as theirs
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hydra.config.checks import read_config
from ds_hydra.host.environment import launched_number
from ds_hydra.host.released import ReleasedParameter, held_values
from ds_hydra.zero_hetero.deepspeed_names import handed_on

logger = logging.getLogger(__name__)
__getattr__ = handed_on(__name__, theirs.__name__)


class Init(ContextDecorator):
    """Does nothing, and says so once. With a config without a block "hydra" it is DeepSpeed's; the same arguments."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """This one, or DeepSpeed's."""
        config = kwargs.get("config_dict_or_path") or kwargs.get("config")
        if config is not None and "hydra" not in read_config(None, config):
            return theirs.Init(*args, **kwargs)
        _say_that_nothing_is_cut()
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is kept of the arguments."""

    def __enter__(self) -> Init:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was changed."""


class GatheredParameters:
    """Within, each rank reads these parameters as it likes. All ranks enter it together.

    Takes DeepSpeed's arguments. Those of `engine.module` can be read: ConfigError for a write, which would be lost.
    Before `ds_hydra.initialize` they are whole and can be written; what the rank `modifier_rank` writes counts.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: Any = None,
        enabled: bool = True,
    ):
        given = [params] if isinstance(params, Tensor) else list(params)
        self._params = given if enabled else []
        self._modifier_rank, self._fwd_module = modifier_rank, fwd_module
        self._stack = ExitStack()

    def __enter__(self) -> None:
        cut = [one for one in self._params if hasattr(one, "ds_id")]
        if cut:
            self._stack.enter_context(theirs.GatheredParameters(cut, self._modifier_rank, self._fwd_module))
        self._stack.enter_context(held_values(self._params))

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        # The engine takes the values of rank 0.
        if self._modifier_rank and error[0] is None and dist.is_initialized() and dist.get_world_size() > 1:
            device = get_accelerator().current_device_name()
            for one in self._params:
                if not isinstance(one, ReleasedParameter) and not hasattr(one, "ds_id"):
                    value = one.detach().to(device)
                    dist.broadcast(value, self._modifier_rank)
                    one.data.copy_(value)


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Nothing to do for a whole parameter; DeepSpeed's for one that DeepSpeed has cut."""
    if hasattr(parameter, "ds_id"):
        theirs.register_external_parameter(module, parameter)


@functools.cache
def _say_that_nothing_is_cut() -> None:
    if not launched_number("RANK"):
        logger.warning(
            "zero.Init() does nothing here: each rank builds the whole model, and ds_hydra.initialize() shares it out. "
            'Where that takes too much memory, build it under torch.device("meta") and name its folder in '
            "hydra.initial_weights"
        )
