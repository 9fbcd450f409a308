"""Spans of ranks in, a picture of what every rank does when, out. Needs matplotlib; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_hydra.report.plots import pyplot
from ds_hydra.report.trace import Kind, Span, Stream
from ds_hydra.zero_hetero.errors import ConfigError

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS: dict[Kind, str] = {
    "forward": "#56B4E9", "backward": "#0072B2", "pull": "#E69F00", "wait": "#DDDDDD", "push": "#CC79A7",
    "norm": "#F0E442", "optimizer": "#009E73", "control": "#999999", "receive": "#D55E00", "send": "#999999",
}  # fmt: skip
_LABELS: dict[Kind, str] = {"wait": "waits for the slowest pipeline"}
_DRAWN: tuple[Stream, ...] = ("compute", "links out", "links in", "twins out", "twins in")
_HEIGHT = {"compute": 0.62} | dict.fromkeys(_DRAWN[1:], 0.07)  # of a rank's row
_BASE = {"compute": 0.33, "links out": 0.25, "links in": 0.17, "twins out": 0.1, "twins in": 0.02}
MOST_ROWS = 96
_NAMED, _MOST_NAMES = ("forward", "backward"), 3000


def draw_gantt(path: str | Path, sources: Mapping[str, Iterable[Span]], title: str, *, together: bool = False) -> str:
    """Draw one row for each rank and source, in ms, and return the picture in words.

    Under each rank stand its sources; with `together` all ranks of a source, and then those of the next.

    Computing and waits stand in the wide bar, with micro-batches named where there is room; below it, what leaves and
    what comes over the links. ConfigError when matplotlib is missing or the file cannot be written.
    """
    plt = pyplot()
    rows = _rows(sources, together)
    if len(rows) > MOST_ROWS:
        raise ConfigError(f"a picture of {len(rows)} rows cannot be read; draw {MOST_ROWS} ranks at most")
    everything = [span for spans in rows.values() for span in spans]
    last = max((span.stop_s for span in everything), default=0.0)
    used = {span.kind for span in everything}
    figure, axes = plt.subplots(figsize=(14, 1.2 + max(2.0, 0.34 * len(rows))), layout="constrained")
    named = sum(span.kind in _NAMED and span.stream == "compute" for span in everything) <= _MOST_NAMES
    for row, spans in enumerate(rows.values()):
        _draw_row(axes, row, spans, 1e3 * last, named=named)
    axes.set(xlim=(0, 1e3 * last * 1.001 or 1), ylim=(len(rows), 0), xlabel="ms", ylabel="rank", title=title)
    axes.set_yticks([row + 0.5 for row in range(len(rows))], list(rows))
    axes.tick_params(axis="y", labelsize=8, length=0)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for kind, colour in COLOURS.items() if kind in used]
    labels = [_LABELS.get(kind, kind) for kind in COLOURS if kind in used]
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize=8, frameon=False)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from error
    finally:
        plt.close(figure)
    return f"{len(rows)} rows over {1e3 * last:.1f} ms"


def _rows(sources: Mapping[str, Iterable[Span]], together: bool) -> dict[str, list[Span]]:
    """Drawn spans by the row's label: ranks in order, and under each rank its sources, or the other way round."""
    found: dict[tuple[int, int], list[Span]] = {}
    for index, spans in enumerate(sources.values()):
        for span in spans:
            if span.stream in _DRAWN and span.stop_s > span.start_s:
                found.setdefault((span.rank, index), []).append(span)
    names = list(sources)
    order = sorted(found, key=lambda at: at[::-1] if together else at)
    return {f"{rank} {names[index]}" if len(names) > 1 else str(rank): found[rank, index] for rank, index in order}


def _draw_row(axes: Any, row: int, spans: Sequence[Span], last_ms: float, *, named: bool) -> None:
    """Bars of one row."""
    for stream in _DRAWN:
        bottom = row + 1 - _BASE[stream] - _HEIGHT[stream]
        for kind, colour in COLOURS.items():
            drawn = [span for span in spans if span.stream == stream and span.kind == kind]
            bars = [(1e3 * span.start_s, 1e3 * (span.stop_s - span.start_s)) for span in drawn]
            # A wait for a pull may lie within a forward: it is drawn above it.
            over = 3 if kind == "pull" else 2
            line = 0.3 if stream == "compute" else 0.0
            axes.broken_barh(
                bars, (bottom, _HEIGHT[stream]), facecolors=colour, edgecolors="white", linewidth=line, zorder=over
            )
            if named and stream == "compute" and kind in _NAMED:
                _write_names(axes, drawn, bars, bottom + _HEIGHT[stream] / 2, last_ms)


def _write_names(
    axes: Any, drawn: Sequence[Span], bars: Sequence[tuple[float, float]], middle: float, last_ms: float
) -> None:
    """Micro-batches on the bars that are wide enough for their names."""
    for span, (start, width) in zip(drawn, bars, strict=True):
        text = span.name.split(" ")[0]
        if width > 0.009 * len(text) * last_ms:
            colour = "white" if span.kind == "backward" else "black"
            axes.text(start + width / 2, middle, text, ha="center", va="center", fontsize=6.5, color=colour, zorder=4)
