"""A PEFT model's adapters in; its weights for an inference engine out: the adapters alone, or merged into their layers.

What an adapter adds to a weight is PEFT's own `get_delta_weight`. It reads the adapter's parameters as any script does,
so all ranks call it together, and each gets the values of one bucket at a time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_hydra.pipe.adapters import LORA_EMBEDDING, LORA_LINEAR, SAVED_WHOLE, TOKENS, class_path
from ds_hydra.zero_hetero.errors import ConfigError

_OF_ADAPTER = re.compile(r"\.lora_((embedding_)?[AB]|magnitude_vector)\.")
_SAVED = re.compile(r"\.(original_module|modules_to_save\.(?P<adapter>[^.]+))(?=\.)")
_WITHIN = re.compile(r"\.base_layer(?=\.(weight|bias)$)")


class Merged:
    """Merges the active adapters of a model, one bucket of its weights after the other.

    `base` is the model inside the adapters, `aliases` its names of each parameter. ConfigError for adapters that have
    no merged form.
    """

    def __init__(self, base: Any, aliases: Mapping[str, str]):
        self._modules = dict(base.named_modules())
        if any(class_path(module) == TOKENS for module in self._modules.values()):
            raise ConfigError('rows that are trained by themselves are not merged here: take adapters "alone"')
        for path, module in self._modules.items():
            if any(getattr(module, "lora_bias", {}).values()) and module.get_base_layer().bias is None:
                raise ConfigError(
                    f"the adapter of {path} has a bias and the layer none, so it cannot be merged: take adapters "
                    '"alone"'
                )
        within = {bool(_WITHIN.search(path)): set[str]() for path in ("", ".base_layer.weight")}
        for path, name in aliases.items():
            within[bool(_WITHIN.search(path))].add(name)
        if tied := sorted(within[True] & within[False]):
            raise ConfigError(
                f"{tied[0]} is tied to a layer without its adapter, so the two differ when it is merged: take adapters "
                '"alone", or untie them before initialize()'
            )

    def __call__(self, names: Collection[str], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a bucket by the names that they have without adapters; none where `values` are not given. All
        ranks must call it with the same names."""
        found: dict[str, Tensor] = {}
        for name in names:
            added = self._added(name)
            if (own := self._own_name(name)) is not None and name in values:
                value = values[name]
                for one, magnitude in added:
                    value = value + one.to(value.dtype)
                    if magnitude is not None:
                        value = value * (magnitude.to(value) / value.norm(dim=magnitude.shape.index(1), keepdim=True))
                found[own] = value
        return found

    def _own_name(self, name: str) -> str | None:
        """A parameter's name in the model without adapters; None for one that has no place there."""
        if _OF_ADAPTER.search(name):
            return None
        if saved := _SAVED.search(name):
            wrapper: Any = self._modules[name[: saved.start()]]
            assert class_path(wrapper) == SAVED_WHOLE, "others are refused"
            if saved["adapter"] not in wrapper.active_adapters:
                return None
            return name[: saved.start()] + name[saved.end() :]
        return _WITHIN.sub("", name)

    def _added(self, name: str) -> list[tuple[Tensor, Tensor | None]]:
        """What the active adapters add to a parameter, and the norms that the sum is to have, if any: (rows, 1), or
        (1, columns) of a transposed one."""
        inside = _WITHIN.search(name)
        module: Any = self._modules[name[: inside.start()]] if inside else None
        if inside is None or class_path(module) not in {LORA_LINEAR, LORA_EMBEDDING}:
            return []
        active = [one for one in module.active_adapters if one in module.scaling]
        if inside[1] == "weight":
            magnitudes = getattr(module, "lora_magnitude_vector", {})
            dim = 0 if module.fan_in_fan_out else 1
            norms = [magnitudes[one].weight.detach().unsqueeze(dim) if one in magnitudes else None for one in active]
            return [(module.get_delta_weight(one), norm) for one, norm in zip(active, norms, strict=True)]
        return [(module.lora_B[one].bias * module.scaling[one], None) for one in active if module.lora_bias[one]]


def adapters_alone(
    model: Any, values: Mapping[str, Tensor], aliases: Mapping[str, str], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """What `save_pretrained` of a PEFT model writes, by its names there; `aliases` as `names_with_adapters`. Nothing
    without values."""
    from peft import get_peft_model_state_dict  # it is there: it has made the model

    if not values:
        return
    state = {path: values[name] for path, name in aliases.items()}
    with torch._C.DisableTorchFunctionSubclass():  # it reads no value of the model's own parameters
        found = get_peft_model_state_dict(model, state_dict=state, adapter_name=model.active_adapter)
    for name, value in found.items():
        yield name, value.to(device, dtype)
