"""What the systems took in, tables, aims and comparisons with published figures out. Pure: no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tools import aims
from tools.systems.cells import FLAGSHIP, Cell
from tools.systems.measure import (
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
)
from tools.systems.published_rates import reached
from tools.systems.rates import peak_tflops

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
        if one.tflops > (most := peak_tflops(result.cell.model))
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
        share = result.ours.tflops / peak_tflops(result.cell.model)
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
