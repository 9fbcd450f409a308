"""Pieces that several ranks hold and pieces that are wanted in, one sender for each slice out. Pure.

The choice is that of Hetu v2, section 4.3: the receiver itself, else the fastest link, else who has sent least.

Example, all links alike: rank 0 holds elements 0 to 5, rank 1 holds 0 to 3; ranks 0, 2 and 3 want 0 to 5. The holders
change at element 4, so there are two atoms, [0, 4) with holders 0 and 1, and [4, 6) with holder 0.

    atom [0, 4)   rank 0 has it            local
                  rank 2                   both holders have sent nothing; rank 2 is the second to ask, so the second
                                           holder sends: rank 1, which has then sent 4
                  rank 3                   rank 0 has sent least: rank 0, which has then sent 4
    atom [4, 6)   rank 0 has it; ranks 2 and 3 can only ask rank 0, which ends with 8 sent

The choice is greedy and looks no further than the atom at hand, as in the paper. Every rank makes it in the same order
with whole numbers, so that all ranks come to the same plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ds_hydra.zero_hetero.intervals import Column, Overlaps, expand, overlaps
from ds_hydra.zero_hetero.layout import PieceColumns

LinkCost = Callable[[int, int], float]  # (sender, receiver) -> time per element, in any unit


class _Request(NamedTuple):
    """Receiver `rank` wants [start, stop), a part of one atom, for row `row` of the wanted pieces."""

    rank: int
    row: int
    start: int
    stop: int


def choose_senders(held: PieceColumns, wanted: PieceColumns, num_ranks: int, link_cost: LinkCost | None) -> Overlaps:
    """One held piece for each part of each wanted piece, as (wanted row, held row, start, stop).

    `held` is sorted by start. The tensor is cut into atoms, the intervals on which the set of holders is constant;
    atoms are served in order, and within an atom the receivers in order of rank. What nobody holds is left out; the
    caller notices.
    """
    cuts = np.unique(np.concatenate([held.start, held.stop]))
    holders_of = _holders_by_atom(held, cuts)
    sent = np.zeros(num_ranks, dtype=np.int64)
    cheapest = _Cheapest(link_cost)
    rows: list[tuple[int, int, int, int]] = []
    for atom, requests in _requests_by_atom(wanted, cuts).items():
        holder_rows = holders_of.get(atom)
        if holder_rows is None:
            continue
        holders = held.rank[holder_rows]
        position = {rank: index for index, rank in enumerate(holders.tolist())}
        # The receivers' places in the order of asking. A rank may ask twice in one atom (two pieces of its buffer want
        # a part of it each); both count as one place.
        turn = {rank: index for index, rank in enumerate(dict.fromkeys(request.rank for request in requests))}
        for rank, row, start, stop in requests:
            own = position.get(rank)
            if own is None:
                own = _least_busy(cheapest.among(rank, holders), sent[holders], turn[rank])
                sent[holders[own]] += stop - start  # local moves are free and do not count
            rows.append((row, int(holder_rows[own]), start, stop))
    return Overlaps(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def _least_busy(candidates: Column, sent: Column, turn: int) -> int:
    """The candidate (an index into the holders) that has sent least; `turn` decides between equals."""
    load = sent[candidates]
    ties = candidates[load == load.min()]
    # The first candidate from the receiver's own place on, going round: with holders 0 and 1 and receivers 2 and 3,
    # rank 0 sends to 2 and rank 1 to 3, atom after atom, so that each pair exchanges one message.
    preferred = turn % len(sent)
    return int(ties[np.argmin((ties - preferred) % len(sent))])


class _Cheapest:
    """The holders with the fastest link to a receiver, remembered: many atoms have the same holders."""

    def __init__(self, link_cost: LinkCost | None):
        self.link_cost = link_cost
        self.known: dict[tuple[int, bytes], Column] = {}

    def among(self, receiver: int, holders: Column) -> Column:
        """Indices into `holders` of those with the least cost to `receiver`; all of them where no cost is given."""
        if self.link_cost is None:
            return np.arange(len(holders))
        key = (receiver, holders.tobytes())
        if key not in self.known:
            cost = np.array([self.link_cost(sender, receiver) for sender in holders.tolist()])
            self.known[key] = np.flatnonzero(cost == cost.min())
        return self.known[key]


def _holders_by_atom(held: PieceColumns, cuts: Column) -> dict[int, Column]:
    """For each atom the rows of `held` that cover it, in order of rank."""
    # Pieces begin and end at cuts, so a piece covers the atoms from its start's cut up to its stop's.
    piece, atom = expand(np.searchsorted(cuts, held.start), np.searchsorted(cuts, held.stop))
    order = np.lexsort((held.rank[piece], atom))
    piece, atom = piece[order], atom[order]
    atoms, first = np.unique(atom, return_index=True)
    return dict(zip(atoms.tolist(), np.split(piece, first[1:]), strict=True))


def _requests_by_atom(wanted: PieceColumns, cuts: Column) -> dict[int, list[_Request]]:
    """For each atom what is wanted of it, in order of the receivers' ranks."""
    row, atom, start, stop = overlaps(wanted.start, wanted.stop, cuts[:-1], cuts[1:])
    order = np.lexsort((start, wanted.rank[row], atom))
    columns = (column[order].tolist() for column in (atom, wanted.rank[row], row, start, stop))
    requests: dict[int, list[_Request]] = defaultdict(list)
    for index, *request in zip(*columns, strict=True):
        requests[index].append(_Request(*request))
    return requests
