"""Which rank keeps a copy of whose masters, by the hosts of all; and what survivors hold after a loss. Pure.

[Note: buddies]
Rank r's masters are copied by rank r + m, counted in a circle, where m is the size of the largest node: with at least
2 m ranks that is in another node, so a node may be lost whole. On a single node m is 1, which guards against the loss
of a process or a device. Two ranks that are each other's neighbours in this circle may not be lost together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import Layout, Piece, even_layout
from ds_hydra.zero_hetero.transfer_plan import TransferPlan, plan_transfer


def shift_of(hosts: Sequence[str], *, copies: bool = True) -> int:
    """How far a rank's buddy is from it; 0 for a rank alone, and without copies. `hosts` are the hosts by rank; a
    node's ranks lie side by side."""
    if len(hosts) < 2 or not copies:
        return 0
    largest = max(Counter(hosts).values())
    return largest if len(set(hosts)) > 1 and largest % len(hosts) else 1


def copy_plan(numel: int, num_ranks: int, shift: int) -> TransferPlan:
    """What brings each rank's share of a bucket to who keeps a copy of it."""
    own = even_layout(numel, num_ranks)
    wards = [(rank - shift) % num_ranks for rank in range(num_ranks)]
    kept = Layout(numel, tuple(own.pieces[ward] for ward in wards), tuple(own.sizes[ward] for ward in wards))
    return plan_transfer(own, kept)


def held_layout(numel: int, former: Sequence[int], members: Sequence[int], shift: int) -> Layout:
    """Which interval of a bucket each rank of a view holds of the layout of the former ranks: its own share, and behind
    it, where that rank is gone, the copy that it keeps.

    Both are given as ids of members, by rank. Raises PlanError, naming the member, where a share and its copy are lost.
    """
    shares = even_layout(numel, len(former))
    pieces: list[tuple[Piece, ...]] = []
    sizes: list[int] = []
    for member in members:
        own = wards_first(member, former, members, shift)
        found, size = [], 0
        for rank in own:
            for piece in shares.pieces[rank]:
                found.append(piece._replace(offset=size))
            size += shares.sizes[rank]
        pieces.append(tuple(sorted(found)))
        sizes.append(size)
    return Layout(numel, tuple(pieces), tuple(sizes))


def wards_first(member: int, former: Sequence[int], members: Sequence[int], shift: int) -> tuple[int, ...]:
    """Former ranks whose shares a member gives: its own, and that of which it keeps the copy, if that rank is gone."""
    if member not in former:
        return ()
    rank = former.index(member)
    ward = (rank - shift) % len(former)
    return (rank,) if former[ward] in members or ward == rank else (rank, ward)


def may_leave(ranks: Sequence[int], num_ranks: int, shift: int) -> tuple[int, ...]:
    """Of ranks that want to leave those that can at the same time: each one's copy is with a rank that stays."""
    found: list[int] = []
    for rank in ranks:
        if shift and not {(rank + shift) % num_ranks, (rank - shift) % num_ranks} & {*found}:
            found.append(rank)
    return tuple(found)


def check_nothing_lost(former: Sequence[int], members: Sequence[int], shift: int) -> None:
    """PlanError where a member of the former view is gone, and its buddy too, or nobody kept a copy."""
    gone = [member for member in former if member not in members]
    if gone and not shift:
        raise PlanError(
            f"member {gone[0]} is gone, and nobody kept a copy of its share of the model (hydra.elastic.redundancy is "
            '"off"): training cannot go on from memory, only from a checkpoint'
        )
    for rank, member in enumerate(former):
        buddy = former[(rank + shift) % len(former)]
        if member not in members and buddy not in members:
            raise PlanError(
                f"members {member} and {buddy} are gone, of which each kept the other's share of the model or had it "
                "kept: training cannot go on from memory, only from a checkpoint"
            )
