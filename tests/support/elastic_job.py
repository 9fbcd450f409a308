"""Jobs that lose ranks and go on: forked ranks, told that whoever started them lets survivors live."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ds_hydra.host.environment import JOINS, MEMBERS_FOLDER
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.ends import End, ends, live
from tests.support.fault_job import digest, entry_of


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


def run_elastic(
    folder: Path, num_ranks: int, steps: int, losses: Sequence[Loss], *, joins_in: int | None = None, **hydra: Any
) -> Result:
    """Train a small elastic job to `steps` steps, while ranks die.

    With `joins_in` a process joins at the end of that step (counted from 0), and a process with another model is
    refused before; both stand behind the ranks in what is returned.
    """
    import ds_hydra.engine.engine  # noqa: F401  so that forked ranks need not import it
    import tests.support.small_job  # noqa: F401

    folder.mkdir(parents=True, exist_ok=True)
    others = [
        _forked(partial(_join, folder, steps, hidden, hydra), folder / f"apart{hidden}")
        for hidden in ((32, 64) if joins_in is not None else ())
    ]
    left = ends(lambda rank, _: _train(rank, folder, steps, losses, hydra, joins_in), num_ranks, limit_s=90.0)
    for pid, place in others:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        left.append(End(code, 0.0, (place / "stderr0").read_text()))
    written = [folder / f"end{rank}" for rank in range(num_ranks + len(others))]
    ended = [json.loads(path.read_text()) for path in written if path.exists()]
    digests, found = [one["digest"] for one in ended], [one["losses"] for one in ended]
    return Result([one.code for one in left], [one.told for one in left], digests, found)


def _forked(program: Callable[[], None], place: Path) -> tuple[int, Path]:
    """A process that is a job of one rank; its id, and the folder in which it writes."""
    place.mkdir()
    pid = os.fork()
    if pid == 0:
        live(program, 0, 1, place)
    return pid, place


def _join(folder: Path, steps: int, hidden: int, hydra: dict) -> None:
    """The life of a process that joins, with the job's model or another one."""
    from tests.support.small_job import small_engine, small_model

    os.environ |= {MEMBERS_FOLDER: str(folder), JOINS: "1"}
    while not (folder / "invitation.json").exists():
        time.sleep(0.02)
    if hidden == 32:
        while not (folder / "refused").exists():
            time.sleep(0.02)
    try:
        engine = small_engine(0, None if hidden == 32 else small_model(hidden=hidden), **hydra)
    except ConfigError:
        (folder / "refused").touch()
        raise
    _to_the_end(engine, folder, steps, engine.global_rank)


def _train(
    rank: int, folder: Path, steps: int, losses: Sequence[Loss], hydra: dict, joins_in: int | None = None
) -> None:
    from tests.support.small_job import small_engine

    os.environ[MEMBERS_FOLDER] = str(folder)
    engine = small_engine(rank, **hydra)
    for loss in losses:
        if loss.member == rank:
            _arm(engine, loss)
    _to_the_end(engine, folder, steps, rank, joins_in)


def _to_the_end(engine: Any, folder: Path, steps: int, name: int, joins_in: int | None = None) -> None:
    found = []
    while engine.global_steps < steps:
        while name == 0 and engine.global_steps == joins_in and not engine.going_on.agent.wanted:
            time.sleep(0.02)  # all others wait for this rank within the step
        found.append(float(engine.train_batch()))
    engine.wait_for_checkpoint()
    record = {"digest": digest(engine), "losses": found}
    (folder / f"end{name}").write_text(json.dumps(record))
    engine.destroy()


def _arm(engine: Any, loss: Loss) -> None:
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
