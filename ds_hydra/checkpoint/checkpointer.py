"""An engine's state in, a checkpoint out, and back: what was saved by some number of ranks, loaded by any number.

[Note: all ranks or none] A rank must not raise alone, or the others wait for it for ever; and it must not load alone,
or the ranks go on from different steps. So every load first reads and verifies all it needs into memory of its own,
then all ranks tell each other whether that went well (`Channel.settle`), and only then does anything of the engine
change. An error of one rank is raised on all of them, and training can go on with what it had.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from ds_hydra.checkpoint import folder as folders
from ds_hydra.checkpoint import state
from ds_hydra.checkpoint.format import Manifest, check_client_state, check_tag
from ds_hydra.checkpoint.write import Saving, Writer
from ds_hydra.data.order import Order
from ds_hydra.host.loss_scale import LossScale
from ds_hydra.ranks.channel import Channel
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.zero_hetero.errors import CheckpointError

logger = logging.getLogger(__name__)


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


class Checkpointer:
    """Saves and loads one engine. All ranks call the same methods together."""

    def __init__(
        self,
        engine: TrainingState,
        masters: ModelMasters,
        aliases: Mapping[str, str],
        channel: Channel,
        loss_scale: LossScale,
    ):
        self._engine, self._masters, self._aliases, self._channel = engine, masters, aliases, channel
        self._loss_scale = loss_scale
        self.writer = Writer(channel)
        self.folder: Path | None = None  # where the last save went

    def save(
        self,
        folder: Path,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        save_latest: bool = True,
        with_frozen: bool = True,
        keep_last: int | None = None,
        background: bool = False,
    ) -> None:
        """Save under a tag, "global_stepN" by default. Raises CheckpointError on all ranks when it cannot."""
        # A save in the background talks to the other ranks as well. It must have ended on all of them before this one
        # begins to talk, or messages of the two would be taken for each other's.
        self.writer.wait()
        engine = self._engine
        name = f"global_step{engine.global_steps}" if tag is None else tag
        name = check_tag(name)
        assert engine.optimizer is not None, "an engine has an optimizer before it is saved"
        # Whatever is wrong with one rank's state is found here, before a file exists, and told to all.
        error, saving = None, None
        try:
            saving = Saving(
                folder,
                self._manifest(name, check_client_state(client_state), with_frozen),
                state.collect_tensors(self._masters, engine.optimizer, engine.device, with_frozen=with_frozen),
                state.collect_groups(engine.optimizer),
                tuple(state.element_wise_states(self._masters.trained.spans, engine.optimizer)),
                save_latest=save_latest,
                keep_last=keep_last,
            )
        except CheckpointError as raised:
            error = raised
        names = self._channel.settle(error, f"saving checkpoint {str(folder / name)!r}", name)
        if len(set(names)) > 1:
            raise CheckpointError(f"the ranks save different tags, rank 0 {names[0]!r}: {names}; give all ranks one")
        assert saving is not None, "there was no error"
        self.folder = folder
        (self.writer.start if background else self.writer.save)(saving)

    def load(
        self, folder: Path, tag: object = None, parts: PartsToLoad | None = None
    ) -> tuple[str | None, dict[str, Any]]:
        """(path of the tag, client_state); (None, {}) where nothing was ever saved and no tag is named.

        Nothing of the engine changes unless all ranks could read and verify their part; else CheckpointError is raised
        on all of them. See [Note: all ranks or none].
        """
        parts = parts or PartsToLoad()
        self.writer.wait()
        found = self._choose(folder, tag)
        if found is None:
            return None, {}
        place = folder / found
        manifest: Manifest | None = None
        loaded: state.LoadedTensors | None = None
        error: Exception | None = None
        try:
            manifest = folders.open_manifest(folder, found)
            loaded = self._read(manifest, place, parts)
        except (CheckpointError, OSError, ValueError, TypeError) as raised:
            error = raised
        self._channel.settle(error, f"loading checkpoint {str(place)!r}")
        assert manifest is not None, "there was no error"
        assert loaded is not None, "there was no error"
        self._install(manifest, loaded, parts)
        return str(place), manifest.client_state

    def load_newest(self, folder: Path) -> str | None:
        """Load the newest checkpoint that can be loaded; its path, or None where there is none.

        Damaged ones are passed over, each with an error in the log. Raises CheckpointError when there are checkpoints
        but none can be loaded: training must not begin anew in silence.
        """
        # One list for all ranks, from rank 0: folders on a network may look different to each of them for a while.
        tags = json.loads(self._channel.tell(self._list_tags(folder) if self._channel.rank == 0 else ""))
        last: CheckpointError | None = None
        for tag in tags:
            try:
                return self.load(folder, tag)[0]
            except CheckpointError as error:
                last = error
                if self._channel.rank == 0:
                    logger.error("%s; trying the checkpoint before", error)
        if last is not None:
            raise CheckpointError(
                f"none of the {len(tags)} checkpoints in {str(folder)!r} can be loaded, the newest because: {last}. "
                "Restore one, or begin anew in another folder"
            ) from last
        return None

    def _list_tags(self, folder: Path) -> str:
        """All tags that could be meant, as JSON: complete ones, newest first, then damaged ones."""
        if not folder.is_dir():
            return "[]"
        _restore_aside(folder)
        # Damaged ones are tried too, after all others: each attempt leaves an error in the log that says what is wrong.
        whole = [tag for _, tag in folders.complete_tags(folder)]
        return json.dumps([*whole, *folders.broken_tags(folder)])

    def _choose(self, folder: Path, tag: object) -> str | None:
        """The tag to load, as rank 0 sees it; None where nothing was ever saved."""
        found, error = None, None
        if self._channel.rank == 0:
            try:
                _restore_aside(folder)
                found = folders.find_tag(folder) if tag is None else check_tag(tag)
            except (CheckpointError, OSError) as raised:
                error = raised
        self._channel.settle(error, f"loading from {str(folder)!r}")
        found = self._channel.tell(found or "") or None
        if found is None and self._channel.rank == 0:
            logger.warning("%s holds no checkpoint: nothing was loaded", folder)
        return found

    def _read(self, manifest: Manifest, place: Path, parts: PartsToLoad) -> state.LoadedTensors:
        engine, rank = self._engine, self._channel.rank
        # Everything that may refuse comes before the first tensor is read.
        with_optimizer = parts.optimizer and parts.progress
        if with_optimizer:
            self._check_optimizer(manifest, place)
        if parts.progress and manifest.data is not None and engine.sampler is not None:
            engine.sampler.check_saved(manifest.data)

        reader = state.RangeReader(manifest, place)
        try:
            state.check_params(self._masters, reader, manifest, str(place))
            # Random generators belong to a rank. With another number of ranks there is nobody whose they are, so they
            # stay as the job seeded them.
            same_world = manifest.num_ranks == self._channel.num_ranks
            return state.read_tensors(
                self._masters,
                reader,
                manifest.states if with_optimizer else (),
                random_rank=rank if same_world and parts.progress else None,
            )
        finally:
            reader.close()

    def _check_optimizer(self, manifest: Manifest, place: Path) -> None:
        """CheckpointError unless the saved state is of this optimizer, with as many parameter groups."""
        optimizer = self._engine.optimizer
        name, count = type(optimizer).__name__, len(optimizer.param_groups) if optimizer else 0
        if not manifest.optimizer and len(manifest.groups) == 1:  # converted: one group stands for all
            return
        if manifest.groups and (manifest.optimizer or name, len(manifest.groups)) != (name, count):
            raise CheckpointError(
                f"{place} holds the state of {manifest.optimizer} with {len(manifest.groups)} parameter groups, this "
                f"job has {name} with {count}: use the optimizer that was saved, or load_optimizer_states=False"
            )

    def _install(self, manifest: Manifest, loaded: state.LoadedTensors, parts: PartsToLoad) -> None:
        """Put what was read into the engine. What may fail was done before: other ranks are installing theirs."""
        engine = self._engine
        state.install_masters(loaded, self._masters)
        if not parts.progress:
            return
        state.install_random(loaded, engine.device)
        if parts.optimizer and manifest.groups and engine.optimizer is not None:
            # `_check_optimizer` lets fewer groups pass only for one converted group, which stands for all.
            groups = manifest.groups
            if len(groups) < len(engine.optimizer.param_groups):
                groups = groups * len(engine.optimizer.param_groups)
            state.install_optimizer(self._masters.trained, engine.optimizer, loaded, groups)
        if parts.lr_scheduler and manifest.lr_scheduler is not None and engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(manifest.lr_scheduler)
        if manifest.loss_scale is not None:
            self._loss_scale.load_state_dict(manifest.loss_scale)
        counters = manifest.counters
        engine.global_steps = manifest.step
        engine.global_samples = int(counters.get("global_samples", 0))
        engine.micro_steps = int(counters.get("micro_steps", 0))
        engine.skipped_steps = int(counters.get("skipped_steps", 0))
        if engine.sampler is not None and manifest.data is not None:
            engine.sampler.restore(manifest.data)
        if self._channel.rank == 0:
            if manifest.config_sha256 != config_digest(engine.config):
                logger.info("the config is not the one that was saved with")
            logger.info("loaded %s: step %d, saved by %d ranks", manifest.tag, manifest.step, manifest.num_ranks)

    def _manifest(self, tag: str, client_state: dict[str, Any], with_frozen: bool) -> Manifest:
        """The manifest as far as this rank knows it; the writer adds save_id, files, groups and states of all ranks."""
        engine = self._engine
        buckets = state.saved_buckets(self._masters)
        schedule = None
        if engine.lr_scheduler is not None:
            schedule = _as_json(engine.lr_scheduler.state_dict(), "the LR scheduler's state")
        return Manifest(
            tag=tag,
            save_id="",
            step=engine.global_steps,
            num_ranks=self._channel.num_ranks,
            buckets=tuple(bucket for bucket in buckets if bucket.trainable or with_frozen),
            files=(),  # and save_id: the writer's
            optimizer=type(engine.optimizer).__name__,
            lr_scheduler=schedule,
            loss_scale=self._loss_scale.state_dict(),
            data=None if engine.sampler is None else engine.sampler.saved(engine.global_steps),
            counters={
                "global_samples": engine.global_samples,
                "micro_steps": engine.micro_steps,
                "skipped_steps": engine.skipped_steps,
            },
            aliases=dict(self._aliases),
            config_sha256=config_digest(engine.config),
            client_state=client_state,
        )


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest of a config, to notice that it has changed."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def _as_json(value: Any, what: str) -> dict[str, Any]:
    """The value as JSON gives it back, so that what is saved and what is loaded are the same kind of thing."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} cannot be saved as JSON ({error}): use a schedule of the config") from None


def _restore_aside(folder: Path) -> None:
    """Bring back a tag that an interrupted save left aside; only a warning where this process may not write."""
    if folder.is_dir():
        try:
            folders.restore_aside(folder)
        except OSError as error:
            logger.warning("%s: %s", folder, error)
