"""A user's model in, a copy of it whose parameters take no memory out.

The copy is not built from the model's config, but copied: its class, attributes, replaced submodules, hooks,
parametrizations and adapters are the user's. Parameters lie on the meta device, buffers and other tensors keep their
values.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.pipe.adapters import run_stacks
from ds_hydra.pipe.models.rebinding import rebind_functions
from ds_hydra.zero_hetero.errors import ConfigError

# Parameters of a model that is run with numbers at once. Without them torch computes shapes in Python, which takes up
# to a hundred times as long as to compute a few numbers, and as long for a tiny model as for a large one. With 2**21
# what such runs leave until it is collected took 60 MB, on the rank that looks at the model.
FEW_PARAMETERS = 2**19


def copy_to_meta(model: Any) -> Any:
    """A copy of a module with every parameter on the meta device; tied parameters stay tied.

    Hooks of parameters are not copied, as torch never copies them: see `parameter_hooks`. Raises ConfigError for
    what cannot be copied, naming it.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        hollow = torch.empty_like(parameter, device="meta", requires_grad=False)
        memo[id(parameter)] = nn.Parameter(hollow, requires_grad=parameter.requires_grad)
    # Tensors with a history, such as what an old `weight_norm` leaves as `weight`, are not copied by Python's rules.
    memo |= {id(value): value.detach().clone() for module in model.modules() for value in vars(module).values()
             if isinstance(value, Tensor) and not value.is_leaf}  # fmt: skip
    # Most of a module's attributes are empty dictionaries of hooks, on which copying would spend most of its time.
    memo |= {id(value): OrderedDict() for module in model.modules() for value in vars(module).values()
             if type(value) is OrderedDict and not value}  # fmt: skip
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise ConfigError(_what_cannot_be_copied(model, memo, error)) from error
    rebind_functions(model, copied)
    return copied


def replace_parameters(model: nn.Module, made_of: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Put `made_of(name in its module, parameter)` in place of each parameter; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = made_of(name, parameter)
            module._parameters[name] = made[id(parameter)]


def in_place_of(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """A parameter with another value, trained or not as the first one, and its gradient hooks."""
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    for hook in (parameter._backward_hooks or {}).values():
        new.register_hook(hook)
    return new


def _what_cannot_be_copied(model: nn.Module, memo: dict[int, Any], error: Exception) -> str:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_modules", "_parameters"):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception as cause:
                where = f"{name}.{key}" if name else key
                return (
                    f"the attribute {where} of the model (a {type(value).__name__}) cannot be copied: {cause}. Stages "
                    "are copies of the model: keep such an object outside of it, or give it a __deepcopy__"
                )
    return f"{type(model).__name__} cannot be copied: {error}"


def parameter_hooks(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Gradient hooks that the user registered on parameters, by name. ConfigError for hooks that wait until a gradient
    has been accumulated: stages sum gradients elsewhere."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"{name} has a hook of register_post_accumulate_grad_hook, which would not run: ranks sum gradients "
                "elsewhere. Change the gradient by register_hook, or the parameter by the optimizer"
            )
    return {
        name: tuple(parameter._backward_hooks.values())
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks
    }


def kept_in_fp32(model: Any, dtype: torch.dtype) -> frozenset[str]:
    """The parameters that a model of transformers keeps in FP32 where it is loaded in `dtype`, by name."""
    # transformers looks for its patterns anywhere in a name, too.
    patterns = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ()) if dtype.itemsize == 2 else set()
    if dtype == torch.float16:
        patterns |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns)))
    return frozenset(name for name, _ in model.named_parameters() if patterns and kept.search(name))


def place_on(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Move what a copy holds beside its parameters to a device; give floating parameters a dtype, still on meta."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(device)
        for key, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                object.__setattr__(module, key, value.to(device))
    if dtype is not None:
        replace_parameters(model, lambda _, parameter: _of_dtype(parameter, dtype))


def _of_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    if not parameter.is_floating_point():
        return parameter
    data = torch.empty(parameter.shape, dtype=dtype, device="meta")
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def ready_to_run(model: nn.Module) -> None:
    """Let a copy run by the code that its stages run."""
    model.apply(checkpoint_nothing)
    if getattr(model, "peft_config", None):
        run_stacks(model)


def run_experts_one_by_one(model: nn.Module) -> None:
    """Let experts run as their own source says: fused kernels refuse parameters that are one repeated number."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"  # type: ignore[union-attr]


def are_few(parameters: Iterable[Tensor]) -> bool:
    """Whether a run with numbers takes less time than one without."""
    return sum(parameter.numel() for parameter in parameters) <= FEW_PARAMETERS


def devices_to_run_on(model: nn.Module) -> tuple[torch.device, torch.device]:
    """Where a run that needs no values is tried, and tried again: with no numbers, which takes no memory, and then with
    one repeated number for each parameter, since experts choose by the numbers; small models have numbers at once, and
    the second time what their code has kept of the first."""
    numbers = torch.device("cpu")
    return (numbers if are_few(model.parameters()) else torch.device("meta")), numbers


def give_values(model: nn.Module, values: Mapping[str, Tensor] | None, device: torch.device) -> None:
    """Give a copy's parameters values that share memory with `values`, or one repeated number for each."""
    given: dict[int, nn.Parameter] = {}
    few = are_few(model.parameters())
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in given:
            number = torch.full((), 0.01 if parameter.is_floating_point() else 1, dtype=parameter.dtype, device=device)
            data = repeated(number, parameter.shape, few=few) if values is None else values[name].detach()
            given[id(parameter)] = nn.Parameter(data, requires_grad=parameter.is_floating_point())
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = given[id(parameter)]


def repeated(number: Tensor, shape: Sequence[int], *, few: bool) -> Tensor:
    """A tensor of one repeated number: of `few`, or of no value, one that can be written to; else in no memory."""
    return number.new_full(shape, number.item()) if few and not number.is_meta else number.expand(tuple(shape))


def checkpoint_nothing(module: Any) -> None:
    """Let a module of a copy, not those in it, compute nothing again by itself: its stage does."""
    if getattr(module, "gradient_checkpointing", False):
        module.gradient_checkpointing = False
