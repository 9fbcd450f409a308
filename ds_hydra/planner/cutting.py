"""A pipeline's sequences and costs in, its micro-batches with slices of long sequences out. Pure: no torch.

The kernels search (`kernels/cut_search.py`, [Note: slots]); here is what they are asked, and their answer as a plan
states it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.costs.stage_work import UNITS, StageCosts, stage_costs
from ds_hydra.pipe.schedules.list_walk import NEVER
from ds_hydra.plan.phase import MicroBatchPlan, Span
from ds_hydra.planner.kernels.arrays import Floats, Ints, Pieces, Pipe, Profile
from ds_hydra.planner.kernels.protocol import Kernels
from ds_hydra.planner.kernels.slots import copied, empty_pieces, most_slots

_MORE_SLOTS = 1.3  # times as many as in the profiles before
_SHAPES = tuple(
    Profile(0, first, growth, last, begin)
    for first, growth, last in ((1.0, 1.0, 1.0), (0.3, 1.5, 0.7))
    for begin in (0, 2)
)


class Effort(NamedTuple):
    """How much a search tries, in counts, so that its result does not depend on the machine's speed."""

    variations: int = 20  # of the best profile
    moves: int = 20  # of the best profile's micro-batches


class Cutting(NamedTuple):
    """The best micro-batches found, what they take, and the profile that they were made to."""

    pieces: Pieces
    us: int
    profile: Profile
    profiles_us: tuple[int, ...]  # of each profile tried; NEVER where it was far from the best


_USUAL = Effort()


def profiles_of(pipe: Pipe, tokens: Ints, *, lean: bool = False) -> tuple[Profile, ...]:
    """The profiles that are tried for sequences of these lengths; `lean`: few, for plain Python.

    From about the fewest slots that hold all tokens to six times as many: where a pipeline has work for sixteen full
    micro-batches, it is done soonest with about forty, and with eighteen it may take a tenth longer.
    """
    counts, fewest = [3, 4, 5, 6, 8, 10, 13, 17], math.ceil(int(tokens.sum()) / pipe.max_length)
    while counts[1] <= fewest:
        counts = [*counts[1:], round(_MORE_SLOTS * counts[-1])]
    if lean:
        return tuple(shape._replace(slots=counts[at]) for at in (1, 4) for shape in _SHAPES if shape.first < 1.0)
    return tuple(shape._replace(slots=count) for count in counts for shape in _SHAPES)


def pipe_of(cost: SchemeCost, shares: Shares, *, parts: int = 1, slices: bool = True, layers: int = 0) -> Pipe:
    """What a pipeline under the list order is searched by.

    `parts`: ranges of layers of a stage; `layers`: of each range, that may be computed again, 0 if none may.
    """
    costs = stage_costs(cost, shares, parts)
    limits = int(cost.max_length), int(cost.util_length)
    return Pipe(costs, cost.scheme.pp, UNITS * cost.room, *limits, slices, layers)


def counts_more(shares: Shares | StageCosts, tokens: int) -> float:
    """Tokens that a token of a slice of so many counts more, if others follow the slice."""
    return shares.context + shares.state / tokens


def longest_of(cost: SchemeCost, shares: Shares, *, slices: bool = True, layers: int = 0) -> int:
    """The longest sequence that such a pipeline can run, in tokens; `layers`: of a stage, that may run again."""
    if not slices:
        return int(cost.max_length)
    # All slices live together, and all but the last keep gradients of keys and values, and states, beside their
    # activations.
    beside = counts_more(shares, int(cost.max_length))
    longest = cost.room / (1.0 + beside)
    if layers:
        # While one of the layers is computed again for a slice, it keeps all that it would have kept.
        room = cost.room - (1.0 - shares.recomputed) * cost.max_length / layers
        longest = max(longest, room / (shares.recomputed + beside))
    return int(longest)


def cut_best(
    kernel: Kernels,
    pipe: Pipe,
    work: Floats,
    tokens: Ints,
    *,
    profiles: Sequence[Profile] | None = None,
    effort: Effort = _USUAL,
    seed: int = 0,
) -> Cutting | None:
    """The best micro-batches found for sequences, longest first, that add `work` ms each: (sequences,) both.

    Tries all profiles, those of `profiles_of` where none are given, then variations of the best one, then small changes
    of its micro-batches. None if nothing fits the memory. The same arguments give the same result.
    """
    profiles = profiles_of(pipe, tokens) if profiles is None else profiles
    rows = np.array([*profiles, profiles[0]], dtype=np.float64)
    most = most_slots(pipe, tokens, max(profile.slots for profile in profiles) + effort.variations)
    best, state = empty_pieces(most + len(tokens), most), np.array([seed + 1], dtype=np.int64)
    us = np.zeros(len(profiles), dtype=np.int64)
    took = kernel.search_profiles(pipe, work, tokens, rows, effort.variations, state, us, best)
    if took == NEVER:
        return None
    if effort.moves:
        took = kernel.search_moves(pipe, effort.moves, took, state, best)
    slots, first, growth, last, begin = rows[-1].tolist()
    return Cutting(best, int(took), Profile(int(slots), first, growth, last, int(begin)), tuple(us.tolist()))


def improved(kernel: Kernels, pipe: Pipe, found: Cutting, *, moves: int, seed: int) -> Cutting:
    """A cutting after more small changes of its micro-batches, those that help."""
    best, state = copied(found.pieces), np.array([seed + 1], dtype=np.int64)
    return found._replace(pieces=best, us=int(kernel.search_moves(pipe, moves, found.us, state, best)))


def microbatches_of(pieces: Pieces, position: Sequence[int]) -> tuple[MicroBatchPlan, ...]:
    """Micro-batches as a plan states them; `position` of each sequence in the step's batch."""
    count, slots = pieces.counts.tolist()
    spans: list[list[Span]] = [[] for _ in range(slots)]
    columns = (column[:count].tolist() for column in (pieces.item, pieces.start, pieces.stop, pieces.slot))
    for item, start, stop, slot in zip(*columns, strict=True):
        spans[slot].append(Span(position[item], start, stop))
    again = pieces.again[:slots].tolist()
    return tuple(MicroBatchPlan(tuple(held), share) for held, share in zip(spans, again, strict=True))
