"""A pipeline's sequences and costs in, its micro-batches with slices of long sequences out. Pure: no torch.

[Note: slots]
Micro-batches are made to a profile of target loads. The first forward is how long the last stage waits and the last
backward how long the first one does, so slots are small first, grow, and are smaller at the end; few and large ones pay
c less often. A profile is (slots, first, growth, last, begin): targets first, first*growth, first*growth^2 and so on up
to 1, the last of them no more than `last`, and all scaled to add up to the work. Six slots of 280 ms of work, with
first = 0.3, growth = 1.5, last = 0.7:

  relative   0.30   0.45   0.68   1.00   0.85   0.70        the last but one is midway between 1 and `last`
  ms           21     32     48     70     60     49

A sequence of more than 1.3 of the largest target is cut, from slot `begin` on into slots in a row: each slice ends
where its slot's target is reached. No slice is shorter than UtilLen, and a rest of less than 0.6 of that joins the
slice before. Then the whole sequences go, longest first, where the load is the smallest share of the target; beside a
last slice too, but beside no earlier one, where they would live as long as the sequence.

Which profile is best depends on the sequences, so many are tried, and the best one is varied at random.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.list_order import list_us
from ds_hydra.pipe.schedules.registry import orders
from ds_hydra.pipe.schedules.simulate import peak_units, simulate_works
from ds_hydra.plan.phase import MicroBatchPlan, Span
from ds_hydra.plan.works import batches_of
from ds_hydra.planner.cut_moves import Cut, moved

_LONG = 1.3  # largest targets: what takes more is cut
_SHORT_REST = 0.6  # of UtilLen: what is left over and shorter joins the slice before
_MORE, _MORE_WHOLE = 0.7, 0.5  # of the largest target: a further slot for a slice, for a whole sequence


class Profile(NamedTuple):
    """Target loads of slots [Note: slots]."""

    slots: int
    first: float
    growth: float
    last: float
    begin: int

    def targets(self, work: float) -> list[float]:
        """Milliseconds of each slot."""
        shape, target = [], self.first
        for _ in range(self.slots):
            shape.append(min(1.0, target))
            target *= self.growth
        if self.slots > 3:
            shape[-1] = min(shape[-1], self.last)
        if self.slots > 5:
            shape[-2] = min(shape[-2], (1.0 + self.last) / 2)
        return [part * work / sum(shape) for part in shape]

    def varied(self, rng: random.Random) -> Profile:
        """One near it."""
        return Profile(
            max(2, self.slots + rng.randint(-1, 1)),
            min(1.0, max(0.06, self.first * math.exp(rng.gauss(0.0, 0.3)))),
            max(1.0, self.growth + rng.gauss(0.0, 0.15)),
            min(1.0, max(0.12, self.last * math.exp(rng.gauss(0.0, 0.3)))),
            max(0, self.begin + rng.randint(-1, 1)),
        )


PROFILES = tuple(
    Profile(slots, first, growth, last, begin)
    for slots in (3, 4, 5, 6, 8, 10, 13, 17)
    for first, growth, last in ((1.0, 1.0, 1.0), (0.3, 1.5, 0.7))
    for begin in (0, 2)
)


@dataclass(frozen=True, slots=True)
class Pipe:
    """What a pipeline's micro-batches are made for: costs, schedule, and ranges of layers in each stage."""

    cost: SchemeCost
    shares: Shares
    schedule: str = "list"
    parts: int = 1
    slices: bool = True  # whether sequences may be cut

    @property
    def longest(self) -> int:
        """The longest sequence that it can run, in tokens."""
        if not self.slices:
            return int(self.cost.max_length)
        # All slices live together, and all but the last keep gradients of keys and values beside their activations.
        return int(self.cost.room / (1.0 + self.shares.context))

    def batches(self, made: Cut) -> Batches:
        """Micro-batches as a schedule wants them."""
        return batches_of(made.microbatches, made.before, self.cost, self.shares, parts=self.parts)

    def us(self, batches: Batches) -> int | None:
        """Simulated microseconds; None where the stages have no room for them."""
        num_stages = self.cost.scheme.pp
        largest = max((self.parts * sum(batches.works[m].kept for m in run) for run in batches.runs), default=0)
        if largest > batches.room:
            return None
        if self.schedule == "list":
            return list_us(batches, num_stages)
        made = orders(self.schedule, batches, num_stages)
        if max(peak_units(order, batches) for order in made) > batches.room:
            return None
        return simulate_works(made, batches)


class Cutting(NamedTuple):
    """The best micro-batches found, what they take, and the profile that they were made to."""

    made: Cut
    us: int
    profile: Profile


class Effort(NamedTuple):
    """How much a search tries, in counts, so that its result does not depend on the machine's speed."""

    variations: int = 20  # of the best profile
    moves: int = 20  # of the best profile's micro-batches


_USUAL = Effort()


def cut_best(
    pipe: Pipe, sequences: Sequence[int], lengths: Sequence[int], *, effort: Effort = _USUAL, seed: int = 0
) -> Cutting | None:
    """The best micro-batches found for sequences, given by their positions in a step's batch of these lengths.

    Tries all `PROFILES`, then variations of the best one, then small changes of its micro-batches. None if nothing fits
    the memory. The same arguments give the same result.
    """
    rng = random.Random(seed)
    best: Cutting | None = None
    for profile in PROFILES:
        if pipe.slices or profile.slots <= len(sequences):
            best = _better(best, pipe, cut(pipe, profile, sequences, lengths), profile)
    if best is None:
        return None
    for _ in range(effort.variations):
        profile = best.profile.varied(rng)
        best = _better(best, pipe, cut(pipe, profile, sequences, lengths), profile) or best
    for _ in range(effort.moves):
        made = moved(best.made, rng, int(pipe.cost.max_length), pipe.cost.util_length)
        best = _better(best, pipe, made, best.profile) or best
    return best


def _better(best: Cutting | None, pipe: Pipe, made: Cut | None, profile: Profile) -> Cutting | None:
    if made is None:
        return best
    batches = pipe.batches(made)
    least = pipe.parts * sum(work.forward + work.backward + work.weight for work in batches.works)
    if best is not None and least >= best.us:
        return best  # without any bubble it would be no better
    us = pipe.us(batches)
    return Cutting(made, us, profile) if us is not None and (best is None or us < best.us) else best


class _Slot:
    """A micro-batch in the making."""

    def __init__(self, target: float):
        self.target = target
        self.load = 0.0  # ms, without c
        self.tokens = 0
        self.spans: list[Span] = []
        self.before: _Slot | None = None  # holds the slice before its own
        self.is_open = True  # False with a slice that others follow

    def add(self, span: Span, ms: float) -> None:
        self.spans.append(span)
        self.tokens += span.stop - span.start
        self.load += ms


def cut(pipe: Pipe, profile: Profile, sequences: Sequence[int], lengths: Sequence[int]) -> Cut | None:
    """Micro-batches of one profile [Note: slots]; None where a sequence fits nowhere."""
    cost = pipe.cost
    work = dict(zip(sequences, cost.sequence_ms([lengths[i] for i in sequences]).tolist(), strict=True))
    targets = profile.targets(math.fsum(work.values()))
    unit, slots = max(targets, default=0.0), [_Slot(target) for target in targets]
    whole = []
    at = profile.begin
    for i in sorted(sequences, key=lambda i: (-lengths[i], i)):
        if pipe.slices and (work[i] > _LONG * unit or lengths[i] > cost.max_length):
            at = _cut_one(cost, slots, at, Span(i, 0, lengths[i]), _MORE * unit)
        else:
            whole.append(i)
    for i in whole:
        having_room = [slot for slot in slots if slot.is_open and slot.tokens + lengths[i] <= cost.max_length]
        if lengths[i] > cost.max_length:
            return None
        if not having_room:
            slots.append(_Slot(_MORE_WHOLE * unit))
            having_room = slots[-1:]
        min(having_room, key=lambda slot: (slot.load + work[i]) / slot.target).add(Span(i, 0, lengths[i]), work[i])
    used = [slot for slot in slots if slot.spans]
    number = {id(slot): index for index, slot in enumerate(used)}
    before = tuple(-1 if slot.before is None else number[id(slot.before)] for slot in used)
    return Cut(tuple(MicroBatchPlan(tuple(slot.spans)) for slot in used), before)


def _cut_one(cost: SchemeCost, slots: list[_Slot], at: int, sequence: Span, more: float) -> int:
    """Put a sequence's slices into slots from `at` on; the slot after its last one."""
    position, start, length = sequence
    done_ms, before = 0.0, None
    while start < length:
        while at >= len(slots):
            slots.append(_Slot(more))
        slot = slots[at]
        stop = max(int(cost.tokens_in(done_ms + slot.target)), start + cost.util_length)
        if length - stop < _SHORT_REST * cost.util_length:
            stop = length
        stop = min(stop, start + int(cost.max_length))
        until_ms = float(cost.sequence_ms([stop])[0])
        slot.add(Span(position, start, stop), until_ms - done_ms)
        slot.before, slot.is_open = before, stop == length
        start, done_ms, before, at = stop, until_ms, slot, at + 1
    return at
