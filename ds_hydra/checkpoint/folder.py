"""A folder of checkpoints: which tags it holds, how one appears whole, how old ones go, and which job saves there.

[Note: whole or absent] A tag appears by one rename of a folder whose files are durable already. A crash at any moment
leaves a whole checkpoint, or what the next save tidies up. In the order in which a save of tag T does things:

    step of a save               what it does                                        after a crash here
    .tmp-T-ID/...                all ranks write and fsync files, then the manifest  T is as it was
    T -> .old-T                  only if T exists already                            .old-T is renamed back
    .tmp-T-ID -> T               the new T is there                                  `latest` names the tag before
    latest                       written beside, fsynced, renamed                    .old-T is removed by the next save
    .old-T removed

A rename is durable once the folder that holds the name is fsynced, and a file's bytes once the file is: hence an fsync
of both, in this order. Names that begin with a dot are never tags, so nobody takes a half-written folder for one. Who
reads takes .old-T for T where there is no T; only who owns the folder [Note: one owner] renames and removes.

[Note: branches] A manifest has the number of its save, which counts up within a folder, and that of the checkpoint that
its job had loaded or saved there before. The newest checkpoint is that of the highest number, and it and those before
it are the living branch:

    saved at step 5, 8, 9, then 5 is loaded and 6 saved      number 1, 2, 3, 4; 4 follows 1
    a restart begins at 6, and if that is damaged at 5; 8 and 9 are an abandoned branch, kept and tried last

[Note: one owner] Whoever saves in a folder has made `.owner-N` there, with the highest N, and makes the next number
every 5 seconds and before each rename that changes the folder. A name can be made once (`O_EXCL`), so of two that make
the same number one is refused; nothing else is taken for atomic, no clock and no lock of a file system:

    the owner makes 8                 nobody else can have made 8, so it still owns the folder; then 7 goes
    another job sees 8, then 9        the owner lives: this job is refused, and told who it is
    it sees 9 for 30 s on its clock   the owner is frozen, cut off or gone: it makes 10
    it sees 9 of a process that is    at once: known for processes of this host (boot, network and process numbers)
      gone, or of its own job         and of the job, which may save by another process when its first one was lost
    an owner that was frozen wakes    10 is there: it saves no more

The number that a checkpoint was saved with stands in its manifest, so that of two the later one is known.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from ds_hydra.checkpoint.format import (
    LEAST_MANIFEST_BYTES,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    check_tag,
    read_manifest,
)
from ds_hydra.watchdog.host import Identity, gone
from ds_hydra.zero_hetero.errors import CheckpointError
from ds_hydra.zero_hetero.files import check_kind, check_owner, create_file, parse_json, read_file

LATEST = "latest"
TEMPORARY, _ASIDE = ".tmp-", ".old-"
_MAX_LATEST_BYTES = 4096
_UNDER_WAY: set[Path] = set()  # what this process is writing: several engines may save in one folder


def fsync_path(path: Path) -> None:
    """Make a file, or a folder's list of names, durable."""
    handle = os.open(path, os.O_RDONLY)  # a folder can only be opened for reading, which is enough for fsync
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, text: str) -> None:
    """Write a small new file and wait until it is on disk."""
    with create_file(path) as file:
        data = memoryview(text.encode())
        while len(data):
            data = data[file.write(data) :]
        os.fsync(file.fileno())


def begin(owner: Owner, tag: str, save_id: str) -> Path:
    """A fresh temporary folder for a save; what earlier, broken saves left behind is taken away."""
    owner.folder.mkdir(parents=True, exist_ok=True)
    owner.claim()
    tidy(owner.folder)  # first, so that a full disk gets back what an interrupted save took
    # The save's own id in the name: ranks of a save that was given up cannot write into the folder of this one.
    temporary = owner.folder / f"{TEMPORARY}{tag}-{save_id}"
    temporary.mkdir()
    _UNDER_WAY.add(temporary)
    return temporary


def publish(temporary: Path, tag: str, *, latest: bool) -> Path:
    """Rename the durable `temporary` to its tag, then let `latest` name it. See [Note: whole or absent]."""
    folder = temporary.parent
    target, aside = folder / tag, folder / f"{_ASIDE}{tag}"
    fsync_path(temporary)
    if os.path.lexists(target):  # a rename onto a folder with files in it is refused, so the old one must go aside
        remove(aside)
        target.rename(aside)
    try:
        temporary.rename(target)
    except OSError:
        restore_aside(folder)
        raise
    _UNDER_WAY.discard(temporary)
    fsync_path(folder)  # before `latest`: it may not name a tag that a crash could take away again
    if latest:
        set_latest(folder / LATEST, tag)
    remove(aside)
    return target


def set_latest(path: Path, tag: str) -> None:
    """Replace `latest` by one rename, so that who reads it sees the old name or the new one, never a part."""
    fresh = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(8)}")
    write_durably(fresh, tag)
    os.replace(fresh, path)
    fsync_path(path.parent)


def restore_aside(folder: Path) -> None:
    """Bring back a tag that stepped aside for one that never appeared."""
    for path in folder.glob(f"{_ASIDE}*"):
        target = folder / path.name[len(_ASIDE) :]
        # With the target there, the save that set this one aside has succeeded, and `tidy` removes it.
        if not os.path.lexists(target):
            path.rename(target)


def tidy(folder: Path) -> None:
    """Undo what an interrupted save left. Only for who owns the folder: a save under way would lose its files."""
    restore_aside(folder)
    for path in [*folder.glob(f"{_ASIDE}*"), *folder.glob(f"{TEMPORARY}*")]:
        if path not in _UNDER_WAY:
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder as far as that is possible."""
    _UNDER_WAY.discard(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def prune(folder: Path, keep_last: int, number: int) -> list[str]:
    """Of the branch whose end has this number, remove all but the `keep_last` newest checkpoints that were saved
    without a name, and never what `latest` names; what went."""
    removed = []
    named = latest_text(folder / LATEST)
    living = branch({manifest.number: manifest for manifest in complete_manifests(folder)}, number)
    for manifest in [one for one in living if one.unnamed][keep_last:]:
        if manifest.tag != named:
            # Renamed first: removing takes a while, and a tag that is half removed must not be found as one.
            gone = folder / f"{TEMPORARY}gone-{manifest.tag}"
            remove(gone)
            (folder / manifest.tag).rename(gone)
            remove(gone)
            removed.append(manifest.tag)
    return removed


def branch(found: dict[int, Manifest], number: int) -> list[Manifest]:
    """The checkpoint with a number and those that it follows, as far as they are there [Note: branches]."""
    living = []
    while number and (manifest := found.get(number)):
        living.append(manifest)
        number = manifest.follows if manifest.follows < number else 0
    return living


def _tags(folder: Path) -> list[str]:
    names = os.listdir(folder) if folder.is_dir() else []
    aside = {name[len(_ASIDE) :] for name in names if name.startswith(_ASIDE)}
    return sorted(aside | {name for name in names if not name.startswith(".")})


def place_of(folder: Path, tag: str) -> Path:
    """The folder of a tag's files; an interrupted save may have left them aside."""
    place, aside = folder / check_tag(tag), folder / f"{_ASIDE}{tag}"
    return aside if aside.is_dir() and not os.path.lexists(place) else place


def complete_manifests(folder: Path) -> list[Manifest]:
    """The manifests of the checkpoints that lie whole in `folder`: the living branch, newest first, then all others,
    those last that `latest` was not to name."""
    found = []
    for tag in _tags(folder):
        try:
            if os.path.lexists(place_of(folder, tag) / MANIFEST):
                found.append(open_manifest(folder, tag))
        except (CheckpointError, OSError):  # not complete, or not to be read, which is what was asked
            continue
    # Manifests of before had no number.
    found.sort(key=lambda m: (m.latest, m.number, m.stage, m.step, m.tag), reverse=True)
    living = branch({manifest.number: manifest for manifest in found}, found[0].number if found else 0)
    return living + [manifest for manifest in found if manifest not in living]


def highest(folder: Path) -> int:
    """The highest number of a checkpoint in `folder`."""
    return max((manifest.number for manifest in complete_manifests(folder)), default=0)


def complete_tags(folder: Path) -> list[tuple[int, str]]:
    """(step, tag) of the checkpoints that lie whole in `folder`, newest first."""
    return [(manifest.step, manifest.tag) for manifest in complete_manifests(folder)]


def broken_tags(folder: Path, whole: Collection[str]) -> list[str]:
    """Tags that were saved in `folder` and do not lie `whole` there: a file of a checkpoint is left of each."""
    places = [folder / tag for tag in _tags(folder) if tag not in whole]
    return [one.name for one in places if os.path.lexists(one / MANIFEST) or any(one.glob("rank_*.safetensors"))]


def open_manifest(folder: Path, tag: str) -> Manifest:
    """The manifest of a tag, its files all there and of the right size. Raises CheckpointError for any other."""
    place = place_of(folder, tag) / MANIFEST
    try:
        check_owner(place.parent, place.parent.stat())
        manifest = read_manifest(read_file(place, _most_bytes(place)), str(place))
    except FileNotFoundError:
        if other := other_checkpoint(place.parent):
            raise CheckpointError(f"{place.parent} is {other}") from None
        raise CheckpointError(
            f"{place} does not exist, so this is no complete checkpoint: {_other(folder, tag)}"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or place} cannot be read: {error.strerror}; correct that, or {_other(folder, tag)}"
        ) from None
    if manifest.tag != tag:
        raise CheckpointError(
            f"{place} says that it was saved as {manifest.tag!r}: it lies in another tag's folder. Rename the folder "
            f"back, or {_other(folder, tag)}"
        )
    # Sizes now, contents when they are read: a cut-off file is found at once, without reading gigabytes.
    for entry in manifest.files:
        path = place.parent / entry.name
        try:
            found = path.lstat()
            check_kind(path, found)
        except OSError as error:
            what = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
            raise CheckpointError(f"{path} {what}: bring it back, or {_other(folder, tag)}") from None
        if found.st_size != entry.size:
            raise CheckpointError(
                f"{path} has {found.st_size} bytes but was saved with {entry.size}: it is truncated or of another "
                f"save; {_other(folder, tag)}"
            )
    return manifest


def _most_bytes(place: Path) -> int:
    """That a manifest may have: digests of each MiB of the files beside it take 8, and to read 256 MiB takes long."""
    if place.lstat().st_size <= LEAST_MANIFEST_BYTES:
        return LEAST_MANIFEST_BYTES
    held = sum(path.lstat().st_size for path in place.parent.iterdir() if path != place)
    return min(MAX_MANIFEST_BYTES, LEAST_MANIFEST_BYTES + held // 2**16)


def find_tag(folder: Path) -> str | None:
    """The tag that `latest` names; None where nothing was ever saved.

    Where `latest` is missing, as after a first save that was interrupted, it is the newest of those that it was to
    name, all whole. Raises CheckpointError where `folder` is another engine's, and, naming the newest complete tag,
    when `latest` is missing beside damaged ones, is empty or damaged itself, or names a tag that is not there.
    """
    path = folder / LATEST
    found = complete_manifests(folder)
    tags = [manifest.tag for manifest in found]
    broken = broken_tags(folder, tags)
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
        if not broken and found[0].latest:
            return tags[0]
        raise CheckpointError(f"{path} is missing, though there are checkpoints: {remedy}")
    if not text:
        raise CheckpointError(f"{path} is empty: {remedy}")
    try:
        tag = check_tag(text)
    except CheckpointError:
        raise CheckpointError(f"{path} holds {text[:80]!r}, which is no tag: {remedy}") from None
    if not place_of(folder, tag).is_dir():
        raise CheckpointError(f"{path} names {tag!r}, which does not exist: {remedy}")
    return tag


def latest_text(path: Path) -> str | None:
    """What `latest` says; None when there is no such file."""
    try:
        return read_file(path, _MAX_LATEST_BYTES).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; correct that, or name a tag") from None


def _other(folder: Path, tag: str) -> str:
    """The remedy of an error about `tag`: what to load instead."""
    others = [name for name in _tags(folder) if name != tag and (folder / name / MANIFEST).is_file()]
    return "load another tag: " + ", ".join(others[:8]) if others else "there is no other tag in this folder"


BEAT_S, STILL_S, POLL_S = 5.0, 30.0, 1.0
_NAME = re.compile(r"\.owner-([0-9]{1,18})")
_MOST_BYTES = 4096


class OwnedError(CheckpointError):
    """The folder is another job's."""


class Owner:
    """What one process knows of who owns a folder; `highest` is the highest number of its checkpoints."""

    def __init__(
        self,
        folder: Path,
        highest: Callable[[Path], int],
        me: Identity | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.folder, self._highest, self._clock = folder, highest, clock
        self._me = me or _here()
        self.text = json.dumps(asdict(self._me))
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        self._job: str | None = None  # the text of this job's owner, as its rank 0 has told it
        self._number = 0  # that this process has made last; 0: it owns nothing
        self._seen: tuple[int, float] | None = None  # another job's number, and since when
        self._lost = ""
        self._lock = threading.RLock()
        self._ended = threading.Event()

    @property
    def owns(self) -> bool:
        """Whether this process owns the folder, as far as it knows."""
        return self._number > 0 and not self._lost

    def take(self) -> bool:
        """Whether this process owns the folder now; where not, ask again in a second. OwnedError if another job does
        that is alive."""
        with self._lock:
            if self._number:
                return True
            self.folder.mkdir(parents=True, exist_ok=True)
            found, text = self._newest()
            if found and text not in (self._job, self.text) and not _gone(text, self._me):
                now = self._clock()
                first, since = self._seen = self._seen or (found, now)
                if found != first:
                    self._seen = None
                    raise OwnedError(
                        f"{self.folder} is in use: {_told(text)} saves there and is alive. End that job, or save "
                        "elsewhere"
                    )
                if now - since < STILL_S:
                    return False
            if not self._make(max(found, self._highest(self.folder)) + 1):
                self._number = 0
                if self._newest()[0] <= found:
                    raise OwnedError(f"{self.folder}/.owner-{found + 1} is in the way and no file of a job: remove it")
                return False
            self._seen, self._lost, self._ended = None, "", threading.Event()
            threading.Thread(target=self._beat, args=(self._ended,), name="folder owner", daemon=True).start()
            return True

    def claim(self) -> int:
        """The next number, which shows that this process owns the folder still; OwnedError, by whom, where it was
        taken over."""
        with self._lock:
            if not self._lost:
                found, text = self._newest()
                saved = 0 if found else self._highest(self.folder)  # by an owner that has come and gone, say
                if found > self._number or saved > self._number or not self._make(self._number + 1):
                    by = _told(self._newest()[1] or text)
                    self._lost = (
                        f"{self.folder} was taken over by another job, {by}, while this one stood still for "
                        f"{STILL_S:.0f} s or more: this job saves no more. Keep one of the two"
                    )
            if self._lost:
                raise OwnedError(self._lost)
            return self._number

    def follow(self, text: str) -> None:
        """Know who owns the folder for this job; this process may have done so before."""
        self._job = text
        if text != self.text:
            self._ended.set()
            with self._lock:
                self._number = 0

    def leave(self, user: object) -> None:
        """Let go of the folder when nobody uses it any more."""
        self.users.discard(user)
        if not self.users:
            self.release()

    def release(self) -> None:
        """Let go of the folder: another job may take it at once."""
        self._ended.set()
        with self._lock, contextlib.suppress(OSError):
            number, self._number = self._number, 0
            if number and not self._lost:
                (self.folder / f".owner-{number}").unlink(missing_ok=True)

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_S):
            with self._lock, contextlib.suppress(OSError):  # a disk that is full or away: it is tried again
                if ended.is_set():
                    return
                try:
                    self.claim()
                except OwnedError:
                    return

    def _make(self, number: int) -> bool:
        """Whether this process, and no other, has made the number, and none is higher."""
        try:
            file = create_file(self.folder / f".owner-{number}", 0o644)
        except FileExistsError:
            return False
        before, self._number = self._number, number
        with contextlib.suppress(OSError), file:  # on a full disk the name alone has to do
            file.write(self.text.encode())
        higher = self._newest()[0] > number
        for path in self.folder.glob(".owner-*"):
            found = _NAME.fullmatch(path.name)
            if found and int(found[1]) in ((number, before) if higher else range(number)):
                path.unlink(missing_ok=True)
        return not higher

    def _newest(self) -> tuple[int, str]:
        """The highest number there is, 0 for none, and who has made it; what strangers have put there counts for
        nothing."""
        numbers = sorted(int(found[1]) for name in os.listdir(self.folder) if (found := _NAME.fullmatch(name)))
        for number in reversed(numbers):
            try:
                return number, read_file(self.folder / f".owner-{number}", _MOST_BYTES).decode("utf-8", "replace")
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EPERM):  # gone by now, say: its maker has made the next
                    return number, ""
        return 0, ""


def _here() -> Identity:
    """This process, with the name space that its number is of."""
    me = Identity.of_self()
    with contextlib.suppress(OSError):
        return Identity(f"{me.host}/{os.readlink('/proc/self/ns/pid')}", me.pid, me.started)
    return me


def _read(text: str) -> Identity | None:
    try:
        found = Identity(**parse_json(text))
    except (TypeError, ValueError):
        return None
    plain = isinstance(found.host, str) and isinstance(found.pid, int) and isinstance(found.started, str)
    return found if plain and 0 < found.pid < 2**31 else None


def _gone(text: str, me: Identity) -> bool:
    """Whether who has written this is known to have ended."""
    found = _read(text)
    return found is not None and found.host == me.host and bool(found.started) and gone(found.pid, found.started)


def _told(text: str) -> str:
    found = _read(text)
    return "another process" if found is None else f"process {found.pid} on {found.host.partition('/')[0]}"


_OWNERS: dict[str, Owner] = {}
os.register_at_fork(after_in_child=_OWNERS.clear)


def owner_of(folder: Path, highest: Callable[[Path], int]) -> Owner:
    """This process's one Owner of a folder."""
    return _OWNERS.setdefault(os.path.realpath(folder), Owner(folder, highest))


@atexit.register
def _release_all() -> None:
    for owner in list(_OWNERS.values()):
        owner.release()


class OtherCheckpoint(NamedTuple):
    """A checkpoint that is none of ours."""

    what: str  # in words
    remedy: str  # commands or calls, as they are typed
    weights: Path | None = None  # a torch file with the whole weights under "module"

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}"


def other_checkpoint(place: Path) -> OtherCheckpoint | None:
    """What another engine has saved as the folder `place`; None where there is nothing of the kinds that are known."""
    if not place.is_dir():
        return None
    converted = f"{place} {place.parent} --tag {place.name}_hydra"
    then = f"and load {place.parent} again, whose `latest` names the new tag then"
    if any(place.glob("zero/**/fp32.pt")):
        return OtherCheckpoint(
            "a universal checkpoint of DeepSpeed",
            f"Convert it, `ds-hydra convert from-universal {converted}`, {then}",
        )
    whole = sorted(place.glob("mp_rank_*_model_states.pt"))
    weights = whole[0] if len(whole) == 1 and not any(place.glob("layer_*model_states.pt")) else None
    alone = "its weights alone are loaded by load_checkpoint(load_module_only=True)" if weights else ""
    if any(place.glob("*zero_pp_rank_*_optim_states.pt")):
        stage = "stage 1 or 2" if whole else "stage 3"
        return OtherCheckpoint(
            f"a checkpoint of DeepSpeed's ZeRO {stage}",
            f"Convert it, `ds-hydra convert from-deepspeed {converted}`, {then}{f'; {alone}' if alone else ''}",
            weights,
        )
    if whole or any(place.glob("layer_*model_states.pt")):
        return OtherCheckpoint(
            "a checkpoint of DeepSpeed without ZeRO, whose optimizer state has no names of parameters",
            f"I{alone[1:]}" if alone else "Save it once more under ZeRO stage 1 by plain DeepSpeed",
            weights,
        )
    if any(place.glob("*.distcp")) or (place / ".metadata").is_file():
        return OtherCheckpoint(
            "a distributed checkpoint of torch (DCP)",
            f"`python -m torch.distributed.checkpoint.format_utils dcp_to_torch {place} {place}.pt` makes one file of "
            "it; load its weights into the model before ds_hydra.initialize()",
        )
    return _of_transformers(place)


def _of_transformers(place: Path) -> OtherCheckpoint | None:
    """A folder of weights, with the state of a Trainer beside them or not."""
    trainer = (place / "trainer_state.json").is_file() or any((place / f"optimizer.{end}").is_file() for end in _ENDS)
    what = "a checkpoint of transformers' Trainer without DeepSpeed" if trainer else "a folder of weights"
    if any(place.glob("model*.safetensors")):
        remedy = (
            f"Load its weights, from_pretrained({str(place)!r}) before ds_hydra.initialize(), or "
            "engine.load_16bit_model() of this folder; the optimizer begins anew"
        )
    elif any(place.glob("adapter_model.*")):
        remedy = f"Load its adapters, PeftModel.from_pretrained(model, {str(place)!r}), before ds_hydra.initialize()"
    elif any(place.glob("pytorch_model*.bin")):
        remedy = f"Load its weights, from_pretrained({str(place)!r}), before ds_hydra.initialize()"
    else:
        return None
    return OtherCheckpoint(what, remedy)


_ENDS = ("pt", "bin")
