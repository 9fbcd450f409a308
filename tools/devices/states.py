"""Memory of a 7B model on 8 ranks beside activations, by count; and what it would be if each micro-batch were pushed.

A rank holds the sums of its whole stage from the first backward of a step to the last. If it pushed the gradients of
each micro-batch as its backward passes, and owners added them up, it would hold those of a few layers and, with memory
of their own, its masters' gradients. The price is as many pushes as there are micro-batches: bytes, and the tokens
whose backward hides one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_hydra.costs.memory import Needs
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.simulate.links import INSIDE
from tools import aims
from tools.devices.count import GRADIENTS, needs_of, plan_of
from tools.devices.table import Table

NUM_RANKS = 8
STRATEGIES = ("8*tp1", "2*tp4", "tp8", "pp8", "tp4 + 4*tp1")
_LAYERS_AT_ONCE = 3  # whose gradients a rank would hold: computed, on their way, and the next
_FLOPS = 4e14  # a second, of a GPU that computes a backward of 4 operations for each parameter and token
GB = 1e9


def states(quick: bool) -> Table:
    """The fullest rank of each strategy as the job's only one; quick: the one with aims."""
    table = Table(
        f"7B on {NUM_RANKS} ranks, BF16: GB of the fullest rank beside activations; each micro-batch pushed, by count",
        ["strategy", "gradients", "params", "grads", "scratch", "masters", "sum", "aim", "ZeRO-1", "each pushed",
         "GB a push", "ms", "hidden by tokens"],
    )  # fmt: skip
    plan = plan_of("7B")
    for strategy in STRATEGIES[: 1 if quick else None]:
        for size, name in GRADIENTS.items():
            needs = max(needs_of(plan, (strategy,), size, NUM_RANKS), key=lambda one: one.states)
            aim = aims.STATES[size] if strategy == STRATEGIES[0] else None
            parts = needs.params, needs.grads, needs.scratch, needs.masters + needs.optimizer, needs.states
            table.rows.append([strategy, name, *_in_gb(parts), aim or "-", *_in_gb(_pushed_each_time(plan, needs))])
            if aim is not None and needs.states > aim * GB:
                table.missed.append(f"{strategy}, {name} gradients: {needs.states / GB:.1f} GB (aim {aim})")
    return table


def _pushed_each_time(plan: ModelPlan, needs: Needs) -> Sequence[float]:
    """ZeRO-1's bytes with the same gradients; those of a rank that pushes each micro-batch; and what such a push costs:
    bytes, 1e9 ms and 1e9 tokens."""
    layer = max(bucket.numel for bucket in plan.buckets) * needs.params // sum(bucket.numel for bucket in plan.buckets)
    masters = needs.masters + needs.optimizer
    pushed = needs.params + _LAYERS_AT_ONCE * layer + needs.scratch + masters * 4 / 3  # FP32: two moments, then a sum
    traded = needs.params * (NUM_RANKS - 1) / NUM_RANKS
    seconds = traded / INSIDE.bytes_per_s
    tokens = seconds * _FLOPS / (4 * needs.params / 2)
    return needs.params + needs.grads + masters, pushed, traded, 1e3 * seconds * GB, tokens * GB


def _in_gb(sizes: Sequence[float]) -> list[float]:
    return [round(size / GB, 2) for size in sizes]
