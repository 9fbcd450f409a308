"""All top-level settings of a DeepSpeed config, of old releases too, and what becomes of each. Pure: no DeepSpeed.

A setting changes what is trained, and then it is honoured or refused; or it says how DeepSpeed goes about it, and then
it is taken, and the log says what this engine does instead. What asks for nothing, in DeepSpeed's own words, is always
fine: null, false, {}, {"enabled": false}, {"disable": true}, a degree of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
    "activation_checkpointing": "use hydra.activation_checkpointing, or the model's gradient_checkpointing_enable()",
    "aio": "nothing is read from or written to NVMe",
    "allgather_size": "parameters move by pull and push",
    "autotuning": "the planner searches the strategies",
    "checkpoint": _OWN_CHECKPOINTS,
    "comms_logger": _IN_RECORDS,
    "data_parallel_size": _BY_STRATEGIES,
    "dataloader_drop_last": "the order of sequences is one global one without batches to drop",
    "datastates_ckpt": _OWN_CHECKPOINTS,
    "disable_allgather": "parameters move by pull and push",
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
    "zero_force_ds_cpu_optimizer": "the optimizer runs where the masters are",
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
