"""The watchdog of all ranks, and blocks of code whose errors it tells the other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.host.devices import out_of_modes
from ds_hydra.ranks.channel import Texts
from ds_hydra.watchdog import Activity, Watchdog
from ds_hydra.watchdog.words import as_line
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, NumericsError, PlanError
from ds_hydra.zero_hetero.told import told_of

_BEATS = 9  # of a rank, in the time after which it counts as frozen
_DUMP_S = 30.0


def _for_dumps_s() -> float:
    """Seconds for torch's flight recorders to write, which begin when a group's time is over."""
    return _DUMP_S if os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "0").lower() in ("1", "true", "yes") else 0.0


class Guard:
    """Ends the other ranks when this one cannot go on. All ranks make it together, before all else [Note: who tells].

    `coming_step` is the number of the step that reports name: the first has the number 1. An elastic job `starts` with
    it; then its members watch each other.
    """

    def __init__(
        self, channel: Texts, config: HydraConfig, coming_step: Callable[[], int] = lambda: 1, *, starts: bool = True
    ):
        self.activity = activity = Activity(coming_step)  # the watchdog's thread must not hold this guard
        frozen_s = config.faults.frozen_seconds if config.elastic is None or starts else 0.0
        backend = dist.get_backend() if dist.is_initialized() else get_accelerator().communication_backend_name()
        self.watchdog = Watchdog(
            channel,
            lambda: (activity.coming_step(), activity.told),
            calling=lambda: activity.calling,
            heartbeat_s=frozen_s / _BEATS,
            frozen_s=frozen_s,
            still_s=config.timeout_seconds + _for_dumps_s() if backend != "gloo" else None,  # gloo itself ends a wait
            address=config.faults.address,
            remedy=_remedy(config),
            limit_s=config.timeout_seconds,
            folder=stacks_folder(config),
        )

    @classmethod
    def before_groups(cls, channel: Texts, config: HydraConfig) -> Guard:
        """While torch's groups are made, until an engine has one of its own: its secret goes over torch's store, which
        others may read."""
        guard = cls(channel, config)
        guard.activity.now = "making torch's groups"
        return guard

    @contextmanager
    def together(self, activity: str) -> Iterator[None]:
        """An activity that all ranks are in together: an error of one of them is reported to the others.

        Errors of checkpoints and numerics, and those that all ranks know, are raised on all of them at once. So each
        rank can handle them by itself, and a script may catch one and go on; they are not reported. After any other
        that is no refusal the next call says that this engine cannot go on.
        """
        with self.activity(activity), out_of_modes(activity):
            try:
                yield
            except (CheckpointError, NumericsError):
                raise
            except BaseException as error:
                if told_of(error) is None:
                    if not isinstance(error, (ConfigError, PlanError)):  # which are raised before anything changes
                        at = f"step {self.activity.coming_step()} ({self.activity.now})"
                        self.activity.calling.broken = f"{as_line(error).rstrip(':')} has left {at}"
                    self.watchdog.report(error)
                raise

    @contextmanager
    def assembling(self) -> Iterator[None]:
        """The activity "assembly". Where all ranks refuse together they part: a script may try something else."""
        try:
            with self.together("assembly"):
                yield
        except (ConfigError, PlanError, CheckpointError) as refusal:
            if told_of(refusal) is not None:
                self.watchdog.close()
            raise


def stacks_folder(config: HydraConfig) -> Path | None:
    """Where stacks are written, beside the steps file; None where there is none."""
    return None if config.steps_file is None else Path(config.steps_file).parent


def _remedy(config: HydraConfig) -> str:
    """What starting the job again does."""
    if config.checkpoint is None:
        return (
            "Restart the job; where its script does not resume by itself it begins anew (hydra.checkpoint is not set)"
        )
    if not config.checkpoint.resume:
        return "Restart the job; hydra.checkpoint.resume is false, so it must load a checkpoint by itself"
    return "Restart the job: it resumes from the newest checkpoint"
