"""What the systems took in, tables, aims and comparisons with published figures out. Pure: no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tools import aims
from tools.systems.cells import LONG_CELLS, WIDE_CELLS, Cell, all_cells
from tools.systems.long_contexts import missed_aims_of_long
from tools.systems.measure import NAMES, OURS, FIXED, STATIC, Measured
from tools.systems.rates import peak_tflops

FLAGSHIP = Cell("32b", 64, 32768, 200_000, "CommonCrawl")
SHORT_CELLS = frozenset(all_cells()) - {*LONG_CELLS, *WIDE_CELLS}  # means are over them
BALANCED = "BalancedCPScheduler"
LITTLE = 1.05  # gains over the best rival below it are named


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

    @property
    def best_rival(self) -> tuple[float, str]:
        """The least gain, and over whom; another system than ours on a rival's layout counts as none."""
        gains = [(self.gain(name), name) for name in self.systems if name not in (OURS, FIXED)]
        return min(((gain, name) for gain, name in gains if gain is not None), default=(math.inf, "nobody"))


class Published(NamedTuple):
    """A figure of a paper for one of the cells: seconds of a system's step, or of what is named."""

    cell: Cell
    system: str
    what: str  # "run" without pulls and pushes, "step" with them, "rest" for these alone
    seconds: float
    source: str


_TABLE_4 = "Hydraulis, table 4 (its mix is not stated)"
_SMALL, _MIDDLE = (Cell(model, 32, 32768, 100_000, "CommonCrawl") for model in ("7b", "32b"))
PUBLISHED = (
    Published(FLAGSHIP, FIXED, "run", 6.78, "Hydraulis, table 1, homogeneous"),
    Published(FLAGSHIP, "Hydraulis", "run", 4.29, "Hydraulis, table 1, heterogeneous"),
    Published(FLAGSHIP, "Hydraulis", "step", 5.49, "Hydraulis, table 1, end to end"),
    Published(FLAGSHIP, "Hydraulis", "rest", 1.18, "Hydraulis, table 1, O-P with overlap"),
    Published(_SMALL, "HotSPa", "rest", 1.54, f"{_TABLE_4}, switching"),
    Published(_SMALL, "HotSPa", "step", 5.86, _TABLE_4),
    Published(_SMALL, "Hydraulis", "step", 2.21, _TABLE_4),
    Published(_MIDDLE, "HotSPa", "rest", 2.17, f"{_TABLE_4}, switching"),
    Published(_MIDDLE, "HotSPa", "step", 12.21, _TABLE_4),
    Published(_MIDDLE, "Hydraulis", "step", 7.21, _TABLE_4),
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
                "over ours": f"{result.gain(name):.2f}", "TFLOP/s": rate_text(one), "gap": f"{one.gap:.2f}",
                "bubbles": f"{max(0.0, one.bubbles):.0%}",
                "waits": f"{one.waits_ms / one.mean_ms:.1%}", "bound": f"{result.bound_ms / one.mean_ms:.0%}",
                "strategies": len(one.strategies),
                "set up as": one.configuration if len(one.configuration) <= 60 else one.configuration[:57] + "...",
            })  # fmt: skip
    return rows


def rate_text(one: Measured) -> str:
    """TFLOP/s of a GPU; a dash where a file does not have it."""
    return f"{one.tflops:.0f}" if one.tflops else "-"


def cell_row(result: Result) -> dict[str, object]:
    """One line for a cell: ours, and the gain over every rival."""
    gains = {name: "-" if (gain := result.gain(name)) is None else f"{gain:.2f}" for name in NAMES[1:]}
    ours = result.ours
    return {
        "cell": str(result.cell),
        "ours ms": f"{ours.mean_ms:,.0f}",
        "TFLOP/s": rate_text(ours),
        "gap": f"{ours.gap:.2f}",
        **gains,
    }


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


def missed_aims(results: Sequence[Result]) -> list[str]:
    """The aims that these cells miss."""
    missed = [
        f"{result.cell}: {name} takes {gain:.3f} of our time, not >= {least}"
        for result in results
        for name in NAMES[1:]
        if (gain := result.gain(name)) is not None and gain < (least := _least(result.cell))
    ]
    missed += [
        f"{result.cell}: {name} would compute {one.tflops:.0f} TFLOP/s on each GPU, which has {most:.0f}"
        for result in results
        for name, one in result.systems.items()
        if one.tflops > (most := peak_tflops(result.cell.model))
    ]
    for result in results:
        gain = result.gain(STATIC)
        if result.cell == FLAGSHIP and gain is not None and gain < aims.SYSTEM_FLAGSHIP:
            missed.append(f"{result.cell}: {STATIC} takes {gain:.2f} of our time, not >= {aims.SYSTEM_FLAGSHIP}")
        gap = result.ours.gap
        if result.fewest_sequences >= aims.ENOUGH_SEQUENCES and gap > aims.SYSTEM_GAP:
            missed.append(f"{result.cell}: our median gap is {gap:.3f}, not <= {aims.SYSTEM_GAP}")
        if result.cell in LONG_CELLS:
            rivals = {name: one.step_ms for name, one in result.systems.items() if name != OURS}
            missed += missed_aims_of_long(result.cell, result.ours.step_ms, rivals, result.bound_ms)
    return missed + _missed_means(results)


def _least(cell: Cell) -> float:
    """What every rival's time over ours has to be at least."""
    return aims.SYSTEM_SHARED_KEYS if cell.keys < 1.0 and cell.context > 32768 else aims.SYSTEM_NOT_SLOWER


def _missed_means(results: Sequence[Result]) -> list[str]:
    """Aims of means over cells of 16K and 32K, where all of them were run, and of each over Megatron-Core's class."""
    asked = [("", [name], SHORT_CELLS, least) for name, least in aims.SYSTEM_MEANS.items()] + [
        (f"{model}: ", [BALANCED], frozenset(cell for cell in SHORT_CELLS if cell.model == model), least)
        for model, least in aims.SYSTEM_BALANCED.items()
    ]
    at_32k = frozenset(cell for cell in SHORT_CELLS if cell.context == 32768)
    asked.append(("32K: ", list(aims.SYSTEM_FLAT), at_32k, aims.SYSTEM_FLAT_32K))
    missed = []
    for what, names, cells, least in asked:
        of_cells = [result for result in results if result.cell in cells]
        gains = [gain for result in of_cells for name in names if (gain := result.gain(name)) is not None]
        if len(of_cells) == len(cells) and gains and (mean := statistics.fmean(gains)) < least:
            missed.append(f"{what}{' and '.join(names)} takes {mean:.3f} of our time in the mean, not >= {least}")
    for result in results:
        gain = result.gain(BALANCED)
        if result.cell in SHORT_CELLS and gain is not None and gain < aims.SYSTEM_BALANCED_EACH:
            least = aims.SYSTEM_BALANCED_EACH
            missed.append(f"{result.cell}: {BALANCED} takes {gain:.3f} of our time, not >= {least}")
    return missed


def notes(results: Sequence[Result]) -> list[str]:
    """Cells in which a rival is as fast or nearly so, in words."""
    found = []
    for result in results:
        gain, name = result.best_rival
        if gain < LITTLE:
            words = "is faster" if gain < 1.0 else "comes close"
            found.append(f"{result.cell}: {name} {words}, at {gain:.3f} of our time")
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
