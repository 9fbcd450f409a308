"""How systems scale in GPUs, context and tokens of a step (Hydraulis, figure 14). Pure: no torch.

One of the three changes at a time, from a 7B model on 16 GPUs, a context of 32K and 200K tokens a step, web-like
lengths. The paper prints no figures of its curves, only their shapes: so they stand here without one beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tools.systems.cells import Cell
from tools.systems.measure import OURS, STATIC, Measured, measure_cells

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
