"""Write the block for a job that runs on DeepSpeed now, and say what gain to expect.

  ds-hydra init train.py ds_config.json --model my_model/ --gpus 64 --lengths lengths.txt
      [--script-args FILE] [--cost-table FILE | --device NAME] [--device-memory GIB] [--tokens N] [--out FILE]

It reads the script, and what it imports of its project, without running them; writes the config, and a diff of the
lines to change; and tells what a step takes now and here: by a measured cost table, or as an estimate from the model's
FLOPs, which says on what device. What it cannot translate it refuses, all keys at once, and writes nothing.
A config for Trainer, TRL or Accelerate must be plain JSON; the reasons stand in a text beside it there.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ds_hydra.commands.figures import LITTLE, CommandParser, guarded, new_file, shipped
from ds_hydra.commands.moving import moving
from ds_hydra.commands.scripts import Span, Swap, TrainingArgs, diff_of, renamed, swap_of, training_args
from ds_hydra.commands.translated import RECOMPUTED, Asked, Setting, Translated, config_of, planned, translated, written
from ds_hydra.config.hosts import HOSTS, TRAINER
from ds_hydra.config.hydra_block import BLOCK
from ds_hydra.data.lengths import LengthSample, all_lengths
from ds_hydra.rivals.preview import BALANCED
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.commands.init_job import Job


_WIDTH = 116


class Times(NamedTuple):
    """Milliseconds of a step, None where the longest sequence does not fit; and what ran."""

    now: float | None
    ours: float | None = None
    rivals: Mapping[str, tuple[str, float]] = MappingProxyType({})  # by what they are: how they are set up, and ms
    layouts: tuple[str, ...] = ()  # that ours chose, the most frequent first
    now_holds: int = 0  # tokens, on DeepSpeed
    holds: int = 0  # tokens of the longest micro-batch here

    @property
    def fixed(self) -> float | None:
        """Of the best fixed layout with balanced sequences."""
        return self.rivals[BALANCED][1] if BALANCED in self.rivals else None


class Result(NamedTuple):
    """All that is found out about a job."""

    swap: Swap
    said: TrainingArgs
    found: Translated
    sample: LengthSample
    settings: Sequence[Setting]
    times: Mapping[bool, Times]  # by whether layers are recomputed

    @property
    def recomputes(self) -> bool:
        """Whether the job recomputes its layers now."""
        return recomputes(self.swap, self.said, self.found)

    @property
    def best(self) -> bool:
        """Whether the faster way recomputes layers."""
        kept, again = (self.times[way].ours for way in (False, True))
        return kept is None or (again is not None and again < kept)


def recomputes(swap: Swap, said: TrainingArgs, found: Translated) -> bool:
    """Whether a job recomputes its layers as it is."""
    return bool(
        said.get("gradient_checkpointing").value or swap.arguments.recomputes or found.recomputed
        or found.block.get(RECOMPUTED)
    )  # fmt: skip


def with_recomputation(settings: Sequence[Setting], times: Mapping[bool, Times], recomputed: bool) -> list[Setting]:
    """The settings, with recomputation where nothing else lets the longest sequence fit and nobody asks for it."""
    if times[False].ours is not None or recomputed or any(one.name == RECOMPUTED for one in settings):
        return list(settings)
    why = f"without it no layout holds more than {times[False].holds:,} tokens"
    return [*settings, Setting(RECOMPUTED, True, why)]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of columns, the last one wrapped."""
    widths = [max(len(row[at]) for row in (headers, *rows)) for at in range(len(headers) - 1)]
    widths = [min(width, 44) for width in widths]
    indent = sum(widths) + 2 * len(widths)
    for row in (headers, *rows):
        begin = "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
        if len(begin) > indent:
            yield begin.rstrip()
            begin = " " * indent
        lines = textwrap.wrap(row[-1], max(30, _WIDTH - indent), break_on_hyphens=False) or [""]
        yield (begin + lines[0]).rstrip()
        yield from (" " * indent + line for line in lines[1:])


def of_keys(result: Result) -> Iterator[str]:
    """What became of the config's keys, and the block's settings."""
    rows = [(row.key, row.becomes, row.why) for row in result.found.rows]
    named = {word for row in result.found.rows for word in re.findall(r"\w+", f"{row.key} {row.why}")}
    plain = [key for key in result.found.config if key not in named]
    if plain:
        rows.append(("the rest", "kept", ", ".join(plain)))
    yield from table(("key", "becomes", "why"), rows)
    yield ""
    settings = [(one.name, json.dumps(one.value), one.why) for one in result.settings]
    yield from table(("hydra", "value", "why"), settings)


def of_times(result: Result, gpus: int, costs: str) -> Iterator[str]:
    """A step now, as other systems would run it, and here, with layers kept and recomputed."""
    tokens = next(one.value for one in result.settings if one.name == "tokens_per_step")
    yield f"Seconds of a step of {tokens:,} tokens on {gpus} GPUs. {costs}"
    context = next(one.value for one in result.settings if one.name == "context_length")

    def cell(ms: float | None, holds: int, what: str = "") -> str:
        if ms is None and result.sample.patches and holds >= context:
            return "not known of images"
        if ms is None:
            return f"not for {context:,} tokens" + (f" ({holds:,} fit)" if holds < context else "")
        return _seconds(ms) + (f"  {what}" if what else "")

    both = [result.times[again] for again in (False, True)]
    rows = [
        (f"what you run now: {result.found.layout}", *(cell(one.now, one.now_holds) for one in both)),
        *(
            (name, *(cell(*_rival(one, name)) for one in both))
            for name in dict.fromkeys(name for one in both for name in one.rivals)
        ),
        ("ds-hydra", *(cell(one.ours, one.holds, one.layouts[0] if one.layouts else "") for one in both)),
    ]
    marks = [f"{'layers recomputed' if again else 'layers kept'}{' (now)' if again == result.recomputes else ''}"
             for again in (False, True)]  # fmt: skip
    yield from table(("", *marks), rows)


def _rival(times: Times, name: str) -> tuple[float | None, int, str]:
    """What `cell` takes of another system."""
    layout, ms = times.rivals.get(name, ("", None))
    return ms, times.holds, layout


def _seconds(ms: float) -> str:
    return f"{ms / 1e3:.2f}" if ms >= 1e3 else f"{ms / 1e3:.3g}"


def headline(result: Result) -> str:
    """The result in a line; the seconds are those of `of_times`."""
    ours, before = result.times[result.best].ours, result.times[result.recomputes].now
    assert ours is not None, "what fits nowhere is refused"
    way = " with layers kept" if result.recomputes and not result.best else ""
    here = f"A step takes {_seconds(ours)} s{way}"
    if before is None:
        return f"{here}; what you run now does not hold the longest sequence, or was not counted"
    little = "; little is to be gained on these lengths" if before / ours < LITTLE else ""
    return f"{here}, now {_seconds(before)} s: {before / ours:.2f} times as fast{little}"


def choices(result: Result) -> Iterator[str]:
    """Which of the ways to take, and how; and what of the data the script cuts."""
    now, best = result.recomputes, result.best
    if now and not best:
        yield "Layers are kept, though recomputation is allowed: layouts hold the longest sequence so."
    elif best and result.times[False].ours is None:
        yield f"Layers are recomputed: without it no layout holds more than {result.times[False].holds:,} tokens."
    elif best:
        yield "Recompute layers: it is the faster way here."
    ours, fixed = result.times[best].ours, result.times[best].fixed
    if ours is not None and fixed is not None and fixed < ours:
        layout = result.times[best].rivals[BALANCED][0]
        yield f"A fixed layout set up by hand, {layout}, would be {ours / fixed:.2f} times as fast as ds-hydra."
    yield from truncated(result.said, result.sample)
    if result.swap.handed_in and (layouts := result.times[best].layouts):
        yield f'Or in place of "auto" the layouts that these lengths took: "strategies": {json.dumps(layouts)}'


def truncated(said: TrainingArgs, sample: LengthSample) -> Iterator[str]:
    """What TRL cuts of the data."""
    most, lengths = said.get("max_length"), sample.lengths
    if not _cuts(said, sample):
        return
    kept = lengths.clip(max=most.value).sum() / lengths.sum()
    yield (
        f"max_length is {most.value:,} ({most.where}): TRL cuts {(lengths > most.value).mean():.0%} of your sequences "
        f"and {1 - kept:.0%} of your tokens. Write max_length={int(lengths.max())}; the seconds above are for that."
    )


def _cuts(said: TrainingArgs, sample: LengthSample) -> bool:
    most = said.get("max_length").value
    return bool(said.name) and isinstance(most, int) and most < int(sample.lengths.max())


def command_of(result: Result, script: Path, out: Path, gpus: int, node_size: int) -> str:
    """How the job is started."""
    swap = result.swap
    nodes = math.ceil(gpus / node_size)
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if nodes > 1 else ""
    if swap.host == "accelerate":
        several = f"--num_machines {nodes} --machine_rank N --main_process_ip HOST " if nodes > 1 else ""
        return (
            f"accelerate launch --use_deepspeed --deepspeed_config_file {out} --num_processes {gpus} {several}{script}"
        )
    option = "--deepspeed" if swap.host == "trainer" else "--deepspeed_config"
    named = f" {option} {out}"
    said = "".join(f" --{name} {value}" for name, value in _changed(result)) if swap.arguments.parsed else ""
    return f"torchrun {several}--nproc-per-node {min(gpus, node_size)} {script} [your options]{said}{named}"


def _changed(result: Result) -> Iterator[tuple[str, object]]:
    """Training arguments that are better another way."""
    if _cuts(result.said, result.sample):
        yield "max_length", int(result.sample.lengths.max())


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
    from ds_hydra.commands.job_config import refuse_all

    gpus = args.gpus or gpus_here()
    if not gpus:
        raise ConfigError("give --gpus: there are none on this machine")
    refuse_all({**found.config, BLOCK: found.block}, host, gpus)
    spec = shipped(args.lengths)
    every = all_lengths(spec)
    block = {"images": True, **found.block} if every.patches else found.block
    job = Job.of(model, {**said.precise(found.config), BLOCK: block}, gpus, args.gpus_per_node,
                 args.device_memory or memory_here() or _GPU_GIB)  # fmt: skip
    sample = every.within(min(job.positions, found.block.get("context_length") or job.positions), spec)
    job = replace(job, patches=sample.patches)
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
    keys = "\n".join(of_keys(result))
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
    print(f"{out} is written. {headline(result)}{estimated}.\n")
    print(keys + "\n")
    print("\n".join(of_times(result, job.gpus, costs)) + "\n")
    for line in choices(result):
        print(line)
    if result.swap.note:
        print(f"The loop of {args.script}: {result.swap.note}.")
    if diff:
        print(f"\nChange the script, which uses {result.swap.kind}: patch -p0 < {patch}\n{diff.rstrip()}")
    else:
        print(f"\n{args.script}, which uses {result.swap.kind}, needs no change")
    print(f"\nStart it: {command_of(result, args.script, out, job.gpus, job.node_size)}")
    return 0
