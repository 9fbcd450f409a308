"""Where matrices of a 7B model begin in each rank's memory under drawn strategies, by the plans that buffers follow.

Pipelines of TP, PP and SP degrees, some of them a V, are drawn until they fill the ranks, of which there may be any
number: so as many ranks hold the same shards as do not divide a layer. A matrix is askew where it, or its gradient in
FP32 or 16 bit, begins off a multiple of 128 bytes; beside it what would be if parameters lay side by side.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.transfers import bucket_places, gradient_places, twins_of
from tools.devices.count import NODE_SIZE, plan_of
from tools.devices.table import Table

BYTES = 128  # at multiples of which products like their factors to begin
PARAM_BYTES, MASTER_BYTES = 2, 4
_STRATEGIES, _QUICK = 30, 6
_RANKS = (6, 7, 8, 9, 12, 24, 40, 48, 64)
_PIPELINES = ("tp1", "tp1", "tp2", "tp4", "tp8", "sp2", "sp4", "tp2sp2", "pp2", "tp2pp2", "tp4pp2", "pp2/v", "pp3",
              "tp2pp4", "tp16")  # fmt: skip


def aligned(quick: bool) -> Table:
    """Matrices that begin askew; quick: of a few strategies."""
    table = Table(
        f"matrices of a 7B model that begin off {BYTES} bytes, parameters or gradients, of all ranks, by count",
        ["ranks", "strategy", "twins", "matrices", "askew", "aim", "side by side"],
    )
    plan = plan_of("7B")
    side_by_side = replace(plan, alignment=1)
    for number in range(_QUICK if quick else _STRATEGIES):
        strategy, text = drawn(plan, number)
        found, apart = (list(_begins(one, strategy)) for one in (plan, side_by_side))
        askew, before = (sum(any(at % BYTES for at in begins) for begins in each) for each in (found, apart))
        twins = {len(one.ranks) for one in twins_of(strategy, NODE_SIZE)}
        table.rows.append([strategy.num_ranks, text, ", ".join(map(str, sorted(twins))), len(found), askew, 0,
                           f"{before / len(found):.0%}"])  # fmt: skip
        if askew:
            table.missed.append(f"{text} on {strategy.num_ranks} ranks: {askew} of {len(found)} matrices (aim 0)")
    return table


def drawn(plan: ModelPlan, number: int) -> tuple[Strategy, str]:
    """The same strategy for the same number, and how it is written."""
    draw, parts = random.Random(number), list[str]()
    num_ranks = left = draw.choice(_RANKS)
    while left:
        text = draw.choice(_PIPELINES)
        needed = StrategyShape.parse(text).num_ranks
        if needed <= left:
            count = draw.randint(1, left // needed)
            parts.append(f"{count}*{text}")
            left -= count * needed
    shape = StrategyShape.parse(" + ".join(parts))
    return place_strategy(shape, num_ranks, plan.num_layers), str(shape)


def _begins(plan: ModelPlan, strategy: Strategy) -> Iterator[tuple[int, ...]]:
    """Of each matrix on each rank: the first byte of the parameter, of its FP32 and of its 16 bit gradient."""
    for twins in twins_of(strategy, NODE_SIZE):
        places = list(bucket_places(plan, strategy, twins))
        sums = {
            size: gradient_places(plan, strategy, twins, grad_bytes=size, master_bytes=MASTER_BYTES).gradients
            for size in (4, 2)
        }
        for index, place in enumerate(places):  # all buckets of this model are trained
            for slot in (one for one in place.slots if len(one.shape) > 1):
                begins = (
                    (place.start + slot.offset) * PARAM_BYTES,
                    *(each[index].start + slot.offset * size for size, each in sums.items()),
                )
                yield from (begins for _ in twins.ranks)
