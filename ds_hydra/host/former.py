"""Parameters that a script has kept from before `initialize`: they answer as those that the model has now.

A list of `model.parameters()` that a script made early would go on holding the first values, and gradients of None: to
clip by it, to compute a norm, or to read a weight would do something else than with plain torch, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ds_hydra.host.asked import HOOKS_OF_TENSORS, attribute_of
from ds_hydra.host.released import ReleasedParameter
from ds_hydra.zero_hetero.errors import ConfigError


class FormerParameter(ReleasedParameter):
    """What a model's parameter was before `initialize` [Note: released parameters]; the model has another one now."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, attribute = getattr(function, "__name__", ""), attribute_of(function)
        if name in HOOKS_OF_TENSORS or name == "requires_grad_" or (name == "__set__" and attribute == "requires_grad"):
            raise ConfigError(
                f"{attribute or name} of the parameter {args[0]._hydra_name} was asked of what the script has kept of "
                "the model from before ds_hydra.initialize(), which has another parameter in its place now: take it "
                "from engine.module.named_parameters()"
            )
        return super().__torch_function__(function, types, args, kwargs)


def ask_the_present(before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Let the parameters that a model had `before`, by path, ask those that it has now."""
    for path, parameter in before.items():
        now = model.get_parameter(path)
        if type(parameter) is nn.Parameter and isinstance(now, ReleasedParameter):
            parameter.__class__ = FormerParameter
            vars(parameter).update(vars(now))
