"""The command line of `ds-hydra profile` in; a request for measurements, the same on every rank, out."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from ds_hydra.commands.job_config import read_job
from ds_hydra.config.hydra_block import FLASH_3, HydraConfig
from ds_hydra.costs.job_fingerprint import JobFingerprint
from ds_hydra.costs.shape_costs import stage_schemes
from ds_hydra.engine.costs import describe_job
from ds_hydra.host.devices import device_index
from ds_hydra.pipe.attention.backends import use_flash_3
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.plan.layouts import feasible_schemes
from ds_hydra.profiling.fit import Rung, make_ladder
from ds_hydra.profiling.stage_timer import MakeOptimizer
from ds_hydra.profiling.survey import RepeatBudget
from ds_hydra.zero_hetero.errors import ConfigError


@dataclass(frozen=True)
class Request:
    """All that decides what is measured; the same on every rank."""

    source: CausalLM
    schemes: tuple[ParallelScheme, ...]
    num_gpus: int
    node_size: int
    rungs: tuple[Rung, ...]
    most_tokens: int | None  # of a micro-batch, if the job says how many a step has
    budget: RepeatBudget
    clock: Literal["wall", "cpu"]
    dtype: torch.dtype
    grad_dtype: torch.dtype | None  # where gradients add up; None: FP32 or wider
    wire_dtype: torch.dtype | None  # of gradients on their way; None: as computed in
    device: torch.device
    job: JobFingerprint
    make_optimizer: MakeOptimizer
    images: bool = False  # whether the job trains images

    @property
    def shard_elements(self) -> int:
        """Trained elements that a rank of the job owns."""
        return sum(bucket.numel for bucket in self.source.plan.buckets if bucket.trainable) // self.num_gpus

    @property
    def largest_message(self) -> int:
        """Bytes of the job's largest message.

        That is the hidden states of the largest micro-batch, or a rank's part of the largest bucket on its way to a
        rank that holds all of it.
        """
        plan = self.source.plan
        hidden = max(sum(rung.lengths) for rung in self.rungs) * self.source.width(min(1, plan.num_layers - 1))
        part = max(bucket.numel for bucket in plan.buckets) // self.num_gpus
        return max(hidden, part) * self.dtype.itemsize


def make_request(args: argparse.Namespace) -> Request:
    """The request of a command line and the job's config. ConfigError if they ask for something impossible."""
    job = read_job(args.deepspeed_config, torch.float32)
    named = [StrategyShape.parse(text) for text in args.schemes or ()] or (job.hydra.shapes if job.hydra else ())
    # Where layers may be recomputed they are kept if they fit, by costs of layers that are.
    again, asked = job.hydra is not None and job.hydra.recomputes_all, job.stage_options
    options = replace(asked, activation_checkpointing=again, host_activations=again and asked.host_activations)
    source = job.source(args.model, options, named)
    num_gpus = args.gpus or _ranks_of(job.hydra) or _world_size()
    node_size = args.gpus_per_node or (job.hydra and job.hydra.node_size) or num_gpus
    schemes = _schemes(source, args.schemes, num_gpus, node_size)
    device = _device(args.local_rank)
    if device.type == "cuda" and (job.hydra is None or FLASH_3 in job.hydra.fast_paths):
        use_flash_3(device)
    return Request(
        source=source,
        schemes=schemes,
        num_gpus=num_gpus,
        node_size=node_size,
        rungs=_rungs(source, args, job.hydra.context_length if job.hydra else None, device),
        most_tokens=(job.hydra and job.hydra.tokens_per_step) or None,
        budget=RepeatBudget(args.seconds or (0.1 if args.quick else 0.35), 3, 5 if args.quick else 15),
        clock=_clock(args.clock, device),
        dtype=job.dtype,
        grad_dtype=job.grad_dtype,
        wire_dtype=job.wire_dtype,
        device=device,
        job=describe_job(source, device, job.dtype, num_gpus),
        make_optimizer=job.make_optimizer,
        images=job.hydra is not None and job.hydra.images,
    )


def _ranks_of(hydra: HydraConfig | None) -> int | None:
    return hydra.shapes[0].num_ranks if hydra and hydra.shapes else None


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "0")) or max(1, torch.cuda.device_count())


def _schemes(source: CausalLM, named: list[str] | None, num_gpus: int, node_size: int) -> tuple[ParallelScheme, ...]:
    """The schemes named on the command line, or all that the model and the ranks allow."""
    if not named:
        schemes = feasible_schemes(source.plan, num_gpus, node_size)
        if not schemes:
            raise ConfigError("the model cannot be cut by any scheme: no TP, SP or PP degree fits it")
        return schemes
    schemes = tuple(
        dict.fromkeys(s for text in named for p in StrategyShape.parse(text).pipelines for s in stage_schemes(p))
    )
    largest = max(scheme.num_ranks for scheme in schemes)
    allowed = feasible_schemes(source.plan, largest, largest)
    wrong = [str(scheme) for scheme in schemes if scheme not in allowed]
    if wrong:
        raise ConfigError(f"the model cannot be cut by {', '.join(wrong)}; it can by {', '.join(map(str, allowed))}")
    return schemes


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = device_index(int(os.environ.get("LOCAL_RANK", local_rank)), torch.cuda.device_count())
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def _rungs(source: CausalLM, args: argparse.Namespace, context: int | None, device: torch.device) -> tuple[Rung, ...]:
    """Lengths to measure: up to the longest that model and job allow, from an eighth of it or less."""
    limit = getattr(source.text_config, "max_position_embeddings", None) or 4096
    longest = args.longest or min(limit, context or limit)
    shortest = max(16, min(128 if device.type == "cuda" else 32, longest // 8))
    return make_ladder(shortest, longest, args.rungs or (5 if args.quick else 7))


def _clock(wanted: Literal["auto", "wall", "cpu"], device: torch.device) -> Literal["wall", "cpu"]:
    """CPU time where other work runs on the same cores: wall time would measure that too."""
    if wanted == "cpu" and device.type != "cpu":
        raise ConfigError("--clock cpu is the time of the host's cores, and a GPU computes beside them: leave it out")
    if wanted != "auto":
        return wanted
    return "cpu" if device.type == "cpu" and _busy_cores() > 0.5 else "wall"


def _busy_cores(seconds: float = 1.0) -> float:
    """Cores that other processes use now."""
    # The load average looks back over a minute: after a build it would still speak of work that has ended.

    def ticks() -> tuple[int, int]:
        numbers = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]  # idle, and waiting for a disk

    try:
        before = ticks()
        time.sleep(seconds)
        total, idle = (b - a for a, b in zip(before, ticks(), strict=True))
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0]
    return (1.0 - idle / max(1, total)) * (os.cpu_count() or 1)
