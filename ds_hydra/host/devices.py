"""What CUDA and NCCL read when they start, torch's flags for the process, and modes that a script has around a call.

A step has types and devices of its own, and the three calls run it only at the update. So what a script has around a
call cannot hold in it: it is left there, as DeepSpeed's engine leaves it, and told once. Where a plain loop could not
train the call is refused.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ds_hydra.config.hydra_block import FLASH_3, HydraConfig
from ds_hydra.pipe.attention.backends import give_flash_3_back, use_flash_3
from ds_hydra.pipe.models.whose_code import function_of
from ds_hydra.watchdog.host import abort_later
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)


_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_GROWING = "expandable_segments:True"
_SLEEPS_WITH_SEGMENTS = (0, 20, 1)  # the first vLLM whose sleep mode bears segments that grow
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_WORKSPACE, _SAME_SUMS = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
# Of torch's own watchdog: that it ends the process at an error, and that it does when it is stuck itself.
_OURS_TO_END = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
_deterministic: Any = torch.utils.deterministic  # which sets its attribute by a class of its own
_OTHER_NCCL = "TORCH_DIST_USE_NCCL2"
_HOOKS = "torch.autograd.graph.saved_tensors_hooks"
_PACKAGES = ("torch", "transformers", "trl", "accelerate", "deepspeed")  # whose modes count, watch or move tensors
SECOND_NCCL = "2.15"  # from this torch on "nccl" is another backend unless that variable is 0


def before_devices_start(config: HydraConfig, backend: str, num_ranks: int | None) -> None:
    """Set what CUDA and NCCL read when they start; what the user has set stays. Nothing is set where there is no CUDA.

    `num_ranks` is None where no launcher says it. ConfigError for a value with which ranks may stand still, or that
    contradicts hydra.deterministic.
    """
    if backend != "nccl":
        return
    several = num_ranks != 1
    begun = torch.cuda.is_initialized()
    _let_segments_grow(begun)
    _leave_queues(several, begun)
    if config.deterministic:
        workspace = os.environ.setdefault(_WORKSPACE, _SAME_SUMS[0])
        if workspace not in _SAME_SUMS:
            raise ConfigError(
                f"hydra.deterministic needs {_WORKSPACE} to be one of {', '.join(_SAME_SUMS)}, but the environment has "
                f"{workspace!r}: with it cuBLAS may add up differently in each run; unset it"
            )
    _keep_first_nccl()
    elastic = config.elastic is not None
    if elastic or (config.faults.frozen_seconds > 0 and several):
        _end_ranks_ourselves(elastic=elastic)


def device_index(local_rank: int, visible: int) -> int:
    """The device of the process that is the `local_rank`-th of its host, among those that it sees.

    Slurm's `--gpus-per-task=1`, pods and MIG slices show each process its own device alone, which is number 0 there.
    ConfigError where it sees several, and fewer than there are processes.
    """
    if local_rank < visible or visible == 0:
        return local_rank
    if visible == 1:
        return 0
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise ConfigError(
        f"LOCAL_RANK={local_rank} is to have a device of its own, but this process sees {visible} (CUDA_VISIBLE_DEVICES"
        f"{' is not set' if shown is None else '=' + shown}): start {visible} processes on this host, or show each "
        "process its own device alone, or show all of them to each"
    )


def _let_segments_grow(begun: bool) -> None:
    # Micro-batches differ in size, and so do their tensors: in segments of fixed size what one leaves free is too small
    # for the next.
    found = [name for name in _ALLOCATOR if name in os.environ]
    if not found:
        if _sleeping_refuses_segments():
            logger.warning(
                "vLLM before %s refuses segments that grow beside its sleep mode, so they are left off here: more of a "
                "device's memory may lie in pieces. Update vLLM", ".".join(map(str, _SLEEPS_WITH_SEGMENTS)),
            )  # fmt: skip
            return
        os.environ[_ALLOCATOR[0]] = _GROWING
        if begun:  # the variable was read before; its setter holds for all that is allocated from now on
            torch._C._accelerator_setAllocatorSettings(_GROWING)
    elif not any("expandable_segments:true" in os.environ[name].replace(" ", "").lower() for name in found):
        logger.warning(
            "%s=%s is without expandable_segments:True: micro-batches differ in size, so more of a device's memory may "
            "lie in pieces than the margin that is left for it",
            found[0],
            os.environ[found[0]],
        )


def _sleeping_refuses_segments() -> bool:
    if "vllm" not in sys.modules:
        return False
    numbers = re.findall(r"\d+", str(getattr(sys.modules["vllm"], "__version__", "")))[:3]
    return bool(numbers) and tuple(map(int, numbers)) < _SLEEPS_WITH_SEGMENTS


def _leave_queues(several: bool, begun: bool) -> None:
    # A step has about ten streams: compute, pulls and pushes, stages, TP, SP, twins, copies. Streams that share one of
    # the device's queues wait for each other. A message that waits for another rank then holds up a collective that
    # this rank waits for, which may be what the first rank's message waits for.
    late = begun and several and _QUEUES not in os.environ
    queues = os.environ.setdefault(_QUEUES, "32")
    if late:
        logger.warning(
            "CUDA had begun in this process before the engine was made (TrainingArguments and Accelerate choose their "
            "device early), so its streams share 8 queues, and some wait for others: export %s=32 before python starts",
            _QUEUES,
        )
    if queues.strip() == "1" and several:
        raise ConfigError(
            f"the environment has {_QUEUES}=1: all streams of a device would share one queue, in which a message that "
            "waits for another rank holds up what that rank waits for, and the job may stand still. Unset it (it is "
            "then 32); nothing here depends on the order that it is set for elsewhere"
        )


def _keep_first_nccl() -> None:
    # What this release knows of the order of operations holds for the first of torch's two NCCL backends. The second
    # one puts messages of pairs and collectives of all into one stream.
    second = torch.__version__ >= SECOND_NCCL
    if not torch.distributed.is_initialized() and _OTHER_NCCL not in os.environ:
        os.environ[_OTHER_NCCL] = "0"
        if second:
            logger.info('torch %s: "nccl" is its first NCCL backend here (%s=0)', torch.__version__, _OTHER_NCCL)
    if (chosen := os.environ.get(_OTHER_NCCL, "1" if second else "0")) != "0":
        raise ConfigError(
            f"with {_OTHER_NCCL}={chosen}, as this environment has it or as torch {torch.__version__} takes it where a "
            'script itself starts torch.distributed, "nccl" is a backend that this release does not know: set '
            f"{_OTHER_NCCL}=0 before torch.distributed is started"
        )


def _end_ranks_ourselves(*, elastic: bool) -> None:
    # Where a rank has died on another node torch's watchdog ends this one with 134, sooner than the heartbeats have
    # told who died and end it with 75, which launchers restart at.
    begun, left = torch.distributed.is_initialized(), False
    for name in _OURS_TO_END:
        left |= os.environ.get(name, None if begun else "0") != "0"
        os.environ.setdefault(name, "0")
    if left and elastic:
        raise ConfigError(
            f"hydra.elastic needs {' and '.join(f'{name}=0' for name in _OURS_TO_END)}, else torch ends the ranks that "
            "are left when one is lost: unset them, or set them before the script starts torch.distributed"
        )
    if left:  # the user's choice, or it was read before
        abort_later()


class Flags:
    """torch's flags as engines need them: those of the process come back when the last engine that holds them ends.

    Sums of products stay in FP32 where the library splits them, no attention is cuDNN's; the flags of
    hydra.deterministic and hydra.fast_paths.
    """

    _holding = 0
    _before: dict[str, Any]

    def __init__(self, config: HydraConfig, device: torch.device):
        cls, matmul = type(self), torch.backends.cuda.matmul
        self._held = True
        if cls._holding == 0:
            cls._before = {
                "bf16": _reductions("bf16"),
                "fp16": _reductions("fp16"),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "warn": torch.is_deterministic_algorithms_warn_only_enabled(),
                "fill": _deterministic.fill_uninitialized_memory,
                "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
            }
        cls._holding += 1
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
            _deterministic.fill_uninitialized_memory = False  # all that is read here was written before
        if device.type == "cuda":
            # Products with few rows are split along what is summed; the parts would be added in BF16.
            matmul.allow_bf16_reduced_precision_reduction = False
            matmul.allow_fp16_reduced_precision_reduction = False
            # Attention that a model brings: with a mask, gradients of cuDNN's were found wrong on an H200.
            torch.backends.cuda.enable_cudnn_sdp(False)
            if FLASH_3 in config.fast_paths:
                use_flash_3(device)

    def close(self) -> None:
        """This engine needs them no more."""
        cls = type(self)
        if not self._held:
            return
        self._held = False
        cls._holding -= 1
        if cls._holding == 0:
            before, matmul = cls._before, torch.backends.cuda.matmul
            matmul.allow_bf16_reduced_precision_reduction = before["bf16"]
            matmul.allow_fp16_reduced_precision_reduction = before["fp16"]
            torch.use_deterministic_algorithms(before["deterministic"], warn_only=before["warn"])
            _deterministic.fill_uninitialized_memory = before["fill"]
            torch.backends.cuda.enable_cudnn_sdp(before["cudnn"])
            give_flash_3_back()


def _reductions(kind: str) -> tuple[bool, ...]:
    """Whether parts of products may be added in 16 bit, and whether products may be split at all."""
    matmul, name = torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction"
    return getattr(matmul, name), getattr(matmul, f"{name}_split_k")


_DEVICES = ("cpu", "cuda")


@contextmanager
def out_of_modes(call: str) -> Iterator[None]:
    """Out of autocast, inference mode and a default device, for `call`."""
    tell_modes(call)
    with ExitStack() as modes:
        for kind in _DEVICES:
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        yield


def tell_modes(call: str) -> None:
    """Say once of each mode around `call` that it has no effect there."""
    for kind in _DEVICES:
        if torch.is_autocast_enabled(kind):
            _tell(
                f"{call} is called within torch.autocast({kind!r}, {torch.get_autocast_dtype(kind)}), which has no "
                "effect on it, as on DeepSpeed's engine: enable bf16 or fp16 in the config to train in 16 bit"
            )
    if (device := torch.get_default_device()).type != "cpu":
        _tell(f"{call} does not use torch's default device {str(device)!r}: the engine's device is its own")


def refuse_modes(call: str, instead: str, *, later: bool = False) -> None:
    """RuntimeError where a plain loop would have no gradient to train by, or perhaps another than the engine's: within
    modes and hooks of a script's own code. `later`: another call computes what this one begins, out of such modes."""
    if not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise RuntimeError(f"{call} trains, and is called within torch.{mode}(), in which nothing has a gradient: "
                           f"call it outside, or {instead}")  # fmt: skip
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()] if later else []
    by_hooks = ((function_of(one), _HOOKS) for one in hooks or ())
    for code, name in [*((type(mode), type(mode).__name__) for mode in modes), *by_hooks]:
        if str(getattr(code, "__module__", None)).partition(".")[0] not in _PACKAGES:
            raise RuntimeError(f"{call} is called within {name}, which may change what a plain loop computes, and not "
                               "what the engine does: call it outside")  # fmt: skip


@functools.cache
def _tell(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("%s (told once)", text)
