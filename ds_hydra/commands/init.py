"""Write the block "hydra" for a job that runs on DeepSpeed now: values from its model, GPUs and lengths, and why.

  ds-hydra init train.py ds_config.json --model my_model/ --gpus 64 --lengths lengths.txt
      [--cost-table FILE | --device NAME] [--device-memory GIB] [--tokens N] [--out ds_config_hydra.json]

It reads the script without running it, says which lines to change, and what gain to expect: by a measured cost table,
or as an estimate from the model's FLOPs, which says on what device.
A config for Trainer, TRL or Accelerate must be plain JSON; the reasons stand in a text beside it there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ds_hydra.commands.figures import CommandParser, guarded, new_file
from ds_hydra.commands.shipped import shipped
from ds_hydra.commands.swapped import CALLS, STEPS, Swap, swap_of
from ds_hydra.config.hydra_block import parse_config
from ds_hydra.config.read import read_config
from ds_hydra.data.length_sources import assumed_tokens, read_lengths
from ds_hydra.zero_hetero.errors import ConfigError

_STEPS = 6  # that the preview plans
_GPU_GIB = 80.0


class Setting(NamedTuple):
    """One setting of the block, and why it is that."""

    name: str
    value: Any
    why: str


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra init") -> int:
    """Write the config; return 2 for input that is refused."""
    parser = CommandParser(prog=name, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("script", type=Path, help="the training script")
    parser.add_argument("config", type=Path, help="its DeepSpeed config")
    parser.add_argument("--model", help="config JSON, or checkpoint folder (default: a folder that the script loads)")
    parser.add_argument("--gpus", type=int, help="of the job (default: those of this machine)")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--device-memory", type=float, metavar="GIB", help="of a GPU (default: what is here, or 80)")
    costs = parser.add_mutually_exclusive_group()
    costs.add_argument("--cost-table", help="that ds-hydra profile has written (default: costs are estimated)")
    costs.add_argument("--device", metavar="NAME", help="to assume, such as H100 (default: what is here, or A100)")
    parser.add_argument("--lengths", required=True, help="of the data, as in ds-hydra preview")
    parser.add_argument("--tokens", type=int, help="of a step (default: as many as the config's batches have)")
    parser.add_argument("--out", type=new_file, help="default: beside the config, NAME_hydra.json")
    args = parser.parse_args(arguments)
    return guarded(name, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Run the command with its parsed options. ConfigError or PlanError if the input is refused."""
    try:
        swap = swap_of(args.script.read_text(encoding="utf-8"), str(args.script))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the script {args.script}: {error}") from error
    config = read_config(config=str(args.config))
    if "hydra" in config:
        raise ConfigError(f'{args.config} has a block "hydra" already: remove it to have a new one')
    model = args.model or next((text for text in swap.models if Path(text).exists()), None)
    if model is None:
        raise ConfigError("give --model: the script loads none from a folder of this machine")
    from ds_hydra.commands.init_job import Job, device_here, gpus_here, memory_here

    gpus = args.gpus or gpus_here()
    if not gpus:
        raise ConfigError("give --gpus: there are none on this machine")
    job = Job.of(model, config, gpus, args.gpus_per_node, args.device_memory or memory_here() or _GPU_GIB)
    lengths = read_lengths(shipped(args.lengths), job.positions).lengths
    device = device_here(args.device)
    found = settings(swap, config, lengths.tolist(), gpus, args.tokens)
    if args.cost_table:
        found.append(Setting("cost_table", args.cost_table, "measured costs, by which steps are planned"))
    block = {one.name: one.value for one in found}
    parse_config({**config, "hydra": block})  # what the job would refuse is refused here
    out = args.out or args.config.with_name(f"{args.config.stem}_hydra.json")
    commented = swap.kind in (CALLS, STEPS)
    out.write_text(written(config, found, commented), encoding="utf-8")
    if not commented:
        reasons = "".join(f"{one.name}: {one.why}\n" for one in found)
        out.with_suffix(".txt").write_text(reasons, encoding="utf-8")
    print(f"{out}: the config with the block" + ("" if commented else f"; {out.with_suffix('.txt')}: why"))
    for one in found:
        print(f"  {one.name} = {json.dumps(one.value)}: {one.why}")
    print(f"{args.script}, a loop of {swap.kind}; change")
    for line in swap.lines:
        print(f"  line {line.number}:  {line.old}\n        to:  {line.new}")
    if swap.note:
        print(f"and its loop: {swap.note}")
    tokens, context = block["tokens_per_step"], block["context_length"]
    print(job.expected(lengths.tolist(), tokens, context, _STEPS, device, args.cost_table))
    return 0


def settings(
    swap: Swap, config: Mapping[str, Any], lengths: Sequence[int], gpus: int, tokens: int | None
) -> list[Setting]:
    """The block's settings for a first run, at most five."""
    longest, mean, whose = max(lengths), float(np.mean(lengths)), "your lengths"
    sequences = _batch(config, gpus)
    if tokens is not None:
        why = "as --tokens says"
    elif sequences:
        tokens = max(longest, round(sequences * mean))
        why = f"{sequences} sequences, the config's batch, of {mean:.0f} tokens in the mean"
    else:
        tokens = assumed_tokens(longest, gpus)
        why = "the config does not say how large a batch is: a long sequence, or 8,192 tokens, for each GPU"
    if swap.handed_in:
        why = f"an estimate, which planning begins with; your script hands its batches in, which are the steps ({why})"
        whose = "lengths of web pages (a job does not know what will be handed in)"
    else:
        why = f"a step draws sequences until it holds as many tokens: {why}"
    found = [
        Setting("tokens_per_step", tokens, why),
        Setting("context_length", longest, "the longest sequence of your data, in tokens"),
        Setting("strategies", "auto", f"candidates follow from {whose}, model and GPUs; the planner mixes them"),
    ]
    if swap.kind == CALLS and swap.handed_in:
        why = "the mean of the batches' means, as DeepSpeed's own loop has it; remove it for the mean over all tokens"
        found.append(Setting("loss_norm", "batch", why))
    return found


def _batch(config: Mapping[str, Any], gpus: int) -> int | None:
    """Sequences of a step by the config's batch sizes; None where it does not say."""
    whole = config.get("train_batch_size")
    if isinstance(whole, int):
        return whole
    each, times = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps", 1)
    return each * gpus * (times if isinstance(times, int) else 1) if isinstance(each, int) else None


def written(config: Mapping[str, Any], found: Sequence[Setting], commented: bool) -> str:
    """The config's text with the block; each setting under its reason where comments are read."""
    if not commented:
        return json.dumps({**config, "hydra": {one.name: one.value for one in found}}, indent=2) + "\n"
    body = json.dumps(config, indent=2).rstrip("}").rstrip()
    rows = [f"    // {one.why}\n    {json.dumps(one.name)}: {json.dumps(one.value)}" for one in found]
    comma = "," if config else ""
    return f'{body}{comma}\n  "hydra": {{\n' + ",\n".join(rows) + "\n  }\n}\n"


if __name__ == "__main__":
    sys.exit(main())
