"""What an edit is: a name in, what a script does to its job out, and whether it can still be done between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from transformers.models.llama import modeling_llama

from tools.edits.job import Edit, Job


class Kind(NamedTuple):
    """An edit; `when` it is made: before `initialize`, after it, or either; and of which model."""

    edit: Edit
    when: tuple[str, ...] = ("before", "after")
    family: str = "llama"


BEFORE = ("before",)
KINDS: dict[str, Kind] = {}
SAME = {"padding at the end"}  # those that leave the plain job as it was


def kind(*when: str, family: str = "llama") -> Callable[[Edit], Edit]:
    """Enter a function as an edit, by its name."""

    def enter(edit: Edit) -> Edit:
        KINDS[edit.__name__.replace("_", " ")] = Kind(edit, when or ("before", "after"), family)
        return edit

    return enter


def layers_of(job: Job) -> Any:
    return job.model.model.layers


def before_mlps(job: Job, change: Callable[[Tensor], Tensor], layers: tuple[int, ...] = (1,)) -> None:
    """Let the MLPs of these layers see what `change` makes of their input."""

    class Changed(modeling_llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(change(x))

    for number in layers:
        layers_of(job)[number].mlp.__class__ = Changed
