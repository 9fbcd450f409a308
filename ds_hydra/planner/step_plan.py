"""The step plan: all that one step does, as one frozen record that every rank holds alike. Pure: no torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from ds_hydra.pipe.strategy import ParallelScheme, format_strategy


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
