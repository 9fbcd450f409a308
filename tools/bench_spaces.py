"""Larger spaces of plans beside smaller ones: whether more to choose from ever makes steps slower.

  python -m tools.bench_spaces [--quick] [--steps N] [--cells WORD ...] [--workers N] [--json FILE]

The cells of `tools.bench_systems`, our planner alone: schemes of TP and PP with whole sequences, then SP besides, then
slices and V's of stages whose ranks share a node, then of stages over two nodes. Each space proposes its own strategies
from other data, so a search of a larger one can miss what the smaller one found. Steps are simulated with their
transfers. "over the best before": the mean step over that of the best smaller space.

Exits non-zero if a larger space is slower than a smaller one by more than the aim allows.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import get_context

from ds_hydra.commands.figures import figures_parser, finish, print_table
from tools import aims
from tools.systems.cells import Cell, chosen_cells
from tools.systems.measure import Simulators
from tools.systems.ours import spaces

STEPS, QUICK_STEPS = 20, 4
QUICK = Cell("7b", 16, 32768, 100_000, "pretraining")


def mean_steps(cell: Cell, steps: int) -> dict[str, float]:
    """What a step takes in the mean, in ms, by the space of plans: from the smallest that holds the context on."""
    batches, ms = cell.batches(steps), Simulators(cell).ms
    return {
        one.text: statistics.fmean(ms(one.plan(step, lengths), one.table) for step, lengths in enumerate(batches))
        for one in spaces(cell, ms)
    }


def over_smaller(means: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """Each space with its mean step, and that over the least of those before it; 1 for the first."""
    least = next(iter(means.values()))
    for text, mean in means.items():
        yield text, mean, mean / least
        least = min(least, mean)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 if the aim was missed."""
    parser = figures_parser(__doc__, "python -m tools.bench_spaces")
    parser.add_argument("--steps", type=int, help=f"of each cell (default {STEPS}, with --quick {QUICK_STEPS})")
    parser.add_argument("--cells", nargs="+", metavar="WORD", help="only cells with all these words, such as 32b 64")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="cells at a time")
    args = parser.parse_args(arguments)
    began, steps = time.perf_counter(), args.steps or (QUICK_STEPS if args.quick else STEPS)
    cells = [QUICK] if args.quick and not args.cells else chosen_cells(args.cells)
    if not cells:
        parser.error(f"no cell has the words {' '.join(args.cells)}; a cell is written {QUICK}")
    rows, missed = list[tuple[str, str, float, float]](), list[str]()
    with get_context("spawn").Pool(min(args.workers, len(cells)), maxtasksperchild=1) as pool:
        for cell, means in zip(cells, pool.imap(partial(mean_steps, steps=steps), cells), strict=True):
            own = list(over_smaller(means))
            missed += [f"{cell}: {text} takes {over:.4f} of a smaller space's step"
                       for text, _, over in own if over > aims.LARGER_SPACE]  # fmt: skip
            rows += [(str(cell), *row) for row in own]
            print(f"\n{cell}")
            print_table(("space", "ms", "over the best before"), [(t, f"{ms:,.1f}", f"{o:.4f}") for t, ms, o in own])
            sys.stdout.flush()
    worst = max(over for *_, over in rows)
    summary = f"{len(cells)} cells of {steps} steps, larger spaces at most {worst:.4f} of smaller ones, "
    summary += f"{time.perf_counter() - began:.0f} s"
    return finish("bench_spaces", summary, {"steps": steps, "rows": rows}, missed, args.json)


if __name__ == "__main__":
    sys.exit(main())
