"""Training goes on in the same processes when ranks are lost: an error in, the same step of fewer ranks out.

[Note: going on]
A fault ends the wait of every rank in an error [Note: freeing a thread]. Then each, in this order:

  leaves      lets go of all that belonged to the old ranks but its masters, its copy and the open step's gradients
  parks       tells what it holds, and gets the view: who goes on, and what they hold
  completes   makes the update of the open step if any survivor has the vote [Note: the vote], so that all stand
              at the same step; nothing else of the engine has moved
  assembles   groups and a crew for the ranks that are left, as a restart would
  cuts anew   masters and optimizer states, from shards and lost ranks' copies [Note: cutting anew]; then the copies.
              That they are whole is the vote on the cut
  goes on     with the step that was open, or the next one

A further fault in any of these begins anew at the first. A rank's own error, which no fault explains, is raised as it
is, and this rank is lost to the others.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from ds_hydra.elastic.buddies import check_nothing_lost, shift_of
from ds_hydra.elastic.resume import newest_layout, table_to_apply, usable
from ds_hydra.elastic.view import NOTHING_HELD, Agent, Report, View
from ds_hydra.engine import epochs
from ds_hydra.engine.held import Held
from ds_hydra.engine.record import Measured, step_record
from ds_hydra.engine.steps import OpenStep
from ds_hydra.ranks.freeing import Freeing
from ds_hydra.watchdog.host import host
from ds_hydra.zero_hetero.errors import PlanError, release, told_of

if TYPE_CHECKING:
    from ds_hydra.config.hydra_block import ElasticConfig
    from ds_hydra.engine.engine import HydraEngine
    from ds_hydra.engine.guard import Guard
    from ds_hydra.step.outcome import Outcome
    from ds_hydra.step.update import Update

logger = logging.getLogger(__name__)

_KNOWN_S = 5.0  # within which a fault is known that has ended a rank's wait
Result = TypeVar("Result")


def first_assembly(engine: HydraEngine, elastic: ElasticConfig, guard: Guard) -> None:
    """Assemble an engine that goes on without ranks that it loses. ConfigError, on all ranks, for a job that cannot go
    on without some of its ranks."""
    engine.going_on = GoingOn(engine, elastic, epochs.start_agent(engine))
    engine.going_on.begin(guard)


class GoingOn:
    """Of one engine, whose calls it repeats until they succeed."""

    def __init__(self, engine: HydraEngine, config: ElasticConfig, agent: Agent):
        self._engine, self.agent = engine, agent
        self._freeing = Freeing(config.stuck_seconds, epochs.end_stuck, agent.addresses)
        self._freeing.adopt()
        self.shift = shift_of([one.host for one in agent.view.members])  # who keeps whose copy [Note: buddies]
        self._held: Held | None = None
        self._update: Update | None = None
        self._aside: tuple[Held, Update] | None = None  # of a cut that may not be whole on all ranks
        self._open: OpenStep | None = None
        self._carried: epochs.Carried | None = None
        self._voted: Outcome | None = None  # of a step that was completed by the vote
        self._began_at = 0  # the steps that were made when the present call began
        self._save_again = False
        agent.on_abort(self._freeing.begin, self._freeing.resume)

    def begin(self, guard: Guard) -> None:
        """The first assembly."""
        view = self.agent.view
        atexit.register(self.agent.close)  # a script that ends by itself leaves in good order
        try:
            with self._freeing.making():
                self._engine.assemble(guard=guard)
        except Exception as error:
            if told_of(error) is None and self.agent.fault(within=_KNOWN_S):
                epochs.end_lost("ranks were lost before the job's first step")
            self.close()
            raise
        self._held, self._update = self._now(view), self._engine.crew.update
        self.agent.rebuilt()

    def close(self) -> None:
        """Leave the members in good order."""
        atexit.unregister(self.agent.close)
        self.agent.close()

    def train(self) -> Outcome:
        """The next step, and its save if it is due."""
        outcome: Outcome | None = None
        self._began_at, self._voted = self._engine.global_steps, None

        def step() -> Outcome:
            nonlocal outcome
            engine = self._engine
            outcome, self._voted = outcome or self._voted, None
            if self._save_again and engine.job.config.checkpoint is not None:
                engine.saving.save(engine.job.config.checkpoint.dir)
                self._save_again = False
            if outcome is None:
                outcome = engine.steps.train()
            engine.saving.when_due(outcome.request)
            return outcome

        return self.run(step)

    def run(self, part: Callable[[], Result]) -> Result:
        """What `part` returns, called again after each fault, when the ranks that are left have been assembled."""
        view: View | None = None
        while True:
            try:
                if view is not None:
                    self._rebuild(view)
                    view = None
                return part()
            except Exception as raised:
                error = raised
            # Outside of the `except` block, whose traceback holds all frames of the step.
            if told_of(error) is not None or not self.agent.fault(within=_KNOWN_S):
                self.close()
                raise error
            began, text = time.perf_counter(), f"{type(error).__name__}"
            self._leave(error)
            del error
            view = self.agent.park(self._report())
            logger.info("epoch %d: %d ranks go on after a fault (%s), parked for %.2f s", view.epoch, len(view.members),
                        text, time.perf_counter() - began)  # fmt: skip

    def _leave(self, error: Exception) -> None:
        """Let go of the world, and of what the error holds of it."""
        engine = self._engine
        steps, crew = vars(engine).get("steps"), vars(engine).get("crew")
        if steps is not None:
            self._open = steps.open or self._open
        planning: dict[str, Any] = {}
        if crew is not None and crew.update is self._update:
            planning = crew.learned.saved()
            self._carried = epochs.Carried(None, None, planning, 0, crew.checkpoints.stage, crew.checkpoints.folder)
        writer = None if crew is None else crew.checkpoints.writer
        release(error)
        engine.drop()
        self._save_again |= writer is not None and writer.dropped
        if dist.is_initialized():
            dist.destroy_process_group()
        self._freeing.park()
        self._freeing.forget()

    def _report(self) -> Report:
        update, held = self._update, self._held
        assert update is not None and held is not None, "the first assembly was over"  # noqa: PT018
        whole = held.copy is None or not held.copy.stale
        return Report(update.committed, update.table, update.last, held.epoch if whole else NOTHING_HELD)

    def _rebuild(self, view: View) -> None:
        """See [Note: going on], from the view on."""
        began, engine = time.perf_counter(), self._engine
        ids = [member.id for member in view.members]
        own = next(m.id for m in view.members if (m.pid, m.host) == (os.getpid(), host()))
        self._settle(view, own, ids)
        held, update = self._held, self._update
        assert held is not None and update is not None, "the first assembly was over"  # noqa: PT018
        hosts = [member.host for member in view.members]
        self.shift = shift_of(hosts)
        with self._freeing.making():
            epochs.make_default_group(view, ids.index(own), engine.job.config.timeout_seconds)
            epochs.take_rank(engine, ids.index(own), len(ids))
            carried = self._complete()
            held.optimizer = epochs.detached(held.optimizer, engine.client_optimizer)
            engine.assemble(replace(engine.job, config=epochs.config_for(engine.hydra_config, len(ids))))
            crew = engine.crew
            held.cut_anew(own, ids, crew.masters, crew.update.optimizer, crew.world)
            carried.give_to(engine, crew)
            crew.update.committed, crew.update.last = update.committed, update.last
            self._aside = self._now(view), crew.update
            if crew.copy is not None:
                crew.copy.refresh()
        self._take_aside()
        self.agent.rebuilt()
        if engine.global_rank == 0:
            protected = "each rank's share has a copy" if crew.copy else "a further loss ends the job"
            logger.info("epoch %d: %d ranks assembled in %.2f s, going on with step %d; %s", view.epoch, len(ids),
                        time.perf_counter() - began, engine.global_steps + 1, protected)  # fmt: skip

    def _settle(self, view: View, own: int, ids: Sequence[int]) -> None:
        """Hold the newest cut, at the newest step, as all other ranks of the view. Ends the process where that was lost
        with the ranks that are gone."""
        newest = newest_layout(view.reports.values())
        if newest == NOTHING_HELD:
            epochs.end_lost("ranks were lost before each rank's share of the model had a copy")
        if self._aside is not None and self._aside[0].epoch == newest:
            self._take_aside()
        held, update = self._held, self._update
        assert held is not None and update is not None and held.epoch == newest, "a cut that was taken is there"  # noqa: PT018
        try:
            check_nothing_lost(held.members, ids, held.shift)
        except PlanError as error:
            epochs.end_lost(str(error))
        table = usable(table_to_apply(view.reports[own], view.reports.values()))
        if table is not None:
            update.complete(table)
        update.table = None

    def _complete(self) -> epochs.Carried:
        """Record the step that was completed by the vote, unless it was recorded before; what the old crew leaves."""
        engine, update, opened = self._engine, self._update, self._open
        assert update is not None and self._carried is not None, "the first assembly was over"  # noqa: PT018
        if self._carried.complete:
            return self._carried
        if opened is not None and opened.step + 1 == update.committed and update.last is not None:
            self._open = None
            outcome = opened.voted(update.last, update.loss_scale.value)
            if engine.global_steps < update.committed:
                engine.finish_step(step_record(
                    opened.planned, outcome, Measured.of(outcome, time.perf_counter() - opened.began),
                    step=update.committed, previous=engine.last_step, learning_rate=engine.get_lr()[0],
                    skipped_steps=engine.skipped_steps, watched={},
                ))  # fmt: skip
                update.count(update.committed, outcome.grad_norm)
            if self._began_at < update.committed:
                self._voted = outcome
        schedule = engine.lr_scheduler and copy.deepcopy(engine.lr_scheduler.state_dict())
        self._carried = replace(self._carried, schedule=schedule, loss_scale=update.loss_scale.state_dict(),
                                skipped_in_a_row=update.skipped_in_a_row, complete=True)  # fmt: skip
        return self._carried

    def _now(self, view: View) -> Held:
        crew = self._engine.crew
        members = tuple(member.id for member in view.members)
        return Held(view.epoch, members, crew.shift, crew.masters, crew.update.optimizer, crew.copy)

    def _take_aside(self) -> None:
        assert self._aside is not None, "it was made"
        (self._held, self._update), self._aside, self._carried = self._aside, None, None
