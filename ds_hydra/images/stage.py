"""A stage of a model with images: its first ranks encode them, one each or a large one together, and rows of features
go where their tokens go.

[Note: where images are encoded]
The images of a micro-batch are dealt out to the ranks of the first stage of its pipeline: each encodes its own, one sum
over them gives everybody all rows, and a rank takes those of its tokens. On the way back each sequence parallel rank
has the gradients of its own rows, whose sum has all; tensor parallel ranks have the same ones, so that these are not
added, and each goes on with the rows that it has encoded. So what an encoder's parameter has on a rank is that of its
images, and the push adds them up over all ranks of the stage.

    rank     encodes    has rows   gradients of rows    goes on with
    tp0 sp0  image 0    0..9       0..9 of both images  those of image 0
    tp1 sp0  image 1    0..9       the same             those of image 1
    tp0 sp1             10..19     10..19               nothing

Nothing of an image outlives its micro-batch.

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

[Note: an encoder's draws]
Numbers are hashes of what they are for [Note: draws by place], with the rows of a tensor in the place of tokens:

    seed, step, sequence, first row of features of the image -> its key, and with it one for each row of the tensor
    count of the draw in the encoder's run                    -> the place
    number in the row                                         -> the column

An encoder that draws runs one image at a time, so that a tensor's rows are those of that image. In slices an image that
is encoded again draws again what it drew. Of an image that ranks share, what one of them has of a tensor are rows of
the whole one [Note: rows of a large image].
"""

from __future__ import annotations

import logging
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_hydra.costs.loads import EVERY
from ds_hydra.images.content import Shown, ShownUnit, shown_of, together
from ds_hydra.images.seam import Cut, Entry, encoded
from ds_hydra.pipe.attention.interface import let_attend_alone
from ds_hydra.pipe.dropout import drop, keep_mask, place_key, token_keys, uniform
from ds_hydra.pipe.models.causal_stage import CausalStage
from ds_hydra.pipe.models.draws import DROPOUTS, FROM_UNIFORM, Keys, dropout_of, has_rule, random_call
from ds_hydra.pipe.models.refusals import failing
from ds_hydra.pipe.pinned import on_device
from ds_hydra.pipe.rows import BOTH, MicroBatch, Pack
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.pipe.ulysses import AllToAll, HeadGroup, over_heads, start, wait
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.images.job import ImageText


class UnitDraws(TorchFunctionMode):
    """Within it random calls draw for the image of a key [Note: an encoder's draws]. ConfigError for one without a
    rule."""

    def __init__(self, key: int):
        super().__init__()
        self._key = key
        self.count = 0  # of draws so far
        self._parts: tuple[tuple[int, int, int, int], ...] = ()

    def of_part(self, *parts: tuple[int, int, int, int]) -> None:
        """What draws from now on has an interval alone of axes of rows: the axis, counted from the last one, its size,
        and the interval's first and size. Nothing: all of them."""
        self._parts = parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        call = random_call(func, args, given)
        if not call:
            return func(*args, **given)
        if func.__name__ == "scaled_dot_product_attention":
            return self._attended(*args, **given)
        if not has_rule(func):
            raise ConfigError(f"its encoder draws random numbers ({call}) that would depend on which rank draws them")
        if func in DROPOUTS:
            x, rate, inplace = dropout_of(args, given)
            out = self._dropped(x, rate)
            return x.copy_(out) if inplace or func is torch.dropout_ else out
        drawn = func(*args, **given)
        with torch.no_grad():
            rows, place, columns = self._next(drawn)
            u = uniform(rows, place, columns, drawn.dtype).view(drawn.shape)
            return drawn.copy_(FROM_UNIFORM[func.__name__](u, args, given))

    def _next(self, x: Tensor) -> tuple[Tensor, int, range]:
        """Keys of the rows of a tensor, and place and columns of a draw for each of its numbers."""
        width, whole = (x.shape[-1] if x.dim() else 1), list(x.shape[:-1])
        # What is drawn for an image as a whole has another size.
        parts = [part for part in self._parts if len(whole) >= -part[0] and whole[part[0]] == part[3]]
        for axis, size, _, _ in parts:
            whole[axis] = size
        keys = token_keys((math.prod(whole),), (self._key,)).view(whole)
        for axis, _, first, count in parts:
            keys = keys.narrow(axis, first, count)
        self.count += 1
        return on_device(keys.reshape(-1), x.device), place_key(None, "images", self.count), range(width)

    def _dropped(self, x: Tensor, rate: float) -> Tensor:
        keys, place, columns = self._next(x)
        return x * 0.0 if rate >= 1.0 else drop(x, keep_mask(keys, place, columns, rate).view(x.shape), rate)

    def _attended(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """torch's own attention, whose kernels draw for themselves, in plain operators."""
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(groups, dim=-3) for x in (key, value))
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        least = torch.finfo(scores.dtype).min
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            masked = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, least) if masked else (scores + attn_mask).clamp(min=least)
        return self._dropped(scores.softmax(dim=-1), dropout_p) @ value


logger = logging.getLogger(__name__)

SHARED = "shared images"  # what small copies are tried with
PLAIN = ("sdpa", "eager")  # that attend to any rows; others may be told by keywords which rows see each other
_NAME = "hydra_rows"
_SHARED = "_hydra_shared_rows"
Attend = Callable[[HeadGroup], Tensor]


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


class _Everybodys(torch.autograd.Function):
    """The rows of all images, of which each rank of a stage has made some and has zeros of the others."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, groups: tuple[Any, Any]) -> Tensor:
        ctx.tp_group, ctx.sp_group = groups
        total = own.clone()
        for group in groups:
            if group is not None:
                dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Sequence parallel ranks have gradients of different rows; those of a tensor parallel group have the same.
        grad = grad.contiguous()
        if ctx.sp_group is not None:
            dist.all_reduce(grad, group=ctx.sp_group)
        return grad, None


class ImageStage(CausalStage):
    """A stage whose tokens may stand for rows of images."""

    def __init__(self, source: ImageText, place: StagePlace, device: torch.device, dtype: torch.dtype):
        super().__init__(source, place, device, dtype)
        self._seam, self._device, self._dtype = source.seam, device, dtype
        self._with_hidden, self._handed = source.beside(place.stage.first_layer), source.beside(place.stage.last_layer)
        self._names = [name for name in self._owners if source.seam.of(name)] if place.is_first else []
        self._carried: Tensor | None = None  # (1, T_local, features of all leaves) of the micro-batch that runs
        self._tie: Tensor | None = None  # () a zero that depends on the rows of all ranks
        self._draws_images = source.draws_images
        self._entry = None if source.seam.audio is None else Entry(self.module, source.seam.audio)
        for name, module in self.module.named_modules():
            if source.seam.of(name):
                vars(module).pop("_call_impl", None)  # by which modules of this class draw for tokens
        self._shared: SharedRows | None = None
        if place.is_first and source.seam.cut is not None and place.stage.tp * place.stage.sp > 1:
            self._shared = SharedRows(self.module, source.seam.cut, place)
        if place.is_first:
            layers: Any = self.module.get_submodule(source.layers_path)
            self._doors[0].enter_by(layers[0], self._tied)

    def forward(self, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        out = super().forward(hidden, batch)
        carried, self._carried = self._carried, None
        if self.place.is_last or not self._handed:
            return out
        if carried is None:
            return torch.cat((out, out.new_zeros((*out.shape[:2], self._handed))), dim=-1)
        return torch.cat((out, carried[..., carried.shape[-1] - self._handed :].to(out.dtype)), dim=-1)

    def _run_layers(self, hidden: Tensor | None, batch: MicroBatch, keys: Keys | None) -> Any:
        shown, leaves = shown_of(batch), list[Tensor]()
        if hidden is not None and self._with_hidden:
            own = hidden.shape[-1] - self._with_hidden
            hidden, carried = hidden[..., :own], hidden[..., own:]
            self._carried = carried if shown is not None else None
        if shown is not None:
            places = shown.places.to(self._device)
            if self.place.is_first:
                rows = self._rows(shown)[slice(*shown.own)]
                if self._handed:
                    empty = rows.new_zeros((len(batch.position_ids[0]), rows.shape[1]))
                    self._carried = empty.index_put((places,), rows)[None]
            else:
                rows = self._received(shown, places)
            leaves = list(rows.split(self._seam.widths, dim=-1))
        self._cut.beside = self._beside_tokens(shown, leaves)
        try:
            return super()._run_layers(hidden, batch, keys)
        finally:
            self._cut.beside, self._tie = {}, None
            if self._entry is not None:
                self._entry.rows = None

    def _beside_tokens(self, shown: Shown | None, leaves: Sequence[Tensor]) -> dict[str, Any]:
        if shown is None:
            return {}
        positions = {} if shown.positions is None else {"position_ids": shown.positions.to(self._device)}
        ids = shown.ids.to(self._device)
        if self._entry is not None and (clips := self._seam.clips(leaves, ids)) is not None:
            self._entry.places, self._entry.rows = shown.places.to(self._device)[clips[0]], clips[1]
        return {**positions, **self._seam.given(leaves, ids)}

    def _received(self, shown: Shown, places: Tensor) -> Tensor:
        """Of a later stage: the rows of its tokens, as they came with the hidden states; zeros of leaves that no layer
        from here on reads."""
        some = self._carried
        count, widths = len(places), sum(self._seam.widths)
        if some is None:
            return torch.zeros((count, widths), dtype=self._dtype, device=self._device)
        rows = some[0, places]
        return torch.cat((rows.new_zeros((count, widths - rows.shape[1])), rows), dim=-1)

    def _rows(self, shown: Shown) -> Tensor:
        """The rows of all images of a micro-batch, (rows, features of all leaves)."""
        for name in self._names:
            self._use(name)
        place = self.place
        rank = place.sp_rank * place.stage.tp + place.tp_rank
        width = sum(self._seam.widths)
        found = torch.zeros((shown.rows, width), dtype=self._dtype, device=self._device)
        draws = self._draws_images and self.module.training
        # Shared ones first: all ranks of the stage begin with them.
        of_all = [[unit] for unit in shown.units if unit.owner == EVERY]
        own = _alike((unit for unit in shown.units if unit.owner == rank), alone=draws)
        for units in (*of_all, *own):
            rows = self._encoded(units, draws=draws)
            parts = place.stage.tp * place.stage.sp if units[0].owner == EVERY else 1
            begin, taken, places = 0, list[Tensor](), list[Tensor]()
            for one in units:
                part = torch.arange(one.stop - one.start).tensor_split(parts)[rank % parts]
                taken.append(begin + one.start + part)
                places.append(one.at + part)
                begin += one.unit.rows
            if begin != len(rows):
                raise ConfigError(
                    f"the encoder made {len(rows)} rows of {len(units)} images or clips, where {begin} tokens stand "
                    "for them: give the tokens and what else one call of the processor returns"
                )
            taken_rows = rows[torch.cat(taken).to(self._device)]
            found = found.index_put((torch.cat(places).to(self._device),), taken_rows.to(self._dtype))
        if place.stage.tp * place.stage.sp == 1:
            return found
        # All ranks of the stage take part in the sum on the way back, whatever they have encoded.
        learns = torch.is_grad_enabled() and any(self.parameters[name].requires_grad for name in self._names)
        if learns and not found.requires_grad:
            found.requires_grad_()
        whole: Tensor = _Everybodys.apply(found, (place.tp_group, place.sp_group))
        self._tie = whole[:0].sum()
        return whole

    def _encoded(self, units: Sequence[ShownUnit], *, draws: bool) -> Tensor:
        """The rows of units, (rows, features of all leaves)."""
        columns = {name: self._placed(column) for name, column in together(
            [unit.unit.columns for unit in units], self._seam.layout).items()}  # fmt: skip
        shared = units[0].owner == EVERY
        if shared and self._shared is None:
            raise ConfigError("an image is to be shared among ranks, which its encoder's layers do not allow")
        drawn = UnitDraws(units[0].key) if draws else None
        running = nullcontext() if not shared or self._shared is None else self._shared.running(drawn)
        with drawn or nullcontext(), running:
            rows = torch.cat(encoded(self.module, self._seam, columns, sum(one.unit.rows for one in units)), dim=-1)
        # A clip has no leaves of later layers.
        return torch.nn.functional.pad(rows, (0, sum(self._seam.widths) - rows.shape[1]))

    def _placed(self, column: Tensor) -> Tensor:
        return column.to(self._device, self._dtype if column.is_floating_point() else None)

    def _tied(self, hidden: Tensor) -> Tensor:
        """What enters the first layer depends on the rows of all ranks, also where it holds no token of an image."""
        return hidden if self._tie is None else hidden + self._tie


def _alike(units: Iterable[ShownUnit], *, alone: bool) -> list[list[ShownUnit]]:
    """Units that can be encoded together: those whose entries have equal sizes, but for their number; each `alone` of
    an encoder that draws."""
    found: dict[object, list[ShownUnit]] = defaultdict(list)
    for unit in units:
        sizes = tuple((name, column.shape[1:]) for name, column in sorted(unit.unit.columns.items()))
        found[unit.at if alone else sizes].append(unit)
    return list(found.values())
