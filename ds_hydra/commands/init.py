"""Translate the config of a job that runs on DeepSpeed now: one for this engine, each key with a reason, and the gain.

  ds-hydra init train.py ds_config.json --model my_model/ --gpus 64 --lengths lengths.txt
      [--script-args FILE] [--cost-table FILE | --device NAME] [--device-memory GIB] [--tokens N] [--out FILE]

It reads the script, and what it imports of its project, without running them; writes the config, and a diff of the
lines to change; and tells what a step takes now and here: by a measured cost table, or as an estimate from the model's
FLOPs, which says on what device. What it cannot translate it refuses, all keys at once, and writes nothing.
A config for Trainer, TRL or Accelerate must be plain JSON; the reasons stand in a text beside it there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds_hydra.commands import init_text
from ds_hydra.commands.accelerate_yaml import config_of
from ds_hydra.commands.figures import CommandParser, guarded, new_file
from ds_hydra.commands.init_text import Result, recomputes, with_recomputation
from ds_hydra.commands.moving import moving
from ds_hydra.commands.planned_block import Asked, planned, written
from ds_hydra.commands.script_args import training_args
from ds_hydra.commands.shipped import shipped
from ds_hydra.commands.swapped import Span, diff_of, renamed, swap_of
from ds_hydra.commands.translated import translated
from ds_hydra.config.hosts import HOSTS, TRAINER
from ds_hydra.config.hydra_block import BLOCK
from ds_hydra.data.lengths import read_lengths
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.commands.init_job import Job

_GPU_GIB = 80.0


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra init") -> int:
    """Write the config; return 2 for input that is refused."""
    parser = CommandParser(prog=name, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("script", type=Path, help="the training script")
    parser.add_argument("config", type=Path, help="its DeepSpeed config, or the YAML of accelerate launch")
    parser.add_argument("--model", help="config JSON, or checkpoint folder (default: a folder that the script loads)")
    parser.add_argument("--gpus", type=int, help="of the job (default: those of this machine)")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--device-memory", type=float, metavar="GIB", help="of a GPU (default: what is here, or 80)")
    costs = parser.add_mutually_exclusive_group()
    costs.add_argument("--cost-table", help="that ds-hydra profile has written (default: costs are estimated)")
    costs.add_argument("--device", metavar="NAME", help="to assume, such as H100 (default: what is here, or A100)")
    parser.add_argument("--lengths", required=True, help="of the data, as in ds-hydra preview")
    parser.add_argument("--script-args", metavar="FILE", help="YAML or JSON that the script is started with, or its "
                        "options as one text: --script-args='--bf16 true'")  # fmt: skip
    parser.add_argument("--tokens", type=int, help="of a step (default: as many as the config's batches have)")
    parser.add_argument("--out", type=new_file, help="default: beside the config, NAME_hydra.json")
    args = parser.parse_args(arguments)
    return guarded(name, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Run the command with its parsed options. ConfigError or PlanError if the input is refused."""
    swap = swap_of(args.script)
    said = training_args(swap, args.script_args)
    host = swap.kind if swap.kind in HOSTS else TRAINER
    found = translated(config_of(args.config, host), host, said.constant)
    model = args.model or next((text for text in (*said.models, *swap.models) if Path(text).exists()), None)
    if model is None:
        raise ConfigError("give --model: the script loads none from a folder of this machine")
    from ds_hydra.commands.init_job import Job, device_here, gpus_here, memory_here
    from ds_hydra.commands.refusals import refuse_all

    gpus = args.gpus or gpus_here()
    if not gpus:
        raise ConfigError("give --gpus: there are none on this machine")
    refuse_all({**found.config, BLOCK: found.block}, host, gpus)
    job = Job.of(model, {**said.precise(found.config), BLOCK: found.block}, gpus, args.gpus_per_node,
                 args.device_memory or memory_here() or _GPU_GIB)  # fmt: skip
    sample = read_lengths(shipped(args.lengths), min(job.positions, found.block.get("context_length") or job.positions))
    costs = args.cost_table or device_here(args.device)
    settings = planned(swap, said, found, sample, Asked(gpus, args.tokens, args.lengths, args.cost_table))
    with moving("counting memory and planning steps"):
        times = job.both(sample.lengths.tolist(), settings, found.layout, costs)
    settings = with_recomputation(settings, times, recomputes(swap, said, found))
    refuse_all({**found.config, BLOCK: {one.name: one.value for one in settings}}, host, gpus)
    result = Result(swap, said, found, sample, settings, times)
    return _write(args, result, job, job.assumed(result.best, sample.lengths.tolist(), settings, found.layout, costs))


def _write(args: argparse.Namespace, result: Result, job: Job, costs: str) -> int:
    """Write the files and say all of it."""
    out = args.out or args.config.with_name(f"{args.config.stem}_hydra.json")
    reasons, patch = out.with_suffix(".txt"), out.with_suffix(".diff")
    commented = result.swap.host == "script"
    keys = "\n".join(init_text.of_keys(result))
    spans: dict[Path, frozenset[Span]] = dict(result.swap.spans)
    for path, of_file in renamed(args.script, str(args.config), str(out)).items():
        spans[path] = spans.get(path, frozenset()) | of_file
    diff = diff_of(spans)
    out.write_text(written(result.found.config, result.settings, commented), encoding="utf-8")
    if not commented:
        reasons.write_text(keys + "\n", encoding="utf-8")
    if diff:
        patch.write_text(diff, encoding="utf-8")
    estimated = "" if args.cost_table else " (estimated)"
    print(f"{out} is written. {init_text.headline(result)}{estimated}.\n")
    print(keys + "\n")
    print("\n".join(init_text.of_times(result, job.gpus, costs)) + "\n")
    for line in init_text.choices(result):
        print(line)
    if result.swap.note:
        print(f"The loop of {args.script}: {result.swap.note}.")
    if diff:
        print(f"\nChange the script, a loop of {result.swap.kind}: patch -p0 < {patch}\n{diff.rstrip()}")
    else:
        print(f"\n{args.script}, a loop of {result.swap.kind}, needs no change")
    print(f"\nStart it: {init_text.command_of(result, args.script, out, job.gpus, job.node_size)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
