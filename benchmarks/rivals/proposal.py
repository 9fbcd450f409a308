"""Strategy proposal as Hydraulis has it (section 7, Eq. 4). Pure: no torch.

A dynamic program deals length intervals to schemes with pipelines counted in tenths; every length up to the
context gives a solution, and every solution its nearby whole numbers: 1.3 pipelines of TP8 and 5.6 of TP4 become 1 and
5, 1 and 6, 2 and 5, or 2 and 6 where there are ranks enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from benchmarks.rivals import kernels
from benchmarks.rivals.interval_program import Choices
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.planner.exact import counts_to_strategy

_LENGTH_STEP = 128
_MOST_ROUNDINGS = 64  # nearby whole solutions taken from one continuous one


def propose_by_program(
    cost_table: CostTable,
    num_ranks: int,
    lengths: Sequence[int],
    context_length: int,
    schemes: Sequence[ParallelScheme],
    *,
    with_overhead: bool = True,
    gpu_step: float = 0.1,
) -> tuple[StrategyShape, ...]:
    """All strategies that Eq. 4 with continuous relaxation and rounding proposes for this data.

    `lengths` samples the data, `schemes` are those allowed; the paper's T(l) carries c for each sequence, which
    `with_overhead=False` leaves out. Leftover ranks of a rounding are filled up, as every rank needs a pipeline.
    """
    costs = [cost_table[scheme] for scheme in schemes]
    data = np.array([x for x in lengths if x <= context_length], dtype=np.int64)
    steps = -(-context_length // _LENGTH_STEP)
    length_bin = -(-data // _LENGTH_STEP)
    work_below = np.zeros((len(costs), steps + 1))
    for k, cost in enumerate(costs):
        ms = cost.sequence_ms(data) + (cost.c if with_overhead else 0.0)
        work_below[k] = np.cumsum(np.bincount(length_bin, weights=ms, minlength=steps + 1))
    # A scheme covers a length step when it holds all of it.
    cover = np.array([min(steps, cost.max_length // _LENGTH_STEP) for cost in costs], dtype=np.int64)
    # GPUs are counted in units of a tenth of the schemes' common divisor: with schemes of 4 and 8 GPUs a tenth of a
    # pipeline is 1 or 2 units, and 64 GPUs are 160.
    sizes = np.array([scheme.num_ranks for scheme in schemes], dtype=np.int64)
    unit = int(np.gcd.reduce(sizes))
    gpu_units = int(num_ranks * round(1 / gpu_step)) // unit
    unit_gpus = sizes // unit
    shape = (gpu_units + 1, steps + 1)
    best = np.empty(shape)
    choices = Choices(*(np.full(shape, -1, dtype=np.int64) for _ in range(3)))
    kernel = kernels.compiled()
    kernel.interval_program(work_below, cover, unit_gpus, best, choices)
    found: dict[tuple[int, ...], None] = {}
    tenths = np.zeros(len(costs), dtype=np.int64)
    for step in range(1, steps + 1):
        if not np.isfinite(best[gpu_units, step]):
            continue
        kernel.program_counts(choices, unit_gpus, gpu_units, step, tenths)
        # Every length up to the context is tried as the longest that a batch has.
        for counts in _nearby(tenths, sizes, num_ranks):
            filled = _fill_ranks(counts, sizes, num_ranks)
            if filled is not None:
                found[filled] = None
    return tuple(counts_to_strategy(counts, schemes) for counts in found)


def _nearby(tenths: np.ndarray, sizes: np.ndarray, num_ranks: int) -> list[tuple[int, ...]]:
    """Every way to round the counts up or down whose ranks do not exceed the job's."""
    options = [sorted({int(t) // 10, -(-int(t) // 10)}) for t in tenths]
    near = itertools.islice(itertools.product(*options), 4096)
    fitting = [c for c in near if 0 < sum(x * s for x, s in zip(c, sizes.tolist(), strict=True)) <= num_ranks]
    fitting.sort(key=lambda c: (-sum(x * s for x, s in zip(c, sizes.tolist(), strict=True)), c))
    return fitting[:_MOST_ROUNDINGS]


def _fill_ranks(counts: Sequence[int], sizes: np.ndarray, num_ranks: int) -> tuple[int, ...] | None:
    """The counts with leftover ranks given to more pipelines; None if that fails.

    Schemes that are used already come first, then larger ones: 12 ranks left beside tp8 and tp4 are one more of each.
    """
    filled = list(counts)
    left = num_ranks - int(np.dot(filled, sizes))
    order = sorted(range(len(filled)), key=lambda k: (counts[k] == 0, -int(sizes[k])))
    for k in order:
        size = int(sizes[k])
        while left >= size:
            filled[k] += 1
            left -= size
    return tuple(filled) if left == 0 else None
