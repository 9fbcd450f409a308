"""Pulls planned for clusters of nodes, without running: what enters a node, directly and with twins, and times."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.transfers import twins_of
from ds_hydra.zero_hetero.layout import ALIGNMENT, Layout, even_layout
from ds_hydra.zero_hetero.transfer_plan import TransferPlan, plan_transfer
from ds_hydra.zero_hetero.twin_plan import plan_twin_pull
from tests.support.planner_cases import fused_llama_plan
from tools import aims, machine

NODE_SIZE = 8


CLUSTERS = ((64, "64*tp1"), (64, "2*tp16 + 4*tp4 + 8*tp2"), (1024, "1024*tp1"), (1024, "32*tp16 + 64*tp4 + 128*tp2"))


@dataclass(frozen=True)
class NodeRow:
    """One line of the table of clusters; volumes in multiples of the bucket, for one node."""

    num_ranks: int
    strategy: str
    direct: float
    entered: float  # to where twins have their parts
    gathered: float
    needed: float  # what the node's ranks hold, less what they own, and what each part is rounded up by
    plan_ms: float
    twins_ms: float


def plan_cluster(num_ranks: int, text: str) -> NodeRow:
    """Plan the pull of one layer of a 32B model and count what enters a node on average."""
    model = fused_llama_plan(num_layers=1, hidden=5120)
    bucket = next(bucket for bucket in model.buckets if bucket.name == "layer.0")
    strategy = place_strategy(StrategyShape.parse(text), num_ranks, model.num_layers)
    layout = model.pull_layout(bucket, strategy)
    masters = even_layout(bucket.numel, num_ranks)
    times: list[tuple[float, float]] = []
    for _ in range(3):
        began = time.process_time()
        plan = plan_transfer(masters, layout)
        between = time.process_time()
        shared = plan_twin_pull(masters, layout, twins_of(strategy, NODE_SIZE))
        times.append(((between - began) * 1e3, (time.process_time() - between) * 1e3))
    needed = 0
    for first in range(0, num_ranks, NODE_SIZE):
        wanted = _union(layout, range(first, first + NODE_SIZE))
        owned = masters.pieces[first][0].start, masters.pieces[first + NODE_SIZE - 1][0].stop
        needed += sum(stop - start - max(0, min(stop, owned[1]) - max(start, owned[0])) for start, stop in wanted)
    whole = bucket.numel * (num_ranks // NODE_SIZE)
    plan_ms, twins_ms = (min(column) for column in zip(*times, strict=True))
    enter, *gathers = shared.hops
    direct, entered = (_between_nodes(one) / whole for one in (plan, enter))
    gathered = sum(map(_between_nodes, gathers)) / whole
    # Parts begin on whole 128 bytes, so that one may be longer than an equal share, in each node.
    needed += ALIGNMENT * num_ranks * (num_ranks // NODE_SIZE)
    return NodeRow(num_ranks, text, direct, entered, gathered, needed / whole, plan_ms, twins_ms)


def _between_nodes(plan: TransferPlan) -> int:
    """Elements that a plan moves from one node to another."""
    slices = plan.slices
    return int(slices.length[slices.src // NODE_SIZE != slices.dst // NODE_SIZE].sum())


def _union(layout: Layout, ranks: range) -> list[tuple[int, int]]:
    """What some ranks hold together, as disjoint intervals."""
    union: list[tuple[int, int]] = []
    for start, stop in sorted((piece.start, piece.stop) for rank in ranks for piece in layout.pieces[rank]):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(stop, union[-1][1])
        else:
            union.append((start, stop))
    return union


def missed_node_aims(row: NodeRow) -> list[str]:
    """What a row of the table of clusters misses."""
    where = f"{row.num_ranks} ranks, {row.strategy}"
    missed = []
    if row.entered + row.gathered > row.needed * aims.MODELS_ENTERED:
        missed.append(f"{where}: {row.gathered} + {row.entered} models enter a node, {row.needed} needed")
    if max(row.plan_ms, row.twins_ms) > machine.limit(aims.TRANSFER_PLAN_S).here * 1e3:
        missed.append(f"{where}: planned in {row.plan_ms:.0f} ms, with twins in {row.twins_ms:.0f} ms")
    return missed
