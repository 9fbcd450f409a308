"""What every table of `tools.check_devices` is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """One printed table: its rows, and in words the aims that they miss."""

    title: str
    headers: Sequence[str]
    rows: list[Sequence[object]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    @property
    def figures(self) -> list[dict[str, object]]:
        """The rows as JSON holds them."""
        return [dict(zip(self.headers, row, strict=True)) for row in self.rows]
