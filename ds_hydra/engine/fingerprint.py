"""A model and a device in; all that a cost table depends on, as profiling and training both record it, out."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path

import torch

from ds_hydra.costs.job_fingerprint import JobFingerprint
from ds_hydra.pipe.attention.backends import NAME as FLASH_3
from ds_hydra.pipe.attention.backends import choose_backend, flash_3_runs, torch_varlen
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.stage import ModelSource


def describe_job(source: ModelSource, device: torch.device, dtype: torch.dtype, num_ranks: int) -> JobFingerprint:
    """The fingerprint of a job on this machine."""
    return JobFingerprint(
        model=model_fingerprint(source.plan),
        device=device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        attention=attention_name(source, device, dtype),
        stages=source.options,
        num_ranks=num_ranks,
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        versions=_versions(),
    )


def device_name(device: torch.device) -> str:
    """The device's model, as its driver or the operating system calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def attention_name(source: ModelSource, device: torch.device, dtype: torch.dtype) -> str:
    """The attention backend that a layer of this model would choose."""
    config = getattr(source, "text_config", None)
    softcap = getattr(config, "attn_logit_softcapping", None)
    head = getattr(config, "__dict__", {}).get("head_dim")  # some configs refuse to be asked where layers differ
    if head is None:
        heads = max(1, source.plan.num_heads)
        head = max(1, source.width(min(1, source.plan.num_layers - 1)) // heads)
    # An empty tensor has what the choice depends on, device, type and head size, and takes no memory to speak of.
    probe = torch.empty((1, 1, head), device=device, dtype=dtype)
    name = choose_backend(probe, probe, softcap).__name__
    return f"{name} ({FLASH_3})" if name == torch_varlen.__name__ and flash_3_runs() else name


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    from importlib.metadata import PackageNotFoundError, version

    found: list[tuple[str, str]] = [("python", platform.python_version())]
    for name in ("torch", "transformers", "deepspeed", "flash_attn"):
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return tuple(found)


def model_fingerprint(plan: ModelPlan) -> str:
    """Hash of names, shapes and shard rules of all parameters, and of the heads: equal for equally shaped models."""
    rules = ((p, *(p.rule.by_width or (p.rule.dim, p.rule.parts))) for b in plan.buckets for p in b.params)
    shapes = [(p.name, p.shape, p.trainable, dim, parts) for p, dim, parts in rules]
    text = repr((shapes, plan.num_heads, plan.num_kv_heads, plan.num_layers))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
