"""What functions are handed, taken apart as torch takes it apart."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import BaseModelOutput

from ds_hydra.pipe.models.graph import arguments

_TENSOR = torch.zeros(2)


class _Two(NamedTuple):
    one: torch.Tensor
    other: int


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), None),
        ((_TENSOR, nn.Parameter(_TENSOR), 1, 2.0, None, "x", torch.float32, torch.device("cpu"), slice(0, 2)), {}),
        (([_TENSOR, (_TENSOR, [3])],), {"dim": (0, 1), "out": _TENSOR, "other": {"b": _TENSOR, "a": ()}}),
        ((_Two(_TENSOR, 1), OrderedDict(b=1, a=_TENSOR)), {"given": BaseModelOutput(_TENSOR)}),
        ((torch.zeros(2, 2).max(dim=0), torch.Size([1, 2])), {"rest": []}),
    ],
)
def test_arguments_are_the_leaves_that_torch_finds(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    expected = tree_leaves((args, kwargs or {}))
    found = arguments(args, kwargs)
    assert len(found) == len(expected)
    assert all(one is other for one, other in zip(found, expected, strict=True))
