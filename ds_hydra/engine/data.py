"""Data that ranks read together: lengths of training data, read once, and what each script hands in for a step."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise, starmap
from typing import Any, NamedTuple

import numpy as np
import torch

from ds_hydra.costs.loads import Lengths
from ds_hydra.data.columns import ItemCheck, is_packed, read_item
from ds_hydra.data.lengths import ItemLengths, given_lengths, keep, kept, read_part
from ds_hydra.data.sequences import SequenceData, Share, Tally, read_share
from ds_hydra.data.stream import StreamSampler, is_stream
from ds_hydra.data.tokens import LeftOut, Limits, Reads, TokenSequence, merged, with_targets
from ds_hydra.engine.crew import Crew
from ds_hydra.engine.plugs import plugged
from ds_hydra.pipe.rows import Field, FieldLayout
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import PlannedStep
from ds_hydra.ranks.channel import Channel, agree, together
from ds_hydra.step.delivery import Delivered, deliver
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.told import Told, mark_told

logger = logging.getLogger(__name__)


_COMPARED = 8  # items that each rank reads to see that it has the same data


def scan_together(dataset: Any, channel: Channel, limits: Callable[[], Limits] = Limits) -> ItemLengths | None:
    """Lengths of map-style data that do not tell theirs; None for other data. Every rank must call it.

    An item that cannot be trained on within the job's limits, which `limits` tells, is an error on all ranks.
    """
    with together(channel, "reading the data"):
        silent = _is_silent(dataset)
        found = kept(dataset) if silent else None
    if not silent:
        return None
    texts = channel.texts("" if found is None else hashlib.sha256(np.concatenate(found).tobytes()).hexdigest())
    if found is not None and len(set(texts)) == 1:
        return found
    with together(channel, "reading the lengths of the data"):
        part = read_part(dataset, channel.rank, channel.num_ranks, limits())
    found = ItemLengths.joined(_gathered(part, channel))
    with together(channel, "comparing the data of all ranks"):
        _compare(dataset, found)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # once a node
        keep(dataset, found)
    return found


def read_twice(data: SequenceData, channel: Channel) -> None:
    """ConfigError on all ranks for sequences that are others when they are read again, or on another rank. Every rank
    must call it; some, spread over all, are read.

    Each rank that runs a part of a sequence reads it for itself: of one that is drawn anew, ranks would train on parts
    that do not belong together.
    """
    with together(channel, "reading some of the data twice"):
        used = np.flatnonzero(data.lengths)
        some = used[np.linspace(0, len(used) - 1, num=min(len(used), _COMPARED)).astype(int)].tolist()
        mine, again = ([_digest(data.load_sequence(each)) for each in some] for _ in range(2))
        for sequence, first, second in zip(some, mine, again, strict=True):
            if first != second:
                raise ConfigError(
                    f"sequence {sequence} of the data has other tokens or labels when it is read again, but each rank "
                    "that runs a part of it reads it for itself: draw what is random from the item's index "
                    "(torch.Generator().manual_seed(index)), or before training"
                )
    texts = channel.texts(" ".join(mine))
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        at = next(i for i, (a, b) in enumerate(zip(texts[0].split(), texts[other].split(), strict=False)) if a != b)
        raise ConfigError(
            f"sequence {some[at]} of the data has other tokens or labels on rank {other} than on rank 0: give every "
            "rank the same data, in the same order; which rank trains on what is decided by the plans"
        )


def _digest(sequence: TokenSequence) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in sequence[:2])).hexdigest()[:16]


def _is_silent(dataset: Any) -> bool:
    """Whether this is map-style data whose lengths are found by reading."""
    if is_stream(dataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return False
    if isinstance(dataset, dict) or not len(dataset):
        return False
    return given_lengths(dataset) is None or is_packed(dataset[0])


def _compare(dataset: Any, found: ItemLengths) -> None:
    """ConfigError if this rank's data are not those that the ranks have read: some items, spread over all, must be as
    long."""
    ends = np.cumsum(found.counts)
    for index in np.linspace(0, len(dataset) - 1, num=min(len(dataset), _COMPARED)).astype(int).tolist():
        mine = read_item(dataset[index], index).lengths
        read = tuple(found.lengths[ends[index] - found.counts[index] : ends[index]].tolist())
        if mine != read:
            raise ConfigError(
                f"item {index} of the data holds sequences of {mine} tokens on one rank, but of {read} on the one that "
                "read it for all: give every rank the same data, in the same order"
            )


def _gathered(part: ItemLengths, channel: Channel) -> list[ItemLengths]:
    """The parts of all ranks, in their order."""
    sizes = channel.rows(torch.tensor([len(part.lengths), len(part.counts)]))
    row = torch.zeros(int(sizes.sum(dim=1).max()), dtype=torch.int64)
    mine = torch.from_numpy(np.concatenate(part))
    row[: len(mine)] = mine
    return [
        ItemLengths(*(piece.numpy() for piece in of_rank[: size.sum()].split(size.tolist())))
        for of_rank, size in zip(channel.rows(row), sizes, strict=True)
    ]


class Mine(NamedTuple):
    """What this rank's script handed in for a step."""

    batches: tuple[tuple[Share, float], ...] = ()  # with the factors of their losses
    ended: bool = False  # there is nothing, because its iterator has ended
    error: Exception | None = None  # there is nothing, because this happened

    @property
    def sequences(self) -> list[TokenSequence]:
        return [sequence for share, _ in self.batches for sequence in share.sequences]

    @property
    def left_out(self) -> LeftOut:
        return sum((share.left_out for share, _ in self.batches), LeftOut())

    @property
    def layout(self) -> FieldLayout | None:
        """Of the fields of its items, if they were read and there are any."""
        return next((share.layout for share, _ in self.batches if share.layout is not None), None)

    def places(self, begin: int) -> list[slice]:
        """The sequences of each batch, among those of all ranks; `begin` is this rank's first."""
        ends = accumulate((len(share.sequences) for share, _ in self.batches), initial=begin)
        return list(starmap(slice, pairwise(ends)))

    def checked(self, check: Callable[[Mine], None]) -> Mine:
        """The same, or the error that `check` raises; whatever a script's own function does there is one."""
        if self.error is not None:
            return self
        try:
            check(self)
        except Exception as raised:  # the other ranks wait for this one
            return Mine(error=raised)
        return self


class Gathered(NamedTuple):
    """What every rank knows of the sequences of a step: those of rank 0 come first, in the order handed in."""

    lengths: tuple[int, ...]  # in tokens; with images `Lengths`
    owners: tuple[int, ...]  # the rank that has each
    begins: tuple[int, ...]  # of each rank's sequences
    num_targets: int  # of all ranks
    num_batches: int  # of all ranks, that have a target
    num_learnt: int  # sequences of all ranks that have a target
    layout: FieldLayout  # of their fields, if these were read

    def own(self, rank: int) -> slice:
        """The sequences of a rank."""
        return slice(*self.begins[rank : rank + 2])


class Dispatched(NamedTuple):
    """What ranks have handed in: planned, and delivered to the ranks that run it."""

    mine: Mine
    planned: PlannedStep
    gathered: Gathered
    delivered: Delivered

    @property
    def plan(self) -> StepPlan:
        return self.planned.plan


class SequenceExchange:
    """Reads, gathers and delivers on a crew. Every rank must call the same methods."""

    def __init__(self, crew: Crew, limits: Limits):
        self._crew, self._limits = crew, limits
        self._check = ItemCheck(limits.inputs)
        self._tally = Tally()
        images = crew.job.config.images
        self._images = plugged("images", "hydra.images").ImageExchange(crew) if images else None

    def read(self, batches: Iterable[tuple[Any, float]], fields: Reads | None = None) -> Mine:
        """Read this rank's batches, with the factors of their losses."""
        read: list[tuple[Share, float]] = []
        read_one = read_share if self._images is None else self._images.read
        try:
            for batch, factor in batches:
                first = sum(share.num_items for share, _ in read)
                share = read_one(batch, self._limits, first=first, check=self._check, fields=fields)
                read.append((share, factor))
                for line in share.notes if self._crew.world.rank == 0 else ():
                    logger.warning("%s", line)
        except Exception as raised:  # whatever a batch does when it is looked at
            return Mine(error=raised)
        return Mine(tuple(read))

    def gather(self, mine: Mine, what: str, call: str = "") -> Gathered:
        """Tell all ranks the lengths of this rank's sequences, or its error, in one small message.

        `call` says how the script has called for `what`: ConfigError on all ranks where it differs, or where their
        fields do.
        """
        lengths = [len(sequence.input_ids) for sequence in mine.sequences]
        targets = [share.num_targets for share, _ in mine.batches if share.num_targets]
        counts = [sum(targets), len(targets), sum(share.num_learnt for share, _ in mine.batches)]
        loads = [] if self._images is None else self._images.loads(mine.sequences)
        told = json.dumps([mine.ended, mine.left_out, counts, lengths, mine.layout, call, loads], separators=(",", ":"))
        texts = agree(self._crew.world.channel, mine.error, f"reading the sequences of {what}", told, alike=True)
        ended, lost, all_counts, by_rank, layouts, calls, all_loads = zip(*map(json.loads, texts), strict=True)
        _refuse_other_calls(what, calls)
        left_out = sum((LeftOut(*of_rank) for of_rank in lost), LeftOut())
        if self._tally.add(left_out) and self._crew.world.rank == 0:
            logger.warning("of the sequences handed in so far: %s", self._tally.total)
        if not any(by_rank):
            if all(ended):
                raise StopIteration("the iterators of all ranks have ended")
            raise ConfigError(
                f"{what}: no rank handed in a sequence of at least two tokens ({left_out}): give sequences on one rank "
                "at least"
            )
        num_targets, num_batches, num_learnt = (sum(of_ranks) for of_ranks in zip(*all_counts, strict=True))
        return Gathered(
            Lengths.of(chain.from_iterable(by_rank), chain.from_iterable(all_loads)),
            tuple(rank for rank, of_rank in enumerate(by_rank) for _ in of_rank),
            tuple(accumulate(map(len, by_rank), initial=0)),
            num_targets,
            num_batches,
            num_learnt,
            _layout_of_all(layouts),
        )

    def dispatch(
        self, mine: Mine, what: str = "", call: str = "", *, step: int | None = None, first: int = 0,
        run: Callable[[Sequence[TokenSequence], Gathered], Sequence[TokenSequence]] = lambda own, _: own,
    ) -> Dispatched:  # fmt: skip
        """Gather, plan and deliver what ranks hand in: for a `step`, counted from 0, of which `first` sequences were
        dispatched before, or outside of training. `what` and `call` as of `gather`; `run` gives the sequences that run
        in the place of this rank's."""
        gathered, plans = self.gather(mine, what or f"step {(step or 0) + 1}", call), self._crew.plans
        if step is None:
            planned = plans.plan_once(tuple(range(len(gathered.lengths))), gathered.lengths)
        else:
            planned = plans.given(step, gathered.lengths, first)
        own = run(mine.sequences, gathered)
        delivered = self.deliver(planned.plan, own, gathered, gathered.layout.num_columns)
        return Dispatched(mine, planned, gathered, delivered)

    def deliver(self, plan: StepPlan, mine: Sequence[TokenSequence], gathered: Gathered, columns: int = 0) -> Delivered:
        """The sequences of a plan where they run; their fields have so many columns."""
        owned = dict(enumerate(mine, start=gathered.begins[self._crew.world.rank]))
        delivered = _deliver(self._crew, plan, gathered.owners, owned, columns)
        if self._images is None:
            return delivered
        with_images: Delivered = self._images.deliver(plan, gathered.owners, owned, delivered)
        return with_images


def _refuse_other_calls(what: str, calls: Sequence[str]) -> None:
    """ConfigError, known to all ranks, where one has called otherwise than rank 0."""
    other = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
    if other is not None:
        error = ConfigError(
            f"{what}: rank 0 asked for {calls[0]}, but rank {other} for {calls[other]}: make the same call on all ranks"
        )
        raise mark_told(error, Told(other, f"ConfigError: {error}", here=True))


def _layout_of_all(told: Sequence[Any]) -> FieldLayout:
    """The layout that the ranks with items agree on, with what each step of fields has. ConfigError as above."""
    layouts = [
        (f"item 0 of the data of rank {rank}", FieldLayout(tuple(Field(*one) for one in layout[0])))
        for rank, layout in enumerate(told)
        if layout is not None
    ]
    if not layouts:
        return FieldLayout()
    try:
        return with_targets(merged(layouts))
    except ConfigError as error:
        raise mark_told(error, Told(0, f"ConfigError: {error}", here=True)) from None


def deliver_streamed(crew: Crew, plan: StepPlan, stream: StreamSampler) -> Delivered:
    """The sequences of a planned step of a stream, from the rank that reads to those that run them."""
    return _deliver(crew, plan, (0,) * len(plan.lengths), stream.taken(plan.step))


def _deliver(
    crew: Crew, plan: StepPlan, owners: Sequence[int], mine: Mapping[int, TokenSequence], columns: int = 0
) -> Delivered:
    return deliver(plan, crew.strategies_of(plan), owners, mine, crew.world.channel, columns)
