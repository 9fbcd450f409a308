"""Draw a run from its step records: figures as PNG and one HTML page.

  ds-hydra report runs/steps.jsonl [--out FOLDER] [--step N] [--lengths FILE] [--json FILE] [--quick]
      [--html FILE.html [--plans plans.jsonl --cost-table table.json]]

Loss, learning rate and tokens a second over the steps, the pipelines of one step, predicted against measured time,
errors by strategy and scheme, balance, strategies, lengths, planning time. `--lengths` takes a file of lengths as
`ds-hydra preview` does. `--quick` draws the last 200 steps only. A run of twenty steps and more is judged by aims,
which are printed: exit code 1 if one is not met.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median, median_high
from typing import Any

from ds_hydra.commands import pages
from ds_hydra.commands.figures import figures_parser, finish, guarded, new_file, print_table, shipped
from ds_hydra.costs.cost_table import CostTable, read_table_file, told
from ds_hydra.data.lengths import read_length_file
from ds_hydra.plan.step_plan import StepPlan, load_plans
from ds_hydra.report.plots import (
    Section,
    draw_report,
    drawings_of,
    drawn,
    foretold,
    heading,
    pipeline_schemes,
    read_steps,
    relative_errors,
    summarise,
    write_page,
)
from ds_hydra.report.record import SETTLED
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
        sections.append(drawn("Lengths", partial(pages.draw_lengths, lengths=lengths, table=table)))
    sections.append(drawn("Who waited", partial(pages.draw_waits, waits=waits_of(records)), 2.2))
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
        for scheme, share in pages.waits_of(names, ran, counts, record["step_ms"]):
            found.setdefault(scheme, []).append(share)
    return found


def _beside(ran: Sequence[tuple[Record, StepPlan]], table: CostTable | None) -> list[Section]:
    """The same steps under fixed layouts: by the table, scaled as our steps were measured over predicted."""
    if table is None or not ran:
        return [Section(_TITLE, "Give --plans (what hydra.plans_file wrote) and --cost-table to see it.")]
    num_ranks = max(phase.shape.num_ranks for phase in ran[0][1].phases)
    batches = [plan.lengths for _, plan in ran]
    longest = max(max(batch) for batch in batches)
    found = pages.rivals(table, num_ranks, batches, longest)
    if not found:
        raise ConfigError(f"the cost table has no scheme that holds the run's longest sequence, of {longest} tokens")
    measured = [float(record["step_ms"]) for record, _ in ran]
    over = median(ms / plan.predicted_ms for ms, (_, plan) in zip(measured, ran, strict=True))
    times = {name: [over * ms for ms in of] for name, of in found.items()} | {f"{pages.OURS}, measured": measured}
    means = drawn("Beside other systems, on these lengths", partial(pages.draw_means, times=times))
    steps = [int(record["step"]) for record, _ in ran]
    lines = drawn(_TITLE, partial(pages.draw_steps, times=times, steps=steps))
    words = (
        f"Estimated by the cost table, times {over:.2f}, which is what our own steps took over their estimate in the "
        f"median; the fixed layout is the best that holds the longest sequence of these steps, of {longest:,} tokens."
    )
    return [Section(lines.title, words, lines.drawing), Section(means.title, means.words, "", pages.rows(times))]


LEAST = 2 * SETTLED  # steps: what predictions are learnt from, and as many that they are judged by
_PREDICTIONS = ("predicted_ms", "predicted_step_ms", "expected_ms")


def strategy_rows(records: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    """Steps, times and errors of each strategy."""
    rows: list[tuple[object, ...]] = []
    for name in dict.fromkeys(r["strategy"] for r in records):
        chosen = [r for r in records if r["strategy"] == name]
        plan, step, expected = (summarise(relative_errors(foretold(chosen), key)) for key in _PREDICTIONS)
        times = sorted(r["step_ms"] for r in chosen)
        rows.append((name, len(chosen), f"{times[len(times) // 2]:.0f}", *(_pair(e) for e in (plan, step, expected))))
    return rows


def _pair(error: tuple[float, float]) -> str:
    return "-" if error[0] != error[0] else f"{error[0]:.1%} / {error[1]:.1%}"


def judged(records: Sequence[dict[str, Any]]) -> list[tuple[str, str, str, bool]]:
    """(what, seen, aim, whether it is met) for all that the records have the data for."""
    rows: list[tuple[str, str, str, bool]] = []
    later = records[SETTLED:]
    error, _ = summarise(relative_errors(later))
    if error == error:
        rows.append((f"prediction error after {SETTLED} steps, median", f"{error:.1%}", "<= 10%", error <= 0.1))
    waits = [r["slowest_wait_ms"] / r["step_ms"] for r in records if r.get("slowest_wait_ms") and r["step_ms"] > 0]
    if waits:
        wait = median_high(waits)
        rows.append(("waiting for the slowest pipeline, median", f"{wait:.1%}", "<= 25%", wait <= 0.25))
    hidden = sum(bool(r.get("planning_hidden")) for r in records) / len(records)
    rows.append(("steps whose planning was hidden", f"{hidden:.0%}", ">= 90%", hidden >= 0.9))
    losses = [float(r["loss"]) for r in records if r.get("loss") is not None]
    part = len(losses) // 4
    if part:
        first, last = fmean(losses[:part]), fmean(losses[-part:])
        rows.append(
            ("mean loss of the last quarter, after the first", f"{last:.3f} after {first:.3f}", "lower", last < first)
        )
    skipped = sum(bool(r.get("skipped")) for r in records) / len(records)
    rows.append(("steps skipped", f"{skipped:.1%}", "<= 1%", skipped <= 0.01))
    return rows


_REMEDIES = {
    "prediction error": "measure costs by ds-hydra profile, and name the table in hydra.cost_table",
    "waiting": "larger steps: gradient_accumulation_steps, or hydra.tokens_per_step",
    "steps whose planning": "leave free cores to the planner, or raise hydra.planner.ahead",
    "mean loss": "look at the data and the learning rate",
    "steps skipped": "look at the sequences that the log names beside SKIPPED",
}
"""By how an aim of `judged` begins: what to do where it is missed."""


def remedy(missed: Sequence[str]) -> str:
    """What to do about the first aim that is missed; empty where none is."""
    return next((_REMEDIES[start] for aim in missed for start in _REMEDIES if aim.startswith(start)), "")


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra report") -> int:
    """Print a table of strategies and draw the figures; return 2 for a file that cannot be read."""
    parser = figures_parser(__doc__, name)
    parser.add_argument("steps", type=Path, help="the steps_file of a run")
    parser.add_argument("--out", type=Path, help="folder of the figures (default: beside the file, report/)")
    parser.add_argument("--step", type=int, help="whose pipelines to draw (default: the last)")
    parser.add_argument("--lengths", type=Path, help="of the data, as in ds-hydra preview")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="write one page that shows all of it")
    parser.add_argument("--plans", type=Path, metavar="FILE", help="what hydra.plans_file wrote, for --html")
    parser.add_argument("--cost-table", help="costs by which --html tells what a fixed layout would have taken")
    args = parser.parse_args(arguments)
    return guarded(name, lambda: run(args, name))


def run(args: argparse.Namespace, name: str) -> int:
    """Run the command with its parsed options. ConfigError for a file that cannot be read."""
    records, broken = read_steps(args.steps)
    records = records[-200:] if args.quick else records
    lengths = [] if args.lengths is None else read_length_file(args.lengths).tolist()
    out = args.out or args.steps.parent / "report"
    figures = draw_report(records, out, lengths, args.step)
    headers = (
        "layout",
        "steps",
        "ms",
        "prediction off, median / p90: replicas",
        "whole step",
        "corrected by earlier steps",
    )
    print_table(headers, strategy_rows(records))
    for figure in figures:
        print(f"{figure.path}: {figure.words}")
    if args.html:
        table = told(read_table_file(shipped(args.cost_table))).table if args.cost_table else None
        plans = load_plans(args.plans) if args.plans else None
        write_report(args.html, records, lengths, args.step, table, plans)
        print(f"{args.html}: the page")
    overall = {key: summarise(relative_errors(foretold(records), key)) for key in _PREDICTIONS}
    schemes = sorted({scheme for r in records for scheme in pipeline_schemes(r["strategy"])})
    summary = (
        f"{len(records)} steps, {len(schemes)} kinds of replicas; predictions of steps are off by "
        f"{_pair(overall['predicted_step_ms'])} (median / p90), with corrections {_pair(overall['expected_ms'])}; "
        f"{f'{broken} broken lines; ' if broken else ''}{out / 'index.html'}"
    )
    print()
    missed: list[str] = []
    after = f"judge a run of {LEAST} steps or more"
    if len(records) < LEAST:
        print(f"too short to be judged: {len(records)} steps, of at least {LEAST}")
    else:
        aims = judged(records)
        print_table(("judged by", "seen", "should be", "is"), [(*row[:3], "yes" if row[3] else "NO") for row in aims])
        missed = [f"{what}: {seen}, should be {aim}" for what, seen, aim, met in aims if not met]
        after = remedy(missed) or (
            "train on: all is as it should be" if args.html else "--html FILE shows it as one page"
        )
    return finish(name, f"{summary}; next: {after}", {"errors": overall, "steps": len(records)}, missed, args.json)
