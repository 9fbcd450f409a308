"""What the planner is measured on: cost tables, lengths, batches, and strategies proposed for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.data.lengths import WEB_PAGES, read_lengths, sample_batches
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner import Planner, PlannerOptions, StepPlan
from ds_hydra.planner.proposal.propose import QUICK, THOROUGH, Wider, propose_strategies, wider_shapes
from tools import machine

Strategies = tuple[StrategyShape, ...]
TABLES = Path(__file__).resolve().parents[1] / "examples" / "cost_tables"
CONTEXT = 32768
DATA = {
    "CommonCrawl-like": WEB_PAGES,
    "Wikipedia": str(TABLES / "wikipedia_lengths.txt"),
    "pretraining": str(TABLES / "pretraining_length_histogram.csv"),
}


@dataclass
class Figures:
    """What was measured: rows of the table, and the aims that were missed."""

    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def note(self, what: str, value: str, aim: str, met: bool) -> None:
        self.rows.append((what, value, aim, "yes" if met else "NO"))
        if not met:
            self.missed.append(f"{what}: {value} (aim {aim})")
        print(f"  {what}: {value} (aim {aim})", flush=True)

    def limited(self, what: str, value: float, aim: float) -> None:
        """A time of CPU, in seconds or milliseconds, against its aim on this machine."""
        most = machine.limit(aim)
        self.note(what, f"{value:.3g}", f"<= {most}", value <= most.here)


@dataclass(frozen=True)
class Workload:
    """One cost table, one kind of data, one size."""

    model: str
    data: str
    num_gpus: int
    table: CostTable

    @classmethod
    def of(cls, model: str, data: str, num_gpus: int) -> Workload:
        return cls(model, data, num_gpus, CostTable.load(TABLES / f"llama_{model}_a800.json"))

    @property
    def tokens(self) -> int:
        return 3125 * self.num_gpus

    def sample(self, seed: int) -> list[int]:
        return [int(x) for x in read_lengths(DATA[self.data], CONTEXT, 60_000, seed).lengths]

    def batches(self, count: int, seed: int = 77) -> list[np.ndarray]:
        """Batches that no proposal has seen."""
        return sample_batches(self.sample(seed), self.tokens, count, seed, CONTEXT)

    def propose(self, thorough: bool, *, wider: bool = False) -> tuple[Strategies, float]:
        """Our strategies from another sample of the data, 20 of whole sequences and as many chunked ones if `wider`,
        and the CPU seconds that took."""
        sample, started = self.sample(1), time.thread_time()
        effort, more = THOROUGH if thorough else QUICK, Wider(wider_shapes(self.table)) if wider else None
        found = propose_strategies(
            self.table, self.num_gpus, sample, self.tokens, CONTEXT, tp_across_nodes=True, effort=effort, wider=more
        )
        return found, time.thread_time() - started

    def planner(self, strategies: Strategies, **options: Any) -> Planner:
        """A planner that reads its own CPU time."""
        return Planner(self.table, strategies, PlannerOptions(kernels="compiled", **options), cpu_s=time.thread_time)

    def plan(self, strategies: Strategies, batches: list[np.ndarray]) -> Iterator[tuple[StepPlan, float]]:
        """Plans of the batches, each with its CPU ms."""
        planner = self.planner(strategies)
        for step, batch in enumerate(batches):
            lengths = batch.tolist()
            started = time.thread_time()
            plan = planner.plan(step, range(len(lengths)), lengths)
            yield plan, (time.thread_time() - started) * 1e3

    def __str__(self) -> str:
        return f"{self.model} {self.data} {self.num_gpus}"
