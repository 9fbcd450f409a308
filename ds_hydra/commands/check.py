"""Does training a model under these strategies equal one process's training? What the self-check finds, without a job.

  ds-hydra check my_model/ --strategies "tp4 + 2*pp2" "sp4 + 4*tp1" [--activation-checkpointing]
      [--all-tokens] [--functions off|recompute] [--deepspeed-config FILE] [--full] [--no-cache]

The model is a config JSON or a checkpoint folder; no value of a checkpoint is read. What `hydra.self_check` does before
step 0 of a job is done here and printed: a small copy of the model is trained for a step and evaluated under each
scheme of the strategies and compared with the plain model. Its stages compute as those of a job with this config, or
with the default settings, unless an option says otherwise. Exits with 1 when a strategy is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch

from ds_hydra.commands.figures import figures_parser, finish, guarded, print_table
from ds_hydra.commands.job_config import read_job
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.experts import for_strategies
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.stage_options import FUNCTIONS, StageOptions
from ds_hydra.profiling.stage_timer import hollow_model
from ds_hydra.self_check.check import check_strategies


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra check") -> int:
    """Print the table; 1 when a strategy is refused, 2 for input that cannot be."""
    parser = figures_parser(__doc__, name)
    parser.add_argument("model", help="config JSON, or checkpoint folder")
    parser.add_argument("--strategies", nargs="+", required=True, help='such as "tp4 + 2*pp2"')
    parser.add_argument("--activation-checkpointing", action="store_true", help="as hydra.activation_checkpointing")
    parser.add_argument("--all-tokens", action="store_true", help='hydra.fast_paths without "token_sharding"')
    parser.add_argument("--functions", choices=FUNCTIONS, help='"recompute": hydra.fast_paths with "recompute_mlp"')
    parser.add_argument("--deepspeed-config", help="the job's config: how its stages compute")
    parser.add_argument("--full", action="store_true", help="every scheme with all its stages and ranks")
    parser.add_argument("--no-cache", action="store_true", help="check anew what is known from earlier checks")
    args = parser.parse_args(arguments)
    return guarded(name, lambda: run(args, name))


def stage_options(args: argparse.Namespace) -> StageOptions:
    """How the stages of a job with this config, or with none, compute, with what the command line changes."""
    options = read_job(args.deepspeed_config, torch.float32).stage_options
    if args.activation_checkpointing:
        options = replace(options, activation_checkpointing=True)
    if args.all_tokens:
        options = replace(options, token_sharding=False)
    return options if args.functions is None else replace(options, functions=args.functions)


def run(args: argparse.Namespace, name: str) -> int:
    """What `main` does once its options are read; ConfigError and PlanError for what cannot be."""
    strategies = [StrategyShape.parse(text) for text in args.strategies]
    model = hollow_model(args.model)
    plan = for_strategies(CausalLM(model), strategies).plan
    for strategy in strategies:
        plan.check(place_strategy(strategy, strategy.num_ranks, plan.num_layers))
    result = check_strategies(
        model,
        strategies,
        stage_options(args),
        mode="full" if args.full else "on",
        keep=not args.no_cache,
    )
    rows = [
        (str(shape), verdict.state, verdict.difference, round(verdict.seconds, 1), verdict.reason)
        for shape, verdict in sorted(result.verdicts.items(), key=lambda item: (item[0].num_ranks, str(item[0])))
    ]
    print_table(("replica", "trains as one process", "difference", "seconds", "why"), rows)
    cut = "may" if not result.no_slices else f"may not ({result.no_slices})"
    print(f"long sequences {cut} be cut into chunks")
    missed = [
        f"{text!r}: {objection}"
        for text, strategy in zip(args.strategies, strategies, strict=True)
        if (objection := result.objection(strategy)) is not None
    ]
    equal = f"{len(strategies) - len(missed)} of {len(strategies)} layouts train as one process does"
    after = (
        "leave the others out of hydra.strategies" if missed else
        f"see whether it fits: ds-hydra memory --model {args.model} --gpus {strategies[0].num_ranks}"
    )  # fmt: skip
    figures = {"rows": rows, "no_slices": result.no_slices}
    return finish(name, f"{equal}, checked in {result.seconds:.1f} s; next: {after}", figures, missed, args.json)
