"""What sequences take beside their tokens, such as images that are encoded: lengths with loads. Pure: no torch.

[Note: loads]
A unit is what one rank of a pipeline's first stage does for a sequence before its layers: it encodes an image. A load
is what that takes of one rank, forward and backward, in whole microseconds, so that every rank plans with the same. The
units of a micro-batch are dealt out over the ranks of the first stage, the largest first, and all wait for the one with
the most. Images of 30, 20, 20 and 10 ms on two ranks are 40 ms; a single one of 30 ms is 30 ms, on however many.

But a unit that would take longer than the others together take all ranks may be shared by all ranks, where that is
possible: each has an even part of it, and something more, for messages and for what each of them computes whole. With 2
ms more the single one of 30 ms takes 17 ms on two ranks and 9.5 on four. As many of the largest are shared as it takes
for the least time in all.

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


class Load(NamedTuple):
    """Of a unit (us)."""

    us: float  # on one rank
    more: float  # what each of several ranks takes besides an even part; as much as `us`: one rank has it whole

    @classmethod
    def whole(cls, us: float) -> Load:
        """One that ranks do not share."""
        return cls(us, us)

    def shared_by(self, ranks: int) -> float:
        """What it takes of each of them."""
        return self.us / ranks + self.more


Loads = tuple[tuple[Load, ...], ...]
"""Of each sequence of a step, the loads of its units."""


class Lengths(tuple[int, ...]):
    """Tokens of a step's sequences, with what they take besides [Note: loads]: whoever wants lengths alone has them."""

    loads: Loads = ()

    @classmethod
    def of(cls, lengths: Iterable[int], loads: Iterable[Iterable[Sequence[float]]]) -> tuple[int, ...]:
        """With their loads, by sequence; a plain tuple where there are none."""
        known, told = tuple(lengths), tuple(tuple(Load(*one) for one in units) for units in loads)
        if not any(told):
            return known
        assert len(told) == len(known), f"loads of {len(told)} of {len(known)} sequences"
        made = cls(known)
        made.loads = told
        return made


def loaded(lengths: Sequence[int], patches: Sequence[Sequence[int]], a: float, b: float) -> tuple[int, ...]:
    """Lengths whose units have these patches, at a * p^2 + b * p milliseconds [Note: price of an image]."""
    return Lengths.of(lengths, ([Load.whole(max(1, round(1e3 * (a * p * p + b * p)))) for p in one] for one in patches))


def loads_of(lengths: Sequence[int]) -> Loads:
    """The loads of a step's sequences; empty: they have none."""
    return lengths.loads if isinstance(lengths, Lengths) else ()


_NONE = Load(0.0, 0.0)
EVERY = -1  # in place of a unit's rank: all of them share it


class Dealt(NamedTuple):
    """Who does some units, and how long that takes."""

    owners: list[int]  # for each unit its rank, or EVERY
    us: float  # of the rank with the most to do


def dealt(loads: Sequence[Load], ranks: int) -> Dealt:
    """Units over ranks [Note: loads]: the largest first, to the one with the least to do, but for those that all ranks
    share."""
    order = sorted(range(len(loads)), key=lambda i: -loads[i].us)
    best, rest = _dealt(loads, order, 0, ranks), sum(one.us for one in loads)
    for shared, i in enumerate(order, 1):
        # One that is no longer than all others on all ranks is not what these wait for.
        if loads[i].us * ranks <= rest or loads[i].shared_by(ranks) >= loads[i].us:
            break
        found, rest = _dealt(loads, order, shared, ranks), rest - loads[i].us
        best = min(best, found, key=lambda one: one.us)
    return best


def _dealt(loads: Sequence[Load], order: Sequence[int], shared: int, ranks: int) -> Dealt:
    """With so many of the first ones shared by all."""
    held = [sum(loads[i].shared_by(ranks) for i in order[:shared])] * ranks
    owners = [EVERY] * len(loads)
    for index in order[shared:]:
        owner = owners[index] = held.index(min(held))
        held[owner] += loads[index].us
    return Dealt(owners, max(held))


def dealt_us(units: Sequence[Load], ranks: int) -> float:
    """What the rank with the most has to do of some units."""
    return sum(one.us for one in units) if ranks == 1 else dealt(units, ranks).us


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
        sums = np.array([sum(one.us for one in units) for units in loads], dtype=np.float64)
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
        mean, ms = sum(one.us for one in units) / ranks, dealt_us(units, ranks)
        if units and max(units).us > mean:
            lone.append((max(held, key=lambda i: max(loads[i], default=_NONE)), ms - mean))
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
