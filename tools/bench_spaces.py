"""Larger spaces of plans beside smaller ones: whether more to choose from ever makes steps slower.

  python -m tools.bench_spaces [--quick] [--steps N] [--cells WORD ...] [--workers N] [--json FILE] [--resume]

The cells of `tools.bench_systems`, our planner alone: schemes of TP and PP with whole sequences, then SP besides, then
slices and V's of stages whose ranks share a node, then of stages over two nodes. Each space proposes its own strategies
from other data, so a search of a larger one can miss what the smaller one found. Steps are simulated with their
transfers. "over the best before": the mean step over that of the best smaller space. FILE is written after every cell;
`--resume` keeps all that it has of as many steps, and measures what is missing of the cells that are asked for.

Exits non-zero if a larger space is slower than a smaller one by more than the aim allows.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from ds_hydra.commands.figures import figures_parser, finish, guarded, print_table
from ds_hydra.zero_hetero.errors import ConfigError
from tools import aims
from tools.systems.cells import Cell, chosen_cells
from tools.systems.measure import Simulators
from tools.systems.ours import spaces

STEPS, QUICK_STEPS = 20, 4
QUICK = Cell("7b", 16, 32768, 100_000, "pretraining")
Row = tuple[str, str, float, float]  # a cell, a space, ms of its mean step, and over that of the best smaller one


def mean_steps(cell: Cell, steps: int) -> dict[str, float]:
    """What a step takes in the mean, in ms, by the space of plans: from the smallest that holds the context on."""
    batches, ms = cell.batches(steps), Simulators(cell).ms
    return {
        one.text: statistics.fmean(ms(one.plan(step, lengths), one.table) for step, lengths in enumerate(batches))
        for one in spaces(cell, ms)
    }


def measured(cells: Sequence[Cell], steps: int, workers: int) -> Iterator[dict[str, float]]:
    """The same of several cells, in order, each in a process of its own."""
    with get_context("spawn").Pool(max(1, min(workers, len(cells))), maxtasksperchild=1) as pool:
        yield from pool.imap(partial(mean_steps, steps=steps), cells)


def over_smaller(means: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """Each space with its mean step, and that over the least of those before it; 1 for the first."""
    least = next(iter(means.values()))
    for text, mean in means.items():
        yield text, mean, mean / least
        least = min(least, mean)


def kept_rows(path: Path | None, steps: int) -> list[Row]:
    """What the file has of cells of as many steps; nothing where there is no file.

    ConfigError for a file that `--json` did not write.
    """
    if path is None or not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [(str(cell), str(text), float(ms), float(over)) for cell, text, ms, over in found["rows"]]
        return rows if found["steps"] == steps else []
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: not figures of this tool ({error!r}); give a file that --json wrote") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 if the aim was missed."""
    parser = figures_parser(__doc__, "python -m tools.bench_spaces")
    parser.add_argument("--steps", type=int, help=f"of each cell (default {STEPS}, with --quick {QUICK_STEPS})")
    parser.add_argument("--cells", nargs="+", metavar="WORD", help="only cells with all these words, such as 32b 64")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="cells at a time")
    parser.add_argument("--resume", action="store_true", help="keep what FILE of --json has of the same steps")
    args = parser.parse_args(arguments)

    def run() -> int:
        began, steps = time.perf_counter(), args.steps or (QUICK_STEPS if args.quick else STEPS)
        cells = [QUICK] if args.quick and not args.cells else chosen_cells(args.cells)
        if not cells:
            parser.error(f"no cell has the words {' '.join(args.cells)}; a cell is written {QUICK}")
        rows = kept_rows(args.json if args.resume else None, steps)
        known = {cell for cell, *_ in rows}
        missing = [cell for cell in cells if str(cell) not in known]
        for cell, means in zip(missing, measured(missing, steps, args.workers), strict=True):
            own = list(over_smaller(means))
            rows += [(str(cell), *row) for row in own]
            print(f"\n{cell}")
            print_table(("space", "ms", "over the best before"), [(t, f"{ms:,.1f}", f"{o:.4f}") for t, ms, o in own])
            sys.stdout.flush()
            if args.json:
                args.json.write_text(json.dumps({"steps": steps, "rows": rows}), encoding="utf-8")
        missed = [f"{cell}: {text} takes {over:.4f} of a smaller space's step"
                  for cell, text, _, over in rows if over > aims.LARGER_SPACE]  # fmt: skip
        worst = max(over for *_, over in rows)
        summary = f"{len({row[0] for row in rows})} cells of {steps} steps, larger spaces at most {worst:.4f} of "
        summary += f"smaller ones, {time.perf_counter() - began:.0f} s"
        return finish("bench_spaces", summary, {"steps": steps, "rows": rows}, missed, args.json)

    return guarded("bench_spaces", run)


if __name__ == "__main__":
    sys.exit(main())
