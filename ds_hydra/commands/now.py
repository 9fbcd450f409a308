"""What a step takes on DeepSpeed itself, with the layout that a config has: costs and lengths in, ms out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from statistics import fmean

from ds_hydra.commands.translated import OwnLayout
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.data.lengths import sample_batches
from ds_hydra.pipe.shape import ParallelScheme


def now_ms(
    table: CostTable, layout: OwnLayout, gpus: int, lengths: Sequence[int], tokens: int, context: int, steps: int
) -> float | None:
    """Mean ms of a step of the same batches that `preview_steps` plans; None for a layout that the table lacks.

    Sequences are packed as the sampler gives them, into micro-batches of up to `context` tokens, and dealt out in turn
    before or after that, whichever is faster. Under ZeRO-3 no rank begins a micro-batch before the others, as each
    layer's parameters are gathered from all.
    """
    scheme = ParallelScheme(layout.tp, layout.pp, layout.sp)
    if scheme not in table.schemes or gpus % scheme.num_ranks:
        return None
    batches = sample_batches(lengths, tokens, steps, 1, context)
    cost, replicas = table[scheme], gpus // scheme.num_ranks
    return fmean(_step_ms(cost, batch.tolist(), replicas, context, layout.stage == 3) for batch in batches)


def packed_in_order(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Micro-batches of at most `capacity` tokens: with 100 tokens 70, 40, 50, 60 become (70) (40 50) (60)."""
    packs: list[list[int]] = []
    room = 0
    for length in lengths:
        if length > room or not packs:
            packs.append([])
            room = capacity
        packs[-1].append(length)
        room -= length
    return packs


def _step_ms(cost: SchemeCost, lengths: Sequence[int], replicas: int, capacity: int, in_step: bool) -> float:
    everything = packed_in_order(lengths, capacity)
    ways = (  # sequences dealt out and packed, or packs dealt out
        [packed_in_order(lengths[first::replicas], capacity) for first in range(replicas)],
        [everything[first::replicas] for first in range(replicas)],
    )

    def taken(dealt: Sequence[Sequence[Sequence[int]]]) -> float:
        loads = [[cost.load_ms(pack) for pack in packs] for packs in dealt]
        if in_step and cost.scheme.pp == 1:
            return sum(map(max, zip_longest(*loads, fillvalue=0.0)))
        return max(map(cost.pipeline_ms, loads))

    return min(map(taken, ways))
