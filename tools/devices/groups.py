"""Groups, connections and descriptors of one rank, counted from what the engine makes at start for a 7B job.

A group is a communicator of the device's network, for tensor and sequence parallel ranks and for twins; three more are
of all ranks: torch's default one, that of pulls and pushes, and that of stages. Those of one width that have no rank in
common are made in one meeting of all ranks where the backend can split a group. Pairs are those that pulls, pushes and
stages connect besides. Sockets are those of the gloo groups of all ranks, whose pairs connect when they first talk, and
of the watchdog: two groups stay, a third one is there until the world is made.
"""

from __future__ import annotations

from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.ranks.channel import peers_of
from ds_hydra.ranks.groups import apart, needed_groups
from ds_hydra.step.strategy_runtime import connections_of
from ds_hydra.watchdog.meeting import places
from tools import aims
from tools.devices.count import NODE_SIZE, plan_of
from tools.devices.table import Table

JOBS = (
    (("8*tp8", "8*tp4pp2"), 64),
    (("8*tp8", "16*tp4", "64*tp1", "8*tp4pp2", "4*tp8pp2"), 64),
    (("128*tp8", "128*tp4pp2"), 1024),
    (("128*tp8", "256*tp4", "128*tp4pp2", "64*tp16", "16*tp16 + 64*tp8 + 64*tp2pp2"), 1024),
)
GLOO_GROUPS = 3  # for small messages before there is a world, of training, and of threads beside it


def groups(quick: bool) -> Table:
    """The busiest rank of each job; quick: of jobs with two candidate strategies."""
    table = Table(
        "groups and connections: the busiest rank, 7B",
        ["candidates", "ranks", "groups", "aim", "all groups", "meetings", "aim ", "pairs", "aim  ", "sockets",
         "of rank 0", "aim   "],
    )  # fmt: skip
    plan = plan_of("7B")
    for texts, num_ranks in JOBS:
        if quick and len(texts) > 2:
            continue
        strategies = [place_strategy(StrategyShape.parse(text), num_ranks, plan.num_layers) for text in texts]
        found = connections_of(plan, strategies, NODE_SIZE)
        of_models = list(dict.fromkeys(one for s in strategies for one in needed_groups(s)))
        every = [*of_models, *found.teams]
        meetings = len(apart(of_models)) + len(apart(found.teams))
        most = 3 + max(sum(rank in ranks for ranks in every) for rank in range(0, num_ranks, NODE_SIZE))
        pairs = _most_pairs(found.links | found.edges, num_ranks)
        sockets = GLOO_GROUPS * max(len(peers_of(rank, num_ranks)) for rank in range(num_ranks)) + 1
        of_first = GLOO_GROUPS * len(peers_of(0, num_ranks)) + len(
            places([str(rank // NODE_SIZE) for rank in range(num_ranks)])[0].below
        )
        name = f"{texts[0]} and {len(texts) - 1} more"
        table.rows.append([name, num_ranks, most, aims.GROUPS, len(every), meetings, aims.MEETINGS, pairs, aims.PAIRS,
                           sockets, of_first, aims.GROUP_SOCKETS])  # fmt: skip
        counted = zip((most, meetings, pairs, sockets), (aims.GROUPS, aims.MEETINGS, aims.PAIRS, aims.GROUP_SOCKETS),
                      ("groups", "meetings", "pairs", "sockets"), strict=True)  # fmt: skip
        table.missed.extend(f"{name}: {number} {what} (aim {aim})" for number, aim, what in counted if number > aim)
    return table


def _most_pairs(pairs: frozenset[tuple[int, int]], num_ranks: int) -> int:
    """Directed pairs of the rank that has most of them."""
    count = [0] * num_ranks
    for one, other in pairs:
        count[one] += 1
        count[other] += 1
    return max(count)
