"""Training goes on in the same processes when ranks are lost or join; the step that was open is made by those there.

[Note: joining]
The process is started as a job of one rank, and does all that takes long by itself: imports, model, data. Then it
compares what it has with what the members have left in their invitation, and knocks. All of them park at the end of the
step, without a fault, and the next view has the process with the others. It brings nothing: its masters come by the new
cut [Note: cutting anew], and all else that a checkpoint would hold from rank 0, which is never one that joins.

Where no strategy fits so many ranks, all of them find that as they assemble: those who have come end themselves, the
others go back to what they were, and let nobody join until the numbers are others.

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

Ranks that have had notice, by SIGTERM to some and not to all, leave in the same way at the end of a step, without a
fault: what they hold is cut anew from their copies. They leave when two steps in a row have told of it, so that a
signal to all ranks, which comes to one a step later than to another, still is one to all.

A further fault in any of these begins anew at the first. A rank's own error, which no fault explains, is raised as it
is, and this rank is lost to the others.
"""

from __future__ import annotations

import atexit
import copy
import hashlib
import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ds_hydra.checkpoint.checkpointer import config_digest
from ds_hydra.checkpoint.loading import as_json
from ds_hydra.elastic.agent import Invitation, MemberAgent, Stands
from ds_hydra.elastic.copies import SurvivingState, like
from ds_hydra.elastic.freeing import Freeing
from ds_hydra.elastic.membership import TURN_S, Patience
from ds_hydra.elastic.messages import View
from ds_hydra.engine.calls import Calls, EngineCall, end_lost, end_stuck
from ds_hydra.engine.guard import stacks_folder
from ds_hydra.engine.record import Measured, step_record
from ds_hydra.engine.steps import OpenStep
from ds_hydra.host.ending import LEAVE, NOTHING, SAVE
from ds_hydra.host.environment import INVITATION, MOST_RANKS, joins, launched_number, members_folder
from ds_hydra.ranks.channel import first_channel
from ds_hydra.ranks.groups import Aborting
from ds_hydra.watchdog.host import host
from ds_hydra.watchdog.progress import Progress
from ds_hydra.watchdog.words import as_line, timed_out
from ds_hydra.zero_hetero.buddies import may_leave, shift_of
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from ds_hydra.zero_hetero.told import Told, release, told_of

if TYPE_CHECKING:
    from ds_hydra.config.hydra_block import ElasticConfig, HydraConfig
    from ds_hydra.engine.crew import Crew
    from ds_hydra.engine.engine import HydraEngine
    from ds_hydra.engine.guard import Guard
    from ds_hydra.step.outcome import StepOutcome
    from ds_hydra.step.update import Update

logger = logging.getLogger(__name__)


_ASK_S, _AGAIN_S = 1.0, 0.1  # for which a store that does not answer is asked at once, and after which again
BACKENDS = ("gloo", "nccl")  # of hosts, of devices: those whose waits can be ended


def make_default_group(view: View, rank: int, timeout_s: float, over: Callable[[], bool], device: torch.device) -> None:
    """Torch's, of the ranks of a view, each with its device; every one of them must call it. It gives up if the view is
    `over` meanwhile."""
    hook, timeout = sys.excepthook, timedelta(seconds=timeout_s)
    store = _store(view.store, timeout_s, over)
    # Torch names groups by this number, counts one that could not be made, and ranks find each other by the name.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        BACKENDS[device.type != "cpu"], store=dist.PrefixStore(f"epoch{view.epoch}", store), rank=rank,
        world_size=len(view.members), timeout=timeout, device_id=None if device.type == "cpu" else device,
    )  # fmt: skip
    sys.excepthook = hook  # torch puts one more around it each time, and takes none off
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(len(view.members)))
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # what the launcher said of nodes holds no more
        os.environ.pop(name, None)


def _store(address: tuple[str, int], timeout_s: float, over: Callable[[], bool]) -> dist.Store:
    """A connection to the store of a view, whose member may be gone."""
    # Torch asks again and again where nobody listens any more, and between that no socket is there that could be shut,
    # see [Note: freeing a thread]. So it is given little time at once, and only where somebody listens.
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(address, timeout=_ASK_S).close()
            store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=_ASK_S))
        except (OSError, RuntimeError):
            if over() or time.monotonic() > deadline:
                raise
            time.sleep(_AGAIN_S)
        else:
            store.set_timeout(timedelta(seconds=timeout_s))
            return store


_LATER = 8  # turns after `Freeing`, which knows of what training is stuck in, an agent gives its own process up
_BEATS = 9  # of a member, in the time after which it counts as frozen


def living(config: HydraConfig) -> dict[str, Any]:
    """How long members wait for each other, and how many there may be, for `MemberAgent.start` and `join`."""
    assert config.elastic is not None, "only elastic jobs have agents"
    stuck, usual = math.ceil(config.elastic.stuck_seconds / TURN_S) + _LATER, Patience()
    frozen_s = config.faults.frozen_seconds or math.inf
    return {
        "frozen_s": frozen_s,
        "heartbeat_s": min(frozen_s / _BEATS, 1.0),
        "patience": replace(usual, stuck=stuck, give_up=max(usual.give_up, 2 * stuck)),
        "most": launched_number(MOST_RANKS),
    }


def job_print(engine: HydraEngine) -> dict[str, str]:
    """What must be equal on all members, in short."""
    assert engine.data is not None, "elastic jobs have map-style data"
    buckets = [[bucket.name, bucket.trainable, [[param.name, *param.shape] for param in bucket.params]]
               for bucket in engine.job.source.plan.buckets]  # fmt: skip
    lengths = np.asarray(engine.data.lengths, dtype=np.int64)
    return {
        "version of ds-hydra": sys.modules["ds_hydra"].__version__,
        "version of torch": torch.__version__,
        "config": config_digest(engine.config),
        "model": hashlib.sha256(json.dumps(buckets).encode()).hexdigest(),
        "training data": f"{len(lengths)} sequences, {hashlib.sha256(lengths.tobytes()).hexdigest()}",
    }


def join_members(engine: HydraEngine) -> MemberAgent:
    """This process's agent, which knocks from now on. ConfigError where there is no job to join, or another one."""
    folder = members_folder()
    if folder is None or not (folder / INVITATION).exists():
        raise ConfigError(
            "this process was started to join a job, and no job of this node has come to its first step: start the "
            "whole job by 'ds-hydra launch'"
        )
    invitation = Invitation.read(folder / INVITATION)
    check_same_job(job_print(engine), json.loads(invitation.job))
    return MemberAgent.join(folder / INVITATION, **living(engine.hydra_config))


def check_same_job(own: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """ConfigError that names what differs."""
    differ = [f"its {name} ({own[name][:40]}) is not theirs ({theirs.get(name, 'none')[:40]})"
              for name in own if own[name] != theirs.get(name)]  # fmt: skip
    if differ:
        raise ConfigError(
            f"this process cannot join the job, which goes on without it: {'; '.join(differ)}. Start it with the "
            "script, the arguments and the packages of the others"
        )


def invite(agent: MemberAgent) -> None:
    """Say on this host how to join those who are members now."""
    folder = members_folder()
    if folder is not None:
        agent.invitation.write(folder / INVITATION)


def refuse(view: View, told: Told, agent: MemberAgent) -> None:
    """All ranks of a view have the error that they cannot train together: go back to those that did before processes
    joined, which end themselves; where none has joined the job ends."""
    if not view.joined:
        end_lost(f"the ranks that are left cannot go on: {told.text}")
    logger.warning("%d ranks cannot train together (%s): the job goes on without those that have come",
                   len(view.members), told.text)  # fmt: skip
    agent.unfit(len(view.members))


def check_can_be_told(engine: HydraEngine) -> None:
    """ConfigError where a process that joins could not be told what the LR scheduler has come to."""
    try:
        if engine.lr_scheduler is not None:
            as_json(engine.lr_scheduler.state_dict(), "the LR scheduler's state")
    except Exception as error:
        raise ConfigError(f"hydra.elastic: {error}, or remove hydra.elastic") from error


def progress_of(engine: HydraEngine) -> dict[str, Any]:
    """Counters and the place in the data, as JSON holds them."""
    assert engine.sampler is not None, "elastic jobs have map-style data"
    return {
        "steps": [engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps],
        "data": engine.sampler.saved(engine.global_steps),
    }


def take_progress(engine: HydraEngine, crew: Crew, told: Mapping[str, Any]) -> None:
    """Go on at the step and the place in the data that rank 0 has told by `progress_of`."""
    assert engine.sampler is not None, "elastic jobs have map-style data"
    engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps = told["steps"]
    engine.sampler.check_saved(told["data"])
    engine.sampler.restore(told["data"])
    crew.update.committed = engine.global_steps


_LEAST_RANKS = 2


@dataclass
class CarriedState:
    """What a crew leaves to the next one beside masters and optimizer, as a checkpoint would."""

    schedule: dict[str, Any] | None
    loss_scale: Mapping[str, Any] | None
    planning: dict[str, Any]
    skipped_in_a_row: int
    stage: int
    saved: dict[str, int]  # see `Writer.last`
    complete: bool = False  # but for planning, and where it saves

    @classmethod
    def left_by(cls, crew: Crew) -> CarriedState:
        """What is to be read of it before it is dropped."""
        return cls(None, None, crew.learned.saved(), 0, crew.checkpoints.stage, crew.checkpoints.writer.last)

    def give_to(self, engine: HydraEngine, crew: Crew, *, joins: bool, joiners: bool) -> None:
        """Let the next crew go on with it; every rank must call it. A process that `joins` takes all of it from rank 0,
        which tells it where there are `joiners`."""

        record: dict[str, Any] = {"planning": self.planning}
        if joiners:
            record |= {"schedule": self.schedule, "loss_scale": self.loss_scale, "stage": self.stage,
                       "skipped_in_a_row": self.skipped_in_a_row, "saved": self.saved,
                       **progress_of(engine)}  # fmt: skip
        told = json.loads(crew.world.channel.tell(json.dumps(record) if crew.world.rank == 0 else None))
        crew.learned.restore(crew.learned.read(told["planning"]))
        left = self
        if joins:
            take_progress(engine, crew, told)
            left = CarriedState(told["schedule"], told["loss_scale"], told["planning"], told["skipped_in_a_row"],
                           told["stage"], told["saved"])  # fmt: skip
        if left.schedule is not None:
            engine.lr_scheduler.load_state_dict(left.schedule)
        if left.loss_scale is not None:
            crew.loss_scale.load_state_dict(left.loss_scale)
        crew.update.skipped_in_a_row = left.skipped_in_a_row
        crew.checkpoints.stage, crew.checkpoints.writer.last = left.stage, left.saved


def start_agent(engine: HydraEngine) -> MemberAgent:
    """This process's agent among the members of its job; every rank must call it. ConfigError, on all of them, where
    the job could not go on without some of its ranks, or whoever started them would end those."""
    config = engine.hydra_config
    assert config.elastic is not None, "only elastic jobs have agents"
    if engine.data is None:
        raise ConfigError(
            "hydra.elastic needs map-style training_data: sequences that are streamed or handed in are lost with the "
            "rank that has them"
        )
    if dist.get_backend() not in BACKENDS:
        raise ConfigError(
            f"hydra.elastic runs over {' and '.join(BACKENDS)} alone, and this job over {dist.get_backend()}: remove it"
        )
    place = members_folder()
    if place is None:
        raise ConfigError(
            "hydra.elastic needs a launcher that lets survivors live, which 'deepspeed' and 'torchrun' do not: start "
            "the job by 'ds-hydra launch' in place of 'deepspeed', with the same options, or remove hydra.elastic"
        )
    if dist.get_world_size() < _LEAST_RANKS:
        raise ConfigError(
            f"hydra.elastic needs at least {_LEAST_RANKS} ranks, of which one may be lost, and the job has "
            f"{dist.get_world_size()}: start more, or remove the block"
        )
    with first_channel() as channel:
        return MemberAgent.start(
            channel,
            folder=None if config.checkpoint is None else Path(config.checkpoint.dir),
            scratch=place,
            address=config.faults.address if channel.rank == 0 else None,
            job=json.dumps(job_print(engine)),
            **living(config),
        )


def config_for(config: HydraConfig, num_ranks: int) -> HydraConfig:
    """The job's config for the ranks that are left. Their hosts tell the nodes, whose sizes the config has no more."""
    assert config.elastic is not None, "only elastic jobs change it"
    at_start = config.strategies and config.shapes[0].num_ranks == num_ranks
    strategies = dict(config.elastic.strategies).get(num_ranks, config.strategies if at_start else ())
    choose = config.choose if strategies else "best"
    return replace(config, strategies=strategies, choose=choose, node_size=None, cluster=())


def detached(optimizer: Optimizer, client: Any) -> Optimizer:
    """An optimizer with the state of this one, which the next crew may take for its own shards."""
    held = like(optimizer, [group["params"] for group in optimizer.param_groups])
    held.state.update(optimizer.state)
    if optimizer is client:
        optimizer.state.clear()
    return held


def record_voted(engine: HydraEngine, update: Update, opened: OpenStep) -> StepOutcome:
    """Record a step that was completed by the vote alone, unless it was recorded before; its outcome."""
    assert update.last is not None, "it was voted for"
    outcome = opened.voted(update.last, update.loss_scale.value)
    if engine.global_steps < update.committed:
        engine.finish_step(step_record(
            opened.planned, outcome, Measured.of(outcome, time.perf_counter() - opened.began),
            step=update.committed, previous=engine.last_step, learning_rate=engine.get_lr()[0],
            skipped_steps=engine.skipped_steps, watched={},
        ))  # fmt: skip
        update.count(update.committed, outcome.grad_norm)
    return outcome


def drop(engine: HydraEngine, crew: Crew | None, calls: Calls, *, faulty: bool) -> None:
    """Let go of a crew and its world, and of torch's default group; without a fault all ranks do so."""
    writer = None if crew is None else crew.checkpoints.writer
    if crew is not None and not faulty:
        crew.next_step.forget()
        crew.checkpoints.writer.wait()
    engine.drop()
    if writer is not None and writer.step >= 0:
        calls.saved(writer.step, whole=not writer.dropped)
    if dist.is_initialized():
        dist.destroy_process_group()


def complete(
    engine: HydraEngine, update: Update | None, opened: OpenStep | None, left: CarriedState | None
) -> tuple[CarriedState, StepOutcome | None]:
    """What the old crew has `left`, whole; and what a step came to that the vote has completed, if there is one, which
    is recorded unless it was before. `update` is None for a process that joins: it takes rank 0's."""
    if update is None:
        return CarriedState(None, None, {}, 0, 0, {}), None
    assert left is not None, "it has left a crew"
    if left.complete:
        return left, None
    outcome = None
    if opened is not None and opened.step + 1 == update.committed and update.last is not None:
        outcome = record_voted(engine, update, opened)
    schedule = engine.lr_scheduler and copy.deepcopy(engine.lr_scheduler.state_dict())
    whole = replace(left, schedule=schedule, loss_scale=update.loss_scale.state_dict(),
                    skipped_in_a_row=update.skipped_in_a_row, complete=True)  # fmt: skip
    return whole, outcome


def tell(view: View, since: tuple[float, float], *, step: int, protected: bool) -> None:
    """One line on what has happened, how long that took, and whether the job can bear more of it; `since` are when
    training had stopped and when the view was there."""
    (stopped, began), now, ids = since, time.perf_counter(), {one.id for one in view.members}
    gone = [one.id for one in view.former if one.id not in ids]
    lost, joined = (", ".join(map(str, sorted(some))) or "none" for some in (gone, view.joined))
    held = "each rank's share has a copy" if protected else "not protected: a further loss ends the job"
    logger.info(
        "epoch %d: lost members: %s, new ones: %s; %d ranks go on with step %d after %.2f s (assembled in %.2f s); %s",
        view.epoch, lost, joined, len(ids), step, now - stopped, now - began, held,
    )  # fmt: skip


_STILL_S = 10.0  # within which members are known that stand still
_KNOWN_S = 5.0  # within which a fault is known that has ended a rank's wait
Result = TypeVar("Result")


def first_assembly(engine: HydraEngine, elastic: ElasticConfig, guard: Guard) -> bool:
    """Assemble an engine that goes on without ranks that it loses; whether it has joined a job that runs.

    ConfigError, on all ranks, for a job that cannot go on without some of its ranks, or a process of another job.
    """
    if joins():
        engine.going_on = GoingOn(engine, elastic, join_members(engine))
        engine.going_on.join(guard)
        return True
    engine.going_on = GoingOn(engine, elastic, start_agent(engine))
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
        self._carried: CarriedState | None = None
        self._voted: StepOutcome | None = None  # of a step that was completed by the vote
        self._began_at = 0  # the steps that were made when the present call began
        self._calls = Calls()
        self._noticed: frozenset[int] = frozenset()  # members that the step before has told to have had notice
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
            check_can_be_told(self._engine)
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
        invite(self.agent)

    def join(self, guard: Guard) -> None:
        """The first assembly of a process that joins; it returns when the process is a member [Note: joining]."""
        guard.watchdog.close()
        logger.warning("waiting to join the job")
        try:
            self.run(lambda: None, parks=True)
        except Exception:
            self.close()
            raise

    @property
    def wanted(self) -> bool:
        """Whether a process waits to join."""
        return self.agent.wanted

    @property
    def aborting(self) -> Aborting:
        """What ends the waits of devices."""
        return self.freeing.aborting

    def close(self) -> None:
        """Leave the members in good order."""
        atexit.unregister(self.agent.close)
        self.agent.close()
        self._stands.close()

    def train(self) -> StepOutcome:
        """The next step, and its save if it is due."""
        outcome: StepOutcome | None = None
        self._began_at, self._voted = self._engine.global_steps, None
        before = self.agent.view

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
            calls.request = max(calls.request, self._asked(outcome))
            engine.saving.when_due(calls.request)
            return outcome

        found = self.run(step)
        leaving = self._leaving(found) if self.agent.view is before else frozenset[int]()
        if (found.wanted or leaving) and not self._calls.behind:
            self.run(lambda: None, parks=True, leaving=leaving)
        self._calls.left()
        return found

    def _asked(self, outcome: StepOutcome) -> int:
        """What signals ask of the job: to leave only where no rank is to stay, or none can leave by itself."""
        noticed, ranks = outcome.asked(LEAVE), self._engine.world_size
        if self.shift and 0 < len(noticed) < ranks:
            return SAVE if outcome.asked(SAVE) else NOTHING
        return outcome.request

    def _leaving(self, outcome: StepOutcome) -> frozenset[int]:
        """Members that leave at the end of this step; those whose copies the others would lose leave after a later
        one."""
        ids = [member.id for member in self.agent.view.members]
        noticed, before = outcome.asked(LEAVE), self._noticed
        self._noticed = frozenset(ids[rank] for rank in noticed)
        ready = [rank for rank in noticed if ids[rank] in before]
        return frozenset(ids[rank] for rank in may_leave(ready, len(ids), self.shift))

    def call(self, call: EngineCall[Result]) -> Result:
        """What a call of all ranks comes to, which is begun again after each fault [Note: calls]."""
        found = self.run(lambda: call.begin(self._calls, lambda: self._engine.crew.world.meet()))
        self._calls.left(None if call.once else call.close(found))
        return found

    def run(self, part: Callable[[], Result], *, parks: bool = False, leaving: frozenset[int] = frozenset()) -> Result:
        """What `part` returns, called again after each fault, when the ranks that are left have been assembled.

        `parks`: as all others do without a fault, for a process that joins, or for members that are `leaving`.
        """
        view: View | None = None
        while True:
            try:
                if parks:
                    parks, view = False, self._parked(leaving)
                if view is not None:
                    self._rebuild(view)
                    view = None
                return part()
            except Exception as raised:
                error = raised
            # Outside of the `except` block, whose traceback holds all frames of the step.
            told = told_of(error)
            if told is not None and view is not None and self._standing.held is not None:
                refuse(view, told, self.agent)
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

    def _parked(self, leaving: frozenset[int] = frozenset()) -> View:
        """Let go of all that belongs to the present ranks; the view with which to go on."""
        self._stopped = time.perf_counter()
        self._leave()
        return self.agent.park(self._standing.report(), tuple(self._standing.tables().values()), leaving)

    def _leave(self) -> None:
        """Let go of the world."""
        engine = self._engine
        self.freeing.aborting.abort()
        steps, crew = engine.steps, engine.crew
        if steps is not None:
            self._open = steps.open or self._open
        if crew is not None and crew.update is self._standing.update:
            self._carried = CarriedState.left_by(crew)
        drop(engine, crew, self._calls, faulty=self.agent.faulty)
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
            carried, outcome = complete(engine, update, self._open, self._carried)
            if update is not None:
                self._carried = carried
            if outcome is not None:
                self._open = None
                self._voted = outcome if self._began_at < engine.global_steps else None
            if held.optimizer is not None:
                held.optimizer = detached(held.optimizer, engine.client_optimizer)
            engine.assemble(replace(engine.job, config=config_for(engine.hydra_config, len(ids))))
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
        self._carried, self._noticed = None, frozenset()
        self.agent.rebuilt()
        invite(self.agent)
        if engine.global_rank == 0:
            since = self._stopped, began
            tell(view, since, step=engine.global_steps + 1, protected=crew.copy is not None)
