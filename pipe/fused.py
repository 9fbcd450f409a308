"""A tensor in, the kernels that do several operators' work for it in one pass out, or None."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def kernels_for(*tensors: Tensor) -> ModuleType | None:
    """Triton's kernels, where these tensors are on a GPU for which they compile, in types that they compute in."""
    if not all(one.is_cuda and one.dtype in _DTYPES for one in tensors):
        return None
    try:
        from ds_hydra.pipe import kernels
    except ImportError:  # a build of torch without Triton
        return None
    return kernels if kernels.work(tensors[0].device) else None
