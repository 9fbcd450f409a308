"""InfiniPipe's sequence processor: lengths in, chunks of nearly equal time out (its Algorithm 1). Pure: no torch.

Sequences are cut by a mesh, the lengths of equally dear slices of the longest one; what is left of a sequence behind
its last whole mesh slice, its tail, is filled up with short sequences, which also make chunks of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.plan.phase import MicroBatchPlan, Span


@dataclass
class _Bucket:
    """A chunk that is being filled: a tail or nothing, and short sequences."""

    spans: list[Span] = field(default_factory=list)
    ms: float = 0.0
    tokens: int = 0

    def add(self, span: Span, ms: float) -> None:
        self.spans.append(span)
        self.ms += ms
        self.tokens += span.stop - span.start


def mesh_of(longest: int, slices: int, cost: SchemeCost) -> list[int]:
    """Lengths of the slices that cut a sequence into parts of equal time, the longest first.

    A later slice attends to all before it and so is shorter: with a = 1 and b = 0 two slices of 100 tokens take equally
    long when the first one has 71.
    """
    total = float(cost.sequence_ms([longest])[0])
    ends = [round(cost.tokens_in(total * part / slices)) for part in range(slices)] + [longest]
    return [stop - start for start, stop in itertools.pairwise(ends) if stop > start]


def chunks(
    positions: Sequence[int], lengths: Sequence[int], mesh: Sequence[int], cost: SchemeCost
) -> tuple[MicroBatchPlan, ...]:
    """Algorithm 1 for some sequences of a step: split chunks with their tails, longest sequences first, then others."""
    most_tokens = mesh[0]
    most_ms = float(cost.sequence_ms([mesh[0]])[0])
    chains: list[tuple[list[Span], _Bucket]] = []
    short: list[tuple[float, int]] = []
    for position in sorted(positions, key=lambda at: (-lengths[at], at)):
        if lengths[position] <= most_tokens:
            short.append((float(cost.sequence_ms([lengths[position]])[0]), position))
            continue
        spans = _split(position, lengths[position], mesh)
        tail = _Bucket()
        tail.add(spans[-1], float(cost.slices_ms([(spans[-1].start, spans[-1].stop)])[0]))
        chains.append((spans[:-1], tail))
    buckets = [tail for _, tail in chains]
    for ms, position in short:
        span = Span(position, 0, lengths[position])
        # A bucket that has room for the tokens, the one with least time for its tokens first; the bound on time gives
        # way where none has time left.
        fitting = [bucket for bucket in buckets if bucket.tokens + lengths[position] <= most_tokens]
        if not fitting:
            buckets.append(_Bucket())
            buckets[-1].add(span, ms)
            continue
        quick = [bucket for bucket in fitting if bucket.ms + ms <= most_ms]
        if not quick:
            most_ms = min(bucket.ms for bucket in fitting) + ms
            quick = [bucket for bucket in fitting if bucket.ms + ms <= most_ms]
        min(quick, key=lambda bucket: bucket.ms / bucket.tokens).add(span, ms)
    made: list[MicroBatchPlan] = []
    for whole, tail in chains:
        made += [MicroBatchPlan((span,)) for span in whole] + [MicroBatchPlan(tuple(tail.spans))]
    made += [MicroBatchPlan(tuple(bucket.spans)) for bucket in buckets[len(chains) :]]
    return tuple(made)


def _split(position: int, length: int, mesh: Sequence[int]) -> list[Span]:
    """The slices of a sequence by the mesh, the rest as the last."""
    spans, start = [], 0
    for slice_tokens in mesh:
        if start + slice_tokens >= length:
            break
        spans.append(Span(position, start, start + slice_tokens))
        start += slice_tokens
    return [*spans, Span(position, start, length)]
