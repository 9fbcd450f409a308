"""A channel of all ranks in; their watchdog, and blocks whose errors it tells the others, out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.host.modes import out_of_modes
from ds_hydra.ranks.together import Texts
from ds_hydra.watchdog import Activity, Watchdog
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, NumericsError, PlanError
from ds_hydra.zero_hetero.told import told_of

_BEATS = 9  # of a rank, in the time after which it counts as frozen


class Guard:
    """Ends the other ranks when this one cannot go on. All ranks make it together, before all else [Note: who tells].

    `coming_step` is the number of the step that reports name: the first has the number 1.
    """

    def __init__(self, channel: Texts, config: HydraConfig, coming_step: Callable[[], int]):
        self.activity = activity = Activity()  # the watchdog's thread must not hold this guard
        frozen_s = config.faults.frozen_seconds if config.elastic is None else 0.0  # else members watch each other
        self.watchdog = Watchdog(
            channel,
            lambda: (coming_step(), activity.told),
            calling=lambda: activity.calling,
            heartbeat_s=frozen_s / _BEATS,
            frozen_s=frozen_s,
            still_s=config.timeout_seconds if dist.get_backend() != "gloo" else None,  # gloo itself ends a wait
            address=config.faults.address,
            remedy=_remedy(config),
        )

    @contextmanager
    def together(self, activity: str) -> Iterator[None]:
        """An activity that all ranks are in together: an error of one of them is reported to the others.

        Errors of checkpoints and numerics, and those that all ranks know, are raised on all of them at once. So each
        rank can handle them by itself, and a script may catch one and go on; they are not reported.
        """
        with self.activity(activity), out_of_modes(activity):
            try:
                yield
            except (CheckpointError, NumericsError):
                raise
            except BaseException as error:
                if told_of(error) is None:
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


def _remedy(config: HydraConfig) -> str:
    """What starting the job again does."""
    if config.checkpoint is None:
        return "Restart the job; it begins anew, since hydra.checkpoint is not configured"
    if not config.checkpoint.resume:
        return "Restart the job; hydra.checkpoint.resume is false, so it must load a checkpoint by itself"
    return "Restart the job: it resumes from the newest checkpoint"
