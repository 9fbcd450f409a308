"""FlashAttention 3 behind torch's attention operators, on devices that it is written for, where it is installed."""

from __future__ import annotations

import importlib.util
import logging

import torch
from torch.nn import attention

logger = logging.getLogger(__name__)

NAME = "FA3"
_PACKAGE = "flash_attn_interface"
_HOPPER = 9  # the generation of devices, by the first number of their capability
_ours: list[str] = []  # what was activated here, and not by the script


def use_flash_3(device: torch.device) -> bool:
    """Let torch's attention operators of this process run FlashAttention 3 on `device`; whether they do.

    What the script itself has activated stays. Without the package, or on another generation of devices, nothing
    changes.
    """
    if not hasattr(attention, "activate_flash_attention_impl"):
        return False
    if attention.current_flash_attention_impl() is None:
        if torch.cuda.get_device_capability(device)[0] != _HOPPER or importlib.util.find_spec(_PACKAGE) is None:
            return False
        try:
            attention.activate_flash_attention_impl(NAME)
        except (ImportError, RuntimeError) as error:  # a build for another torch
            logger.warning("FlashAttention 3 is installed and cannot be used (%s): attention runs without it", error)
            return False
        _ours.append(NAME)
        logger.info('attention: FlashAttention 3 (hydra.fast_paths without "flash_3" forbids it)')
    return flash_3_runs()


def flash_3_runs() -> bool:
    """Whether torch's operators run FlashAttention 3 now."""
    return getattr(attention, "current_flash_attention_impl", lambda: None)() == NAME


def give_flash_3_back() -> None:
    """Undo what `use_flash_3` did."""
    if _ours:
        _ours.clear()
        attention.restore_flash_attention_impl()
