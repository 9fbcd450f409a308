"""Step records in, figures and one HTML page out: predicted against measured, balance, strategies, lengths, planning.

Works after the run, from `steps.jsonl` alone: no torch, matplotlib only when a figure is drawn. A strategy keeps its
colour in every figure; colours are Okabe and Ito's, which colour-blind readers can tell apart, and strategies differ
in their markers too.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ds_hydra.plan.phase import parse_phases
from ds_hydra.report.curves import draw_learning, draw_pipelines, draw_speed
from ds_hydra.report.record import is_heterogeneous
from ds_hydra.zero_hetero.errors import ConfigError

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
Record = Mapping[str, Any]
Drawing = Callable[[Any], str]  # matplotlib's axes in; what was drawn on them, in words, out


@dataclass(frozen=True)
class Figure:
    """One drawn figure: its file, its title, and its content in words, for readers who cannot see it."""

    path: Path
    title: str
    words: str


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
    figures: list[tuple[str, str, Callable[..., str], tuple[Any, ...]]] = [
        ("learning", "Loss and learning rate", draw_learning, ()),
        ("speed", "Tokens a second", draw_speed, ()),
        ("pipelines", f"Step {shown['step']}: what each pipeline did", draw_pipelines, (shown,)),
        ("predicted_measured", "Predicted against measured step time", _scatter, ()),
        ("residuals", "Prediction error by strategy", _residuals, ()),
        ("schemes", "Measured over predicted pipeline time by scheme", _schemes, ()),
        ("balance", "Balance: slowest over mean pipeline", _balance, ()),
        ("strategies", "Strategies over the steps", _timeline, ()),
        ("lengths", "Sequence lengths", _lengths, (tuple(lengths),)),
        ("planning", "Planning time against step time", _planning, ()),
    ]
    return [(name, title, partial(_drawn, draw, records, look, extra)) for name, title, draw, extra in figures]


def _drawn(draw: Callable[..., str], records: Sequence[Record], look: _Look, extra: tuple[Any, ...], axes: Any) -> str:
    return draw(axes, records, look, *extra)


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
    (out / "index.html").write_text(page(records, figures), encoding="utf-8")
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

    def marker(self, name: str) -> str:
        return MARKERS[self.strategies.index(name) % len(MARKERS)]


def _scatter(axes: Any, records: Sequence[Record], look: _Look) -> str:
    records = foretold(records)
    if not records:
        return _nothing(axes, "nothing was predicted of these steps")
    top = 1.05 * max(max(r["expected_ms"], r["step_ms"]) for r in records)
    axes.fill_between([0, top], [0, 0.9 * top], [0, 1.1 * top], color="0.9", label="±10%")
    axes.plot([0, top], [0, top], color="0.5", linewidth=1)
    for name in look.strategies:
        chosen = [r for r in records if r["strategy"] == name]
        axes.scatter([r["step_ms"] for r in chosen], [r["expected_ms"] for r in chosen], s=16, color=look.colour(name),
                     marker=look.marker(name), label=name if chosen else None)  # fmt: skip
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
    for name in look.strategies:
        chosen = [r for r in several if r["strategy"] == name]
        axes.scatter([r["step"] for r in chosen], [r["balance"] for r in chosen], s=16,
                     color=look.colour(name), marker=look.marker(name), label=name if chosen else None)  # fmt: skip
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


def _lengths(axes: Any, records: Sequence[Record], look: _Look, lengths: tuple[int, ...]) -> str:
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


def page(records: Sequence[Record], figures: Sequence[Figure]) -> str:
    """One HTML page that shows the figures with their words; it needs nothing from the network."""
    head = heading(records)
    parts = [
        f"<section><h2>{html.escape(f.title)}</h2><p>{html.escape(f.words)}</p>"
        f'<img src="{html.escape(f.path.name)}" alt="{html.escape(f.title + ". " + f.words)}"></section>'
        for f in figures
    ]
    style = "body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}img{max-width:100%}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>ds-hydra run</title>'
        f"<style>{style}</style></head><body><h1>ds-hydra run</h1><p>{html.escape(head)}</p>"
        + "".join(parts) + "</body></html>\n"
    )  # fmt: skip


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
