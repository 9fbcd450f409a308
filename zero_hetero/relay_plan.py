"""Two layouts and the size of a node in, a transfer in two hops out: each element enters a node once. Pure.

[Note: relay] A node is `node_size` consecutive ranks; links inside it are many times as fast as those between nodes.
Where several ranks of a node want the same elements, a transfer in one hop carries them into the node several times.
So a pull takes two hops:

    enter     What the ranks of a node want and none of them owns is brought in by one of those that want it, in equal
              parts where several do. What one of them owns goes to its neighbours at once.
    spread    Who brought something in passes it on inside the node.

Both hops write to the receivers' final places, so no buffer lies between them. A push is both hops transposed and in
the other order: a node adds up its own contributions first, so that one sum per element leaves it.

Example: 8 elements, nodes of ranks (0, 1) and (2, 3). Each rank owns 2 elements, rank 0 elements 0 and 1, rank 1
elements 2 and 3, and so on, and all four want all 8. The first node (the second does the same):

    enter     rank 1 -> rank 0  elements 2, 3     rank 0 -> rank 1  elements 0, 1     inside the node
              rank 2 -> rank 0  elements 4, 5     rank 3 -> rank 1  elements 6, 7     into the node
    spread    rank 0 -> rank 1  elements 4, 5     rank 1 -> rank 0  elements 6, 7     inside the node

4 elements enter the node, each once, where one hop would carry 8. A rank still receives 6 elements, as in one hop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import Layout, Piece
from ds_hydra.zero_hetero.transfer_plan import Slice, SliceColumns, TransferPlan, plan_transfer


class RelayPlan(NamedTuple):
    """The two hops of a pull, one after the other; see [Note: relay].

    Between the hops data lies in the destination's local buffers. An element that is at its final place already is
    a local move onto itself, so that the second hop names every element that arrives.
    """

    enter: TransferPlan
    spread: TransferPlan

    def transposed(self) -> tuple[TransferPlan, TransferPlan]:
        """The two hops of the push that goes back the way of this pull: first inside the nodes, then across."""
        return self.spread.transposed(), self.enter.transposed()


class _Wanter(NamedTuple):
    """A rank that wants an atom, and where it keeps the atom's first element."""

    rank: int
    offset: int


class _Atom(NamedTuple):
    """An interval that the same ranks of a node want; `owned`: a rank of this node has it in the source layout."""

    start: int
    stop: int
    wanters: tuple[_Wanter, ...]
    owned: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        """The wanters' ranks."""
        return tuple(rank for rank, _ in self.wanters)


def plan_relay(src: Layout, dst: Layout, node_size: int) -> RelayPlan:
    """Deliver `dst` from `src` as `plan_transfer` does, with each element entering a node at most once.

    No rank receives more elements than without the relay. Raises `PlanError` as `plan_transfer` does.
    """
    if node_size < 1:
        raise PlanError(f"a node of {node_size} ranks: give the number of ranks on one machine, at least 1")
    dst.validate()
    # The first hop is an ordinary transfer to a layout of its own: what each rank brings in, at its final place. The
    # second is written down slice by slice, since it is known already who passes what on to whom.
    arriving: list[list[Piece]] = [[] for _ in dst.pieces]
    spread: list[tuple[int, int, Slice]] = []  # (src, dst, slice)
    for first_rank in range(0, dst.num_ranks, node_size):
        node = range(first_rank, min(first_rank + node_size, dst.num_ranks))
        for atom, relay, start, length in _arrivals(tuple(_joined(_atoms(src, dst, node)))):
            at = relay.offset + start  # in the relay's buffer, where it arrives and from where it is passed on
            arriving[relay.rank].append(Piece(atom.start + start, atom.start + start + length, at))
            # What the node owns reaches every wanter in the first hop. Either way the relay reads its own part, a local
            # move onto itself: so the second hop names all that arrives, and its transpose sums all that is sent.
            readers = (relay,) if atom.owned else atom.wanters
            spread += [(relay.rank, reader.rank, Slice(at, reader.offset + start, length)) for reader in readers]
    entered = Layout(dst.numel, tuple(map(tuple, arriving)), dst.sizes)
    rows = np.array([(src_rank, dst_rank, *piece) for src_rank, dst_rank, piece in spread], dtype=np.int64)
    return RelayPlan(
        # Any link inside the node is cheaper than any between nodes: what the node owns never comes from outside.
        plan_transfer(src, entered, link_cost=lambda sender, receiver: sender // node_size != receiver // node_size),
        TransferPlan(dst.num_ranks, SliceColumns(*rows.reshape(-1, 5).T)),
    )


def _arrivals(atoms: Sequence[_Atom]) -> Iterator[tuple[_Atom, _Wanter, int, int]]:
    """Who receives what of each atom in the first hop, as (atom, receiver, start in the atom, length).

    All that the same ranks want together is cut into as many equal parts as there are of them, over all its atoms at
    once, and not atom by atom: so what one rank passes on is one interval, or few, which leaves and arrives without
    a copy. With atoms of 2 and 6 elements that ranks 0 and 1 want, rank 0 brings in the first atom and 2 elements of
    the second, rank 1 the other 4.
    """
    totals: dict[tuple[int, ...], int] = {}
    for atom in atoms:
        if not atom.owned:
            totals[atom.ranks] = totals.get(atom.ranks, 0) + atom.stop - atom.start
    before = dict.fromkeys(totals, 0)  # of what these ranks want, in the atoms so far
    for atom in atoms:
        length = atom.stop - atom.start
        if atom.owned:
            yield from ((atom, wanter, 0, length) for wanter in atom.wanters)
            continue
        begin, total, count = before[atom.ranks], totals[atom.ranks], len(atom.wanters)
        before[atom.ranks] += length
        for index, wanter in enumerate(atom.wanters):
            # The wanter's part of the total, [total * index // count, total * (index + 1) // count), as far as it lies
            # in this atom, which is [begin, begin + length) of the total.
            start, stop = (min(max(total * cut // count - begin, 0), length) for cut in (index, index + 1))
            if start < stop:
                yield atom, wanter, start, stop - start


def _joined(atoms: Iterator[_Atom]) -> Iterator[_Atom]:
    """Atoms that follow each other in the tensor and in every wanter's buffer, as one: fewer slices, same bytes."""
    last: _Atom | None = None
    for atom in atoms:
        if last is not None:
            length = last.stop - last.start
            follows = tuple(_Wanter(rank, offset + length) for rank, offset in last.wanters)
            if (last.stop, last.owned, follows) == (atom.start, atom.owned, atom.wanters):
                last = last._replace(stop=atom.stop)
                continue
            yield last
        last = atom
    if last is not None:
        yield last


def _atoms(src: Layout, dst: Layout, ranks: range) -> Iterator[_Atom]:
    """What a node wants, in the tensor's order, cut where its wanters, its owners or its buffers change."""
    wanted = sorted((piece.start, piece.stop, rank, piece.offset) for rank in ranks for piece in dst.pieces[rank])
    owned = sorted((piece.start, piece.stop) for rank in ranks for piece in src.pieces[rank])
    # A sweep over all cuts from left to right: pieces open when the sweep reaches their start and close at their stop.
    # Between two cuts nothing changes, so what is open there describes the whole atom.
    cuts = sorted({cut for start, stop, *_ in [*wanted, *owned] for cut in (start, stop)})
    next_wanted = next_owned = 0
    open_wanted: list[tuple[int, int, int, int]] = []
    open_owned: list[int] = []  # stops
    for start, stop in pairwise(cuts):
        while next_wanted < len(wanted) and wanted[next_wanted][0] <= start:
            open_wanted.append(wanted[next_wanted])
            next_wanted += 1
        while next_owned < len(owned) and owned[next_owned][0] <= start:
            open_owned.append(owned[next_owned][1])
            next_owned += 1
        open_wanted = [piece for piece in open_wanted if piece[1] > start]
        open_owned = [end for end in open_owned if end > start]
        if open_wanted:
            wanters = sorted(_Wanter(rank, offset + start - begin) for begin, _, rank, offset in open_wanted)
            yield _Atom(start, stop, tuple(wanters), bool(open_owned))
