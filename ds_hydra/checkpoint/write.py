"""Every rank's tensors in, a checkpoint that appears whole or not at all out.

[Note: a save] Rank 0 makes the temporary folder and tells its name. Every rank writes its file and fsyncs it. All ranks
tell how it went. If all went well, rank 0 writes the manifest with the digests of all files and renames the folder to
its tag; else it removes the folder. Last, all ranks hear whether that went well. No rank returns before: who returns
without an error knows that the whole checkpoint is durable. See [Note: whole or absent] in `folder.py`.
"""

from __future__ import annotations

import errno
import json
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ds_hydra.checkpoint import folder as folders
from ds_hydra.checkpoint.format import MANIFEST, FileEntry, Manifest, SavedGroup, SavedScalar, rank_file
from ds_hydra.checkpoint.optimizer_state import merge_groups
from ds_hydra.checkpoint.read_manifest import check_saved_text
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
    save_latest: bool = True
    keep_last: int | None = None


class Writer:
    """Saves checkpoints, one at a time; in a thread of its own if asked. All ranks call the same methods."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
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

    def _save(self, saving: Saving) -> None:
        """See [Note: a save]. No rank may raise between two calls of the channel: the others would wait for it."""
        began = time.perf_counter()
        channel, tag = self._channel, saving.manifest.tag
        what = f"saving checkpoint {str(saving.folder / tag)!r} of step {saving.manifest.step}"
        # Rank 0's is used. It stands in every file and in the manifest, so that files of two saves cannot be mixed.
        save_id, refused = secrets.token_hex(8), ""
        if channel.rank == 0:
            refused = str(_explained(_attempt(lambda: folders.begin(saving.folder, tag, save_id)), saving) or "")
        save_id, _, refused = channel.tell(f"{save_id} {refused}").partition(" ")
        if refused:
            raise CheckpointError(f"{what} failed on rank 0: {refused}")
        temporary = saving.folder / f".tmp-{tag}-{save_id}"
        record: dict[str, object] = {}
        error = _attempt(lambda: record.update(_write_own(temporary, channel.rank, saving, save_id)))
        record["error"] = "" if error is None else str(_explained(error, saving))
        everyone = [json.loads(text) for text in channel.texts(json.dumps(record))]
        failed = [(rank, own["error"]) for rank, own in enumerate(everyone) if own["error"]]
        error = None
        if channel.rank == 0 and not failed:
            error = _explained(_attempt(lambda: _finish(temporary, saving, save_id, everyone)), saving)
        # Removed by one rank when all have ended their writing; what cannot be removed, the next save tidies up.
        if channel.rank == 0 and (failed or error):
            _attempt(lambda: folders.remove(temporary))
        if failed:
            raise CheckpointError(f"{what} failed on rank {failed[0][0]}: {failed[0][1]}")
        channel.settle(error, what)
        self.seconds = time.perf_counter() - began
        if channel.rank == 0:
            size = sum(own["file"]["size"] for own in everyone)
            logger.info("saved %s: %.1f MB in %.2f s", saving.folder / tag, size / 1e6, self.seconds)


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
        groups=merge_groups([[_group(group) for group in own["groups"]] for own in everyone]),
        states=tuple(dict.fromkeys(key for own in everyone for key in own["states"])),
    )
    folders.write_durably(temporary / MANIFEST, check_saved_text(manifest))
    folders.publish(temporary, manifest.tag, latest=saving.save_latest)
    if saving.keep_last is not None:
        folders.prune(saving.folder, saving.keep_last)


def _group(record: dict) -> SavedGroup:
    """A parameter group from another rank's JSON."""
    return SavedGroup(record["options"], {key: SavedScalar(**scalar) for key, scalar in record["scalars"].items()})


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


def _explained(error: Exception | None, saving: Saving) -> Exception | None:
    """The system's error with what to do about it."""
    if error is None or isinstance(error, CheckpointError):
        return error
    kept = "checkpoints saved before are as they were"
    if not isinstance(error, OSError):
        return CheckpointError(f"{type(error).__name__}: {message_of(error)}; {kept}")
    need = sum(source.num_bytes for source in saving.tensors.values())
    return CheckpointError(f"{_remedied(error, saving.folder, need)}; {kept}")


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
