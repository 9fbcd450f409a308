"""The benchmark's record in, its page in Markdown out. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def page(record: Mapping[str, Any]) -> str:
    """What `benchmarks/gpu.md` holds."""
    lines = ["# Measured on a GPU" if record["gpu"] else "# No GPU was measured", ""]
    if not record["gpu"]:
        lines += ["These figures come from a CPU and tiny shapes. They show that the parts run, and nothing else.", ""]
    elif not record["full"]:
        lines += [
            "The shapes were tiny (`--quick`): this shows that the parts run on the device, and nothing else.",
            "",
        ]
    lines += [
        f"{record['device']}; {', '.join(f'{name} {version}' for name, version in record['versions'].items())}. "
        f"Written by `python -m tools.bench_gpu` in {record['seconds']:.0f} s; {_verdict(record)}",
        "",
    ]
    for name, part in record["parts"].items():
        lines += [f"## {name}", f"{part['what']}.", ""]
        if part["status"] != "measured":
            lines += [f"Not measured: {part['status']}.", "", *_fenced(part.get("error", "")), ""]
            continue
        lines += [f"{part['summary']}.", ""]
        for table in part["tables"]:
            lines += [f"{table['title']}:", "", *_table(table["headers"], table["rows"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _verdict(record: Mapping[str, Any]) -> str:
    if record["missed"]:
        return "missed: " + "; ".join(record["missed"]) + "."
    return "all aims met." if record["gpu"] and record["full"] else "all parts ran."


def _fenced(text: str) -> list[str]:
    return ["```", *text.rstrip().splitlines()[-12:], "```"] if text else []


def _table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    def line(cells: Sequence[object]) -> str:
        # A bar in a cell would begin another cell; a kernel's name may hold one.
        shown = (f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells)
        return "| " + " | ".join(cell.replace("|", "\\|").replace("*", "\\*") for cell in shown) + " |"

    return [line(headers), "|" + " --- |" * len(headers), *(line(row) for row in rows)]
