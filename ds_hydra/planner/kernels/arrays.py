"""The arrays that the kernels work on, as named tuples that numba can take apart. Pure: no torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Scheme(NamedTuple):
    """Constants of one scheme, and the objective: scalars, as the innermost loops want them."""

    c: float
    max_length: int
    util_length: int
    pp: int
    paper: bool


class Schemes(NamedTuple):
    """Constants of the schemes of a cost table, (schemes,) each, and the objective."""

    c: Floats  # ms per micro-batch
    max_length: Ints  # tokens that a micro-batch holds
    util_length: Ints  # tokens per micro-batch from which on the device is well used
    pp: Ints
    paper: bool  # Eq. 1 in place of the flow shop


class Items(NamedTuple):
    """Sequences, longest first. In bounds an item may stand for `copies` sequences at least as long."""

    work: Floats  # (schemes, items) ms, without c
    tokens: Ints  # (items,)
    copies: Ints  # (items,)
    rates: Floats  # (schemes,) least ms per token


class Shape(NamedTuple):
    """A strategy: group g is `pipelines[g]` equal pipelines of scheme `scheme[g]`; pipelines stand group by group."""

    scheme: Ints  # (groups,)
    pipelines: Ints  # (groups,)
    pipeline_scheme: Ints  # (pipelines,)


class Placement(NamedTuple):
    """Sequences on pipelines, changed in place: owner (items,), the rest (pipelines,)."""

    owner: Ints
    total: Floats  # ms of work, without c
    held: Ints  # tokens
    widest: Floats  # ms of the longest sequence
    ms: Floats  # time of the pipeline


class Effort(NamedTuple):
    """How much a dispatch may try, in counts."""

    restarts: int  # priced multifits with bisection
    moves: int  # candidates that one local search looks at
    levels: int  # moves and swaps that level one pipeline's micro-batches
    repackings: int  # packings that one repair makes
    packs: bool  # whether placements are packed and compared by packed time


LEAN = Effort(restarts=0, moves=0, levels=0, repackings=0, packs=True)
