"""The schemes of candidate strategies in, the fewer and smaller ones that stand for them out. Pure: no torch.

What can go wrong in a stage depends on its kind: whether it is the first, one in the middle or the last, and its tensor
and sequence parallel degrees. Two middle stages are the same kind, so tp2pp8 is checked as tp2pp3; a stage of
32 ranks is checked with fewer that divide the same heads, so tp4sp8 is checked as tp4sp2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ds_hydra.pipe.placement import Pipeline, place_pipeline
from ds_hydra.pipe.shape import ParallelScheme

_KINDS_OF_STAGES = 3  # first, middle, last
_RANKS_OF_STAGE = 8

BASE = ParallelScheme()


def stand_in(scheme: ParallelScheme) -> ParallelScheme:
    """The scheme that is run to check `scheme`; its own stand-in."""
    tp = _divisor(scheme.tp, _RANKS_OF_STAGE if scheme.sp == 1 else _RANKS_OF_STAGE // 2)
    sp = _divisor(scheme.sp, _RANKS_OF_STAGE // tp)
    return ParallelScheme(tp, min(scheme.pp, _KINDS_OF_STAGES), sp)


def _divisor(degree: int, limit: int) -> int:
    """The largest divisor within the limit; but a degree above 1 stays above 1."""
    divisors = [n for n in range(2, degree + 1) if degree % n == 0] or [1]
    return max((n for n in divisors if n <= limit), default=divisors[0])


def schemes_to_run(strategies: Iterable[Sequence[ParallelScheme]], *, whole: bool = False) -> list[ParallelScheme]:
    """Stand-ins of all schemes, each once, cheapest first; one rank alone, which shows what packing does, comes first.

    `whole` keeps the schemes as they are.
    """
    schemes = {scheme for strategy in strategies for scheme in strategy}
    chosen = schemes if whole else {stand_in(scheme) for scheme in schemes}
    return sorted(chosen | {BASE}, key=lambda scheme: (scheme.num_ranks, scheme))


def parts(scheme: ParallelScheme) -> list[ParallelScheme]:
    """Each degree of a scheme alone, to find out which of them a model cannot take."""
    alone = [ParallelScheme(tp=scheme.tp), ParallelScheme(pp=scheme.pp), ParallelScheme(sp=scheme.sp)]
    return [part for part in alone if part != BASE]


def num_layers(schemes: Iterable[ParallelScheme], kinds: int = 1) -> int:
    """Layers of a copy on which all `schemes` can be run with stages of unequal depth: 4 or more."""
    return max(4, kinds, *(scheme.pp + 1 for scheme in schemes))


def uneven_pipeline(scheme: ParallelScheme, layers: int) -> Pipeline:
    """A pipeline on ranks 0.. whose middle stage (the first of two) has the layers that are left over."""
    split = [1] * scheme.pp
    split[(scheme.pp - 1) // 2] += layers - scheme.pp
    return place_pipeline(scheme, 0, layers, split)


def head_divisor(heads: int, kv_heads: int, schemes: Iterable[ParallelScheme]) -> int:
    """By how much attention heads can be fewer in a copy, so that every degree divides them as before: a power of two.

    For each degree n: n divides the heads or not, is divided by the key/value heads or not, as with the model's own.
    """
    degrees = {n for scheme in schemes for n in (scheme.tp, scheme.sp, scheme.tp * scheme.sp)}

    def manner(factor: int) -> list[tuple[bool, bool, bool]]:
        return [
            (heads // factor % n == 0, kv_heads // factor % n == 0, n % (kv_heads // factor) == 0)
            for n in sorted(degrees)
        ]

    factor = 1
    while math.gcd(heads, kv_heads) % (2 * factor) == 0 and heads // factor > 8 and manner(2 * factor) == manner(1):
        factor *= 2
    return factor
