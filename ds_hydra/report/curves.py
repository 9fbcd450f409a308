"""Step records in; what training did over time, and one step's pipelines, drawn on given axes, out. Needs matplotlib.

Each function draws on matplotlib axes and returns the drawing in words; `plots.draw_report` calls them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import median
from typing import Any

from ds_hydra.plan.phase import parse_phases

Record = Mapping[str, Any]
_LOSS, _RATE, _WAIT, _COMPUTE, _IDLE = "#0072B2", "#E69F00", "#D55E00", "#009E73", "0.85"
_SMOOTHED = 9  # steps of a running median


def running_median(values: Sequence[float], width: int = _SMOOTHED) -> list[float]:
    """For each value the median of it and those before it, `width` in all where there are so many."""
    return [median(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


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


def draw_learning(axes: Any, records: Sequence[Record], look: Any) -> str:
    """Loss by step with its running median, and the learning rate."""
    known = [r for r in records if r.get("loss") is not None]
    if not known:
        axes.text(0.5, 0.5, "the records hold no losses", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return "Nothing to draw: the records hold no losses."
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


def draw_speed(axes: Any, records: Sequence[Record], look: Any) -> str:
    """Tokens a second by step, and the share of each step that ranks waited for the slowest pipeline."""
    timed = [r for r in records if r["step_ms"] > 0]
    rate = [1e3 * r["num_tokens"] / r["step_ms"] for r in timed]
    for name in look.strategies:
        own = [(r["step"], value) for r, value in zip(timed, rate, strict=True) if r["strategy"] == name]
        axes.scatter([step for step, _ in own], [value for _, value in own], s=16, color=look.colour(name),
                     marker=look.marker(name), label=name)  # fmt: skip
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


def draw_pipelines(axes: Any, records: Sequence[Record], look: Any, shown: Record) -> str:
    """One step: for every pipeline, phase after phase, how long it ran, and how long its stages computed."""
    names = [str(pipeline) for shape in parse_phases(shown["strategy"]) for pipeline in shape.pipelines]
    ran = [float(ms) for ms in shown.get("pipeline_ms") or ()]
    if len(ran) != len(names):
        axes.text(0.5, 0.5, "the record has no times of pipelines", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return "Nothing to draw: the record has no times of pipelines."
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
