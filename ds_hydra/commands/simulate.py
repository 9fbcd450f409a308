"""What a step would do on every rank: times, waits, memory, a trace and a picture; before anything is rented.

  ds-hydra simulate "tp16 + 2*tp8 + 4*tp4pp2" --cost-table a800-32b --lengths pretraining --tokens 200000 \\
      --context 32768 [--steps 10] [--trace step.json] [--gantt step.png]
  ds-hydra simulate runs/plans.jsonl --cost-table table.json --model my_model/ [--step 20] [--trace step.json]

The first form plans steps of random lengths under a strategy, or under phases such as "8*tp8 then 4*tp16"; the second
takes the plans of a run (hydra.plans_file). Needs no device, and no torch but for --model. A trace opens in https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ds_hydra.commands.figures import (
    add_link_options,
    figures_parser,
    finish,
    guarded,
    links_of,
    new_file,
    print_table,
    shipped,
)
from ds_hydra.costs.cost_table import CostTable, TableFile, read_table_file, told
from ds_hydra.costs.memory import gibibytes
from ds_hydra.data.lengths import read_lengths, sample_batches
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan, load_plans
from ds_hydra.planner import PhasedPlanner, Planner, PlannerOptions, parse_phases
from ds_hydra.report.plots import MOST_ROWS, draw_gantt
from ds_hydra.report.trace import write_trace
from ds_hydra.simulate.job import HOST_LINK, SHIPPED, SimulatedJob, shipped_job
from ds_hydra.simulate.step import SimulatedStep, Simulator, step_spans
from ds_hydra.zero_hetero.errors import ConfigError

_HEADERS = ("step", "strategy", "ms", "plan ms", "bubbles", "gap", "exposed ms", "peak")


def parse_arguments(arguments: Sequence[str] | None, name: str) -> argparse.Namespace:
    """Read the command line."""
    parser = figures_parser(__doc__, name)
    parser.add_argument("what", nargs="?", help="the same as --strategies, or a run's plans_file")
    parser.add_argument("--strategies", metavar="TEXT", help="one, such as 'tp4 + 2*pp2'; 'A then B' for phases")
    parser.add_argument(
        "--cost-table", required=True, help=f"a file of ds-hydra profile, or one of {', '.join(SHIPPED)}"
    )
    parser.add_argument("--gpus", type=int, help="ranks of the job (default: those of the strategy)")
    add_link_options(parser)
    parser.add_argument("--model", help="config JSON or checkpoint folder (default: the model of a shipped table)")
    parser.add_argument("--deepspeed-config", help="the job's config: types of gradients, in memory and on their way; "
                        "with --model also offload_optimizer")  # fmt: skip
    parser.add_argument("--host-link", type=float, default=HOST_LINK / 1e9, metavar="GB/S",
                        help="of a GPU and its host, each way, for states there (default: %(default)g)")  # fmt: skip
    parser.add_argument("--lengths", help="of sequences to plan for, as in ds-hydra preview")
    parser.add_argument("--tokens", type=int, help="of a step to plan")
    parser.add_argument("--context", type=int, help="longest sequence to plan for, in tokens")
    parser.add_argument("--steps", type=int, default=1, help="steps to plan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, help="the step to draw, of several (default: the first)")
    parser.add_argument("--trace", type=new_file, metavar="FILE.json", help="write the step for Perfetto")
    parser.add_argument("--gantt", type=new_file, metavar="FILE.png", help="draw the step")
    parser.add_argument("--all-ranks", action="store_true", help="draw every rank, not only the first of each stage")
    args = parser.parse_args(arguments)
    if (args.what is None) == (args.strategies is None):
        parser.error("name one strategy, or a plans_file")
    args.what = args.what or args.strategies
    return args


def plan_steps(args: argparse.Namespace, phases: Sequence[StrategyShape], table: CostTable) -> dict[int, StepPlan]:
    """Plans of random batches under a strategy, or some in turn. ConfigError or PlanError if there are none."""
    missing = [f"--{key}" for key in ("lengths", "tokens", "context") if getattr(args, key) is None]
    if missing:
        raise ConfigError(f"{args.what!r} is a strategy (there is no such file); give {', '.join(missing)} too")
    if min(args.tokens, args.context, args.steps) < 1:
        raise ConfigError("--tokens, --context and --steps must be at least 1")
    sample = read_lengths(shipped(args.lengths), args.context, seed=args.seed)
    options = PlannerOptions(seed=args.seed)
    planner = Planner(table, phases, options) if len(phases) == 1 else PhasedPlanner(table, phases, options)
    batches = sample_batches(sample.lengths.tolist(), args.tokens, args.steps, args.seed, args.context)
    return {step: planner.plan(step, range(len(batch)), batch.tolist()) for step, batch in enumerate(batches)}


def simulated_job(
    args: argparse.Namespace, found: TableFile, strategies: Sequence[StrategyShape], *, config: str | None = None
) -> SimulatedJob:
    """Model, links and memory of the job, with costs of all pipelines of these strategies.

    `config` is the file that says in which types its gradients add up and travel.
    """
    gpus = strategies[0].num_ranks if args.gpus is None else args.gpus
    links = links_of(args, found)
    if args.model is not None:
        from ds_hydra.commands.job_config import job_of_config  # imports torch

        link = 1e9 * getattr(args, "host_link", HOST_LINK / 1e9)  # other commands have no such option
        if link <= 0:
            raise ConfigError(f"--host-link must be above 0 but is {link / 1e9:g}: GB/s between a GPU and its host")
        return job_of_config(args.model, found, links, gpus, strategies, config=config, host_link=link)
    if args.cost_table not in SHIPPED:
        raise ConfigError(f"the table {args.cost_table} does not say which model it is for: give --model")
    return shipped_job(args.cost_table, found, links, gpus, strategies, **gradient_bytes(config))


def gradient_bytes(config: str | None) -> dict[str, int | None]:
    """Bytes of an element of a gradient where it adds up and on its way, as a job's config says."""
    if config is None:
        return {}
    from ds_hydra.commands.job_config import DTYPES, read_job  # imports torch

    job = read_job(config, DTYPES["bf16"])
    return {
        "grad_bytes": job.grad_dtype.itemsize if job.grad_dtype else None,
        "wire_bytes": job.wire_dtype.itemsize if job.wire_dtype else None,
    }


def drawn_ranks(step: SimulatedStep, *, every: bool) -> list[int]:
    """Ranks to draw: all, or the first of each stage of any phase; ranks of a stage do the same."""
    if every:
        return list(range(step.num_ranks))
    return sorted({times.stage.ranks[0] for phase in step.phases for _, times, _ in phase.stages()})


def row(plan: StepPlan, step: SimulatedStep) -> tuple[object, ...]:
    """A step's figures."""
    peak = "-" if step.peak_bytes is None else gibibytes(float(np.max(step.peak_bytes)))
    return (plan.step, plan.strategy, f"{1e3 * step.step_s:.1f}", f"{plan.predicted_ms:.1f}",
            f"{step.bubble_share:.1%}", f"{step.gap:.1%}", f"{1e3 * step.exposed_s:.1f}", peak)  # fmt: skip


def run(args: argparse.Namespace, name: str) -> int:
    """Run the command with its parsed options. ConfigError or PlanError if the input is refused."""
    if args.gpus is not None and args.gpus < 1:
        raise ConfigError(f"--gpus {args.gpus}: a job needs at least 1")
    found = told(read_table_file(shipped(args.cost_table)))
    recorded = load_plans(args.what) if Path(args.what).is_file() else {}
    strategies = list(dict.fromkeys(phase.shape for plan in recorded.values() for phase in plan.phases))
    strategies = strategies or list(parse_phases(args.what))
    job = simulated_job(args, found, strategies, config=args.deepspeed_config)
    plans = recorded or plan_steps(args, strategies, job.table)
    for plan in plans.values():
        job.check(plan)
    simulator = Simulator(job)
    steps = {number: simulator.step(plan) for number, plan in plans.items()}
    print_table(_HEADERS, [row(plans[number], step) for number, step in steps.items()])
    if args.trace or args.gantt:
        draw(args, plans, steps)
    ms = 1e3 * np.array([step.step_s for step in steps.values()])
    summary = f"{len(steps)} steps on {job.num_ranks} GPUs, {ms.mean():.1f} ms in the mean"
    figures = {"steps": {str(number): figures_of(step) for number, step in steps.items()}}
    return finish(name, summary, figures, [], args.json)


def figures_of(step: SimulatedStep) -> dict[str, object]:
    """A step for `--json`; seconds and bytes."""
    peak = None if step.peak_bytes is None else step.peak_bytes.tolist()
    ranks = {field.name: getattr(step.ranks, field.name).tolist() for field in dataclasses.fields(step.ranks)}
    return {"step_s": step.step_s, "bubble_share": step.bubble_share, "gap": step.gap, "exposed_s": step.exposed_s,
            "peak_bytes": peak, "ranks": ranks}  # fmt: skip


def draw(args: argparse.Namespace, plans: Mapping[int, StepPlan], steps: Mapping[int, SimulatedStep]) -> None:
    """Trace and picture of one step. ConfigError for a step that there is not, or one of too many ranks to draw."""
    number = next(iter(steps)) if args.step is None else args.step
    if number not in steps:
        raise ConfigError(f"--step {number}: there are the steps {min(steps)} to {max(steps)}")
    step = steps[number]
    ranks = drawn_ranks(step, every=args.all_ranks)
    if args.trace:
        spans = write_trace(args.trace, {"predicted": step_spans(step, set(ranks))})
        print(f"{args.trace}: step {number}, {len(ranks)} ranks, {spans} spans; open it in https://ui.perfetto.dev")
    if args.gantt:
        shown = ranks[:: -(-len(ranks) // MOST_ROWS)]
        title = f"step {number}: {plans[number].strategy}, {1e3 * step.step_s:.1f} ms"
        words = draw_gantt(args.gantt, {"predicted": step_spans(step, set(shown))}, title)
        print(f"{args.gantt}: step {number}, {words}")


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra simulate") -> int:
    """Simulate and print; return 2 for input that is refused."""
    args = parse_arguments(arguments, name)
    return guarded(name, lambda: run(args, name))


if __name__ == "__main__":
    sys.exit(main())
