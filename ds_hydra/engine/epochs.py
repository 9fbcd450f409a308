"""From one epoch of an elastic job to the next: torch's group, the config, what a crew leaves; or the process's end."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from torch.optim import Optimizer

from ds_hydra.engine.copies import like
from ds_hydra.watchdog.host import EXIT_CODE, end_process, say
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.config.hydra_block import HydraConfig
    from ds_hydra.elastic.view import Agent, View
    from ds_hydra.engine.crew import Crew
    from ds_hydra.engine.engine import HydraEngine


@dataclass
class Carried:
    """What a crew leaves to the next one beside masters and optimizer, as a checkpoint would."""

    schedule: dict[str, Any] | None
    loss_scale: Mapping[str, Any] | None
    planning: dict[str, Any]
    skipped_in_a_row: int
    stage: int
    folder: Path | None
    complete: bool = False  # but for planning, and where it saves

    def give_to(self, engine: HydraEngine, crew: Crew) -> None:
        """Let the next crew go on with it; every rank must call it."""
        if self.schedule is not None:
            engine.lr_scheduler.load_state_dict(self.schedule)
        if self.loss_scale is not None:
            crew.loss_scale.load_state_dict(self.loss_scale)
        crew.update.skipped_in_a_row = self.skipped_in_a_row
        crew.checkpoints.stage, crew.checkpoints.folder = self.stage, self.folder
        told = crew.world.channel.tell(json.dumps(self.planning) if crew.world.rank == 0 else None)
        crew.learned.restore(crew.learned.read(json.loads(told)))


def start_agent() -> Agent:
    """This process's agent among the members of its job. ConfigError where none was started."""
    raise ConfigError(
        "hydra.elastic needs a launcher that lets survivors live and starts agents beside the ranks, and this version "
        "has none: take the block out; a job goes on from its newest checkpoint with any number of ranks"
    )


def config_for(config: HydraConfig, num_ranks: int) -> HydraConfig:
    """The job's config for the ranks that are left. Their hosts tell the nodes, whose sizes the config has no more."""
    assert config.elastic is not None, "only elastic jobs change it"
    strategies = dict(config.elastic.strategies).get(num_ranks, ())
    choose = config.choose if strategies else "best"
    return replace(config, strategies=strategies, choose=choose, node_size=None, cluster=())


def detached(optimizer: Optimizer, client: Any) -> Optimizer:
    """An optimizer with the state of this one, which the next crew may take for its own shards."""
    held = like(optimizer, [group["params"] for group in optimizer.param_groups])
    held.state.update(optimizer.state)
    if optimizer is client:
        optimizer.state.clear()
    return held


def take_rank(engine: HydraEngine, rank: int, num_ranks: int) -> None:
    """From now on this process is another rank, of so many: step lines, files and monitors are rank 0's."""
    was_first, first = engine.global_rank == 0, rank == 0
    engine.__dict__["global_rank"], engine.__dict__["world_size"] = rank, num_ranks
    if first and not was_first:
        atexit.unregister(engine.step_log.close)
        engine.configure_reports()
        if (package := logging.getLogger("ds_hydra")).level == logging.WARNING:  # as `show_log` has set other ranks'
            package.setLevel(logging.INFO)


def make_default_group(view: View, rank: int, timeout_s: float) -> None:
    hook, timeout = sys.excepthook, timedelta(seconds=timeout_s)
    store = dist.TCPStore(*view.store, is_master=False, timeout=timeout)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(f"epoch{view.epoch}", store), rank=rank, world_size=len(view.members),
        timeout=timeout,
    )  # fmt: skip
    sys.excepthook = hook  # torch puts one more around it each time, and takes none off
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(len(view.members)))
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # what the launcher said of nodes holds no more
        os.environ.pop(name, None)


def end_stuck() -> NoReturn:
    say("this rank did not come out of its step after another one was lost (hydra.elastic.stuck_seconds): it ends")
    end_process(EXIT_CODE)
    raise AssertionError("it has ended")


def end_lost(why: str) -> NoReturn:
    say(f"{why}. Restart the job: it resumes from the newest checkpoint")
    end_process(EXIT_CODE)
    raise AssertionError("it has ended")
