"""Results in, pictures out: gains by cell and rival, and one cell's steps by system. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ds_hydra.report.plots import COLOURS, pyplot
from tools.systems.cells import FLAGSHIP
from tools.systems.curves import SYSTEMS, Point
from tools.systems.measure import NAMES, OURS
from tools.systems.verdicts import Result

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
