"""Updates and gradients are the engine's: what a script does to them past its calls is refused before harm.

In a loop of torch's a script may call `optimizer.step()`, drop gradients between backward and step, and read or clip
`parameter.grad`. Here the optimizer holds flat parts of the masters, whose gradients are those of the step that ran
last, and those of the coming one are computed in `engine.step()`: a call of the first kind would make one more update
of old gradients, the others would do nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from ds_hydra.zero_hetero.errors import ConfigError

_GUARDED = "_ds_hydra_guarded"  # attribute of an optimizer
_HELD = frozenset(("data", "grad", "_grad", "grad_fn"))  # attributes of a tensor that are or have values


def guard_updates(
    optimizer: Optimizer, *, updating: Callable[[], bool], before_dropping: Callable[[str], None]
) -> None:
    """From now on a `step` of the optimizer is the engine's or ConfigError; `updating` says whether the engine makes
    an update, and `before_dropping`, given a call's name, is called before the optimizer's `zero_grad`. Its parameters
    are refused to scripts; a step's own code has them as torch made them."""
    own = vars(optimizer)
    _show_as(MasterPart, optimizer)
    if _GUARDED in own:  # it is the script's own, and has gone from one crew to the next
        return

    def refuse_step(called: Optimizer, *_: Any) -> None:
        if updating():
            _show_as(nn.Parameter, called)
        else:
            raise ConfigError(
                f"the script called {type(called).__name__}.step() of the engine's optimizer: engine.step(), "
                "train_batch() and optimizer_step() make the updates, and this would make one more by gradients that "
                "were applied already. Leave the call out; call engine.step() where there is none"
            )

    @functools.wraps(optimizer.zero_grad)
    def zero_grad(*args: Any, **kwargs: Any) -> None:
        before_dropping(f"{type(optimizer).__name__}.zero_grad()")
        with torch._C.DisableTorchFunctionSubclass():
            type(optimizer).zero_grad(optimizer, *args, **kwargs)

    optimizer.register_step_pre_hook(refuse_step)
    optimizer.register_step_post_hook(lambda called, *_: _show_as(MasterPart, called))
    own[_GUARDED], own["zero_grad"] = True, zero_grad


class MasterPart(nn.Parameter):
    """A parameter of the engine's optimizer as scripts see it: of a flat part of the masters they learn what is known
    without its value."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, attribute = getattr(function, "__name__", ""), attribute_of(function)
        if name not in HOOKS_OF_TENSORS and attribute not in _HELD and needs_no_value(function):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise ConfigError(
            f"the script asked for {f'.{attribute}' if attribute else f'{name}()'} of a parameter in "
            "engine.optimizer.param_groups, which is a flat part of this rank's masters, cut across the model's "
            "parameters, and gets its gradient within engine.step() or train_batch(). Clip by the config's "
            "gradient_clipping, change gradients by parameter.register_hook() before ds_hydra.initialize(), read their "
            "norm by engine.get_global_grad_norm(), and weights by engine.module on all ranks; set rates and the like "
            "in the groups themselves"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"MasterPart({self.numel()} elements, {self.dtype})"


def _show_as(kind: type[nn.Parameter], optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if type(parameter) in (nn.Parameter, MasterPart):  # others are a script's own
                parameter.__class__ = kind


def refuse_dropping(call: str) -> NoReturn:
    """Refuse a call that would drop gradients of batches which are collected."""
    raise ConfigError(
        f"{call} was called between engine.backward() and the engine.step() that makes the update, where plain "
        "DeepSpeed drops the gradients of some of these batches: here they are computed in that engine.step(), and "
        "would all count. Leave the call out, for each update begins with gradients of its own; a batch whose loss is "
        "not given to engine.backward() does not count"
    )


def refuse_reading(name: str) -> NoReturn:
    """Refuse to read the gradient of a parameter while one is to come."""
    raise ConfigError(
        f"the gradient of the parameter {name} of engine.module was read before the update, but it is among the "
        "ranks' masters, and that of batches is computed in engine.step(): clip by the config's gradient_clipping, "
        "scale by parameter.register_hook() before ds_hydra.initialize(), and read the norm after the step by "
        "engine.get_global_grad_norm()"
    )


# ---- What may be asked of a tensor whose value is not there. ----

HOOKS_OF_TENSORS = frozenset(("register_hook", "register_post_accumulate_grad_hook", "retain_grad"))
_METADATA = HOOKS_OF_TENSORS | frozenset((
    "__get__", "__len__", "dim", "ndimension", "size", "numel", "nelement", "stride", "storage_offset", "element_size",
    "get_device", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_tensor", "has_names",
))  # fmt: skip
"""What may be asked of a tensor whose value is not there."""

_VALUES = frozenset(("T", "mT", "H", "mH", "real", "imag"))  # attributes of a tensor that are computed from its values


def attribute_of(function: Callable[..., Any]) -> str:
    """The attribute of a tensor that a function of torch's gets or sets, or ""."""
    return getattr(getattr(function, "__self__", None), "__name__", "")


def makes_another(function: Callable[..., Any]) -> bool:
    """Whether it makes a tensor of the same kind with values of its own, as `zeros_like`."""
    name = getattr(function, "__name__", "")
    return name.endswith("_like") or name.startswith("new_")


def needs_no_value(function: Callable[..., Any]) -> bool:
    """Whether a function of torch's asks of a tensor what is known without its value."""
    name = getattr(function, "__name__", "")
    return makes_another(function) or (name in _METADATA and attribute_of(function) not in _VALUES)
