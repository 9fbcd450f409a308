"""Draw a run from its step records: figures as PNG and one HTML page.

  ds-hydra report runs/steps.jsonl [--out FOLDER] [--step N] [--lengths FILE] [--json FILE] [--quick]
      [--html FILE.html [--plans plans.jsonl --cost-table table.json]]

Loss, learning rate and tokens a second over the steps, the pipelines of one step, predicted against measured time,
errors by strategy and scheme, balance, strategies, lengths, planning time. `--lengths` takes a file of lengths as
`ds-hydra preview` does. `--quick` draws the last 200 steps only. A run of twenty steps and more is judged by aims,
which are printed: exit code 1 when one is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median_high
from typing import Any

from ds_hydra.commands.figures import figures_parser, finish, guarded, new_file, print_table
from ds_hydra.commands.report_page import write_report
from ds_hydra.commands.shipped import shipped
from ds_hydra.costs.cost_table import read_table_file, told
from ds_hydra.data.lengths import read_length_file
from ds_hydra.plan.step_plan import load_plans
from ds_hydra.report.plots import draw_report, foretold, pipeline_schemes, read_steps, relative_errors, summarise
from ds_hydra.report.record import SETTLED

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
    headers = ("strategy", "steps", "ms", "pipelines' error med / p90", "step's error", "expected step's")
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
        f"{len(records)} steps, {len(schemes)} schemes, step prediction error {_pair(overall['predicted_step_ms'])} "
        f"(median / p90), expected {_pair(overall['expected_ms'])}; {broken} broken lines; {out / 'index.html'}"
    )
    print()
    missed: list[str] = []
    if len(records) < LEAST:
        print(f"too short to be judged: {len(records)} steps, of at least {LEAST}")
    else:
        aims = judged(records)
        print_table(("judged by", "seen", "aim", "met"), [(*row[:3], "yes" if row[3] else "NO") for row in aims])
        missed = [f"{what}: {seen}, not {aim}" for what, seen, aim, met in aims if not met]
    return finish(name, summary, {"errors": overall, "steps": len(records)}, missed, args.json)


if __name__ == "__main__":
    sys.exit(main())
