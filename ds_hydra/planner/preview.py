"""Costs, strategies and lengths in; the plans that a training run would make, in figures, out. Pure.

`ds-hydra preview` prints these figures; nothing here prints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.data.length_sources import sample_batches
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.phase import parse_phases
from ds_hydra.planner.kernels.arrays import Floats, Ints
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.phased import PhasedPlanner
from ds_hydra.planner.selection import Planner
from ds_hydra.zero_hetero.errors import PlanError


@dataclass(frozen=True)
class Preview:
    """Figures of the previewed steps; times in ms, one entry per step."""

    wins: dict[str, int]  # strategy: in how many steps it was planned
    step_ms: Floats  # simulated
    gaps: Floats  # how far above its lower bound each step is: 0.02 is 2 %
    balance: Floats  # slowest over mean pipeline
    homogeneous: str | None  # the best strategy of one scheme
    homogeneous_ms: Floats  # its two-stage assignment
    packed_full_ms: Floats  # the same strategy, batches packed to MaxLen and dealt out in turn
    phased_ms: dict[str, Floats]  # rivals of several phases, such as "4*tp1 then tp4"


def preview_steps(
    cost_table: CostTable,
    strategies: Sequence[StrategyShape],
    lengths: Sequence[int],
    tokens_per_step: int,
    context_length: int,
    steps: int,
    options: PlannerOptions,
    phased: Sequence[str] = (),
) -> Preview:
    """Plan `steps` random batches of the data with these strategies, with the best homogeneous one, and with the phases
    that `phased` names."""
    # Batches are drawn by another seed than the one that strategies were proposed with. Measured on the batches that
    # they were chosen for, they would look better than they are.
    planner = Planner(cost_table, strategies, options)
    batches = [
        batch.tolist() for batch in sample_batches(lengths, tokens_per_step, steps, options.seed + 1, context_length)
    ]
    plans = [planner.plan(step, range(len(batch)), batch) for step, batch in enumerate(batches)]
    best, two_stage = _best_homogeneous(cost_table, planner.num_ranks, batches, options)
    full: list[float] = []
    if best is not None:
        kind, number = cost_table[best.pipelines[0]], len(best.pipelines)
        full = [pack_full_ms(kind, number, batch) for batch in batches]
    return Preview(
        dict(Counter(plan.strategy for plan in plans).most_common()),
        np.array([plan.predicted_ms for plan in plans]),
        np.array([plan.gap for plan in plans]),
        np.array([plan.balance for plan in plans]),
        None if best is None else str(best),
        two_stage,
        np.array(full),
        {text: _phased(cost_table, text, planner.num_ranks, batches, options) for text in phased},
    )


def _phased(
    table: CostTable, text: str, num_ranks: int, batches: Sequence[list[int]], options: PlannerOptions
) -> Floats:
    """Step times of the batches in the phases that a text names."""
    phases = parse_phases(text)
    used = {shape.num_ranks for shape in phases}
    if used != {num_ranks}:
        raise PlanError(f"the phases of {text!r} use {used.pop()} ranks but the strategies {num_ranks}; use as many")
    planner = PhasedPlanner(table, phases, options)
    return np.array([planner.plan(0, range(len(batch)), batch).predicted_ms for batch in batches])


def _best_homogeneous(
    table: CostTable, num_ranks: int, batches: Sequence[list[int]], options: PlannerOptions
) -> tuple[StrategyShape | None, Floats]:
    """The strategy of one scheme with the least mean planned time, and its times; none if none holds every batch."""
    best: StrategyShape | None = None
    times = np.empty(0)
    for scheme in table.schemes:
        if num_ranks % scheme.num_ranks:
            continue
        strategy = StrategyShape.of([scheme] * (num_ranks // scheme.num_ranks))
        planner = Planner(table, [strategy], options)
        try:
            # The planner dispatches and packs for this strategy as well as it can, so the gain that is shown is that of
            # mixing and changing schemes, and not of a poorly planned rival.
            found = np.array([planner.plan(0, range(len(batch)), batch).predicted_ms for batch in batches])
        except PlanError:
            continue
        if best is None or found.mean() < times.mean():
            best, times = strategy, found
    return best, times


def pack_full_ms(cost: SchemeCost, pipelines: int, lengths: Sequence[int]) -> float:
    """Step time of equal pipelines when sequences are packed to MaxLen, first fit decreasing, and dealt out in turn.

    This is what most trainers do: with MaxLen 100 the lengths 70, 60, 40, 30 become the rows (70 30) and (60 40), and
    of two pipelines each gets one.
    """
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        for held in bins:
            if sum(held) + length <= cost.max_length:
                held.append(length)
                break
        else:
            bins.append([length])
    loads = [cost.load_ms(held) for held in bins]
    return max(cost.pipeline_ms(loads[first::pipelines]) for first in range(pipelines))


def length_histogram(lengths: Ints, context_length: int) -> list[tuple[int, int, int]]:
    """(longest length, sequences, tokens) of length bins that double in length, up to the context."""
    rows = []
    low, high = 0, 64
    while low < context_length:
        high = min(high, context_length)
        inside = lengths[(lengths > low) & (lengths <= high)]
        rows.append((high, len(inside), int(inside.sum())))
        low, high = high, high * 2
    return rows
