"""The micro-batches of one pipeline: slices of long sequences, and which layers are computed again. Pure: no torch.

The kernels search (`kernels/cut_search.py`, [Note: slots]); here is what they are asked, and their answer as a plan
states it.

[Note: layers computed again]
A layer of a micro-batch that the backward computes again (activation checkpointing) keeps little more than its input
meanwhile, and costs a forward. Which micro-batches live at one time follows from the schedule: all slices of a sequence
do, with what stands between them. Each such group, a window, must fit the room of a stage:

  minimise   sum over micro-batches m of  F_m * c_m             F_m: milliseconds of one layer's forward
  so that    sum over m in a window of    saved_m * c_m  >=  what the window has too much
  and        c_m is one of 0, 1, ..., layers of a stage

The search chooses by a simple rule, which suits the list order [Note: layers of a run].

The later a slice, the longer its forward takes, for its tokens attend to more, while they save no more than others. So
layers of early slices are computed again first. An example with one window of three slices of 4K tokens, of which a
layer takes 4, 5 and 6 ms, saves 1 unit, and there are 4: for 6 units c is 4, 2, 0 and costs 16 + 10 = 26 ms.

[Note: surcharges]
What a chunked pipeline takes beside the work of its sequences hardly depends on which they are, but for the long ones:
the slices of a sequence follow each other down the stages, and up again in the opposite order, so that stages wait. A
`tp2pp4/v` pipeline of a 32B model with 2900 ms of work takes 470 ms more when all its sequences are short, 530 ms with
one of 8,000 tokens among them and 760 ms with one of 16,000. Dispatch therefore counts 60 ms for the first and 290 ms
for the second on top of their work. Layers that must be computed again, as a sequence does not fit by itself, are
counted as its work; those that make room for others are in its surcharge. How much that is follows from simulations of
pipelines with one long sequence and many equal short ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.costs.stage_work import UNITS, StageCosts, stage_costs
from ds_hydra.pipe.schedules.list_walk import NEVER
from ds_hydra.plan.step_plan import MicroBatchPlan, Span
from ds_hydra.planner.kernels.load import Kernels
from ds_hydra.planner.kernels.packing import copied, empty_pieces, most_slots
from ds_hydra.planner.kernels.problem import Floats, Ints, Pieces, Pipe, Profile

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


_SHORT = 48  # equal sequences that make up a pipeline's work without a long one
_LEAST = 0.1  # of a pipeline's work: what takes less is not long
_LENGTHS, _MORE_LENGTHS = 7, 3  # that are simulated, and of those that only fit with layers computed again
_STEP = 1.1  # works of pipelines within this ratio count as equal
_EFFORT = Effort(variations=6, moves=0)


@lru_cache(maxsize=256)
def surcharges(pipe: Pipe, longest: int) -> Surcharges:
    """Those of a pipeline, of which spaces may have the same; `longest` as `Surcharges`."""
    return Surcharges(pipe, longest)


class Surcharges:
    """By length of a sequence, for one pipeline [Note: surcharges]; `longest` tokens is the longest that it holds."""

    def __init__(self, pipe: Pipe, longest: int) -> None:
        self._pipe, self._longest = pipe, longest
        self._known: dict[int, tuple[Floats, Floats]] = {}  # lengths and ms, by number of steps of a pipeline's work

    def of(self, kernel: Kernels, share: float, tokens: Ints) -> Floats:
        """(items,) ms for sequences of these lengths, where a pipeline has about `share` ms of work."""
        # Not the batch at hand but a made-up one is simulated, so that what is known does not depend on earlier steps.
        step = round(math.log(max(share, 1e-3)) / math.log(_STEP))
        if step not in self._known:
            self._known[step] = self._simulated(kernel, _STEP**step)
        return np.interp(tokens, *self._known[step])

    def _simulated(self, kernel: Kernels, share: float) -> tuple[Floats, Floats]:
        least = max(self._length(_LEAST * share), self._pipe.util_length)
        if least >= self._longest:
            return np.array([0.0]), np.array([0.0])
        # Up to what fits without layers that are computed again the lengths are those of a pipeline that has none: so
        # what it deals out is dealt out in the same way where some may be.
        fits = min(
            int(self._pipe.room / UNITS / (1.0 + counts_more(self._pipe.costs, self._pipe.max_length))), self._longest
        )
        lengths = np.geomspace(least, max(fits, least + 1), _LENGTHS).astype(np.int64)
        if fits < self._longest:
            more = np.geomspace(lengths[-1], self._longest, _MORE_LENGTHS + 1)[1:]
            lengths = np.concatenate((lengths, more.astype(np.int64)))
        ms = np.array([self._overhead(kernel, share, int(length)) for length in lengths])
        # What is found is the best of some tries: a longer sequence may seem cheaper than a shorter one by chance.
        return lengths.astype(np.float64), np.maximum.accumulate(ms - ms[0])

    def _overhead(self, kernel: Kernels, share: float, long: int) -> float:
        """Ms beside the work of a sequence of `long` tokens and of as many short ones as make up the share."""
        short = min(max(self._length(share / _SHORT), 1), self._pipe.max_length)
        count = max(0, round((share - self._work(long)) / self._work(short)))
        tokens = np.array([long] + [short] * count, dtype=np.int64)
        work = np.array([self._work(length) for length in tokens.tolist()])
        found = cut_best(kernel, self._pipe, work, tokens, effort=_EFFORT)
        if found is None:
            return 0.0
        return found.us / 1e3 - float(work.sum()) - float(again_ms(self._pipe, tokens[:1])[0])

    def _work(self, length: int) -> float:
        ms = self._pipe.costs.ms
        return float(ms.a * length * length + ms.b * length)

    def _length(self, work: float) -> int:
        """The length whose work is so many ms: the root that does not divide by a."""
        a, b = self._pipe.costs.ms.a, self._pipe.costs.ms.b
        return int(2.0 * work / (b + math.sqrt(b * b + 4.0 * a * work)))


def again_ms(pipe: Pipe, tokens: Ints) -> Floats:
    """The least that layers computed again take, for sequences of so many tokens alone, (sequences,) ms."""
    costs = pipe.costs
    if not pipe.layers:
        return np.zeros(len(tokens))
    of_contexts = np.maximum(tokens - pipe.max_length, 0)  # not of the last slice
    missing = tokens + counts_more(costs, pipe.max_length) * of_contexts - pipe.room / UNITS
    # The first tokens have the cheapest forwards.
    again = np.clip(missing / (1.0 - costs.recomputed), 0.0, tokens)
    found: Floats = costs.forward.a * costs.ms.a * again * again + costs.forward.b * costs.ms.b * again
    return found
