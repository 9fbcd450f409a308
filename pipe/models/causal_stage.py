"""One rank's share of a stage of a causal language model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_hydra.pipe.adapters import ends_of
from ds_hydra.pipe.attention.interface import tell_pack
from ds_hydra.pipe.collectives import all_rows, gather_last_dim, own_rows
from ds_hydra.pipe.expert_parallel import RowsComputed, spread_experts
from ds_hydra.pipe.loss import HeadLoss, blockwise_loss, own_token_losses, scored_loss, token_losses, token_scores
from ds_hydra.pipe.models.boxes import StageBoxes
from ds_hydra.pipe.models.cut import (
    Above,
    CutForward,
    PlainHead,
    Recomputing,
    from_wire,
    hidden_in,
    to_wire,
    with_hidden,
)
from ds_hydra.pipe.models.draws import Draws, Keys
from ds_hydra.pipe.models.experts import Replay, Routers
from ds_hydra.pipe.models.positions import count_by_sequence, scale_noise_by_length, split_rotary_by_length
from ds_hydra.pipe.models.recurrent_heads import own_heads, share_heads
from ds_hydra.pipe.on_host import HostStore
from ds_hydra.pipe.recomputed import install_tiles
from ds_hydra.pipe.rows import MicroBatch, Pack
from ds_hydra.pipe.stage import StageModule, StagePlace
from ds_hydra.pipe.tensor_parallel import TensorParallel
from ds_hydra.pipe.token_sharding import TokenSharding, with_blocks
from ds_hydra.pipe.weight_gradients import PackedLinears

if TYPE_CHECKING:
    from ds_hydra.pipe.model_plan import ParamSpec
    from ds_hydra.pipe.models.causal_lm import CausalLM


class CausalStage(StageModule):
    """A copy of the user's model that computes one stage's layers by the model's own forward.

    Modules keep their names in the whole model; those of other stages are there, without values, and are not run.
    """

    _boxes: StageBoxes | None = None
    _replay: Replay | None = None  # once a micro-batch has routes

    def __init__(self, source: CausalLM, place: StagePlace, device: torch.device, dtype: torch.dtype):
        model = source.skeleton(device, dtype)
        source.functions.install(model)
        shards = place.shards > 1
        self._draws = Draws(source.flow.draws, place.tp_rank, place.stage.tp, token_sharding=shards)
        if source.flow.draws:
            self._draws.install(model, source.layers_path)
        layers: Any = model.get_submodule(source.layers_path)
        own = layers[place.stage.first_layer : place.stage.last_layer]
        self._routers = None if source.balancing is None else Routers(source.balancing, place)
        if self._routers is not None:
            self._routers.install(model)
        if source.boxes:
            self._boxes = StageBoxes(source.boxes, source.flow, place.stage, self._draws)
            self._boxes.install(layers)
        self._recompute(source, own, place, device)
        needed = source.plan.needed(place.stage)
        names = {path: name for path, name in source.aliases.items() if name in needed}
        embedding, head = ends_of(model)
        plain_head = PlainHead.of(model, head)
        # What the head's weight gradient waits for has a number for each word of the vocabulary: too large to keep.
        of_head = {names[path] for path in names if model.get_submodule(path.rpartition(".")[0]) is head}
        readers: Mapping[str, Collection[str]] = source.flow.readers
        at_once = {*readers, *of_head}
        if shards:
            readers = with_blocks(readers, source.style_plan, model, names)
        super().__init__(model, place, names, readers=readers, hooks=source.hooks, at_once=at_once)
        self._pack_weights(source.functions.packed, names)
        specs = {path: source.specs[name] for path, name in source.aliases.items()}
        rank = (source.style_plan, specs, place.tp_rank, place.stage.tp, place.tp_group)
        self._routed: dict[int, list[RowsComputed]] = defaultdict(list)  # by layer
        if source.experts is not None and place.stage.ep > 1:
            spread = spread_experts(model, source.experts.modules, place, lambda: self._pack)
            for path, routed in spread.items():
                self._routed[int(path.removeprefix(f"{source.layers_path}.").partition(".")[0])].append(routed)
        shared: dict[str, Any] = {"whereabouts": self._draws, "packed": self.packed, "tiles": source.options.tiles}
        parallel = (
            TokenSharding(*rank, linear=self.linear, queue=self.linear_queue, **shared)
            if shards
            else TensorParallel(*rank, linear=self.linear)
        )
        parallel.install(model, embedding, head, needed=frozenset(names))
        self._tile(source, names)
        self._doors, self._first_position = source.flow.doors, source.first_position
        split_rotary_by_length(model, lambda: self._pack)
        scale_noise_by_length(model, lambda: self._pack)
        if self._boxes is None:
            count_by_sequence(model, lambda: self._pack)
        tell_pack(model, lambda: self._pack)
        self._pack = Pack((0,))
        self._cut = CutForward(model, source.flow, source.layers_path, place.stage, device)
        if self._boxes is not None:
            self._boxes.enter(layers, self._cut)
            self._share_heads(self._boxes, source, names)
        if shards and place.is_first:
            self._doors[0].enter_by(layers[0], partial(own_rows, group=place.tp_group))
        if place.is_last:
            path = next(name for name, module in model.named_modules() if module is head)
            self._end_with(source, model, plain_head, specs.get(f"{path}.weight"))

    def _recompute(self, source: CausalLM, own: Sequence[Any], place: StagePlace, device: torch.device) -> None:
        """Let the stage's own layers be computed again, those of each micro-batch that are to be."""
        doors = source.flow.doors[place.stage.first_layer : place.stage.last_layer]
        self.store = HostStore(device) if source.options.host_activations else None
        kept = source.options.keep_attention
        self._recomputing = Recomputing(len(own), self._checkpointed, self.store, doors, attention=kept)
        self._recomputing.install(own)
        self._recomputes_all = source.options.activation_checkpointing

    def _tile(self, source: CausalLM, names: Mapping[str, str]) -> None:
        """Let modules of this stage that look at no other token run in tiles, if nobody watches their parameters."""
        for path in source.functions.by_rows if source.options.tiles else ():
            module = self.module.get_submodule(path)
            own = [names.get(f"{path}.{name}") for name, _ in module.named_parameters()]
            if None in own or any(name in source.hooks for name in own):
                continue
            inside = set(module.modules())
            packed = [each for each in self.packed if inside & set(each.layers.values())]
            install_tiles(module, packed, self.place.shards)

    def _share_heads(self, boxes: StageBoxes, source: CausalLM, names: Mapping[str, str]) -> None:
        found = own_heads(source, self.module, self.place, names, self._use)
        share_heads(found, self.place)
        boxes.share(source.layers_path, found)
        self._draws.share({path: (own.part, own.parts) for path, own in found.items()})

    def _end_with(self, source: CausalLM, model: Any, plain_head: PlainHead | None, weight: ParamSpec | None) -> None:
        """What the last stage does with hidden states: the head, whose `weight` ranks share, and the loss."""
        place = self.place
        self._head = Above(model, source.flow, source.layers_path)
        tp = place.stage.tp
        whole = (0, source.flow.vocabulary)
        # No ranks share a head that is wrapped, which has no weight of its own, nor one of values, which has one row.
        shared = weight is not None and weight.rule.dim is not None
        cuts = [weight.shard_rows(rank, tp) for rank in range(tp)] if weight is not None and shared else [whole] * tp
        self._head_group, self._valued = place.tp_group if shared else None, source.valued
        self.vocab = cuts[place.tp_rank]
        self._widths = tuple(stop - start for start, stop in cuts)
        self._own_loss = source.token_loss
        # Tensor parallel ranks have the same blocks of tokens, though one may have a row more than another.
        self._logits_at_once = max(self._widths) if self._own_loss is None else sum(self._widths)
        self._plain_head = plain_head if self._own_loss is None else None
        self.plain_head: bool | None = None  # whether the last micro-batch's head and loss were one; None: none ran
        self._head_loss = HeadLoss(self.vocab[0], max(self._widths), self._head_group, self.linear_queue.sum_of)

    def _pack_weights(self, groups: Iterable[Sequence[str]], names: Mapping[str, str]) -> None:
        """Let linear layers at these paths be computed together, if all of a group are this stage's."""
        for paths in groups:
            if not all(f"{path}.weight" in names for path in paths):
                continue
            layers = {names[f"{path}.weight"]: self.module.get_submodule(path) for path in paths}
            packed = PackedLinears(self.module.get_submodule(paths[0].rpartition(".")[0]), layers, self.linear)
            self.linear_queue.put_off_as(next(iter(layers.values())), packed)
            self.packed.append(packed)

    def forward(self, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        keys = self._keys(batch)
        out = self._run_layers(hidden, batch, keys)
        if not self.place.is_last:
            return to_wire(hidden_in(out), self._doors[self.place.stage.last_layer])
        rows = self._all_rows(hidden_in(out))
        input_ids = _tokens(batch)

        def logits_of(part: Tensor, tokens: slice) -> Tensor:
            with self._draws.of(None if keys is None else keys.part(tokens)):
                return self._head(with_hidden(out, part), input_ids[:, tokens])

        self.plain_head = self._plain_head is not None and batch.predictions is None and batch.scored is None
        if self._plain_head is not None and self.plain_head:
            few = rows[:, :1].detach().clone()
            self.plain_head = self._plain_head.is_all(few, lambda: logits_of(few, slice(0, 1)))
            if self.plain_head:
                return self._head_loss(rows, self._plain_head.weight, batch)

        def head(part: Tensor, tokens: slice) -> Tensor:
            logits = logits_of(part, tokens)
            if batch.predictions is not None and batch.labels is not None:
                of_all = gather_last_dim(logits.squeeze(0), self._widths, self.place.tp_rank, self._head_group)
                batch.predictions.take(of_all, batch.labels[tokens])
            return logits

        if batch.scored is not None:
            assert batch.labels is not None, "the last stage was given no labels"
            assert batch.weights is not None, "the last stage was given no weights"
            given = (batch.scored, batch.labels, batch.weights)
            scores_of = self._whole_logits if batch.scored.objective.of_logits else self._token_scores
            return scored_loss(rows, *given, head, scores_of, vocab=sum(self._widths))
        return blockwise_loss(rows, batch, head, self._token_losses, vocab=self._logits_at_once)

    def take_router_loss(self) -> Tensor | None:
        return None if self._routers is None else self._routers.take()

    def take_imbalances(self) -> tuple[float, ...]:
        last = max(self._routed, default=-1)
        return tuple(max((each.take() for each in self._routed[layer]), default=0.0) for layer in range(last + 1))

    def _token_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Of the last stage: the loss of each token, equal on all tensor parallel ranks."""
        if self._own_loss is None:
            return token_losses(logits, labels, self.vocab[0], self._head_group)
        return own_token_losses(self._own_loss, logits, labels, self._widths, self.place.tp_rank, self._head_group)

    def _token_scores(self, logits: Tensor, words: Tensor, temperature: Tensor | None) -> Tensor:
        """Of the last stage: the scores of each token, equal on all tensor parallel ranks; its value alone, if the head
        gives one."""
        if self._valued:
            return logits.to(torch.promote_types(logits.dtype, torch.float32))
        return token_scores(logits, words, self.vocab[0], self._head_group, temperature)

    def _whole_logits(self, logits: Tensor, words: Tensor, temperature: Tensor | None) -> Tensor:
        """Of the last stage: the logits of all words as scores, equal on all tensor parallel ranks."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return gather_last_dim(wide, self._widths, self.place.tp_rank, self._head_group)

    def _all_rows(self, hidden: Tensor) -> Tensor:
        """What follows the layers runs on all tokens."""
        return hidden if self.place.shards == 1 else all_rows(hidden, self.place.tp_group)

    def _keys(self, batch: MicroBatch) -> Keys | None:
        """What the random calls of a micro-batch draw from; None where there are none."""
        draws = self.module.training and self._draws.widths
        return Keys.of(batch.pack, batch.position_ids.device) if draws else None

    def _checkpointed(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What a layer that is computed again runs in, the first time and the second."""
        first, again = self._draws.checkpointed()
        boxes = nullcontext() if self._boxes is None else self._boxes.again()
        routes = nullcontext() if self._replay is None else self._replay.again()
        again = self._again(again, self._pack, boxes, routes)
        return first, again if self._routers is None else self._routers.recomputing(again)

    @contextmanager
    def _again(
        self,
        draws: AbstractContextManager[Any],
        pack: Pack,
        boxes: AbstractContextManager[Any],
        routes: AbstractContextManager[Any],
    ) -> Iterator[None]:
        """Within it, layers are computed again for a micro-batch that is not the last one that ran."""
        before, self._pack = self._pack, pack
        try:
            with draws, boxes, routes:
                yield
        finally:
            self._pack = before

    def _run_layers(self, hidden: Tensor | None, batch: MicroBatch, keys: Keys | None) -> Any:
        for name in self.used_by_none:
            self._use(name)
        self._pack = batch.pack
        if batch.pack.chunk is not None and self._recomputes_all and torch.is_grad_enabled():
            batch.pack.chunk.contexts.store = self.store
        self._recomputing.take(0.0)
        run = None if self._boxes is None else self._boxes.captured(batch, keys)
        self._recomputing.take(1.0 if self._recomputes_all else batch.recompute)
        routing = nullcontext() if self._routers is None else self._routers.of(batch)
        received = None if hidden is None else from_wire(hidden, self._doors[self.place.stage.first_layer])
        positions = batch.position_ids + self._first_position
        inputs: dict[str, Any] = {"input_ids": _tokens(batch), "position_ids": positions, "use_cache": False}
        if batch.routes is not None and self._replay is None:
            self._replay = Replay(self.module, self.place)
        replayed = nullcontext() if self._replay is None else self._replay.of(batch.routes)
        with self._draws.of(keys), routing, replayed:
            if self._boxes is not None and run is not None:
                return self._boxes(received, batch, run, inputs)
            return self._cut(received, **inputs)


def _tokens(batch: MicroBatch) -> Tensor:
    return torch.zeros_like(batch.position_ids) if batch.input_ids is None else batch.input_ids
