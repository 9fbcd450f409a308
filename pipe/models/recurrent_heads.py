"""Heads of recurrent modules that tensor and sequence parallel ranks share: found by what a module is made of.

[Note: recurrent heads]
Heads of a gated delta rule, and of a recurrence of Mamba-2's kind, have nothing to do with each other between the
projections before and after them. So ranks share them as they share heads of attention: of each projection a rank has
the rows of its own heads, of the depthwise convolution their channels, of the states their part. One copy of the hidden
states goes in, and what ranks make of them is added up behind the box, once for all sequences of a row. Of 2 key heads
and 4 value heads of 8 features, tp = 2 ranks hold

  in_proj_qkv    q 0..15, k 16..31, v 32..63     rank 0: rows 0..7, 16..23, 32..47
  conv1d         the same channels               the same
  A_log          4 heads                         rank 0: 0, 1
  norm           8 features of any head          all, and a part of the gradient, which add up
  out_proj       32 columns                      rank 0: columns 0..15

Heads of Mamba-2 read B and C of their group. Where there are fewer groups than ranks, several ranks compute the same
group, each with a part of its gradient, and the gated norm, whose variance is that of a group, adds the squares of
these ranks up. The kernel that fuses such a norm with all else is not called then.

Sequence parallel ranks share what a tensor parallel rank has of the heads: they gather the tokens, compute their part
by slices of its parameters, and add up each rank's tokens [Note: who shares heads].

Names are those of transformers. What is made of other parts, has a bias behind its heads, or computes something else
when it is cut (`find_boxes.py`) is computed by every rank as a whole, and so is all of it by ranks of other degrees.

Which they are tells [Note: recurrent heads], and which rank has which [Note: who shares heads]. Tensor parallel ranks
hold the parameters of their heads. Of what they hold sequence parallel ranks use slices while the module runs on a row,
so the gradient of all else is zero, and the push adds up the ranks' gradients as it does anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_hydra.pipe.adapters import adapter_rule, plain_name
from ds_hydra.pipe.collectives import Group, copy_to_ranks, sum_over_ranks
from ds_hydra.pipe.head_sharing import Boxes, BoxSize, HeadDegrees
from ds_hydra.pipe.model_plan import Blocks, ParamSpec, ShardRule, share_of_rows
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.pipe.wrappers import wrap

if TYPE_CHECKING:
    from ds_hydra.pipe.models.boxes import Box
    from ds_hydra.pipe.models.causal_lm import CausalLM


_DELTA = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "key_dim", "value_dim", "conv_dim")
_MAMBA = ("num_heads", "head_dim", "n_groups", "ssm_state_size", "intermediate_size", "conv_dim")
_OUT = ("out_proj", "o_proj")
_NORMS = ("norm", "o_norm")
_CHANNELS = ("in_channels", "out_channels", "groups")  # of a depthwise convolution


@dataclass(frozen=True)
class HeadCut:
    """How ranks share a module: rules of its parameters by their names, what its attributes count, by which degrees."""

    rules: Mapping[str, ShardRule]
    sizes: Mapping[str, Blocks]  # by the path of an attribute
    degrees: tuple[int, ...]
    fewest: int  # key heads, or groups of B and C: of more ranks than that several share one
    norm: str = ""  # whose groups ranks then share

    @property
    def parts(self) -> HeadDegrees:
        """By how many ranks it can be shared."""
        return HeadDegrees(self.degrees, self.fewest if self.norm else 0)

    @property
    def tried(self) -> tuple[int, ...]:
        """A degree of each kind."""
        return self.degrees[0], next((n for n in self.degrees if n > self.fewest), self.degrees[0])

    def shares_norm(self, tp: int) -> bool:
        """Whether a group of the norm lies on several ranks."""
        return bool(self.norm) and tp > self.fewest


@dataclass
class _Parts:
    """What a module of one kind is made of: blocks of rows by the names of its parts."""

    rows: Mapping[str, Blocks]
    columns: Blocks
    sizes: Mapping[str, Blocks]
    degrees: tuple[int, ...]
    fewest: int
    shared: Collection[str] = field(default_factory=tuple)  # every rank holds them, and has a part of their gradient


def head_cut(module: nn.Module) -> HeadCut | None:
    """How ranks may share the heads of a module; None if it is made of anything unknown."""
    parts = _delta_rule(module) or _mamba_2(module)
    if parts is None or not parts.degrees:
        return None
    rules: dict[str, ShardRule] = {}
    for name, parameter in module.named_parameters():
        plain = plain_name(name)
        child = plain.rpartition(".")[0] or plain
        if child in _OUT:
            (rows, units), leaf, dim = parts.columns[0], name.rpartition(".")[2], 1
            rule = ShardRule(1, units=units)
            if leaf == "bias":
                return None
        elif child in parts.rows:
            blocks, dim = parts.rows[child], 0
            rows = sum(size for size, _ in blocks)
            rule = ShardRule(0, units=blocks[0][1]) if len(blocks) == 1 else ShardRule(0, blocks=blocks)
        elif child in parts.shared:
            rows, dim, rule = 0, 0, ShardRule(gradient="partial")
        else:
            return None
        if rows and plain == name and parameter.shape[dim] != rows:
            return None
        rules[name] = replace(adapter_rule(name, rule), degrees=parts.degrees)
    norm = next((name for name in _NORMS if name in parts.rows), "")
    return HeadCut(rules, parts.sizes, parts.degrees, parts.fewest, norm)


def _numbers(module: nn.Module, names: Collection[str]) -> list[int] | None:
    """Attributes of a module that are whole numbers above 0; None if one is not."""
    found = [getattr(module, name, None) for name in names]
    return [int(n) for n in found] if all(type(n) is int and n > 0 for n in found) else None  # type: ignore[arg-type]


def _of_convolution(channels: Blocks) -> dict[str, Blocks]:
    return {"conv_dim": channels} | {f"conv1d.{name}": channels for name in _CHANNELS}


def _delta_rule(module: nn.Module) -> _Parts | None:
    """Of a gated delta rule whose key heads each have as many value heads."""
    if (numbers := _numbers(module, _DELTA)) is None:
        return None
    keys, values, key_size, value_size, key_dim, value_dim, conv_dim = numbers
    fits = key_dim == keys * key_size and value_dim == values * value_size and conv_dim == 2 * key_dim + value_dim
    if not fits or values % keys:
        return None
    key, value, head = (key_dim, keys), (value_dim, values), (values, values)
    mixed = (key, key, value)
    fused = {"in_proj_qkvz": ((2 * (key_dim + value_dim), keys),), "in_proj_ba": ((2 * values, keys),)}
    rows = fused | {"in_proj_qkv": mixed, "conv1d": mixed, "in_proj_z": (value,), "g_proj": (value,)}
    rows |= {"q_proj": (key,), "k_proj": (key,), "v_proj": (value,)}
    rows |= dict.fromkeys(("in_proj_a", "in_proj_b", "a_proj", "b_proj", "A_log", "dt_bias"), (head,))
    own = [name for name in fused if hasattr(module, name)]
    degrees = tuple(
        n for n in range(2, values + 1) if values % n == 0 and (keys % n == 0 or (n % keys == 0 and not own))
    )  # fmt: skip
    sizes = {"num_k_heads": ((keys, keys),), "num_v_heads": (head,), "key_dim": (key,), "value_dim": (value,)}
    return _Parts(rows, (value,), sizes | _of_convolution(mixed), degrees, keys, shared=_NORMS)


def _mamba_2(module: nn.Module) -> _Parts | None:
    """Of a recurrence of Mamba-2's kind: z, x, B, C and dt come from one projection."""
    if (numbers := _numbers(module, _MAMBA)) is None:
        return None
    heads, size, groups, state, inner, conv_dim = numbers
    group_size = getattr(getattr(module, "norm", None), "group_size", None)
    if inner != heads * size or conv_dim != inner + 2 * groups * state or group_size != inner // groups:
        return None
    values, head, group = (inner, heads), (heads, heads), (groups * state, groups)
    channels = (values, group, group)
    rows: dict[str, Blocks] = {"in_proj": (values, *channels, head), "conv1d": channels, "norm": (values,)}
    rows |= dict.fromkeys(("A_log", "D", "dt_bias"), (head,))
    degrees = tuple(n for n in range(2, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0))
    sizes: dict[str, Blocks] = {"num_heads": (head,), "n_groups": ((groups, groups),), "intermediate_size": (values,)}
    return _Parts(rows, (values,), sizes | _of_convolution(channels), degrees, groups)


def shared_heads(source: CausalLM) -> tuple[dict[str, tuple[HeadCut, int]], dict[str, ShardRule]]:
    """Of a model's boxes those that ranks share, by their paths, with the place of the hidden states among their
    arguments; and the rules of their parameters. None that has a parameter with another module."""
    model, boxes, layers_path = source.template, source.boxes, source.layers_path
    uses = Counter(source.aliases.values())
    found: dict[str, tuple[HeadCut, int]] = {}
    rules: dict[str, ShardRule] = {}
    for index, box in ((index, box) for index, of in enumerate(boxes.of) for box in of if box.by_heads):
        path = f"{layers_path}.{index}.{box.path}"
        cut = head_cut(model.get_submodule(path))
        if cut is not None and box.rows is not None and all(uses[f"{path}.{name}"] == 1 for name in cut.rules):
            found[path] = cut, box.rows
            rules |= {f"{path}.{name}": rule for name, rule in cut.rules.items()}
    return found, rules


def box_sizes(source: CausalLM) -> Boxes:
    """What planning needs to know of a model's boxes, by layer, once it is known which of them ranks share."""
    cuts, boxes = source.head_cuts, source.boxes

    def size(index: int, box: Box) -> BoxSize:
        path = f"{source.layers_path}.{index}.{box.path}".rstrip(".")
        matrices = [p for p in source.template.get_submodule(path).parameters() if p.dim() > 1]
        heads = cuts[path][0].parts if path in cuts else HeadDegrees()
        carried = 0 if boxes.whole else box.carries
        return BoxSize(sum(p.numel() for p in matrices), box.state is not None, carried, heads)

    return tuple(tuple(size(index, box) for box in of) for index, of in enumerate(boxes.of))


def localized(module: nn.Module, cut: HeadCut, tp: int) -> dict[tuple[nn.Module, str], int]:
    """Let a module count what a rank of `tp` has; returns what it has counted, by its owner and name."""
    before: dict[tuple[nn.Module, str], int] = {}
    for path, blocks in cut.sizes.items():
        owner, _, name = path.rpartition(".")
        of = module.get_submodule(owner)
        before[of, name] = getattr(of, name)
        setattr(of, name, sum(stop - start for start, stop in (share_of_rows(*block, 0, tp) for block in blocks)))
    return before


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
