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

A setting changes what is trained, and then it is honoured or refused; or it says how DeepSpeed goes about it, and then
it is taken, and the log says what this engine does instead. What asks for nothing, in DeepSpeed's own words, is always
fine: null, false, {}, {"enabled": false}, {"disable": true}, a degree of 1.

ZeRO shards optimizer state (stage 1), gradients (2) and parameters (3) over ranks that all compute the same way. Here
FP32 parameters, optimizer state and the sums of gradients are sharded over all ranks whatever the stage is, and each
step's strategy says which rank holds which parameters while it computes. No result depends on any of it. So all stages
are taken with all that tunes them, and what fits is checked by memory, as ever.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ds_hydra.config.checks import AUTO, as_number, choice, close_to, flag, integer, nearest, number
from ds_hydra.config.hosts import refuse_auto
from ds_hydra.zero_hetero.errors import ConfigError

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

HONOURED = frozenset(
    (
        *("optimizer", "scheduler", "bf16", "bfloat16", "fp16", "data_types", "zero_optimization"),
        *("gradient_clipping", "communication_data_type", "gradient_allreduce_op", "zero_allow_untested_optimizer"),
        *("steps_per_print", "dump_state", "log_level", "disable_python_gc", "managed_gradient_accumulation"),
        *("tensorboard", "wandb", "comet", "csv_monitor"),
        *BATCH_KEYS,
    )
)

_BY_STRATEGIES = "degrees follow from hydra.strategies, and no result depends on them"
_IN_RECORDS = "times, bytes and memory of each step stand in hydra.steps_file"
_ALL_SUMS = "gradients are summed in FP32"
_OWN_CHECKPOINTS = "checkpoints have one layout for any number of ranks; hydra.checkpoint says when they are written"

TOLD = {
    "activation_checkpointing": "use hydra.activation_checkpointing, or the model's gradient_checkpointing_enable(); "
    "cpu_checkpointing alone is taken, as hydra.offload",
    "aio": "nothing is read from or written to NVMe",
    "allgather_size": "parameters move by all-gathers into the layout of the step",
    "autotuning": "the planner searches the strategies",
    "checkpoint": _OWN_CHECKPOINTS,
    "comms_logger": _IN_RECORDS,
    "data_parallel_size": _BY_STRATEGIES,
    "dataloader_drop_last": "the order of sequences is one global one without batches to drop",
    "datastates_ckpt": _OWN_CHECKPOINTS,
    "disable_allgather": "parameters move by all-gathers into the layout of the step",
    "expert_parallel": _BY_STRATEGIES,
    "flops_profiler": _IN_RECORDS,
    "fp32_allreduce": "communication_data_type is the type of gradients on the wire",
    "gradient_predivide_factor": _ALL_SUMS,
    "graph_harvesting": "the optimizer's kernels are fused, not captured in graphs",
    "memory_breakdown": _IN_RECORDS,
    "model_info": "the planner searches the strategies",
    "nebula": _OWN_CHECKPOINTS,
    "pipeline": _BY_STRATEGIES,
    "prescale_gradients": _ALL_SUMS,
    "seq_parallel_communication_data_type": "sequence parallel ranks exchange activations as they are",
    "sequence_parallel": f"{_BY_STRATEGIES}; each rank hands in whole sequences",
    "sequence_parallel_size": f"{_BY_STRATEGIES}; each rank hands in whole sequences",
    "sparse_gradients": "gradients of embeddings are sent dense",
    "tensor_parallel": _BY_STRATEGIES,
    "timers": _IN_RECORDS,
    "use_data_before_expert_parallelism": _BY_STRATEGIES,
    "vocabulary_size": "it is the model's",
    "wall_clock_breakdown": _IN_RECORDS,
    "zero_force_ds_cpu_optimizer": "the optimizer runs on the devices",
}
"""Settings that say how, and not what: taken, with what this engine does instead."""


class Refused(NamedTuple):
    """A setting that would train something else than this engine does."""

    why: str  # and what to write instead
    asks: Callable[[Mapping[str, Any]], bool] | None = None  # whether a block does; None: where it is enabled


def _any_enabled(block: Mapping[str, Any]) -> bool:
    """Whether a block, or one within it, is enabled."""
    inner = [value for value in block.values() if isinstance(value, Mapping)]
    return _enabled(block) or any(_any_enabled(value) for value in inner)


def _enabled(block: Mapping[str, Any]) -> bool:
    return is_on(block.get("enabled", False))


def _compiles(block: Mapping[str, Any]) -> bool:
    on = any(is_on(block.get(key, False)) for key in ("enabled", "deepcompile", "autoep_non_moe"))
    return on or ("disable" in block and not is_on(block["disable"]))


def _draws(block: Mapping[str, Any]) -> bool:
    """Whether data are drawn by a curriculum, in batches of other sizes, or with tokens dropped."""
    if not _enabled(block):
        return False
    sampling, routing = (block.get(key) or {} for key in ("data_sampling", "data_routing"))
    samples = _enabled(sampling) and any(
        _enabled(sampling.get(key) or {}) for key in ("curriculum_learning", "dynamic_batching")
    )
    return samples or (_enabled(routing) and _enabled(routing.get("random_ltd") or {}))


_FP8 = 'parameters are computed in BF16, FP16 or FP32; use "bf16": {"enabled": true}'
_IN_ORDER = "sequences are trained in the order of hydra.seed, or as the script hands them in: sort them there"
_UNQUANTIZED = "parameters are trained unquantized"

REFUSED = {
    "amp": Refused('Apex scales and casts by its own rules; use "bf16": {"enabled": true} or "fp16"'),
    "compile": Refused(
        "stages are re-shaped from step to step, which a compiled graph cannot follow; hydra.fast_paths are what "
        "computes faster",
        _compiles,
    ),
    "compression_training": Refused(_UNQUANTIZED + " and unpruned", _any_enabled),
    "curriculum_learning": Refused(_IN_ORDER),
    "data_efficiency": Refused(_IN_ORDER, _draws),
    "eigenvalue": Refused(_UNQUANTIZED),
    "elasticity": Refused("it would choose the batch size; write that, and use hydra.elastic, which keeps it"),
    "fp8": Refused(_FP8),
    "hybrid_engine": Refused("it is an engine of its own; engine.generate() generates with the weights as they are"),
    "msamp": Refused(_FP8),
    "progressive_layer_drop": Refused("all layers are computed in each step"),
    "quantize_training": Refused(_UNQUANTIZED),
    "sparse_attention": Refused("attention is the model's own; use a model that has it", lambda block: True),
    "torch_autocast": Refused('modules are computed in one type; use "bf16": {"enabled": true}'),
    "weight_quantization": Refused(_UNQUANTIZED, lambda block: is_on(block.get("enabled", True))),
}
"""Settings that change what is trained, and that this engine does not have."""

KNOWN_SETTINGS = HONOURED | REFUSED.keys() | TOLD.keys()


def is_on(value: Any) -> bool:
    """Whether a switch is on, as DeepSpeed's parser reads it: true, 1 or a word for it."""
    return value.strip().lower() in ("true", "1", "on", "yes", "y", "t") if isinstance(value, str) else bool(value)


def asks_for_something(key: str, value: Any) -> bool:
    """Whether a setting of `REFUSED` or `TOLD` asks for anything."""
    if key in REFUSED and isinstance(value, Mapping):
        return bool(value) and (REFUSED[key].asks or _enabled)(value)
    if isinstance(value, Mapping):
        off = ("enabled" in value and not is_on(value["enabled"])) or is_on(value.get("disable", False))
        return not off and any(asks_for_something(key, one) for one in value.values())
    if isinstance(value, str):
        return value.strip().lower() not in ("", "none", "false", "auto")
    # A degree or a factor of 1 changes nothing, nor does a number that is 0.
    return bool(value) and (value is True or value != 1)


BLOCK = "zero_optimization"
_LIKE_A_KEY_OF_ZERO = 0.85

_TRANSFERS = frozenset(
    (
        *("contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce"),
        *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "sub_group_size", "round_robin_gradients"),
        *("parameter_alignment", "legacy_stage1", "zero_hpz_partition_size", "mics_shard_size"),
        *("mics_hierarchical_params_gather", "memory_efficient_linear", "override_module_apply", "leaf_module"),
        *("log_trace_cache_warnings", "enable_sanity_checks", "ignore_unused_parameters", "compute_grad_norm"),
        *("stage3_prefetch_bucket_size", "prefetch_bucket_size", "stage3_param_persistence_threshold"),
        *("param_persistence_threshold", "stage3_model_persistence_threshold", "model_persistence_threshold"),
        *("stage3_max_live_parameters", "max_live_parameters", "stage3_max_reuse_distance", "max_reuse_distance"),
        *("stage3_module_granularity_threshold", "module_granularity_threshold", "stage3_allgather_sequential"),
        *("allgather_sequential", "stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params"),
    )
)
_QUANTIZED = frozenset(
    (
        *("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"),
        "zeropp_loco_param",
    )
)
_SAVING = frozenset(
    (
        *("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"),
        *("stage3_gather_fp16_weights_on_model_save", "load_from_fp32_weights", "elastic_checkpoint"),
        "pipeline_loading_checkpoint",
    )
)
_OFFLOAD = frozenset(
    (
        *("offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_param", "cpu_offload_params"),
        *("cpu_offload_use_pin_memory", "save_muon_momentum_buffer_in_memory"),
    )
)
_STATES_OFFLOAD = frozenset(("offload_optimizer", "cpu_offload", "cpu_offload_use_pin_memory"))
KINDS = {
    "parameters and gradients move by all-gathers and reduce-scatters of each step's layout": _TRANSFERS,
    "nothing is quantized, communication_data_type is the type of gradients on the wire": _QUANTIZED,
    "saving writes whole weights, and checkpoints have one layout for any number of ranks": _SAVING,
    "parameters follow each step's layout, nothing goes to NVMe, and whether the job fits is checked before step 0; "
    'offload_optimizer with the device "cpu" is taken': _OFFLOAD,
}
CHANGES_RESULTS = frozenset({"zenflow"})
ZERO_SETTINGS = frozenset({"stage"}).union(CHANGES_RESULTS, *KINDS.values())


def screen_zero(zero: Any) -> list[str]:
    """Lines for the log on the block, one a kind. ConfigError for what is no such block, a name that is nearly a known
    one, and ZenFlow, which updates parameters by gradients of earlier steps."""
    if zero is None or isinstance(zero, bool):  # true is an old form of stage 1
        return []
    if not isinstance(zero, Mapping):
        raise ConfigError(f'config: {BLOCK} must be a block such as {{"stage": 1}}, but is {zero!r}')
    for key in zero.keys() - ZERO_SETTINGS:
        if (near := close_to(key, ZERO_SETTINGS, _LIKE_A_KEY_OF_ZERO)) is not None:
            raise ConfigError(
                f"config: {BLOCK}.{key} is unknown and would have no effect; did you mean {near!r}? Rename it or "
                "remove it"
            )
    for key in sorted(key for key in zero.keys() & CHANGES_RESULTS if asks_for_something(BLOCK, zero[key])):
        raise ConfigError(
            f'config: {BLOCK}.{key} cannot be used with a "hydra" block: each update is by the gradients of its own '
            "step. Remove it"
        )
    lines = _of_stage(stage_of(zero.get("stage")))
    for what, names in KINDS.items():
        given = sorted(name for name in (zero.keys() & names) - states_offload(zero) if _asks(zero[name]))
        if given:
            lines.append(f"{BLOCK}: {', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect here: {what}")
    lines += [f"{BLOCK}.{key} is unknown and has no effect; {nearest(key, ZERO_SETTINGS)}"
              for key in sorted(zero.keys() - ZERO_SETTINGS, key=str)]  # fmt: skip
    return lines


def states_offload(zero: Any) -> frozenset[str]:
    """The settings by which a block "zero_optimization" may ask for FP32 parameters and optimizer states in the host's
    memory; none where it does not."""
    if not isinstance(zero, Mapping):
        return frozenset()
    block = zero.get("offload_optimizer")
    asks = (isinstance(block, Mapping) and block.get("device") == "cpu") or is_on(zero.get("cpu_offload", False))
    return _STATES_OFFLOAD if asks else frozenset()


def _asks(value: Any) -> bool:
    """Whether a setting of the block asks for anything; one of offloading where it names a device."""
    if isinstance(value, Mapping) and "device" in value:
        return value["device"] not in (None, "none", AUTO)
    return asks_for_something(BLOCK, value)


def stage_of(value: Any) -> int:
    """The stage that a setting means, 0 to 3; 0 where nobody has said one. ConfigError for anything else."""
    if value in (None, AUTO):
        return 0
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return int(integer(0, 3)(value, f"{BLOCK}.stage"))


def _of_stage(stage: int) -> list[str]:
    if stage < 2:
        return []
    return [
        f"{BLOCK}.stage {stage}: FP32 parameters and optimizer states are sharded over all ranks as in stage 1, "
        "parameters follow each step's layout, and whether the job fits is checked before step 0"
    ]


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
                f'config: {kind}.{key} cannot be used with a "hydra" block: FP32 parameters and states stay FP32 '
                "here; 16 bit trains otherwise. Remove it; hydra spreads them over all ranks"
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
