"""Updates on rollouts of reasoning models, simulated on 64 GPUs: ours beside what hosts do, and what planning adds.

Ours are plans as a step gets them whose lengths are known only when it is handed in, with the wait for each: of whole
sequences, since these are planned in some milliseconds, and without HiGHS. Hosts' ways are those of `ds-hydra preview
--rollouts` [Note: hosts' ways], and dynamic context parallelism is that of `tools.bench_systems`, by its own costs and
beside its best form of ours, which may take longer to plan [Note: groups of units].
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from ds_hydra.commands.figures import shipped
from ds_hydra.config.hydra_block import HydraConfig, PlannerConfig
from ds_hydra.costs.cost_table import read_table_file, told
from ds_hydra.data.lengths import read_lengths, sample_batches
from ds_hydra.engine.plans import PlanSource
from ds_hydra.planner import PlannerOptions, PlanRecipe
from ds_hydra.planner.proposal.propose import propose_strategies
from ds_hydra.rivals.preview import Messages
from ds_hydra.simulate.hosts import EQUAL_COUNTS, EQUAL_TOKENS, SHARED, hosts_ways
from ds_hydra.simulate.job import shipped_cluster
from ds_hydra.simulate.links import LinkModel
from ds_hydra.watchdog import Activity
from tools.check_swap import Overheard
from tools.systems.cells import Cell
from tools.systems.measure import OURS, measure

GPUS, NODE, CONTEXT, TOKENS, UNMEASURED = 64, 8, 32_768, 800_000, 2  # the first plans wait for the producer's start


class Update(NamedTuple):
    """Mean times of the same updates of one model, over ours."""

    model: str
    sequences: float
    ours_ms: float  # with the wait for its plan
    exposed: float  # the share that this wait has
    counts: float
    tokens: float
    bound: float  # of dynamic context parallelism, whose messages take no time
    dynamic: float | None  # dynamic context parallelism as bench_systems has it, if that was asked for


def updates(model: str, steps: int, *, systems: bool) -> Update:
    """Simulate some updates; with `systems` dynamic context parallelism, too, which takes half a minute."""
    found = told(read_table_file(shipped(f"a800-{model}")))
    cluster = shipped_cluster(f"a800-{model}", found, LinkModel(NODE), GPUS)
    messages = Messages(cluster, TOKENS)
    lengths = read_lengths(shipped("rollouts"), CONTEXT).lengths.tolist()
    strategies = propose_strategies(
        found.table, GPUS, lengths, TOKENS, CONTEXT, node_size=NODE, tp_across_nodes=True, exposed=messages.exposed_ms
    )
    options = PlannerOptions(highs="off", no_slices="whole sequences are planned at once", layers=0)
    batches = [batch.tolist() for batch in sample_batches(lengths, TOKENS, steps + UNMEASURED, 1, CONTEXT)]
    exposed = tuple(map(messages.exposed_ms, strategies))
    source = PlanSource(
        PlanRecipe(found.table, strategies, options, exposed),
        HydraConfig(TOKENS, planner=PlannerConfig(ahead=2)),
        None,
        Overheard(0, []),
        Activity(),
    )
    waited, taken = [], []
    for step, batch in enumerate(batches):
        began = time.perf_counter()
        plan = source.given(step, tuple(batch)).plan
        waited.append(1e3 * (time.perf_counter() - began))
        taken.append(messages.ms(plan, found.table))
    source.close()
    del waited[:UNMEASURED], taken[:UNMEASURED], batches[:UNMEASURED]
    ours = float(np.mean(taken) + np.median(waited))
    ways = hosts_ways(found.table, GPUS, batches, CONTEXT, options, messages.ms)
    counts, tokens, bound = (float(ways[name].step_ms.mean()) / ours for name in (EQUAL_COUNTS, EQUAL_TOKENS, SHARED))
    dynamic = None
    if systems:
        cell = Cell(model, GPUS, CONTEXT, TOKENS, "rollouts")
        of = {name: measure(cell, steps, name)[name].mean_ms for name in (OURS, "ideal dynamic CP")}
        dynamic = of["ideal dynamic CP"] / of[OURS]
    return Update(
        model, float(np.mean(list(map(len, batches)))), ours, float(np.median(waited)) / ours,
        counts, tokens, bound, dynamic,
    )  # fmt: skip
