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

from ds_hydra.config.checks import AUTO, choice, close_to, flag, integer, nearest, number
from ds_hydra.config.hosts import refuse_auto
from ds_hydra.zero_hetero.errors import ConfigError

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

HONOURED = frozenset(
    (
        *("optimizer", "scheduler", "bf16", "fp16", "data_types", "zero_optimization", "gradient_clipping"),
        "communication_data_type",
        *("steps_per_print", "dump_state", "log_level", "disable_python_gc"),
        *("tensorboard", "wandb", "comet", "csv_monitor", "zero_allow_untested_optimizer"),
        *BATCH_KEYS,
    )
)

REFUSED = {
    "pipeline": "stages follow from hydra.strategies (ppN)",
    "tensor_parallel": "tensor parallel degrees follow from hydra.strategies (tpN)",
    "sequence_parallel_size": "sequence parallel degrees follow from hydra.strategies (spN)",
    "data_parallel_size": "the number of pipelines follows from hydra.strategies",
    "expert_parallel": "experts are not sharded over ranks of their own",
    "hybrid_engine": "it is an engine of its own",
    "torch_autocast": 'use "bf16": {"enabled": true}',
    "data_efficiency": "sequences are drawn by hydra.tokens_per_step",
    "weight_quantization": "parameters are trained unquantized",
    "compile": "stages are re-shaped from step to step, which a compiled graph cannot follow",
    "autotuning": "the planner searches the strategies",
}
"""Blocks that promise something this engine does not do. `{"enabled": false}` is accepted."""

IGNORED = {
    "activation_checkpointing": "use hydra.activation_checkpointing",
    "aio": "nothing is offloaded",
    "checkpoint": "checkpoints of this engine have one layout for any number of ranks",
    "comms_logger": "bytes and times of pull and push stand in steps.jsonl",
    "dataloader_drop_last": "the order of sequences is one global one without batches to drop",
    "disable_allgather": "parameters move by pull and push",
    "flops_profiler": "use the measured and predicted times in steps.jsonl",
    "gradient_allreduce_op": "gradients are those of hydra.loss_norm",
    "gradient_predivide_factor": "gradients are summed in FP32",
    "managed_gradient_accumulation": "train_batch() runs whole steps; where it is false, so does every engine.step()",
    "memory_breakdown": "memory stands in steps.jsonl",
    "prescale_gradients": "gradients are summed in FP32",
    "seq_parallel_communication_data_type": "sequence parallel ranks exchange activations as they are",
    "timers": "times stand in steps.jsonl",
    "use_data_before_expert_parallelism": "experts are not sharded over ranks of their own",
    "vocabulary_size": "it is the model's",
    "wall_clock_breakdown": "times stand in steps.jsonl",
    "zero_force_ds_cpu_optimizer": "nothing is offloaded",
}
"""Settings without effect here; the log says so."""

KNOWN_SETTINGS = HONOURED | REFUSED.keys() | IGNORED.keys()

_NEVER = 2**48
_OLD_BF16 = "bfloat16"  # DeepSpeed reads it where there is no block "bf16"; DeepSpeed-Chat writes it
_ZERO_WITH_EFFECT = frozenset({"stage", "offload_optimizer", "offload_param"})
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
    if kept.get("gradient_allreduce_op") == "sum":
        raise ConfigError(
            'config: gradient_allreduce_op "sum" cannot be used with a "hydra" block: gradients are means, as '
            "hydra.loss_norm says. Remove it, and multiply the loss by the number of ranks"
        )
    for key in list(kept):
        if key in REFUSED:
            _refuse(key, kept.pop(key))
        elif key in IGNORED:
            del kept[key]
            notes.append(f'setting "{key}" has no effect here: {IGNORED[key]}')
        elif key not in HONOURED:
            notes.append(_unknown(key))
    notes += _map_batch_keys(kept)
    notes += _fill_schedule(kept, total_steps)
    _refuse_auto(kept, host)
    notes += _screen_zero(kept)
    _screen_precision(kept)
    notes += _screen_data_types(kept)
    _screen_optimizer(kept)
    if kept.get("gradient_clipping") is not None:
        number()(kept["gradient_clipping"], "gradient_clipping")
    if kept.get("communication_data_type") is not None:
        choice("fp32", "bf16", "fp16")(kept["communication_data_type"], "communication_data_type")
    if kept.get("steps_per_print") == math.inf:  # as Accelerate writes it, for never
        kept["steps_per_print"] = _NEVER
    if kept.get("steps_per_print") is not None:
        integer(1)(kept["steps_per_print"], "steps_per_print")
    return kept, tuple(notes)


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


def _refuse_auto(settings: Mapping[str, Any], host: str | None) -> None:
    """Refuse "auto" where a setting has an effect and the host fills in nothing."""
    zero = settings.get("zero_optimization")
    if isinstance(zero, Mapping):
        settings = {**settings, "zero_optimization": {key: zero[key] for key in _ZERO_WITH_EFFECT & zero.keys()}}
    refuse_auto(settings, host)


def _refuse(key: str, value: Any) -> None:
    off = isinstance(value, Mapping) and value.get("enabled") is False
    if off or value in (None, 1, {}):  # a degree of 1 asks for nothing
        return
    raise ConfigError(f'config: the setting "{key}" cannot be used with a "hydra" block: {REFUSED[key]}. Remove it')


def _map_batch_keys(settings: dict[str, Any]) -> list[str]:
    """Replace the user's batch-size keys by the ones DeepSpeed's parser accepts for any number of ranks."""
    given = [key for key in BATCH_KEYS if settings.pop(key, None) is not None]
    # DeepSpeed checks that batch size = micro-batch size * accumulation steps * ranks. 1 and 1 hold for any number of
    # ranks, and nothing else of it is used.
    settings.update(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    if not given:
        return []
    return [
        f"{', '.join(given)}: a step is sized by hydra.tokens_per_step, and its micro-batches by the plan; these keys "
        "have no effect, but that the loop of engine(), backward() and step() takes gradient_accumulation_steps batches"
    ]


def _screen_zero(settings: dict[str, Any]) -> list[str]:
    """Masters are sharded as in ZeRO stage 1, for stage 0 too. Stages 2 and 3 and offloading are refused."""
    zero = settings.pop("zero_optimization", None)
    if zero is None:
        return []
    if not isinstance(zero, Mapping):
        raise ConfigError(f'config: zero_optimization must be a block such as {{"stage": 1}}, but is {zero!r}')
    stage = integer(0, 3)(zero.get("stage", 0), "zero_optimization.stage")
    if stage > 1:
        raise ConfigError(
            f'config: zero_optimization.stage {stage} cannot be used with a "hydra" block: master parameters '
            "and optimizer state are sharded over all ranks as in stage 1, gradients are not; use 0 or 1"
        )
    for key in ("offload_optimizer", "offload_param"):
        target = zero.get(key)
        if isinstance(target, Mapping) and target.get("device", "none") not in (None, "none"):
            raise ConfigError(
                f'config: zero_optimization.{key} cannot be used with a "hydra" block: nothing is offloaded. Remove '
                "it, and use more ranks or a larger tp or pp if memory is short"
            )
    without_effect = sorted(set(zero) - _ZERO_WITH_EFFECT)
    if not without_effect:
        return []
    return [f"zero_optimization: {', '.join(without_effect)} have no effect here; masters are sharded evenly"]


_LOSS_SCALING = (
    *("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis"),
    "min_loss_scale",
)


def _screen_precision(settings: dict[str, Any]) -> None:
    for key in ("fp16", "bf16"):
        block = settings.get(key)
        if block is None:
            continue
        if not isinstance(block, Mapping):
            raise ConfigError(f'config: {key} must be a block such as {{"enabled": true}}, but is {block!r}')
        enabled = flag(block.get("enabled", False), f"{key}.enabled")
        extra = sorted(set(block) - {"enabled", *(_LOSS_SCALING if key == "fp16" else ())})
        if enabled and extra:
            raise ConfigError(f'config: {key}.{extra[0]} is not supported with a "hydra" block; remove it')


GRAD_ACCUM_DTYPES = ("fp32", "bf16", "fp16")
"""Values of data_types.grad_accum_dtype: where the gradients of a step's micro-batches add up on each rank.

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
        settings["data_types"] = {"grad_accum_dtype": choice(*GRAD_ACCUM_DTYPES)(dtype, "data_types.grad_accum_dtype")}
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
        params = block.get("params", {})
        if not isinstance(params, Mapping):
            raise ConfigError(f'config: {key}.params must be a block such as {{"lr": 1e-3}}, but is {params!r}')
        if "max_grad_norm" in params:
            raise ConfigError(f'config: {key}.params.max_grad_norm: use the top-level setting "gradient_clipping"')
        _check_rates(params, key)


_RATES = ("lr", "eps", "weight_decay", "momentum", "warmup_min_lr", "warmup_max_lr")


def _check_rates(params: Mapping[str, Any], key: str) -> None:
    for name in (name for name in _RATES if name in params):
        value, place = params[name], f"{key}.params.{name}"
        if key == "scheduler" and isinstance(value, (list, tuple)):  # a rate per group
            for index, one in enumerate(value):
                number()(one, f"{place}[{index}]")
        elif key == "optimizer" or value is not None:
            number()(value, place)
    betas = params.get("betas", (0.9, 0.999))
    if not isinstance(betas, (list, tuple)) or len(betas) < 2:
        raise ConfigError(
            f"config: {key}.params.betas must be a list of two numbers such as [0.9, 0.95], but is {betas!r}"
        )
    for index, beta in enumerate(betas):
        number(0.0, 1.0)(beta, f"{key}.params.betas[{index}]")
