"""Hydraulis, which ours builds on, as it was published."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.rivals.hydraulis import HydraulisPlanner
from benchmarks.rivals.proposal import propose_by_program
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.rivals.costs import measured
from ds_hydra.rivals.static import Configuration, planned_by
from tools.systems.cells import Cell

# The strategies of its repository's README, for 32B on 64 GPUs (github.com/lhy101/Hydraulis).
HYDRAULIS_POOL = (
    "4*tp16", "tp16 + 2*tp8pp3", "tp16 + 6*tp8", "tp16 + 12*tp4", "tp8pp3 + 10*tp4", "tp8 + 14*tp4", "8*tp4pp2",
)  # fmt: skip


def hydraulis(cell: Cell) -> Iterator[Configuration]:
    """Hydraulis: Eq. 4 proposes, Algorithm 1 deals out, Eq. 1 packs and chooses the strategy of each step.

    Proposed for the lengths of the very batches that are reported, with c in T(l) and without; for 32B on 64 GPUs also
    the strategies that its authors published. Schemes are the measured ones: it has no CP.
    """
    table = measured(cell)
    pools = [
        (
            text,
            propose_by_program(table, cell.gpus, cell.reported_lengths, cell.context, table.schemes, with_overhead=c),
        )
        for text, c in (("proposed", True), ("proposed without c", False))
    ]
    if (cell.model, cell.gpus) == ("32b", 64):
        pools.append(("its README's", tuple(map(StrategyShape.parse, HYDRAULIS_POOL))))
    for text, strategies in pools:
        yield planned_by(f"{len(strategies)} {text}", table, HydraulisPlanner(table, strategies))
