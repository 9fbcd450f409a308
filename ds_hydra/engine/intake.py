"""What a script passes to `train_batch` in; its share of each step out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ds_hydra.data.stream import is_stream


class Intake:
    """Takes the share of each step from what a script passes: the share itself, or an iterator or loader of shares."""

    def __init__(self) -> None:
        self._loader: Any = None
        self._iterator: Iterator[Any] = iter(())

    def take(self, handed: Any) -> Any:
        """The share of the next step. Raises StopIteration when an iterator has none left.

        A loader, which can be iterated but not indexed, is iterated again when it ends, as long as the script passes
        the same one.
        """
        if hasattr(handed, "__next__"):
            return next(handed)
        if not is_stream(handed):
            return handed
        if handed is not self._loader:
            self._loader, self._iterator = handed, iter(handed)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(handed)
            return next(self._iterator)
