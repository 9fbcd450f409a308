"""A recurrent module in; how tensor parallel ranks share its heads, by what it is made of, out; and that done.

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
when it is cut (`find_heads.py`) is computed by every rank as a whole, and so is all of it by ranks of other degrees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import nn

from ds_hydra.pipe.adapters import adapter_rule, plain_name
from ds_hydra.pipe.head_degrees import Boxes, BoxSize, HeadDegrees
from ds_hydra.pipe.model_plan import Blocks, ShardRule, share_of_rows
from ds_hydra.pipe.models.boxes import Box

if TYPE_CHECKING:
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
