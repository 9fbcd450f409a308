"""Which DeepSpeed settings a job with a "hydra" block honours, refuses or ignores. Pure: no DeepSpeed.

No setting is ignored in silence: one without effect is logged, and one that would change the result is an error.

[Note: gradients on the wire]
A rank sums the gradients of its micro-batches, and sends each sum to those who own its parts of the masters. They add
up what comes from all ranks in FP32, in rank order. "communication_data_type" is the type of a sum on its way: "fp32",
"bf16" or "fp16"; by default it is the type that the model is computed in. What it costs and what it loses:

  type    bytes of an element    a contribution is changed by up to (on average)
  fp32    4                      nothing, where it was summed in FP32
  bf16    2                      2^-8 of itself (2^-9.5)
  fp16    2                      2^-11 of itself (2^-12.5), more below 6e-5; above 65504 it is infinite, and the step
                                 is skipped

The bytes travel once a step, and both ends hold as many in scratch memory meanwhile. Rounding happens once, since the
owner's sum is in FP32 and is not sent on; what a rank adds to its own masters is not rounded at all. So a gradient made
of many contributions is off by no larger share than one made of two: errors of either sign cancel. The BF16 gradient
of a single micro-batch is not changed by "bf16" either; a sum of several is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from ds_hydra.config.checks import AUTO, as_number, choice, close_to, flag, integer, nearest, number
from ds_hydra.config.deepspeed_keys import (
    BATCH_KEYS,
    HONOURED,
    KNOWN_SETTINGS,
    REFUSED,
    TOLD,
    asks_for_something,
    is_on,
)
from ds_hydra.config.hosts import refuse_auto
from ds_hydra.config.zero_block import screen_zero
from ds_hydra.zero_hetero.errors import ConfigError

_NEVER = 2**48
_DTYPES = {"float": "fp32", "float32": "fp32", "half": "fp16", "float16": "fp16", "bfloat16": "bf16"}
_OLD_BF16 = "bfloat16"  # DeepSpeed reads it where there is no block "bf16"; DeepSpeed-Chat writes it
_LIKE_A_TYPO = 0.8  # "gradient_cliping" is 0.97 like "gradient_clipping", "fp_16" 0.89 like "fp16"
_REMARKS = frozenset({"comment", "comments"})


def screen_deepspeed_settings(
    settings: Mapping[str, Any], total_steps: int | None = None, host: str | None = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The user's settings in; the settings for DeepSpeed's parser, and lines for the log, out.

    The settings returned are a copy without those that have no effect. The batch-size keys, which DeepSpeed demands,
    are filled in, and so is the length of a schedule, from hydra.total_steps; `host` is whose values have been filled
    in for "auto" (`hosts.filled_in`). Unknown settings stay: DeepSpeed itself refuses those that it has removed. Raises
    ConfigError for settings that this engine cannot honour, for names that are nearly a known one and for values that
    DeepSpeed would not check.
    """
    kept = copy.deepcopy(dict(settings))
    notes: list[str] = []
    if kept.get("bf16") is None and _OLD_BF16 in kept:
        kept["bf16"] = kept[_OLD_BF16]
    kept.pop(_OLD_BF16, None)
    told: dict[str, list[str]] = {}  # names by what is done instead
    for key in list(kept):
        if key in REFUSED:
            _refuse(key, kept.pop(key))
        elif key in TOLD:
            if asks_for_something(key, kept.pop(key)):
                told.setdefault(TOLD[key], []).append(f'"{key}"')
        elif key not in HONOURED:
            notes.append(_unknown(key))
    notes += [f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect here: {instead}"
              for instead, keys in told.items()]  # fmt: skip
    notes += screen_zero(kept.pop("zero_optimization", None))
    kept.pop("managed_gradient_accumulation", None)  # which the three calls read in the user's own config
    notes += _map_batch_keys(kept)
    notes += _fill_schedule(kept, total_steps)
    refuse_auto(kept, host)
    for key in ("bf16", "fp16"):
        notes += _screen_precision(kept, key)
    notes += _screen_data_types(kept)
    _screen_optimizer(kept)
    _screen_gradients(kept)
    _screen_prints(kept)
    return kept, tuple(notes)


def _screen_gradients(settings: dict[str, Any]) -> None:
    """Check how gradients are clipped, summed and sent, in the forms that DeepSpeed's parser does not check."""
    if settings.get("gradient_clipping") is not None:
        limit = as_number(settings["gradient_clipping"] or 0.0)
        settings["gradient_clipping"] = 0.0 if limit == math.inf else number()(limit, "gradient_clipping")
    if settings.get("communication_data_type") is not None:
        settings["communication_data_type"] = _dtype(settings["communication_data_type"], "communication_data_type")
    if str(settings.get("gradient_allreduce_op")).lower() == "sum":
        raise ConfigError(
            'config: gradient_allreduce_op "sum" cannot be used with a "hydra" block: gradients are means, as '
            "hydra.loss_norm says. Remove it, and multiply the loss by the number of ranks"
        )


def _screen_prints(settings: dict[str, Any]) -> None:
    """Steps between two lines of the log; 0, and numbers beyond any job, mean never."""
    every = settings.get("steps_per_print")
    if every is None:
        return
    every = as_number(every)
    if isinstance(every, float) and every > _NEVER:  # infinity, as Accelerate writes it
        every = _NEVER
    settings["steps_per_print"] = integer(0)(int(every) if _is_whole(every) else every, "steps_per_print") or _NEVER


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _dtype(value: Any, place: str) -> str:
    """One of "fp32", "bf16" and "fp16", by any name that DeepSpeed has for it."""
    name = value.lower().removeprefix("torch.") if isinstance(value, str) else value
    return str(choice(*GRAD_ACCUM_DTYPES)(_DTYPES.get(name, name) if isinstance(name, str) else name, place))


def _unknown(key: str) -> str:
    """A line for the log about an unknown setting; ConfigError if its name is nearly a known one."""
    near = close_to(key, KNOWN_SETTINGS, _LIKE_A_TYPO)
    if near is not None and key not in _REMARKS:
        raise ConfigError(
            f"config: the top-level setting {key!r} is unknown and would have no effect; did you mean {near!r}? Rename "
            "it or remove it"
        )
    return f'setting "{key}" is unknown and has no effect; {nearest(key, KNOWN_SETTINGS)}'


_SCHEDULES_WITH_LENGTH = frozenset({"WarmupDecayLR", "WarmupCosineLR"})


def _fill_schedule(settings: dict[str, Any], total_steps: int | None) -> list[str]:
    """Give a schedule that needs a length the length of the job, hydra.total_steps, unless it has one of its own."""
    block = settings.get("scheduler")
    if total_steps is None or not isinstance(block, dict) or block.get("type") not in _SCHEDULES_WITH_LENGTH:
        return []
    params = block.setdefault("params", {})
    if not isinstance(params, dict):
        return []
    length = params.get("total_num_steps", AUTO)
    if length == AUTO:
        params["total_num_steps"] = total_steps
        return [f"scheduler.params.total_num_steps is hydra.total_steps, {total_steps}"]
    if length == total_steps:
        return []
    return [f"scheduler.params.total_num_steps is {length}, but training ends with hydra.total_steps {total_steps}"]


def _refuse(key: str, value: Any) -> None:
    if asks_for_something(key, value):
        raise ConfigError(
            f'config: the setting "{key}" cannot be used with a "hydra" block: {REFUSED[key].why}. Remove it, or '
            "switch it off"
        )


def _map_batch_keys(settings: dict[str, Any]) -> list[str]:
    """Replace the user's batch-size keys by the ones DeepSpeed's parser accepts for any number of ranks."""
    given = [key for key in BATCH_KEYS if settings.pop(key, None) is not None]
    # DeepSpeed checks that batch size = micro-batch size * accumulation steps * ranks. 1 and 1 hold for any number of
    # ranks, and nothing else of it is used.
    settings.update(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    if not given:
        return []
    return [
        f"{', '.join(given)}: the loop of engine(), backward() and step() takes gradient_accumulation_steps batches of "
        "each rank, as they are handed in; train_batch() draws hydra.tokens_per_step tokens of training_data; "
        "micro-batches are sized by the plan"
    ]


_SCALING = (
    *("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis"),
    "min_loss_scale",
)
_HALF_MASTERS = ("bf16_master_weights_and_grads", "bf16_optimizer_states", "fp16_master_weights_and_grads")
_TOLD_OF_TYPES = {  # what is done instead, and the value that is told so
    "auto_cast": (True, "inputs are numbers of tokens, which no type rounds"),
    "immediate_grad_update": (True, "data_types.grad_accum_dtype is the type that gradients add up in"),
    "check_grad_overflow": (False, "a step whose gradient is not finite is skipped"),
}
PRECISION = {
    "fp16": frozenset(("enabled", "auto_cast", "fp16_master_weights_and_grads", *_SCALING)),
    "bf16": frozenset(("enabled", "immediate_grad_update", "check_grad_overflow", *_HALF_MASTERS[:2], *_SCALING)),
}
"""Keys of the two blocks that say in which type a model is computed."""


def _screen_precision(settings: dict[str, Any], kind: str) -> list[str]:
    """Of the blocks "bf16" and "fp16" the switch and the scaling of losses reach DeepSpeed's parser."""
    block = settings.get(kind)
    if block is None:
        return []
    if not isinstance(block, Mapping):
        raise ConfigError(f'config: {kind} must be a block such as {{"enabled": true}}, but is {block!r}')
    for key in block.keys() - PRECISION[kind]:
        raise ConfigError(f"config: {kind}.{key} is no setting of DeepSpeed; {nearest(key, PRECISION[kind])}")
    place, enabled = f"{kind}.enabled", block.get("enabled", False)
    enabled = is_on(enabled) if str(enabled).lower() in ("true", "false") else flag(enabled, place)
    scaling = {key: block[key] for key in block if key in _SCALING}
    settings[kind] = {"enabled": enabled, **(scaling if kind == "fp16" else {})}
    if not enabled:
        return []
    for key in _HALF_MASTERS:
        if is_on(block.get(key, False)):
            raise ConfigError(
                f'config: {kind}.{key} cannot be used with a "hydra" block: masters and optimizer state are FP32, '
                "which trains otherwise. Remove it; hydra spreads them over all ranks"
            )
    told = [
        f"{kind}.{key} has no effect here: {instead}"
        for key, (value, instead) in _TOLD_OF_TYPES.items()
        if key in block and is_on(block[key]) is value
    ]
    if kind == "bf16" and scaling:
        told.append(f"bf16: {', '.join(sorted(scaling))} have no effect here: BF16 has no loss scale")
    return told


GRAD_ACCUM_DTYPES = ("fp32", "bf16", "fp16")
"""Values of communication_data_type, and of data_types.grad_accum_dtype: where the gradients of a step's micro-batches
add up on each rank.

FP32 is the default. A type of 16 bits, which must be the one that the model is computed in, halves the memory of the
gradients, 4 bytes for each parameter that a rank holds, and rounds the sum after each micro-batch. The sums over all
ranks are taken in FP32 either way.
"""


def _screen_data_types(settings: dict[str, Any]) -> list[str]:
    """Of the block "data_types" the type of accumulated gradients has an effect."""
    block = settings.pop("data_types", None)
    if block is None:
        return []
    if not isinstance(block, Mapping):
        raise ConfigError(
            f'config: data_types must be a block such as {{"grad_accum_dtype": "bf16"}}, but is {block!r}'
        )
    without_effect = sorted(set(block) - {"grad_accum_dtype"})
    dtype = block.get("grad_accum_dtype")
    if dtype is not None:
        settings["data_types"] = {"grad_accum_dtype": _dtype(dtype, "data_types.grad_accum_dtype")}
    if not without_effect:
        return []
    return [f"data_types: {', '.join(without_effect)} have no effect here; the blocks bf16 and fp16 say the types"]


def _screen_optimizer(settings: dict[str, Any]) -> None:
    """Check form and numbers of the blocks "optimizer" and "scheduler", which DeepSpeed does not check."""
    for key in ("optimizer", "scheduler"):
        block = settings.get(key)
        if block is None:
            continue
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise ConfigError(f'config: {key} must be a block {{"type": NAME, "params": {{ ... }}}}, but is {block!r}')
        unknown = sorted(set(block) - {"type", "params", "legacy_fusion"})
        if unknown:
            raise ConfigError(
                f"config: unknown key {unknown[0]!r} in block {key!r}; " + nearest(unknown[0], ("type", "params"))
            )
        params = block.get("params") or {}
        if not isinstance(params, dict):
            raise ConfigError(f'config: {key}.params must be a block such as {{"lr": 1e-3}}, but is {params!r}')
        if "max_grad_norm" in params:
            raise ConfigError(f'config: {key}.params.max_grad_norm: use the top-level setting "gradient_clipping"')
        _check_rates(params, key)


_RATES = ("lr", "eps", "weight_decay", "momentum", "warmup_min_lr", "warmup_max_lr")


def _check_rates(params: dict[str, Any], key: str) -> None:
    for name in (name for name in _RATES if name in params):
        value, place = params[name], f"{key}.params.{name}"
        if key == "scheduler" and isinstance(value, (list, tuple)):  # a rate per group
            params[name] = [number()(as_number(one), f"{place}[{index}]") for index, one in enumerate(value)]
        elif key == "optimizer" or value is not None:
            params[name] = number()(as_number(value), place)
    if "betas" not in params:
        return
    betas = params["betas"]
    if not isinstance(betas, (list, tuple)) or len(betas) < 2:
        raise ConfigError(
            f"config: {key}.params.betas must be a list of two numbers such as [0.9, 0.95], but is {betas!r}"
        )
    each = [number(0.0, 1.0)(as_number(beta), f"{key}.params.betas[{index}]") for index, beta in enumerate(betas)]
    params["betas"] = each
