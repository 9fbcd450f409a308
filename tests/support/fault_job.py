"""Jobs that are made to fail: ranks forked, a fault set off in one of them, the end of all of them timed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.ends import live, mark_fault

FAULTS = ("SIGKILL", "SIGSTOP", "SIGTERM", "exception", "exit", "failed collective")
PHASES = ("planning", "pull", "forward", "backward", "push", "optimizer", "saving")


@dataclass(frozen=True)
class Fault:
    """What goes wrong, in which phase of which rank, from which step (counted from 0) on."""

    kind: str
    phase: str
    rank: int
    step: int


@dataclass
class Outcome:
    """How a job's ranks ended. `codes`: exit codes, negative signals; None for a rank that had to be killed."""

    codes: list[int | None]
    end_s: float  # from the fault, or else from the start, until the last rank had ended
    fired: bool
    digests: list[str]  # of each rank's masters and moments, of ranks that finished
    errors: str  # what the ranks wrote to stderr
    orphans: list[int] = field(default_factory=list)


def run_job(
    folder: Path,
    num_ranks: int,
    steps: int,
    *,
    fault: Fault | None = None,
    limit_s: float = 60.0,
    every: int = 1,
    during: Callable[[Sequence[int]], None] | None = None,
    **hydra: Any,
) -> Outcome:
    """Train a small job to `steps` steps with checkpoints in `folder`, resuming from what is there.

    `during` is called once with the ranks' process ids when all of them train.
    """
    import ds_hydra.engine.engine  # noqa: F401  so that forked ranks need not import it
    import tests.support.small_job  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="job-") as scratch:
        place = Path(scratch)
        sys.stdout.flush()
        sys.stderr.flush()
        began = time.time()
        pids = []
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                train = partial(_train, rank, folder, place, steps, fault, every, hydra)
                live(train, rank, num_ranks, place)
            pids.append(pid)
        codes = _wait(pids, place, began + limit_s, during)
        ended = time.time()
        at = place / "fault"
        fired = at.exists()
        since = float(at.read_text()) if fired else began
        finished = [path for rank in range(num_ranks) if (path := place / f"digest{rank}").exists()]
        errors = "".join((place / f"stderr{rank}").read_text() for rank in range(num_ranks))
        digests = [path.read_text() for path in finished]
        return Outcome(codes, ended - since, fired, digests, errors, _orphans(pids))


def _wait(
    pids: Sequence[int], place: Path, deadline: float, during: Callable[[Sequence[int]], None] | None
) -> list[int | None]:
    codes: dict[int, int | None] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if during is not None and all((place / f"ready{rank}").exists() for rank in range(len(pids))):
            during(pids)
            during = None
        if time.time() > deadline:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[pid] = None
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def _orphans(groups: Sequence[int]) -> list[int]:
    """Process groups of ranks in which something still lives after three seconds."""
    deadline = time.monotonic() + 3.0
    left = list(groups)
    while left and time.monotonic() < deadline:
        for group in list(left):
            try:
                os.killpg(group, 0)
            except OSError:
                left.remove(group)
        time.sleep(0.02 if left else 0)
    for group in left:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    return left


def _train(rank: int, folder: Path, place: Path, steps: int, fault: Fault | None, every: int, hydra: dict) -> None:
    from tests.support.small_job import small_engine

    hydra = {"faults": {"frozen_seconds": 9.0}, "timeout_seconds": 30, **hydra}
    engine = small_engine(rank, checkpoint={"dir": str(folder), "every": every, "keep_last": 3}, **hydra)
    if fault is not None and fault.rank == rank:
        _arm(engine, fault, place)
    (place / f"ready{rank}").touch()
    while engine.global_steps < steps:
        engine.train_batch()
    engine.wait_for_checkpoint()
    (place / f"digest{rank}").write_text(digest(engine))
    engine.destroy()


def digest(engine: Any) -> str:
    """Of this rank's masters and moments."""
    masters = engine.crew.masters.trained
    parts = [masters.flat]
    for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        parts += masters.optimizer_state(engine.optimizer, key)
    return hashlib.sha256(b"".join(part.cpu().numpy().tobytes() for part in parts)).hexdigest()


def entry_of(phase: str, engine: Any) -> tuple[Any, str]:
    """The class or module, and the name of its function, by whose call a rank enters a phase."""
    from ds_hydra.checkpoint import write
    from ds_hydra.pipe.runtime import StageRuntime
    from ds_hydra.step.update import Update
    from ds_hydra.zero_hetero.pushes import Pulls, Pushes

    owners: dict[str, tuple[Any, str]] = {
        "planning": (type(engine.crew.plans), "next"),
        "pull": (Pulls, "start"),
        "forward": (StageRuntime, "_forward"),
        "backward": (StageRuntime, "_backward"),
        "push": (Pushes, "finish"),
        "optimizer": (Update, "apply"),
        "saving": (write, "write_shard"),
    }
    return owners[phase]


def _arm(engine: Any, fault: Fault, place: Path) -> None:
    """Set the fault off on entry to its phase, once, in the step it is meant for or the next one to reach it."""

    owner, name = entry_of(fault.phase, engine)
    original = getattr(owner, name)
    begun = engine.global_steps

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if engine.global_steps >= fault.step + (fault.phase == "saving") and not (place / "fault").exists():
            assert engine.global_steps >= begun
            mark_fault(place)
            if fault.phase == "saving":
                original(*args, **kwargs)
            _set_off(fault.kind, engine)
        return original(*args, **kwargs)

    setattr(owner, name, faulty)


def _set_off(kind: str, engine: Any) -> None:
    if kind.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, kind))
    elif kind == "exception":
        raise RuntimeError("a fault that was set off")
    elif kind == "exit":
        os._exit(3)
    elif kind == "failed collective":
        _cut_connections(engine)
    else:
        raise ValueError(f"no fault {kind!r}")


def _cut_connections(engine: Any) -> None:
    """Shut down every TCP connection of this process but the heartbeat's: collectives fail here and at the peers."""
    kept = {p.connection.socket.fileno() for p in engine.crew.watchdog.peers.values() if p.connection is not None}
    for name in os.listdir("/proc/self/fd"):
        handle = int(name)
        with contextlib.suppress(OSError):
            if handle not in kept and stat.S_ISSOCK(os.fstat(handle).st_mode):
                with socket.socket(fileno=os.dup(handle)) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.getpeername()
                        connection.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":  # for trying one: python -m tests.fault_job SIGSTOP forward 1
    wanted = Fault(sys.argv[1], sys.argv[2], int(sys.argv[3]), 2)
    with tempfile.TemporaryDirectory() as scratch:
        outcome = run_job(Path(scratch), 4, 5, fault=wanted)
        print(outcome.errors[-3000:])
        print(json.dumps({k: v for k, v in vars(outcome).items() if k != "errors"}))
        again = run_job(Path(scratch), 4, 5)
        print(again.errors[-1500:])
        print(json.dumps({k: v for k, v in vars(again).items() if k != "errors"}))
