"""Ours and every rival side by side: the same batches, costs, memory and simulator; rivals set up in hindsight.

  python -m tools.bench_systems [--quick] [--steps N] [--cells WORD ...] [--systems NAME ...] [--json FILE]
                                [--resume] [--again NAME ...] [--plots FOLDER] [--curves STEPS] [--emulate STEPS]

Models of 7B to 70B, a mixture and a hybrid on A800s, H100s and H200s, contexts of 32K to 512K (`tools.systems.cells`),
costs as published or derived (`tools.systems.cells`, printed beside public runs). Each rival's configuration is the
best for the very batches that are reported; ours is chosen on others. All steps are longer by what 3 % of noise of each
pipeline makes the last one take. "ideal": what nobody ships; "balanced": the best fixed layout of any kind with
sequences assigned by ours. "as jobs reach it": TFLOP/s by what public runs have of a table's speed. "gap": slowest less
fastest pipeline over slowest; "bound": share of the GPU-seconds bound in the step. "waits": share of a step that
messages of shared sequences leave exposed, where each sequence pays for its own, or that groups' remainders add:
"dealt out" are the plans of the two ideal systems with short sequences computed whole by one rank of their group.
`--curves` changes GPUs, context and tokens one by one, and
`--emulate` runs six cells on the emulated cluster. FILE is written after every cell; `--resume` keeps what it has of as
many steps, and measures what is missing; `--again` does so too, but for the systems that it names.

Exits non-zero if an aim is missed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_hydra.commands.figures import figures_parser, finish, guarded, print_table
from ds_hydra.zero_hetero.errors import ConfigError
from tools import aims
from tools.systems.cells import FLAGSHIP, NOT_COMPARABLE, Cell, chosen_cells, device_rows, median_off, rate_rows
from tools.systems.measure import BY_THEMSELVES, NAMES, OURS, bound_ms, measure_cells
from tools.systems.page import (
    Result,
    cause_row,
    cell_row,
    curve_figures,
    curve_row,
    curves,
    figures,
    missed_aims,
    notes,
    page,
    pays_rows,
    published_rows,
    read_figures,
    system_rows,
)

STEPS, QUICK_STEPS = 10, 3
_EMULATION_S = 1800.0  # real seconds for one cluster


def run_cells(
    cells: Sequence[Cell], steps: int, systems: Sequence[str], workers: int, kept: Mapping[Cell, Result]
) -> Iterator[Result]:
    """The cells in order, several systems at a time; those that are kept get the systems that they lack."""
    known = {cell: dict(kept[cell].systems) if cell in kept else {} for cell in cells}
    lacking = [(cell, [name for name in systems if name not in known[cell]]) for cell in cells]
    for cell, found in zip(cells, measure_cells(lacking, steps, workers), strict=True):
        if cell in kept:
            yield replace(kept[cell], systems=known[cell] | found)
            continue
        batches = cell.batches(steps)
        yield Result(cell, found, bound_ms(cell, batches), min(map(len, batches)))


def kept_cells(path: Path | None, cells: Sequence[Cell], steps: int, systems: Collection[str]) -> dict[Cell, Result]:
    """Those of the cells that the file has with as many steps, with those of the systems that it has; none where there
    is no file.

    ConfigError for a file that `--json` did not write.
    """
    if path is None or not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        results = read_figures(found["cells"]) if found["steps"] == steps else []
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: not figures of this tool ({error!r}); give a file that --json wrote") from error
    return {
        result.cell: replace(result, systems={name: one for name, one in result.systems.items() if name in systems})
        for result in results
        if result.cell in cells
    }


def show(result: Result) -> None:
    """Print a cell."""
    title = f"{result.cell}: bound {result.bound_ms:,.0f} ms, at least {result.fewest_sequences} sequences a step"
    show_more(title, system_rows(result))
    sys.stdout.flush()


def emulated_rows(steps: int) -> list[dict[str, object]]:
    """What the engine takes for a static layout and for ours."""
    from tools.systems.emulated import CELLS, emulated  # imports torch

    return [row for cell in CELLS for row in emulated(cell, steps, timeout_s=_EMULATION_S)]


def show_more(title: str, rows: Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, object]]:
    """Print a further table, if it has rows; the same rows."""
    if rows:
        print(f"\n{title}")
        print_table(list(rows[0]), [list(row.values()) for row in rows])
    return rows


def beside(results: Sequence[Result]) -> dict[str, Any]:
    """Print what follows from the cells; its rows for the file."""
    show_more("What the others take, over ours", [cell_row(result) for result in results])
    found = {
        "published": show_more("Published figures beside ours", published_rows(results)),
        "rates": show_more("Public runs beside the tables", rate_rows()),
        "causes": show_more("Gain by cause: before it over with it", [cause_row(result) for result in results]),
        "pays": show_more("Where a mix pays", pays_rows(results)),
    }
    show_more("Tables", device_rows())
    print("not comparable:", "; ".join(f"rows {rows}, {why}" for rows, why in NOT_COMPARABLE.items()))
    for line in notes(results):
        print(line)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 if an aim was missed."""
    parser = figures_parser(__doc__, "python -m tools.bench_systems")
    parser.add_argument("--steps", type=int, help=f"of each cell (default {STEPS}, with --quick {QUICK_STEPS})")
    parser.add_argument("--cells", nargs="+", metavar="WORD", help="only cells with all these words, such as 32b 64")
    parser.add_argument("--systems", nargs="+", choices=NAMES, default=list(NAMES), help="ours is always among them")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="systems at a time")
    parser.add_argument("--resume", action="store_true", help="keep what FILE of --json has of the same steps")
    parser.add_argument("--again", nargs="+", choices=BY_THEMSELVES, default=[], help="resume, but measure these anew")
    parser.add_argument("--curves", type=int, default=0, metavar="STEPS", help="by GPUs, context and tokens a step")
    parser.add_argument("--emulate", type=int, default=0, metavar="STEPS", help="of six cells on the emulated cluster")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the figures there, and write systems.md")
    args = parser.parse_args(arguments)

    def run() -> int:
        began, steps = time.perf_counter(), args.steps or (QUICK_STEPS if args.quick else STEPS)
        cells = [FLAGSHIP] if args.quick and not args.cells else chosen_cells(args.cells)
        if not cells:
            parser.error(f"no cell has the words {' '.join(args.cells)}; a cell is written {FLAGSHIP}")
        systems = [name for name in NAMES if name in {OURS, *args.systems}]
        kept = kept_cells(args.json if args.resume or args.again else None, cells, steps, set(systems) - {*args.again})
        head: dict[str, Any] = {"steps": steps, "systems": systems}
        done: dict[Cell, Result] = {}
        for result in run_cells(cells, steps, systems, args.workers, kept):
            show(result)
            done[result.cell] = result
            if args.json:
                so_far = figures(list((kept | done).values()))
                args.json.write_text(json.dumps(head | {"cells": so_far}), encoding="utf-8")
        results = list(done.values())
        found = head | {"cells": figures(results)} | beside(results)
        points = list(curves(args.curves, args.workers)) if args.curves else []
        show_more("By GPUs, context and tokens of a step, 7B", [curve_row(point) for point in points])
        found["curves"] = curve_figures(points)
        emulated = emulated_rows(args.emulate) if args.emulate else []
        found["emulated"] = show_more("On the emulated cluster", emulated)
        if args.plots:
            from tools.systems.page import draw_curves, draw_systems  # needs matplotlib

            (args.plots / "systems.md").write_text(page(results, steps), encoding="utf-8")

            drawn = draw_systems(results, args.plots)
            for path in [*drawn, draw_curves(points, args.plots)] if points else drawn:
                print(path)
        worst = min(result.best_rival for result in results)
        summary = (
            f"{len(results)} cells of {steps} steps in {time.perf_counter() - began:.0f} s; the least gain is "
            f"{worst[0]:.2f} over {worst[1]}"
        )
        missed = missed_aims(results)
        if (off := median_off()) > aims.RATES_OFF:
            missed.append(f"tables are {off:.1%} off public runs in the median, not <= {aims.RATES_OFF:.0%}")
        return finish("bench_systems", summary, found, missed, args.json)

    return guarded("bench_systems", run)


if __name__ == "__main__":
    sys.exit(main())
