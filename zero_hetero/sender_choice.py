"""Which of several holders sends a slice: the choice of Hetu v2, section 4.3, over columns of pieces."""

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
    atoms are served in order, and within an atom the receivers in order of rank.
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
        turn = {rank: index for index, rank in enumerate(dict.fromkeys(request.rank for request in requests))}
        for rank, row, start, stop in requests:
            own = position.get(rank)
            if own is None:
                own = _least_busy(cheapest.among(rank, holders), sent[holders], turn[rank])
                sent[holders[own]] += stop - start
            rows.append((row, int(holder_rows[own]), start, stop))
    return Overlaps(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def _least_busy(candidates: Column, sent: Column, turn: int) -> int:
    """The candidate (an index into the holders) that has sent least; ties go to the receiver's own index."""
    load = sent[candidates]
    ties = candidates[load == load.min()]
    preferred = turn % len(sent)
    return int(ties[np.argmin((ties - preferred) % len(sent))])


class _Cheapest:
    """The holders with the fastest link to a receiver, remembered: many atoms have the same holders."""

    def __init__(self, link_cost: LinkCost | None):
        self.link_cost = link_cost
        self.known: dict[tuple[int, bytes], Column] = {}

    def among(self, receiver: int, holders: Column) -> Column:
        if self.link_cost is None:
            return np.arange(len(holders))
        key = (receiver, holders.tobytes())
        if key not in self.known:
            cost = np.array([self.link_cost(sender, receiver) for sender in holders.tolist()])
            self.known[key] = np.flatnonzero(cost == cost.min())
        return self.known[key]


def _holders_by_atom(held: PieceColumns, cuts: Column) -> dict[int, Column]:
    """For each atom the rows of `held` that cover it, in order of rank."""
    piece, atom = expand(np.searchsorted(cuts, held.start), np.searchsorted(cuts, held.stop))
    order = np.lexsort((held.rank[piece], atom))
    piece, atom = piece[order], atom[order]
    atoms, first = np.unique(atom, return_index=True)
    return dict(zip(atoms.tolist(), np.split(piece, first[1:]), strict=True))


def _requests_by_atom(wanted: PieceColumns, cuts: Column) -> dict[int, list[_Request]]:
    row, atom, start, stop = overlaps(wanted.start, wanted.stop, cuts[:-1], cuts[1:])
    order = np.lexsort((start, wanted.rank[row], atom))
    columns = (column[order].tolist() for column in (atom, wanted.rank[row], row, start, stop))
    requests: dict[int, list[_Request]] = defaultdict(list)
    for index, *request in zip(*columns, strict=True):
        requests[index].append(_Request(*request))
    return requests
