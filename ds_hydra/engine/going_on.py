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
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ds_hydra.elastic.agent import MemberAgent
from ds_hydra.elastic.buddies import shift_of
from ds_hydra.elastic.view import View
from ds_hydra.engine import epochs, joining
from ds_hydra.engine.calls import Calls, EngineCall, end_lost, end_stuck
from ds_hydra.engine.default_group import make_default_group
from ds_hydra.engine.guard import stacks_folder
from ds_hydra.engine.standing import SurvivingState
from ds_hydra.engine.stands import Stands
from ds_hydra.engine.steps import OpenStep
from ds_hydra.host.environment import joins
from ds_hydra.ranks.freeing import Freeing
from ds_hydra.ranks.together import first_channel
from ds_hydra.watchdog.host import host
from ds_hydra.watchdog.progress import Progress
from ds_hydra.watchdog.words import as_line, timed_out
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from ds_hydra.zero_hetero.told import release, told_of

if TYPE_CHECKING:
    from ds_hydra.config.hydra_block import ElasticConfig
    from ds_hydra.engine.engine import HydraEngine
    from ds_hydra.engine.guard import Guard
    from ds_hydra.step.outcome import StepOutcome

logger = logging.getLogger(__name__)

_STILL_S = 10.0  # within which members are known that stand still
_KNOWN_S = 5.0  # within which a fault is known that has ended a rank's wait
Result = TypeVar("Result")


def first_assembly(engine: HydraEngine, elastic: ElasticConfig, guard: Guard) -> bool:
    """Assemble an engine that goes on without ranks that it loses; whether it has joined a job that runs.

    ConfigError, on all ranks, for a job that cannot go on without some of its ranks, or a process of another job.
    """
    if joins():
        engine.going_on = GoingOn(engine, elastic, joining.join_members(engine))
        engine.going_on.join(guard)
        return True
    engine.going_on = GoingOn(engine, elastic, epochs.start_agent(engine))
    guard.watchdog.close(goes_on=True)  # the members watch each other from here on
    engine.going_on.begin(guard)
    return False


class GoingOn:
    """Of one engine, whose calls it repeats until they succeed."""

    def __init__(self, engine: HydraEngine, config: ElasticConfig, agent: MemberAgent):
        self._engine, self.agent = engine, agent
        self.freeing = Freeing(config.stuck_seconds, end_stuck, agent.addresses)
        with first_channel() as channel:
            self.freeing.adopt(channel)
        self.shift = 0  # who keeps whose copy [Note: buddies]
        self._shift_of = partial(shift_of, copies=config.redundancy != "off")
        self._standing = SurvivingState(self._shift_of)
        self._open: OpenStep | None = None
        self._carried: epochs.CarriedState | None = None
        self._voted: StepOutcome | None = None  # of a step that was completed by the vote
        self._began_at = 0  # the steps that were made when the present call began
        self._calls = Calls()
        self._stopped = 0.0  # when training stopped last, by `time.perf_counter`
        folder, limit_s = stacks_folder(engine.hydra_config), engine.hydra_config.timeout_seconds
        self._progress = Progress(-1, self._where, limit_s, folder)
        self._stands = Stands(self._progress, agent)
        agent.on_abort(self.freeing.begin, self.freeing.resume)
        atexit.register(agent.close)  # a script that ends by itself leaves in good order

    def _where(self) -> tuple[int, str]:
        crew = self._engine.crew
        return self._engine.global_steps + 1, "assembly" if crew is None else crew.activity.told

    def begin(self, guard: Guard) -> None:
        """The first assembly."""
        view = self.agent.view
        self.shift = self._shift_of([one.host for one in view.members])
        try:
            with self.freeing.making(len(view.members)):
                self._engine.assemble(guard=guard)
            joining.check_can_be_told(self._engine)
        except Exception as error:
            # A refusal that each rank finds by itself holds, whether or not others have left by it already.
            refused = told_of(error) is not None or isinstance(error, (ConfigError, PlanError))
            if not refused and self.by_fault(error):
                end_lost("ranks were lost before the job's first step")
            self.close()
            raise
        self._standing.put_aside(view, self._engine.crew)
        self._standing.take_aside()
        self.agent.rebuilt()
        joining.invite(self.agent)

    def join(self, guard: Guard) -> None:
        """The first assembly of a process that joins; it returns when the process is a member [Note: joining]."""
        guard.watchdog.close()
        logger.warning("waiting to join the job")
        try:
            self.run(lambda: None, parks=True)
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Leave the members in good order."""
        atexit.unregister(self.agent.close)
        self.agent.close()
        self._stands.close()

    def train(self) -> StepOutcome:
        """The next step, and its save if it is due."""
        outcome: StepOutcome | None = None
        self._began_at, self._voted = self._engine.global_steps, None

        def step() -> StepOutcome:
            nonlocal outcome
            engine, calls = self._engine, self._calls
            outcome, self._voted = outcome or self._voted, None
            if calls.behind:
                assert outcome is not None, "a step that others have left is complete"
                return outcome
            if calls.save_again and engine.job.config.checkpoint is not None:
                engine.saving.save(engine.job.config.checkpoint.dir)
                calls.save_again = False
            if outcome is None:
                outcome = engine.steps.train()
            calls.request = max(calls.request, outcome.request)
            engine.saving.when_due(calls.request)
            return outcome

        found = self.run(step)
        if found.wanted and not self._calls.behind:
            self.run(lambda: None, parks=True)
        self._calls.left()
        return found

    def call(self, call: EngineCall[Result]) -> Result:
        """What a call of all ranks comes to, which is begun again after each fault [Note: calls]."""
        found = self.run(lambda: call.begin(self._calls, lambda: self._engine.crew.world.meet()))
        self._calls.left(None if call.once else call.close(found))
        return found

    def run(self, part: Callable[[], Result], *, parks: bool = False) -> Result:
        """What `part` returns, called again after each fault, when the ranks that are left have been assembled.

        `parks`: as all others do without a fault, for a process that joins.
        """
        view: View | None = None
        while True:
            try:
                if parks:
                    parks, view = False, self._parked()
                if view is not None:
                    self._rebuild(view)
                    view = None
                return part()
            except Exception as raised:
                error = raised
            # Outside of the `except` block, whose traceback holds all frames of the step.
            told = told_of(error)
            if told is not None and view is not None and self._standing.held is not None:
                joining.refuse(view, told, self.agent)
            elif told or not self.by_fault(error):
                self.close()
                raise error
            release(error)
            del error
            view = self._parked()

    def by_fault(self, error: Exception) -> bool:
        """Whether an error of this rank is that of a wait which a fault has ended."""
        # Those of gloo, of torch's stores and of sockets; any other is known to be this rank's own at once, where no
        # device goes on with numbers that never came, and may fail in any way [Note: aborting].
        waited = isinstance(error, (RuntimeError, OSError)) or self._engine.device.type != "cpu"
        if not timed_out(error):
            return self.agent.fault(within=_KNOWN_S if waited else 0.0)
        with self._progress.settled():  # those for which it has waited may stand still, and are lost then
            found = self.agent.fault(within=_STILL_S)
            if not found:
                self._progress.write(as_line(error))
            return found

    def _parked(self) -> View:
        """Let go of all that belongs to the present ranks; the view with which to go on."""
        self._stopped = time.perf_counter()
        self._leave()
        return self.agent.park(self._standing.report())

    def _leave(self) -> None:
        """Let go of the world."""
        engine = self._engine
        self.freeing.aborting.abort()
        steps, crew = engine.steps, engine.crew
        if steps is not None:
            self._open = steps.open or self._open
        if crew is not None and crew.update is self._standing.update:
            self._carried = epochs.CarriedState.left_by(crew)
        epochs.drop(engine, crew, self._calls, faulty=self.agent.faulty)
        self.freeing.park()
        self.freeing.forget()

    def _rebuild(self, view: View) -> None:
        """See [Note: going on], from the view on."""
        began, engine = time.perf_counter(), self._engine
        ids = [member.id for member in view.members]
        own = next(m.id for m in view.members if (m.pid, m.host) == (os.getpid(), host()))
        held, update = self._standing.settle(view, own, ids), self._standing.update
        self.shift = self._shift_of([member.host for member in view.members])
        with self.freeing.making(len(ids)):
            wait = engine.job.config.timeout_seconds
            make_default_group(view, ids.index(own), wait, lambda: self.agent.faulty, engine.device)
            engine.take_rank(ids.index(own), len(ids))
            carried, outcome = epochs.complete(engine, update, self._open, self._carried)
            if update is not None:
                self._carried = carried
            if outcome is not None:
                self._open = None
                self._voted = outcome if self._began_at < engine.global_steps else None
            if held.optimizer is not None:
                held.optimizer = epochs.detached(held.optimizer, engine.client_optimizer)
            engine.assemble(replace(engine.job, config=epochs.config_for(engine.hydra_config, len(ids))))
            crew = engine.crew
            held.cut_anew(own, ids, crew.masters, crew.update.optimizer, crew.world)
            carried.give_to(engine, crew, joins=update is None, joiners=bool(view.joined))
            self._calls.agree(crew.world.channel, joins=update is None)
            if update is not None:
                crew.update.committed, crew.update.last = update.committed, update.last
            self._standing.put_aside(view, crew)
            if crew.copy is not None:
                crew.copy.refresh()
            crew.world.settle()
        self._standing.take_aside()
        self._carried = None
        self.agent.rebuilt()
        joining.invite(self.agent)
        if engine.global_rank == 0:
            since = self._stopped, began
            epochs.tell(view, since, step=engine.global_steps + 1, protected=crew.copy is not None)
