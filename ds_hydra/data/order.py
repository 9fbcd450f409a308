"""What the steps of a job are drawn by: map-style data in a shuffled order, or a stream. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

RESUME_WEIGHTS = (
    'begin anew with its weights alone: "hydra": {"checkpoint": {"resume": "weights"}}, or '
    "load_checkpoint(load_module_only=True)"
)
"""What to do where a checkpoint's place, schedule or optimizer is of another job: the end of an error's sentence."""


class Order(Protocol):
    """The sequences of each step, counted from 0, and places to go on from."""

    @property
    def known_to_all(self) -> bool:
        """Whether every rank knows each step's sequences; else rank 0 alone does, and only it may ask for them."""
        ...

    def batch(self, step: int) -> tuple[int, ...]:
        """Ids of the sequences of `step`."""
        ...

    def batch_lengths(self, step: int) -> tuple[int, ...]:
        """Tokens of each of them."""
        ...

    def ready(self, step: int) -> bool:
        """Whether `batch(step)` returns at once."""
        ...

    def saved(self, step: int) -> dict[str, Any]:
        """Where `step` begins, as JSON."""
        ...

    def check_saved(self, record: Mapping[str, Any]) -> None:
        """Raise unless `restore` can go on from this: ConfigError for a place in other data,
        CheckpointError for damage."""
        ...

    def restore(self, record: Mapping[str, Any]) -> None:
        """Go on from a saved place."""
        ...

    def begin_at(self, step: int) -> None:
        """Go on with `step` from no saved place, about where as many steps would have come to."""
        ...

    def close(self) -> None:
        """Stop what reads ahead."""
        ...
