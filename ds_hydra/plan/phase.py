"""What runs within a step: spans, micro-batches, pipelines, phases; and their JSON. Pure: no torch.

[Note: plan in JSON]
A phase is a list of pipelines, `{"shape": "tp2pp4", "microbatches": [...], "predicted_ms": 12.5}`, where the shape is
text as `PipelineShape` prints it. A micro-batch is a list of its spans: a whole sequence is its position in the step's
batch, 7; a slice of one is `[7, 0, 4096]`. A micro-batch that recomputes is `{"spans": [...], "recompute": 0.5}`. A
pipeline with slow ranks has "paces" besides, one for each stage, `[1.0, 1.0, 1.25, 1.0]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

from ds_hydra.costs.slow_ranks import Paces, checked
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.zero_hetero.errors import PlanError


class Span(NamedTuple):
    """Tokens start, start + 1, ..., stop - 1 of the sequence at a position in the step's batch (not a dataset id)."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Spans that are packed together in that order, and the share of its layers that the backward computes again.

    `recompute` 0 keeps all activations from forward to backward; 1 keeps no more than the input of every layer. Every
    stage rounds it up to whole layers of its own, so that it keeps no more than the share says.
    """

    spans: tuple[Span, ...]
    recompute: float = 0.0

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
    return {"spans": spans, "recompute": batch.recompute} if batch.recompute else spans


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
    recompute = 0.0
    if isinstance(record, dict):
        recompute, record = read_number(record["recompute"]), record["spans"]
    return MicroBatchPlan(tuple([_read_span(span, whole) for span in _list(record, "spans")]), recompute)


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
