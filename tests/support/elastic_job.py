"""Jobs that lose ranks and go on: forked ranks, whose membership is files in a folder, not an agent's sockets."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from ds_hydra.elastic.view import Member, Report, View
from ds_hydra.watchdog.host import host
from tests.support.ends import ends
from tests.support.fault_job import digest, entry_of

_TURN_S = 0.02


class FileAgent:
    """An `Agent` that knows of a fault by a file that the dying rank has written, and meets the others in a folder."""

    def __init__(self, folder: Path, rank: int, num_ranks: int):
        self.folder, self.id = folder, rank
        (folder / f"pid{rank}").write_text(str(os.getpid()))
        pids = [_text(folder / f"pid{other}") for other in range(num_ranks)]
        members = tuple(Member(i, host(), ("", 0), int(pid)) for i, pid in enumerate(pids))
        self._view = View(0, members, (), ("", 0), {})
        self._callbacks: list[Callable[[], None]] = []
        self._told = -1  # epoch of the last fault that was told
        self._store: Any = None
        self._closed = threading.Event()
        threading.Thread(target=self._live, daemon=True, name="file-agent").start()

    @property
    def view(self) -> View:
        return self._view

    @property
    def wanted(self) -> bool:
        return False

    def _living(self) -> list[Member]:
        return [one for one in self._view.members if not (self.folder / f"dead{one.id}").exists()]

    def _live(self) -> None:
        while not self._closed.wait(_TURN_S):
            if len(self._living()) < len(self._view.members) and self._told < self._view.epoch:
                self._told = self._view.epoch
                for callback in self._callbacks:
                    callback()

    def fault(self, within: float) -> bool:
        deadline = time.monotonic() + within
        while self._told < self._view.epoch and time.monotonic() < deadline:
            time.sleep(_TURN_S)
        return self._told == self._view.epoch

    def park(self, report: Report) -> View:
        epoch = self._view.epoch + 1
        alone = replace(self._view, members=(), reports={self.id: report})
        _write(self.folder / f"report{epoch}.{self.id}", json.dumps(alone.to_wire()))
        path = self.folder / f"view{epoch}"
        while not path.exists():
            time.sleep(_TURN_S)
            living = self._living()
            reports = [self.folder / f"report{epoch}.{one.id}" for one in living]
            if living[0].id == self.id and all(one.exists() for one in reports):
                self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                told: dict[int, Report] = {}
                for one in reports:
                    told |= View.from_wire(json.loads(one.read_text())).reports
                store = ("127.0.0.1", self._store.port)
                view = View(epoch, tuple(living), self._view.members, store, told)
                _write(path, json.dumps(view.to_wire()))
        self._view = View.from_wire(json.loads(path.read_text()))
        return self._view

    def rebuilt(self) -> None:
        pass

    def on_abort(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def sockets(self) -> Collection[int]:
        return ()

    def close(self) -> None:
        self._closed.set()


def _text(path: Path) -> str:
    while not path.exists() or not path.read_text():
        time.sleep(_TURN_S)
    return path.read_text()


def _write(path: Path, text: str) -> None:
    """Whole at once."""
    fresh = path.parent / f"{path.name}.{os.getpid()}.new"
    fresh.write_text(text)
    fresh.rename(path)


@dataclass(frozen=True)
class Loss:
    """Rank `member`, by its first number, dies in a phase of the first step from `step` on (counted from 0)."""

    phase: str
    member: int
    step: int
    kind: str = "SIGKILL"


@dataclass
class Result:
    """Exit codes, and what each rank wrote; of those that finished, digests of masters and moments, and losses."""

    codes: list[int | None]
    told: list[str]
    digests: list[str]
    losses: list[list[float]]


def run_elastic(folder: Path, num_ranks: int, steps: int, losses: Sequence[Loss], **hydra: Any) -> Result:
    """Train a small elastic job to `steps` steps, while ranks die."""
    import ds_hydra.engine.engine  # noqa: F401  so that forked ranks need not import it
    import tests.support.small_job  # noqa: F401

    folder.mkdir(parents=True, exist_ok=True)
    left = ends(lambda rank, _: _train(rank, num_ranks, folder, steps, losses, hydra), num_ranks, limit_s=90.0)
    written = [folder / f"end{rank}" for rank in range(num_ranks)]
    ended = [json.loads(path.read_text()) for path in written if path.exists()]
    digests, found = [one["digest"] for one in ended], [one["losses"] for one in ended]
    return Result([one.code for one in left], [one.told for one in left], digests, found)


def _train(rank: int, num_ranks: int, folder: Path, steps: int, losses: Sequence[Loss], hydra: dict) -> None:
    from ds_hydra.engine import epochs
    from tests.support.small_job import small_engine

    agent = FileAgent(folder, rank, num_ranks)
    with mock.patch.object(epochs, "start_agent", return_value=agent):
        engine = small_engine(rank, **hydra)
    for loss in losses:
        if loss.member == rank:
            _arm(engine, loss, folder)
    found = []
    while engine.global_steps < steps:
        found.append(float(engine.train_batch()))
    engine.wait_for_checkpoint()
    record = {"digest": digest(engine), "losses": found}
    (folder / f"end{rank}").write_text(json.dumps(record))
    engine.destroy()


def _arm(engine: Any, loss: Loss, folder: Path) -> None:
    from ds_hydra.engine.copies import Copy
    from ds_hydra.engine.held import Held
    from ds_hydra.step import stepper
    from ds_hydra.step.update import Update

    own: dict[str, tuple[Any, str]] = {
        "buddy": (Copy, "exchange_grads"),
        "update": (Update, "_make"),
        "after the update": (stepper, "gather_stats"),
        "re-sharding": (Held, "cut_anew"),
        "copying": (Copy, "refresh"),
    }
    owner, name = own[loss.phase] if loss.phase in own else entry_of(loss.phase, engine)
    original = getattr(owner, name)

    def dies(*args: Any, **kwargs: Any) -> Any:
        if engine.global_steps >= loss.step:
            (folder / f"dead{loss.member}").touch()
            if loss.kind == "exception":
                raise RuntimeError("a fault that was set off")
            os.kill(os.getpid(), getattr(signal, loss.kind))
        return original(*args, **kwargs)

    setattr(owner, name, dies)


def restarted(rank: int, folder: Path, tag: str, steps: int, strategies: list[str]) -> tuple[str, list[float]]:
    """What a stop and a restart from a checkpoint come to: digest and losses."""
    from tests.support.small_job import small_engine

    engine, losses = small_engine(rank, strategies=strategies), list[float]()
    engine.load_checkpoint(folder, tag)
    while engine.global_steps < steps:
        losses.append(float(engine.train_batch()))
    found = digest(engine), losses
    engine.destroy()
    return found
