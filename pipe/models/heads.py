"""A model in; how many attention heads it has, and which of its parameters are cut by them, out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ds_hydra.pipe.adapters import linear_of, plain_name
from ds_hydra.pipe.tensor_parallel import style_of

_QUERY_MODULES = ("q_proj", "q_b_proj", "kv_b_proj", "o_proj", "out_proj", "dense", "query_key_value")
_KEY_VALUE_MODULES = ("k_proj", "v_proj")


class Heads:
    """Heads of queries, and of keys and values; 0 where no module `attends` by the interface."""

    def __init__(self, config: Any, model: Any, seen: Collection[tuple[int, int]], *, attends: bool):
        """As the config says, if layers were `seen` to attend with so many."""
        heads = int(getattr(config, "num_attention_heads", 0) or 0) if attends else 0
        said = heads, int(getattr(config, "num_key_value_heads", None) or heads) if attends else 0
        self.heads, self.kv_heads = said if said in seen or not seen or not heads else min(seen)
        self._model = model
        self._units = dict.fromkeys(_QUERY_MODULES, self.heads) | dict.fromkeys(_KEY_VALUE_MODULES, self.kv_heads)

    def units(self, name: str) -> Mapping[str, int]:
        """Heads by the last part of a module's name, for the parameter of this plain name."""
        return self._units | self._kv_heads_of(name)

    def _kv_heads_of(self, name: str) -> dict[str, int]:
        """Key/value heads of the attention that a parameter is part of, where layers differ in them."""
        attention_path, _, module = name.rpartition(".")[0].rpartition(".")
        if module not in _KEY_VALUE_MODULES:
            return {}
        owner: Any = self._model.get_submodule(attention_path)
        size, keys = getattr(owner, "head_dim", None), linear_of(getattr(owner, "k_proj", owner))
        rows = keys.weight.shape[0] if isinstance(keys, torch.nn.Linear) else 0
        if not isinstance(size, int) or not rows or rows % size:
            return {}
        return dict.fromkeys(_KEY_VALUE_MODULES, rows // size)

    @staticmethod
    def cut(plan: Mapping[str, str], names: Iterable[str], layers: str) -> bool:
        """Whether the plan cuts a layer by heads; `layers` is what the names of their parameters begin with."""
        modules = {plain_name(name).rpartition(".")[0] for name in names if name.startswith(layers)}
        return any(
            style_of(plan, module) == "colwise" and module.rpartition(".")[2] in (*_QUERY_MODULES, *_KEY_VALUE_MODULES)
            for module in modules
        )
