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
import math
import os
import statistics
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ds_hydra.commands.figures import figures_parser, finish, guarded, print_table
from ds_hydra.report.plots import COLOURS, pyplot
from ds_hydra.zero_hetero.errors import ConfigError
from tools import aims
from tools.systems.cells import (
    FLAGSHIP,
    NOT_COMPARABLE,
    Cell,
    chosen_cells,
    device_rows,
    median_off,
    most_tflops,
    rate_rows,
    reached,
)
from tools.systems.measure import (
    BY_THEMSELVES,
    COMPOSED,
    DEALT,
    FIXED,
    IDEAL,
    NAMES,
    ONE_CHUNKED,
    ONE_MIX,
    ONE_WHOLE,
    OURS,
    OWN,
    STATIC,
    Measured,
    bound_ms,
    measure_cells,
)

STEPS, QUICK_STEPS = 10, 3
_EMULATION_S = 1800.0  # real seconds for one cluster
NOBODYS = frozenset({*IDEAL, *DEALT.values(), FIXED})  # nobody ships them: shown, without an aim
GROUP = 10  # cells, whose mean has the aim
PAYS = 1.02  # a mix over the best one layout, from which on it is shown as paying
SUSPECT = 0.6  # of the peak: more than jobs have reached with mixed lengths


@dataclass(frozen=True)
class Result:
    """One cell: what every system took, the bound by GPU-seconds, and how many sequences its batches had."""

    cell: Cell
    systems: Mapping[str, Measured]
    bound_ms: float
    fewest_sequences: int

    @property
    def ours(self) -> Measured:
        return self.systems[OURS]

    def gain(self, rival: str) -> float | None:
        """The rival's mean step over ours; None for one that is not there."""
        return self.systems[rival].mean_ms / self.ours.mean_ms if rival in self.systems else None

    def best_of(self, names: Iterable[str]) -> tuple[float, str]:
        """The least time over ours of these systems, and whose."""
        gains = [(gain, name) for name in names if (gain := self.gain(name)) is not None]
        return min(gains, default=(math.inf, "nobody"))

    @property
    def best_rival(self) -> tuple[float, str]:
        """The fastest system that is scheduled as somebody ships it."""
        return self.best_of(name for name in self.systems if name not in {OURS, *OWN, *NOBODYS})

    @property
    def one_layout(self) -> tuple[float, str]:
        """Our engine with the best one layout in every step."""
        return self.best_of((ONE_WHOLE, ONE_CHUNKED))


class Published(NamedTuple):
    """A figure of a paper for one of the cells: seconds of a system's step, or of what is named."""

    cell: Cell
    system: str
    what: str  # "run" without pulls and pushes, "step" with them, "rest" for these alone
    seconds: float
    source: str


_TABLE_4 = "Hydraulis, table 4 (its mix is not stated)"
PUBLISHED = (
    Published(FLAGSHIP, FIXED, "run", 6.78, "Hydraulis, table 1, homogeneous"),
    Published(FLAGSHIP, "Hydraulis", "run", 4.29, "Hydraulis, table 1, heterogeneous"),
    Published(FLAGSHIP, "Hydraulis", "step", 5.49, "Hydraulis, table 1, end to end"),
    Published(FLAGSHIP, "Hydraulis", "rest", 1.18, "Hydraulis, table 1, O-P with overlap"),
    Published(FLAGSHIP, "HotSPa", "rest", 2.21, f"{_TABLE_4}, switching"),
    Published(FLAGSHIP, "HotSPa", "step", 13.19, _TABLE_4),
    Published(FLAGSHIP, "Hydraulis", "step", 7.22, _TABLE_4),
)


def system_rows(result: Result) -> list[dict[str, object]]:
    """One row for each system of a cell."""
    rows: list[dict[str, object]] = []
    for name in NAMES:
        if name in result.systems:
            one = result.systems[name]
            rows.append({
                "system": name, "ms": f"{one.mean_ms:,.0f}", "±": f"{one.deviation_ms:,.0f}",
                "over ours": f"{result.gain(name):.3f}", "TFLOP/s": rate_text(one),
                "as jobs reach it": f"{reached(result.cell.device) * one.tflops:.0f}", "gap": f"{one.gap:.2f}",
                "bubbles": f"{max(0.0, one.bubbles):.0%}",
                "waits": f"{one.waits_ms / one.mean_ms:.1%}", "bound": f"{result.bound_ms / one.mean_ms:.0%}",
                "strategies": len(one.strategies),
                "set up as": one.configuration if len(one.configuration) <= 60 else one.configuration[:57] + "...",
            })  # fmt: skip
    return rows


def rate_text(one: Measured) -> str:
    """TFLOP/s of a GPU; a dash where a file does not have it."""
    return f"{one.tflops:.0f}" if one.tflops else "-"


def published_rows(results: Sequence[Result]) -> list[dict[str, object]]:
    """Each published figure of a cell that was run beside ours."""
    by_cell = {result.cell: result for result in results}
    rows: list[dict[str, object]] = []
    for cell, system, what, seconds, source in PUBLISHED:
        if cell in by_cell and system in by_cell[cell].systems:
            one = by_cell[cell].systems[system]
            run_s, step_s = one.run_ms / 1e3, one.mean_ms / 1e3
            seen = {"run": run_s, "step": step_s, "rest": step_s - run_s}[what]
            rows.append({
                "cell": str(cell), "system": system, "of": what, "paper s": f"{seconds:.2f}", "here s": f"{seen:.2f}",
                "": f"{seen / seconds - 1:+.0%}", "TFLOP/s": rate_text(one), "where": source,
            })  # fmt: skip
    return rows


def cause_row(result: Result) -> dict[str, object]:
    """What each idea brings, one after the other: the time before it over the time with it.

    Balancing: the best fixed layout under our assignment over the best one that is dealt out in turn. SP x PP: one
    layout of ours of whole sequences, whose messages hide behind attention. Then slices and V's, several shapes at
    once, another mix in each step, and strategies that HiGHS composes.
    """
    steps = (STATIC, FIXED, ONE_WHOLE, result.one_layout[1], ONE_MIX, OURS, COMPOSED)
    causes = ("balancing", "SP x PP, hidden messages", "slices and V", "mixing shapes", "changing each step", "HiGHS")
    row: dict[str, object] = {"cell": str(result.cell)}
    before = STATIC
    for cause, name in zip(causes, steps[1:], strict=True):
        if before not in result.systems:
            before = name
        known = name in result.systems and before in result.systems
        row[cause] = f"{result.systems[before].mean_ms / result.systems[name].mean_ms:.3f}" if known else "-"
        before = name if name in result.systems else before
    return row | {"over one layout": f"{result.one_layout[0]:.3f}", "best one": result.one_layout[1]}


def pays_rows(results: Sequence[Result]) -> list[dict[str, object]]:
    """Cells in which mixing shapes pays, the most first."""
    gains = sorted(((result.one_layout[0], result) for result in results), key=lambda row: -row[0])
    return [
        {"cell": str(result.cell), "over one layout": f"{gain:.3f}", "that layout": _layout(result),
         "over what is scheduled": "{:.3f} {}".format(*result.best_rival)}
        for gain, result in gains if PAYS <= gain < math.inf
    ]  # fmt: skip


def _layout(result: Result) -> str:
    return result.systems[result.one_layout[1]].configuration


def missed_aims(results: Sequence[Result]) -> list[str]:
    """The aims that these cells miss."""
    missed = []
    for first in range(0, len(results), GROUP):
        group = results[first : first + GROUP]
        gains = [gain for result in group if (gain := result.best_rival[0]) < math.inf]
        if gains and (mean := statistics.fmean(gains)) < aims.SYSTEM_NOT_SLOWER:
            cells = f"{group[0].cell} to {group[-1].cell}"
            missed.append(f"{cells}: the best that is shipped takes {mean:.3f} of our time in the mean, not >= "
                          f"{aims.SYSTEM_NOT_SLOWER}")  # fmt: skip
    missed += [
        f"{result.cell}: {name} would compute {one.tflops:.0f} TFLOP/s on each GPU, which has {most:.0f}"
        for result in results
        for name, one in result.systems.items()
        if one.tflops > (most := most_tflops(result.cell.model))
    ]
    missed += [
        f"{result.cell}: our median gap is {result.ours.gap:.3f}, not <= {aims.SYSTEM_GAP}"
        for result in results
        if result.fewest_sequences >= aims.ENOUGH_SEQUENCES and result.ours.gap > aims.SYSTEM_GAP
    ]
    return missed


def notes(results: Sequence[Result]) -> list[str]:
    """Cells that are lost, to whom, and cells whose tables promise more than jobs have reached."""
    found = []
    for result in results:
        gain, name = result.best_rival
        if gain < 1.0:
            found.append(
                f"lost: {result.cell}: {name} takes {gain:.3f} of our time ({result.systems[name].configuration})"
            )
        gain, name = result.one_layout
        if gain < 1.0:
            found.append(f"a mix loses: {result.cell}: {_layout(result)} in every step takes {gain:.3f} of our time")
        share = result.ours.tflops / most_tflops(result.cell.model)
        if share > SUSPECT:
            found.append(f"suspect: {result.cell}: the table has {share:.0%} of the peak for ours, above {SUSPECT:.0%}")
    return found


def figures(results: Sequence[Result]) -> list[dict[str, Any]]:
    """All cells for `--json`, in ms."""
    return [
        asdict(result) | {"systems": {name: _rounded(one) for name, one in result.systems.items()}}
        for result in results
    ]


def _rounded(one: Measured) -> dict[str, Any]:
    """A hundredth of a millisecond of each step is enough, and makes files of many steps a third as long."""
    return asdict(one) | {"step_ms": [round(ms, 2) for ms in one.step_ms]}


def read_figures(found: Sequence[Mapping[str, Any]]) -> list[Result]:
    """Cells as `figures` writes them. KeyError or TypeError for anything else."""
    return [
        Result(
            Cell(**one["cell"]),
            {name: Measured(**of | {"step_ms": tuple(of["step_ms"])}) for name, of in one["systems"].items()},
            one["bound_ms"], one["fewest_sequences"],
        )
        for one in found
    ]  # fmt: skip


SYSTEMS = (OURS, STATIC, "DeepSpeed", "HotSPa", "Hydraulis")  # those of the paper's figure, and ours
_FROM = Cell("7b", 16, 32768, 200_000, "CommonCrawl")
FACTORS: dict[str, tuple[int, ...]] = {
    "gpus": (8, 16, 32, 64),
    "context": (8192, 16384, 32768, 65536),
    "tokens": (50_000, 100_000, 200_000, 400_000),
}


@dataclass(frozen=True)
class Point:
    """What the systems take where one factor has a value; a system that nothing can be set up of is not in it."""

    factor: str
    value: int
    systems: dict[str, Measured]


def curves(steps: int, workers: int) -> Iterator[Point]:
    """All points, factor by factor; the cell that the curves share is run once."""
    points = [(name, value, replace(_FROM, **{name: value})) for name, values in FACTORS.items() for value in values]  # type: ignore[arg-type]
    cells = list(dict.fromkeys(cell for *_, cell in points))
    known = dict(zip(cells, measure_cells([(cell, SYSTEMS) for cell in cells], steps, workers), strict=True))
    for factor, value, cell in points:
        yield Point(factor, value, known[cell])


def curve_row(point: Point) -> dict[str, object]:
    """One line: mean and deviation of each system's steps."""
    each = {name: point.systems.get(name) for name in SYSTEMS}
    shown = {
        f"{name}, ms": f"{one.mean_ms:,.0f} ±{one.deviation_ms:,.0f}" if one else "-" for name, one in each.items()
    }
    slowest = max(one.mean_ms for one in point.systems.values())
    over_ours = f"{slowest / point.systems[OURS].mean_ms:.2f}"
    return {"changed": point.factor, "to": f"{point.value:,}", **shown, "slowest over ours": over_ours,
            "TFLOP/s of ours": f"{point.systems[OURS].tflops:.0f}"}  # fmt: skip


def curve_figures(points: Sequence[Point]) -> list[dict[str, object]]:
    """The points for `--json`: mean and deviation in ms."""
    return [
        {
            "factor": point.factor, "value": point.value,
            "ms": {name: [one.mean_ms, one.deviation_ms] for name, one in point.systems.items()},
        }
        for point in points
    ]  # fmt: skip


Row = Mapping[str, object]


def markdown(rows: Sequence[Row]) -> str:
    """A table."""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def read_results(path: Path) -> list[Result]:
    """Cells of a file that `--json` wrote."""
    return read_figures(json.loads(path.read_text(encoding="utf-8"))["cells"])


def over_row(result: Result) -> Row:
    """A cell: ours, and what others take over it."""
    gain, name = result.best_rival

    def over(*names: str) -> str:
        best = result.best_of(names)[0]
        return f"{best:.2f}" if best < 100 else "-"

    tflops = result.ours.tflops
    return {
        "cell": result.cell, "ours, ms": f"{result.ours.mean_ms:,.0f}", "TFLOP/s a GPU": f"{tflops:.0f}",
        "as jobs reach it": f"{reached(result.cell.device) * tflops:.0f}",
        "best that is shipped": f"{gain:.2f} ({name})",
        "Megatron-LM, packed, in turn": over(STATIC), "best fixed layout, balanced": over(FIXED),
        "dynamic CP as it schedules": over("packing-aware CP"), "DeepSpeed ZeRO-3 with Ulysses": over("DeepSpeed"),
        "ideal (nobody's)": over(*IDEAL), "ours, one layout": f"{result.one_layout[0]:.3f}",
    }  # fmt: skip


def mean_rows(results: Sequence[Result]) -> list[Row]:
    """Each system over all cells of a device that have it."""
    rows: list[Row] = []
    for name in dict.fromkeys(name for result in results for name in result.systems if name != OURS):
        row: dict[str, object] = {"system": name}
        for device in dict.fromkeys(result.cell.device for result in results):
            own = [result for result in results if result.cell.device == device]
            gains = sorted(gain for result in own if (gain := result.gain(name)) is not None)
            mean = sum(gains) / max(1, len(gains))
            row[device] = f"{gains[0]:.2f} / {mean:.2f} / {gains[-1]:.2f} ({len(gains)})" if gains else "-"
        rows.append(row)
    return rows


def page(results: Sequence[Result], steps: int) -> str:
    """The whole page."""
    parts = [
        "# Systems beside each other, simulated",
        f"What `python -m tools.bench_systems` computed: {len(results)} cells of {steps} steps, by tables that are "
        "published or derived, on no device. A row says model, device (A800 where none is named), GPUs, context, "
        "tokens of a step, lengths, and what else differs. All times over ours: above 1 ds-hydra is faster.",
        "## By device", "Least / mean / most over the cells (how many).", markdown(mean_rows(results)),
        "## Cells", markdown([over_row(result) for result in results]),
        "## What is lost, and what is suspect", "\n".join(f"- {line}" for line in notes(results)) or "Nothing.",
        "## Gain by cause",
        "Each column is the time before an idea over the time with it; their product is the whole gain over "
        "Megatron-LM. Balancing: the best fixed layout with sequences assigned by ours, over the best one whose packs "
        "are dealt out in turn. The last two columns: our engine with the best one layout in every step, over ours.",
        markdown([cause_row(result) for result in results]),
        "## Where a mix pays", "Cells in which one layout of our own engine takes 1.02 of the mix or more.",
        markdown(pays_rows(results)) if pays_rows(results) else "None.",
        "## Tables", markdown(device_rows()),
        f"Public runs beside them; those that no number was fitted to are {median_off():.1%} off in the median. Not "
        "comparable: " + "; ".join(f"{rows} ({why})" for rows, why in NOT_COMPARABLE.items()) + ".",
        markdown(rate_rows()),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


_MOST = 2.5  # gains from here on have the same colour
_MARKERS = "osv^DPX*<>hdp"


def draw_systems(results: Sequence[Result], folder: Path) -> list[Path]:
    """All pictures that these cells have the data for."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [_gains(results, folder / "systems_gains.png")]
    flagship = next((result for result in results if result.cell == FLAGSHIP), None)
    if flagship is not None:
        drawn.append(_steps(flagship, folder / "systems_flagship.png"))
    return drawn


def draw_curves(points: Sequence[Point], folder: Path) -> Path:
    """Mean steps over the factor that changes, each system's deviation shaded, a panel for each factor."""
    plt = pyplot()
    from matplotlib.ticker import LogLocator, NullLocator

    factors = list(dict.fromkeys(point.factor for point in points))
    figure, panels = plt.subplots(1, len(factors), figsize=(4.5 * len(factors), 3.8), layout="constrained")
    for axes, factor in zip(np.atleast_1d(panels), factors, strict=True):
        own = [point for point in points if point.factor == factor]
        for index, name in enumerate(SYSTEMS):
            there = [(point.value, point.systems[name]) for point in own if name in point.systems]
            values = [value for value, _ in there]
            mean, deviation = (
                np.array([getattr(one, figure_of) / 1e3 for _, one in there])
                for figure_of in ("mean_ms", "deviation_ms")
            )
            axes.plot(values, mean, marker=_MARKERS[index], color=COLOURS[index], label=name, linewidth=1.4)
            axes.fill_between(values, mean - deviation, mean + deviation, color=COLOURS[index], alpha=0.15)
        axes.set_xscale("log", base=2)
        axes.set_xticks([point.value for point in own], [f"{point.value:,}" for point in own], fontsize=8)
        axes.minorticks_off()
        if factor != "context":
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlabel({"gpus": "GPUs", "context": "context", "tokens": "tokens a step"}[factor])
    np.atleast_1d(panels)[0].set_ylabel("s a step, simulated")
    np.atleast_1d(panels)[0].legend(fontsize=8)
    path = folder / "systems_curves.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _gains(results: Sequence[Result], path: Path) -> Path:
    """What each rival takes over ours, a row for a cell: green where ours is faster."""
    plt = pyplot()
    names = [name for name in NAMES if name != OURS and any(name in result.systems for result in results)]
    table = np.array([[result.gain(name) or np.nan for name in names] for result in results])
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.26 * len(results)), layout="constrained")
    image = axes.imshow(np.log(table), cmap="PuOr_r", vmin=-np.log(_MOST), vmax=np.log(_MOST), aspect="auto")
    for row, column in np.ndindex(table.shape):
        if np.isfinite(table[row, column]):
            dark = abs(np.log(table[row, column])) > 0.7 * np.log(_MOST)
            axes.text(column, row, f"{table[row, column]:.2f}", ha="center", va="center", fontsize=8,
                      color="white" if dark else "black")  # fmt: skip
    axes.set_xticks(range(len(names)), names, rotation=25, ha="right", fontsize=8)
    axes.set_yticks(range(len(results)), [str(result.cell) for result in results], fontsize=8)
    axes.set_title("Mean step over that of ds-hydra: above 1 ds-hydra is faster")
    bar = figure.colorbar(image, ax=axes, fraction=0.03)
    ticks = (0.5, 0.7, 1.0, 1.4, 2.0)
    bar.set_ticks(np.log(ticks), labels=[f"{tick:g}" for tick in ticks])
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _steps(result: Result, path: Path) -> Path:
    """Mean steps of one cell with their deviation, the slowest first."""
    plt = pyplot()
    ordered = sorted(result.systems.values(), key=lambda one: -one.mean_ms)
    figure, axes = plt.subplots(figsize=(9, 0.9 + 0.42 * len(ordered)), layout="constrained")
    for row, one in enumerate(ordered):
        axes.barh(row, one.mean_ms / 1e3, xerr=one.deviation_ms / 1e3, height=0.7, capsize=2,
                  color=COLOURS[2] if one.system == OURS else COLOURS[0], alpha=0.85)  # fmt: skip
        axes.text(0.05, row, f"{one.mean_ms / 1e3:.2f} s   {one.configuration[:70]}", va="center", fontsize=7,
                  color="white")  # fmt: skip
    axes.axvline(result.bound_ms / 1e3, color="0.3", linestyle="--", linewidth=1)
    axes.text(result.bound_ms / 1e3, -0.8, "bound by GPU-seconds", fontsize=7, color="0.3")
    axes.set_yticks(range(len(ordered)), [one.system for one in ordered], fontsize=8)
    axes.set(xlabel="s a step, simulated (bars: mean and deviation)", title=str(result.cell), ylim=(len(ordered), -1.2))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


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
        found = head | {"cells": figures(results)}
        found["published"] = show_more("Published figures beside ours", published_rows(results))
        told = page(results, steps)
        print(f"\n{told}")
        points = list(curves(args.curves, args.workers)) if args.curves else []
        show_more("By GPUs, context and tokens of a step, 7B", [curve_row(point) for point in points])
        found["curves"] = curve_figures(points)
        emulated = emulated_rows(args.emulate) if args.emulate else []
        found["emulated"] = show_more("On the emulated cluster", emulated)
        if args.plots:
            (args.plots / "systems.md").write_text(told, encoding="utf-8")
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
