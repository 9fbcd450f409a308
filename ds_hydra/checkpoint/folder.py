"""A folder of checkpoints: which tags it holds, how one appears whole, and how old ones go. Pure.

[Note: whole or absent] A tag appears by one rename of a folder whose files are durable already. A crash at any moment
leaves a whole checkpoint, or what the next save tidies up. In the order in which a save of tag T does things:

    step of a save               what it does                                        after a crash here
    .tmp-T-ID/...                all ranks write and fsync files, then the manifest  T is as it was
    T -> .old-T                  only if T exists already                            .old-T is renamed back
    .tmp-T-ID -> T               the new T is there                                  `latest` names the tag before
    latest                       written beside, fsynced, renamed                    .old-T is removed by the next save
    .old-T removed

A rename is durable once the folder that holds the name is fsynced, and a file's bytes once the file is: hence an fsync
of both, in this order. Names that begin with a dot are never tags, so nobody takes a half-written folder for one.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from ds_hydra.checkpoint.format import MANIFEST, MAX_MANIFEST_BYTES, Manifest, check_tag
from ds_hydra.checkpoint.other_engines import other_checkpoint
from ds_hydra.checkpoint.read_manifest import read_manifest
from ds_hydra.zero_hetero.errors import CheckpointError

logger = logging.getLogger(__name__)

LATEST = "latest"
TEMPORARY, _ASIDE = ".tmp-", ".old-"
_MAX_LATEST_BYTES = 4096


def fsync_path(path: Path) -> None:
    """Make a file, or a folder's list of names, durable."""
    handle = os.open(path, os.O_RDONLY)  # a folder can only be opened for reading, which is enough for fsync
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, text: str) -> None:
    """Write a small file and wait until it is on disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def begin(folder: Path, tag: str, save_id: str) -> Path:
    """A fresh temporary folder for a save; what earlier, broken saves left behind is taken away."""
    folder.mkdir(parents=True, exist_ok=True)
    tidy(folder)  # first, so that a full disk gets back what an interrupted save took
    # The save's own id in the name: ranks of a save that was given up cannot write into the folder of this one.
    temporary = folder / f"{TEMPORARY}{tag}-{save_id}"
    temporary.mkdir()
    return temporary


def publish(temporary: Path, tag: str, *, latest: bool) -> Path:
    """Rename the durable `temporary` to its tag, then let `latest` name it. See [Note: whole or absent]."""
    folder = temporary.parent
    target, aside = folder / tag, folder / f"{_ASIDE}{tag}"
    fsync_path(temporary)
    if target.exists():  # a rename onto a folder with files in it is refused, so the old one must go aside
        remove(aside)
        target.rename(aside)
    temporary.rename(target)
    fsync_path(folder)  # before `latest`: it may not name a tag that a crash could take away again
    if latest:
        set_latest(folder, tag)
    remove(aside)
    return target


def set_latest(folder: Path, tag: str) -> None:
    """Replace `latest` by one rename, so that who reads it sees the old name or the new one, never a part."""
    fresh = folder / f"{TEMPORARY}{LATEST}"
    write_durably(fresh, tag)
    os.replace(fresh, folder / LATEST)
    fsync_path(folder)


def restore_aside(folder: Path) -> None:
    """Bring back a tag that stepped aside for one that never appeared."""
    for path in folder.glob(f"{_ASIDE}*"):
        target = folder / path.name[len(_ASIDE) :]
        # With the target there, the save that set this one aside has succeeded, and `tidy` removes it.
        if not target.exists():
            path.rename(target)


def tidy(folder: Path) -> None:
    """Undo what an interrupted save left. Only for the one that saves: a save under way would lose its files."""
    restore_aside(folder)
    for path in [*folder.glob(f"{_ASIDE}*"), *folder.glob(f"{TEMPORARY}*")]:
        remove(path)


def remove(path: Path) -> None:
    """Remove a file or a folder as far as that is possible."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def prune(folder: Path, keep_last: int) -> list[str]:
    """Remove all but the `keep_last` newest complete tags , never the one that `latest` names; what went."""
    removed = []
    named = latest_text(folder / LATEST)
    for tag in [tag for _, tag in complete_tags(folder)][keep_last:]:
        if tag != named:
            # Renamed first: removing takes a while, and a tag that is half removed must not be found as one.
            gone = folder / f"{TEMPORARY}gone-{tag}"
            (folder / tag).rename(gone)
            remove(gone)
            removed.append(tag)
    return removed


def complete_manifests(folder: Path) -> list[Manifest]:
    """The manifests of the checkpoints that lie whole in `folder`, newest first: by stage, then by step."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            if (path / MANIFEST).is_file():
                found.append(open_manifest(folder, path.name))
        except (CheckpointError, OSError):  # not complete, or not to be read, which is what was asked
            continue
    return sorted(found, key=lambda manifest: (manifest.stage, manifest.step, manifest.tag), reverse=True)


def complete_tags(folder: Path) -> list[tuple[int, str]]:
    """(step, tag) of the checkpoints that lie whole in `folder`, newest first."""
    return [(manifest.step, manifest.tag) for manifest in complete_manifests(folder)]


def broken_tags(folder: Path) -> list[str]:
    """Tags that were saved in `folder` and do not lie whole there any more: a file of a checkpoint is left of each."""
    whole = {tag for _, tag in complete_tags(folder)}
    return [
        path.name
        for path in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if path.name not in whole
        and not path.name.startswith(".")
        and ((path / MANIFEST).exists() or any(path.glob("rank_*.safetensors")))
    ]


def open_manifest(folder: Path, tag: str) -> Manifest:
    """The manifest of a tag, its files all there and of the right size. Raises CheckpointError for any other."""
    place = folder / check_tag(tag) / MANIFEST
    try:
        if place.stat().st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{place} has more than {MAX_MANIFEST_BYTES} bytes; it is no manifest: {_other(folder, tag)}"
            )
        manifest = read_manifest(place.read_bytes(), str(place))
    except FileNotFoundError:
        if other := other_checkpoint(place.parent):
            raise CheckpointError(f"{place.parent} is {other}") from None
        raise CheckpointError(
            f"{place} does not exist, so this is no complete checkpoint: {_other(folder, tag)}"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{place} cannot be read: {error.strerror}; correct that, or {_other(folder, tag)}"
        ) from None
    if manifest.tag != tag:
        raise CheckpointError(
            f"{place} says that it was saved as {manifest.tag!r}: it lies in another tag's folder. Rename the folder "
            f"back, or {_other(folder, tag)}"
        )
    # Sizes now, contents when they are read: a cut-off file is found at once, without reading gigabytes.
    for entry in manifest.files:
        path = place.parent / entry.name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise CheckpointError(f"{path} is missing: bring it back, or {_other(folder, tag)}")
        if size != entry.size:
            raise CheckpointError(
                f"{path} has {size} bytes but was saved with {entry.size}: it is truncated or of another save; "
                f"{_other(folder, tag)}"
            )
    return manifest


def find_tag(folder: Path) -> str | None:
    """The tag that `latest` names; None where nothing was ever saved.

    Raises CheckpointError where `folder` is another engine's, and, naming the newest complete tag, when `latest` is
    missing beside checkpoints, whole or damaged, is empty or damaged itself, or names a tag that is not there.
    """
    path = folder / LATEST
    tags = [tag for _, tag in complete_tags(folder)]
    broken = broken_tags(folder)
    if tags:
        remedy = f"load_checkpoint({str(folder)!r}, tag={tags[0]!r}) loads the newest complete one"
    elif broken:
        remedy = f"{', '.join(broken[:8])} are damaged: restore one from a copy, or begin anew in another folder"
    else:
        remedy = "nothing else is there to load: restore the folder from a copy, or begin anew in another one"
    text = latest_text(path)
    if text is None:
        if not (tags or broken):  # an empty folder is a fresh start; a lost `latest` is to be told
            if other := other_checkpoint(folder):
                raise CheckpointError(f"{folder} is {other}")
            return None
        raise CheckpointError(f"{path} is missing, though there are checkpoints: {remedy}")
    if not text:
        raise CheckpointError(f"{path} is empty: {remedy}")
    try:
        tag = check_tag(text)
    except CheckpointError:
        raise CheckpointError(f"{path} holds {text[:80]!r}, which is no tag: {remedy}") from None
    if not (folder / tag).is_dir():
        raise CheckpointError(f"{path} names {tag!r}, which does not exist: {remedy}")
    return tag


def latest_text(path: Path) -> str | None:
    """What `latest` says, at most its first 4096 bytes; None when there is no such file."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_LATEST_BYTES).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; correct that, or name a tag") from None


def _other(folder: Path, tag: str) -> str:
    """The remedy of an error about `tag`: what to load instead."""
    others = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name != tag and (path / MANIFEST).is_file():
            others.append(path.name)
    return "load another tag: " + ", ".join(others[:8]) if others else "there is no other tag in this folder"
