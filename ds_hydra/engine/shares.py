"""What each rank's script hands in, in; what all ranks know of it, and the sequences where they run, out."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ds_hydra.data.columns import ItemCheck
from ds_hydra.data.sequences import Share, Tally, read_share
from ds_hydra.data.stream import StreamSampler
from ds_hydra.data.tokens import LeftOut, Limits, Reads, TokenSequence, merged, with_targets
from ds_hydra.engine.crew import Crew
from ds_hydra.pipe.rows import Field, FieldLayout
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.ranks.together import agree
from ds_hydra.step.delivery import Delivered, deliver
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.told import Told, mark_told

logger = logging.getLogger(__name__)


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

    lengths: tuple[int, ...]  # in tokens
    owners: tuple[int, ...]  # the rank that has each
    begins: tuple[int, ...]  # of each rank's sequences
    num_targets: int  # of all ranks
    num_batches: int  # of all ranks, that have a target
    num_learnt: int  # sequences of all ranks that have a target
    layout: FieldLayout  # of their fields, if these were read

    def own(self, rank: int) -> slice:
        """The sequences of a rank."""
        return slice(*self.begins[rank : rank + 2])


class Shares:
    """Reads, gathers and delivers on a crew. Every rank must call the same methods."""

    def __init__(self, crew: Crew, limits: Limits):
        self._crew, self._limits = crew, limits
        self._check = ItemCheck(limits.inputs)
        self._tally = Tally()

    def read(self, batches: Iterable[tuple[Any, float]], fields: Reads | None = None) -> Mine:
        """Read this rank's batches, with the factors of their losses."""
        read: list[tuple[Share, float]] = []
        try:
            for batch, factor in batches:
                first = sum(share.num_items for share, _ in read)
                share = read_share(batch, self._limits, first=first, check=self._check, fields=fields)
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
        told = json.dumps([mine.ended, mine.left_out, counts, lengths, mine.layout, call], separators=(",", ":"))
        texts = agree(self._crew.world.channel, mine.error, f"reading the sequences of {what}", told, alike=True)
        ended, lost, all_counts, by_rank, layouts, calls = zip(*map(json.loads, texts), strict=True)
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
            tuple(length for of_rank in by_rank for length in of_rank),
            tuple(rank for rank, of_rank in enumerate(by_rank) for _ in of_rank),
            tuple(accumulate(map(len, by_rank), initial=0)),
            num_targets,
            num_batches,
            num_learnt,
            _layout_of_all(layouts),
        )

    def deliver(self, plan: StepPlan, mine: Sequence[TokenSequence], gathered: Gathered, columns: int = 0) -> Delivered:
        """The sequences of a plan where they run; their fields have so many columns."""
        owned = enumerate(mine, start=gathered.begins[self._crew.world.rank])
        return _deliver(self._crew, plan, gathered.owners, dict(owned), columns)


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
    strategies = [crew.stepper.runtimes.strategy_of(phase) for phase in plan.phases]
    return deliver(plan, strategies, owners, mine, crew.world.channel, columns)
