"""A run as one page: what `ds-hydra report --html` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ds_hydra.commands import beside
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.report.plots import drawings_of, heading, pipeline_schemes
from ds_hydra.report.web_page import Section, drawn, write_page
from ds_hydra.zero_hetero.errors import ConfigError

Record = Mapping[str, Any]
_TITLE = "With a fixed layout these steps would have taken"


def write_report(
    path: Path,
    records: Sequence[Record],
    lengths: Sequence[int],
    step: int | None,
    table: CostTable | None,
    plans: Mapping[int, StepPlan] | None,
) -> None:
    """Write the page. `plans` are those of the run by step from 0, from which lengths follow where none are given."""
    ran = [(record, plans[record["step"] - 1]) for record in records if plans and record["step"] - 1 in plans]
    lengths = lengths or [length for _, plan in ran for length in plan.lengths]
    sections = [*_beside(ran, table)]
    if lengths:
        sections.append(drawn("Lengths", partial(beside.draw_lengths, lengths=lengths, table=table)))
    sections.append(drawn("Who waited", partial(beside.draw_waits, waits=waits_of(records)), 2.2))
    left_out = {"lengths"} if lengths else set()
    sections += [drawn(title, draw) for name, title, draw in drawings_of(records, (), step) if name not in left_out]
    write_page(path, "A run of ds-hydra", heading(records), sections)


def waits_of(records: Sequence[Record]) -> dict[str, list[float]]:
    """By scheme, the share of each step's time by which a pipeline was done before the slowest one of its phase."""
    found: dict[str, list[float]] = {}
    for record in records:
        ran = [float(ms) for ms in record.get("pipeline_ms") or ()]
        counts = record.get("num_pipelines") or (len(ran),)
        names = pipeline_schemes(record["strategy"])
        if len(ran) != len(names) or len(ran) < 2:
            continue
        for scheme, share in beside.waits_of(names, ran, counts, record["step_ms"]):
            found.setdefault(scheme, []).append(share)
    return found


def _beside(ran: Sequence[tuple[Record, StepPlan]], table: CostTable | None) -> list[Section]:
    """The same steps under fixed layouts: by the table, scaled as our steps were measured over predicted."""
    if table is None or not ran:
        return [Section(_TITLE, "Give --plans (what hydra.plans_file wrote) and --cost-table to see it.")]
    num_ranks = max(phase.shape.num_ranks for phase in ran[0][1].phases)
    batches = [plan.lengths for _, plan in ran]
    longest = max(max(batch) for batch in batches)
    found = beside.rivals(table, num_ranks, batches, longest)
    if not found:
        raise ConfigError(f"the cost table has no scheme that holds the run's longest sequence, of {longest} tokens")
    measured = [float(record["step_ms"]) for record, _ in ran]
    over = median(ms / plan.predicted_ms for ms, (_, plan) in zip(measured, ran, strict=True))
    times = {name: [over * ms for ms in of] for name, of in found.items()} | {f"{beside.OURS}, measured": measured}
    means = drawn("Beside other systems, on these lengths", partial(beside.draw_means, times=times))
    steps = [int(record["step"]) for record, _ in ran]
    lines = drawn(_TITLE, partial(beside.draw_steps, times=times, steps=steps))
    words = (
        f"Estimated by the cost table, times {over:.2f}, which is what our own steps took over their estimate in the "
        f"median; the fixed layout is the best that holds the longest sequence of these steps, of {longest:,} tokens."
    )
    return [Section(lines.title, words, lines.svg), Section(means.title, means.words, "", beside.rows(times))]
