"""Clusters that are not uniform: nodes of seven, numbers of ranks that nothing divides, devices of two classes.

  python -m tools.bench_hetero [--quick] [--json FILE] [--only PART ...]

nodes      a 7B model on 7, 15, 31 and 63 ranks of nodes that have lost one, on pretraining lengths up to 16K, 3,125
           tokens a rank: tokens per second and rank by the step simulator over those of the full machine
formula    the planner's time of 1,000 drawn pipelines whose stages differ, against a simulation of every action
published  Hetu v2's twelve clusters: a step of 64 sequences of 4K in s by our plan, proposed for the cluster, and by
           Hetu's own layout; Megatron's and DeepSpeed's over ours; where copies of masters have room
skewed     pretraining lengths up to 16K on four of them, 6,250 tokens a rank: mean step in s, and over it those of the
           best layout of one scheme, of equal shares of tokens for all ranks, and of each class alone
slow       one rank of 16, on an emulated cluster, at 1/1.2 and then at half speed, until it recovers: tokens per second
           and rank before, while nobody knows, and when plans give it less
unequal    40 drawn plans of pipelines whose stages differ, on 8 to 16 ranks: the simulator's time of a step over the
           emulated cluster's
sliced     pretraining lengths up to 8K on three of Hetu's clusters, 3,125 tokens a rank: mean step in s by strategies
           that were proposed without slices and V's, and with

Costs of `nodes` follow from FLOPs (`costs/analytic.py`: 0.15 PFLOP/s a device, 150 GB/s inside a node, 25 GB/s between
two), and MaxLen from the memory model with 80 GB and the activations that Hydraulis published. What the others assume
of H800 and H20 is in `tools/hetero/clusters.py`, and printed. `--quick` takes fewer rows of each. Exits non-zero if an
aim is missed.
"""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

import numpy as np

from ds_hydra.commands.figures import guarded, run_parts, shipped
from ds_hydra.costs.analytic import analytic_cost_table
from ds_hydra.costs.cost_table import TableFile
from ds_hydra.costs.memory import Activations, JobMemory
from ds_hydra.data.lengths import read_lengths, sample_batches
from ds_hydra.data.sampler import TokenBudgetSampler
from ds_hydra.emulate.cluster import emulate_plans
from ds_hydra.engine.costs import within_memory
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.rank_order import crossings
from ds_hydra.plan.schemes import feasible_schemes
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.proposal.propose import propose_strategies
from ds_hydra.simulate.job import SHIPPED, SimulatedJob, llama_plan
from ds_hydra.simulate.links import LinkModel
from ds_hydra.simulate.preview import Messages
from ds_hydra.zero_hetero.nodes import NodeSize
from tools import aims
from tools.hetero import clusters
from tools.hetero.formula import formula
from tools.hetero.published import published
from tools.hetero.skewed import skewed
from tools.hetero.sliced import sliced
from tools.hetero.slow import slow
from tools.hetero.unequal import unequal

CONTEXT, TOKENS_OF_A_RANK, STEPS, COUNT = 16384, 3125, 12, 10
EMULATED_STEPS, EMULATED_LENGTHS, EMULATED_RANKS, TIMEOUT_S = 3, 1000, 31, 1800.0
DEVICE_BYTES = 80e9
DEEPEST = 4
SMALLER: tuple[tuple[int, NodeSize, int], ...] = ((7, 7, 8), (15, (8, 7), 16), (15, (7, 8), 16), (31, (8, 8, 7, 8), 32),
                                                  (63, (*(8,) * 3, 7, *(8,) * 4), 64))  # fmt: skip

QUICK: tuple[tuple[int, NodeSize], ...] = ((7, 7), (15, (8, 7)), (31, (8, 8, 7, 8)))


def cluster(num_ranks: int, node_size: NodeSize) -> SimulatedJob:
    """The 7B model on such nodes, with every scheme of few stages that its memory allows."""
    sizes, kept = SHIPPED["a800-7b"]
    plan, links = llama_plan(sizes), LinkModel(node_size)
    schemes = [
        scheme
        for scheme in feasible_schemes(plan, num_ranks, node_size)
        if scheme.pp <= DEEPEST and scheme.tp & (scheme.tp - 1) == 0 and scheme.sp == 1
    ]
    activations = {(one.tp, 1): Activations(kept[one.tp] * sizes.hidden / one.tp, 0.0, 0.0) for one in schemes}
    memory = JobMemory(plan, num_ranks, activations, param_bytes=2, device_bytes=DEVICE_BYTES, vocab=sizes.vocab,
                       node_size=node_size)  # fmt: skip
    table = within_memory(analytic_cost_table(sizes, schemes, CONTEXT), memory)
    return SimulatedJob(plan, sizes.hidden, TableFile(table), links, num_ranks)


class _Planned(NamedTuple):
    """A cluster with a planner of strategies that were proposed for it, and what it is to plan."""

    job: SimulatedJob
    planner: Planner
    messages: Messages
    sample: list[int]  # lengths
    tokens: int  # of a step
    proposed_s: float  # of CPU


def _proposed(num_ranks: int, node_size: NodeSize) -> _Planned:
    job = cluster(num_ranks, node_size)
    sample = read_lengths(shipped("pretraining"), CONTEXT, count=50_000).lengths.tolist()
    tokens, messages = TOKENS_OF_A_RANK * num_ranks, Messages(job, TOKENS_OF_A_RANK * num_ranks)
    began = time.process_time()
    strategies = propose_strategies(job.table, num_ranks, sample, tokens, CONTEXT, node_size=node_size, count=COUNT,
                                    exposed=messages.exposed_ms)  # fmt: skip
    proposed_s = time.process_time() - began
    assert not any(list(crossings(strategy, node_size)) for strategy in strategies), "no TP group lies on two nodes"
    planner = Planner(job.table, strategies, PlannerOptions(kernels="compiled"),
                      exposed_ms=[messages.exposed_ms(one) for one in strategies])  # fmt: skip
    return _Planned(job, planner, messages, sample, tokens, proposed_s)


def tokens_per_second(num_ranks: int, node_size: NodeSize) -> tuple[float, StrategyShape, float]:
    """Of one rank, in steps of other data than the strategies were chosen for; the strategy that won most of them, and
    the CPU time of the proposal."""
    found = _proposed(num_ranks, node_size)
    rates, won = [], dict.fromkeys(found.planner.strategies, 0)
    for step, batch in enumerate(sample_batches(found.sample, found.tokens, STEPS, 1, CONTEXT)):
        plan = found.planner.plan(step, range(len(batch)), batch.tolist())
        rates.append(plan.num_tokens / found.messages.step_ms(plan) * 1e3 / num_ranks)
        won[plan.phases[0].shape] += 1
    return float(np.mean(rates)), max(won, key=lambda strategy: won[strategy]), found.proposed_s


def emulated_tokens_per_second(num_ranks: int, node_size: NodeSize, num_steps: int) -> float:
    """Of one rank, in the first steps of a job on the emulated cluster."""
    found = _proposed(num_ranks, node_size)
    lengths = found.sample[:EMULATED_LENGTHS]
    sampler = TokenBudgetSampler(lengths, found.tokens)
    plans = [found.planner.plan(step, sampler.batch(step), sampler.batch_lengths(step)) for step in range(num_steps)]
    steps = emulate_plans(found.job, plans, lengths, found.tokens, timeout_s=TIMEOUT_S)
    return sum(step.plan.num_tokens for step in steps) / sum(step.step_s for step in steps) / num_ranks


def emulated(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """The same as `nodes` shows, of few steps, by the emulated cluster."""
    full: dict[int, float] = {}
    rows, num_steps = [], 1 if quick else EMULATED_STEPS
    for num_ranks, node_size, whole in SMALLER:
        if num_ranks > (7 if quick else EMULATED_RANKS):
            continue
        if whole not in full:
            full[whole] = emulated_tokens_per_second(whole, 8, num_steps)
        share = emulated_tokens_per_second(num_ranks, node_size, num_steps) / full[whole]
        aim = aims.ODD_NODES[num_ranks]
        if share < aim:
            missed.append(f"{num_ranks} emulated ranks: {share:.3f} of the full machine's throughput, less than {aim}")
        rows.append({"ranks": num_ranks, "nodes": str(node_size), "of": whole, "share": share, "aim": aim})
    return rows


def nodes(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """Tokens per second and rank on machines that have lost a rank, over the full ones'."""
    full: dict[int, float] = {}
    rows = []
    for num_ranks, node_size, whole in SMALLER:
        if quick and (num_ranks, node_size) not in QUICK:
            continue
        if whole not in full:
            full[whole] = tokens_per_second(whole, 8)[0]
        rate, best, proposed_s = tokens_per_second(num_ranks, node_size)
        share, aim = rate / full[whole], aims.ODD_NODES[num_ranks]
        if share < aim:
            missed.append(f"{num_ranks} ranks: {share:.3f} of the full machine's throughput a rank, less than {aim}")
        on = node_size if isinstance(node_size, int) else "+".join(map(str, node_size))
        rows.append({"ranks": num_ranks, "nodes": str(on), "of": whole, "tokens/s a rank": f"{rate:.0f}",
                     "share": share, "aim": aim, "proposed s": proposed_s, "most often": str(best)})  # fmt: skip
    return rows


def main() -> int:
    """The exit code: 0, or 1 if an aim was missed."""
    print((clusters.__doc__ or "").partition("\n\n")[2])
    parts = {
        "nodes": nodes,
        "emulated": emulated,
        "formula": formula,
        "published": published,
        "skewed": skewed,
        "slow": slow,
        "unequal": unequal,
        "sliced": sliced,
    }
    return run_parts("bench_hetero", __doc__, parts)


if __name__ == "__main__":
    sys.exit(guarded("bench_hetero", main))
