"""A stage whose layers have boxes: what its sequences' layers are handed is captured, then the row runs [Note: boxes].

Where some layer attends by the interface, what comes before the layers is computed for the row, as in any stage.
Elsewhere nothing of it is: hidden states enter the first layer as they did for each sequence alone, and what the layers
are handed besides is replaced in the boxes. Then it is run on the meta device only, so that neither masks nor positions
of a whole row are ever made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.pipe.attention.interface import attending_by, packed_configs
from ds_hydra.pipe.models.boxed_layers import BoxedLayers
from ds_hydra.pipe.models.boxes import Boxes, Capture, Leaves, Run
from ds_hydra.pipe.models.cut import CutForward
from ds_hydra.pipe.models.draws import Draws, Keys
from ds_hydra.pipe.models.flow import Flow
from ds_hydra.pipe.models.graph import tensors_in
from ds_hydra.pipe.models.own_heads import OwnHeads
from ds_hydra.pipe.placement import Stage
from ds_hydra.pipe.row_collectives import all_of_row
from ds_hydra.pipe.rows import MicroBatch, Pack

_KEPT_BYTES = 16 * 2**20  # of captures, by length: masks grow with its square


class StageBoxes:
    """Runs one stage of a model with boxes."""

    def __init__(self, boxes: Boxes, flow: Flow, stage: Stage, draws: Draws):
        self._boxes, self._doors, self._draws = boxes, flow.doors, draws
        self._own = range(stage.first_layer, stage.last_layer)
        self._is_first = stage.first_layer == 0
        self._layers = BoxedLayers(boxes, flow.doors, draws if draws.widths else None)
        self._kept: OrderedDict[int, dict[int, Leaves]] = OrderedDict()  # by length
        self._row: Tensor | None = None

    def install(self, layers: nn.ModuleList) -> None:
        """Let the stage's layers run their boxes."""
        self._layers.install({index: layers[index] for index in self._own})

    def share(self, layers_path: str, found: Mapping[str, OwnHeads]) -> None:
        """Let sequence parallel ranks share heads of recurrent modules, which are found by their paths."""
        for index in self._own:
            for box in self._boxes.of[index]:
                if (own := found.get(f"{layers_path}.{index}.{box.path}")) is not None and own.by_sp > 1:
                    self._layers.share(index, box.path, own)

    def enter(self, layers: nn.ModuleList, cut: CutForward) -> None:
        """After all else that stands around the layers: let the first one be handed what entered it."""
        self._cut, self._configs = cut, packed_configs(cut.model)
        if self._is_first and not self._boxes.packed:
            layers[0].register_forward_pre_hook(self._replace_row, with_kwargs=True, prepend=True)

    def again(self) -> AbstractContextManager[None]:
        """Within it, layers are computed again as they are now."""
        return self._layers.of(self._layers.running)

    def __call__(self, received: Tensor | None, batch: MicroBatch, run: Run, inputs: Mapping[str, Any]) -> Any:
        """What the stage's last layer, or the model below its head, returns; `inputs` are the row's."""
        with self._layers.of(run):
            if self._boxes.packed:
                return self._cut(received, **inputs)
            ids = torch.empty(batch.position_ids.shape, dtype=torch.long, device="meta")
            start, stop = batch.pack.local
            if self._is_first:
                dim = self._doors[0].token_dim
                self._row = torch.cat([_entered(one) for one in run.captures], dim).narrow(dim, start, stop - start)
            try:
                with attending_by(self._boxes.attention, self._configs):
                    return self._cut(received, hollow=True, input_ids=ids, use_cache=False)
            finally:
                self._row = None

    def _replace_row(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._row is None:  # a capture
            return None
        self._cut.leave()
        key = self._doors[0].key
        if isinstance(key, int):
            return (*args[:key], self._row, *args[key + 1 :]), kwargs
        return args, kwargs | {key: self._row}

    def captured(self, batch: MicroBatch, keys: Keys | None) -> Run:
        """A micro-batch with what each of its sequences' layers are handed; none of these may be computed again."""
        pack, entering = batch.pack, self._is_first and not self._boxes.packed
        whole: Tensor = torch.zeros((1, pack.num_tokens), dtype=torch.long, device=batch.position_ids.device)
        if batch.input_ids is not None and (entering or not self._boxes.by_length):
            whole = all_of_row(batch.input_ids, 1, pack)
        of_length: dict[int, dict[int, Leaves]] = {}
        captures = []
        for sequence, length in enumerate(pack.lengths):
            known = of_length.get(length) or self._kept.get(length) if self._boxes.by_length else None
            if known is not None and not entering:
                captures.append(Capture(None, known))
                continue
            capture = self._capture(whole, pack, sequence, keys, [] if known is not None else self._own)
            if known is not None:
                capture.layers = known
            of_length[length] = capture.layers
            captures.append(capture)
        if self._boxes.by_length:
            self._keep(of_length)
        return Run(pack, captures, keys)

    def _capture(self, ids: Tensor, pack: Pack, sequence: int, keys: Keys | None, wanted: Any) -> Capture:
        """What layers are called with where a sequence runs alone."""
        start, stop = pack.offsets[sequence : sequence + 2]
        own = None if keys is None else Keys(keys.row[start:stop], keys.row[start:stop])
        graph = nullcontext() if self._is_first or not self._boxes.by_length else torch.no_grad()
        with graph, self._draws.of(own), attending_by(self._boxes.attention, self._configs):  # noqa: SIM117
            with self._layers.capturing(wanted) as capture:
                self._cut.capture(input_ids=ids[:, start:stop], use_cache=False)
        return capture

    def _keep(self, found: Mapping[int, dict[int, Leaves]]) -> None:
        """Keep small ones for later micro-batches, those of the lengths that came last."""
        for length, layers in found.items():
            self._kept[length] = layers
            self._kept.move_to_end(length)
        sizes = {length: _num_bytes(layers) for length, layers in self._kept.items()}
        while sum(sizes.values()) > _KEPT_BYTES:
            length, _ = self._kept.popitem(last=False)
            del sizes[length]


def _entered(capture: Capture) -> Tensor:
    assert capture.entered is not None, "each sequence ran to the first layer"
    return capture.entered


def _num_bytes(layers: Mapping[int, Leaves]) -> int:
    """Of the tensors, each once: layers share most of them."""
    found = {id(tensor): tensor.nbytes for leaves in layers.values() for tensor in tensors_in(leaves)}
    return sum(found.values())
