"""A run of a model by packed attention in; which modules attended, and what follows for slices, out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

from ds_hydra.pipe.contexts import Context, Contexts


class Attended(Contexts):
    """Notes which modules attend, and with how many heads."""

    def __init__(self, total: int):
        super().__init__(total)
        self.calls: Counter[Hashable] = Counter()
        self.heads: set[tuple[int, int]] = set()

    def note_heads(self, heads: int, kv_heads: int) -> None:
        self.heads.add((heads, kv_heads))

    def of(self, module: Hashable) -> Context:
        self.calls[module] += 1
        return super().of(module)


class Where:
    """The modules of a model that attended, by their paths."""

    def __init__(self, attended: Attended, model: Any, layers_path: str):
        names: dict[Hashable, str] = {module: name for name, module in model.named_modules()}
        self._calls = {names.get(module, type(module).__name__): n for module, n in attended.calls.items()}
        layers = enumerate(model.get_submodule(layers_path))
        self.unattended = frozenset(
            index for index, layer in layers if not any(module in attended.calls for module in layer.modules())
        )
        """Layers in which no module did."""

    @property
    def no_slices(self) -> str:
        """Why the tokens of a slice would not see those before it; empty if they would, as far as a trace tells.

        A context is that of a module, so each may attend once [Note: contexts]. A layer that does not attend may look
        at other tokens in ways that are not known here, such as a recurrent state.
        """
        if self.attends_twice or not self.unattended:
            return self.attends_twice
        return f"layer {min(self.unattended)} does not attend by Hugging Face's attention interface"

    @property
    def attends_twice(self) -> str:
        """Which module does, in a sentence; empty: none."""
        twice = ((name, count) for name, count in self._calls.items() if count > 1)
        return next((f"{name} attends {count} times in one forward" for name, count in twice), "")
