"""Operations of a step's pulls and pushes on each rank of 7B jobs, counted from the links that the engine builds.

A message is an operation: each send, each receive, each run of a message that travels by itself [Note: runs]. So is a
collective of twins, however many they are [Note: twins]; beside it stands what it would be by messages alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

from ds_hydra.pipe import transfers
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.ranks.world import World
from ds_hydra.step.strategy_runtime import pull_link, push_link
from ds_hydra.zero_hetero.link import Mover, Operations
from ds_hydra.zero_hetero.transport import HostLane
from tools import aims, machine
from tools.devices.count import NODE_SIZE, plan_of
from tools.devices.table import Table

# Strategy, ranks, the most operations of a step. Twins trade in pieces of 2^24 elements: with pieces of twice the size
# 8*tp8 has 594 operations in place of 626, and a step of 8*tp4pp2 over 25 GB/s takes 0.5 % longer.
JOBS: tuple[tuple[str, int, int | None], ...] = (
    ("8*tp8", 64, 640),
    ("8*tp4pp2", 64, None),
    ("64*tp1", 64, None),
    ("tp16 + 6*tp8", 64, None),
    ("128*tp8", 1024, 3000),
    ("128*tp4pp2", 1024, None),
)


def operations(quick: bool) -> Table:
    """The busiest rank of each job; quick: without the jobs that have no aim."""
    table = Table(
        "operations of pulls and pushes: the busiest rank, 7B, one step",
        ["strategy", "ranks", "pulls", "pushes", "both", "aim", "of them collectives", "without", "links built s"],
    )
    plan = plan_of("7B")
    for text, num_ranks, aim in JOBS:
        if quick and aim is None:
            continue
        strategy = place_strategy(StrategyShape.parse(text), num_ranks, plan.num_layers)
        ranks = range(0, num_ranks, num_ranks // (16 if quick else 64))
        counts, seconds = zip(*(_count(plan, strategy, rank) for rank in ranks), strict=True)
        pulls, pushes = max(counts, key=lambda both: sum(found.number for found in both))
        both, built_s = pulls.number + pushes.number, min(seconds)
        teams, alone = len(pulls.teams) + len(pushes.teams), pulls.alone + pushes.alone
        table.rows.append(
            [text, num_ranks, pulls.number, pushes.number, both, aim or "-", teams, alone, round(built_s, 2)]
        )
        if aim is not None and both > aim:
            table.missed.append(f"{text} on {num_ranks} ranks: {both} operations (aim {aim})")
        if built_s > (most := machine.limit(aims.LINKS_BUILT_S)).here:
            table.missed.append(f"{text}: links built in {built_s:.2f} s (aim {most})")
    return table


def _count(plan: ModelPlan, strategy: Strategy, rank: int) -> tuple[tuple[Operations, Operations], float]:
    """A rank's operations, and the seconds of this process that its links take, from the plans on."""
    transfers.plan_transfers.cache_clear()
    world = cast("World", SimpleNamespace(links=None, collectives=None, lane=HostLane()))
    began = time.process_time()
    found = transfers.plan_transfers(plan, strategy, NODE_SIZE)
    pulls = [pull_link(pull, rank, world) for pull, _ in found]
    pushes = [push_link(push, rank, world) for _, push in found if push is not None]
    seconds = time.process_time() - began
    return (_together(pulls), _together(pushes)), seconds


def _together(links: Sequence[Mover]) -> Operations:
    """The operations of all links."""
    found = [link.operations for link in links]
    return Operations(sum(one.messages for one in found), tuple(size for one in found for size in one.teams))
