"""A model that PEFT has adapted in; the model inside, with its adapters in place, out. ConfigError for other adapters.

PEFT's classes are told by their names: it need not be installed where it has made no model. A module of PEFT's that is
not known is refused, since what it does with a weight that lies on several ranks cannot be told.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from ds_hydra.pipe.adapters import LORA_EMBEDDING, LORA_LINEAR, SAVED_WHOLE, class_path, head_of
from ds_hydra.zero_hetero.errors import ConfigError

NAMES_OF_PEFT = "base_model.model."
"""What stands before the names of the base's parameters in a PEFT model."""

_PEFT_MODEL, _MIXED_MODEL = "peft.peft_model.PeftModel", "peft.mixed_model.PeftMixedModel"
_KNOWN = frozenset({LORA_LINEAR, LORA_EMBEDDING, SAVED_WHOLE})
_LORA_STACK = "peft.tuners.lora.layer.ParamWrapper"
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
    names = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "modules_to_save")
    return [module._modules[name] for name in names if name in module._modules] if class_path(module) in _KNOWN else []


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
        if kind == _LORA_STACK:
            raise ConfigError(
                f"{path} is a {kind}: an adapter of the stack {module.parameter_name!r} of its {module.num_experts} "
                "experts, which is not supported. PEFT makes one of target_parameters, and of target_modules that "
                "name an expert's layers, such as up_proj: name others, such as q_proj and o_proj"
            )
        if kind not in _KNOWN:
            raise ConfigError(f"{path} is a {kind}, which is not supported; {_REMEDY}")
        _refuse_state(path, module)


def _refuse_state(path: str, module: Any) -> None:
    for variant in getattr(module, "lora_variant", {}).values():
        raise ConfigError(
            f"{path} is a LoRA layer of a kind of its own ({type(variant).__name__}; DoRA is one), which is not "
            "supported: set use_dora and the like back to what LoraConfig has by default"
        )
    if getattr(module, "merged", False):
        raise ConfigError(
            f"the adapter of {path} is merged into its layer and would not be trained: call unmerge_adapter()"
        )
    if module.disable_adapters:
        raise ConfigError(
            f"the adapter of {path} is disabled and would not be trained: call enable_adapter_layers(), or leave the "
            "`with model.disable_adapter()` before initialize()"
        )
