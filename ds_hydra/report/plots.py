"""Figures of a run: predicted against measured, balance, lengths, what ranks do; and HTML pages. No torch.

Works after the run, from `steps.jsonl` alone; matplotlib is imported when a figure is drawn. A strategy keeps its
colour in every figure; colours are Okabe and Ito's, which colour-blind readers can tell apart, and strategies differ
in their markers too.

Each function draws on matplotlib axes and returns the drawing in words; `draw_report` calls them. A page needs
nothing from the network. Drawings are SVG within it, whose text and axes take the page's own colour, so that they are
read on light and on dark; or PNG files beside it.
"""

from __future__ import annotations

import html
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from ds_hydra.plan.step_plan import parse_phases
from ds_hydra.report.record import is_heterogeneous
from ds_hydra.report.trace import Kind, Span, Stream
from ds_hydra.zero_hetero.errors import ConfigError

Record = Mapping[str, Any]
_LOSS, _RATE, _WAIT, _COMPUTE, _IDLE = "#0072B2", "#E69F00", "#D55E00", "#009E73", "0.85"
_SMOOTHED = 9  # steps of a running median


def running_median(values: Sequence[float]) -> list[float]:
    """For each value the median of it and those before it, _SMOOTHED in all where there are so many."""
    return [median(values[max(0, end - _SMOOTHED) : end]) for end in range(1, len(values) + 1)]


def ranks_of(record: Record) -> int:
    """How many ranks trained a step: all are in its strategy."""
    return parse_phases(record["strategy"])[0].num_ranks


def changes_of_ranks(records: Sequence[Record]) -> list[tuple[int, int]]:
    """(step, ranks) of the first step, and of each that other ranks trained than the one before."""
    counts = [ranks_of(record) for record in records]
    pairs = zip(records, counts, [0, *counts], strict=False)
    return [(record["step"], now) for record, now, before in pairs if now != before]


def mark_ranks(axes: Any, records: Sequence[Record]) -> str:
    """A line at each step from which on other ranks trained; the changes in words, empty for none."""
    first, *changes = changes_of_ranks(records) or [(0, 0)]
    for step, ranks in changes:
        axes.axvline(step, color="0.4", linewidth=0.8, linestyle=":")
        axes.annotate(f"{ranks} ranks", (step, 0.99), xycoords=("data", "axes fraction"), rotation=90, fontsize=7,
                      ha="right", va="top", color="0.3")  # fmt: skip
    told = ", ".join(f"{ranks} from step {step}" for step, ranks in changes)
    return f" {first[1]} ranks trained at first, {told}." if changes else ""


def draw_learning(axes: Any, records: Sequence[Record], look: _Look) -> str:
    """Loss by step with its running median, and the learning rate."""
    known = [r for r in records if r.get("loss") is not None]
    if not known:
        return _nothing(axes, "the records hold no losses")
    steps, losses = [r["step"] for r in known], [float(r["loss"]) for r in known]
    axes.plot(steps, losses, color=_LOSS, linewidth=0.8, alpha=0.5, label="loss")
    axes.plot(steps, running_median(losses), color=_LOSS, linewidth=1.8, label=f"its median over {_SMOOTHED} steps")
    axes.set(xlabel="step", ylabel="loss")
    rates = axes.twinx()
    rates.plot([r["step"] for r in records], [r.get("learning_rate") or 0.0 for r in records], color=_RATE,
               linewidth=1.2, linestyle="--", label="learning rate")  # fmt: skip
    rates.set(ylabel="learning rate (dashed)", ylim=(0, None))
    skipped = sum(bool(r.get("skipped")) for r in records)
    axes.legend(fontsize=8)
    went = f"The loss went from {losses[0]:.3f} to {losses[-1]:.3f} in {len(known)} steps; {skipped} were skipped."
    return went + mark_ranks(axes, records)


def draw_speed(axes: Any, records: Sequence[Record], look: _Look) -> str:
    """Tokens a second by step, and the share of each step that ranks waited for the slowest pipeline."""
    timed = [r for r in records if r["step_ms"] > 0]
    rate = [1e3 * r["num_tokens"] / r["step_ms"] for r in timed]
    look.scatter(axes, timed, [r["step"] for r in timed], rate)
    axes.plot([r["step"] for r in timed], running_median(rate), color="0.3", linewidth=1)
    axes.set(xlabel="step", ylabel="tokens a second", ylim=(0, 1.15 * max(rate, default=1.0)))
    axes.legend(fontsize=8, loc="lower right")
    waits = [100.0 * (r.get("slowest_wait_ms") or 0.0) / r["step_ms"] for r in timed]
    shares = axes.twinx()
    shares.plot([r["step"] for r in timed], waits, color=_WAIT, linewidth=1, linestyle=":")
    shares.set(ylabel="% waited for the slowest pipeline (dotted)", ylim=(0, 100))
    return (
        f"{median(rate):,.0f} tokens a second in the median; ranks waited for the slowest pipeline for "
        f"{median(waits):.0f} % of a step.{mark_ranks(axes, records)}"
    )


def draw_pipelines(axes: Any, records: Sequence[Record], look: _Look, shown: Record) -> str:
    """One step: for every pipeline, phase after phase, how long it ran, and how long its stages computed."""
    names = pipeline_schemes(shown["strategy"])
    ran = [float(ms) for ms in shown.get("pipeline_ms") or ()]
    if len(ran) != len(names):
        return _nothing(axes, "the record has no times of pipelines")
    begins = _begins(ran, shown.get("num_pipelines") or (len(ran),))
    stages: Sequence[Sequence[float]] = shown.get("stage_ms") or [()] * len(ran)
    end = max(begin + ms for begin, ms in zip(begins, ran, strict=True))
    for row, (begin, ms, computing) in enumerate(zip(begins, ran, stages, strict=True)):
        axes.broken_barh([(begin, ms)], (row + 0.1, 0.8), facecolors=_IDLE)
        # Stages work side by side; each has a line of the row, as long as it computed.
        each = 0.8 / max(1, len(computing))
        for index, busy in enumerate(computing):
            axes.broken_barh([(begin, float(busy))], (row + 0.1 + index * each, 0.9 * each), facecolors=_COMPUTE)
    axes.set_yticks([row + 0.5 for row in range(len(names))], names, fontsize=8)
    axes.set(xlabel="ms (green: a stage computes; grey: its pipeline runs)", xlim=(0, 1.02 * end), ylim=(len(names), 0))
    slowest = max(range(len(ran)), key=ran.__getitem__)
    longest = f"the slowest, {names[slowest]}, ran for {ran[slowest]:.0f} ms"
    return f"{len(ran)} pipelines; {longest}, the fastest for {min(ran):.0f}."


def _begins(ran: Sequence[float], counts: Sequence[int]) -> list[float]:
    """When each pipeline begins, if phases follow each other without a pause."""
    begins: list[float] = []
    times, begin = iter(ran), 0.0
    for count in counts:
        of_phase = list(islice(times, count))
        begins += [begin] * len(of_phase)
        begin += max(of_phase, default=0.0)
    return begins


COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
Drawing = Callable[[Any], str]  # matplotlib's axes in; what was drawn on them, in words, out


@dataclass(frozen=True)
class Figure:
    """One drawn figure: its file, its title, and its content in words, for readers who cannot see it."""

    path: Path
    title: str
    words: str

    @property
    def image(self) -> str:
        """What shows it on a page in the same folder."""
        return f'<img src="{html.escape(self.path.name)}" alt="{html.escape(self.title + ". " + self.words)}">'


def read_steps(path: str | Path) -> tuple[list[dict[str, Any]], int]:
    """Records of a steps file in order, and how many broken lines were left out.

    If a step is there twice, because a run was resumed before it, its last record counts. ConfigError for a file
    without any record.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the steps file {path}: {error}") from error
    steps: dict[int, dict[str, Any]] = {}
    broken = 0
    for line in filter(str.strip, lines):
        try:
            record = json.loads(line)
            steps[int(record["step"])] = {**record, "step_ms": float(record["step_ms"])}
        except (ValueError, KeyError, TypeError):
            broken += 1
    if not steps:
        raise ConfigError(f"{path} holds no step records: give the steps_file of a run (hydra.steps_file)")
    return [steps[step] for step in sorted(steps)], broken


def foretold(records: Sequence[Record]) -> list[Record]:
    """Those of which something was expected: a job without a measured cost table learns it in its first steps."""
    return [r for r in records if r.get("expected_ms") is not None and r["step_ms"] > 0]


def relative_errors(records: Sequence[Record], key: str = "expected_ms") -> list[float]:
    """(predicted - measured) / measured of each step that has the prediction `key`."""
    return [float(r[key]) / r["step_ms"] - 1.0 for r in records if r.get(key) is not None and r["step_ms"] > 0]


def summarise(errors: Sequence[float]) -> tuple[float, float]:
    """Median and 90th percentile of the errors' absolute values; both NaN if there are no errors."""
    if not errors:
        return math.nan, math.nan
    ordered = sorted(abs(error) for error in errors)
    return median(ordered), ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]


def drawings_of(
    records: Sequence[Record], lengths: Sequence[int] = (), step: int | None = None
) -> list[tuple[str, str, Drawing]]:
    """(name, title, what draws on given axes and returns the drawing in words) of every figure.

    ConfigError when there is no record of `step`.
    """
    shown = next((r for r in records if r["step"] == step), None) if step is not None else records[-1]
    if shown is None:
        raise ConfigError(f"there is no record of step {step}: there are {records[0]['step']} to {records[-1]['step']}")
    look = _Look.of(records)
    figures: list[tuple[str, str, Callable[..., str]]] = [
        ("learning", "Loss and learning rate", draw_learning),
        ("speed", "Tokens a second", draw_speed),
        ("pipelines", f"Step {shown['step']}: what each pipeline did", partial(draw_pipelines, shown=shown)),
        ("predicted_measured", "Predicted against measured step time", _scatter),
        ("residuals", "Prediction error by strategy", _residuals),
        ("schemes", "Measured over predicted pipeline time by scheme", _schemes),
        ("balance", "Balance: slowest over mean pipeline", _balance),
        ("strategies", "Strategies over the steps", _timeline),
        ("lengths", "Sequence lengths", partial(_lengths, lengths=lengths)),
        ("planning", "Planning time against step time", _planning),
    ]
    return [(name, title, partial(draw, records=records, look=look)) for name, title, draw in figures]


def draw_report(
    records: Sequence[Record], folder: str | Path, lengths: Sequence[int] = (), step: int | None = None
) -> list[Figure]:
    """Draw every figure that the records have the data for into `folder`, and index.html. Returns what was drawn.

    `lengths` (tokens, of all sequences) draws the histogram; without it the steps' means are drawn. `step` is the one
    whose pipelines are drawn; ConfigError when it is not there, the last one when none is named.
    """
    drawings = drawings_of(records, lengths, step)
    plt = pyplot()
    out = Path(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {out}: {error.strerror}") from error
    figures: list[Figure] = []
    for name, title, draw in drawings:
        figure, axes = plt.subplots(figsize=(8.0, 4.2), layout="constrained")
        try:
            words = draw(axes)
            axes.set_title(title)
            path = out / f"{name}.png"
            figure.savefig(path, dpi=110)
        finally:
            plt.close(figure)
        figures.append(Figure(path, title, words))
    sections = [Section(one.title, one.words, one.image) for one in figures]
    write_page(out / "index.html", "ds-hydra run", heading(records), sections)
    return figures


@dataclass(frozen=True)
class _Look:
    """Colour and marker of each strategy, most used first."""

    strategies: tuple[str, ...]

    @classmethod
    def of(cls, records: Sequence[Record]) -> _Look:
        names = [r["strategy"] for r in records]
        return cls(tuple(sorted(dict.fromkeys(names), key=lambda name: (-names.count(name), name))))

    def colour(self, name: str) -> str:
        return COLOURS[self.strategies.index(name) % len(COLOURS)]

    def scatter(self, axes: Any, records: Sequence[Record], x: Sequence[float], y: Sequence[float]) -> None:
        """A point of each record, in the look of its strategy."""
        for number, name in enumerate(self.strategies):
            own = [at for at, record in enumerate(records) if record["strategy"] == name]
            axes.scatter([x[at] for at in own], [y[at] for at in own], s=16, color=self.colour(name),
                         marker=MARKERS[number % len(MARKERS)], label=name if own else None)  # fmt: skip


def _scatter(axes: Any, records: Sequence[Record], look: _Look) -> str:
    records = foretold(records)
    if not records:
        return _nothing(axes, "nothing was predicted of these steps")
    top = 1.05 * max(max(r["expected_ms"], r["step_ms"]) for r in records)
    axes.fill_between([0, top], [0, 0.9 * top], [0, 1.1 * top], color="0.9", label="±10%")
    axes.plot([0, top], [0, top], color="0.5", linewidth=1)
    look.scatter(axes, records, [r["step_ms"] for r in records], [r["expected_ms"] for r in records])
    axes.set(xlabel="measured step time, ms", ylabel="predicted step time, ms", xlim=(0, top), ylim=(0, top))
    axes.legend(fontsize=8)
    middle, high = summarise(relative_errors(records))
    return f"{len(records)} steps; the error's median is {middle:.1%}, its 90th percentile {high:.1%}."


def _residuals(axes: Any, records: Sequence[Record], look: _Look) -> str:
    errors = {
        name: [100.0 * error for error in relative_errors([r for r in records if r["strategy"] == name])]
        for name in look.strategies
    }
    return _boxes(axes, errors, look.colour, "predicted less measured, % of measured", 0.0)


def _schemes(axes: Any, records: Sequence[Record], look: _Look) -> str:
    ratios: dict[str, list[float]] = {}
    for r in records:
        mine_of, measured_of = r.get("predicted_pipeline_ms") or (), r.get("pipeline_ms") or ()
        for scheme, mine, measured in zip(pipeline_schemes(r["strategy"]), mine_of, measured_of, strict=False):
            if mine and measured:
                ratios.setdefault(scheme, []).append(measured / mine)
    names = list(ratios)
    return _boxes(axes, ratios, lambda name: COLOURS[names.index(name) % len(COLOURS)], "measured / predicted", 1.0)


def _boxes(
    axes: Any, samples: Mapping[str, Sequence[float]], colour: Callable[[str], str], label: str, level: float
) -> str:
    if not any(samples.values()):
        return _nothing(axes, "the records hold no such predictions")
    names = [name for name, values in samples.items() if values]
    boxes = axes.boxplot([samples[name] for name in names], orientation="horizontal", patch_artist=True, widths=0.6)
    for patch, name in zip(boxes["boxes"], names, strict=True):
        patch.set_facecolor(colour(name))
        patch.set_alpha(0.6)
    axes.axvline(level, color="0.4", linewidth=1)
    axes.set_yticks(range(1, len(names) + 1), [f"{name} ({len(samples[name])})" for name in names])
    axes.set_xlabel(label)
    return "; ".join(f"{name}: median {median(samples[name]):.3g}" for name in names) + "."


def _balance(axes: Any, records: Sequence[Record], look: _Look) -> str:
    several = [r for r in records if len(r.get("pipeline_ms") or ()) > 1]
    if not several:
        return _nothing(axes, "every step ran a single pipeline")
    look.scatter(axes, several, [r["step"] for r in several], [r["balance"] for r in several])
    axes.axhline(1.0, color="0.4", linewidth=1)
    axes.set(xlabel="step", ylabel="slowest / mean pipeline time (1 is perfect)")
    axes.legend(fontsize=8)
    middle = median(r["balance"] for r in several)
    return f"The median over {len(several)} steps with several pipelines is {middle:.2f}."


def _timeline(axes: Any, records: Sequence[Record], look: _Look) -> str:
    for row, name in enumerate(look.strategies):
        at = [r["step"] for r in records if r["strategy"] == name]
        axes.broken_barh([(step - 0.5, 1.0) for step in at], (row - 0.4, 0.8), color=look.colour(name))
    axes.set_yticks(range(len(look.strategies)), look.strategies)
    axes.set(xlabel="step", xlim=(records[0]["step"] - 0.5, records[-1]["step"] + 0.5))
    tokens = axes.twinx()
    tokens.plot([r["step"] for r in records], [r["num_tokens"] for r in records], color="0.3", linewidth=1)
    tokens.set_ylabel("tokens of the step (line)")
    tokens.set_ylim(0, 1.3 * max(r["num_tokens"] for r in records))
    changes = sum(bool(r.get("changed")) for r in records)
    mixed = sum(is_heterogeneous(r["strategy"]) for r in records)
    return f"{len(look.strategies)} strategies, {changes} changes, {mixed} of {len(records)} steps heterogeneous."


def _lengths(axes: Any, records: Sequence[Record], look: _Look, lengths: Sequence[int]) -> str:
    kind, values = "sequences", [n for n in lengths if n > 0]
    if not values:
        kind = "steps' mean lengths"
        values = [max(1, round(r["num_tokens"] / max(1, r["num_sequences"]))) for r in records]
    low, high = math.log2(min(values)), math.log2(max(values) + 1)
    edges = [2 ** (low + (high - low) * i / 24) for i in range(25)]
    axes.hist(values, bins=edges, color=COLOURS[0], alpha=0.9, label=f"{kind}, share",
              weights=[1.0 / len(values)] * len(values))  # fmt: skip
    axes.hist(values, bins=edges, histtype="step", hatch="//", color=COLOURS[1], label="tokens, share",
              weights=[v / sum(values) for v in values])  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set(xlabel="length, tokens", ylabel="share")
    axes.legend(fontsize=8)
    return f"{len(values)} {kind}: median {median(values):.0f} tokens, longest {max(values)}."


def _planning(axes: Any, records: Sequence[Record], look: _Look) -> str:
    hidden = [r for r in records if r.get("planning_hidden")]
    waited = [r for r in records if not r.get("planning_hidden")]
    for chosen, colour, marker, label in ((hidden, COLOURS[2], "o", "hidden"), (waited, COLOURS[5], "s", "waited for")):
        axes.scatter([r["step"] for r in chosen], [max(r["planning_ms"], 0.01) for r in chosen], s=16, color=colour,
                     marker=marker, label=f"planning, {label}")  # fmt: skip
    axes.plot([r["step"] for r in records], [r["step_ms"] for r in records], color="0.3", linewidth=1, label="step")
    axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="ms")
    axes.legend(fontsize=8)
    return (
        f"Planning took {median(r['planning_ms'] for r in records):.1f} ms in the median and was hidden in "
        f"{len(hidden)} of {len(records)} steps; a step took {median(r['step_ms'] for r in records):.0f} ms."
    )


def _nothing(axes: Any, reason: str) -> str:
    axes.text(0.5, 0.5, reason, ha="center", va="center", transform=axes.transAxes)
    axes.set_axis_off()
    return f"Nothing to draw: {reason}."


def pipeline_schemes(strategy: str) -> list[str]:
    """Text of each pipeline's shape of a strategy, in rank order, phase after phase."""
    return [str(pipeline) for shape in parse_phases(strategy) for pipeline in shape.pipelines]


def heading(records: Sequence[Record]) -> str:
    """A run in one line."""
    tokens, seconds = sum(r["num_tokens"] for r in records), sum(r["step_ms"] for r in records) / 1e3
    middle, high = summarise(relative_errors(records))
    error = f"prediction error median {middle:.1%}, p90 {high:.1%}" if middle == middle else "nothing was predicted"
    return f"{len(records)} steps, {tokens:,} tokens in {seconds:.1f} s; {error}"


def pyplot() -> Any:
    """matplotlib's pyplot, drawing to files. ConfigError where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("figures need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOUR_OF: dict[Kind, str] = {
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
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for kind, colour in _COLOUR_OF.items() if kind in used]
    labels = [_LABELS.get(kind, kind) for kind in _COLOUR_OF if kind in used]
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
        for kind, colour in _COLOUR_OF.items():
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
img{max-width:100%}svg{width:100%;height:auto;font-family:system-ui,sans-serif}
.wide{overflow-x:auto}.wide svg{min-width:26rem}
table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:left}
td:nth-child(n+2){text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
""".strip()


@dataclass(frozen=True)
class Section:
    """A part of the page: a drawing as SVG or an image, or "", and a table, or none."""

    title: str
    words: str
    drawing: str = ""
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
        svg = f'<div class="wide">{one.drawing}</div>' if one.drawing else ""
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
