"""The step plan: all that one step does, as one frozen record that every rank holds alike. Pure: no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ds_hydra.pipe.shape import ParallelScheme, format_strategy, parse_strategy
from ds_hydra.zero_hetero.errors import PlanError


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """What one pipeline runs in a step.

    `microbatches[k]` lists positions in the step's batch (not dataset ids), packed together in that
    order; micro-batches run in the order given. No micro-batch at all is allowed.
    """

    scheme: ParallelScheme
    microbatches: tuple[tuple[int, ...], ...]
    predicted_ms: float


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Strategy, sequences, micro-batches and predicted times of one step.

    Pipelines stand in rank order. `lower_bound_ms` is a certified bound on the best possible step under any
    candidate strategy, in the same cost model as `predicted_ms`; 0 when none was computed.
    """

    step: int
    sequence_ids: tuple[int, ...]  # dataset ids, in the order the sampler drew them
    lengths: tuple[int, ...]  # tokens, one per sequence
    pipelines: tuple[PipelinePlan, ...]
    predicted_ms: float
    lower_bound_ms: float = 0.0
    source: str = "search"  # who made it: "search", "fast" (fallback in the process), "replay"

    @property
    def strategy(self) -> str:
        return format_strategy(pipeline.scheme for pipeline in self.pipelines)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def to_json(self) -> str:
        """Canonical one-line JSON: equal plans give equal bytes."""
        record = {
            "step": self.step,
            "sequence_ids": self.sequence_ids,
            "lengths": self.lengths,
            "pipelines": [
                {"scheme": str(p.scheme), "microbatches": p.microbatches, "predicted_ms": p.predicted_ms}
                for p in self.pipelines
            ],
            "predicted_ms": self.predicted_ms,
            "lower_bound_ms": self.lower_bound_ms,
            "source": self.source,
        }
        return json.dumps(record, separators=(",", ":"), allow_nan=False)

    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON; ranks compare it before the first byte moves."""
        return hashlib.sha256(self.to_json().encode()).digest()

    @classmethod
    def from_json(cls, text: str, place: str = "plan") -> StepPlan:
        """Inverse of `to_json`; PlanError, which starts with `place`, for anything else."""
        try:
            record = json.loads(text)
            return cls(
                step=_whole(record["step"]),
                sequence_ids=tuple(_whole(i) for i in record["sequence_ids"]),
                lengths=tuple(_whole(i) for i in record["lengths"]),
                pipelines=tuple(_read_pipeline(row) for row in record["pipelines"]),
                predicted_ms=_number(record["predicted_ms"]),
                lower_bound_ms=_number(record["lower_bound_ms"]),
                source=str(record["source"]),
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise PlanError(
                f"{place}: not a step plan ({type(error).__name__}: {error}); hydra.plans_file writes one a line"
            ) from error

    def table(self) -> str:
        """The plan as text: one line per pipeline with its ranks, tokens, loads and time."""
        gap = f", within {self.gap:.2%} of the bound {self.lower_bound_ms:.1f} ms" if self.lower_bound_ms else ""
        lines = [
            f"step {self.step}: {self.strategy}   {len(self.lengths)} sequences, {self.num_tokens} tokens, "
            f"predicted {self.predicted_ms:.1f} ms{gap} ({self.source})",
            f"{'pipeline':>8}  {'scheme':<10} {'ranks':>11} {'seqs':>5} {'tokens':>8} {'longest':>8} {'ms':>9}  "
            "tokens of each micro-batch",
        ]
        rank = 0
        for index, pipeline in enumerate(self.pipelines):
            ranks = f"{rank}..{rank + pipeline.scheme.num_ranks - 1}"
            rank += pipeline.scheme.num_ranks
            held = [self.lengths[i] for batch in pipeline.microbatches for i in batch]
            tokens = " ".join(str(sum(self.lengths[i] for i in batch)) for batch in pipeline.microbatches)
            lines.append(
                f"{index:>8}  {pipeline.scheme!s:<10} {ranks:>11} {len(held):>5} {sum(held):>8} "
                f"{max(held, default=0):>8} {pipeline.predicted_ms:>9.1f}  {tokens or '-'}"
            )
        return "\n".join(lines)

    @property
    def gap(self) -> float:
        """Certified gap: predicted time over the lower bound, less 1; 0 when no bound was computed."""
        return self.predicted_ms / self.lower_bound_ms - 1.0 if self.lower_bound_ms > 0 else 0.0

    @property
    def balance(self) -> float:
        """Largest pipeline time over the mean, idle pipelines included; 1 is perfect."""
        return self.predicted_ms * len(self.pipelines) / sum(p.predicted_ms for p in self.pipelines)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _read_pipeline(row: dict[str, object]) -> PipelinePlan:
    (scheme,) = parse_strategy(str(row["scheme"]))
    batches = row["microbatches"]
    if not isinstance(batches, list):
        raise TypeError(f"microbatches must be a list, not {batches!r}")
    packed = tuple(tuple(_whole(i) for i in batch) for batch in batches)
    return PipelinePlan(scheme, packed, _number(row["predicted_ms"]))


def save_plans(plans: Iterable[StepPlan], path: str | Path) -> None:
    """Write plans for `choose: "replay"`: one JSON object a line."""
    Path(path).write_text("".join(plan.to_json() + "\n" for plan in plans))


def load_plans(path: str | Path) -> dict[int, StepPlan]:
    """Plans by step, as `save_plans` wrote them; PlanError names file and line of what cannot be read."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise PlanError(
            f"cannot read the plans to replay, {path}: {error.strerror}; give hydra.planner.replay_file what a run "
            "wrote as hydra.plans_file"
        ) from error
    plans: dict[int, StepPlan] = {}
    for number, line in enumerate(lines, start=1):
        plan = StepPlan.from_json(line, f"{path}, line {number}")
        if plan.step in plans:
            raise PlanError(f"{path}, line {number}: a second plan for step {plan.step}; keep one")
        plans[plan.step] = plan
    return plans
