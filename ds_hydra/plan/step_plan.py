"""The step plan: all that one step does, as one frozen record that every rank holds alike. Pure: no torch.

A step has phases, which follow each other and add up their gradients; a phase has pipelines, which share the ranks; a
pipeline runs micro-batches; a micro-batch holds spans of sequences (`phase`).

[Note: plan in JSON]
A phase is a list of pipelines, `{"shape": "tp2pp4", "microbatches": [...], "predicted_ms": 12.5}`, where the shape is
text as `PipelineShape` prints it. A micro-batch is a list of its spans: a whole sequence is its position in the step's
batch, 7; a slice of one is `[7, 0, 4096]`. A micro-batch that recomputes is `{"spans": [...], "recompute": 0.5}`, and
one that takes something of the first stage besides has `"beside_us": 1200`. A pipeline with slow ranks has "paces"
besides, one for each stage, `[1.0, 1.0, 1.25, 1.0]`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice, pairwise, repeat
from pathlib import Path
from typing import NamedTuple

from ds_hydra.costs.shares import Paces, checked
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.files import parse_json


class Span(NamedTuple):
    """Tokens start, start + 1, ..., stop - 1 of the sequence at a position in the step's batch (not a dataset id)."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Spans that are packed together in that order, and the share of its layers that the backward computes again.

    `recompute` 0 keeps all activations from forward to backward; 1 keeps no more than the input of every layer. Every
    stage rounds it up to whole layers of its own, so that it keeps no more than the share says. `beside_us` is what the
    first stage takes for it besides its layers, in microseconds, forward and backward [Note: loads].
    """

    spans: tuple[Span, ...]
    recompute: float = 0.0
    beside_us: int = 0

    @classmethod
    def of_whole(cls, sequences: Sequence[int], lengths: Sequence[int]) -> MicroBatchPlan:
        """Whole sequences, by their positions in the step's batch, which has these lengths."""
        return cls(tuple([Span(position, 0, lengths[position]) for position in sequences]))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each span."""
        return tuple([stop - start for _, start, stop in self.spans])

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each span begins in its sequence; 0 for a whole one."""
        return tuple([start for _, start, _ in self.spans])

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """What one pipeline runs in a phase: its micro-batches in the order given. None at all is allowed.

    `predicted_ms` is its time by the formula that the search works with, and `paces` the slow ranks that it counts
    with: plans are made for the devices as they are.
    """

    shape: PipelineShape
    microbatches: tuple[MicroBatchPlan, ...]
    predicted_ms: float
    paces: Paces = ()

    @property
    def schedule(self) -> str:
        """Name of the order in which its stages run forwards and backwards."""
        return self.shape.schedule

    @property
    def stage_paces(self) -> Paces:
        """How many times as long as its costs say each stage takes."""
        return self.paces or (1.0,) * self.shape.pp

    @property
    def beside_ms(self) -> tuple[float, ...]:
        """What its first stage takes for each micro-batch besides its layers; empty: nothing for any."""
        if not any(batch.beside_us for batch in self.microbatches):
            return ()
        return tuple(self.stage_paces[0] * batch.beside_us / 1e3 for batch in self.microbatches)

    @property
    def in_slices(self) -> bool:
        """Whether it runs a slice that follows another one of its sequence."""
        return any(start for batch in self.microbatches for _, start, _ in batch.spans)

    @property
    def recomputes(self) -> bool:
        """Whether some of its layers are computed again in some backward."""
        return any(batch.recompute for batch in self.microbatches)

    @property
    def chain(self) -> tuple[int, ...]:
        """For each micro-batch the one that holds the slice before its own, -1 for none: `Batches.before`.

        PlanError for slices of a sequence that do not follow each other, one to a micro-batch, and for a micro-batch
        that would have to follow two others.
        """
        if not self.in_slices:
            return (-1,) * len(self.microbatches)
        before: list[int] = []
        ends: dict[tuple[int, int], int] = {}  # (sequence, tokens of it that have run): micro-batch
        for number, batch in enumerate(self.microbatches):
            follows = [(sequence, start) for sequence, start, _ in batch.spans if start]
            if len(follows) > 1:
                listed = " and ".join(str(sequence) for sequence, _ in follows)
                raise PlanError(
                    f"micro-batch {number} goes on with {len(follows)} sequences, at positions {listed}, but can "
                    "follow one other micro-batch only; put these slices into micro-batches of their own"
                )
            if follows and follows[0] not in ends:
                sequence, start = follows[0]
                raise PlanError(
                    f"micro-batch {number} goes on at token {start} of the sequence at position {sequence}, but no "
                    "earlier micro-batch of its pipeline stops there"
                )
            before.append(ends[follows[0]] if follows else -1)
            ends.update(((sequence, stop), number) for sequence, _, stop in batch.spans)
        return tuple(before)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a step with a strategy of its own. Its pipelines stand in rank order and share all ranks."""

    pipelines: tuple[PipelinePlan, ...]

    @property
    def shape(self) -> StrategyShape:
        """The strategy that the phase runs under."""
        return StrategyShape(tuple(pipeline.shape for pipeline in self.pipelines))

    @property
    def predicted_ms(self) -> float:
        """Time of the slowest pipeline."""
        return max((pipeline.predicted_ms for pipeline in self.pipelines), default=0.0)

    @property
    def mean_ms(self) -> float:
        """Mean time of the pipelines, idle ones included."""
        return sum(pipeline.predicted_ms for pipeline in self.pipelines) / len(self.pipelines)

    def at(self, positions: Sequence[int]) -> Phase:
        """The phase with these positions in a batch in place of 0, 1, 2, ..., for which it was planned alone."""
        return Phase(
            tuple(
                replace(
                    pipeline,
                    microbatches=tuple(
                        replace(
                            batch, spans=tuple(one._replace(sequence=positions[one.sequence]) for one in batch.spans)
                        )
                        for batch in pipeline.microbatches
                    ),
                )
                for pipeline in self.pipelines
            )
        )


THEN = " then "
"""Stands between the strategies of a step whose phases change it: "4*tp1 then 2*tp2 then tp4"."""


def parse_phases(text: str) -> tuple[StrategyShape, ...]:
    """The strategies of the phases that a text such as "4*tp1 then 2*tp2 then tp4" names; one without a "then".

    Raises PlanError that shows what cannot be read, and for phases that use different numbers of ranks.
    """
    shapes = tuple(StrategyShape.parse(part) for part in text.split(THEN))
    needs = [shape.num_ranks for shape in shapes]
    if len(set(needs)) > 1:
        listed = ", ".join(f"{shape} ({shape.num_ranks})" for shape in shapes)
        raise PlanError(f"the phases of {text!r} must all use the same number of ranks but use {listed}")
    return shapes


_parse_shape = lru_cache(maxsize=1024)(PipelineShape.parse)


def phase_record(phase: Phase, lengths: Sequence[int]) -> list[dict[str, object]]:
    """A phase of a step with these sequences, ready for JSON [Note: plan in JSON]; equal phases give equal records."""
    whole = set(zip(range(len(lengths)), repeat(0), lengths))
    return [
        {
            "shape": str(pipeline.shape),
            "microbatches": [_batch_record(batch, whole) for batch in pipeline.microbatches],
            "predicted_ms": pipeline.predicted_ms,
            **({"paces": list(pipeline.paces)} if pipeline.paces else {}),
        }
        for pipeline in phase.pipelines
    ]


def _batch_record(batch: MicroBatchPlan, whole: set[tuple[int, int, int]]) -> object:
    spans: list[object] = [span[0] if span in whole else span for span in batch.spans]
    more = {"recompute": batch.recompute} if batch.recompute else {}
    more |= {"beside_us": batch.beside_us} if batch.beside_us else {}
    return {"spans": spans, **more} if more else spans


def read_phase(rows: object, lengths: Sequence[int], *, shape_key: str = "shape") -> Phase:
    """Inverse of `phase_record`. Raises ValueError, TypeError or KeyError for what is no phase."""
    whole = [Span(position, 0, length) for position, length in enumerate(lengths)]
    return Phase(tuple(_read_pipeline(row, whole, shape_key) for row in _list(rows, "a phase")))


def _read_pipeline(row: dict[str, object], whole: Sequence[Span], shape_key: str) -> PipelinePlan:
    shape = _parse_shape(str(row[shape_key]))
    batches = tuple(_read_batch(batch, whole) for batch in _list(row["microbatches"], "microbatches"))
    paces = checked(row["paces"], shape.pp) if "paces" in row else ()
    return PipelinePlan(shape, batches, read_number(row["predicted_ms"]), paces)


def _read_batch(record: object, whole: Sequence[Span]) -> MicroBatchPlan:
    recompute, beside = 0.0, 0
    if isinstance(record, dict):
        beside = read_whole(record.get("beside_us", 0))
        recompute = read_number(record["recompute"] if not beside or "recompute" in record else 0.0)
        record = record["spans"]
    return MicroBatchPlan(tuple([_read_span(span, whole) for span in _list(record, "spans")]), recompute, beside)


def _read_span(record: object, whole: Sequence[Span]) -> Span:
    if isinstance(record, list):
        return Span(*(read_whole(number) for number in record))
    position = read_whole(record)
    if not 0 <= position < len(whole):
        raise ValueError(f"a micro-batch names position {position} of {len(whole)} sequences")
    return whole[position]


def _list(value: object, what: str) -> list:
    if not isinstance(value, list):
        raise TypeError(f"{what} must be a list, not {value!r}")
    return value


def read_whole(value: object) -> int:
    """A whole number of a record; TypeError for anything else, also for true and 2.0."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def read_number(value: object) -> float:
    """A number of a record, as a float; TypeError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


VERSION = 2  # of the JSON; plans of version 1 state none, and have "pipelines", of uniform schemes, for "phases"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Phases, sequences and predicted times of one step.

    `predicted_ms` is the event simulation's of the pipelines. `messages_ms` is what all else was expected to add when
    the plan was chosen: a little below 0 where stages are faster than the slowest one, by which pipelines are
    simulated. `lower_bound_ms` is a certified bound on the best possible step under any
    candidate strategy by the formula that the search works with, as `searched_ms` is; 0 when none was computed.
    """

    step: int
    sequence_ids: tuple[int, ...]  # dataset ids, in the order the sampler drew them
    lengths: tuple[int, ...]  # tokens, one per sequence
    phases: tuple[Phase, ...]
    predicted_ms: float
    lower_bound_ms: float = 0.0
    source: str = "search"  # who made it: "search", "fast" (with less effort, in plain Python), "replay"
    messages_ms: float = 0.0

    @property
    def strategy(self) -> str:
        """Text of the strategy, such as "tp4 + 2*pp2"; of one after the other, where phases change it."""
        return THEN.join(str(phase.shape) for phase in self.phases)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def recomputed(self) -> float:
        """Share of all layers of all tokens that backwards compute again."""
        batches = (batch for pipeline in self.pipelines for batch in pipeline.microbatches if batch.recompute)
        return sum(batch.recompute * batch.num_tokens for batch in batches) / self.num_tokens

    @property
    def beside(self) -> float:
        """Share of its pipelines' time that their first stages take besides layers."""
        every = sum(pipeline.predicted_ms for pipeline in self.pipelines)
        return sum(sum(pipeline.beside_ms) for pipeline in self.pipelines) / every if every else 0.0

    @property
    def pipelines(self) -> tuple[PipelinePlan, ...]:
        """The pipelines of all phases, phase after phase: figures of pipelines are listed in this order."""
        return tuple(pipeline for phase in self.phases for pipeline in phase.pipelines)

    def named_pipelines(self) -> Iterator[tuple[str, PipelinePlan]]:
        """Every pipeline with the words for where it stands; phases are named where there are more than one."""
        for number, phase in enumerate(self.phases):
            of_phase = f" of phase {number}" if len(self.phases) > 1 else ""
            for index, pipeline in enumerate(phase.pipelines):
                yield f"pipeline {index}{of_phase}", pipeline

    def total_ms(self, pipeline_ms: Sequence[float]) -> float:
        """The time of all phases when their pipelines, in the order of `pipelines`, take these times.

        A phase takes as long as its slowest pipeline, and phases follow each other: of two phases of two pipelines the
        times 3, 5, 2, 1 make 5 + 2.
        """
        times = iter(pipeline_ms)
        return sum(max(islice(times, len(phase.pipelines)), default=0.0) for phase in self.phases)

    def to_json(self) -> str:
        """Canonical one-line JSON [Note: plan in JSON]: equal plans give equal bytes."""
        record = {
            "version": VERSION,
            "step": self.step,
            "sequence_ids": self.sequence_ids,
            "lengths": self.lengths,
            "phases": [phase_record(phase, self.lengths) for phase in self.phases],
            "predicted_ms": self.predicted_ms,
            "lower_bound_ms": self.lower_bound_ms,
            "source": self.source,
            "messages_ms": self.messages_ms,
        }
        return json.dumps(record, separators=(",", ":"), allow_nan=False)

    def digest(self, cluster: bytes = b"") -> bytes:
        """SHA-256 of the canonical JSON and of the digest of the `cluster`, by which its shapes are placed on ranks."""
        return hashlib.sha256(self.to_json().encode() + cluster).digest()

    @classmethod
    def from_json(cls, text: str | bytes, place: str = "plan") -> StepPlan:
        """Inverse of `to_json`, of this version or the first; PlanError, which starts with `place`, for other texts."""
        try:
            record = parse_json(text)
            lengths = tuple(read_whole(i) for i in record["lengths"])
            return cls(
                step=read_whole(record["step"]),
                sequence_ids=tuple(read_whole(i) for i in record["sequence_ids"]),
                lengths=lengths,
                phases=_read_phases(record, lengths),
                predicted_ms=read_number(record["predicted_ms"]),
                lower_bound_ms=read_number(record["lower_bound_ms"]),
                source=str(record["source"]),
                messages_ms=read_number(record.get("messages_ms", 0.0)),
            )
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise PlanError(f"{place}: not a step plan ({type(error).__name__}: {error})") from error

    def table(self) -> str:
        """The plan as text: one line per pipeline with its ranks, tokens, loads and time.

        4096r is a micro-batch of 4096 tokens that computes layers again.
        """
        gap = f", within {self.gap:.2%} of the bound {self.lower_bound_ms:.1f} ms" if self.lower_bound_ms else ""
        lines = [
            f"step {self.step}: {self.strategy}   {len(self.lengths)} sequences, {self.num_tokens} tokens, "
            f"predicted {self.predicted_ms:.1f} ms{gap} ({self.source})",
            f"{'pipeline':>8}  {'shape':<10} {'ranks':>11} {'seqs':>5} {'tokens':>8} {'longest':>8} {'ms':>9}  "
            "tokens of each micro-batch",
        ]
        for number, phase in enumerate(self.phases):
            if len(self.phases) > 1:
                lines.append(f"phase {number}: {phase.shape}, predicted {phase.predicted_ms:.1f} ms")
            rank = 0
            for index, pipeline in enumerate(phase.pipelines):
                lines.append(_table_row(index, pipeline, rank))
                rank += pipeline.shape.num_ranks
        return "\n".join(lines)

    @property
    def step_ms(self) -> float:
        """What the step is expected to take, by which the plan was chosen: pipelines, and pulls, pushes and messages
        as far as their costs were known."""
        return self.predicted_ms + self.messages_ms

    @property
    def searched_ms(self) -> float:
        """Time by the formula that the search works with: of each phase's slowest pipeline, summed over the phases."""
        return sum(phase.predicted_ms for phase in self.phases)

    @property
    def gap(self) -> float:
        """Certified gap: the time that was searched for over the lower bound, less 1; 0 when no bound was computed."""
        return self.searched_ms / self.lower_bound_ms - 1.0 if self.lower_bound_ms > 0 else 0.0

    @property
    def balance(self) -> float:
        """Largest pipeline time over the mean, idle pipelines included, each summed over the phases; 1 is perfect."""
        return self.searched_ms / sum(phase.mean_ms for phase in self.phases)


def joined(plans: Sequence[StepPlan]) -> StepPlan:
    """The plan of a step whose parts are these, one after the other: its phases are those of all of them."""
    if len(plans) == 1:
        return plans[0]
    ends = accumulate((len(plan.lengths) for plan in plans), initial=0)
    return StepPlan(
        plans[0].step,
        tuple(one for plan in plans for one in plan.sequence_ids),
        tuple(one for plan in plans for one in plan.lengths),
        tuple(phase.at(range(*own)) for plan, own in zip(plans, pairwise(ends), strict=True) for phase in plan.phases),
        sum(plan.predicted_ms for plan in plans),
        sum(plan.lower_bound_ms for plan in plans) if all(plan.lower_bound_ms for plan in plans) else 0.0,
        plans[0].source,
    )


def _read_phases(record: dict[str, object], lengths: tuple[int, ...]) -> tuple[Phase, ...]:
    version = record.get("version", 1)
    if version == 1:
        return (read_phase(record["pipelines"], lengths, shape_key="scheme"),)
    if version != VERSION:
        raise ValueError(f"its version is {version!r} but this release reads 1 and {VERSION}")
    phases = record["phases"]
    if not isinstance(phases, list):
        raise TypeError(f"phases must be a list, not {phases!r}")
    return tuple(read_phase(rows, lengths) for rows in phases)


def _table_row(index: int, pipeline: PipelinePlan, first_rank: int) -> str:
    ranks = f"{first_rank}..{first_rank + pipeline.shape.num_ranks - 1}"
    held = [tokens for batch in pipeline.microbatches for tokens in batch.lengths]
    tokens = " ".join(f"{batch.num_tokens}{'r' if batch.recompute else ''}" for batch in pipeline.microbatches)
    return (
        f"{index:>8}  {pipeline.shape!s:<10} {ranks:>11} {len(held):>5} {sum(held):>8} "
        f"{max(held, default=0):>8} {pipeline.predicted_ms:>9.1f}  {tokens or '-'}"
    )


def save_plans(plans: Iterable[StepPlan], path: str | Path) -> None:
    """Write plans for hydra.replay: one JSON object a line."""
    Path(path).write_text("".join(plan.to_json() + "\n" for plan in plans), encoding="utf-8")


def load_plans(path: str | Path) -> dict[int, StepPlan]:
    """Plans by step, as `save_plans` wrote them; PlanError names file and line of what cannot be read."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise PlanError(f"cannot read the plans to replay, {path}: {error.strerror}") from error
    plans: dict[int, StepPlan] = {}
    for number, line in enumerate(lines, start=1):
        plan = StepPlan.from_json(line, f"{path}, line {number}")
        if plan.step in plans:
            raise PlanError(f"{path}, line {number}: a second plan for step {plan.step}; keep one")
        plans[plan.step] = plan
    return plans
