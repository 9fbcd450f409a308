"""Saves an engine's state as a checkpoint and loads it: what some number of ranks saved, any number of ranks loads.

[Note: all ranks or none] A rank must not raise alone, or the others wait for it for ever; and it must not load alone,
or the ranks go on from different steps. So every load first reads and verifies all it needs into memory of its own,
then all ranks tell each other whether that went well (`Channel.settle`), and only then does anything of the engine
change. An error of one rank is raised on all of them, and training can go on with what it had.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ds_hydra.checkpoint import folder as folders
from ds_hydra.checkpoint.folder import Owner, other_checkpoint
from ds_hydra.checkpoint.format import (
    MANIFEST,
    Manifest,
    OtherJobError,
    check_client_state,
    check_saved_text,
    check_tag,
)
from ds_hydra.checkpoint.loading import (
    Loading,
    PartsToLoad,
    TrainingState,
    as_json,
    check_masters,
    collect_tensors,
    saved_buckets,
)
from ds_hydra.checkpoint.optimizer_state import collect_groups, element_wise_states, fresh_state
from ds_hydra.checkpoint.universal import weights_of_deepspeed
from ds_hydra.checkpoint.write import Saving, Writer, try_writing, warn_of_little_space
from ds_hydra.ranks.channel import Channel
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.step.update import LossScale
from ds_hydra.zero_hetero.errors import CheckpointError

logger = logging.getLogger(__name__)


class Planning(Protocol):
    """What a job keeps of planning in its checkpoints."""

    def saved(self) -> dict[str, Any]:
        """As JSON holds it."""

    def read(self, saved: Mapping[str, Any] | None) -> Any:
        """What `restore` takes; CheckpointError for what cannot be gone on with."""

    def restore(self, restored: Any) -> None:
        """Go on with it; nothing may fail."""


class Checkpointer:
    """Saves and loads one engine. All ranks call the same methods together."""

    def __init__(
        self,
        engine: TrainingState,
        masters: ModelMasters,
        aliases: Mapping[str, str],
        channel: Channel,
        loss_scale: LossScale,
        planning: Planning,
    ):
        self._engine, self._masters, self._aliases, self._channel = engine, masters, aliases, channel
        self._loss_scale, self._planning = loss_scale, planning
        self.writer = Writer(channel)
        self.stage = 0  # how often weights alone were gone on from [Note: stages]

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
            check_masters(self._masters)
            manifest = self._manifest(name, check_client_state(client_state), with_frozen)
            saving = Saving(
                folder,
                replace(manifest, latest=save_latest, unnamed=tag is None),
                collect_tensors(self._masters, engine.optimizer, engine.device, with_frozen=with_frozen),
                collect_groups(engine.optimizer),
                tuple(element_wise_states(self._masters.trained.spans, engine.optimizer)),
                keep_last=keep_last,
            )
        except CheckpointError as raised:
            error = raised
        names = self._channel.settle(error, f"saving checkpoint {str(folder / name)!r}", name)
        if len(set(names)) > 1:
            raise CheckpointError(f"the ranks save different tags, rank 0 {names[0]!r}: {names}; give all ranks one")
        assert saving is not None, "there was no error"
        (self.writer.start if background else self.writer.save)(saving)

    def load(
        self, folder: Path, tag: object = None, parts: PartsToLoad | None = None
    ) -> tuple[str | None, dict[str, Any]]:
        """(path of the tag, client_state); (None, {}) where nothing was ever saved and no tag is named.

        Nothing of the engine changes unless all ranks could read, verify and build their part; else CheckpointError is
        raised on all of them. See [Note: all ranks or none].
        """
        parts = parts or PartsToLoad()
        self.writer.wait()
        found = self._choose(folder, tag)
        if found is None:
            return None, {}
        place = folders.place_of(folder, found)
        loading: Loading | None = None
        planning: Any = None
        error: Exception | None = None
        try:
            manifest = folders.open_manifest(folder, found)
            planning = self._planning.read(manifest.planning) if parts.progress else None
            loading = Loading.of(manifest, place, parts, self._engine, self._masters, self._loss_scale)
        except Exception as raised:  # whatever it is, the other ranks must hear of it
            error = raised
        self._channel.settle(error, f"loading checkpoint {str(place)!r}")
        assert loading is not None, "there was no error"
        loading.install(self._engine, self._masters, self._loss_scale)
        manifest = loading.manifest
        self.writer.last = {os.path.realpath(folder): manifest.number} if parts.progress else {}
        if parts.progress:
            self.stage = manifest.stage
            self._planning.restore(planning)
        if self._channel.rank == 0:
            if manifest.config_sha256 != config_digest(self._engine.config):
                logger.info("the config is not the one that was saved with")
            logger.info("loaded %s: step %d, saved by %d ranks", manifest.tag, manifest.step, manifest.num_ranks)
        return str(folder / found), manifest.client_state

    def load_of_another_engine(
        self, folder: Path, tag: object, group: dist.ProcessGroup | None
    ) -> tuple[str, dict[str, Any]] | None:
        """Take the weights alone of a tag that plain DeepSpeed has saved, where one file has them whole; None for any
        other. All ranks call it, `group` is theirs. CheckpointError on all of them, before anything has changed."""
        values: dict[str, torch.Tensor] = {}
        told, error = "", None
        if self._channel.rank == 0:
            try:
                values, told = self._read_of_another_engine(folder, tag)
            except Exception as raised:
                error = raised
        self._channel.settle(error, f"loading from {str(folder)!r}")
        told = self._channel.tell(told)
        if not told:
            return None
        self._masters.load(values, group)
        path, client_state = json.loads(told)
        if self._channel.rank == 0:
            logger.warning("%s is a checkpoint of plain DeepSpeed: its weights were loaded, and nothing else", path)
        return path, client_state

    def _read_of_another_engine(self, folder: Path, tag: object) -> tuple[dict[str, torch.Tensor], str]:
        """Weights by master name, and path and client_state as JSON; none and "" where it is no such checkpoint."""
        try:
            found = folders.find_tag(folder) if tag is None else check_tag(tag)
        except CheckpointError:  # which `load` tells
            return {}, ""
        other = None if found is None else other_checkpoint(folder / found)
        if found is None or other is None or other.weights is None or (folder / found / MANIFEST).exists():
            return {}, ""
        values, client_state = weights_of_deepspeed(other.weights, self._aliases)
        for bucket in self._masters.buckets:
            for param in bucket.params:
                shape = tuple(values[param.name].shape) if param.name in values else "no value"
                if shape != tuple(param.shape):
                    raise CheckpointError(
                        f"{other.weights} has {shape} for {param.name!r}, and the model {tuple(param.shape)}: load it "
                        "into the model that was saved"
                    )
        return values, json.dumps([str(folder / found), client_state])

    def resume(self, folder: Path, *, weights: bool = False) -> str | None:
        """Load the newest checkpoint that can be loaded; its path, or None where there is none.

        Damaged ones are passed over, each with an error in the log; one of another job is not, since those before it
        are mostly refused for the same reason. With `weights` a new stage begins [Note: stages]. Raises CheckpointError
        when there are checkpoints but none can be loaded: training must not begin anew in silence.
        """
        tags = self._tags_of_all(folder)
        if weights and not tags:
            raise CheckpointError(
                f'hydra.checkpoint.resume is "weights", but {str(folder)!r} holds no checkpoint to take them from: '
                "give the folder of the stage before, or remove the setting"
            )
        first: CheckpointError | None = None
        for tag, stage in tags:
            try:
                return self._begin(folder, tag, stage, weights=weights)
            except CheckpointError as error:
                if self._is_of_another_job(error):
                    raise CheckpointError(
                        f"{str(folder / tag)!r}, the newest of {len(tags)} checkpoints in hydra.checkpoint.dir, is of "
                        f"another job: {error}"
                    ) from error
                first = first or error
                if self._channel.rank == 0:
                    logger.error("%s%s", error, "; trying the checkpoint before" if tag != tags[-1][0] else "")
        if first is not None:
            raise CheckpointError(
                f"none of the {len(tags)} checkpoints in {str(folder)!r} can be loaded, the newest because: {first}. "
                "Restore one, or begin anew in another folder"
            ) from first
        return None

    def _begin(self, folder: Path, tag: str, stage: int, *, weights: bool) -> str | None:
        """Load a tag for `resume`.

        [Note: stages] With hydra.checkpoint.resume "weights" a job begins at step 0 with the weights of the stage
        before, and saves in the same folder or another. Its checkpoints carry the number of their stage, and the
        newest checkpoint of a folder is the last of its last stage. So a restart of that job finds its own, which a job
        of such a stage has saved, and goes on with all of it; only where that is of other data or another optimizer
        does it begin one stage more.
        """
        if not weights:
            return self.load(folder, tag)[0]
        if stage > 0:
            try:
                return self.load(folder, tag)[0]
            except CheckpointError as error:
                if not self._is_of_another_job(error):
                    raise
        found = self.load(folder, tag, PartsToLoad(progress=False))[0]
        self.stage = stage + 1
        if self._channel.rank == 0:
            logger.warning("stage %d begins at step 0 with the weights of %s", self.stage, folder / tag)
        return found

    def _is_of_another_job(self, error: CheckpointError) -> bool:
        """Whether any rank refused a checkpoint, with an error that all ranks caught, because it is another job's."""
        return any(self._channel.texts("other" if isinstance(error.__cause__, OtherJobError) else ""))

    def check_folder(self, folder: Path) -> None:
        """CheckpointError, on all ranks, unless each can write in the folder and what it will save can be loaded.

        So a job hears of it before its first step, and not when its first checkpoint is due.
        """
        self._try_writing(folder)
        self.writer.own(folder, f"writing to hydra.checkpoint.dir {str(folder)!r}", 0, _tidied)
        error, size = None, 0
        try:
            check_saved_text(self._manifest("trial", {}, with_frozen=True))
            size = self._bytes_to_save()
        except Exception as raised:
            error = raised
        sizes = self._channel.settle(error, "preparing checkpoints", str(size))
        if self._channel.rank == 0:
            warn_of_little_space(folder, sum(map(int, sizes)))

    def _try_writing(self, folder: Path) -> None:
        # Rank 0 first: it makes the folder.
        for turn in (self._channel.rank == 0, self._channel.rank != 0):
            error = try_writing(folder, self._channel.rank) if turn else None
            self._channel.settle(error, f"writing to hydra.checkpoint.dir {str(folder)!r}")

    def _bytes_to_save(self) -> int:
        """About what this rank will write: its masters, and the optimizer's state after a step."""
        optimizer, trained = self._engine.optimizer, self._masters.trained.flat
        assert optimizer is not None, "an engine has an optimizer before it is saved"
        frozen = self._masters.frozen.flat
        kept = fresh_state(optimizer, {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}) or {}
        states = sum(isinstance(value, torch.Tensor) and value.dim() > 0 for value in kept.values())
        return trained.numel() * trained.element_size() * (1 + states) + frozen.numel() * frozen.element_size()

    def _tags_of_all(self, folder: Path) -> list[tuple[str, int]]:
        """(tag, stage) of all that could be meant, complete ones, newest first, then damaged ones.

        One list for all ranks, from rank 0: folders on a network may look different to each of them for a while.
        """
        listed, error = "", None
        if self._channel.rank == 0:
            try:
                listed = self._list_tags(folder)
            except Exception as raised:
                error = raised
        self._channel.settle(error, f"listing the checkpoints of {str(folder)!r}")
        return [(tag, stage) for tag, stage in json.loads(self._channel.tell(listed))]

    def _list_tags(self, folder: Path) -> str:
        """All tags that could be meant, as JSON: complete ones, newest first, then damaged ones."""
        if not folder.is_dir():
            return "[]"
        whole = [(found.tag, found.stage) for found in folders.complete_manifests(folder)]
        named = folder / (folders.latest_text(folder / folders.LATEST) or "latest")
        if not whole and (other := other_checkpoint(named)):  # to begin anew beside it would overwrite its `latest`
            raise CheckpointError(f"{named}, which hydra.checkpoint.dir names as its latest, is {other}")
        # Damaged ones are tried too, after all others: each attempt leaves an error in the log that says what is wrong.
        return json.dumps([*whole, *((tag, 0) for tag in folders.broken_tags(folder, dict(whole)))])

    def _choose(self, folder: Path, tag: object) -> str | None:
        """The tag to load, as rank 0 sees it; None where nothing was ever saved."""
        found, error = None, None
        if self._channel.rank == 0:
            try:
                found = folders.find_tag(folder) if tag is None else check_tag(tag)
            except Exception as raised:
                error = raised
        self._channel.settle(error, f"loading from {str(folder)!r}")
        found = self._channel.tell(found or "") or None
        if found is None and self._channel.rank == 0:
            logger.warning("%s holds no checkpoint: nothing was loaded", folder)
        return found

    def _manifest(self, tag: str, client_state: dict[str, Any], with_frozen: bool) -> Manifest:
        """The manifest as far as this rank knows it; the writer adds save_id, files, groups and states of all ranks."""
        engine = self._engine
        buckets = saved_buckets(self._masters)
        schedule = None
        if engine.lr_scheduler is not None:
            schedule = as_json(engine.lr_scheduler.state_dict(), "the LR scheduler's state")
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
            stage=self.stage,
            planning=self._planning.saved(),
        )


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest of a config, to notice that it has changed."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def _tidied(owner: Owner) -> str:
    folders.tidy(owner.folder)
    return ""
