"""The pairs of ranks that a transfer has messages between, in; the order in which they leave and come, out. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_hydra.simulate.links import LinkModel
from ds_hydra.zero_hetero.intervals import sorted_by

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Routes(NamedTuple):
    """Between whom the messages of a transfer plan go, whatever they hold: layers and embeddings have the same.

    `src` and `dst` are the plan's columns; a message is of the slices from one of `first` on, in the order `slices`.
    By message, as they leave: `latency` in seconds, `rate` in bytes/s and whether it `crosses` from one node to
    another; `order` is how they come.
    """

    src: Ints
    dst: Ints
    slices: Ints
    first: Ints
    latency: Floats
    rate: Floats
    crosses: NDArray[np.bool_]
    senders: Ints
    first_out: Ints
    order: Ints
    receivers: Ints
    first_in: Ints
    sender: Ints
    each: int

    @classmethod
    def of(cls, src: Ints, dst: Ints, n: int, links: LinkModel) -> Routes:
        """Of slices from ranks to others, of `n`."""
        given, far = (src, dst), (dst - src) % n
        slices = sorted_by(src, far, n)
        # Slices of one pair stand next to each other now, and are one message.
        first = begins_of((src * n + far)[slices])
        src, dst, far = (column[slices][first] for column in (src, dst, far))
        latency, rate, crosses = links.of_pairs(src, dst)
        first_out, order = begins_of(src), sorted_by(dst, far, n)
        coming = dst[order]
        first_in = begins_of(coming)
        sender = np.repeat(np.arange(len(first_out)), counts_of(first_out, len(src)))[order]
        counts = counts_of(first_in, len(coming))
        each = int(counts[0]) if len(counts) and (counts == counts[0]).all() else 0
        return cls(
            *given, slices, first, latency, rate, crosses, src[first_out], first_out, order, coming[first_in], first_in,
            sender, each,
        )  # fmt: skip

    def join(self, src: Ints, dst: Ints) -> bool:
        """Whether slices of these columns go the same ways."""
        return np.array_equal(self.src, src) and np.array_equal(self.dst, dst)


def begins_of(column: Ints) -> Ints:
    """Where each value begins, in a column in which equal ones follow each other."""
    new = np.ones(len(column), dtype=bool)
    np.not_equal(column[1:], column[:-1], out=new[1:])
    return np.flatnonzero(new)


def counts_of(first: Ints, end: int) -> Ints:
    """Entries from each of these on to the next, or to the end; numpy's `diff` takes five times as long for that."""
    counts = np.empty_like(first)
    if len(first):
        np.subtract(first[1:], first[:-1], out=counts[:-1])
        counts[-1] = end - first[-1]
    return counts
