"""A stage's recurrent modules whose heads its ranks share in; the same, computing with a rank's own heads, out.

Which they are tells [Note: recurrent heads], and which rank has which [Note: who shares heads]. Tensor parallel ranks
hold the parameters of their heads. Of what they hold sequence parallel ranks use slices while the module runs on a row,
so the gradient of all else is zero, and the push adds up the ranks' gradients as it does anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_hydra.pipe.collectives import Group, copy_to_ranks, sum_over_ranks
from ds_hydra.pipe.model_plan import ParamSpec
from ds_hydra.pipe.models.recurrent_heads import HeadCut, localized
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.pipe.wrappers import wrap

if TYPE_CHECKING:
    from ds_hydra.pipe.models.causal_lm import CausalLM

Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Slices:
    """Where a rank's own heads lie in one parameter that its tensor parallel rank holds."""

    owner: nn.Module
    leaf: str
    dim: int
    ranges: Ranges


@dataclass(frozen=True)
class OwnHeads:
    """What one rank has of a recurrent module: `part` of `parts`, by its tensor and its sequence parallel ranks."""

    module: nn.Module
    cut: HeadCut
    rows: int  # place of the hidden states among the module's arguments
    by_tp: int
    by_sp: int
    part: int
    slices: tuple[Slices, ...]
    use: Callable[[], None]  # waits for the module's parameters

    @property
    def parts(self) -> int:
        return self.by_tp * self.by_sp

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within it, the module has the parameters of these heads."""
        self.use()
        before = [(each, each.owner._parameters[each.leaf]) for each in self.slices]
        for each, whole in before:
            assert whole is not None, f"{each.leaf} is not there"
            each.owner._parameters[each.leaf] = _of(whole, each.dim, each.ranges)  # type: ignore[assignment]
        try:
            yield
        finally:
            for each, whole in before:
                each.owner._parameters[each.leaf] = whole


def _of(whole: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """Some rows of a parameter along a dimension: of one range a view."""
    if len(ranges) == 1:
        ((start, stop),) = ranges
        return whole.narrow(dim, start, stop - start)
    own: Tensor = _Blocks.apply(whole, dim, ranges)
    return own


class _Blocks(torch.autograd.Function):
    """Several ranges of rows; torch's own backward would make a gradient of the whole parameter for each of them."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, ranges: Ranges) -> Tensor:
        ctx.shape, ctx.dim, ctx.ranges = whole.shape, dim, ranges
        return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        found = grad.new_zeros(ctx.shape)
        parts = grad.split([stop - start for start, stop in ctx.ranges], ctx.dim)
        for (start, stop), part in zip(ctx.ranges, parts, strict=True):
            found.narrow(ctx.dim, start, stop - start).copy_(part)
        return found, None, None


def own_heads(
    source: CausalLM, model: nn.Module, place: StagePlace, names: Mapping[str, str], use: Callable[[str], None]
) -> dict[str, OwnHeads]:
    """By the paths of a stage's recurrent modules, those whose heads ranks of this stage share. `names` are the master
    names of the stage's parameters by their paths, `use` waits for one."""
    found: dict[str, OwnHeads] = {}
    tp, sp = place.stage.tp, place.stage.sp
    for path, (cut, rows) in source.head_cuts.items():
        by_tp, by_sp = cut.parts.shared_by(tp, sp)
        here = {name: names[f"{path}.{name}"] for name in cut.rules if f"{path}.{name}" in names}
        if by_tp * by_sp == 1 or not here:
            continue
        part = (place.tp_rank if by_tp > 1 else 0) * by_sp + place.sp_rank % by_sp
        module = model.get_submodule(path)
        slices = []
        for name, master in here.items() if by_sp > 1 else ():
            held = source.specs[master]
            own = ParamSpec(name, held.shape, cut.rules[name]).shard_ranges(part, by_tp * by_sp)
            if own:
                owner, _, leaf = name.rpartition(".")
                ranges = _within(held.shard_ranges(place.tp_rank, tp), own)
                slices.append(Slices(module.get_submodule(owner), leaf, cut.rules[name].dim or 0, ranges))

        def used(masters: Sequence[str] = tuple(here.values())) -> None:
            for master in masters:
                use(master)

        found[path] = OwnHeads(module, cut, rows, by_tp, by_sp, part, tuple(slices), used)
    return found


def _within(held: Ranges, own: Ranges) -> Ranges:
    """Rows of a whole parameter, of which a rank holds some, each of the other's parts in one of its own, as rows of
    what it holds: of 0..3 and 6..9 the rows 1..3 and 8..9 are 1..3 and 5..6. It holds all if nothing is said."""
    found, before = [], 0
    for (first, last), (start, stop) in zip(held, own, strict=True) if held else ():
        found.append((before + start - first, before + stop - first))
        before += last - first
    return found or own


def share_heads(found: Mapping[str, OwnHeads], place: StagePlace) -> None:
    """Let recurrent modules compute with a rank's heads alone."""
    for own in found.values():
        module, cut = own.module, own.cut
        localized(module, cut, own.parts)
        groups = [place.sp_group] if own.by_sp > 1 else []
        groups += [place.tp_group] if own.by_tp > 1 else []
        forward: Callable[..., Any] = module.forward
        if cut.shares_norm(own.parts):
            norm = module.get_submodule(cut.norm)
            normed = partial(gated_norm, norm, cut.fewest, own.part, own.parts, groups)
            wrap(norm, normed, "tensor parallel", "norm of a group")
            forward = partial(_unfused, module, forward)
        if own.by_tp > 1:
            forward = partial(_added_up, forward, own.rows, place.tp_group)
        wrap(module, forward, "tensor parallel", "own heads")


def _added_up(forward: Callable[..., Any], rows: int, group: Group, *args: Any, **kwargs: Any) -> Tensor:
    flat, spec = tree_flatten((args, kwargs))
    flat[rows] = copy_to_ranks(flat[rows], group)
    given, named = tree_unflatten(flat, spec)
    return sum_over_ranks(forward(*given, **named), group)


def _unfused(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In training transformers' code asks for a kernel that knows of one rank's norm only."""
    before, module.training = module.training, False
    try:
        return forward(*args, **kwargs)
    finally:
        module.training = before


def gated_norm(
    norm: Any, groups: int, part: int, parts: int, ranks: Sequence[Group], hidden: Tensor, gate: Tensor | None = None
) -> Tensor:
    """What transformers' gated RMSNorm makes of the features (..., F) of one of so many parts, of `groups` that the
    `ranks` of these process groups share.

    The squares of a group are those of all ranks that have a part of it: their sums are added up, one number for each
    token and group.
    """
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if gate is not None:
        wide = wide * nn.functional.silu(gate.to(wide.dtype))
    squares = wide.pow(2).sum(-1, keepdim=True)
    if ranks:
        own = part * groups // parts
        per_group = nn.functional.pad(squares, (own, groups - own - 1))
        for group in ranks:
            per_group = sum_over_ranks(per_group, group)
        for group in ranks:  # every rank reads the sums, so each has a part of their gradient, too
            per_group = copy_to_ranks(per_group, group)
        squares = per_group[..., own : own + 1]
    normed = wide * torch.rsqrt(squares / norm.group_size + norm.variance_epsilon)
    weighted: Tensor = norm.weight * normed.to(hidden.dtype)
    return weighted
