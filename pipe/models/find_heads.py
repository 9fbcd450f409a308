"""A model's boxes in; the same boxes, with those marked whose heads tensor parallel ranks can share, out.

A recurrent module that is made as `recurrent_heads.py` knows it is tried: ranks' parts of it run one after the other on
a sequence, by a degree that leaves each of them key heads or groups of its own and by one that does not, and the sum of
what they return is compared with what the whole module does. Where it differs every rank computes the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_hydra.pipe.model_plan import ParamSpec
from ds_hydra.pipe.models.boxes import Box, Boxes
from ds_hydra.pipe.models.mixers import Call, Calls, Mixers
from ds_hydra.pipe.models.own_heads import gated_norm
from ds_hydra.pipe.models.recurrent_heads import HeadCut, head_cut, localized


def with_heads(alone: Mixers, boxes: Boxes, calls: Calls) -> Boxes:
    """The boxes, each told whether ranks may share its heads; `calls` are those of a run of a sequence alone."""
    found = {
        index: tuple(replace(box, by_heads=_shares(alone, index, box, calls)) for box in boxes.of[index])
        for index in alone.kinds
    }
    return replace(boxes, of=tuple(found[first] for first in alone.firsts))


def _shares(alone: Mixers, index: int, box: Box, calls: Calls) -> bool:
    module = alone.module(index, box.path)
    if not box.path or box.rows is None or box.state is None or (cut := head_cut(module)) is None:
        return False
    call = calls[index, box.path]
    draw = torch.Generator().manual_seed(6)
    like = call.flat[box.rows]
    hidden = torch.randn(like.shape, generator=draw, dtype=torch.float64).to(like)
    trial = _Trial(module, cut, replace_in(call, box.rows, hidden))
    try:
        with torch.no_grad():
            return all(trial.equal(tp) for tp in set(cut.tried))
    except Exception:  # of the module's own forward, or of a norm that is another
        return False


def replace_in(call: Call, place: int, value: Any) -> Call:
    """The call with another argument."""
    return replace(call, flat=[*call.flat[:place], value, *call.flat[place + 1 :]])


class _Trial:
    """A module that runs as a whole, or in the parts that ranks have of it."""

    def __init__(self, module: nn.Module, cut: HeadCut, call: Call):
        self._module, self._cut, self._call = module, cut, call

    def equal(self, tp: int) -> bool:
        """Whether what `tp` ranks return adds up to what the whole module does."""
        with self._without_norm(tp):
            whole, parts = self._run({}), [self._part(rank, tp) for rank in range(tp)]
        return _near(torch.stack(parts).sum(0), whole)

    def _part(self, rank: int, tp: int) -> Tensor:
        own = {}
        for name, parameter in self._module.named_parameters():
            spec = ParamSpec(name, tuple(parameter.shape), self._cut.rules[name])
            ranges = spec.shard_ranges(rank, tp)
            parts = [parameter.narrow(spec.rule.dim or 0, start, stop - start) for start, stop in ranges]
            own[name] = torch.cat(parts, spec.rule.dim or 0) if parts else parameter
        before = localized(self._module, self._cut, tp)
        try:
            return self._run(own)
        finally:
            for (owner, name), number in before.items():
                setattr(owner, name, number)

    def _run(self, parameters: dict[str, Tensor]) -> Tensor:
        args, kwargs = tree_unflatten(self._call.flat, self._call.spec)
        (out,) = tree_flatten(functional_call(self._module, parameters, args, kwargs))[0]
        return out  # type: ignore[no-any-return]

    @contextmanager
    def _without_norm(self, tp: int) -> Iterator[None]:
        """Within it, a norm whose groups ranks share is none: it is tried by itself."""
        if not self._cut.shares_norm(tp):
            yield
            return
        norm: Any = self._module.get_submodule(self._cut.norm)
        draw = torch.Generator().manual_seed(7)
        hidden, gate = (torch.randn(3, len(norm.weight), generator=draw).to(norm.weight) for _ in range(2))
        first = slice(norm.group_size)
        of_group = SimpleNamespace(
            weight=norm.weight[first], group_size=norm.group_size, variance_epsilon=norm.variance_epsilon
        )
        own = gated_norm(of_group, 1, 0, 1, (), hidden[:, first], gate[:, first])
        if not _near(own, norm(hidden, gate)[:, first]):
            raise ValueError("the norm is another than that of transformers")
        norm.forward = lambda hidden, gate: hidden * torch.sigmoid(gate)
        try:
            yield
        finally:
            del norm.forward


def _near(found: Tensor, right: Tensor) -> bool:
    """Whether two results differ by rounding, in 32 bit at least: models compute parts of it so."""
    eps = max(torch.finfo(right.dtype).eps, torch.finfo(torch.float32).eps)
    return float((found - right).abs().max()) <= eps**0.5 * float(right.abs().max())
