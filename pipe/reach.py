"""Which tokens before it a token sees. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Reach(NamedTuple):
    """Which tokens before it a token sees: all; with a window, which counts the token itself, those in it; with chunks
    of so many tokens, counted from the sequence's first, those of its own [Note: reach]."""

    window: int | None = None
    chunk: int | None = None

    def first(self, start: int) -> int:
        """The first token that one at `start` sees."""
        if self.chunk is not None:
            return start // self.chunk * self.chunk
        return 0 if self.window is None else max(0, start - self.window + 1)

    @property
    def most(self) -> int | None:
        """Tokens before it that a token sees at most; None: any number."""
        size = self.chunk or self.window
        return None if size is None else size - 1


ALL = Reach()
