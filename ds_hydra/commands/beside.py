"""What a step takes under layouts that other systems would run, as rows and as drawings. Pure but for matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from ds_hydra.costs.cost_table import CostTable, TableFile
from ds_hydra.planner import PhasedPlanner, PlannerOptions
from ds_hydra.planner.fixed_layout import layouts_by_length
from ds_hydra.rivals.costs import NODE, JobSetting, OwnModel, Recomputed
from ds_hydra.rivals.preview import Messages, other_systems
from ds_hydra.simulate.links import LinkModel

OURS = "ds-hydra"
_BAR, _OURS, _MARK = "#56B4E9", "#009E73", "#D55E00"
_OTHERS = ("#E69F00", _BAR, "#CC79A7", "#0072B2", _MARK, "#666666", "#F0E442")


def rivals(table: CostTable, num_ranks: int, batches: Sequence[Sequence[int]], longest: int) -> dict[str, list[float]]:
    """ms of each batch's computing by how other systems run it, without those of which nothing holds `longest`."""
    model = OwnModel.of(TableFile(table), LinkModel(NODE), forms=(Recomputed.NOTHING,))  # as the run has it
    setting = JobSetting(model, num_ranks, longest, max(map(sum, batches)))
    systems = other_systems(setting, batches, Messages(None, setting.tokens))
    found = {f"{name}: {one.layout}": one.step_ms.tolist() for name, one in systems}
    if found and (phases := layouts_by_length(table, num_ranks, longest)):
        switching = PhasedPlanner(table, phases, PlannerOptions())
        name = " then ".join(map(str, phases)) + ", as HotSPa switches"
        found[name] = [switching.plan(0, range(len(batch)), batch).predicted_ms for batch in batches]
    return found


def rows(times: Mapping[str, Sequence[float]]) -> list[list[str]]:
    """A table of mean times; the last is what the others are compared with."""
    ours = fmean(list(times.values())[-1])
    told = [[name, f"{fmean(ms):,.0f} ms", f"{fmean(ms) / ours:.2f}"] for name, ms in times.items()]
    return [["what runs the steps", "mean step", "times as long"], *told]


def draw_means(axes: Any, times: Mapping[str, Sequence[float]]) -> str:
    """A bar of each mean; ours is the last."""
    means = [fmean(ms) for ms in times.values()]
    colours = [_BAR] * (len(means) - 1) + [_OURS]
    axes.barh(range(len(means)), means, color=colours, height=0.6)
    for row, (name, mean) in enumerate(zip(times, means, strict=True)):
        axes.text(0, row - 0.36, name, fontsize=9, va="bottom")
        axes.text(mean, row, f" {mean:,.0f} ms", fontsize=9, va="center")
    axes.set(ylim=(len(means) - 0.5, -0.7), xlim=(0, 1.18 * max(means)), xlabel="ms of a step, mean")
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    least = min(mean for name, mean in zip(times, means, strict=True) if not name.startswith(OURS))
    return f"The fastest of the others takes {least / means[-1]:.2f} times as long as ds-hydra."


def draw_steps(axes: Any, times: Mapping[str, Sequence[float]], steps: Sequence[int]) -> str:
    """A line of each over the steps; ours, the last, is the thick one."""
    last = list(times)[-1]
    for number, (name, ms) in enumerate(times.items()):
        colour, width = (_OURS, 2.2) if name == last else (_OTHERS[number % len(_OTHERS)], 1.3)
        axes.plot(steps, ms, color=colour, linewidth=width, label=name)
    axes.set(xlabel="step", ylabel="ms", ylim=(0, (1.2 + 0.12 * len(times)) * max(max(ms) for ms in times.values())))
    axes.legend(fontsize=8, loc="upper left")
    return f"{len(steps)} steps; the thick line is ds-hydra."


def draw_lengths(axes: Any, lengths: Sequence[int], table: CostTable | None = None) -> str:
    """Shares of sequences and of tokens by length, with every MaxLen."""
    import numpy as np

    values = np.asarray(lengths)
    edges = np.geomspace(max(1, values.min()), values.max() + 1, 32)
    for weights, name, colour in ((None, "sequences", _BAR), (values, "tokens", "#E69F00")):
        heights, _ = np.histogram(values, bins=edges, weights=weights)
        axes.stairs(heights / heights.sum(), edges, label=f"{name}, share", color=colour, fill=weights is None,
                    alpha=0.8)  # fmt: skip
    top = axes.get_ylim()[1]
    last = float(values.min())
    for cost in sorted(table.costs if table else (), key=lambda cost: cost.max_length):
        if cost.max_length > 1.3 * last and cost.max_length < 1.5 * values.max():  # others would lie on each other
            last = cost.max_length
            axes.axvline(last, color=_MARK, linewidth=0.6)
            axes.text(last, top, f" {cost.scheme}", rotation=90, va="top", ha="right", fontsize=8)
    axes.set(xscale="log", xlabel="tokens of a sequence; lines: the most that a replica holds", ylabel="share")
    axes.legend(loc="upper left", fontsize=8)
    short = float(np.mean(values <= values.max() / 8))
    return (
        f"{len(values):,} sequences: median {np.median(values):,.0f} tokens, longest {values.max():,}; {short:.0%} of "
        "them are no longer than an eighth of it."
    )


def waits_of(
    names: Sequence[str], ran_ms: Sequence[float], counts: Sequence[int], step_ms: float
) -> Iterator[tuple[str, float]]:
    """(scheme, share of the step that it waits for the slowest one of its phase) of each pipeline; `counts` are the
    phases' numbers of pipelines."""
    first = 0
    for count in counts:
        slowest = max(ran_ms[first : first + count])
        for place in range(first, first + count):
            yield names[place], (slowest - ran_ms[place]) / step_ms
        first += count


def draw_waits(axes: Any, waits: Mapping[str, Sequence[float]]) -> str:
    """Who waited: by scheme, the shares of each step for which its pipelines were done and others were not."""
    means = {scheme: 100.0 * fmean(shares) for scheme, shares in waits.items() if shares}
    if not means:
        axes.set_axis_off()
        return "No step ran several pipelines side by side, so none waited for another."
    axes.barh(list(means), list(means.values()), color=_MARK, height=0.5)
    axes.set(xlim=(0, max(100.0 if max(means.values()) > 50 else 50.0, 1.0)), xlabel="% of the step, mean")
    most = max(means, key=means.__getitem__)
    return f"Pipelines of {most} waited longest for the slowest one: {means[most]:.1f} % of a step in the mean."
