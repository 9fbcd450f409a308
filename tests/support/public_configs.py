"""DeepSpeed configs of the kinds that people have: what they hold, the host they are for, and what is refused of them.

Written after configs that libraries print or ship; numbers are their usual ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ds_hydra.config.hosts import ACCELERATE, CALLS, STEPS, TRAINER


class Public(NamedTuple):
    """One config."""

    host: str
    config: dict[str, Any]
    refused: tuple[str, ...] = ()  # words of the refusal: the key, and what to do; () where the config is taken


_SIZES = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
_SCALED = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
           "min_loss_scale": 1}  # fmt: skip
_ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
_STEPS = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
_WARMUP = {"type": "WarmupLR", "params": _STEPS}
_CPU = {"device": "cpu", "pin_memory": True}
_ZERO_2 = {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True,
           "reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True}  # fmt: skip
_ZERO_3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
           "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
           "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
           "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True}  # fmt: skip
_TRAINER = {"fp16": _SCALED, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "steps_per_print": 2000,
            "wall_clock_breakdown": False, **_SIZES}  # fmt: skip
_AXOLOTL = {"bf16": {"enabled": "auto"}, "fp16": {**_SCALED, "auto_cast": False, "initial_scale_power": 32},
            "gradient_clipping": "auto", "wall_clock_breakdown": False, **_SIZES}  # fmt: skip
_FACTORY = {"zero_allow_untested_optimizer": True, "fp16": _SCALED, "bf16": {"enabled": "auto"},
            "gradient_clipping": "auto", **_SIZES}  # fmt: skip
_CHAT = {
    "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10, "gradient_clipping": 1.0,
    "prescale_gradients": False, "wall_clock_breakdown": False, "bfloat16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"},
                          "stage3_param_persistence_threshold": 1e4, "stage3_max_live_parameters": 3e7,
                          "stage3_prefetch_bucket_size": 3e7, "memory_efficient_linear": False},
    "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1, "pin_parameters": True,
                      "release_inference_cache": False, "tp_gather_partition_size": 8},
    "tensorboard": {"enabled": False, "output_path": "step1_tensorboard/", "job_name": "step1_model"},
}  # fmt: skip
_MEGATRON = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10,
             "zero_optimization": {"stage": 0}, "gradient_clipping": 1.0, "prescale_gradients": True,
             "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
                      "initial_scale_power": 11}, "wall_clock_breakdown": False}  # fmt: skip
_BERT = {"train_batch_size": 4096, "train_micro_batch_size_per_gpu": 32, "steps_per_print": 1000,
         "prescale_gradients": False, "gradient_clipping": 1.0, "wall_clock_breakdown": False,
         "optimizer": {"type": "Adam", "params": {"lr": 4e-4, "weight_decay": 0.01, "bias_correction": False}},
         "fp16": {"enabled": True, "loss_scale": 0}}  # fmt: skip
_CIFAR = {
    "train_batch_size": 16, "steps_per_print": 2000, "gradient_clipping": 1.0, "prescale_gradients": False,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
    "wall_clock_breakdown": False, "bf16": {"enabled": False},
    "fp16": {"enabled": False, "fp16_master_weights_and_grads": False, "loss_scale": 0, "loss_scale_window": 500,
             "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15},
    "zero_optimization": {"stage": 0, "allgather_partitions": True, "reduce_scatter": True, "cpu_offload": False,
                          "allgather_bucket_size": 50000000, "reduce_bucket_size": 50000000, "overlap_comm": True},
}  # fmt: skip

CONFIGS: dict[str, Public] = {
    "transformers ZeRO-2, offloaded": Public(
        TRAINER, {**_TRAINER, "optimizer": _ADAMW, "scheduler": _WARMUP,
                  "zero_optimization": {**_ZERO_2, "offload_optimizer": _CPU}}),
    "transformers ZeRO-3, offloaded": Public(
        TRAINER, {**_TRAINER, "optimizer": _ADAMW, "scheduler": _WARMUP,
                  "zero_optimization": {**_ZERO_3, "offload_optimizer": _CPU, "offload_param": _CPU}}),
    "transformers ZeRO-Infinity": Public(
        TRAINER, {**_TRAINER, "optimizer": _ADAMW, "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1},
                  "zero_optimization": {**_ZERO_3, "offload_param": {
                      "device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 5,
                      "buffer_size": 1e8, "max_in_cpu": 1e9}}}),
    "transformers with Ulysses": Public(
        TRAINER, {**_TRAINER, "zero_optimization": {"stage": 3}, "sequence_parallel_size": 4,
                  "seq_parallel_communication_data_type": "bf16"}),
    "accelerate ZeRO-3": Public(
        ACCELERATE, {**_SIZES, "gradient_clipping": 1.0, "zero_optimization": _ZERO_3, "bf16": {"enabled": "auto"},
                     "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
                     "scheduler": {"type": "WarmupDecayLR", "params": {**_STEPS, "total_num_steps": "auto"}},
                     "steps_per_print": float("inf")}),
    "accelerate in FP16": Public(
        ACCELERATE, {**_SIZES, "zero_optimization": _ZERO_2, "gradient_clipping": "auto",
                     "fp16": {"enabled": True, "auto_cast": True}}),
    "axolotl zero1": Public(TRAINER, {**_AXOLOTL, "zero_optimization": {"stage": 1, "overlap_comm": True}}),
    "axolotl zero2, torch compile": Public(
        TRAINER, {**_AXOLOTL, "compile": {"disable": False, "backend": "inductor"},
                  "zero_optimization": {"stage": 2, "contiguous_gradients": True}},
        ('"compile"', "fast_paths", "Remove")),
    "axolotl zero2, not compiled": Public(
        TRAINER, {**_AXOLOTL, "compile": {"disable": True}, "zero_optimization": {"stage": 2}}),
    "axolotl zero3_bf16": Public(
        TRAINER, {**_AXOLOTL, "bf16": {"enabled": True}, "zero_optimization": {
            **_ZERO_3, "sub_group_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}}),
    "axolotl zero3_bf16_cpuoffload_all": Public(
        TRAINER, {**_AXOLOTL, "bf16": {"enabled": True}, "zero_force_ds_cpu_optimizer": False, "zero_optimization": {
            **_ZERO_3, "offload_optimizer": _CPU, "offload_param": _CPU}}),
    "LLaMA-Factory z2": Public(
        TRAINER, {**_FACTORY, "zero_optimization": {**_ZERO_2, "allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8,
                                                   "overlap_comm": False, "round_robin_gradients": True}}),
    "LLaMA-Factory z3_offload": Public(
        TRAINER, {**_FACTORY, "zero_optimization": {**_ZERO_3, "offload_optimizer": _CPU, "offload_param": _CPU}}),
    "LLaMA-Factory z2_autotp": Public(
        TRAINER, {**_FACTORY, "zero_optimization": _ZERO_2, "tensor_parallel": {"autotp_size": 2}}),
    "DeepSpeed-Chat": Public(CALLS, _CHAT),
    "DeepSpeed-Chat, hybrid engine": Public(
        CALLS, {**_CHAT, "hybrid_engine": {"enabled": True, "max_out_tokens": 512}}, ('"hybrid_engine"', "generate()")),
    "Megatron-DeepSpeed": Public(
        STEPS, {**_MEGATRON, "curriculum_learning": {"enabled": False, "curriculum_type": "seqlen"}}),
    "Megatron-DeepSpeed, curriculum": Public(
        STEPS, {**_MEGATRON, "data_efficiency": {
            "enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": {"enabled": True}}}},
        ('"data_efficiency"', "hydra.seed", "switch it off")),
    "BLOOM": Public(
        STEPS, {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 2048, "gradient_clipping": 1.0,
                "zero_optimization": {"stage": 0}, "bf16": {"enabled": True}, "steps_per_print": 2000,
                "wall_clock_breakdown": False}),
    "GPT-NeoX": Public(
        STEPS, {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3,
                "optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.95], "eps": 1e-8}},
                "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2,
                         "min_loss_scale": 1}, "gradient_clipping": 1.0, "steps_per_print": 10,
                "zero_optimization": {**_ZERO_2, "stage": 1, "cpu_offload": False},
                "zero_allow_untested_optimizer": True,
                "sparse_attention": None, "sparse_gradients": False, "elasticity": {"enabled": False}, "nebula": {},
                "amp": None, "autotuning": {"enabled": False, "arg_mappings": {}}, "flops_profiler": {"enabled": True},
                "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 12},
                "data_types": {"grad_accum_dtype": "float32"}, "pipeline": {"stages": 1, "partition": "best"}}),
    "cifar": Public(CALLS, _CIFAR),
    "HelloDeepSpeed": Public(
        CALLS, {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
                "fp16": {"enabled": True}, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}),
    "bing_bert": Public(CALLS, _BERT),
    "bing_bert, LAMB": Public(
        CALLS, {**_BERT, "optimizer": {"type": "Lamb", "params": {"lr": 11e-3, "max_coeff": 0.3, "min_coeff": 0.01}}}),
    "bing_bert, 1-bit Adam": Public(
        CALLS, {**_BERT, "optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 23000,
                                                                        "comm_backend_name": "nccl"}}},
        ("optimizer.type", "OneBitAdam", "AdamW")),
    "bing_bert, layers dropped": Public(
        CALLS, {**_BERT, "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001}},
        ('"progressive_layer_drop"', "all layers", "switch it off")),
    "compressed": Public(
        CALLS, {**_CIFAR, "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
        ('"compression_training"', "unquantized")),
    "compression at rest": Public(
        CALLS, {**_CIFAR, "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}},
                                                   "layer_reduction": {"enabled": False}}}),
    "FP8 by MS-AMP": Public(
        ACCELERATE, {**_SIZES, "zero_optimization": _ZERO_2, "msamp": {"enabled": True, "opt_level": "O2"}},
        ('"msamp"', "BF16")),
    "ZeRO++": Public(
        CALLS, {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {
            "stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 8,
            "zero_quantized_gradients": True}}),
    "ZenFlow": Public(
        CALLS, {"train_batch_size": 8, "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.05}}},
        ("zero_optimization.zenflow", "Remove")),
}  # fmt: skip
