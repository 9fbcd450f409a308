"""What sequences take beside their tokens, such as images that are encoded: lengths with loads. Pure: no torch.

[Note: loads]
A unit is what one rank of a pipeline's first stage does for a sequence before its layers: it encodes an image. A load
is what that takes of one rank, forward and backward, in whole microseconds, so that every rank plans with the same. The
units of a micro-batch are dealt out over the ranks of the first stage, the largest first, and all wait for the one with
the most. Images of 30, 20, 20 and 10 ms on two ranks are 40 ms; a single one of 30 ms is 30 ms, on however many.

The other stages have nothing of it. So a pipeline takes the loads of all its micro-batches, and drains without them:
sum(text + load) + (PP - 1) * largest text. A simulation finds less, as a first stage that has more to do waits less.

A slice of a sequence has the part of each unit that its tokens are of the sequence's: where in it images stand, plans
do not know.

The search counts a sequence's load by itself: the sum of its units over the ranks of the first stage, and what dealing
out adds, as micro-batches made of the step's own sequences have it. Of its plans the simulation then says what each
takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape

Loads = tuple[tuple[int, ...], ...]
"""Of each sequence of a step, the loads of its units (us)."""


class Lengths(tuple[int, ...]):
    """Tokens of a step's sequences, with what they take besides [Note: loads]: whoever wants lengths alone has them."""

    loads: Loads = ()

    @classmethod
    def of(cls, lengths: Iterable[int], loads: Iterable[Iterable[int]]) -> tuple[int, ...]:
        """With their loads, by sequence; a plain tuple where there are none."""
        known, told = tuple(lengths), tuple(tuple(units) for units in loads)
        if not any(told):
            return known
        assert len(told) == len(known), f"loads of {len(told)} of {len(known)} sequences"
        made = cls(known)
        made.loads = told
        return made


def loads_of(lengths: Sequence[int]) -> Loads:
    """The loads of a step's sequences; empty: they have none."""
    return lengths.loads if isinstance(lengths, Lengths) else ()


def dealt(loads: Sequence[float], ranks: int) -> list[int]:
    """For each of some units the rank that does it: the largest first, to the one with the least to do."""
    held = [0.0] * ranks
    owners = [0] * len(loads)
    for index in sorted(range(len(loads)), key=lambda i: -loads[i]):
        owner = owners[index] = held.index(min(held))
        held[owner] += loads[index]
    return owners


def dealt_us(units: Sequence[float], ranks: int) -> float:
    """What the rank with the most has to do of some units."""
    if ranks == 1 or len(units) <= 1:
        return sum(units)
    held = [0.0] * ranks
    for owner, load in zip(dealt(units, ranks), units, strict=True):
        held[owner] += load
    return max(held)


def first_ranks(shape: ParallelScheme | PipelineShape) -> int:
    """Ranks of a pipeline's first stage, which share its units."""
    stage = shape if isinstance(shape, ParallelScheme) else shape.stages[0]
    return stage.tp * stage.sp


class Counted(NamedTuple):
    """What a search counts: of each row of costs and each sequence (rows, sequences), in ms."""

    least: NDArray[np.float64]  # no plan has less
    usual: NDArray[np.float64]  # with what dealing out adds

    @classmethod
    def of(cls, loads: Loads, lengths: Sequence[int], costs: Sequence[SchemeCost], num_ranks: int) -> Counted:
        """Of a step's sequences, on pipelines of these costs, of which so many ranks have some."""
        sums = np.array([sum(units) for units in loads], dtype=np.float64)
        kinds = [_kind(cost, sum(lengths), num_ranks) for cost in costs]
        known = {kind: _usual(loads, lengths, sums, *kind) for kind in dict.fromkeys(kinds)}
        pace_ms = [(cost.paces or (1.0,))[0] / 1e3 for cost in costs]
        return cls(
            np.stack([pace * sums / ranks for pace, (ranks, _) in zip(pace_ms, kinds, strict=True)]),
            np.stack([pace * known[kind] for pace, kind in zip(pace_ms, kinds, strict=True)]),
        )


def _kind(cost: SchemeCost, tokens: int, num_ranks: int) -> tuple[int, int]:
    """Ranks that share units, and tokens of a micro-batch, of which a pipeline has as many as stages at least."""
    scheme = cost.scheme
    own = tokens * scheme.num_ranks // (num_ranks * scheme.pp)
    return first_ranks(scheme), max(1, min(cost.max_length, own))


def _usual(
    loads: Loads, lengths: Sequence[int], sums: NDArray[np.float64], ranks: int, most: int
) -> NDArray[np.float64]:
    """What each sequence takes of a first stage (us), by micro-batches of up to `most` tokens in the sequences' order:
    one whose largest unit takes a rank longer than all units take all ranks has the difference, others share it."""
    found, even, taken = sums / ranks, 0.0, 0.0
    if ranks == 1:
        return found
    lone: list[tuple[int, float]] = []
    for held in _filled(lengths, most):
        units = [load for i in held for load in loads[i]]
        mean, ms = sum(units) / ranks, dealt_us(units, ranks)
        if units and max(units) > mean:
            lone.append((max(held, key=lambda i: max(loads[i], default=0)), ms - mean))
        else:
            even, taken = even + mean, taken + ms
    if even:
        found *= taken / even
    for i, more in lone:
        found[i] += more
    return found


def _filled(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Sequences one after the other, as many at a time as have so many tokens; at least one."""
    held, tokens = list[int](), 0
    for i, length in enumerate(lengths):
        if held and tokens + length > most:
            yield held
            held, tokens = [], 0
        held.append(i)
        tokens += length
    yield held
