"""A checkpoint in; all new values of an engine, built and checked before anything changes, out; then only assigned.

[Note: all or nothing] Whatever may fail is done here on copies: the schedule is loaded into a copy of itself, the
optimizer's state is tried with one element, the random generators' states are given to other generators, counts are
read as counts, the place in the data is checked against the data. When that went well on all ranks, `install` assigns.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from ds_hydra.checkpoint import optimizer_state, state
from ds_hydra.checkpoint.format import Manifest, OtherJobError
from ds_hydra.data.sampler import RESUME_WEIGHTS, Order
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.step.update import LossScale
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError

_COUNTS = ("last_epoch", "last_batch_iteration", "_step_count")  # of schedules; they begin at -1 or 0


class TrainingState(Protocol):
    """The attributes of an engine that a checkpoint keeps besides its masters; loading sets the counters."""

    config: dict[str, Any]
    device: torch.device
    optimizer: Optimizer | None
    lr_scheduler: Any
    sampler: Order | None
    global_steps: int
    global_samples: int
    micro_steps: int
    skipped_steps: int


@dataclass(frozen=True)
class PartsToLoad:
    """Which parts of a checkpoint are loaded besides the model's parameters."""

    optimizer: bool = True
    lr_scheduler: bool = True
    progress: bool = True  # steps, samples, the place in the data; without it only the model is loaded


@dataclass(frozen=True)
class Loading:
    """One rank's part of a checkpoint, read, verified and turned into what the engine holds."""

    manifest: Manifest
    parts: PartsToLoad
    tensors: state.LoadedTensors
    optimizer: optimizer_state.NewState | None
    schedule: dict[str, Any] | None

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        place: Path,
        parts: PartsToLoad,
        engine: TrainingState,
        masters: ModelMasters,
        loss_scale: LossScale,
    ) -> Loading:
        """Read and build all that `install` assigns; the engine stays as it is.

        Raises CheckpointError for what is damaged or cannot be gone on from, OtherJobError for what is of another job.
        """
        rank, num_ranks = masters.trained.rank, masters.trained.num_ranks
        with_optimizer = parts.optimizer and parts.progress and engine.optimizer is not None
        schedule = None
        # Everything that may refuse at little cost comes before the first tensor is read.
        if with_optimizer:
            _check_optimizer(manifest, place, engine.optimizer)
        if parts.progress:
            if manifest.data is not None and engine.sampler is not None:
                _check_data(engine.sampler, manifest.data, place)
            if parts.lr_scheduler and manifest.lr_scheduler is not None and engine.lr_scheduler is not None:
                schedule = _checked_schedule(engine, manifest.lr_scheduler, place)
            loss_scale.check_state(manifest.loss_scale)
        reader = state.RangeReader(manifest, place)
        try:
            state.check_params(masters, reader, manifest, str(place))
            # Random generators belong to a rank. With another number of ranks there is nobody whose they are, so they
            # stay as the job seeded them.
            same_world = manifest.num_ranks == num_ranks
            tensors = state.read_tensors(
                masters,
                reader,
                manifest.states if with_optimizer else (),
                random_rank=rank if same_world and parts.progress else None,
            )
        finally:
            reader.close()
        state.check_random(tensors, engine.device)
        new = None
        if with_optimizer and manifest.groups and engine.optimizer is not None:
            # `_check_optimizer` lets fewer groups pass only for one converted group, which stands for all.
            groups = manifest.groups
            if len(groups) < len(engine.optimizer.param_groups):
                groups = groups * len(engine.optimizer.param_groups)
            try:
                new = optimizer_state.build_state(masters.trained, engine.optimizer, tensors.states, groups)
            except OtherJobError as error:
                raise OtherJobError(
                    f"{place}: {error}. Use the optimizer that was saved, or {RESUME_WEIGHTS}"
                ) from None
            except CheckpointError as error:
                raise CheckpointError(f"{place} is damaged: {error}; use another tag") from None
        return cls(manifest, parts, tensors, new, schedule)

    def install(self, engine: TrainingState, masters: ModelMasters, loss_scale: LossScale) -> None:
        """Assign what was built [Note: all or nothing]; other ranks are assigning theirs, so nothing here may fail."""
        state.install_masters(self.tensors, masters)
        if not self.parts.progress:
            return
        manifest = self.manifest
        state.install_random(self.tensors, engine.device)
        if self.optimizer is not None and engine.optimizer is not None:
            optimizer_state.install_optimizer(engine.optimizer, self.optimizer)
        if self.schedule is not None:
            engine.lr_scheduler.load_state_dict(self.schedule)
        if manifest.loss_scale is not None:
            loss_scale.load_state_dict(manifest.loss_scale)
        engine.global_steps = manifest.step
        engine.global_samples = manifest.counters.get("global_samples", 0)
        engine.micro_steps = manifest.counters.get("micro_steps", 0)
        engine.skipped_steps = manifest.counters.get("skipped_steps", 0)
        if engine.sampler is not None:
            if manifest.data is None:  # converted, or of sequences that were handed in
                engine.sampler.begin_at(manifest.step)
            else:
                engine.sampler.restore(manifest.data)


def as_json(value: Any, what: str) -> dict[str, Any]:
    """The value as JSON gives it back, so that what is saved and what is loaded are the same kind of thing."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} cannot be saved as JSON ({error}): use a schedule of the config") from None


def _check_optimizer(manifest: Manifest, place: Path, optimizer: Optimizer | None) -> None:
    """OtherJobError unless the saved state is of this optimizer, with as many parameter groups."""
    name, count = type(optimizer).__name__, len(optimizer.param_groups) if optimizer else 0
    if not manifest.optimizer and len(manifest.groups) == 1:  # converted: one group stands for all
        return
    if (manifest.groups or manifest.optimizer) and (manifest.optimizer or name, len(manifest.groups)) != (name, count):
        raise OtherJobError(
            f"{place} holds the state of {manifest.optimizer} with {len(manifest.groups)} parameter groups, this "
            f"job has {name} with {count}: use the optimizer that was saved, or {RESUME_WEIGHTS}"
        )


def _check_data(sampler: Order, saved: Mapping[str, Any], place: Path) -> None:
    """OtherJobError for a place in other data, CheckpointError for one that cannot be."""
    try:
        sampler.check_saved(saved)
    except ConfigError as error:
        raise OtherJobError(f"{place}: {error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error}") from None


def _checked_schedule(engine: TrainingState, saved: dict[str, Any], place: Path) -> dict[str, Any]:
    """The saved state of the LR scheduler, after a copy of it has taken it."""
    own = as_json(engine.lr_scheduler.state_dict(), "the LR scheduler's state")
    name = type(engine.lr_scheduler).__name__
    wrong = _differs(saved, own, "")
    if wrong:
        raise OtherJobError(
            f"{place} holds the state of another LR scheduler than this job's {name}: {wrong}. Use the scheduler that "
            f"was saved, load_checkpoint(load_lr_scheduler_states=False), or {RESUME_WEIGHTS}"
        )
    try:
        trial = copy.deepcopy(engine.lr_scheduler, {id(engine.optimizer): engine.optimizer})
    except Exception:  # a scheduler of the user's own that cannot be copied: its state was compared at least
        return saved
    try:
        trial.load_state_dict(copy.deepcopy(saved))
    except Exception as error:
        raise CheckpointError(
            f"{place} holds a state that the LR scheduler {name} does not take ({type(error).__name__}: {error}); use "
            "another tag"
        ) from None
    return saved


def _differs(saved: Any, own: Any, place: str) -> str:
    """The first difference in kind between a saved state and the present one; "" where there is none."""
    if own is None:
        return ""
    if isinstance(own, dict):
        if not isinstance(saved, dict) or saved.keys() != own.keys():
            keys = sorted(set(saved) ^ set(own)) if isinstance(saved, dict) else sorted(own)
            return f"the keys {', '.join(map(repr, keys))[:200]} {place and 'of ' + place} are in one of them only"
        return next(filter(None, (_differs(saved[key], own[key], key) for key in own)), "")
    if isinstance(own, list):
        if not isinstance(saved, list) or len(saved) != len(own):
            return f"{place} is {str(saved)[:80]} and no list of {len(own)}"
        return next(filter(None, (_differs(then, now, place) for then, now in zip(saved, own, strict=True))), "")
    if isinstance(own, (bool, str)):
        return "" if type(saved) is type(own) else f"{place} is {str(saved)[:80]}, here {own!r}"
    number = isinstance(saved, (int, float)) and not isinstance(saved, bool) and abs(saved) < 2**62
    if not number:
        return f"{place} is {str(saved)[:80]}, here {own}"
    if place in _COUNTS and not (isinstance(saved, int) and saved >= -1):
        return f"{place} is {saved}, which is no count"
    return ""
