"""NOTPURE. Pure: no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from ds_hydra.commands.scripts import Swap, TrainingArgs
from ds_hydra.commands.translated import OwnLayout, Translated
from ds_hydra.config.checks import AUTO
from ds_hydra.config.hosts import CALLS
from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.data.lengths import LengthSample, assumed_tokens, sample_batches
from ds_hydra.pipe.shape import ParallelScheme


def now_ms(
    table: CostTable, layout: OwnLayout, gpus: int, lengths: Sequence[int], tokens: int, context: int, steps: int
) -> float | None:
    """Mean ms of a step of the same batches that `preview_steps` plans; None for a layout that the table lacks.

    Sequences are packed as the sampler gives them, into micro-batches of up to `context` tokens, and dealt out in turn
    before or after that, whichever is faster. Under ZeRO-3 no rank begins a micro-batch before the others, as each
    layer's parameters are gathered from all.
    """
    scheme = ParallelScheme(layout.tp, layout.pp, layout.sp)
    if scheme not in table.schemes or gpus % scheme.num_ranks:
        return None
    batches = sample_batches(lengths, tokens, steps, 1, context)
    cost, replicas = table[scheme], gpus // scheme.num_ranks
    return fmean(_step_ms(cost, batch.tolist(), replicas, context, layout.stage == 3) for batch in batches)


def packed_in_order(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Micro-batches of at most `capacity` tokens: with 100 tokens 70, 40, 50, 60 become (70) (40 50) (60)."""
    packs: list[list[int]] = []
    room = 0
    for length in lengths:
        if length > room or not packs:
            packs.append([])
            room = capacity
        packs[-1].append(length)
        room -= length
    return packs


def _step_ms(cost: SchemeCost, lengths: Sequence[int], replicas: int, capacity: int, in_step: bool) -> float:
    everything = packed_in_order(lengths, capacity)
    ways = (  # sequences dealt out and packed, or packs dealt out
        [packed_in_order(lengths[first::replicas], capacity) for first in range(replicas)],
        [everything[first::replicas] for first in range(replicas)],
    )

    def taken(dealt: Sequence[Sequence[Sequence[int]]]) -> float:
        loads = [[cost.load_ms(pack) for pack in packs] for packs in dealt]
        if in_step and cost.scheme.pp == 1:
            return sum(map(max, zip_longest(*loads, fillvalue=0.0)))
        return max(map(cost.pipeline_ms, loads))

    return min(map(taken, ways))


RECOMPUTED = "activation_checkpointing"
_PLANS = "plans.jsonl"


class Setting(NamedTuple):
    """One setting of the block, and why it is that."""

    name: str
    value: Any
    why: str


class Asked(NamedTuple):
    """What the command line says of the job."""

    gpus: int
    tokens: int | None = None
    lengths: str = ""  # as the user named them
    cost_table: str | None = None


def planned(swap: Swap, said: TrainingArgs, found: Translated, sample: LengthSample, asked: Asked) -> list[Setting]:
    """What the block has already, and what is missing of it for a first run."""
    longest, block = int(sample.lengths.max()), {name: one for name, one in found.block.items() if one not in (None, 0)}
    context = Setting("context_length", longest, "the longest sequence of your data, in tokens")
    new = [_step(swap, said, found.config, sample, asked), context]
    if sample.patches:
        new.append(Setting("images", True, "your data have images: the encoder is trained, and planned with"))
    if sample.too_long:
        of, limit = len(sample.lengths) + sample.too_long, "hydra.context_length"
        if "context_length" not in block:
            limit = "the model's positions"
            new[1] = context._replace(why=f"the longest within {limit}; your longest has {sample.longest:,} tokens")
        why = f"{sample.too_long:,} of {of:,} sequences ({sample.too_long / of:.0%}) are longer than {limit}, up to "
        why += f'{sample.longest:,}: left out and counted; "truncate" cuts them, "error" ends the job'
        new.append(Setting("too_long", "skip", why))
    known = "lengths" in HydraConfig.__dataclass_fields__ and Path(asked.lengths).is_file()
    listed = block.get("strategies", AUTO) != AUTO
    whose = "your lengths" if known or not swap.handed_in else "lengths of web pages (yours are not known before)"
    new.append(Setting("strategies", "auto", f"layouts follow from {whose}, model and GPUs; the planner mixes them"))
    if swap.kind == CALLS and swap.handed_in:
        why = "the mean of the batches' means, as DeepSpeed's own loop has it; remove it for the mean over all tokens"
        new.append(Setting("loss_norm", "batch", why))
    if swap.handed_in and known and not listed:
        new.append(Setting("lengths", asked.lengths, "of your data: layouts are proposed for them"))
    new.append(Setting("plans_file", _PLANS, "so that ds-hydra report can compare with a fixed layout"))
    if asked.cost_table:
        new.append(Setting("cost_table", asked.cost_table, "measured costs, by which steps are planned"))
    old = [Setting(name, value, "as your block has it") for name, value in block.items()]
    return [*old, *(one for one in new if one.name not in block)]


def _step(swap: Swap, said: TrainingArgs, config: Mapping[str, Any], sample: LengthSample, asked: Asked) -> Setting:
    """How many tokens a step has."""
    longest, mean, tokens = int(sample.lengths.max()), float(np.mean(sample.lengths)), asked.tokens
    sequences, where = _batch(config, said, asked.gpus)
    if tokens is not None:
        why = "as --tokens says"
    elif sequences and said.get("packing").value and (packed := said.get("max_length").value):
        tokens, why = sequences * int(packed), f"{sequences} packs of {int(packed):,} tokens, by {where}"
    elif sequences:
        tokens = max(longest, round(sequences * mean))
        why = f"{sequences} sequences, by {where}, of {mean:.0f} tokens in the mean"
    else:
        tokens = assumed_tokens(longest, asked.gpus)
        why = "nothing says how large a batch is: a long sequence, or 8,192 tokens, for each GPU"
    if swap.handed_in:
        why = f"for the first plans alone: your script hands its batches in, which are the steps ({why})"
    else:
        why = f"a step draws sequences until it holds as many tokens: {why}"
    return Setting("tokens_per_step", tokens, why)


def _batch(config: Mapping[str, Any], said: TrainingArgs, gpus: int) -> tuple[int | None, str]:
    """Sequences of a step, and who says so."""
    whole = config.get("train_batch_size")
    if isinstance(whole, int):
        return whole, "the config"
    each, times = (config.get(key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    where = "the config"
    if not isinstance(each, int):
        each, where = said.get("per_device_train_batch_size")
    if not isinstance(times, int):
        times = said.get("gradient_accumulation_steps").value
    if not isinstance(each, int):
        return None, ""
    return each * gpus * (times if isinstance(times, int) else 1), where


def written(config: Mapping[str, Any], found: Sequence[Setting], commented: bool) -> str:
    """The config's text with the block; each setting under its reason where comments are read."""
    if not commented:
        return json.dumps({**config, "hydra": {one.name: one.value for one in found}}, indent=2) + "\n"
    body = json.dumps(config, indent=2).rstrip("}").rstrip()
    rows = [f"    // {one.why}\n    {json.dumps(one.name)}: {json.dumps(one.value)}" for one in found]
    comma = "," if config else ""
    return f'{body}{comma}\n  "hydra": {{\n' + ",\n".join(rows) + "\n  }\n}\n"
