"""A pipeline that may cut sequences in; what long ones cost it beside their work, out. Pure: no torch.

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
from functools import lru_cache

import numpy as np

from ds_hydra.costs.stage_work import UNITS
from ds_hydra.planner.cutting import Effort, counts_more, cut_best
from ds_hydra.planner.kernels.arrays import Floats, Ints, Pipe
from ds_hydra.planner.kernels.protocol import Kernels

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
