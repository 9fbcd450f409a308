"""Modes of torch's that a script has around a call of the engine in; the call out of them, and a line for each, out.

A step has types and devices of its own, and the three calls run it only at the update. So what a script has around a
call cannot hold in it: it is left there, as DeepSpeed's engine leaves it, and told once. Where a plain loop could not
train the call is refused.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

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


def refuse_without_gradients(call: str, instead: str) -> None:
    """RuntimeError where a plain loop would have no gradient to train by."""
    if not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise RuntimeError(f"{call} trains, and is called within torch.{mode}(), in which nothing has a gradient: "
                           f"call it outside, or {instead}")  # fmt: skip


@functools.cache
def _tell(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("%s (told once)", text)
