"""What `ds-hydra init` says: the result first, tables of keys and seconds, and what to do. Pure."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ds_hydra.commands.planned_block import RECOMPUTED, Setting
from ds_hydra.commands.script_args import TrainingArgs
from ds_hydra.commands.swapped import Swap
from ds_hydra.commands.translated import Translated
from ds_hydra.data.lengths import LengthSample
from ds_hydra.rivals.preview import BALANCED

_LITTLE = 1.05  # times as fast
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
    way = " with recomputation switched off" if result.recomputes and not result.best else ""
    here = f"A step takes {_seconds(ours)} s{way}"
    if before is None:
        return f"{here}; what you run now does not hold the longest sequence, or was not counted"
    little = "; little is to be gained on these lengths" if before / ours < _LITTLE else ""
    return f"{here}, now {_seconds(before)} s: {before / ours:.2f} times as fast{little}"


def choices(result: Result) -> Iterator[str]:
    """Which of the ways to take, and how; and what of the data the script cuts."""
    now, best = result.recomputes, result.best
    if now and not best:
        yield f"Switch recomputation off: {_switch(result)}. Layouts hold the longest sequence without it."
    elif best and result.times[False].ours is None:
        yield f"Layers are recomputed: without it no layout holds more than {result.times[False].holds:,} tokens."
    elif best:
        yield "Recompute layers: it is the faster way here."
    yield from truncated(result.said, result.sample)
    if result.swap.handed_in and (layouts := result.times[best].layouts):
        yield f'Or in place of "auto" the layouts that these lengths took: "strategies": {json.dumps(layouts)}'


def _switch(result: Result) -> str:
    said = result.said.get("gradient_checkpointing")
    if said.value:
        where = f"in {said.where}" if result.said.in_file.get("gradient_checkpointing") else f"in {result.said.name}"
        return f"gradient_checkpointing=False {where} (now: {said.where})"
    if result.swap.arguments.recomputes:
        return "take gradient_checkpointing_enable() out of the script"
    return f"take {RECOMPUTED} out of the config"


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
    if result.recomputes and not result.best and result.said.get("gradient_checkpointing").value:
        yield "gradient_checkpointing", False
    if _cuts(result.said, result.sample):
        yield "max_length", int(result.sample.lengths.max())
