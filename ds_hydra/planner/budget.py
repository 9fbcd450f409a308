"""Costs, candidates and a typical batch in, how much each step's planning may try, in counts, out. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner.chunked_space import is_chunked
from ds_hydra.planner.kernels.arrays import Ints

_TRIES = 1800  # of a step's chunked search for each unit of effort, and
_TRIES_EACH = 300  # as many more for each pipeline of
_COUNTED = 96  # at most: more of them differ little
_PROGRAMS = 3  # at most, and one always
_NODES = 20
_SHORT = 1024  # tokens
_SHARE = 0.1  # of the shortest step that typical batches have: what its programs may take
# CPU ms of one program of so many rows and 30 bins with its 20 nodes: rough figures, of trials on a busy machine. They
# are part of the planner, not of a machine: budgets are the same everywhere.
_PROGRAM_MS = ((3, 8.0), (6, 20.0), (12, 45.0), (20, 75.0), (40, 150.0))


class PlanBudget(NamedTuple):
    """Counts that bound the planning of one step, whatever the machine."""

    tries: int  # simulations of the chunked search; 0: it dispatches and cuts once
    programs: int  # that HiGHS solves to compose strategies
    nodes: int  # of each program


def budget_of(
    table: CostTable, strategies: Sequence[StrategyShape], effort: int, typical: Sequence[int] = ()
) -> PlanBudget:
    """The budget of a job's steps; `typical` are the lengths in tokens of a batch, none: the step's time is not looked
    at.

    It is sized once, before step 0, by what is the same on every machine, and a checkpoint keeps it: so a restart with
    other costs plans by it too.
    """
    chunked = [len(strategy.pipelines) for strategy in strategies if is_chunked(strategy)]
    tries = effort * (_TRIES + _TRIES_EACH * min(max(chunked), _COUNTED)) if chunked else 0
    programs = _PROGRAMS
    if len(typical):
        shapes = {pipeline for strategy in strategies for pipeline in strategy.pipelines}
        program_ms = next((ms for rows, ms in _PROGRAM_MS if len(shapes) <= rows), _PROGRAM_MS[-1][1])
        programs = int(_SHARE * _shortest_ms(table, strategies, typical) / program_ms)
    return PlanBudget(tries, min(max(programs, 1), _PROGRAMS), _NODES)


def typical_batch(lengths: Sequence[int] | Ints, tokens_per_step: int) -> list[int]:
    """Lengths at even ranks, as many as a step has of them; of unknown ones, some short ones."""
    known = np.sort(np.asarray(lengths, dtype=np.int64))
    known = known[known > 0]
    if not len(known):
        return [min(_SHORT, tokens_per_step)] * max(1, tokens_per_step // _SHORT)
    count = max(1, round(tokens_per_step / float(known.mean())))
    return [int(known[int((rank + 0.5) * len(known) / count)]) for rank in range(count)]


def _shortest_ms(table: CostTable, strategies: Sequence[StrategyShape], typical: Sequence[int]) -> float:
    """A step in which each sequence takes least of the ranks, and none of them waits (ms)."""
    costs = [table[key] for key in dict.fromkeys(p.cost_key for one in strategies for p in one.pipelines)]
    tokens = np.array(typical, dtype=np.int64)
    ranks_ms = [
        np.where(tokens <= cost.max_length, cost.scheme.num_ranks * cost.sequence_ms(tokens), np.inf) for cost in costs
    ]
    least = np.min(ranks_ms, axis=0)
    return float(least[np.isfinite(least)].sum()) / strategies[0].num_ranks
