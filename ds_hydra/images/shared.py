"""A large image over the ranks of a stage: each computes some of its rows in the layers of its encoder.

[Note: rows of a large image]
What an encoder does in its layers it does row by row, a row being a patch, but for attention. So each rank cuts its
share of the rows out of what enters the first layer, and the rows come together behind the last one. Inside attention
they exchange heads, as for a text [Note: exchange of heads]. On four ranks, two of which are tensor parallel, with 10
rows and the heads a b c d, it goes in two hops, over tensor and over sequence parallel ranks:

    rank       layers      first hop        second hop
    tp0 sp0    rows 0 1    0..4 of a b      0..9 of a
    tp1 sp0    rows 2 3 4  0..4 of c d      0..9 of c
    tp0 sp1    rows 5 6    5..9 of a b      0..9 of b
    tp1 sp1    rows 7 8 9  5..9 of c d      0..9 of d

There the encoder's own function attends, for each frame or window of the image; torch's own does where the encoder's is
FlashAttention's, say. Where the heads are no multiple of the ranks, some of these compute the same heads, each for a
part of the rows [Note: shared queries].

What stands before and behind the layers every rank computes of all rows, and takes a part of the features that it has
made; so a gradient has as many parts as there are ranks, whose sum is that of one. Of a layer whose output others read
than the next one, as Qwen3-VL's deepstack does, the rows come together, too.

Which modules are the layers, and whose output is read, is found on a small copy: the list of modules with the most
parameters, and the layers that make features NaN whose output is NaN but for the next layer. Nothing is believed of it:
the copy's stages train with each of its images so shared, and are compared with its own forward.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_hydra.images.draws import UnitDraws
from ds_hydra.pipe.attention.interface import let_attend_alone
from ds_hydra.pipe.models.refusals import failing
from ds_hydra.pipe.rows import BOTH, Pack
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.pipe.ulysses import AllToAll, HeadGroup, over_heads, start, wait
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

SHARED = "shared images"  # what small copies are tried with
PLAIN = ("sdpa", "eager")  # that attend to any rows; others may be told by keywords which rows see each other
_NAME = "hydra_rows"
_SHARED = "_hydra_shared_rows"
Attend = Callable[[HeadGroup], Tensor]


class Cut(NamedTuple):
    """Where the rows of an image are cut."""

    layers: str  # path of the list of the encoder's layers
    read: frozenset[int] = frozenset()  # those whose output is read by others than the next one
    heads: int = 0  # of their attention


@dataclass
class _Unit:
    """The rows of an image that a rank computes now."""

    packs: tuple[Pack, ...] = ()  # over the ranks of each hop
    start: int = 0
    stop: int = 0
    ends: Sequence[int] = ()  # of the intervals of rows that see each other in the layer that runs
    known: dict[int, tuple[Tensor, list[int]]] = field(default_factory=dict)  # tensors of such ends, by identity

    @property
    def rows(self) -> int:
        return self.packs[-1].num_tokens if self.packs else 0


class SharedRows:
    """The layers of a stage's encoder, which can run for a rank's rows of an image."""

    def __init__(self, model: nn.Module, cut: Cut, place: StagePlace):
        layers: Any = model.get_submodule(cut.layers)
        tp, sp = place.stage.tp, place.stage.sp
        hops = [(tp, place.tp_rank, place.tp_group), (sp, place.sp_rank, place.sp_group)]
        if tp > 1 < sp and (not cut.heads or cut.heads % tp):
            # Ranks with the same heads share the rows of queries, which those of the last hop can. Where neither hop
            # can be the first one, there is one; what ranks compute in common counts for their parts of the features.
            hops = hops[::-1] if cut.heads and not cut.heads % sp else [max(hops, key=lambda hop: hop[0])]
        self._hops = [hop for hop in hops if hop[0] > 1]
        self._unit: _Unit | None = None
        self._draws: UnitDraws | None = None
        attending = [module for module in layers.modules() if _attention(module)]
        self._name = _attention(attending[0])
        let_attend_alone(layers, self._name)
        self._configs: list[Any] = list({id(module.config): module.config for module in attending}.values())
        for module in layers.modules():
            object.__setattr__(module, _SHARED, self)
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._enter, with_kwargs=True)
            gathers = index in cut.read or index == len(layers) - 1
            layer.register_forward_hook(self._gather if gathers else self._leave, prepend=True)
        _register()

    @contextmanager
    def running(self, draws: UnitDraws | None) -> Iterator[None]:
        """Within it the encoder makes all features of one image, whose rows the ranks of the stage share, by `draws` if
        it draws. All of them must run it."""
        self._unit, self._draws = _Unit(), draws
        try:
            yield
        finally:
            self._unit = self._draws = None
            self._attend_by(self._name)

    def _attend_by(self, name: str) -> None:
        if self._draws is not None and (unit := self._unit) is not None:
            own = (-1, unit.rows, unit.start, unit.stop - unit.start)
            self._draws.of_part(*([own] if name == _NAME else []))
        for config in self._configs:
            config._attn_implementation_internal = name

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a layer is given of a rank's own rows."""
        unit = self._unit
        if unit is None:
            return None
        hidden = args[0] if args else kwargs[_first(kwargs)]
        if not unit.rows:
            self._begin(unit, hidden.shape[-2])
        unit.ends = (0, unit.rows)
        if hidden.shape[-2] == unit.rows:
            hidden = hidden.narrow(-2, unit.start, unit.stop - unit.start)
        self._attend_by(_NAME)
        if args:
            return (hidden, *(_own(unit, one) for one in args[1:])), {k: _own(unit, one) for k, one in kwargs.items()}
        return (), {k: hidden if k == _first(kwargs) else _own(unit, one) for k, one in kwargs.items()}

    def _begin(self, unit: _Unit, rows: int) -> None:
        """Rows [start, stop) for this rank: of equal parts one for each block of the last hop, and of that one."""
        start, packs = 0, list[Pack]()
        for count, rank, group in reversed(self._hops):
            packs.insert(0, Pack((rows,), rank, count, group))
            start, rows = start + packs[0].local[0], packs[0].tokens[rank]
        unit.packs, unit.start, unit.stop = tuple(packs), start, start + rows

    def _leave(self, _: nn.Module, __: Any, out: Any) -> None:
        if self._unit is not None:
            self._attend_by(self._name)

    def _gather(self, _: nn.Module, __: Any, out: Any) -> Any:
        """All rows of what a layer makes."""
        if self._unit is None:
            return None
        self._attend_by(self._name)
        hidden = (out if isinstance(out, Tensor) else out[0]).movedim(-2, 0)
        for pack in self._unit.packs:
            hidden = _together(hidden, pack)
        hidden = hidden.movedim(0, -2)
        return hidden if isinstance(out, Tensor) else type(out)((hidden, *out[1:]))

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, given: dict[str, Any]
    ) -> Tensor:
        """Attention of own rows, (n, heads, rows, d) each, to those that each of them sees, (n, rows, heads, d)."""
        unit, images = self._unit, len(query)
        assert unit is not None, "attention of shared rows is called within `running`"
        own, heads = _function(module, self._name if self._name in PLAIN else PLAIN[0]), query.shape[1]

        def whole(group: HeadGroup) -> Tensor:
            start, stop = (0, unit.rows) if group.part is None else group.part[:2]
            q, k, v = (x.unflatten(2, (images, -1)).permute(2, 1, 0, 3) for x in group[:3])
            found = []
            for first, last in pairwise(unit.ends):
                low, high = max(first, start), min(last, stop)
                if low < high:
                    near = None if mask is None else mask[..., low:high, first:last]
                    rows = (q[:, :, low - start : high - start], k[:, :, first:last], v[:, :, first:last])
                    if self._draws is not None:
                        of_rows = (-1, last - first, low - first, high - low)
                        self._draws.of_part((-2, heads, group.first_head, q.shape[1]), of_rows)
                    found.append(own(module, *rows, near, **given)[0])
            self._attend_by(_NAME)
            return torch.cat(found, dim=1).permute(1, 2, 0, 3).flatten(2)

        attend: Attend = whole
        for pack in reversed(unit.packs):
            attend = _hop(attend, pack)
        q, k, v = (x.permute(2, 1, 0, 3).flatten(2) for x in (query, key, value))
        out = attend(HeadGroup(q, k, v))
        return out.unflatten(2, (images, -1)).permute(2, 0, 1, 3)


def _hop(attend: Attend, pack: Pack) -> Attend:
    """The same over the ranks of a hop."""

    def exchanged(group: HeadGroup) -> Tensor:
        def inside(part: HeadGroup) -> Tensor:
            return attend(part._replace(first_head=group.first_head + part.first_head))

        return over_heads(group.q, group.k, group.v, pack, inside, BOTH)

    return exchanged


def _first(kwargs: dict[str, Any]) -> str:
    """Under which name a layer is given hidden states, which has no arguments without one."""
    return next(name for name, value in kwargs.items() if isinstance(value, Tensor))


def _own(unit: _Unit, value: Any) -> Any:
    """Own rows of what has some for each row of the image; of ends of intervals there is one."""
    if isinstance(value, tuple | list):
        return type(value)(_own(unit, one) for one in value)
    if not isinstance(value, Tensor) or value.dim() > 3:
        return value
    if value.dim() == 1 and not value.is_floating_point() and len(value) > 1:
        _, ends = unit.known.setdefault(id(value), (value, value.tolist()))
        if ends[0] == 0 and ends[-1] == unit.rows:
            unit.ends = ends
            return value.new_tensor([0, unit.stop - unit.start])
    if unit.rows not in value.shape:
        return value
    return value.narrow(value.shape.index(unit.rows), unit.start, unit.stop - unit.start)


def _together(x: Tensor, pack: Pack) -> Tensor:
    """Own rows (rows, ...) in, those of all ranks out; on the way back the gradients of all ranks are added."""
    width = x[:1].numel()
    message = AllToAll([x.numel()] * pack.sp, [rows * width for rows in pack.tokens], pack.sp_group)
    started, token = start([message], [x.reshape(-1).repeat(pack.sp)])
    (flat,) = wait([message], started, token)
    return flat.view(pack.num_tokens, *x.shape[1:])


def _function(module: nn.Module, name: str) -> Callable[..., Any]:
    """By what a module attends that does so by this name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found: Callable[..., Any] | None = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    if found is None:
        raise ConfigError(f"{type(module).__name__} attends by {name!r}, which cannot be called apart from it")
    return found


def _attend_rows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    shared: SharedRows = getattr(module, _SHARED)
    return shared.attend(module, query, key, value, attention_mask, given), None


@cache
def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend_rows)


def cut_of(model: nn.Module, roots: Sequence[str], made: Callable[[], Sequence[Tensor]]) -> Cut | None:
    """Where rows can be cut, if it is anywhere, in what stands at some paths and makes these features."""
    lists = {
        path: module for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(f"{path}.".startswith(f"{root}.") for root in roots)
        and any(_attention(each) for each in module.modules())
    }  # fmt: skip
    if not lists:
        return None
    path = max(lists, key=lambda path: sum(parameter.numel() for parameter in lists[path].parameters()))
    layers = lists[path]
    try:
        read = frozenset(i for i in range(len(layers) - 1) if _read(layers[i], layers[i + 1], made))
    except Exception as error:  # of layers that run in another order, say
        logger.debug("large images are not shared: %s", failing(error))
        return None
    return Cut(path, read)


def _attention(module: nn.Module) -> str:
    """By what a module attends; empty: it does not say so."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) or ""


def _read(layer: nn.Module, following: nn.Module, made: Callable[[], Sequence[Tensor]]) -> bool:
    """Whether features are NaN where what a layer hands to others than the following one is."""
    kept: list[Tensor] = []

    def leave(_: nn.Module, __: Any, out: Any) -> Any:
        kept.append(out if isinstance(out, Tensor) else out[0])
        nothing = torch.full_like(kept[-1], torch.nan)
        return nothing if isinstance(out, Tensor) else type(out)((nothing, *out[1:]))

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return ((kept[-1], *args[1:]), kwargs) if args else ((), {**kwargs, _first(kwargs): kept[-1]})

    handles = [
        layer.register_forward_hook(leave, prepend=True), following.register_forward_pre_hook(enter, with_kwargs=True)
    ]  # fmt: skip
    try:
        return any(bool(leaf.isnan().any()) for leaf in made())
    finally:
        for handle in handles:
            handle.remove()
