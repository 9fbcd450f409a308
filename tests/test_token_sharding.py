"""Tokens shared by tensor parallel ranks, dropout by place, and models that are not plain decoders, in one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.engine.checked import check_candidates
from ds_hydra.pipe import dropout, token_sharding, ulysses
from ds_hydra.pipe.collectives import Pending
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.layer_list import LayerList
from ds_hydra.pipe.models.recognise import Norm
from ds_hydra.pipe.placement import place_pipeline
from ds_hydra.pipe.rows import AT_ONCE
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.pipe.stage import StagePlace, StandIn
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.profiling.stage_memory import kept_bytes
from ds_hydra.profiling.stage_timer import StageTimer
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.runs import doubled, run_pipeline, uneven_data
from ds_hydra.self_check.schemes import uneven_pipeline
from ds_hydra.testing.one_process import drawing
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.families import VOCAB, build_model, mean_loss

# --- Tokens shared by tensor parallel ranks: who allows it, and pipelines of one process against the plain
# model.
DATA = uneven_data(VOCAB, [(7, 61, 3), (23, 5)])


def shared(model: Any, **settings: Any) -> CausalLM:
    """Stages of a model whose tensor parallel ranks share tokens, if it allows that."""
    return CausalLM(model, StageOptions(token_sharding=True, **settings))


# Whose forward a script overrides with less than all of its parameters.
Layer: Any = LlamaDecoderLayer


class Shift(LlamaRMSNorm):
    """Adds to each token the one before it."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(hidden_states[:, :1]), hidden_states[:, :-1]], dim=1)
        return super().forward(hidden_states + before)


class Placed(Layer):
    """Reads the positions outside of its attention."""

    def forward(self, hidden_states: Tensor, position_ids: Any = None, **rest: Any) -> Tensor:
        scaled = hidden_states * (1 + 0.01 * position_ids[..., None])
        return super().forward(scaled, position_ids=position_ids, **rest)


def first_norm(model: Any) -> Any:
    return model.model.layers[1].input_layernorm


def shifted(model: Any) -> None:
    first_norm(model).__class__ = Shift


def placed(model: Any) -> None:
    model.model.layers[2].__class__ = Placed


class Placing(Layer):
    """Adds a learnt vector for each place in the row."""

    def forward(self, hidden_states: Tensor, **rest: Any) -> Tensor:
        return super().forward(hidden_states + self.places[: hidden_states.shape[1]], **rest)


class ByLength(Layer):
    """Divides by the number of tokens, as some attentions do."""

    def forward(self, hidden_states: Tensor, **rest: Any) -> Tensor:
        return super().forward(hidden_states, **rest) / hidden_states.shape[1] ** 0.5


class Leaving(Layer):
    """Does nothing to tokens that are all small already."""

    def forward(self, hidden_states: Tensor, **rest: Any) -> Tensor:
        if hidden_states.abs().max() < 1e-3:
            return hidden_states
        return super().forward(hidden_states, **rest)


class OverTokens(LlamaRMSNorm):
    """Norms by what all tokens have in common."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(dim=1, keepdim=True))


class Convolved(Layer):
    """Mixes each token with the two before it, feature by feature."""

    def forward(self, hidden_states: Tensor, **rest: Any) -> Tensor:
        tokens = F.pad(hidden_states.transpose(1, 2), (2, 0))
        mixed = F.conv1d(tokens, self.kernel, groups=hidden_states.shape[-1]).transpose(1, 2)
        return super().forward(mixed, **rest)


def of_kind(kind: type[nn.Module], **parameters: tuple[int, ...]) -> Callable[[Any], None]:
    """Makes a layer another one's, with parameters of these shapes."""

    def change(model: Any) -> None:
        layer = model.model.layers[2]
        layer.__class__ = kind
        for name, shape in parameters.items():
            value = torch.linspace(0.5, 1.5, math.prod(shape)).view(shape)
            layer.register_parameter(name, nn.Parameter(value))

    return change


def peeks(model: Any) -> None:
    """A hook of a block that reads what its column-parallel layers read."""
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + 0.0 * x.mean()


def scaled_inside(model: Any) -> None:
    model.model.layers[3].self_attn.q_proj.register_forward_pre_hook(lambda _, args: (2 * args[0],))


def one_norm(model: Any) -> None:
    """The last norm is also that of the embeddings."""
    model.model.embed_tokens.register_forward_hook(lambda _, __, out: model.model.norm(out))


HIDDEN = 64  # features of the models here
ONE_BY_ONE = "modules in which tokens meet, each run for a sequence at a time"
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a vector learnt for each place in the row": (of_kind(Placing, places=(1024, HIDDEN)), ONE_BY_ONE),
    "a factor of the row's length": (of_kind(ByLength), ONE_BY_ONE),
    "a layer that is left early": (of_kind(Leaving), "decides by the values of the tokens (__bool__)"),
    "a norm over tokens": (lambda model: setattr(first_norm(model), "__class__", OverTokens), ONE_BY_ONE),
    "a convolution": (of_kind(Convolved, kernel=(HIDDEN, 1, 3)), ONE_BY_ONE),
    "a norm that looks at other tokens": (shifted, ONE_BY_ONE),
    "positions outside of attention": (placed, "shared tokens fails"),
    "a block's input read beside its layers": (peeks, "reads what enters a block beside"),
    "a layer's input changed by a hook": (scaled_inside, "reads what enters a block beside"),
    "a norm before the layers and behind them": (one_norm, "meets all tokens in one place"),
}


@pytest.mark.drawn
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_do_not_allow_it_stay_as_they_were(name: str) -> None:
    change, told = REFUSED[name]
    model = build_model("llama", torch.float32)
    change(model)
    plan = shared(model).plan
    assert told in plan.no_token_sharding
    assert all(param.rule.gradient == "complete" for bucket in plan.buckets for param in bucket.params)


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss"])
def test_a_plan_must_cut_layers(family: str) -> None:
    assert "cuts no layer" in shared(build_model(family, torch.float32)).plan.no_token_sharding


def test_gradients_are_parts_where_a_rank_meets_a_part_of_the_tokens() -> None:
    plan = shared(build_model("olmo2", torch.float32)).plan
    assert plan.token_sharding
    parts = {p.name for bucket in plan.buckets for p in bucket.params if p.rule.gradient == "partial"}
    layer = {name.removeprefix("model.layers.0.") for name in parts if ".layers.0." in name}
    # The norms of queries and keys stand between a gather and a split of features: all ranks compute the same there.
    assert layer == {"post_attention_layernorm.weight", "post_feedforward_layernorm.weight"}
    assert "model.norm.weight" in parts


def test_it_is_off_unless_it_is_asked_for() -> None:
    plan = CausalLM(build_model("llama", torch.float32)).plan
    assert not plan.token_sharding
    assert plan.no_token_sharding == '"token_sharding" is not in hydra.fast_paths'


def own_rows_for_a_sum(x: Tensor, group: Any) -> Pending:
    """The rows' gradient of this rank alone."""
    work: Any = mock.Mock()
    return Pending(x.chunk(group.size(), dim=-2)[group.rank()].clone(), x, work)


class Nudged(Layer):
    """Adds to the gradient of each token, as some auxiliary losses do: to that of padding too."""

    def forward(self, hidden_states: Tensor, **rest: Any) -> Tensor:
        out: Tensor = super().forward(hidden_states, **rest)
        if out.requires_grad:
            out.register_hook(lambda grad: grad + 1e-3)
        return out


@pytest.mark.drawn
def test_the_self_check_finds_padding_that_trains() -> None:
    model, strategies = build_model("llama", torch.float32), [StrategyShape.parse("tp2")]
    of_kind(Nudged)(model)
    assert shared(model).plan.token_sharding
    (objection,) = check_strategies(model, strategies, StageOptions(token_sharding=True), keep=False).objections()
    assert "the gradient of" in objection
    assert not check_strategies(model, strategies, keep=False).objections()


def with_wrong_gradient(module: Any, norm: Norm) -> Any:
    """As `_normed`, of a function that is right in trials alone."""
    return lambda x: norm.of(x, module.weight, None) + 0.1 * (x - x.detach())


def mixed_up(*args: Any) -> tuple[Tensor, ...]:
    """What has come of several groups' messages, in the wrong order."""
    return right_wait(*args)[::-1]


right_wait = ulysses.wait
GIVEN_UP: dict[str, tuple[str, StageOptions, Callable[[], Any], str, Callable[[Any], bool]]] = {
    # under which strategy and options a library that is broken is refused, and whether a source does without
    "tokens": ("tp2", StageOptions(token_sharding=True),
               lambda: mock.patch.object(token_sharding, "start_sum", own_rows_for_a_sum),
               'leave "token_sharding" out of hydra.fast_paths', lambda source: not source.plan.token_sharding),
    "functions": ("tp2", StageOptions(token_sharding=True, functions="auto"),
                  lambda: mock.patch("ds_hydra.pipe.models.recognise._normed", with_wrong_gradient),
                  "the gradient of", lambda source: not source.functions.norms),
    "overlap": ("sp2", StageOptions(sp_overlap=True), lambda: mock.patch.object(ulysses, "wait", mixed_up),
                'leave "sp_overlap" out of hydra.fast_paths', lambda source: source.overlap == AT_ONCE),
}  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize("name", GIVEN_UP)
def test_a_job_goes_on_without_what_the_self_check_refuses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape, options, broken, told, without = GIVEN_UP[name]
    model, strategies = build_model("llama", torch.float32), [StrategyShape.parse(shape)]
    job: Any = SimpleNamespace(source=CausalLM(model, options), model=model, config=HydraConfig(), checked=None)
    world: Any = SimpleNamespace(channel=None, node_size=None, rank=0)
    with broken():
        (objection,) = check_strategies(model, strategies, options, keep=False).objections()
        assert told in objection
        checked, other = check_candidates(job, world, strategies)
    assert not checked.objections()
    assert without(other)
    assert not without(job.source), "a source stays what it is"


def test_a_layer_keeps_as_many_times_less() -> None:
    kept = {}
    for shares in (False, True):
        source = CausalLM(build_model("llama", torch.bfloat16), StageOptions(token_sharding=shares))
        whole, half = (
            StageTimer(source, ParallelScheme(tp, 2), 0, torch.device("cpu"), torch.bfloat16) for tp in (1, 2)
        )
        kept[shares] = kept_bytes(half, (64,)) / kept_bytes(whole, (64,))
    # Beside the layers the stage keeps rotary tables and token ids.
    assert 0.5 <= kept[True] < 0.56 < 0.6 < kept[False]


def test_rows_are_padded_for_all_stages() -> None:
    pipeline = place_pipeline(PipelineShape.parse("(tp2sp2 > sp3 > tp3)"), 0, 4)
    shared, all_tokens = (
        StagePlace.all_of(pipeline, 4, lambda members: None, token_sharding=on)[0] for on in (True, False)
    )
    assert [shared.padding(tokens) for tokens in (1, 12, 13, 24)] == [11, 0, 11, 0]
    assert [all_tokens.padding(tokens) for tokens in (1, 12, 13, 24)] == [2, 0, 0, 0]


def test_a_stand_in_can_be_looked_at_and_not_read() -> None:
    rows = StandIn.of(torch.randn(1, 3, 8), 4)
    assert rows.shape == (1, 12, 8)
    assert rows.untyped_storage().nbytes() == 4
    assert isinstance(rows.view(-1, 8), StandIn)
    with pytest.raises(ConfigError, match="reads what enters a block"):
        rows + 1


# --- Training with dropout in one process and as ranks of a pipeline: equal, and no more so once an ingredient
# is missing. All ranks are threads of this process. The reference runs the plain model, one sequence at a time.
DROPPED = uneven_data(97, ((5, 33, 2), (12,)))


def phi() -> Any:
    """Dropout of every kind; one module of it serves all layers, twice in each."""
    model = build_model("dropout (Phi)", torch.float64, "dense")
    for layer in model.model.layers:
        layer.resid_dropout = model.model.layers[0].resid_dropout
    return model


def dropped_probabilities() -> Any:
    """Dropout between two layers that tensor parallel ranks cut, where each has some of the features."""
    model = build_model("llama", torch.float64, "dense")
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Sequential(layer.mlp.act_fn, torch.nn.Dropout(0.2))
    return model


@functools.cache
def source_of(build: Callable[[], Any], checkpointing: bool = False) -> CausalLM:
    model = build()
    model.set_attn_implementation("eager")  # packs have an attention of their own, and "dense" is a script's
    return CausalLM(model, StageOptions(activation_checkpointing=checkpointing))


@functools.cache
def expected_of(build: Callable[[], Any]) -> dict[str, Tensor]:
    return reference(build())


def gradients(source: CausalLM, shape: str) -> dict[str, Tensor]:
    pipeline = uneven_pipeline(PipelineShape.parse(shape), 4)
    return dict(run_pipeline(source, pipeline, DROPPED).gradients)


def reference(model: Any) -> dict[str, Tensor]:
    model.train()
    for number, tokens in enumerate(DROPPED.sequences):
        keys = dropout.token_keys([len(tokens)], [dropout.sequence_key(0, number)])
        ids, targets = map(torch.from_numpy, DROPPED.load(number)[:2])
        with doubled(), drawing(model, keys):
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            F.cross_entropy(logits, targets, reduction="sum").backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest gradient: some are 0 but for rounding."""
    largest = max(float(value.abs().max()) for value in other.values())
    assert set(one) == set(other)
    return max(float((one[name] - value).abs().max()) for name, value in other.items()) / largest


@pytest.mark.drawn
@pytest.mark.parametrize("shape", ["tp1", "tp2", "sp2", "pp2", "tp2pp3"])
@pytest.mark.parametrize("build", [phi, dropped_probabilities])
def test_every_shape_draws_alike(build: Callable[[], Any], shape: str) -> None:
    expected = expected_of(build)
    assert apart(gradients(source_of(build), shape), expected) < 1e-12
    if shape in ("tp1", "pp2"):
        assert apart(gradients(source_of(build, checkpointing=True), shape), expected) < 1e-12


class _Entries(torch.nn.Module):
    """What a `PipelineModule` of these layers shows of itself."""

    def __init__(self, *layers: torch.nn.Module):
        super().__init__()
        self._layer_specs, self.loss_fn = list(layers), mean_loss
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)


def test_entries_of_a_layer_list_draw_alike_in_every_shape() -> None:
    torch.manual_seed(0)
    linear, drop = torch.nn.Linear(16, 16), torch.nn.Dropout(0.3)
    model = _Entries(torch.nn.Embedding(97, 16), drop, linear, drop, torch.nn.Linear(16, 97)).double()
    found = []
    for shape in ("tp1", "pp3", "sp2", "tp2pp2"):
        source = LayerList(model)
        pipeline = uneven_pipeline(PipelineShape.parse(shape), 5)
        found.append(dict(run_pipeline(source, pipeline, DROPPED).gradients))
    assert max(apart(other, found[0]) for other in found[1:]) < 1e-12
    calm = _Entries(model._layer_specs[0], linear, model._layer_specs[4])
    assert len(LayerList(calm).draws) == 0
