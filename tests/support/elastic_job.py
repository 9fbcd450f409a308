"""Jobs that lose ranks and go on: forked ranks, told that whoever started them lets survivors live."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_hydra.host.environment import MEMBERS_FOLDER
from tests.support.ends import ends
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


def run_elastic(folder: Path, num_ranks: int, steps: int, losses: Sequence[Loss], **hydra: Any) -> Result:
    """Train a small elastic job to `steps` steps, while ranks die."""
    import ds_hydra.engine.engine  # noqa: F401  so that forked ranks need not import it
    import tests.support.small_job  # noqa: F401

    folder.mkdir(parents=True, exist_ok=True)
    left = ends(lambda rank, _: _train(rank, folder, steps, losses, hydra), num_ranks, limit_s=90.0)
    written = [folder / f"end{rank}" for rank in range(num_ranks)]
    ended = [json.loads(path.read_text()) for path in written if path.exists()]
    digests, found = [one["digest"] for one in ended], [one["losses"] for one in ended]
    return Result([one.code for one in left], [one.told for one in left], digests, found)


def _train(rank: int, folder: Path, steps: int, losses: Sequence[Loss], hydra: dict) -> None:
    from tests.support.small_job import small_engine

    os.environ[MEMBERS_FOLDER] = str(folder)
    engine = small_engine(rank, **hydra)
    for loss in losses:
        if loss.member == rank:
            _arm(engine, loss)
    found = []
    while engine.global_steps < steps:
        found.append(float(engine.train_batch()))
    engine.wait_for_checkpoint()
    record = {"digest": digest(engine), "losses": found}
    (folder / f"end{rank}").write_text(json.dumps(record))
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
