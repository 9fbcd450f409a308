"""The arrays that the kernels work on, as named tuples that numba can take apart. Pure: no torch.

Numba compiles no dictionary of objects and no class of ours, but it knows named tuples of arrays and numbers: a
kernel reads `problem.items.work` in the compiled version as in plain Python. They also keep argument lists short.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_hydra.costs.stage_work import StageCosts

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Scheme(NamedTuple):
    """Constants of one scheme: scalars, as the innermost loops want them."""

    c: float
    max_length: int
    util_length: int
    pp: float  # of stages that differ less than their number: `SchemeCost.fills`
    floor: float


class Schemes(NamedTuple):
    """Constants of the schemes of a cost table, (schemes,) each."""

    c: Floats  # ms per micro-batch
    max_length: Ints  # tokens that a micro-batch holds
    util_length: Ints  # tokens per micro-batch from which on the device is well used
    pp: Floats  # as `Scheme.pp`
    longest: Ints  # tokens of the longest sequence; more than a micro-batch holds where sequences may be cut
    floor: Floats  # ms that any micro-batch takes


class Items(NamedTuple):
    """Sequences, longest first. In bounds an item may stand for `copies` sequences at least as long."""

    work: Floats  # (schemes, items) ms, without c
    tokens: Ints  # (items,)
    copies: Ints  # (items,)
    rates: Floats  # (schemes,) least ms per token


class Shape(NamedTuple):
    """A strategy: kind x is `pipelines[x]` equal pipelines of scheme `scheme[x]`; pipelines stand kind by kind."""

    scheme: Ints  # (kinds,) rows of the cost table
    pipelines: Ints  # (kinds,)
    pipeline_scheme: Ints  # (pipelines,)


class Problem(NamedTuple):
    """What a search has to solve: these sequences, on the pipelines of one strategy, at these costs."""

    schemes: Schemes
    items: Items
    shape: Shape


class Prospect(NamedTuple):
    """What is known of a strategy before it is searched."""

    bound: float  # ms; no plan is sooner done, so a plan that reaches it ends the search
    price: Floats  # (kinds,) the prices that proved the bound
    ceiling: float  # ms; a plan that takes longer is of no use, infinite where any plan is


class Placement(NamedTuple):
    """Sequences on pipelines and in their micro-batches, changed in place."""

    owner: Ints  # (items,) pipeline
    bin_of: Ints  # (items,) micro-batch of that pipeline
    total: Floats  # (pipelines,) ms of work, without c
    held: Ints  # (pipelines,) tokens
    widest: Floats  # (pipelines,) ms of the longest sequence
    ms: Floats  # (pipelines,) time of the pipeline
    spent: Ints  # (2,) elementary work, such as a look at a candidate: of placing and packing so far, and of repairs


class Bins(NamedTuple):
    """The micro-batches of one pipeline while they are being packed, changed in place."""

    bin_of: Ints  # (items,)
    load: Floats  # (at least v,) ms of each micro-batch, without c
    used: Ints  # (at least v,) tokens of each micro-batch
    spent: Ints  # (1,) elementary work so far, such as a look at a sequence


class Pipe(NamedTuple):
    """A pipeline whose micro-batches are to be made: plain numbers."""

    costs: StageCosts
    num_stages: int
    room: int  # units of memory of a stage
    max_length: int  # tokens that a micro-batch holds
    util_length: int  # tokens of the shortest slice
    slices: bool  # whether sequences may be cut
    layers: int  # of each range of layers, that may be computed again; 0: none may


class Profile(NamedTuple):
    """Target loads of slots [Note: slots]."""

    slots: int
    first: float
    growth: float
    last: float
    begin: int


class Pieces(NamedTuple):
    """The micro-batches of a pipeline, with all that they hold; changed in place. Arrays may be longer than needed."""

    item: Ints  # (pieces,) which of the pipeline's sequences, longest first
    start: Ints  # (pieces,) its first token
    stop: Ints  # (pieces,) the one after its last
    slot: Ints  # (pieces,) its micro-batch
    before: Ints  # (slots,) the micro-batch with the slice before the one here; -1 for none
    held: Ints  # (slots,) tokens
    again: Floats  # (slots,) share of the layers that are computed again
    counts: Ints  # (2,) pieces, slots


class SearchEffort(NamedTuple):
    """How much a dispatch may try, in counts, so that the result does not depend on the machine's speed."""

    restarts: int  # priced multifits with bisection
    moves: int  # candidates that one local search looks at
    levels: int  # moves and swaps that level one pipeline's micro-batches
    repackings: int  # packings that one repair makes
    packs: bool  # whether placements are packed and compared by packed time


LEAN = SearchEffort(restarts=0, moves=0, levels=0, repackings=0, packs=True)  # what plain Python has time for
