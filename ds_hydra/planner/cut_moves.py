"""Micro-batches with slices in, others that differ by one small change out. Pure: no torch."""

from __future__ import annotations

import random
from typing import NamedTuple

from ds_hydra.plan.phase import MicroBatchPlan, Span


class Cut(NamedTuple):
    """Micro-batches in their order, and for each the one with the slice before its own, -1 for none."""

    microbatches: tuple[MicroBatchPlan, ...]
    before: tuple[int, ...]


def moved(made: Cut, rng: random.Random, max_length: int, util_length: int) -> Cut | None:
    """A micro-batch elsewhere in the order, a whole sequence in another one, or a cut at another token.

    None where the change drawn cannot be: too many tokens in a micro-batch, or too few in a slice.
    """
    if len(made.before) < 2:
        return None
    draw = rng.random()
    if draw < 0.4:
        return _reordered(made, *rng.sample(range(len(made.before)), 2))
    followers = [m for m, earlier in enumerate(made.before) if earlier >= 0]
    if draw < 0.7 and followers:
        return _recut(made, rng, rng.choice(followers), (util_length, max_length))
    return _repacked(made, rng, max_length)


def _reordered(made: Cut, source: int, target: int) -> Cut:
    """Micro-batch `source` at place `target`; slices of a sequence keep their order among themselves."""
    order = [m for m in range(len(made.before)) if m != source]
    order.insert(target, source)
    # The places that a chain's micro-batches have now go to them in the order of their slices.
    chain = {m: _head(made.before, m) for m in order}
    places: dict[int, list[int]] = {}
    for place, m in enumerate(order):
        places.setdefault(chain[m], []).append(place)
    for head, of_chain in places.items():
        for place, m in zip(of_chain, sorted(m for m in order if chain[m] == head), strict=True):
            order[place] = m
    place_of = {m: place for place, m in enumerate(order)} | {-1: -1}
    return Cut(tuple(made.microbatches[m] for m in order), tuple(place_of[made.before[m]] for m in order))


def _head(before: tuple[int, ...], microbatch: int) -> int:
    while before[microbatch] >= 0:
        microbatch = before[microbatch]
    return microbatch


def _recut(made: Cut, rng: random.Random, follower: int, limits: tuple[int, int]) -> Cut | None:
    """The slice of a micro-batch begins earlier or later, and the one before it ends there."""
    earlier = made.before[follower]
    later_slice = next(span for span in made.microbatches[follower].spans if span.start)
    slices = made.microbatches[earlier].spans
    slice_before = next(s for s in slices if (s.sequence, s.stop) == (later_slice.sequence, later_slice.start))
    shorter = min(later_slice.stop - later_slice.start, slice_before.stop - slice_before.start)
    at = later_slice.start + round(shorter * rng.gauss(0.0, 0.25))
    least, most = limits
    if min(at - slice_before.start, later_slice.stop - at) < least:
        return None
    batches = list(made.microbatches)
    batches[earlier] = _with(batches[earlier], slice_before, slice_before._replace(stop=at))
    batches[follower] = _with(batches[follower], later_slice, later_slice._replace(start=at))
    if max(batches[earlier].num_tokens, batches[follower].num_tokens) > most:
        return None
    return Cut(tuple(batches), made.before)


def _with(batch: MicroBatchPlan, old: Span, new: Span) -> MicroBatchPlan:
    return MicroBatchPlan(tuple(new if span == old else span for span in batch.spans))


def _repacked(made: Cut, rng: random.Random, max_length: int) -> Cut | None:
    """A whole sequence in another micro-batch, but in none whose slice is followed by another."""
    followed = set(made.before)
    free = [m for m in range(len(made.before)) if m not in followed]
    source, target = rng.choice(free), rng.choice(free)
    # A micro-batch that would be left empty stays as it is; a slice of a sequence is not moved.
    wholes = [span for span in made.microbatches[source].spans if not span.start]
    if source == target or len(made.microbatches[source].spans) < 2 or not wholes:
        return None
    span = rng.choice(wholes)
    batches = list(made.microbatches)
    batches[source] = MicroBatchPlan(tuple(other for other in batches[source].spans if other != span))
    batches[target] = MicroBatchPlan((*batches[target].spans, span))
    return Cut(tuple(batches), made.before) if batches[target].num_tokens <= max_length else None
