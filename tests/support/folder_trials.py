"""Saves that are interrupted at each call, two jobs in one folder, and what others have put there; and a saver."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import nn

from ds_hydra.checkpoint import folder as folders
from ds_hydra.checkpoint.folder import OwnedError, Owner
from ds_hydra.checkpoint.format import COUNTERS, DIGEST_BYTES, FileEntry, Manifest, SavedBucket, SavedParam, rank_file
from ds_hydra.checkpoint.optimizer_state import collect_groups
from ds_hydra.checkpoint.shard_file import ShardReader, Source
from ds_hydra.checkpoint.write import Saving, Writer
from ds_hydra.ranks.channel import Channel
from ds_hydra.watchdog.host import Identity
from ds_hydra.zero_hetero.errors import CheckpointError


# --- Something small that saves again and again, to be killed in between.
class Saver:
    """Saves one parameter, filled with the number of the save, under a few tags in turn."""

    def __init__(self, folder: Path, meeting: Channel, numel: int = 1 << 18, first: int = 1):
        self.folder, self.numel, self.first = folder, numel, first
        self.writer = Writer(meeting)
        bucket = SavedBucket("all", True, (SavedParam("w", (numel * meeting.num_ranks,)),))
        self.manifest = Manifest(
            tag="",
            save_id="",
            step=0,
            num_ranks=meeting.num_ranks,
            buckets=(bucket,),
            files=(),
            optimizer="SGD",
            counters=dict.fromkeys(COUNTERS, 0),
            unnamed=True,
        )
        found = folders.complete_manifests(folder)
        self.writer.last[os.path.realpath(folder)] = found[0].number if found else 0  # as after loading it
        self.groups = collect_groups(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))

    def save(self, step: int, tag: str) -> None:
        """Save `step` in every element."""
        value = Source.of(torch.full((self.numel,), float(step)))
        manifest = replace(self.manifest, tag=tag, step=step)
        self.writer.save(Saving(self.folder, manifest, {"all/master": value}, self.groups, (), keep_last=2))

    def run(self) -> NoReturn:
        """Until killed. Tags come again, so that saves over a tag are killed too."""
        for step in itertools.count(self.first):
            self.save(step, f"tag{step % 3}")
        raise AssertionError("killed before")

    @classmethod
    def killed(cls, folder: Path, first: int, seconds: float) -> None:
        """Save in a process that is killed `seconds` after a complete tag is there."""
        saver = cls(folder, Channel(None, 0, 1), first=first)  # before, for torch imports much with its first optimizer
        pid = os.fork()
        if pid == 0:
            saver.run()
        while not folders.complete_tags(folder):
            time.sleep(0.002)
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    @staticmethod
    def verify(folder: Path) -> int:
        """The newest step in a folder; every complete tag, and the one that latest names, must hold what it says."""
        folders.tidy(folder)
        found = folders.complete_tags(folder)
        named = folders.find_tag(folder) if (folder / folders.LATEST).exists() else None
        for tag in {*(tag for _, tag in found), *([named] if named else [])}:
            manifest = folders.open_manifest(folder, tag)
            for entry in manifest.files:
                reader = ShardReader(folder / tag / entry.name, entry, manifest.block_bytes, manifest.save_id)
                values = reader.read_all("all/master")
                reader.close()
                assert bool((values == manifest.step).all()), f"{tag} holds another step than {manifest.step}"
        return found[0][0]


# --- Saves that are interrupted at each call, two jobs in one folder in each order, and what others have put
# there: what was wrong, "" for nothing. One trial each.
_CALLS = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir", "listdir", "lstat")
_NOT_REACHED = 3
HOW = ("killed before", "killed after", "ENOSPC", "EIO")
SAVES = {"first": ["a"], "same tag": ["a", "a"], "retention": ["a", "b", "c"]}
"""Tags that are saved one after the other; the last save is interrupted."""


def interrupted(folder: Path, which: str, nth: int, how: str) -> str | None:
    """The last of some saves is interrupted at its nth call on the folder; None where it has fewer calls."""
    shutil.rmtree(folder, ignore_errors=True)
    tags = SAVES[which]
    code = _in_child(partial(_save_all, folder, tags, nth, how))
    if code == _NOT_REACHED:
        return None
    if code not in ((-signal.SIGKILL,) if "killed" in how else (0, 1)):
        return f"the process ended with {code}"
    done = len(tags)
    saver = Saver(folder, Channel(None, 0, 1), numel=9)
    try:
        if code == 0 and folders.complete_tags(folder)[0][0] != done:
            return "the save was said to have gone well"
        if done == 1 and not folders.complete_tags(folder):
            if folders.find_tag(folder) is not None:
                return "a folder without a checkpoint names one"
        else:
            step = Saver.verify(folder)
            if not done - 1 <= step <= done:
                return f"step {step} after {done}"
            if folders.find_tag(folder) is None:
                return "nobody finds a checkpoint"
        with mock.patch.object(folders, "STILL_S", 0.0):  # where the owner had not yet said who it is
            saver.save(done + 1, "next")
        if Saver.verify(folder) != done + 1 or folders.find_tag(folder) != "next":
            return "the next save is not the newest"
        left = [path.name for path in folder.glob(".*") if not path.name.startswith(".owner-")]
        return f"{left} are left" if left else ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        saver.writer.close()


def _save_all(folder: Path, tags: list[str], nth: int, how: str) -> None:
    saver = Saver(folder, Channel(None, 0, 1), numel=9)
    for step, tag in enumerate(tags[:-1], 1):
        saver.save(step, tag)
    left = [nth]
    for name in _CALLS:
        setattr(os, name, partial(_fails, left, how, getattr(os, name)))
    saver.save(len(tags), tags[-1])
    if left[0] > 0:
        os._exit(_NOT_REACHED)


def _fails(left: list[int], how: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    left[0] -= 1
    reached = left[0] == 0
    if reached and how != "killed after":
        if how == "killed before":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(*((28, "No space left on device") if how == "ENOSPC" else (5, "Input/output error")))
    try:
        return call(*given, **named)
    finally:
        if reached and how == "killed after":
            os.kill(os.getpid(), signal.SIGKILL)


def _in_child(action: Callable[[], object], limit_s: int = 0) -> int:
    pid = os.fork()
    if pid == 0:
        code = 2
        signal.alarm(limit_s)
        try:
            action()
            code = 0
        except CheckpointError:
            code = 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class _Job:
    """Saves two tags step by step; each step is one of `moves`."""

    def __init__(self, folder: Path, name: str, pid: int, clock: Callable[[], float], manifest: Manifest):
        self.name, self.manifest = name, manifest
        self.owner = Owner(folder, folders.highest, Identity(f"host {name}", pid, "1"), clock)
        self.owner._beat = lambda ended: None  # type: ignore[method-assign]  # the trial says when it beats
        self.refused, self.made = "", list[str]()
        self.moves = self._moves()

    def _moves(self) -> Iterator[None]:
        while not self.owner.take():
            yield
        yield
        for tag in ("shared", self.name):
            temporary = folders.begin(self.owner, tag, f"id{self.name}")
            yield
            (temporary / rank_file(0)).write_bytes(self.name.encode())
            yield
            manifest = replace(self.manifest, tag=tag, number=self.owner.claim(), save_id=self.name)
            (temporary / "manifest.json").write_text(manifest.to_json())
            folders.publish(temporary, tag, latest=True)
            self.made.append(tag)
            yield

    def move(self) -> None:
        """The next step, unless it was refused before."""
        try:
            if not self.refused:
                next(self.moves, None)
        except (CheckpointError, OSError) as error:
            self.refused = f"{type(error).__name__}: {error}"

    def beat(self, *, alive: bool) -> None:
        if alive and self.owner.owns:
            with suppress(OwnedError):  # as a thread that ends; the next step tells
                self.owner.claim()


MOVES = 7  # of a job that owns the folder
ORDERS = ["".join("B" if at in chosen else "A" for at in range(2 * MOVES))
          for chosen in itertools.combinations(range(2 * MOVES), MOVES)]  # fmt: skip
_TURN_S, _LAST = 4.0, 12 * "B"


def in_order(folder: Path, order: str, frozen: int) -> str:
    """Two jobs of two hosts move in this order, then B to its end; A makes no beats from its move `frozen` on."""
    shutil.rmtree(folder, ignore_errors=True)
    manifest = Manifest("", "", 1, 1, (), (FileEntry(rank_file(0), 1, "00" * DIGEST_BYTES),))
    now, moved, wrong = [0.0], {"A": 0, "B": 0}, []
    jobs = {name: _Job(folder, name, pid, lambda: now[0], manifest) for name, pid in (("A", 11), ("B", 22))}
    both = [jobs["A"], jobs["B"]]
    for name in order + _LAST:
        owned, made = jobs["B"].owner.owns, jobs["A"].made.copy()
        jobs[name].move()
        moved[name] += 1
        now[0] += _TURN_S
        for job in both:
            job.beat(alive=job.name == "B" or moved["A"] < frozen)
        if owned and made != jobs["A"].made:
            wrong.append("A has saved while B owned the folder")
    done = [job.name for job in both if job.made == ["shared", job.name]]
    alive = frozen > MOVES
    if alive and len(done) + sum(bool(job.refused) for job in both) != 2:
        wrong.append(f"{done} have saved, {[job.refused for job in both]} were refused")
    if not alive and "B" not in done and not (jobs["B"].refused and moved["A"] >= frozen):
        wrong.append("B has neither saved nor been refused")
    for job, by in zip(both, ("process 22 on host B", "process 11 on host A"), strict=True):
        if job.refused and by not in job.refused:
            wrong.append(f"{job.name} is not told by whom: {job.refused}")
    tags = [tag for _, tag in folders.complete_tags(folder)]
    if set(tags) != {tag for job in both for tag in job.made} or (tags and folders.find_tag(folder) not in tags):
        wrong.append(f"{tags} are whole, saved were {[job.made for job in both]}")
    return "; ".join(wrong)


_STRANGER = 65534


def _instead(make: Callable[[Path], object]) -> Callable[[Path, str], None]:
    def plant(folder: Path, name: str) -> None:
        place = folder / name
        if place.is_dir():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        make(place)

    return plant


def _of_stranger(folder: Path, name: str) -> None:
    folder.chmod(0o1777)
    place = folder / name
    if not place.exists():
        place.write_text("{}")
    os.chown(place, _STRANGER, _STRANGER)


PLANTS: dict[str, Callable[[Path, str], None]] = {
    "link to a file": _instead(lambda place: place.symlink_to(place.parent.parent / "victim")),
    "link to a folder": _instead(lambda place: place.symlink_to(place.parent.parent / "victims")),
    "link to nowhere": _instead(lambda place: place.symlink_to("/nowhere/at/all")),
    "link to itself": _instead(lambda place: place.symlink_to(place)),
    "link to endless bytes": _instead(lambda place: place.symlink_to("/dev/zero")),
    "FIFO": _instead(lambda place: os.mkfifo(place)),
    "folder": _instead(lambda place: place.mkdir()),
    "much": _instead(lambda place: place.open("wb").truncate(2**33)),
    "stranger's": _of_stranger,
}
NAMES = ("latest", "new", "new/manifest.json", "new/rank_00000.safetensors", ".owner-9", ".tmp-x", ".old-new", ".old-y")
"""Where something is planted, in a folder with the checkpoints "old" and "new"."""


def planted(scratch: Path, what: str, name: str) -> str:
    """Whether loading and saving go on, or are refused, and nothing outside of the folder is changed."""
    shutil.rmtree(scratch, ignore_errors=True)
    folder = scratch / "run"
    (scratch / "victims").mkdir(parents=True)
    for victim in (scratch / "victim", scratch / "victims" / "victim"):
        victim.write_text("mine")
    saver = Saver(folder, Channel(None, 0, 1), numel=9)
    for step, tag in ((1, "old"), (2, "new")):
        saver.save(step, tag)
    saver.writer.close()
    PLANTS[what](folder, name)
    code = _in_child(partial(_goes_on, folder), limit_s=10)
    for victim in (scratch / "victim", scratch / "victims" / "victim"):
        if not victim.is_file() or victim.read_text() != "mine":
            return "a file outside of the folder was changed"
    return "" if code in (0, 1) else f"the process ended with {code}"


def _goes_on(folder: Path) -> None:
    with suppress(CheckpointError):
        tag = folders.find_tag(folder)
        assert tag in ("new", "old"), tag
        manifest = folders.open_manifest(folder, tag)
        assert manifest.step == (2 if tag == "new" else 1)
        reader = ShardReader(folders.place_of(folder, tag) / rank_file(0), manifest.files[0], manifest.block_bytes,
                             manifest.save_id)  # fmt: skip
        assert bool((reader.read_all("all/master") == manifest.step).all())
    saver = Saver(folder, Channel(None, 0, 1), numel=9)
    with mock.patch.object(folders, "STILL_S", 2.0):  # of an owner that does not say who it is
        saver.save(3, "new")
    assert folders.find_tag(folder) == "new"
    assert folders.open_manifest(folder, "new").step == 3
