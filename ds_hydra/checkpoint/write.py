"""Writes a checkpoint by all ranks together, so that it appears whole or not at all; in the background, if asked.

[Note: a save] Rank 0 sees to it that the job owns the folder, makes the temporary folder and tells its name. Every rank
writes its file and fsyncs it. All ranks tell how it went. If all went well and the job still owns the folder, rank 0
writes the manifest with the digests of all files and renames the folder to its tag; else it removes the folder. Last,
rank 0 tells whether that went well. No rank returns before: who returns without an error knows that the whole
checkpoint is durable. See [Note: whole or absent] in `folder.py`.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ds_hydra.checkpoint import folder as folders
from ds_hydra.checkpoint.folder import POLL_S, STILL_S, Owner, owner_of
from ds_hydra.checkpoint.format import (
    MANIFEST,
    FileEntry,
    Manifest,
    SavedGroup,
    check_saved_text,
    rank_file,
)
from ds_hydra.checkpoint.optimizer_state import merge_groups
from ds_hydra.checkpoint.shard_file import Source, write_shard
from ds_hydra.ranks.channel import Channel
from ds_hydra.zero_hetero.errors import CheckpointError
from ds_hydra.zero_hetero.told import message_of, release

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saving:
    """What one rank contributes to a checkpoint. `manifest` lacks what only all ranks together know."""

    folder: Path
    manifest: Manifest
    tensors: Mapping[str, Source]
    groups: list[SavedGroup]  # of the optimizer, as far as this rank has parameters in them
    states: tuple[str, ...]  # names of element-wise optimizer states, such as "exp_avg"
    keep_last: int | None = None

    @property
    def num_bytes(self) -> int:
        """That this rank writes, about."""
        return sum(source.num_bytes for source in self.tensors.values())


class Writer:
    """Saves checkpoints, one at a time; in a thread of its own if asked. All ranks call the same methods."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._owners: set[Owner] = set()
        self.failures = 0  # in a row, the same on all ranks
        self.on_failure: Callable[[], object] | None = None  # of a save in the background, from its thread
        self.last: dict[str, int] = {}  # by folder: the number of what this job has loaded or saved there last
        self._host: dict[str, torch.Tensor] = {}  # what the last save in the background was copied to
        self.step = -1  # of the last save in the background
        self.dropped = False  # that save, with the world
        self.seconds = 0.0  # that the last save took, its last rename included

    def save(self, saving: Saving) -> None:
        """Save and return when the checkpoint is durable. Raises CheckpointError, on all ranks, if it is not."""
        self.wait()
        self._save(saving)

    def start(self, saving: Saving) -> None:
        """Copy the tensors to host memory and save in the background; first waits for the save before.

        That memory is kept for the next time: fresh (or pinned) memory takes longer to get than to fill. Raises
        CheckpointError, on all ranks, if the save before failed.
        """
        # Training goes on while the thread writes, and changes the tensors: so the thread gets copies.
        self.wait()
        self._host = {name: _copied(source, self._host.get(name)) for name, source in saving.tensors.items()}
        held = {name: Source.of(value) for name, value in self._host.items()}
        self.step = saving.manifest.step
        self._thread = threading.Thread(
            target=self._run, args=(replace(saving, tensors=held),), name="checkpoint", daemon=True
        )
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a save is under way in the background."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Return when no save is under way; raises what the last one raised in the background."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def ended(self, within: float) -> bool:
        """Whether no save is under way any more, which is waited for so many seconds."""
        if self._thread is not None:
            self._thread.join(within)
        return not self.busy

    def drop(self) -> None:
        """Return when no save is under way; one that fails is `dropped`, with its error."""
        error: Exception | None = None
        try:
            self.wait()
        except Exception as raised:
            error, self.dropped = raised, True
        release(error)  # or it holds the frames of the save, and the groups in them

    def _run(self, saving: Saving) -> None:
        """The thread; an error is kept for whoever waits."""
        try:
            self._save(saving)
        except BaseException as error:
            self._error = error
            if self.on_failure is not None:
                self.on_failure()

    def close(self) -> None:
        """Wait for a save that is under way, and let go of the folders."""
        try:
            self.wait()
        finally:
            for owner in self._owners:
                owner.leave(self)

    def own(self, folder: Path, what: str, need: int, then: Callable[[Owner], str]) -> str:
        """Return when this job owns the folder [Note: one owner], and what rank 0's `then` has returned; or raise on
        all ranks what either has raised, with `what` was tried and the bytes that it needs."""
        channel, owner = self._channel, owner_of(folder, folders.highest)
        self._owners.add(owner)
        owner.users.add(self)
        waits = False
        while True:
            told = ["", "", ""]  # how it stands, the error or who owns it, what was returned
            if channel.rank == 0:
                try:
                    told = ["owned", owner.text, then(owner)] if owner.take() else ["wait", "", ""]
                except Exception as error:  # whatever it is, the other ranks must hear of it
                    told = [_kind(error), str(_explained(error, folder, need)), ""]
            how, text, found = json.loads(channel.tell(json.dumps(told)))
            if how == "owned":
                owner.follow(text)
                return str(found)
            if how != "wait":
                self.failures += 1
                raise _failed(f"{what} failed on rank 0: {text}", how)
            if channel.rank == 0:
                if not waits:
                    logger.warning("%s: waiting up to %.0f s to see whether the job that saved there is gone", folder,
                                   STILL_S)  # fmt: skip
                waits = True
                time.sleep(POLL_S)

    def _save(self, saving: Saving) -> None:
        """See [Note: a save]. No rank may raise between two calls of the channel: the others would wait for it."""
        began = time.perf_counter()
        channel, tag = self._channel, saving.manifest.tag
        what = f"saving checkpoint {str(saving.folder / tag)!r} of step {saving.manifest.step}"
        # Rank 0's is used. It stands in every file and in the manifest, so that files of two saves cannot be mixed.
        save_id = secrets.token_hex(8)
        temporary = Path(
            self.own(saving.folder, what, saving.num_bytes, lambda owner: str(folders.begin(owner, tag, save_id)))
        )
        save_id = temporary.name[-len(save_id) :]
        record: dict[str, object] = {}
        error = _attempt(lambda: record.update(_write_own(temporary, channel.rank, saving, save_id)))
        if error is not None:
            record |= {"error": str(_explained(error, saving.folder, saving.num_bytes)), "kind": _kind(error)}
        everyone = [json.loads(text) for text in channel.texts(json.dumps(record))]
        told = ["", "", 0]
        if channel.rank == 0:
            told = self._end(temporary, saving, save_id, everyone)
        how, text, number = json.loads(channel.tell(json.dumps(told)))
        if how:
            self.failures += 1
            raise _failed(f"{what} failed on {text}", how)
        self.failures, self.last[os.path.realpath(saving.folder)] = 0, number
        self.seconds = time.perf_counter() - began
        if channel.rank == 0:
            size = sum(own["file"]["size"] for own in everyone)
            logger.info("saved %s: %.1f MB in %.2f s", saving.folder / tag, size / 1e6, self.seconds)

    def _end(self, temporary: Path, saving: Saving, save_id: str, everyone: list[dict]) -> list[Any]:
        """Rank 0, when all have ended their writing: the checkpoint appears, or what was written goes. How it failed,
        where and why; its number."""
        owner = owner_of(saving.folder, folders.highest)
        failed = [(rank, own) for rank, own in enumerate(everyone) if "error" in own]
        try:
            number = owner.claim()
            if not failed:
                manifest = replace(
                    saving.manifest, number=number, follows=self.last.get(os.path.realpath(saving.folder), 0)
                )
                _finish(temporary, replace(saving, manifest=manifest), save_id, everyone)
                return ["", "", number]
            # One that does not pass decides: to try again would only meet it again.
            rank, own = min(failed, key=lambda one: one[1]["kind"] == "passing")
            how, text = own["kind"], f"rank {rank}: {own['error']}"
        except Exception as error:
            how, text = _kind(error), f"rank 0: {_explained(error, saving.folder, saving.num_bytes)}"
        _attempt(lambda: folders.remove(temporary))  # what cannot be removed, the next save tidies up
        return [how, text, 0]


def _write_own(temporary: Path, rank: int, saving: Saving, save_id: str) -> dict[str, object]:
    """Write this rank's file; what the manifest must say of it."""
    entry = write_shard(temporary / rank_file(rank), saving.tensors, {"format": "pt", "save_id": save_id})
    return {"file": asdict(entry), "groups": [asdict(group) for group in saving.groups], "states": list(saving.states)}


def _finish(temporary: Path, saving: Saving, save_id: str, everyone: list[dict]) -> None:
    """Rank 0, when all files are durable: the manifest, then the renames."""
    manifest = replace(
        saving.manifest,
        save_id=save_id,
        num_ranks=len(everyone),
        files=tuple(FileEntry(**own["file"]) for own in everyone),
        groups=merge_groups([[SavedGroup.of_record(group) for group in own["groups"]] for own in everyone]),
        states=tuple(dict.fromkeys(key for own in everyone for key in own["states"])),
    )
    folders.write_durably(temporary / MANIFEST, check_saved_text(manifest))
    folders.publish(temporary, manifest.tag, latest=manifest.latest)
    if saving.keep_last is not None:
        folders.prune(saving.folder, saving.keep_last, manifest.number)


def _copied(source: Source, host: torch.Tensor | None) -> torch.Tensor:
    """The tensor's values now, in host memory of their own: `host` if it fits."""
    value = source.fetch().detach()
    if host is None or (host.shape, host.dtype) != (value.shape, value.dtype):
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.device.type == "cuda")
    return host.copy_(value)


def _attempt(action: Callable[[], object]) -> Exception | None:
    """Do it; the error, if there was one."""
    try:
        action()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        return error
    return None


def _kind(error: Exception) -> str:
    """Whether the same may go well a little later, as other ranks are told it: what the system says may, as of a disk
    that is full, while an error of code or of data may not."""
    return "passing" if isinstance(error, OSError) else "staying"


def _failed(text: str, how: str) -> CheckpointError:
    error = CheckpointError(text)
    error.passing = how == "passing"
    return error


def _explained(error: Exception, folder: Path, need: int) -> Exception:
    """The system's error with what to do about it; `need` are the bytes that were to be written."""
    if isinstance(error, CheckpointError):
        return error
    kept = "checkpoints saved before are as they were"
    if not isinstance(error, OSError):
        return CheckpointError(f"{type(error).__name__}: {message_of(error)}; {kept}")
    return CheckpointError(f"{_remedied(error, folder, need)}; {kept}")


def _remedied(error: OSError, folder: Path, need: int) -> str:
    """What the system says, where, and what to do about it; `need` are the bytes that were to be written."""
    place = error.filename or folder
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = free_bytes(folder)
        told = "" if free is None else f", {free / 1e6:.0f} MB are free"
        return (
            f"{place}: {error.strerror}: this rank's file needs {need / 1e6:.0f} MB{told}; free space, lower keep_last "
            "or save elsewhere"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{place} cannot be written ({error.strerror}): correct its permissions or save elsewhere"
    return f"{place}: {error.strerror or error}: correct that or save elsewhere"


def try_writing(folder: Path, rank: int) -> CheckpointError | None:
    """Make the folder, write a small file in it and remove it again; the error, with its remedy, if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f"{folders.TEMPORARY}trial-{rank}-{secrets.token_hex(8)}"
        try:
            folders.write_durably(trial, "trial")
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        return CheckpointError(_remedied(error, folder, 0))
    return None


def free_bytes(folder: Path) -> int | None:
    """Bytes that are free where the folder lies; None where the system does not tell."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def warn_of_little_space(folder: Path, need: int) -> None:
    """A line in the log where fewer bytes are free than one checkpoint takes, about `need`."""
    free = free_bytes(folder)
    if free is not None and free < need:
        logger.warning(
            "%s has %.0f MB free, and a checkpoint takes about %.0f MB: saving will fail unless there is more then",
            folder, free / 1e6, need / 1e6,
        )  # fmt: skip
