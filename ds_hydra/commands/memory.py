"""Memory that each parallel scheme of a model needs on a rank, activations included, before anything is started.

  ds-hydra memory --model my_model/ --gpus 8 [--device-memory GIB] [--tokens N] [--strategies TEXT ...]
      [--host-memory GIB] [--deepspeed-config FILE] [--measure] [--quick] [--json FILE]

Like DeepSpeed's estimators, for every scheme: master shards, optimizer state, pulled parameters, gradients, scratch
memory of messages, activations of the fullest stage, and MaxLen. Activations are an estimate for Llama-like layers, or
with --measure counted by running one layer's local shapes. With strategies, given or in the config, a second table
shows what their pipelines need when all of them are candidates of one job. A last one has the longest sequence by what
becomes of what layers keep: all kept; computed again but for attention, computed again, whole and in slices; fetched
from the host, with what the hosts then hold; and where FP32 parameters and optimizer states are on the host, computed
again and fetched. Exits with 1 when no scheme fits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from ds_hydra.commands.figures import figures_parser, finish, guarded, print_table
from ds_hydra.commands.job_config import DTYPES, read_job
from ds_hydra.costs.memory import JobMemory, Shape
from ds_hydra.engine.costs import HOST_SHARE, job_memory, rank_memory
from ds_hydra.engine.plugs import plugged
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.plan.layouts import feasible_schemes
from ds_hydra.profiling.stage_memory import measure_activations
from ds_hydra.ranks.host_memory import available_bytes
from ds_hydra.zero_hetero.errors import ConfigError


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra memory") -> int:
    """Print the table; return 1 when nothing fits, 2 for input that is refused."""
    parser = figures_parser(__doc__, name)
    parser.add_argument("--model", required=True, help="config JSON, or checkpoint folder")
    parser.add_argument("--gpus", type=int, required=True, help="ranks of the job")
    parser.add_argument("--gpus-per-node", type=int, help="TP and SP stay inside a node (default: 8 at most)")
    parser.add_argument("--device-memory", type=float, metavar="GIB", help="of one rank (default: what is here)")
    parser.add_argument("--host-memory", type=float, metavar="GIB", help="of a node (default: what is free here)")
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch, for the column of activations")
    parser.add_argument("--strategies", nargs="+", metavar="TEXT", help="candidates of one job (default: the config's)")
    parser.add_argument("--dtype", choices=DTYPES, help="of computing (default: the config, or bf16)")
    parser.add_argument("--deepspeed-config", help="the job's config: types, checkpointing, strategies")
    parser.add_argument("--measure", action="store_true", help="count activations by running the layers (slower)")
    args = parser.parse_args(arguments)
    return guarded(name, lambda: run(args, name))


def run(args: argparse.Namespace, name: str) -> int:
    """Run the command with its parsed options. ConfigError or PlanError if the input is refused."""
    if args.gpus < 1 or args.tokens < 1:
        raise ConfigError(f"--gpus and --tokens must be at least 1 but are {args.gpus} and {args.tokens}")
    job = read_job(args.deepspeed_config, torch.bfloat16)
    dtype = DTYPES[args.dtype] if args.dtype else job.dtype
    shapes = [StrategyShape.parse(text) for text in args.strategies or ()] or (job.hydra.shapes if job.hydra else ())
    source = job.source(args.model, job.stage_options, shapes)
    node = args.gpus_per_node or min(args.gpus, 8)
    schemes = feasible_schemes(source.plan, args.gpus, node)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    memory_bytes = args.device_memory * 2**30 if args.device_memory else rank_memory(device, node)
    host_bytes = args.host_memory * 2**30 if args.host_memory else HOST_SHARE * available_bytes()
    memory_of = partial(
        job_memory, schemes=schemes, num_ranks=args.gpus, device_bytes=memory_bytes, dtype=dtype,
        node_size=node, host_bytes=host_bytes / node, **job.of_memory,
    )  # fmt: skip
    memory = memory_of(source=source)
    if args.measure:
        tokens = 128 if args.quick else 512
        for tp, sp in dict.fromkeys((scheme.tp, scheme.sp) for scheme in schemes):
            found = measure_activations(source, tp, sp, device, dtype, tokens)
            memory.activations[tp, sp] = found  # type: ignore[index]
    joint = memory.together({one: place_strategy(one, args.gpus, source.plan.num_layers) for one in shapes})
    rows = [_row(memory, scheme, args.tokens) for scheme in schemes]
    if job.hydra and job.hydra.images:
        image_tokens = plugged("images", "hydra.images").image_tokens
        for row, scheme in zip(rows, schemes, strict=True):
            row["of images alone"] = image_tokens(source, memory, scheme, dtype.itemsize)
    together = [
        {"layout": str(shape)} | _row(joint, scheme, args.tokens)
        for shape in shapes
        for scheme in dict.fromkeys(pipeline.cost_key for pipeline in shape.pipelines)
    ]
    print(f"{args.model}: {args.gpus} ranks of {memory_bytes / 2**30:.1f} GiB ({memory.margin:.0%} left as a margin), "
          f"{str(dtype).removeprefix('torch.')}, activations {'counted' if args.measure else 'estimated'}; GiB of the "
          f"fullest stage with micro-batches of {args.tokens} tokens")  # fmt: skip
    _print(rows)
    if together:
        print("\nThe same in a job that has all of these layouts as candidates:")
        _print(together)
    choices = [] if args.measure else _choices(source, memory_of, schemes, node, job.states_may_leave)
    if choices:
        print("\nLongest sequence if layers are kept, recomputed but for attention, all recomputed, recomputed in "
              f"chunks of {_SLICE} tokens, or wait on the host, which has {host_bytes / 2**30:.0f} GiB; if optimizer "
              "states are there, recomputed or with layers there too:")  # fmt: skip
        _print(choices)
    limits = {scheme: memory.max_length(scheme) for scheme in schemes}
    missed = [] if any(limits.values()) else [f"no layout holds one token in {memory_bytes / 2**30:.1f} GiB"]
    summary = "; ".join(_which(limits, args.tokens, args.gpus, bool(job.hydra and job.hydra.activation_checkpointing)))
    return finish(name, summary, {"rows": rows, "together": together, "longest": choices}, missed, args.json)


_SLICE = 4096


def _choices(
    source: ModelSource, memory_of: Callable[..., JobMemory], schemes: Sequence[ParallelScheme], node: int,
    states: bool,
) -> list[dict[str, object]]:  # fmt: skip
    """For each scheme the longest sequence by each choice, and GiB of a node's memory where layers wait there; none for
    a model of which no layers are computed again. `states`: whether those of the optimizer may be there."""
    if not isinstance(source, CausalLM):
        return []

    def by(again: bool, host: bool, states: bool = False, attention: bool = False) -> JobMemory:
        options = replace(
            source.options, activation_checkpointing=again, host_activations=host, keep_attention=attention
        )
        return memory_of(source.with_options(options, "layers are kept or recomputed"), states_on_host=states)

    def of_host(memory: JobMemory, scheme: ParallelScheme) -> str:
        longest = memory.max_length(scheme)
        held = max(needs.on_host(longest) for needs in memory.stages(scheme)) if longest else 0
        return f"{node * held / 2**30:.0f}"

    kept, again, fetched = by(False, False), by(True, False), by(True, True)
    attended = by(True, False, attention=True)
    others = {"states there": by(True, False, True), "both there": by(True, True, True)} if states else {}
    rows = []
    for scheme in schemes:
        in_slices = 0 if source.plan.no_slices else again.longest_in_slices(scheme, _SLICE)
        rows.append({
            "replica": str(scheme), "kept": kept.max_length(scheme),
            "attention kept": attended.max_length(scheme), "recomputed": again.max_length(scheme),
            "in chunks": in_slices,
            "kept on host": fetched.max_length(scheme), "GiB of a host": of_host(fetched, scheme),
            **{name: memory.max_length(scheme) for name, memory in others.items()},
            **({"GiB then": of_host(others["both there"], scheme)} if others else {}),
        })  # fmt: skip
    return rows


def _which(limits: Mapping[ParallelScheme, int], tokens: int, gpus: int, recomputed: bool) -> Iterator[str]:
    """Which rows hold so many tokens, and which one to take: of those the narrowest."""
    holding = [scheme for scheme, limit in limits.items() if limit >= tokens]
    yield f"{len(holding)} of {len(limits)} kinds of replicas hold micro-batches of {tokens:,} tokens"
    if holding:
        narrow = min(holding, key=lambda scheme: (scheme.num_ranks, -limits[scheme]))
        if narrow.num_ranks > 1:
            yield f"{narrow} is the narrowest; shorter sequences run on narrower replicas beside it"
        yield f'next: write the layout {_times(gpus // narrow.num_ranks, narrow)}, or "auto"'
    if limits and max(limits.values()) < tokens:
        widest = max(limits, key=limits.__getitem__)
        hint = "use more GPUs" if recomputed else "set hydra.activation_checkpointing, or use more GPUs"
        yield f"the most is {limits[widest]:,}, by {widest}; next: {hint}"


def _times(count: int, scheme: ParallelScheme) -> str:
    """A layout of so many equal replicas, as hydra.strategies has it."""
    return f"{count}*{scheme}" if count > 1 else str(scheme)


def _print(rows: Sequence[dict[str, object]]) -> None:
    print_table(list(rows[0]) if rows else [], [list(row.values()) for row in rows])


def _row(memory: JobMemory, scheme: Shape, tokens: int) -> dict[str, object]:
    needs = memory.fullest(scheme, tokens)
    total, gib = needs.total(tokens), 2**30
    limit = memory.max_length(scheme)
    return {
        "replica": str(scheme),
        "stage": needs.stage,
        "fp32": f"{needs.masters / gib:.2f}",
        "optimizer": f"{needs.optimizer / gib:.2f}",
        "params": f"{needs.params / gib:.2f}",
        "grads": f"{needs.grads / gib:.2f}",
        "scratch": f"{needs.scratch / gib:.2f}",
        **({"host": f"{needs.on_host(tokens) / gib:.2f}"} if needs.on_host(tokens) else {}),
        "activations": f"{(total - needs.states) / gib:.2f}",
        "total": f"{total / gib:.2f}",
        "fits": "yes" if limit >= tokens else "no",
        "max tokens": limit,
    }


if __name__ == "__main__":
    sys.exit(main())
