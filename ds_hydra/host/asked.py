"""A function of torch's in; what it asks of a tensor whose value is not there, out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HOOKS_OF_TENSORS = frozenset(("register_hook", "register_post_accumulate_grad_hook", "retain_grad"))
_METADATA = HOOKS_OF_TENSORS | frozenset((
    "__get__", "__len__", "dim", "ndimension", "size", "numel", "nelement", "stride", "storage_offset", "element_size",
    "get_device", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_tensor", "has_names",
))  # fmt: skip
"""What may be asked of a tensor whose value is not there."""

_VALUES = frozenset(("T", "mT", "H", "mH", "real", "imag"))  # attributes of a tensor that are computed from its values


def attribute_of(function: Callable[..., Any]) -> str:
    """The attribute of a tensor that a function of torch's gets or sets, or ""."""
    return getattr(getattr(function, "__self__", None), "__name__", "")


def makes_another(function: Callable[..., Any]) -> bool:
    """Whether it makes a tensor of the same kind with values of its own, as `zeros_like`."""
    name = getattr(function, "__name__", "")
    return name.endswith("_like") or name.startswith("new_")


def needs_no_value(function: Callable[..., Any]) -> bool:
    """Whether a function of torch's asks of a tensor what is known without its value."""
    name = getattr(function, "__name__", "")
    return makes_another(function) or (name in _METADATA and attribute_of(function) not in _VALUES)
