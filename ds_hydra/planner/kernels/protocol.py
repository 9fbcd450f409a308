"""The kernels that the planner calls, with their types: plain Python and compiled ones look the same from outside.

Kernels call each other as ordinary functions. What is called from outside goes through a value of this type, so that
the choice between the two is made in one place (`load.select`) and every call is checked by types all the same. A test
compares each signature with the kernel's own. What the arguments mean stands with the kernels.
"""

from __future__ import annotations

from typing import Protocol

from ds_hydra.planner.kernels.arrays import (
    Floats,
    Ints,
    Items,
    Pieces,
    Pipe,
    Placement,
    Problem,
    Prospect,
    Scheme,
    Schemes,
    SearchEffort,
)


class Kernels(Protocol):
    """The entry points of the kernels; `is_compiled` says by which way they run."""

    is_compiled: bool

    # bounds and proofs: bound.py, proof.py
    def share_of_pipeline(self, schemes: Schemes, k: int, items: Items, tau: float, out: Floats) -> None: ...

    def strategy_bound(self, problem: Problem, outer: int, inner: int, price: Floats) -> float: ...

    def refute(
        self, problem: Problem, tau: float, base_price: Floats, deepest: int, rounds: int, budget: int
    ) -> int: ...

    # dispatch and packing: dispatch.py, packing.py
    def dispatch(
        self, problem: Problem, prospect: Prospect, effort: SearchEffort, seed: int, place: Placement
    ) -> float: ...

    def pack_all(self, problem: Problem, rounds: int, place: Placement) -> float: ...

    def pack(
        self, scheme: Scheme, work: Floats, tokens: Ints, rounds: int, out_bin: Ints
    ) -> tuple[int, float, float, int]: ...

    def packing_bound(self, scheme: Scheme, work: Floats, tokens: Ints, best_v: int, best_ms: float) -> float: ...

    # micro-batches with slices: cut_search.py
    def search_profiles(
        self, pipe: Pipe, work: Floats, tokens: Ints, rows: Floats, variations: int, state: Ints, us: Ints, best: Pieces
    ) -> int: ...

    def search_moves(self, pipe: Pipe, moves: int, took: int, state: Ints, best: Pieces) -> int: ...

    # tiny steps: tiny.py
    def subset_costs(self, scheme: Scheme, work: Floats, tokens: Ints, cost: Floats, parts: Ints) -> None: ...

    def best_split(self, cost: Floats, scheme: Ints, n: int, owner: Ints) -> float: ...

    def pack_tiny(self, scheme: Scheme, work: Floats, tokens: Ints, bin_of: Ints) -> None: ...
