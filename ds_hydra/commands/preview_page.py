"""A preview as one page: what `ds-hydra preview --html` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ds_hydra.commands import beside
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.plan.simulate import simulate_plan
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.report.plots import pipeline_schemes
from ds_hydra.report.record import is_heterogeneous
from ds_hydra.report.web_page import Section, drawn, write_page

_MOST = 32  # pipelines of one step that are drawn


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
    means = drawn("Beside other systems, on these lengths", partial(beside.draw_means, times=times))
    won = [["strategy", "steps"], *([name, str(count)] for name, count in list(wins.items())[:12])]
    sections = [
        drawn("Lengths", partial(beside.draw_lengths, lengths=lengths, table=table)),
        Section(means.title, means.words, means.svg, beside.rows(times)),
        drawn("With a fixed layout these steps would take", partial(beside.draw_steps, times=times, steps=steps)),
        drawn("The plan of one step", partial(draw_plan, plan=shown, table=table), 0.9 + 0.28 * _rows(shown)),
        drawn("Who waits", partial(beside.draw_waits, waits=waits), 2.2),
        Section("Strategies that were chosen", f"{len(wins)} in {len(plans)} steps; the most used are", "", won),
    ]
    write_page(path, "A job, previewed by ds-hydra", f"{len(plans)} steps, simulated; nothing was measured.", sections)


def _rows(plan: StepPlan) -> int:
    return min(_MOST, sum(len(phase.pipelines) for phase in plan.phases))


def _waits(plan: StepPlan, table: CostTable) -> Iterator[tuple[str, float]]:
    """(scheme, share of the step that it waits) of each pipeline."""
    ran = list(simulate_plan(plan, table))
    counts = [len(phase.pipelines) for phase in plan.phases]
    return beside.waits_of(pipeline_schemes(plan.strategy), ran, counts, plan.total_ms(ran))


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
