"""Part one: steps of a large model on measured costs, as a fixed layout takes them and as ds-hydra does.

The figures are shipped, as computing them takes minutes; `python -m tools.check_gains` says whether they are still what
is computed, and writes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from ds_hydra.commands.preview import Previewed, comparison, parse_arguments, previewed, print_bars
from ds_hydra.commands.shipped import FOLDER

FIGURES = FOLDER / "demo_gains.json"
OPTIONS = ("--cost-table", "a800-32b", "--gpus", "64", "--tokens", "200000", "--context", "32768", "--tp-across-nodes")


class Gain(NamedTuple):
    """One row of README's table, times in ms: means of 60 steps, and ours of the first few by itself."""

    lengths: str  # in words
    source: str  # as `ds-hydra preview --lengths` takes it
    fixed: str
    strategies: tuple[str, ...]
    full_ms: float  # under the fixed layout, packed full and dealt out in turn
    balanced_ms: float  # under the same, sequences assigned by ds-hydra
    ours_ms: float
    first_ms: tuple[float, ...]

    @property
    def gain(self) -> float:
        """Over the fixed layout with balanced sequences, so that it is what mixing layouts brings."""
        return self.balanced_ms / self.ours_ms

    @property
    def bars(self) -> list[tuple[str, float]]:
        """What `print_bars` takes."""
        packed = f"{self.fixed} in every step, packed full and dealt out in turn"
        balanced = f"{self.fixed} in every step, sequences balanced as well as they can be"
        return [
            (packed, self.full_ms),
            (balanced, self.balanced_ms),
            ("ds-hydra: another mix in each step", self.ours_ms),
        ]


def shipped_gains() -> list[Gain]:
    """The rows that come with the package."""
    return [
        Gain(**{**row, "strategies": tuple(row["strategies"]), "first_ms": tuple(row["first_ms"])})
        for row in json.loads(FIGURES.read_text())
    ]


def computed(lengths: str, source: str, strategies: Sequence[str] = (), steps: int = 60, first: int = 2) -> Gain:
    """The same, computed: by these strategies, or by those that are proposed. ConfigError for bad lengths."""
    named = ("--strategies", *strategies) if strategies else ()
    arguments = (*OPTIONS, "--lengths", source, "--steps", str(steps), *named)
    done: Previewed = previewed(parse_arguments(arguments, "ds-hydra preview"), told_lengths=False)
    preview = done.preview
    assert preview.fixed is not None, "a fixed layout holds the context"
    full, balanced, ours = (ms for _, ms in comparison(preview))
    return Gain(
        lengths, source, preview.fixed, tuple(map(str, done.strategies)), full, balanced, ours,
        tuple(preview.step_ms[:first].tolist()),
    )  # fmt: skip


def print_gain(gain: Gain, how: str) -> dict[str, Any]:
    """Print the comparison; returns mean ms of a step by what runs it."""
    print(f"\n1. LLaMA 32B on 64 A800 GPUs, simulated steps of 200,000 tokens, context 32K: {how}")
    print(f"   Lengths of {gain.lengths}; costs as published, 25 GB/s for each GPU")
    print("   between nodes. The fixed layout is the fastest of TP and PP that holds every sequence.\n")
    print_bars(gain.bars)
    return {**dict(gain.bars), "gain": gain.gain}
