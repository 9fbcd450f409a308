"""Results in, a page of tables out: `benchmarks/systems.md`, and the table that a page of the documentation shows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.systems.measure import FIXED, IDEAL, OURS, STATIC
from tools.systems.published_rates import NOT_COMPARABLE, device_rows, median_off, rate_rows, reached
from tools.systems.verdicts import Result, cause_row, notes, pays_rows, read_figures

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
