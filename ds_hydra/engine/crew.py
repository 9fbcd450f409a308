"""A job and a world in; masters, optimizer, plans and all else that belongs to one set of ranks out, until `close`.

Assembling a second crew in the same process, over another world, gives what a restart with those ranks would: nothing
of the first crew is left but what a checkpoint carries over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ds_hydra.checkpoint.checkpointer import Checkpointer
from ds_hydra.engine.job import Job
from ds_hydra.engine.plan_source import PlanSource
from ds_hydra.engine.prepare import Prepared, prepare
from ds_hydra.engine.signals import Signals
from ds_hydra.host.host_engine import HostEngine
from ds_hydra.host.loss_scale import LossScale
from ds_hydra.ranks.world import World
from ds_hydra.report.prediction import StepWatch
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.step.stepper import Stepper
from ds_hydra.step.update import Update
from ds_hydra.watchdog import Activity, Watchdog
from ds_hydra.zero_hetero.errors import CheckpointError, NumericsError

logger = logging.getLogger(__name__)


class Crew:
    """What trains a job on one world. Every rank of the world makes it, and closes it, together."""

    def __init__(self, job: Job, world: World, host: HostEngine, signals: Signals, *, initial: bool):
        """`host` gets the optimizer. `initial`: masters take the model's values; else a checkpoint must be loaded.

        Raises ConfigError or PlanError when the job does not fit the world.
        """
        self.job, self.world = job, world
        self.prepared: Prepared = prepare(job, world)
        plan = job.source.plan
        self.watch = StepWatch(job.config.cost_correction, self.prepared.found, plan.num_layers,
                               self.prepared.num_elements)  # fmt: skip
        self.masters = ModelMasters(
            job.source, world.rank, world.num_ranks, world.device, job.master_dtype, job.compute_dtype
        )
        if initial:
            self.masters.load(job.source.values, world.group)
        groups = self.masters.trained.param_groups([{"names": group.names} for group in job.recipe.groups])
        optimizer = host.install_optimizer([group["params"] for group in groups])
        self.loss_scale = LossScale(host)
        self.activity = Activity()
        self.update = Update(self.masters.trained, optimizer, job.clipping, self.loss_scale, world, job.config.faults)
        self.stepper = Stepper(
            job.source,
            self.masters,
            world,
            strategies={str(shape): placed for shape, placed in self.prepared.strategies.items()},
            compute_dtype=job.compute_dtype,
            loss_norm=job.config.loss_norm,
            loss_scale=self.loss_scale,
            update=self.update,
            activity=self.activity,
            request=lambda: signals.request,
        )
        self.plans = PlanSource(
            self.prepared.table,
            tuple(self.prepared.strategies),
            job.config.planner_options(),
            job.sampler,
            job.config.planner.ahead,
            world.channel,
        )
        self.checkpoints = Checkpointer(host, self.masters, job.source.aliases, world.background, self.loss_scale)
        # Last, because its thread may end the process: from here on a rank that fails is noticed by all others.
        self.watchdog = Watchdog(
            world.background,
            lambda: (host.global_steps + 1, self.activity.now),
            heartbeat_s=job.config.faults.heartbeat_seconds,
            frozen_s=job.config.faults.frozen_seconds,
            address=job.config.faults.address,
        )

    @contextmanager
    def together(self, activity: str) -> Iterator[None]:
        """An activity that all ranks are in together: what one of them raises concerns the others.

        Errors of checkpoints and numerics are raised on all ranks alike, so each may deal with them where they are
        raised.
        """
        with self.activity(activity):
            try:
                yield
            except (CheckpointError, NumericsError):
                raise
            except BaseException as error:
                self.watchdog.report(error)
                raise

    def correct_costs(self, step: int) -> None:
        """Plan by corrected costs from now on, where the config asks for that and there is news."""
        table = self.watch.new_table(step)
        if table is not None:
            self.plans.use_table(table)

    def close(self) -> None:
        """Wait for a save that is under way; end threads and the planning process. The world stays open."""
        self.checkpoints.writer.wait()
        self.watchdog.close()
        self.plans.close()
