"""A model in; ConfigError where a parameter that is trained shares memory with another of the model's tensors out.

In one process an update writes to that memory, and both tensors have the new values. Masters hold each parameter by
itself, and stages hold what is no parameter as it was: there the two part at the first update.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ds_hydra.pipe.models.kept_values import leaves_of
from ds_hydra.pipe.models.state import held_by
from ds_hydra.pipe.models.whose_code import file_of, is_of_package, own_functions
from ds_hydra.zero_hetero.errors import ConfigError


class _Span(NamedTuple):
    """The memory from the first to the last byte of a tensor."""

    device: str
    first: int  # addresses
    end: int
    name: str
    tensor: Tensor
    trained: bool


def refuse_shared_memory(model: nn.Module) -> None:
    """ConfigError for a trained parameter that lies over another tensor, by both names, or over itself.

    The same Parameter in several places is tied, and is no other tensor; parts of one memory that do not meet are as
    good as memory of their own.
    """
    reached: list[_Span] = []  # those that the next may begin within
    for span in sorted(_spans(model), key=lambda one: one[:3]):
        if span.trained and span.tensor.numel() * span.tensor.itemsize > span.end - span.first:
            raise ConfigError(
                f"{span.name} is an expanded view, of which several elements are one number in memory: no update can "
                "be written to it. Make the parameter of what is expanded, and expand it in forward()"
            )
        reached = [one for one in reached if one.device == span.device and one.end > span.first]
        for other in reached:
            if (span.trained or other.trained) and _meet(span, other):
                raise ConfigError(
                    f"{other.name} and {span.name} share memory: where one process updates a parameter, the other "
                    "changes with it, but ranks hold each by itself. To tie two parameters use one nn.Parameter in "
                    "both places; else give each a copy, with .clone(), or compute the one of the other in forward()"
                )
        reached.append(span)


def _spans(model: nn.Module) -> Iterator[_Span]:
    named: list[tuple[str, Any]] = [*model.named_parameters(), *model.named_buffers()]
    known: set[int] = set()
    for name, value in [*named, *_held(model)]:
        array = np.asarray(value) if isinstance(value, np.ndarray | memoryview) else None
        numeric = array is not None and array.dtype.kind in "biuf" and array.flags.writeable
        tensor = torch.from_numpy(array) if numeric and min(array.strides, default=1) > 0 else value
        if not isinstance(tensor, Tensor) or id(value) in known or tensor.is_meta or not tensor.numel():
            continue
        known.add(id(value))
        if tensor.layout == torch.strided:
            steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            first, trained = tensor.data_ptr(), isinstance(tensor, nn.Parameter) and tensor.requires_grad
            yield _Span(str(tensor.device), first, first + (steps + 1) * tensor.itemsize, name, tensor, trained)


def _held(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What stands beside parameters and buffers: in attributes and hooks, in scripts' classes, and in what these, their
    methods and the functions that are called there close over or read as globals."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if not is_of_package(file_of(kind))}
    of_kinds = [(f"{kind.__qualname__}.{key}", value) for kind in kinds for key, value in vars(kind).items()]
    for name, value in [*held_by(model), *sorted(of_kinds, key=lambda one: one[0])]:
        for held in (value, *own_functions(value)):
            yield from leaves_of(held, name)


def _meet(one: _Span, other: _Span) -> bool:
    """Whether some byte is of both."""
    first = min(one.first, other.first)
    marks = torch.zeros(max(one.end, other.end) - first, dtype=torch.bool)
    _bytes(marks, one, first).fill_(True)
    return bool(_bytes(marks, other, first).any())


def _bytes(marks: Tensor, span: _Span, first: int) -> Tensor:
    size = span.tensor.itemsize
    steps = (*(step * size for step in span.tensor.stride()), 1)
    return marks.as_strided((*span.tensor.shape, size), steps, span.first - first)
