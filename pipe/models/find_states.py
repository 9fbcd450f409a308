"""A model's boxes in; the same boxes, each with what it carries from slice to slice if that was seen to work, out.

A box that is handed a cache is tried on a sequence in two slices, and in three of which one has a single token, against
the whole sequence: what it returns, and the gradients of its input and of its parameters [Note: carried states]. Code
that takes a state for single tokens only, as the scans of Mamba-1 do, computes something else in slices without a word.
Such a box runs whole sequences only, and so does one that is handed more of each token than hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_hydra.pipe.contexts import Contexts
from ds_hydra.pipe.models.boxed_layers import call_on_slice
from ds_hydra.pipe.models.boxes import Box, Boxes, Leaves
from ds_hydra.pipe.models.mixers import Call, Calls, Mixers
from ds_hydra.pipe.models.states import State
from ds_hydra.pipe.rows import Chunk

_LEAST = 1e-6  # of the largest gradient: what is less may be rounding


def with_states(alone: Mixers, boxes: Boxes, calls: Calls) -> Boxes:
    """The boxes with what they carry, and why sequences must stay whole if one carries nothing.

    `calls` are those of a run of a sequence alone.
    """
    found: dict[int, tuple[Box, ...]] = {}
    whole = ""
    for index in alone.kinds:
        tried = [_tried(alone, index, box, calls[index, box.path]) for box in boxes.of[index]]
        found[index] = tuple(box for box, _ in tried)
        for box, reason in tried:
            named = f"{box.path} of layer {index}" if box.path else f"layer {index}"
            whole = whole or (reason and f"{named} takes whole sequences only: {reason}")
    return replace(boxes, of=tuple(found[first] for first in alone.firsts), whole=whole)


def _tried(alone: Mixers, index: int, box: Box, call: Call) -> tuple[Box, str]:
    """A box as it is used in slices, or as it was and why it is not."""
    if box.rows is None or any(dims for place, dims in enumerate(box.handed) if place != box.rows):
        return box, "it is handed more of each token than hidden states"
    trial = _Trial(alone.module(index, box.path), box, call, alone.tokens)
    if (place := trial.place()) is None:
        return box, "it asks for no state that is known here"
    middle = alone.tokens // 2
    right, carries = trial.whole(), 0
    for ends in ((0, middle, alone.tokens), (0, middle - 1, middle, alone.tokens)):
        try:
            other, kept = trial.in_slices(replace(box, state=place), ends)
        except Exception as error:  # of the module's own forward
            return box, f"in {len(ends) - 1} slices it ends with {type(error).__name__}: {error}"
        if reason := _difference(right, other):
            return box, f"in {len(ends) - 1} slices {reason}"
        carries = carries or kept  # of the second of three, its token too
    return replace(box, state=place, carries=carries), ""


class _Trial:
    """A box that computes of a sequence, whole or in slices, its result and gradients, all by name."""

    def __init__(self, module: nn.Module, box: Box, call: Call, tokens: int):
        assert box.rows is not None, "asked before"
        self._module, self._box, self._call, self._tokens, self._rows = module, box, call, tokens, box.rows
        self._dim = box.handed[box.rows][0]
        draw = torch.Generator().manual_seed(5)
        self._hidden, self._weights = (
            torch.randn(like.shape, generator=draw, dtype=torch.float64).to(like)
            for like in (call.flat[box.rows], call.returned[0])
        )

    def place(self) -> int | None:
        """Where among its arguments it takes a cache: what is none, and is asked for states when it is there."""
        for place in (place for place, value in enumerate(self._call.flat) if value is None):
            state = State({})
            try:
                with torch.no_grad():
                    self._run(_with(_with(self._call.flat, self._rows, self._hidden), place, state))
            except Exception:  # of a module that takes something else there
                continue
            if state.after:
                return place
        return None

    def whole(self) -> Mapping[str, Tensor]:
        hidden = self._hidden.clone().requires_grad_()
        with torch.enable_grad():
            out = self._run(_with(self._call.flat, self._rows, hidden))[0]
            (out * self._weights).sum().backward()
        return self._found(out, [hidden])

    def in_slices(self, box: Box, ends: Sequence[int]) -> tuple[Mapping[str, Tensor], int]:
        """With the bytes that a slice carries to the next."""
        contexts, out_dim = Contexts(self._tokens), box.returned[0][0]
        parts = [(start, stop - start) for start, stop in pairwise(ends)]
        hidden = [self._hidden.narrow(self._dim, *part).clone().requires_grad_() for part in parts]

        def call(arguments: Leaves, _: Tensor | None) -> list[tuple[Any, tuple[int, ...]]]:
            return [*zip(self._run(arguments), box.returned, strict=True)]

        with torch.enable_grad():
            outs = []
            for own, (start, length) in zip(hidden, parts, strict=True):
                chunk = Chunk(start, start + length, contexts)
                outs.append(call_on_slice(call, box, _with(self._call.flat, self._rows, own), None, chunk, box.path)[0])
            carries = contexts.carried(box.path).bytes_at(ends[-2])
            for out, part in zip(reversed(outs), reversed(parts), strict=True):
                (out * self._weights.narrow(out_dim, *part)).sum().backward()
        return self._found(torch.cat(outs, out_dim), hidden), carries

    def _run(self, flat: Leaves) -> Leaves:
        args, kwargs = tree_unflatten(flat, self._call.spec)
        return tree_flatten(self._module(*args, **kwargs))[0]

    def _found(self, out: Tensor, hidden: Sequence[Tensor]) -> Mapping[str, Tensor]:
        found = {name: p.grad for name, p in self._module.named_parameters() if p.grad is not None}
        for parameter in self._module.parameters():
            parameter.grad = None
        gradients = [torch.zeros_like(part) if part.grad is None else part.grad for part in hidden]
        return {"its result": out.detach(), "the gradient of its input": torch.cat(gradients, self._dim)} | {
            f"the gradient of {name}": gradient for name, gradient in found.items()
        }


def _with(flat: Leaves, place: int, value: Any) -> Leaves:
    return [*flat[:place], value, *flat[place + 1 :]]


def _difference(right: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    """What slices compute otherwise; empty if nothing."""
    peaks = {name: float(value.abs().max()) for name, value in right.items()}
    for name, value in right.items():
        near = torch.finfo(value.dtype).eps ** 0.5 * max(peaks[name], _LEAST * max(peaks.values()))
        apart = float((value - other[name]).abs().max()) if name in other else float("inf")
        if not apart <= near:
            return f"{name} is off by {apart:.2g} of {peaks[name]:.2g}"
    return ""
