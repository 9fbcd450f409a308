"""A DeepSpeed config as people have it, translated for this engine: its keys, each with a reason, and the block. Pure.

What this engine does by itself, or not at all and without a change of results, is taken out; "auto" stays where the
host of the script fills it in. What changes results stays as it is, for `ds_hydra.entry.accept` to refuse. Of the block
"hydra" what is missing for a first run is set. `now_ms` is what a step takes with the config as it was.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from ds_hydra.commands.scripts import Swap, TrainingArgs
from ds_hydra.config.checks import AUTO, read_config
from ds_hydra.config.deepspeed_settings import (
    CHANGES_RESULTS,
    KINDS,
    REFUSED,
    TOLD,
    ZERO_SETTINGS,
    asks_for_something,
    states_offload,
)
from ds_hydra.config.hosts import ACCELERATE, CALLS, STEPS, autos, filled_in, value_at
from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.data.lengths import LengthSample, assumed_tokens, sample_batches
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.zero_hetero.errors import ConfigError

YAML = (".yaml", ".yml")
_FILE = "deepspeed_config_file"


def config_of(path: Path, host: str) -> dict[str, Any]:
    """The DeepSpeed config of a file: its own, or that of Accelerate's YAML. ConfigError where it has none.

    What Accelerate or Trainer fill in is "auto"; `host` is one of `config.hosts.HOSTS`.
    """
    if path.suffix not in YAML:
        return read_config(config=str(path))
    import yaml

    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    plugin = given.get("deepspeed_config") if isinstance(given, Mapping) else None
    if not isinstance(plugin, Mapping):
        raise ConfigError(f"{path} has no block deepspeed_config: name a DeepSpeed config, or a YAML with one")
    if isinstance(plugin.get(_FILE), str):
        named = Path(plugin[_FILE])
        return read_config(config=str(named if named.exists() else path.parent / named))
    return _made(plugin, str(given.get("mixed_precision", "no")), host)


def _made(plugin: Mapping[str, Any], precision: str, host: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": plugin.get("zero_stage", 2)}
    for name in ("offload_optimizer", "offload_param"):
        if (device := plugin.get(f"{name}_device", "none")) != "none":
            zero[name] = {"device": device}
    config: dict[str, Any] = {
        "train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO, "zero_optimization": zero,
        "gradient_accumulation_steps": plugin.get("gradient_accumulation_steps", AUTO),
        "gradient_clipping": plugin.get("gradient_clipping", AUTO),
    }  # fmt: skip
    if host == ACCELERATE:
        return config | ({precision: {"enabled": True}} if precision in ("bf16", "fp16") else {})
    # Trainer compares these with its arguments, and gives the numbers itself.
    autos = dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping"), AUTO)
    return config | autos | {"bf16": {"enabled": AUTO}, "fp16": {"enabled": AUTO}}


KEPT, DROPPED = "kept", "dropped"
ZERO, BLOCK, RECOMPUTED = "zero_optimization", "hydra", "activation_checkpointing"

_SAID = {  # of a value of the config: what scripts call it
    "train_batch_size": ("train_batch_size", "global_batch_size"),
    "train_micro_batch_size_per_gpu": ("train_micro_batch_size_per_gpu", "per_device_train_batch_size",
                                       "micro_batch_size", "batch_size"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "grad_accum_steps", "gradient_accumulation"),
    "gradient_clipping": ("gradient_clipping", "max_grad_norm", "grad_clip", "clip_grad_norm"),
    "lr": ("learning_rate", "lr"),
    "warmup_max_lr": ("learning_rate", "lr"),
    "weight_decay": ("weight_decay", "wd"),
    "betas": ("betas", "adam_betas"),
    "eps": ("adam_epsilon", "adam_eps", "eps"),
    "warmup_num_steps": ("num_warmup_steps", "warmup_steps", "warmup_num_steps", "lr_warmup_steps"),
    "total_num_steps": ("max_train_steps", "total_steps", "max_steps", "num_training_steps", "total_num_steps"),
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "gradient_clipping": 1.0, "warmup_min_lr": 0.0,
    "warmup_max_lr": 1e-3, "warmup_num_steps": 1000, "enabled": False, "gradient_accumulation_steps": 1,
    "train_batch_size": "the product of the other two and the GPUs",
    "train_micro_batch_size_per_gpu": "train_batch_size over GPUs",
}  # fmt: skip
"""What DeepSpeed takes where a key is left out."""


class Row(NamedTuple):
    """What became of a key of the config, and why."""

    key: str
    becomes: str
    why: str


class OwnLayout(NamedTuple):
    """What the config runs on DeepSpeed."""

    stage: int = 0
    tp: int = 1
    sp: int = 1
    pp: int = 1

    def __str__(self) -> str:
        degrees = [f"{name} {n}" for name, n in (("TP", self.tp), ("sequence parallel", self.sp), ("PP", self.pp))
                   if n > 1]  # fmt: skip
        return ", ".join([f"ZeRO-{self.stage}" if self.stage else "data parallel", *degrees])


@dataclass
class Translated:
    """A config without its block "hydra", that block, and what became of the keys."""

    config: dict[str, Any]
    block: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    layout: OwnLayout = field(default_factory=OwnLayout)
    recomputed: bool = False  # whether DeepSpeed's block of activation checkpointing asked for it


def translated(config: Mapping[str, Any], host: str, said: Callable[[str], Any]) -> Translated:
    """Take out what this engine does not need, and fill in what nobody would.

    `host` is one of `config.hosts.HOSTS`; `said(name)` is the constant that a script gives a name, or None.
    """
    found = Translated(copy.deepcopy(dict(config)), {})
    block = found.config.pop(BLOCK, None)
    if isinstance(block, dict):
        found.block = block
        found.rows.append(Row(BLOCK, KEPT, "what stands in it stays; what is missing is set"))
    elif block is not None:
        found.config[BLOCK] = block
    found.layout = OwnLayout(
        _count(value_at(config, ZERO, "stage")), _count(value_at(config, "tensor_parallel", "autotp_size")) or 1,
        _count(config.get("sequence_parallel_size")) or _count(value_at(config, "sequence_parallel", "size")) or 1,
        _count(value_at(config, "pipeline", "stages")) or 1,
    )  # fmt: skip
    _translate_zero(found, host)
    for key in list(found.config):
        _translate(found, key, host)
    found.rows += _fill(found.config, host, said)
    together = found.layout.tp * found.layout.sp * found.layout.pp
    if together > 1 and host != STEPS:
        found.rows.append(Row("batches", "of all ranks", f"{together} ranks shared a batch and now each has its own: "
                              f"for the same update, {together} times fewer gradient_accumulation_steps"))  # fmt: skip
    return found


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _translate(found: Translated, key: str, host: str) -> None:
    """One key of the top level, but "zero_optimization"."""
    value = found.config[key]
    asks = asks_for_something(key, value)
    if key == RECOMPUTED:
        del found.config[key]
        found.recomputed = isinstance(value, Mapping) and any(value.values())
        by = "gradient_checkpointing of your arguments" if _is_hosted(host) else "hydra.activation_checkpointing"
        found.rows.append(Row(key, DROPPED, f"{by} says whether layers are recomputed"))
    elif key in TOLD or (key in REFUSED and not asks):  # others are for the check to refuse
        del found.config[key]
        found.rows.append(Row(key, DROPPED, TOLD[key] if key in TOLD and asks else "it asks for nothing"))
    elif key in ("bf16", "fp16") and isinstance(value, dict):
        for name in [name for name, one in value.items() if name != "enabled" and (one is None or one is False)]:
            del value[name]
            found.rows.append(Row(f"{key}.{name}", DROPPED, "it asks for nothing"))


def _is_hosted(host: str) -> bool:
    return host not in (CALLS, STEPS)


def _translate_zero(found: Translated, host: str) -> None:
    zero = found.config.get(ZERO)
    if not isinstance(zero, Mapping):
        if zero is None and _is_hosted(host):
            found.config[ZERO] = {"stage": 1}
            found.rows.append(Row(ZERO, '{"stage": 1}', "Accelerate asks for it"))
        return
    stage = zero.get("stage", 0)
    kept = stage if stage in (0, 1) and not isinstance(stage, bool) else 1
    if stage not in (0, 1, 2, 3, AUTO):
        return  # for the check to refuse
    found.config[ZERO] = {"stage": kept}
    if kept != stage:
        why = "FP32 parameters, gradients' sums and states are at 1/N on each rank; a step's layouts say who has which "
        found.rows.append(Row(f"{ZERO}.stage {stage}", f"stage {kept}", f"{why}parameters"))
    left = {key: one for key, one in zero.items() if key in CHANGES_RESULTS or key not in ZERO_SETTINGS}
    found.config[ZERO] |= left  # for the check to refuse or to tell
    if taken := states_offload(zero):
        found.config[ZERO]["offload_optimizer"] = {"device": "cpu"}
        why = "FP32 parameters and optimizer states are in the host's memory; devices fetch them for an update"
        found.rows.append(Row(f"{ZERO}.offload_optimizer", KEPT, why))
    for why, names in KINDS.items():
        keys = [key for key in zero if key in names - taken]
        if keys:
            key, told = (f"{ZERO}.{keys[0]}", why) if len(keys) == 1 else (f"{ZERO}, {len(keys)} keys", _of(keys, why))
            found.rows.append(Row(key, DROPPED, told))


def _of(keys: list[str], why: str) -> str:
    return f"{', '.join(keys)}: {why}"


def _fill(config: dict[str, Any], host: str, said: Callable[[str], Any]) -> Iterator[Row]:
    """Each "auto" that nobody fills in becomes what the script says, or DeepSpeed's default."""
    left = set(autos(filled_in(config, host), ""))
    filled = [place for place in autos(config, "") if place not in left]
    if filled:
        by = "Accelerate" if host == ACCELERATE else "transformers"
        yield Row(f'"{AUTO}", {len(filled)} times', KEPT, f"{', '.join(filled)}: {by} fills them in")
    for place in sorted(left):
        *outer, key = place.split(".")
        block = config
        for name in outer:
            block = block[name]
        value = next((one for name in _SAID.get(key, ()) if (one := said(name)) is not None), None)
        if value is not None:
            block[key] = list(value) if isinstance(value, tuple) else value
            yield Row(f'{place} "{AUTO}"', str(value), "the constant in your script")
        else:
            del block[key]
            default = f"default is {_DEFAULTS[key]}" if key in _DEFAULTS else "own default holds"
            yield Row(f'{place} "{AUTO}"', DROPPED, f"nobody fills it in here; DeepSpeed's {default}")


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
