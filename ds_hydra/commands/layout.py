"""Which rank holds which interval of a parameter: in its masters, in the copy that it keeps, and under each strategy.

  ds-hydra layout NAME --model my_model/ --gpus 8 [--gpus-per-node N] [--strategies TEXT ...]
      [--deepspeed-config FILE] [--quick] [--json FILE]

NAME is a parameter's name, or the end of one ("layers.0.mlp.up_proj.weight"). Intervals are elements of the
parameter in the order in which masters hold it, where each tensor parallel rank's part is in one piece if it can be.
Of many pieces the first ones are printed. Copies are those of `hydra.elastic`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

import torch

from ds_hydra.commands.figures import figures_parser, finish, guarded, print_table
from ds_hydra.commands.job_config import read_job
from ds_hydra.pipe.model_plan import Bucket, ModelPlan
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.profiling.stage_timer import hollow_source
from ds_hydra.zero_hetero.buddies import shift_of
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.layout import Layout

Interval = tuple[int, int]
_SHOWN = 2  # pieces of a rank


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra layout") -> int:
    """Print the table; return 2 for input that is refused."""
    parser = figures_parser(__doc__, name)
    parser.add_argument("parameter", metavar="NAME", help="a parameter's name, or the end of one")
    parser.add_argument("--model", required=True, help="config JSON, or checkpoint folder")
    parser.add_argument("--gpus", type=int, required=True, help="ranks of the job")
    parser.add_argument("--gpus-per-node", type=int, help="copies are kept in other nodes (default: 8 at most)")
    parser.add_argument(
        "--strategies", nargs="+", metavar="TEXT", help="whose intervals to show (default: the config's)"
    )
    parser.add_argument("--deepspeed-config", help="the job's config: strategies, what tensor parallel ranks share")
    args = parser.parse_args(arguments)
    return guarded(name, lambda: run(args, name))


def run(args: argparse.Namespace, name: str) -> int:
    """Run the command with its parsed options. ConfigError or PlanError if the input is refused."""
    job = read_job(args.deepspeed_config, torch.bfloat16)
    shapes = [StrategyShape.parse(text) for text in args.strategies or ()] or (job.hydra.shapes if job.hydra else ())
    plan = hollow_source(args.model, job.stage_options, shapes).plan
    per_node = args.gpus_per_node or min(args.gpus, 8)
    whole, columns = held_by(plan, args.parameter, args.gpus, per_node, shapes)
    rows = [{"rank": str(rank), **{title: told(held[rank]) for title, held in columns.items()}}
            for rank in range(args.gpus)]  # fmt: skip
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    stop = sum(stop - start for held in columns["masters"] for start, stop in held)
    summary = f"{whole}: {stop:,} elements on {args.gpus} ranks, {len(shapes)} strategies"
    return finish(name, summary, {"parameter": whole, "held": columns}, [], args.json)


def held_by(
    plan: ModelPlan, name: str, num_ranks: int, per_node: int, shapes: Iterable[StrategyShape]
) -> tuple[str, dict[str, list[list[Interval]]]]:
    """The parameter's whole name; and by title of a column each rank's intervals of it. ConfigError for a name that
    none has, or several."""
    if num_ranks < 1 or per_node < 1:
        raise ConfigError(f"--gpus and --gpus-per-node must be at least 1 but are {num_ranks} and {per_node}")
    known = {param.name: bucket for bucket in plan.buckets for param in bucket.params}
    found = [name] if name in known else [one for one in known if one.endswith(name)]
    if len(found) != 1:
        some = ", ".join((found or list(known))[:6])
        raise ConfigError(f"{len(found)} parameters have the name {name!r} or end in it; some are {some}")
    whole, bucket = found[0], known[found[0]]
    masters = _of(bucket, whole, bucket.masters(num_ranks))
    shift = shift_of([str(rank // per_node) for rank in range(num_ranks)])
    columns = {"masters": masters}
    if shift:
        columns["copy"] = [masters[(rank - shift) % num_ranks] for rank in range(num_ranks)]
    for shape in shapes:
        strategy = place_strategy(shape, num_ranks, plan.num_layers)
        columns[str(shape)] = _of(bucket, whole, plan.pull_layout(bucket, strategy))
    return whole, columns


def _of(bucket: Bucket, name: str, layout: Layout) -> list[list[Interval]]:
    """Each rank's intervals of one parameter of a bucket."""
    begin = 0
    for param in bucket.params:
        if param.name == name:
            break
        begin += param.numel
    end = begin + next(param.numel for param in bucket.params if param.name == name)
    held = []
    for pieces in layout.pieces:
        own: list[Interval] = []
        for start, stop in sorted((piece.start, piece.stop) for piece in pieces):
            start, stop = max(start, begin) - begin, min(stop, end) - begin
            if start >= stop:
                continue
            if own and own[-1][1] == start:
                own[-1] = (own[-1][0], stop)
            else:
                own.append((start, stop))
        held.append(own)
    return held


def told(held: Sequence[Interval]) -> str:
    """A rank's intervals in short."""
    shown = ", ".join(f"{start:,}..{stop:,}" for start, stop in held[:_SHOWN])
    return (shown + (f" and {len(held) - _SHOWN:,} more" if len(held) > _SHOWN else "")) or "-"
