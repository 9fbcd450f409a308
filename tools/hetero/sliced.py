"""Strategies for two classes with and without slices and V's, on lengths with a long tail."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from ds_hydra.commands.figures import shipped
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.shape_costs import with_shapes
from ds_hydra.costs.shares import Shares
from ds_hydra.data.lengths import read_lengths, sample_batches
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.proposal.mixed import propose_mixed
from ds_hydra.planner.selection import warm_up
from tools import aims
from tools.hetero.clusters import CASES, exchanged_ms, memory_of, table_of

_CLUSTERS = ("70B 16+16", "32B 16+16", "70B 16+32")
_CONTEXT, _TOKENS_OF_A_RANK, _STEPS, _COUNT = 8192, 3125, 4, 2


def sliced(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """Mean steps in seconds by strategies that were proposed without slices, and over them those with."""
    warm_up()
    lengths = read_lengths(shipped("pretraining"), _CONTEXT, count=20_000).lengths.tolist()
    rows = []
    for name in _CLUSTERS[: 1 if quick else len(_CLUSTERS)]:
        case = next(one for one in CASES if one.name == name)
        table = CostTable(tuple(replace(cost, shares=Shares.usual()) for cost in table_of(case).costs))
        tokens, memory = _TOKENS_OF_A_RANK * case.cluster.num_ranks, memory_of(case)
        batches = [batch.tolist() for batch in sample_batches(lengths, tokens, _STEPS, 1, _CONTEXT)]
        steps, taken, best = [], 0.0, ""
        for slices in (False, True):
            began = time.process_time()
            found = propose_mixed(case.cluster, table, memory, lengths, tokens, _CONTEXT, count=_COUNT, slices=slices,
                                  exposed=lambda one, case=case: exchanged_ms(case, one))  # type: ignore[misc]  # fmt: skip
            taken, best = time.process_time() - began, str(found[0])
            planner = Planner(with_shapes(table, found, memory), found, PlannerOptions(highs="off"),
                              exposed_ms=[exchanged_ms(case, one) for one in found])  # fmt: skip
            plans = [planner.plan(step, range(len(batch)), batch) for step, batch in enumerate(batches)]
            steps.append(float(np.mean([plan.step_ms for plan in plans])) / 1e3)
        if steps[0] < aims.SLICED_GAIN * steps[1]:
            missed.append(f"{name}: without slices a step takes {steps[0] / steps[1]:.3f} times as long as with, less "
                          f"than {aims.SLICED_GAIN}")  # fmt: skip
        rows.append({"cluster": name, "without s": steps[0], "with s": steps[1], "over it": steps[0] / steps[1],
                     "proposed CPU s": taken, "first": best})  # fmt: skip
    return rows
