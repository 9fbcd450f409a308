"""A DeepSpeed config as people have it in; the one for this engine, key by key with a reason, out. Pure.

What this engine does by itself, or not at all and without a change of results, is taken out; "auto" stays where the
host of the script fills it in. What changes results stays as it is, for `ds_hydra.entry.accept` to refuse.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ds_hydra.config.checks import AUTO
from ds_hydra.config.deepspeed_keys import HONOURED, TOLD
from ds_hydra.config.hosts import ACCELERATE, CALLS, STEPS, filled_in
from ds_hydra.config.zero_block import CHANGES_RESULTS, ZERO_SETTINGS

KEPT, DROPPED = "kept", "dropped"
ZERO, BLOCK, RECOMPUTED = "zero_optimization", "hydra", "activation_checkpointing"

_LAYOUT = {
    "pipeline": "stages follow from the layouts (ppN)",
    "tensor_parallel": "tensor parallel degrees follow from the layouts (tpN)",
    "sequence_parallel_size": "sequence parallel degrees follow from the layouts (spN)",
    "data_parallel_size": "how many pipelines there are follows from the layouts",
    "expert_parallel": "whole experts are spread within a stage, where a layout says so (epN)",
}
_OTHERS = {
    "autotuning": "the planner searches the layouts",
    "elasticity": "hydra.elastic is the same for this engine; the batch is as large as the script makes it",
    "fp8": "",
}
_OF_ZERO = "this engine plans its own messages"
_GATHERED = "a saved model is a whole Hugging Face folder"
_ZERO_PP = "ZeRO++ has no counterpart here; without it nothing is rounded"
_OFFLOAD = "nothing is offloaded; below stands whether the job fits so"
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
    "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "gradient_clipping": 0.0, "warmup_min_lr": 0.0,
    "warmup_max_lr": 1e-3, "warmup_num_steps": 1000, "enabled": False, "gradient_accumulation_steps": 1,
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
        _count(_at(config, ZERO, "stage")), _count(_at(config, "tensor_parallel", "autotp_size")) or 1,
        _count(config.get("sequence_parallel_size")) or 1, _count(_at(config, "pipeline", "stages")) or 1,
    )  # fmt: skip
    _translate_zero(found, host)
    for key in list(found.config):
        _translate(found, key, host)
    found.rows += _fill(found.config, host, said)
    return found


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _at(config: Mapping[str, Any], *path: str) -> Any:
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _translate(found: Translated, key: str, host: str) -> None:
    """One key of the top level, but "zero_optimization"."""
    value = found.config[key]
    off = value is None or (isinstance(value, Mapping) and _is_off(value))
    if key == RECOMPUTED:
        del found.config[key]
        found.recomputed = isinstance(value, Mapping) and any(one not in (None, False, 0) for one in value.values())
        by = (
            "your script's gradient_checkpointing says it"
            if _is_hosted(host)
            else "hydra.activation_checkpointing is it"
        )
        found.rows.append(Row(key, DROPPED, by))
    elif key in _LAYOUT or key in _OTHERS or key in TOLD:
        del found.config[key]
        found.rows.append(Row(key, DROPPED, {**TOLD, **_OTHERS, **_LAYOUT}[key]))
    elif off and key not in HONOURED:
        del found.config[key]
        found.rows.append(Row(key, DROPPED, "it is switched off"))
    elif key in ("bf16", "fp16") and isinstance(value, dict):
        for name in [name for name, one in value.items() if name != "enabled" and one in (None, False)]:
            del value[name]
            found.rows.append(Row(f"{key}.{name}", DROPPED, "it is switched off"))
        if value.pop("immediate_grad_update", None) is not None:
            found.rows.append(Row(f"{key}.immediate_grad_update", DROPPED, "gradients add up in FP32 as they come"))


def _is_off(block: Mapping[str, Any]) -> bool:
    """ "auto" is off too: of blocks that the engine does not honour nobody fills it in."""
    return not block or block.get("enabled") in (False, AUTO) or block.get("disable") is True


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
    others: dict[str, list[str]] = {}
    for key, value in zero.items():
        if key == "stage":
            continue
        if key in CHANGES_RESULTS or key not in ZERO_SETTINGS:  # for the check to refuse
            found.config[ZERO][key] = value
            continue
        why = _OF_ZERO
        if key in ("offload_optimizer", "offload_param"):
            device = value.get("device", "none") if isinstance(value, Mapping) else value
            why = _OFFLOAD if device not in (None, False, "none") else "nothing is offloaded"
        elif key.startswith("zero_"):
            why = _ZERO_PP if value else _OF_ZERO
        elif "gather" in key and key.endswith("model_save"):
            why = _GATHERED
        others.setdefault(why, []).append(key)
    found.rows += [
        Row(f"{ZERO}, {len(keys)} of it", DROPPED, f"{', '.join(keys)}: {why}") for why, keys in others.items()
    ]


def _fill(config: dict[str, Any], host: str, said: Callable[[str], Any]) -> Iterator[Row]:
    """Each "auto" that nobody fills in becomes what the script says, or DeepSpeed's default."""
    left = set(_autos(filled_in(config, host), ""))
    filled = [place for place in _autos(config, "") if place not in left]
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
            default = _DEFAULTS.get(key, "what is not written")
            yield Row(f'{place} "{AUTO}"', DROPPED, f"nobody fills it in here; DeepSpeed's default is {default}")


def _autos(settings: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _autos(value, f"{prefix}{key}.")
        elif isinstance(value, str) and value == AUTO:
            yield f"{prefix}{key}"
