"""A plan whose step takes longer than was expected in, one whose pulls are hidden better out. Pure: no torch.

[Note: light first micro-batches]
A pipeline of one stage pulls its layers during its first forward, a third of the first micro-batch's load. To the
search such a pipeline takes the sum of its loads, and what pulls add to a step is the same for all plans. Mostly it is.
But a sequence that fills a row by itself may have only a light micro-batch beside it. Pulls of 164 ms, and loads in ms:

                   loads          pulls beyond the first forward     in all
  pipeline 0       258, 2159      164 - 86 = 78                      2495
  the others       1200, 1210     none                               2410

The simulated step tells: 78 ms more than expected. So pulls take what explains them in pipeline 0, and sequences move
from the slowest pipeline to others, one after the other, for as long as the slower of the two gets sooner done.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.schedules.simulate import SHARES
from ds_hydra.plan.simulate import has_formula, simulated_ms
from ds_hydra.plan.step_plan import Phase, PipelinePlan, StepPlan
from ds_hydra.planner.pipelines import longest_outside, whole_pipeline

_FORWARD = SHARES["forward"]
_MOVES, _TARGETS = 100, 3  # at most; the pipelines that are sooner done than others, to which sequences move
_FEW = 60  # sequences of a pipeline, in the mean: with more each move takes long, and hardly a micro-batch is light
_Bins = tuple[tuple[int, ...], ...]  # sequences of each micro-batch, by their positions in the step's batch


@dataclass(frozen=True)
class _Pipeline:
    """A pipeline of one stage that runs whole sequences. Work (ms, without c) and tokens go by position."""

    cost: SchemeCost
    bins: _Bins
    work: Sequence[float]
    tokens: Sequence[int]

    def ms(self, pulls_ms: float) -> float:
        """What it takes, with what pulls of so many ms add."""
        computing, hiding = self._times()
        return computing + max(0.0, pulls_ms - hiding)

    def pulls_ms(self, taken_ms: float) -> float:
        """The pulls with which it takes so long."""
        computing, hiding = self._times()
        return taken_ms - computing + hiding

    def _times(self) -> tuple[float, float]:
        """Of all its micro-batches, and of the first forward, behind which pulls hide."""
        loads = [load for load, _ in longest_outside([(self._load(held), held) for held in self.bins])]
        return math.fsum(loads), _FORWARD * loads[0] if loads else 0.0

    def _load(self, held: Sequence[int]) -> float:
        return self.cost.packed_ms([self.work[i] for i in held])

    def without(self, sequence: int) -> _Pipeline:
        """The same with a sequence less."""
        bins = (tuple(i for i in held if i != sequence) for held in self.bins)
        return replace(self, bins=tuple(held for held in bins if held))

    def with_more(self, sequence: int) -> Iterator[_Pipeline]:
        """The same with a sequence more, in each micro-batch that has room for it, or in one of its own."""
        for number, held in enumerate(self.bins):
            if sum(self.tokens[i] for i in (*held, sequence)) <= self.cost.max_length:
                yield replace(self, bins=(*self.bins[:number], (*held, sequence), *self.bins[number + 1 :]))
        if self.tokens[sequence] <= self.cost.max_length:
            yield replace(self, bins=(*self.bins, (sequence,)))


def with_hidden_pulls(plan: StepPlan, table: CostTable, taken_ms: float) -> StepPlan | None:
    """The plan with sequences moved so that pulls are hidden, where its pipelines take so many ms with those; None
    where no move helps, or none is known to [Note: light first micro-batches]."""
    if len(plan.phases) > 1 or len(plan.lengths) > _FEW * len(plan.pipelines):
        return None
    held = plan.pipelines
    if any(pipeline.beside_ms for pipeline in held):
        return None  # what moves of sequences make of loads is not counted here
    own = {at: _of(one, table, plan.lengths) for at, one in enumerate(held) if one.shape.pp == 1 and has_formula(one)}
    if len(own) < 2:
        return None
    moved = dict(own)
    pulls_ms = min(one.pulls_ms(taken_ms) for one in own.values())
    taken = {at: one.ms(pulls_ms) for at, one in own.items()}
    for _ in range(_MOVES):
        by_time = sorted(taken, key=lambda at: (taken[at], at))
        slowest, targets = by_time[-1], by_time[: min(_TARGETS, len(by_time) - 1)]
        found = _best_move(moved, slowest, targets, pulls_ms)
        if found is None or found[0] >= taken[slowest]:
            break
        moved |= found[1]
        taken |= {at: one.ms(pulls_ms) for at, one in found[1].items()}
    if moved == own:
        return None
    phase = Phase(tuple(_planned(one, moved[at]) if at in moved else one for at, one in enumerate(held)))
    return replace(plan, phases=(phase,), predicted_ms=simulated_ms((phase,), table))


def _best_move(
    pipelines: dict[int, _Pipeline], slowest: int, targets: Sequence[int], pulls_ms: float
) -> tuple[float, dict[int, _Pipeline]] | None:
    """The move of a sequence to one of the targets after which the slower of the two takes least, and what that is."""
    best: tuple[float, dict[int, _Pipeline]] | None = None
    tried: set[int] = set()  # sequences of as many tokens are as good
    for sequence in (i for held in pipelines[slowest].bins for i in held):
        tokens = pipelines[slowest].tokens[sequence]
        if tokens in tried:
            continue
        tried.add(tokens)
        rest = pipelines[slowest].without(sequence)
        rest_ms = rest.ms(pulls_ms)
        for target in targets if best is None or rest_ms < best[0] else ():
            for more in pipelines[target].with_more(sequence):
                ms = max(rest_ms, more.ms(pulls_ms))
                if best is None or ms < best[0]:
                    best = ms, {slowest: rest, target: more}
    return best


def _of(planned: PipelinePlan, table: CostTable, tokens: Sequence[int]) -> _Pipeline:
    cost = table.paced(planned.shape, planned.paces)
    bins = tuple(tuple(sequence for sequence, _, _ in batch.spans) for batch in planned.microbatches)
    return _Pipeline(cost, bins, cost.sequence_ms(tokens).tolist(), tokens)


def _planned(before: PipelinePlan, found: _Pipeline) -> PipelinePlan:
    return whole_pipeline(before.shape, found.cost, found.bins, work=found.work, tokens=found.tokens).plan
