"""A small job with proposed strategies and slices, whose planner's process may be killed: its plans and its bits.

python -m tests.support.busy_job '{"folder": "/tmp/job", "ahead": 2}'  # prints them as JSON
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.testing import run_ranks
from tests.support.planner_cases import num_slices
from tools.machine import busy

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 3
HURT_AFTER = 3  # steps


@dataclass(frozen=True)
class Settings:
    """One run: until `steps` were made, from the checkpoint in `folder` if there is one, saving there every `every`."""

    folder: str
    steps: int = 8
    ahead: int = 2
    hurt: bool = False  # whether the planner's process is killed
    every: int = 0


def run(settings: Settings) -> dict[str, Any]:
    """Plans, masters and moments of a run, as digests; slices in its plans; who made them."""
    found = run_ranks(_job, NUM_RANKS, settings, timeout=600)
    assert all(one["plans"] == found[0]["plans"] for one in found)
    return found[0] | {"bits": hashlib.sha256("".join(one["bits"] for one in found).encode()).hexdigest()[:16]}


@dataclass(frozen=True)
class Case:
    """A run: what differs from the undisturbed one in its settings, its environment, and in what runs beside it."""

    kind: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    beside: int = 0
    environment: Mapping[str, str] | None = None  # of a process of its own; {folder} is the run's
    restarted: bool = False

    def run(self, folder: str) -> dict[str, Any]:
        """What was found, in a folder for the run."""
        settings = Settings(folder, **self.changes)
        if self.environment is not None:
            more = {key: value.format(folder=folder) for key, value in self.environment.items()}
            command = [sys.executable, "-m", "tests.support.busy_job", json.dumps(asdict(settings))]
            text = subprocess.run(
                command, cwd=ROOT, env={**os.environ, **more}, check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            return json.loads(text.splitlines()[-1])  # type: ignore[no-any-return]
        with busy(self.beside):
            if not self.restarted:
                return run(settings)
            first = run(replace(settings, steps=3, every=3))
            second = run(replace(settings, ahead=1))
        return second | {key: first[key] + second[key] for key in ("plans", "makers", "recipes", "slices")}

    @property
    def replaces(self) -> bool:
        """Whether plans have to come from elsewhere than from the first producer."""
        return self.changes.get("ahead") == 0 or "hurt" in self.changes


def _job(rank: int, settings: Settings) -> dict[str, Any]:
    from ds_hydra.plan.step_plan import StepPlan
    from tests.support.small_job import small_config, small_engine, whole_state

    folder = Path(settings.folder)
    config = small_config(
        2, strategies="auto", choose="best", cost_table=str(_table(folder, rank)), seed=4, loss_norm="token",
        planner={"ahead": settings.ahead}, faults={"frozen_seconds": 2.5},
        checkpoint={"dir": str(folder / "saved"), "every": settings.every}, node_size=NUM_RANKS,
    )  # fmt: skip
    engine = small_engine(rank, config=config)
    found: dict[str, Any] = {"plans": [], "makers": [], "recipes": [], "slices": 0}
    while engine.global_steps < settings.steps:
        engine.train_batch()
        record, service = engine.last_step, getattr(engine.pre_step_callback, "service", None)
        found["plans"].append(record.plan_digest)
        found["makers"].append(record.planning_by)
        found["recipes"].append(record.planning_recipe)
        found["slices"] += num_slices(StepPlan.from_json(record.plan))
        if settings.hurt and engine.global_steps == HURT_AFTER and service is not None:
            os.kill(service.producer_pid, signal.SIGKILL)
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


if __name__ == "__main__":
    given = Settings(**json.loads(sys.argv[1]))
    Path(given.folder).mkdir(parents=True, exist_ok=True)
    import ds_hydra.engine.engine  # noqa: F401  (before forking: the ranks share it)

    print(json.dumps(run(given) | {"settings": asdict(given)}))
