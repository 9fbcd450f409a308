"""What a part of a check gives back to the tool that prints it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Part(NamedTuple):
    """A table, figures for the JSON file, a summary of a few words, and the aims that were missed."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[object]]
    summary: str
    figures: Mapping[str, Any]
    missed: Sequence[str]
