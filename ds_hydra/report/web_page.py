"""Drawings with their words in, one HTML page that needs nothing else out. Needs matplotlib; no torch.

Drawings are SVG within the page. Text and axes take the page's own colour, so that they are read on light and on dark.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_hydra.report.plots import pyplot
from ds_hydra.zero_hetero.errors import ConfigError

_INK = "#010203"  # replaced by the page's colour of text; nothing else is drawn in it
_RC = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor"), _INK),
    "xtick.color": _INK, "ytick.color": _INK,
    "svg.fonttype": "none", "svg.hashsalt": "ds-hydra", "legend.frameon": False, "axes.facecolor": "none",
    "figure.facecolor": "none", "savefig.facecolor": "none", "font.family": "sans-serif", "font.size": 10,
}  # fmt: skip
_STYLE = """
:root{color-scheme:light dark;--ink:#1c2733;--paper:#fff;--card:#f5f7f9;--line:#d5dce3}
@media(prefers-color-scheme:dark){:root{--ink:#e4e9ee;--paper:#14181d;--card:#1d232a;--line:#38424d}svg{filter:brightness(1.25)}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
body{max-width:64rem;margin:0 auto;padding:1rem}
section{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.5rem 1rem;margin:1rem 0}
h1{margin:.5rem 0}h2{font-size:1.1rem;margin:.5rem 0}
svg{width:100%;height:auto;font-family:system-ui,sans-serif}
.wide{overflow-x:auto}.wide svg{min-width:26rem}
table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:left}
td:nth-child(n+2){text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
""".strip()


@dataclass(frozen=True)
class Section:
    """A part of the page: a drawing as SVG, or "", and a table, or none."""

    title: str
    words: str
    svg: str = ""
    table: Sequence[Sequence[str]] = ()  # the first row is the heads


def drawn(title: str, draw: Callable[[Any], str], height: float = 3.8) -> Section:
    """A section with what `draw` puts on the axes that it is given; it returns that in words."""
    plt = pyplot()
    with plt.rc_context(_RC):
        figure, axes = plt.subplots(figsize=(8.0, height), layout="constrained")
        try:
            words = draw(axes)
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        finally:
            plt.close(figure)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    # matplotlib names every figure's groups alike, and a page may have a name once.
    svg = re.sub(r' id="(figure|axes|patch|matplotlib|text|line2d|PathCollection|legend|LineCollection|PolyCollection|'
                 r'xtick|ytick|FillBetweenPolyCollection|QuadMesh)[\w.]*"', "", svg)  # fmt: skip
    label = html.escape(f"{title}. {words}", quote=True)
    return Section(title, words, svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1))


def page(title: str, head: str, sections: Sequence[Section]) -> str:
    """The page as text."""
    parts = []
    for one in sections:
        rows = [
            "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
            for tag, row in (("th" if number == 0 else "td", row) for number, row in enumerate(one.table))
        ]
        table = f"<table>{''.join(rows)}</table>" if rows else ""
        svg = f'<div class="wide">{one.svg}</div>' if one.svg else ""
        parts.append(f"<section><h2>{html.escape(one.title)}</h2><p>{html.escape(one.words)}</p>{table}{svg}</section>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1><p>{html.escape(head)}</p>"
        + "".join(parts) + "</body></html>\n"
    )  # fmt: skip


def write_page(path: Path, title: str, head: str, sections: Sequence[Section]) -> None:
    """Write it; ConfigError where that cannot be done."""
    try:
        path.write_text(page(title, head, sections), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the page {path}: {error.strerror}") from error
