"""Mutants of how stages are made from a model: each switches off one thing that keeps unusual models right.

The self-check must find each of them by itself, whatever else would.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AttentionInterface

from ds_hydra.pipe import collectives, contexts, stage
from ds_hydra.pipe.attention.interface import ATTENTION_NAME, hydra_attention
from ds_hydra.pipe.head_sharing import RowPart, row_parts
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.pipe.model_plan import ShardRule
from ds_hydra.pipe.models import causal_lm, causal_stage, cut
from ds_hydra.pipe.models.flow import Flow
from ds_hydra.pipe.models.token_rules import UnnamedRules
from ds_hydra.pipe.rows import Pack
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.self_check import runs
from ds_hydra.step import batching

Mutant = Callable[[], contextlib.AbstractContextManager[Any]]


def what_follows_the_layers_runs_everywhere() -> Any:
    """A stage that is not the last goes on to the end of the model, layers of later stages handing on."""
    original = cut.CutForward.__init__

    def init(self: Any, model: Any, flow: Flow, layers_path: str, stage: Any, device: torch.device) -> None:
        original(self, model, flow, layers_path, stage, device)
        layers = model.get_submodule(layers_path)
        if stage.last_layer < len(layers):
            layers[stage.last_layer - 1]._forward_hooks.popitem()
            for layer, door in zip(layers[stage.last_layer :], flow.doors[stage.last_layer :], strict=True):
                layer.forward = _hand_on(door.key)
            model.get_submodule(flow.body).register_forward_hook(cut._reach)

    return mock.patch.object(cut.CutForward, "__init__", init)


def _hand_on(key: int | str) -> Callable[..., Any]:
    return lambda *args, **kwargs: args[key] if isinstance(key, int) else kwargs[key]


def unnamed_parameters_are_complete() -> Any:
    """A parameter that the tensor parallel plan does not name counts as one that every rank uses alike."""
    return mock.patch.object(causal_lm, "derive", return_value=UnnamedRules())


def rotary_tables_follow_the_whole_pack() -> Any:
    return mock.patch.object(causal_stage, "split_rotary_by_length")


def dynamic_rotary_is_let_in() -> Any:
    return mock.patch.object(causal_lm, "refuse_dynamic_rotary")


def positions_begin_at_zero() -> Any:
    return mock.patch.object(causal_lm, "first_position", return_value=0)


def evaluation_does_not_reach_the_layers() -> Any:
    original = causal_stage.CausalStage.__init__

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        self.module.train = lambda mode=True: self.module
        self.module.eval = lambda: self.module

    return mock.patch.object(causal_stage.CausalStage, "__init__", init)


@contextlib.contextmanager
def all_attention_is_causal() -> Iterator[None]:
    def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(module, "is_causal", True):
            return hydra_attention(module, *args, **kwargs)

    AttentionInterface.register(ATTENTION_NAME, attention)
    try:
        yield
    finally:
        AttentionInterface.register(ATTENTION_NAME, hydra_attention)


def sums_are_views() -> Any:
    """What tensor parallel ranks sum cannot be written to in place."""

    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous()
        torch.distributed.all_reduce(x, group=group)
        return x

    return mock.patch.object(collectives._SumOverRanks, "forward", staticmethod(forward))


def no_placeholders() -> Any:
    """Embeddings of other stages are computed, without values."""
    return mock.patch.object(cut.Placeholders, "__torch_function__", _as_it_is)


def _as_it_is(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return func(*args, **(kwargs or {}))


def received_states_come_as_embeddings() -> Any:
    """What came from the stage before takes the place of the embeddings, and not of the last layer before the stage."""

    def call(self: Any, received: Tensor | None, **inputs: Any) -> Any:
        self._received = received
        if self._first:
            self.model.get_input_embeddings().forward = lambda *_, **__: received
        try:
            self.model(**inputs)
        except cut.ForwardEnded as reached:
            return reached.value

    return mock.patch.object(cut.CutForward, "__call__", call)


def what_is_declared_first_runs_first() -> Any:
    """A projection behind the layers counts as one of the embeddings."""

    def moved(flow: Flow) -> Flow:
        early = frozenset(name for name in flow.last if "project" in name)
        return replace(flow, first=flow.first | early, last=flow.last - early)

    return _with_flow(moved)


def _with_flow(change: Callable[[Flow], Flow]) -> Any:
    original = causal_lm.trace
    return mock.patch.object(causal_lm, "trace", lambda *args: change(original(*args)))


@contextlib.contextmanager
def nobody_is_seen_to_read_parameters_of_others() -> Iterator[None]:
    """A stage does not wait for a parameter whose owner never runs."""
    with _with_flow(lambda flow: replace(flow, readers={})), mock.patch.object(stage, "_NEVER_RUN", ()):
        yield


def biases_of_the_head_are_whole() -> Any:
    original = causal_lm.CausalLM._plan

    def plan(self: Any) -> None:
        original(self)
        for bucket in self.plan.buckets:
            for param in bucket.params:
                if param.name.startswith("cls.") and param.name.endswith("bias"):
                    object.__setattr__(param, "rule", ShardRule())

    return mock.patch.object(causal_lm.CausalLM, "_plan", plan)


def heads_see_no_tokens() -> Any:
    before = cut.Above.__call__

    def head(self: Any, below: Any, input_ids: Tensor) -> Tensor:
        model = self._model
        self._model = lambda **_: model(use_cache=False)
        try:
            return before(self, below, input_ids)
        finally:
            self._model = model

    return mock.patch.object(cut.Above, "__call__", head)


def stages_are_rebuilt_from_the_config() -> Any:
    """What the user did to the model since its config made it is lost."""

    def skeleton(self: Any, device: torch.device, dtype: torch.dtype) -> Any:
        with torch.device("meta"):
            config = copy.deepcopy(self.config)
            model = self.model_class._from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
        for name, buffer in self.template.named_buffers():
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = buffer.to(device)
        return model.train()

    return mock.patch.object(causal_lm.CausalLM, "skeleton", skeleton)


def norms_of_stages_have_another_epsilon(epsilon: float) -> Any:
    """Of 1e-6: an error that is as small as the rounding of FP32."""
    original = causal_lm.CausalLM.skeleton

    def skeleton(self: Any, device: torch.device, dtype: torch.dtype) -> Any:
        model = original(self, device, dtype)
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = epsilon
        return model

    return mock.patch.object(causal_lm.CausalLM, "skeleton", skeleton)


def hooks_of_gradients_are_lost() -> Any:
    return mock.patch.object(causal_lm, "parameter_hooks", return_value={})


# Of sequences that run in slices.


def slices_begin_at_zero() -> Any:
    """Positions restart with each slice."""
    right = batching.position_ids
    return mock.patch.object(batching, "position_ids", lambda lengths, start, stop, past: right(lengths, start, stop))


def labels_are_made_of_slices() -> Any:
    """The last token of a slice has no target."""
    right = batching._fill

    def fill(row: Any, pack: Pack, *args: Any) -> Any:
        tokens, targets, *others = right(row, pack, *args)
        if pack.chunk is not None:
            targets[pack.lengths[0] - 1] = IGNORED
        return tokens, targets, *others

    return mock.patch.object(batching, "_fill", fill)


def slices_see_themselves_only() -> Any:
    return mock.patch.object(contexts.Context, "join", lambda self, k, v, start, reach=None: (k, v))


def slices_hand_no_gradients_back() -> Any:
    """The rows of earlier slices count as constants."""

    def add(self: Any, gradients: tuple[Tensor, ...], start: int, first: int) -> tuple[Tensor, ...]:
        return tuple(x[start - first :] for x in gradients)

    return mock.patch.object(contexts.Context, "add", add)


def backwards_run_in_the_order_of_forwards() -> Any:
    """The schedule does not know of slices."""
    return mock.patch.object(runs, "known_to_schedules", lambda data, parts: Batches.whole(len(data.microbatches)))


def windows_forget_a_token() -> Any:
    """A slice keeps one row too few of those before it."""
    right = contexts.Context.join

    def join(self: Any, k: Tensor, v: Tensor, start: int, reach: contexts.Reach) -> tuple[Tensor, Tensor]:
        return right(self, k, v, start, reach if reach.window is None else contexts.Reach(max(1, reach.window - 1)))

    return mock.patch.object(contexts.Context, "join", join)


def gradients_of_other_ranks_are_dropped() -> Any:
    """Of a token's gradient, what other sequence parallel ranks have by their use of it is lost."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.back.func is not collectives._scattered:
            return ctx.back(grad), None, None
        return grad[slice(*ctx.back.keywords["pack"].local)], None, None

    return mock.patch.object(collectives._Moved, "backward", staticmethod(backward))


def nodes_get_a_key_too_few() -> Any:
    """As if queries that another node computes saw a token less than the model's windows."""

    def short(*args: Any) -> tuple[RowPart, ...]:
        return tuple(part._replace(first=part.first + (part.first > 0)) for part in row_parts(*args))

    return mock.patch("ds_hydra.pipe.ulysses.row_parts", short)
