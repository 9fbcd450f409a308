"""The step plan: all that one step does, as one frozen record that every rank holds alike. Pure: no torch.

A step has phases, which follow each other and add up their gradients; a phase has pipelines, which share the ranks; a
pipeline runs micro-batches; a micro-batch holds spans of sequences (`phase`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

from ds_hydra.plan.phase import THEN, Phase, PipelinePlan, phase_record, read_number, read_phase, read_whole
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.safe_json import parse_json

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
