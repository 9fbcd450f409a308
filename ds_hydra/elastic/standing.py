"""What this rank holds between two views, and what it makes of all reports: the newest cut at the newest step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ds_hydra.elastic.copies import Copy, Held
from ds_hydra.elastic.view import NOTHING_HELD, Report, View, newest_layout, to_apply, usable
from ds_hydra.engine.calls import end_lost
from ds_hydra.zero_hetero.buddies import check_nothing_lost
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.norm_table import NormTable

if TYPE_CHECKING:
    from ds_hydra.engine.crew import Crew
    from ds_hydra.step.update import Update


class SurvivingState:
    """Masters and their update, and those of a further cut that may not be whole on all ranks; none where it joins."""

    def __init__(self, shift_of: Callable[[Sequence[str]], int]) -> None:
        """`shift_of` tells who keeps whose copy, of the hosts by rank [Note: buddies]."""
        self._shift_of = shift_of
        self.held: Held | None = None
        self.update: Update | None = None
        self._aside: tuple[Held, Update] | None = None

    def report(self) -> Report:
        """What is told to the others while training stands still."""
        update, held = self.update, self.held
        if update is None or held is None:
            return Report()
        whole = held.copy is None or not held.copy.stale
        table, last = (one.name if one else None for one in (update.table, update.last))
        return Report(update.committed, table, last, held.epoch if whole else NOTHING_HELD)

    def tables(self) -> dict[str, NormTable]:
        """Those that the report names."""
        held = () if self.update is None else (self.update.table, self.update.last)
        return {one.name: one for one in held if one is not None}

    def settle(self, view: View, own: int, ids: Sequence[int]) -> Held:
        """Hold the newest cut, at the newest step, as all other ranks of the view. Ends the process where that was lost
        with the ranks that are gone."""
        newest = newest_layout(view.reports.values())
        if newest == NOTHING_HELD:
            end_lost("ranks were lost before each rank's share of the model had a copy")
        if self._aside is not None and self._aside[0].epoch == newest:
            self.take_aside()
        held, update = self.held or Held.of_joiner(view, self._shift_of), self.update
        assert held.epoch == newest, "a cut that was taken is there"
        try:
            check_nothing_lost(held.members, ids, held.shift)
        except PlanError as error:
            end_lost(str(error))
        if update is not None:
            steps = [report.committed for report in view.reports.values()]
            name, behind = to_apply(view.reports[own], view.reports.values()), max(steps) - update.committed
            assert behind <= (name is not None), f"{behind} steps behind others, with table {name}"
            table = usable({**self.tables(), **view.tables}[name]) if name is not None else None
            if table is not None:
                update.complete(table)
            update.table = None
        return held

    def put_aside(self, view: View, crew: Crew) -> None:
        """Keep what has been cut for a view: whether all have theirs, only the next message tells."""
        members = tuple(member.id for member in view.members)
        assert crew.copy is None or isinstance(crew.copy, Copy), "the plug has made it"
        held = Held(view.epoch, members, crew.shift, crew.masters, crew.update.optimizer, crew.copy)
        self._aside = held, crew.update

    def take_aside(self) -> None:
        """Hold what was put aside, and nothing else."""
        assert self._aside is not None, "it was made"
        (self.held, self.update), self._aside = self._aside, None
