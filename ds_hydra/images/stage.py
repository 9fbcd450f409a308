"""A stage of a model with images: its first ranks encode them, and rows of features go where their tokens go.

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
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hydra.costs.loads import EVERY
from ds_hydra.images.audio import Entry
from ds_hydra.images.content import Shown, ShownUnit, shown_of, together
from ds_hydra.images.draws import UnitDraws
from ds_hydra.images.seam import encoded
from ds_hydra.images.shared import SharedRows
from ds_hydra.pipe.models.causal_stage import CausalStage
from ds_hydra.pipe.models.draws import Keys
from ds_hydra.pipe.rows import MicroBatch
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.images.source import ImageText


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
            layers[0].register_forward_pre_hook(self._tied, with_kwargs=True, prepend=True)

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

    def _tied(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What enters the first layer depends on the rows of all ranks, also where it holds no token of an image."""
        if self._tie is None:
            return None
        key = self._doors[0].key
        if isinstance(key, int):
            return (*args[:key], args[key] + self._tie, *args[key + 1 :]), kwargs
        return args, {**kwargs, key: kwargs[key] + self._tie}


def _alike(units: Iterable[ShownUnit], *, alone: bool) -> list[list[ShownUnit]]:
    """Units that can be encoded together: those whose entries have equal sizes, but for their number; each `alone` of
    an encoder that draws."""
    found: dict[object, list[ShownUnit]] = defaultdict(list)
    for unit in units:
        sizes = tuple((name, column.shape[1:]) for name, column in sorted(unit.unit.columns.items()))
        found[unit.at if alone else sizes].append(unit)
    return list(found.values())
