"""The model inside one that PEFT has adapted, with its adapters in place; those that stages cannot train are refused.

PEFT's classes are told by their names: it need not be installed where it has made no model. A module of PEFT's that is
not known is refused, since what it does with a weight that lies on several ranks cannot be told.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ds_hydra.pipe.adapters import (
    AROUND_TOKENS,
    DORA,
    LORA_EMBEDDING,
    LORA_LINEAR,
    LORA_STACK,
    MAGNITUDE,
    SAVED_WHOLE,
    TOKENS,
    class_path,
    head_of,
)
from ds_hydra.pipe.model_plan import ParamSpec, ShardRule
from ds_hydra.zero_hetero.errors import ConfigError

NAMES_OF_PEFT = "base_model.model."
"""What stands before the names of the base's parameters in a PEFT model."""

_PEFT_MODEL, _MIXED_MODEL = "peft.peft_model.PeftModel", "peft.mixed_model.PeftMixedModel"
_HELD = "peft.tuners._buffer_dict.BufferDict"  # by rows that are trained alone: what they were
_KNOWN = frozenset({LORA_LINEAR, LORA_EMBEDDING, LORA_STACK, SAVED_WHOLE, MAGNITUDE, TOKENS, AROUND_TOKENS})
_REMEDY = "train with peft.LoraConfig, its target_modules and modules_to_save, or leave the adapter out"


def is_peft_model(model: object) -> bool:
    """Whether `peft.get_peft_model` made the model."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == _PEFT_MODEL for kind in type(model).__mro__)


def has_adapters(model: object) -> bool:
    """Whether PEFT has put adapters into a model."""
    return bool(getattr(model, "peft_config", None))


def base_of(model: Any) -> Any:
    """The Hugging Face model in which PEFT has put its adapters; a model that is not PEFT's is its own.

    Raises ConfigError for what PEFT does around the model and not in it.
    """
    if class_path(model) == _MIXED_MODEL:
        raise ConfigError(f"the model is a PeftMixedModel, with adapters of several kinds: not supported; {_REMEDY}")
    if not is_peft_model(model):
        return model
    for name, config in model.peft_config.items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            raise ConfigError(f"the adapter {name!r} is of the kind {kind}, which is not supported; {_REMEDY}")
    return model.get_base_model()


def names_with_adapters(base: Any, aliases: Mapping[str, str]) -> dict[str, str]:
    """Names in the PEFT model of what it may save, from those in its base: what is trained, adapters that are not, and
    the ends of the model.

    PEFT saves the embeddings too if an adapter is on them or if they have got more rows than their config says. Every
    path is mapped to the parameter's first name in `base`, as in `aliases`.
    """
    adapters = {id(p) for module in base.modules() for part in _saved_parts(module) for p in part.parameters()}
    ends = {id(p) for end in (base.get_input_embeddings(), head_of(base)) for p in end.parameters()}
    kept = {name for name, p in base.named_parameters() if p.requires_grad or id(p) in ends | adapters}
    return {NAMES_OF_PEFT + path: name for path, name in aliases.items() if name in kept}


def _saved_parts(module: Any) -> list[nn.Module]:
    """What PEFT has put into a module of its own and saves."""
    names = (
        "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "modules_to_save",
        "trainable_tokens_delta",
    )  # fmt: skip
    return [module._modules[name] for name in names if name in module._modules] if class_path(module) in _KNOWN else []


def active_adapters(model: nn.Module) -> tuple[str, ...]:
    """Names of the adapters that a forward of the model runs now; none where they are switched off.

    Raises ConfigError where only some modules' are, and where what runs then is a module that no stage has.
    """
    found: dict[tuple[str, ...], str] = {}
    tuners = _KNOWN - {MAGNITUDE}
    wrapped = [(path, module) for path, module in model.named_modules() if class_path(module) in tuners]
    for path, module in wrapped:
        tuner: Any = module
        found.setdefault(() if tuner.disable_adapters else tuple(tuner.active_adapters), path)
    if len(found) > 1:
        (one, at), (other, there) = list(found.items())[:2]
        raise ConfigError(
            f"the adapters of {at} that run are {list(one)}, and those of {there} {list(other)}: switch all of them "
            "off, by `with model.disable_adapter():`, or none"
        )
    active = next(iter(found), ())
    kept = next((path for path, module in wrapped if class_path(module) == SAVED_WHOLE), None)
    if wrapped and not active and kept is not None:
        raise ConfigError(
            f"the adapters are switched off, but {kept} is trained as a whole (modules_to_save), and no stage has what "
            "it was before: set precompute_ref_log_probs=True (DPO), pass a ref_model, or adapt it by LoRA"
        )
    return active


def adds_nothing(model: nn.Module, name: str) -> bool:
    """Whether an adapter, as PEFT has made it, leaves the model as it is: LoRA whose B is zero."""
    told = [module for module in model.modules() if name in getattr(module, "lora_B", ())]
    plain = all(class_path(module) == LORA_LINEAR and not getattr(module, "lora_variant", None) for module in told)
    others = any(name in (getattr(module, "modules_to_save", None) or ()) for module in model.modules())
    zeros = (not p.any() for module in told for p in module.lora_B[name].parameters())  # type: ignore[index, union-attr]
    return bool(told) and plain and not others and all(zeros)


def adapt_alike(model: Any, other: Any) -> None:
    """Put adapters into a model as PEFT has put them into `other`, if it has: of the same config, with other values.

    Raises ValueError where its config names layers that `model` has not.
    """
    for name, config in other.peft_config.items() if has_adapters(other) else ():
        from peft import inject_adapter_in_model  # it is there: it has made the other

        config = copy.deepcopy(config)
        config.init_lora_weights = True  # and not from the values of the base
        inject_adapter_in_model(config, model, adapter_name=name)


def refuse_adapters(model: nn.Module) -> None:
    """ConfigError for modules of PEFT's in a model that would be trained wrongly, or not at all."""
    for path, module in model.named_modules():
        kind = class_path(module)
        if not kind.startswith("peft."):
            continue
        if kind == LORA_STACK and module.num_experts == 1:
            raise ConfigError(
                f"{path} is a {kind} of {module.parameter_name!r}, which is no stack of experts: not supported. PEFT "
                "makes one of target_parameters: name the layer in target_modules"
            )
        if kind not in _KNOWN | {_HELD}:
            raise ConfigError(f"{path} is a {kind}, which is not supported; {_REMEDY}")
        _refuse_state(path, module)


def _refuse_state(path: str, module: Any) -> None:
    for variant in getattr(module, "lora_variant", {}).values():
        if class_path(variant) != DORA or class_path(module) != LORA_LINEAR:
            raise ConfigError(
                f"{path} is a LoRA layer of a kind of its own ({type(variant).__name__}), which is not supported: of "
                "those DoRA of linear layers is; leave the others out, and use_dora where it adapts embeddings"
            )
    if getattr(module, "merged", False):
        raise ConfigError(
            f"the adapter of {path} is merged into its layer and would not be trained: call unmerge_adapter()"
        )
    if getattr(module, "disable_adapters", False):
        raise ConfigError(
            f"the adapter of {path} is disabled and would not be trained: call enable_adapter_layers(), or leave the "
            "`with model.disable_adapter()` before initialize()"
        )


def with_stack_rules(model: nn.Module, specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Parameters with the rules that adapters of stacks have by those of the stacks [Note: adapters of stacks]."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = dict(specs)
    for path, wrapper in model.named_modules():
        if class_path(wrapper) != LORA_STACK:
            continue
        module: Any = wrapper
        rule = specs[names[id(module.get_param())]].rule
        dim, parts = rule.by_width or (rule.dim, rule.parts)
        transposed = getattr(module.get_base_layer(), "is_transposed", False)  # (experts, in, out)
        outputs = None if dim is None else dim == (2 if transposed else 1)
        first = ShardRule(1, parts) if outputs is False else ShardRule(gradient="partial" if outputs else "complete")
        last = ShardRule(0, parts) if outputs else ShardRule(gradient="complete" if outputs is None else "partial")
        for name in module.lora_A:
            a, b, count = first, last, module.num_experts
            if rule.by_width is not None:
                a = ShardRule(0, units=count, by_width=(first.dim, first.parts))
                b = ShardRule(1, module.r[name], count, by_width=(last.dim, last.parts))
            for weight, own in ((f"{path}.lora_A.{name}.weight", a), (f"{path}.lora_B.{name}.weight", b)):
                found[weight] = replace(specs[weight], rule=own)
    return found
