"""From one epoch of an elastic job to the next: torch's group, the config, what a crew leaves; or the process's end."""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.optim import Optimizer

from ds_hydra.engine.copies import like
from ds_hydra.engine.default_group import BACKENDS
from ds_hydra.engine.record import Measured, step_record
from ds_hydra.host.environment import members_folder
from ds_hydra.ranks.together import first_channel
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.config.hydra_block import HydraConfig
    from ds_hydra.elastic.agent import MemberAgent
    from ds_hydra.elastic.view import View
    from ds_hydra.engine.calls import Calls
    from ds_hydra.engine.crew import Crew
    from ds_hydra.engine.engine import HydraEngine
    from ds_hydra.engine.steps import OpenStep
    from ds_hydra.step.outcome import StepOutcome
    from ds_hydra.step.update import Update

_LEAST_RANKS = 2

logger = logging.getLogger(__name__)


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
        from ds_hydra.engine.joining import progress_of, take_progress

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
    from ds_hydra.elastic.agent import MemberAgent
    from ds_hydra.engine.joining import job_print, living

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
