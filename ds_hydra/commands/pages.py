"""Pages and pictures of a comparison: steps by ds-hydra beside the layouts that other systems would run. No torch.

Rows and drawings are those of `ds-hydra report --html` and `preview`; `write_preview` is the latter's page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from ds_hydra.commands.figures import OURS
from ds_hydra.costs.cost_table import CostTable, TableFile
from ds_hydra.plan.simulate import simulate_plan
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import PhasedPlanner, PlannerOptions
from ds_hydra.planner.fixed_layout import layouts_by_length
from ds_hydra.report.plots import Section, drawn, pipeline_schemes, write_page
from ds_hydra.report.record import is_heterogeneous
from ds_hydra.rivals.costs import NODE, JobSetting, OwnModel, Recomputed
from ds_hydra.rivals.preview import Messages, other_systems
from ds_hydra.simulate.links import LinkModel

_MOST = 32  # pipelines of one step that are drawn
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


def write_preview(
    path: Path,
    lengths: Sequence[int],
    table: CostTable,
    times: Mapping[str, Sequence[float]],
    plans: Sequence[StepPlan],
    wins: Mapping[str, int],
) -> None:
    """Write the page: `times` in ms of every step by what runs it, ours last; `plans` ours."""
    waits: dict[str, list[float]] = {}
    for plan in plans:
        for scheme, share in _waits(plan, table):
            waits.setdefault(scheme, []).append(share)
    steps = range(1, len(plans) + 1)
    shown = next((plan for plan in plans if is_heterogeneous(plan.strategy)), plans[0])
    means = drawn("Beside other systems, on these lengths", partial(draw_means, times=times))
    won = [["strategy", "steps"], *([name, str(count)] for name, count in list(wins.items())[:12])]
    sections = [
        drawn("Lengths", partial(draw_lengths, lengths=lengths, table=table)),
        Section(means.title, means.words, means.drawing, rows(times)),
        drawn("With a fixed layout these steps would take", partial(draw_steps, times=times, steps=steps)),
        drawn("The plan of one step", partial(draw_plan, plan=shown, table=table), 0.9 + 0.28 * _rows(shown)),
        drawn("Who waits", partial(draw_waits, waits=waits), 2.2),
        Section("Strategies that were chosen", f"{len(wins)} in {len(plans)} steps; the most used are", "", won),
    ]
    write_page(path, "A job, previewed by ds-hydra", f"{len(plans)} steps, simulated; nothing was measured.", sections)


def _rows(plan: StepPlan) -> int:
    return min(_MOST, sum(len(phase.pipelines) for phase in plan.phases))


def _waits(plan: StepPlan, table: CostTable) -> Iterator[tuple[str, float]]:
    """(scheme, share of the step that it waits) of each pipeline."""
    ran = list(simulate_plan(plan, table))
    counts = [len(phase.pipelines) for phase in plan.phases]
    return waits_of(pipeline_schemes(plan.strategy), ran, counts, plan.total_ms(ran))


def draw_plan(axes: Any, plan: StepPlan, table: CostTable) -> str:
    """One step: how long each pipeline computes, with the sequences that it has."""
    ran = list(simulate_plan(plan, table))
    pipelines = [pipeline for phase in plan.phases for pipeline in phase.pipelines]
    names = pipeline_schemes(plan.strategy)
    for row, (ms, pipeline) in enumerate(zip(ran[:_MOST], pipelines, strict=False)):
        held = [length for batch in pipeline.microbatches for length in batch.lengths]
        axes.barh(row, ms, color="#0072B2", height=0.75)
        text = f"{len(held)} of up to {max(held, default=0):,} tokens, {sum(held):,} in all"
        axes.text(0.01 * max(ran), row, text, va="center", fontsize=8, color="white")
    axes.set_yticks(range(_rows(plan)), names[: _rows(plan)], fontsize=8)
    axes.set(ylim=(_rows(plan) - 0.5, -0.5), xlim=(0, 1.02 * max(ran)), xlabel="ms of computing")
    more = f", of which {_MOST} are drawn" if len(pipelines) > _MOST else ""
    return f"{plan.strategy}: {len(pipelines)} pipelines{more}, {len(plan.lengths)} sequences."
