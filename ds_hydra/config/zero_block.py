"""DeepSpeed's block "zero_optimization" in; what this engine does instead, as lines for the log, out. Pure.

ZeRO shards optimizer state (stage 1), gradients (2) and parameters (3) over ranks that all compute the same way. Here
FP32 parameters, optimizer state and the sums of gradients are sharded over all ranks whatever the stage is, and each
step's strategy says which rank holds which parameters while it computes. No result depends on any of it. So all stages
are taken with all that tunes them, and what fits is checked by memory, as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_hydra.config.checks import AUTO, close_to, integer, nearest
from ds_hydra.config.deepspeed_keys import asks_for_something
from ds_hydra.zero_hetero.errors import ConfigError

BLOCK = "zero_optimization"
_LIKE_A_TYPO = 0.85

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
KINDS = {
    "parameters and gradients move by pull and push": _TRANSFERS,
    "nothing is quantized, communication_data_type is the type of gradients on the wire": _QUANTIZED,
    "saving writes whole weights, and checkpoints have one layout for any number of ranks": _SAVING,
    "nothing is offloaded; masters and optimizer state are 1/N on each of N ranks, and whether the job fits is checked "
    "before step 0": _OFFLOAD,
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
        if (near := close_to(key, ZERO_SETTINGS, _LIKE_A_TYPO)) is not None:
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
        given = sorted(name for name in zero.keys() & names if _asks(zero[name]))
        if given:
            lines.append(f"{BLOCK}: {', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect here: {what}")
    lines += [f"{BLOCK}.{key} is unknown and has no effect; {nearest(key, ZERO_SETTINGS)}"
              for key in sorted(zero.keys() - ZERO_SETTINGS, key=str)]  # fmt: skip
    return lines


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
        f"{BLOCK}.stage {stage}: masters and optimizer state are sharded over all ranks as in stage 1, parameters are "
        "laid out by each step's strategy, and whether the job fits is checked before step 0"
    ]
