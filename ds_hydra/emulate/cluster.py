"""Runs the first steps of a job on an emulated cluster, and says what the engine did in each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ds_hydra.config.hydra_block import ParsedConfig, parse_config
from ds_hydra.costs.cost_table import CostTable, TableFile
from ds_hydra.costs.memory import push_turns
from ds_hydra.costs.shape_costs import used_schemes
from ds_hydra.emulate.clock import check_ranks, machine_limits
from ds_hydra.emulate.engine import EmulatedEngine, EmulatedModel, counted_norm
from ds_hydra.host.launch import init_distributed
from ds_hydra.pipe.model_plan import plan_transfers
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.plan.step_plan import StepPlan, save_plans
from ds_hydra.ranks.forked import rank_environment, run_ranks
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.nodes import Cluster, node_size_of

_ROUNDING = 1e-4  # of FP32 sums

Look = Callable[[EmulatedEngine], Any]


@dataclass(frozen=True)
class EmulatedJob:
    """A job as it is simulated, and what makes plans of its steps, as in the block "hydra". With ranks that are slow,
    plans follow what is found out about them."""

    cluster: SimulatedJob
    strategies: tuple[str, ...]
    lengths: tuple[int, ...]  # of all sequences of the data
    tokens_per_step: int
    choose: str = "best"
    replay: str | None = None
    seed: int = 0
    slow: tuple[tuple[int, int, float], ...] = ()  # from a step on, counted from 0, a rank takes so many times as long

    def check(self) -> None:
        """Raise ConfigError or PlanError for what no cluster could run, before one is made."""
        cluster = self.cluster
        check_ranks(cluster.num_ranks, machine_limits())
        shapes = [StrategyShape.parse(text) for text in self.strategies]
        if not shapes:
            raise ConfigError("an emulated cluster needs strategies: name at least one")
        for shape in shapes:
            cluster.plan.check(place_strategy(shape, cluster.num_ranks, cluster.plan.num_layers))
        missing = sorted(set(used_schemes(shapes)) - set(cluster.table.schemes))
        if missing:
            raise ConfigError(
                f"the cost table has no entry for {', '.join(map(str, missing))}, which the strategies use; it has "
                f"{', '.join(map(str, cluster.table.schemes))}. Measure them, or leave them out"
            )


class EmulatedStep(NamedTuple):
    """One step as it went: virtual seconds, and the two numbers of [Note: counted gradients]."""

    plan_json: str  # a tenth of the parsed plan's memory: a rank keeps all of its steps
    begin_s: float
    ended_s: tuple[float, ...]  # by rank
    loss: float
    grad_norm: float
    counted_norm: float  # what the norm must be
    seen: Any  # what `look` returned

    @property
    def plan(self) -> StepPlan:
        """What the step was to do."""
        return StepPlan.from_json(self.plan_json)

    @property
    def step_s(self) -> float:
        """Seconds until the last rank has updated its masters."""
        return max(self.ended_s) - self.begin_s

    @property
    def fault(self) -> str:
        """What is wrong with the loss or the gradient; empty when nothing is."""
        for what, value, counted in (("loss", self.loss, 1.0), ("norm", self.grad_norm, self.counted_norm)):
            if abs(value - counted) > _ROUNDING * counted:
                return f"the {what} is {value!r} but every token counted once gives {counted!r}"
        return ""


def emulate(
    job: EmulatedJob, steps: int, *, look: Look | None = None, timeout_s: float = 600.0
) -> list[list[EmulatedStep]]:
    """Run the first `steps` steps of a job, by rank; `look` is called on every rank after each of them.

    Raises ConfigError or PlanError for what the engine refuses, and for more ranks than can be forked; TimeoutError
    when the ranks together take longer than `timeout_s` seconds of real time, as they do when they wait in a circle.
    """
    job.check()
    # What ranks have in common is made and imported before they fork, and shared by all of them. The first optimizer of
    # a process imports for seconds.
    torch.optim.SGD([torch.zeros(1)])
    model, links = EmulatedModel(job.cluster), job.cluster.links
    for text in job.strategies:
        strategy = place_strategy(StrategyShape.parse(text), job.cluster.num_ranks, job.cluster.plan.num_layers)
        plan_transfers(model.small.plan, strategy, node_size_of(job.cluster.num_ranks, links.node_size))
        push_turns(job.cluster.plan, strategy, job.cluster.elements, node_size=links.node_size)
    with tempfile.TemporaryDirectory(prefix="emulated-") as folder:
        table = Path(folder) / "costs.json"
        # Without its evidence, which names another job than the small model's, and without what follows from the rest.
        costs = tuple(cost for cost in job.cluster.table.costs if isinstance(cost.scheme, ParallelScheme))
        TableFile(CostTable(costs)).save(table)
        parsed = parse_config(_config(job, str(table), timeout_s))
        assert parsed is not None, "the config has the block"
        try:
            return run_ranks(_rank, job.cluster.num_ranks, parsed, model, job, steps, look, timeout=timeout_s)
        except (BlockingIOError, MemoryError) as error:
            raise ConfigError(
                f"an emulated cluster of {job.cluster.num_ranks} ranks cannot be forked here ({error}): emulate fewer"
            ) from error


def emulate_plans(
    cluster: SimulatedJob, plans: Sequence[StepPlan], lengths: Sequence[int], tokens: int, *, timeout_s: float
) -> list[EmulatedStep]:
    """Plans of the first steps on the emulated cluster, for data of these lengths. AssertionError for a fault."""
    strategies = tuple(dict.fromkeys(str(phase.shape) for plan in plans for phase in plan.phases))
    with tempfile.TemporaryDirectory(prefix="plans-") as folder:
        save_plans(plans, path := Path(folder) / "plans.jsonl")
        job = EmulatedJob(cluster, strategies, tuple(lengths), tokens, replay=str(path))
        steps = emulate(job, len(plans), timeout_s=timeout_s)[0]
    faults = [step.fault for step in steps if step.fault]
    assert not faults, faults[0]
    return steps


def _config(job: EmulatedJob, table: str, timeout_s: float) -> dict[str, Any]:
    sizes = Cluster.of(job.cluster.num_ranks, job.cluster.links.node_size).sizes
    return {
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "gradient_clipping": 0.0,
        "hydra": {
            "strategies": list(job.strategies),
            "cost_table": table,
            "tokens_per_step": job.tokens_per_step,
            "choose": job.choose,
            "seed": job.seed,
            "cluster": [{"ranks": size} for size in sizes],
            "planner": {"ahead": 0},
            "replay": job.replay,
            "self_check": "off",  # there is no model that computes
            # Times of the record are virtual, but for the overhead of a step, from which no plan follows.
            "cost_correction": "apply" if job.slow else "off",
            "faults": {"frozen_seconds": 0},
            "timeout_seconds": timeout_s,
            "steps_file": None,
        },
    }


class _Sequences:
    """A dataset of sequences whose lengths are all that matters."""

    def __init__(self, lengths: Sequence[int]):
        self.lengths = np.asarray(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return np.zeros(self.lengths[index], dtype=np.int64)


def _rank(
    rank: int, parsed: ParsedConfig, model: EmulatedModel, job: EmulatedJob, steps: int, look: Look | None
) -> list[EmulatedStep]:
    rank_environment(rank)
    init_distributed(parsed.hydra, port=int(os.environ["MASTER_PORT"]))
    engine = EmulatedEngine(parsed, model, training_data=_Sequences(job.lengths))
    counted, done = counted_norm(model.small.plan), []
    for step in range(steps):
        engine.pace = next((pace for first, who, pace in reversed(job.slow) if who == rank and first <= step), 1.0)
        begin_s = engine.clock.now()
        loss = float(engine.train_batch())
        record = engine.last_step
        assert record is not None, "a step has been made"
        norm = record.grad_norm
        assert norm is not None, "every step has a gradient"
        seen = look(engine) if look else None
        done.append(EmulatedStep(record.plan, begin_s, tuple(engine.ended_s), loss, norm, counted, seen))
    engine.destroy()
    return done
