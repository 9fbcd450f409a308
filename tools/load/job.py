"""A small job with proposed strategies and slices, whose planner's process may be hurt: its plans and its bits.

python -m tools.load.job '{"folder": "/tmp/job", "ahead": 2}'    # prints them as JSON, from processes of its own
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.testing import run_ranks
from tests.support.planner_cases import num_slices

NUM_RANKS = 3
HURT_AFTER = 3  # steps
FROZEN_S = 2.5  # between stops of 1 s and of 6 s: the first are waited for, the others are not


@dataclass(frozen=True)
class Settings:
    """One run: until `steps` were made, from the checkpoint in `folder` if there is one, saving there every `every`."""

    folder: str
    steps: int = 8
    ahead: int = 2
    hurt: str = ""  # a key of HURTS
    every: int = 0


def _stopped(seconds: float | None) -> Callable[[Any], None]:
    def stop(service: Any) -> None:
        pid = service.producer_pid
        os.kill(pid, signal.SIGSTOP)
        if seconds is not None:
            threading.Timer(seconds, _goes_on, (pid,)).start()

    return stop


def _goes_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has been replaced
        os.kill(pid, signal.SIGCONT)


def _rotten(service: Any) -> None:
    service._producer._take = lambda line: json.loads(line[: len(line) // 2])


def _cannot_live(service: Any) -> None:
    service._command = (sys.executable, "-c", "raise SystemExit('no process can live here')")
    os.kill(service.producer_pid, signal.SIGKILL)


HURTS: dict[str, Callable[[Any], None]] = {
    "killed": lambda service: os.kill(service.producer_pid, signal.SIGKILL),
    "stopped for 1 s": _stopped(1.0),
    "stopped for 6 s": _stopped(6.0),
    "stopped for ever": _stopped(None),
    "talks nonsense": _rotten,
    "cannot live": _cannot_live,
}


def run(settings: Settings) -> dict[str, Any]:
    """Plans, masters and moments of a run, as digests; slices in its plans; who made them, and what was waited."""
    found = run_ranks(_job, NUM_RANKS, settings, timeout=600)
    assert all(one["plans"] == found[0]["plans"] for one in found)
    return found[0] | {"bits": hashlib.sha256("".join(one["bits"] for one in found).encode()).hexdigest()[:16]}


def _job(rank: int, settings: Settings) -> dict[str, Any]:
    from ds_hydra.plan.step_plan import StepPlan
    from tests.support.small_job import small_config, small_engine, whole_state

    folder = Path(settings.folder)
    config = small_config(
        2, strategies="auto", choose="best", cost_table=str(_table(folder, rank)), seed=4, loss_norm="token",
        planner={"ahead": settings.ahead}, faults={"frozen_seconds": FROZEN_S},
        checkpoint={"dir": str(folder / "saved"), "every": settings.every}, node_size=NUM_RANKS,
    )  # fmt: skip
    engine = small_engine(rank, config=config)
    found: dict[str, Any] = {"plans": [], "makers": [], "recipes": [], "waited_ms": 0.0, "slices": 0}
    while engine.global_steps < settings.steps:
        engine.train_batch()
        record, service = engine.last_step, getattr(engine.pre_step_callback, "service", None)
        found["plans"].append(record.plan_digest)
        found["makers"].append(record.planning_by)
        found["recipes"].append(record.planning_recipe)
        found["waited_ms"] = max(found["waited_ms"], record.planning_waited_ms)
        found["slices"] += num_slices(StepPlan.from_json(record.plan))
        if settings.hurt and engine.global_steps == HURT_AFTER and service is not None:
            HURTS[settings.hurt](service)
    state = whole_state(engine)
    engine.destroy()
    bits = hashlib.sha256()
    for name in sorted(state):
        bits.update(state[name].numpy().tobytes())
    return found | {"bits": bits.hexdigest()}


def _table(folder: Path, rank: int) -> Path:
    """Costs that grow fast with length, with shares, so that long sequences are worth to be cut."""
    file = folder / f"table_{rank}.json"
    costs = (
        SchemeCost(ParallelScheme(pp=pp), 2e-3 / pp, 0.2 / pp, 1.0 / pp, 200, 8, Shares.usual()) for pp in (1, 2, 3)
    )
    TableFile(CostTable(tuple(costs), "made up")).save(file)
    return file


def share_before_forking() -> None:
    """Import, trace and compile what every rank would for itself."""
    import ds_hydra.engine.engine  # noqa: F401
    from ds_hydra.planner.selection import warm_up
    from tests.support.small_job import small_source

    small_source()
    warm_up()


if __name__ == "__main__":
    given = Settings(**json.loads(sys.argv[1]))
    Path(given.folder).mkdir(parents=True, exist_ok=True)
    import ds_hydra.engine.engine  # noqa: F401  (before forking: the ranks share it)

    print(json.dumps(run(given) | {"settings": asdict(given)}))
