"""Predicted times corrected by measured ones, and ranks that are slow. Pure: no torch.

[Note: calibration]
A plan states two times: that of its pipelines, as if all stages were as slow as the slowest, and that of the step, by
which it was chosen. Where links were measured the latter is a simulation of the whole step; where they were not, the
step is predicted here: each schedule is simulated with each stage's own loads, and the step's overhead is added. The
third time, what is expected, is the step's corrected by what earlier steps have shown.

The factor of a scheme is the median of measured / predicted over its last 32 pipelines. It shows drift: a factor of
1.08 after an hour may be a GPU that has become hot. With `cost_correction: "apply"` it scales the table that plans are
made with. The median ignores the odd slow step: of the ratios 1.02, 1.03, 1.01, 2.40 it is 1.025.

[Note: early runs]
A shape's first step is not learnt from: ranks connect, and kernels are loaded. A shape that the first estimate made
dear is never run, and its factor never seen. Until it is, it has the factor of shapes with as many tensor parallel
ranks, or of all. And for two steps after the second correction such a shape counts a tenth less, so it runs if it may
be the best, and a fifth less if none with as many tensor parallel ranks has run: these do not share their errors with
any that have. By costs that are right each of both steps takes a quarter longer at most. Where costs were corrected,
as they are wrong, shapes are tried so three times more, and no error of those that ran is expected of those of other
degrees: if all that ran took 1.2 times what the table has, they count 0.8 of it, and not 0.96, but at least half of
1.2. What was learnt in these steps corrects the costs at once.

[Note: slow ranks]
A cost table may be wrong for a shape, and its error is that of every stage of this kind. So a stage is compared with
the others of its kind in the same step, each by its measured over its predicted time: of 4*tp1 with the ratios 1.1,
1.1, 1.3 and 1.0 the third takes 1.18 times as long as the usual one, the lower median, 1.1. A stage that is alone of
its kind tells nothing. A rank is slow that has been so in three quarters of its last steps: one long step, such as a
save in the background, makes nobody slow. Ranks of one stage wait for each other in it, so all of them are named.

With `cost_correction: "report"` nothing follows from it but a line. With "apply" later plans count with the pace of
each rank that was told, the median over its last steps, and with a new one when that has changed by 5 %: a rank that
has recovered is planned for as any other about as soon as it is told. Predicted times are those of the table as it was
measured, so that a pace that plans count with already changes no ratio. Costs that nobody measured tell nobody slow:
they may be wrong by more for short sequences than for long ones, and one pipeline may always have the long ones.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.shares import MOST, NONE, SlowRanks, pace_of
from ds_hydra.pipe.placement import split_layers
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import placed, weighs
from ds_hydra.pipe.schedules.simulate import simulate_loads
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape
from ds_hydra.plan.simulate import simulate_pipeline, stretch, with_beside
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.nodes import Cluster

_LAST_STEPS, LEAST_STEPS = 12, 8  # steps that are looked at, and the fewest that tell
SLOW = 1.1  # times as long as others
PACE_CHANGE = 0.05  # of a pace, which plans follow; measured times scatter by less
_RECOVERED = 1.0 + 0.5 * (SLOW - 1.0)  # times as long as others: below it a slow rank has recovered


class StageTime(NamedTuple):
    """A stage in a step."""

    kind: Hashable  # equal for stages that cost the same
    ranks: tuple[int, ...]
    predicted_ms: float
    computed_ms: float  # by its slowest rank


class Stragglers:
    """Watches the ranks of a job; `remedy` is what the line on a slow rank ends with. With a `state` it goes on where
    another one was: ValueError, TypeError or KeyError for what is none. The same calls give the same on every rank."""

    def __init__(self, state: Mapping[str, Any] | None = None, remedy: str = "") -> None:
        self._remedy = remedy
        self._ratios: dict[int, deque[float]] = {}  # of each rank, those of its last steps
        self._paces: dict[int, float] = {}  # of those that were told
        if state is not None:
            self._ratios = {int(rank): deque(map(float, seen), maxlen=_LAST_STEPS) for rank, seen in state["ratios"]}
            self._paces = {int(rank): pace_of(pace) for rank, pace in state["paces"]}

    def state(self) -> dict[str, Any]:
        """All that it has seen, as JSON holds it."""
        return {
            "ratios": [[rank, list(seen)] for rank, seen in sorted(self._ratios.items())],
            "paces": [[rank, pace] for rank, pace in sorted(self._paces.items())],
        }

    @property
    def paces(self) -> tuple[tuple[int, float], ...]:
        """The ranks that are slow, each with how many times as long as others it takes, in rank order."""
        return tuple((rank, pace) for rank, pace in sorted(self._paces.items()) if pace > 1.0)

    def observe(self, stages: Iterable[StageTime]) -> list[str]:
        """A step's stages in; what is to be said now out: of ranks that have become slow, or have recovered."""
        kinds: dict[Hashable, list[StageTime]] = {}
        for stage in stages:
            if stage.predicted_ms > 0 and stage.computed_ms > 0:
                kinds.setdefault(stage.kind, []).append(stage)
        lines: list[str] = []
        for alike in (found for found in kinds.values() if len(found) > 1):
            ratios = [stage.computed_ms / stage.predicted_ms for stage in alike]
            usual = sorted(ratios)[(len(ratios) - 1) // 2]
            for stage, ratio in zip(alike, ratios, strict=True):
                lines += self._note(stage.ranks, ratio / usual)
        return lines

    def _note(self, ranks: Sequence[int], ratio: float) -> list[str]:
        slow, recovered = list[int](), list[int]()
        for rank in ranks:
            last = self._ratios.setdefault(rank, deque(maxlen=_LAST_STEPS))
            last.append(ratio)
            if len(last) < LEAST_STEPS:
                continue
            low, high = sorted(last)[len(last) // 4], sorted(last)[3 * len(last) // 4]
            # The upper median: with as many old times as new ones a mean of both would be neither.
            pace = round(min(MOST, max(1.0, sorted(last)[len(last) // 2])), 3)
            if rank not in self._paces and low >= SLOW:
                slow.append(rank)
                self._paces[rank] = pace
            elif rank in self._paces and high < _RECOVERED:
                recovered.append(rank)
                del self._paces[rank]
            elif rank in self._paces and abs(pace / self._paces[rank] - 1.0) > PACE_CHANGE:
                self._paces[rank] = pace
        lines = []
        if slow:
            last = self._ratios[slow[0]]
            lines.append(
                f"{_named(slow)} {sorted(last)[len(last) // 2]:.2f} times as long as others for the same work, in the "
                f"median of {len(last)} steps, and every step waits: look at the clocks and the heat of "
                f"{'its device' if len(slow) == 1 else 'their devices, of which one may hold up the others,'} and at "
                f"what else runs there{self._remedy}"
            )
        if recovered:
            lines.append(f"{_named(recovered)} as fast as others again")
        return lines


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} computes" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} compute"


WINDOW = 32  # observations that a factor remembers
LEAST = 4  # observations that a factor needs before it is used
# A new table throws the plans away that were made ahead, so it comes after steps 4 and 8, when most is wrong, and then
# every 16 steps, and only if a factor has changed by more than its median does by chance: two and a half deviations of
# LEAST pipelines whose times scatter by 3 %. By less, costs that are right would be made wrong.
EARLY: tuple[int, ...] = (4, 8)
APPLY_EVERY, APPLY_CHANGE = 16, 0.05
# Steps after which shapes are tried, all but the first where costs were corrected [Note: early runs]; in how many, and
# what a shape that never ran counts there, of its cost; of one of other degrees, and of theirs.
TRIED_AFTER: tuple[int, ...] = (8, 16, 32, 48)
TRIED_FOR, TRIED, OTHERS, LEAST_OF_OTHERS = 2, 0.9, 0.8, 0.5


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """Milliseconds of one step; `stage_ms[p][s]` is the time that stage s of pipeline p computes.

    Pipelines are listed phase after phase, as in `StepPlan.pipelines`.
    """

    stage_ms: tuple[tuple[float, ...], ...]
    pipeline_ms: tuple[float, ...]
    overhead_ms: float  # of the step, beside each phase's slowest pipeline
    step_ms: float


@dataclass(frozen=True)
class StageLoad:
    """Coefficients of one stage.

    A micro-batch takes `floor` at least. `block_tokens`: one with more tokens than one logit block holds costs `r` more
    per token, as its head is computed twice.
    """

    a: float
    b: float
    c: float
    r: float = 0.0
    block_tokens: int | None = None
    floor: float = 0.0

    def load_ms(self, lengths: Sequence[int], starts: Sequence[int] | None = None) -> float:
        """Forward and backward of one micro-batch of sequences, or of slices that begin at these tokens."""
        tokens = sum(lengths)
        more = self.r if self.block_tokens is not None and tokens > self.block_tokens else 0.0
        squares = sum((p + n) * (p + n) - p * p for n, p in zip(lengths, starts or [0] * len(lengths), strict=True))
        return max(self.floor, self.a * squares + (self.b + more) * tokens + self.c)


@dataclass(frozen=True)
class StepCosts:
    """A step's overhead, which is not in its pipelines: the coefficients of a table's "step", 0 if not measured."""

    update_ms_per_element: float = 0.0
    move_ms_per_byte: float = 0.0
    fixed_ms: float = 0.0

    @classmethod
    def of(cls, measured: Mapping[str, float] | None) -> StepCosts:
        """The "step" of a table file; figures that it does not have are 0."""
        known = dict(measured or {})
        return cls(**{key: float(known.get(key, 0.0)) for key in cls.__dataclass_fields__})

    def ms(self, num_elements: int, moved_bytes: int) -> float:
        """Milliseconds for a rank's number of master elements, and the bytes that it pulls and pushes."""
        return self.fixed_ms + self.update_ms_per_element * num_elements + self.move_ms_per_byte * moved_bytes


class Calibration:
    """Predicts steps and learns from their measured times. The same calls give the same results on every rank."""

    def __init__(
        self,
        table: CostTable,
        num_layers: int,
        found: TableFile | None = None,
        state: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """With a `state` it goes on where another one was. Raises ValueError, TypeError or KeyError for a wrong one."""
        self._table = table
        self._stages = {cost.scheme: stage_loads(cost, num_layers, found) for cost in table.costs}
        self._step = StepCosts.of(None if found is None else found.step)
        self._ratios: dict[ParallelScheme | PipelineShape, deque[float]] = {}
        self._begun: set[ParallelScheme | PipelineShape] = set()
        self._overheads: dict[str, deque[float]] = {}
        self._applied: dict[ParallelScheme | PipelineShape, float] = {}
        if state is not None:
            schemes = {str(scheme): scheme for scheme in self._stages}
            self._ratios = {schemes[name]: _window(seen) for name, seen in state["ratios"].items()}
            self._begun = set(self._ratios)
            self._overheads = {str(name): _window(seen) for name, seen in state["overheads"].items()}
            self._applied = {schemes[name]: _figure(factor) for name, factor in state["applied"].items()}

    def state(self) -> dict[str, dict[str, Any]]:
        """All that it has learnt, as JSON holds it."""
        return {
            "ratios": {str(scheme): list(seen) for scheme, seen in self._ratios.items()},
            "overheads": {strategy: list(seen) for strategy, seen in self._overheads.items()},
            "applied": {str(scheme): factor for scheme, factor in self._applied.items()},
        }

    @property
    def has_learnt(self) -> bool:
        """Whether enough steps were seen for what is corrected by them to be worth telling."""
        return sum(map(len, self._overheads.values())) >= LEAST

    @property
    def factors(self) -> dict[ParallelScheme | PipelineShape, float]:
        """Measured time / time predicted by the original table, for each shape that was seen often enough."""
        return {scheme: median(ratios) for scheme, ratios in self._ratios.items() if len(ratios) >= LEAST}

    def predict(self, plan: StepPlan, num_elements: int = 0, moved_bytes: int = 0) -> StepPrediction:
        """The prediction by the table as it was measured, with no corrections but the slow ranks that the plan counts
        with: of the step the plan's own, if that knows what messages add."""
        stage_ms, pipeline_ms = [], []
        for pipeline in plan.pipelines:
            cost, shares = self._table[pipeline.shape], self._table.shares(pipeline.shape)
            batches = [(one.lengths, one.starts, stretch(one, cost, shares)) for one in pipeline.microbatches]
            loads = [
                [pace * more * stage.load_ms(lengths, starts) for lengths, starts, more in batches]
                for stage, pace in zip(
                    folded(self._stages[pipeline.shape.cost_key], pipeline.shape.parts),
                    pipeline.stage_paces,
                    strict=True,
                )
            ]
            loads[0] = with_beside(loads[0], pipeline.beside_ms)
            stage_ms.append(tuple(sum(row) for row in loads))
            if weighs(pipeline.schedule):
                pipeline_ms.append(simulate_pipeline(pipeline, self._table))
                continue
            known = Batches(pipeline.chain)
            pipeline_ms.append(simulate_loads(placed(pipeline.schedule, known, len(loads)), loads))
        run_ms, overhead = plan.total_ms(pipeline_ms), self._step.ms(num_elements, moved_bytes)
        if plan.messages_ms:
            overhead = max(0.0, plan.step_ms - run_ms)
        step_ms = plan.step_ms if plan.messages_ms else run_ms + overhead
        return StepPrediction(tuple(stage_ms), tuple(pipeline_ms), overhead, step_ms)

    def correct(self, plan: StepPlan, prediction: StepPrediction) -> float:
        """The step's time with the factors and overheads seen so far, in ms."""
        # Until a scheme has a factor of its own, it has that of all together: a machine that is twice as slow as its
        # table says is so with most of them. Overheads likewise.
        factors, usual = self.factors, _median_of_all(self._ratios.values(), 1.0)
        pipelines = [
            ms * factors.get(pipeline.shape.cost_key, usual)
            for ms, pipeline in zip(prediction.pipeline_ms, plan.pipelines, strict=True)
        ]
        seen = self._overheads.get(plan.strategy, ())
        usual = _median_of_all(self._overheads.values(), prediction.overhead_ms)
        return plan.total_ms(pipelines) + (median(seen) if len(seen) >= LEAST else usual)

    def observe(self, plan: StepPlan, prediction: StepPrediction, pipeline_ms: Sequence[float], step_ms: float) -> None:
        """Learn from a step's measured times, but for those of shapes that run for the first time."""
        for pipeline, predicted, measured in zip(plan.pipelines, prediction.pipeline_ms, pipeline_ms, strict=True):
            if predicted > 0 and measured > 0 and pipeline.shape.cost_key in self._begun:
                self._ratios.setdefault(pipeline.shape.cost_key, deque(maxlen=WINDOW)).append(measured / predicted)
        self._begun |= {pipeline.shape.cost_key for pipeline in plan.pipelines if pipeline.microbatches}
        overhead = max(0.0, step_ms - plan.total_ms(pipeline_ms))
        self._overheads.setdefault(plan.strategy, deque(maxlen=WINDOW)).append(overhead)

    def corrected(self, step: int) -> Factors | None:
        """Of each row of the table, after EARLY steps, every APPLY_EVERY and when shapes were tried, if a factor has
        changed; else None.

        It is computed from figures that all ranks share, so all ranks get the same.
        """
        tried = step - TRIED_FOR - 1 in TRIED_AFTER  # those steps are over, as they begin one after next
        if step not in EARLY and not tried and (step == 0 or step % APPLY_EVERY):
            return None
        seen, before = {scheme: median(ratios) for scheme, ratios in self._ratios.items()}, self.in_force
        moved = {scheme: factor for scheme, factor in seen.items() if self._has_moved(scheme, factor / before[scheme])}
        if not moved:
            return None
        self._applied.update(moved)
        return self.in_force

    def _has_moved(self, scheme: ParallelScheme | PipelineShape, change: float) -> bool:
        """Whether a factor is so many times the one in force by more than chance: by 5 % of 4 observations, by 2.5 % of
        16 or more."""
        return abs(change - 1.0) > APPLY_CHANGE * max(0.5, math.sqrt(LEAST / len(self._ratios[scheme])))

    @property
    def in_force(self) -> Factors:
        """The factors that the latest correction had, of each row of the table."""
        return self._of_rows(trying=False)

    def tried(self, step: int) -> Factors | None:
        """The latest factors, less for shapes that never ran, after TRIED_AFTER steps; None after others, or where all
        have run [Note: early runs]."""
        after = TRIED_AFTER if self._applied else TRIED_AFTER[:1]
        if step not in after or all(cost.scheme in self._ratios for cost in self._table.costs):
            return None
        return self._of_rows(trying=True)

    def _of_rows(self, *, trying: bool) -> Factors:
        """What has no factor has that of its like, and less if it never ran where such shapes are tried."""
        of_tp: dict[int, list[float]] = {}
        for scheme, factor in self._applied.items():
            of_tp.setdefault(_tp(scheme), []).append(factor)
        usual = median(self._applied.values()) if self._applied else 1.0

        def factor_of(scheme: ParallelScheme | PipelineShape) -> float:
            known = self._applied.get(scheme) or median(of_tp.get(_tp(scheme), (usual,)))
            if not trying or scheme in self._ratios:
                return known
            alike = any(_tp(scheme) == _tp(ran) for ran in self._ratios)
            return TRIED * known if alike else max(OTHERS * min(known, 1.0), LEAST_OF_OTHERS * known)

        return {cost.scheme: factor_of(cost.scheme) for cost in self._table.costs}


Factors = Mapping[ParallelScheme | PipelineShape, float]
"""What the costs of a table's rows are multiplied by."""


class Correction(NamedTuple):
    """Costs that plans are made by from step `first` on, counted from 0."""

    first: int
    factors: Factors
    slow: tuple[tuple[int, float], ...] = ()  # ranks, each with its pace

    def of(self, table: CostTable, cluster: Cluster | None) -> CostTable:
        """The table, as it was measured, with this correction; `cluster` of a job with devices of several classes."""
        costs = tuple(_scaled(cost, self.factors.get(cost.scheme, 1.0)) for cost in table.costs)
        return CostTable(costs, table.source, SlowRanks(self.slow, cluster) if self.slow else NONE)

    def record(self) -> list[Any]:
        """As JSON holds it; `of_record` is the inverse."""
        return [self.first, {str(scheme): factor for scheme, factor in self.factors.items()}, list(self.slow)]

    @classmethod
    def of_record(cls, record: Any, table: CostTable) -> Correction:
        """ValueError, TypeError or KeyError for what is none of this table."""
        schemes = {str(cost.scheme): cost.scheme for cost in table.costs}
        first, factors, slow = record
        return cls(
            int(first),
            {schemes[name]: _figure(factor) for name, factor in factors.items()},
            tuple((int(rank), pace_of(pace)) for rank, pace in slow),
        )


def read_corrections(path: str, table: CostTable) -> dict[int, tuple[Correction, ...]]:
    """The corrections of a run by the step, counted from 1, that they were found after, of its steps file; of a step
    that stands there several times the last ones. ConfigError for a file that holds none of this table's."""
    found: dict[int, tuple[Correction, ...]] = {}
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for line in lines:
                step = json.loads(line)
                found[step["step"]] = tuple(Correction.of_record(one, table) for one in step["new_costs"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"hydra.cost_correction names {path}, whose corrections of costs cannot be read ({type(error).__name__}: "
            f"{error}): name the steps_file of a run of this job, with the same cost table"
        ) from None
    return {step: ones for step, ones in found.items() if ones}


def _tp(scheme: ParallelScheme | PipelineShape) -> int:
    return scheme.tp if isinstance(scheme, ParallelScheme) else scheme.stages[0].tp


def _window(seen: Iterable[Any]) -> deque[float]:
    return deque(map(_figure, seen), maxlen=WINDOW)


def _figure(value: Any) -> float:
    """The value; ValueError or TypeError unless it is a finite number from 0 on."""
    if isinstance(value, bool | str) or not 0.0 <= float(value) < math.inf:
        raise ValueError(f"{str(value)[:40]!r} is no time")
    return float(value)


def _median_of_all(seen: Iterable[Iterable[float]], otherwise: float) -> float:
    every = list(chain.from_iterable(seen))
    return median(every) if len(every) >= LEAST else otherwise


def _scaled(cost: SchemeCost, factor: float) -> SchemeCost:
    return replace(cost, a=cost.a * factor, b=cost.b * factor, c=cost.c * factor, floor=cost.floor * factor)


def stage_loads(cost: SchemeCost, num_layers: int, found: TableFile | None) -> tuple[StageLoad, ...]:
    """One cost per stage: its own if that was measured, otherwise a middle stage's, scaled by the number of layers."""
    # The first stage has the embeddings and the last the head, so those two are measured. Of the stages between, which
    # differ in their number of layers only, one is measured: 7 layers in 21 ms make 6 layers 18 ms.
    pp = cost.scheme.pp
    measured: Mapping[str, object] = (found.measured or {}).get(str(cost.scheme), {}) if found is not None else {}
    rows = measured.get("stages")
    if not isinstance(rows, list) or pp > num_layers:
        shares = cost.stages or (1.0,) * pp
        return tuple(StageLoad(x * cost.a, x * cost.b, x * cost.c, floor=x * cost.floor) for x in shares)
    known = {row["index"]: row for row in rows}
    counts = split_layers(num_layers, pp)
    between = [index for index in known if 0 < index < pp - 1]
    stages = []
    for index in range(pp):
        source = index if index in known else (between or [0])[0]
        row = known[source]
        share = counts[index] / row["num_layers"] if source != index else 1.0
        a, b, c, r, floor = (share * float(row["fit"].get(name, 0.0)) for name in ("a", "b", "c", "r", "floor"))
        stages.append(StageLoad(a, b, c, r, row.get("chunk_tokens"), floor))
    return tuple(stages)


def folded(loads: tuple[StageLoad, ...], parts: int) -> tuple[StageLoad, ...]:
    """The same stages' costs where each holds so many ranges of layers [Note: virtual stages].

    In a V the first stage has the head too, which costs far more than embeddings, and the last one has neither: each
    computes about what the other does where a stage holds one range.
    """
    return loads if parts == 1 or len(loads) == 1 else (loads[-1], *loads[1:-1], loads[0])
