"""A job on a cluster that is not there: the real engine in forked processes, on virtual time.

  ds-hydra emulate "4*tp8" "2*tp4pp2 + 2*tp8" --gpus 32 --cost-table a800-7b --lengths pretraining --tokens 100000 \\
      --context 8192 [--steps 10] [--choose cycle] [--json FILE]
  ds-hydra emulate --replay plans.jsonl --gpus 32 --cost-table table.json --model my_model/ --lengths lengths.txt \\
      --tokens 100000 --context 8192

Plans, schedules, pulls, pushes and messages between stages are those of training; a stage's computing is replaced by
the time that the cost table gives it, and a message takes what the links say. Printed is how long each step took by
that time, and what the simulator says of its plan. Exits with 1 when a step has lost a token or a gradient.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from ds_hydra.commands.figures import add_link_options, figures_parser, finish, guarded, print_table, shipped
from ds_hydra.commands.simulate import simulated_job
from ds_hydra.costs.cost_table import read_table_file, told
from ds_hydra.data.lengths import read_lengths
from ds_hydra.emulate.clock import check_ranks, machine_limits
from ds_hydra.emulate.cluster import EmulatedJob, EmulatedStep, emulate
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import load_plans
from ds_hydra.simulate.links import Speed
from ds_hydra.simulate.step import Simulator
from ds_hydra.zero_hetero.errors import ConfigError

_SEQUENCES = 20_000  # of the emulated data


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra emulate") -> int:
    """Print the table; 1 when a step went wrong, 2 for input that is refused."""
    parser = figures_parser(__doc__, name)
    parser.add_argument("named", nargs="*", metavar="STRATEGY", help="the same as --strategies")
    parser.add_argument(
        "--strategies", nargs="+", default=[], metavar="TEXT", help="candidates (default: the plans' own)"
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="processes to fork")
    add_link_options(parser)
    parser.add_argument("--cost-table", required=True, help="a file of ds-hydra profile, or a shipped one")
    parser.add_argument("--model", help="config JSON or checkpoint folder (default: the model of a shipped table)")
    parser.add_argument("--lengths", required=True, help="of the data's sequences, as in ds-hydra preview")
    parser.add_argument("--tokens", type=int, required=True, help="of a step")
    parser.add_argument("--context", type=int, required=True, help="longest sequence, in tokens")
    parser.add_argument("--choose", choices=("best", "cycle"), default="best", help="as hydra.choose")
    parser.add_argument("--replay", metavar="FILE", help="run these plans, as hydra.plans_file wrote them")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="real seconds for all steps")
    args = parser.parse_args(arguments)
    args.strategies = [*args.named, *args.strategies]
    return guarded(name, lambda: run(args, name))


def run(args: argparse.Namespace, name: str) -> int:
    """What `main` does once its options are read. ConfigError or PlanError for what is refused."""
    steps = min(args.steps, 2) if args.quick else args.steps
    if min(steps, args.tokens, args.context) < 1:
        raise ConfigError("--steps, --tokens and --context must be at least 1")
    job, began = emulated_job(args), time.perf_counter()
    done = emulate(job, steps, timeout_s=args.timeout)[0]
    real_s = time.perf_counter() - began
    links, simulator = job.cluster.links, Simulator(job.cluster)
    print(f"{args.gpus} ranks in nodes of {links.node_size}; links of {_text(links.inside)} inside a node, "
          f"{_text(links.between)} between nodes")  # fmt: skip
    headers = ("step", "strategy", "micro-batches", "emulated ms", "simulated ms", "plan ms")
    print_table(headers, [_row(step, simulator) for step in done])
    wrong = [f"step {step.plan.step}: {step.fault}" for step in done if step.fault]
    mean_ms = 1e3 * sum(step.step_s for step in done) / len(done)
    summary = f"{len(done)} steps of {mean_ms:.1f} ms on {args.gpus} ranks, emulated in {real_s:.1f} s"
    figures = {"steps": [{"plan": step.plan.to_json(), "step_ms": 1e3 * step.step_s} for step in done]}
    return finish(name, summary, figures, wrong, args.json)


def emulated_job(args: argparse.Namespace) -> EmulatedJob:
    """The job that the options describe. ConfigError or PlanError for what cannot be read, or is too large."""
    check_ranks(args.gpus, machine_limits())
    strategies = [StrategyShape.parse(text) for text in args.strategies]
    if args.replay:
        strategies += [phase.shape for plan in load_plans(args.replay).values() for phase in plan.phases]
    if not strategies:
        raise ConfigError("there is nothing to run: name strategies, or give plans with --replay")
    lengths = read_lengths(shipped(args.lengths), args.context, _SEQUENCES, args.seed).lengths
    return EmulatedJob(
        simulated_job(args, told(read_table_file(shipped(args.cost_table))), strategies),
        tuple(dict.fromkeys(map(str, strategies))),
        tuple(lengths[:_SEQUENCES].tolist()),
        args.tokens,
        choose=args.choose,
        replay=args.replay,
        seed=args.seed,
    )


def _row(step: EmulatedStep, simulator: Simulator) -> tuple[object, ...]:
    plan = step.plan
    counts = "; ".join(" ".join(str(len(p.microbatches)) for p in phase.pipelines) for phase in plan.phases)
    times = (1e3 * step.step_s, 1e3 * simulator.step(plan).step_s, plan.predicted_ms)
    return plan.step, plan.strategy, counts, *(f"{ms:.1f}" for ms in times)


def _text(speed: Speed) -> str:
    return f"{1e6 * speed.latency_s:g} us and {speed.bytes_per_s / 1e9:g} GB/s"


if __name__ == "__main__":
    sys.exit(main())
