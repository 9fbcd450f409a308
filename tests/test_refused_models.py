"""Which models and data are taken: refused with the sentence that the user sees, cut or not, from the meta device."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForCausalLM,
)

import ds_hydra
import ds_hydra.engine.engine
from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.engine.job import model_source
from ds_hydra.host.user_model import arguments_of, limits_of
from ds_hydra.pipe.contexts import Context, Contexts
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.meta_copy import drawn_parameter, set_buffers, unset_buffers
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.runs import run_pipeline, uneven_data
from ds_hydra.self_check.schemes import uneven_pipeline
from ds_hydra.self_check.verdicts import CheckResult
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, PlanError
from tests.support import mutants
from tests.support.families import FAMILIES, HARD_MODELS, LAYERS, VOCAB, build_model, hard_model
from tests.support.small_job import shared_source, small_engine, small_model

# --- Models that cannot be trained in packs or stages: a row each, with the sentence that the user sees before
# step 0.
GEMMA3N = {
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size": 64, "intermediate_size": [96] * 4,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "laurel_rank": 8,
    "hidden_size_per_layer_input": 8, "sliding_window": 8, "pad_token_id": 0, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip


def gemma3n(**settings: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3n_text", **(GEMMA3N | settings)))


def hard(name: str, **settings: Any) -> Any:
    model_type, common = HARD_MODELS[name]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**common, **settings}))


def classifier(kind: Any, labels: int) -> Any:
    return kind.from_config(AutoConfig.for_model("llama", **{**FAMILIES["llama"][1], "num_labels": labels}))


def llama(change: Callable[[Any], Any]) -> Any:
    model = build_model("llama", torch.float32)
    change(model)
    return model


def hook_by_global(model: Any) -> None:
    space = {"MODEL": model}
    exec("def hook(module, args, out):\n    return out + MODEL.model.norm.weight", space)
    model.model.layers[1].mlp.register_forward_hook(space["hook"])


def view_of_parameter(model: Any) -> None:
    model.model.rows = model.model.embed_tokens.weight[3:5]


def weight_of_another(model: Any) -> None:
    """As scripts do that begin layer 1 as layer 0."""
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(model.model.layers[0].mlp.up_proj.weight.data)


def view_in_a_closure(model: Any) -> None:
    rows = model.model.norm.weight.data[8:]
    model.model.norm.register_forward_hook(lambda module, args, out: out * rows.mean())


def view_in_a_class(model: Any) -> None:
    class Scaled(type(model.model.norm)):  # type: ignore[misc]
        rows = memoryview(model.model.layers[1].input_layernorm.weight.data.numpy())

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out * sum(self.rows)

    model.model.norm.__class__ = Scaled


def view_in_a_method(model: Any) -> None:
    held = {"rows": model.model.norm.weight.data[8:]}

    class Scaled(type(model.model.norm)):  # type: ignore[misc]
        def scale(self) -> Tensor:
            return held["rows"].mean()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out * self.scale()

    model.model.norm.__class__ = Scaled


def norms_that_meet(model: Any) -> None:
    both = torch.ones(2 * 64 - 1)
    model.model.norm.weight, model.model.layers[2].input_layernorm.weight = map(nn.Parameter, (both[:64], both[63:]))


def breaks(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out.nope)


def holds_a_weight(model: Any) -> None:
    weight = model.model.layers[0].input_layernorm.weight
    model.model.norm.register_forward_hook(lambda module, args, out, held=[weight]: out * held[0])


def parallel_lists(model: Any) -> None:
    """Layers whose residual connection passes the next layer by."""
    first = model.model.layers[0]
    state: list[Any] = []
    first.register_forward_hook(lambda module, args, out: state.__setitem__(slice(None), [out]))
    model.model.layers[2].register_forward_pre_hook(lambda module, args: (args[0] + state[0], *args[1:]))


def quiet_dropout(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.1).eval())


def quiet_code(model: Any) -> None:
    class Mixed(type(model.model.layers[1].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return 2 * out if self.training else out

    model.model.layers[1].mlp.__class__ = Mixed
    model.model.layers[1].eval()


def drop_channels(model: Any) -> None:
    model.model.norm.register_forward_hook(lambda module, args, out: F.dropout1d(out))


def drop_rows(model: Any) -> None:
    """Of a batch turned about, so that a row holds a feature of all tokens."""
    turned = lambda module, args, out: F.dropout(out.transpose(1, 2), 0.2).transpose(1, 2)  # noqa: E731
    model.model.layers[1].mlp.register_forward_hook(turned)


def spectral_norm(model: Any) -> None:
    nn.utils.parametrizations.spectral_norm(model.model.layers[1].mlp.up_proj)


def running_mean(model: Any) -> None:
    norm = model.model.norm
    norm.register_buffer("mean", torch.zeros(64))

    def center(module: Any, args: Any, out: Tensor) -> Tensor:
        module.mean = module.mean * 0.9 + 0.1 * out.detach().mean(dim=(0, 1))
        return out - module.mean

    norm.register_forward_hook(center)


def coin_of_python(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out if random.random() < 0.999 else 0)


def short_rows(model: Any) -> None:
    model.model.embed_tokens.max_norm = 1.0


def fewer_layers(model: Any) -> None:
    model.model.layers = model.model.layers[:1]


def parameter_of(values: Tensor) -> Callable[[Any], None]:
    return lambda model: model.model.layers[1].register_parameter("own", nn.Parameter(values, requires_grad=False))


WHOLE = [  # refused under every strategy
    (lambda: hard_model("dynamic rope"), r"rotary_emb has .* 'dynamic'.*order of the sequences; use rope_type 'yarn'"),
    (lambda: hard_model("bidirectional"), r"Gemma3Attention is not causal .*use_bidirectional_attention=False"),
    (lambda: hard_model("masked language model"), r"BertSelfAttention is not causal .*is_decoder=True"),
    (lambda: hard("embeddings of another width (OPT-350m)", layerdrop=0.1), r"layerdrop 0\.1\).*set layerdrop to 0"),
    (lambda: llama(hook_by_global), r"forward hook 'hook' of model\.layers\.1\.mlp refers to .* by a global name"),
    (lambda: llama(view_of_parameter), r"embed_tokens\.weight and the attribute rows of model share memory.*forward"),
    (lambda: llama(weight_of_another), r"layers\.0\.mlp\.up_proj\.weight and .*layers\.1\S* share memory.*one nn\.Par"),
    (lambda: llama(lambda m: m.model.register_buffer("rows", m.lm_head.weight.data[3:5])), "lm_head.* and model.rows"),
    (lambda: llama(view_in_a_closure), r"model\.norm\.weight and .*hook's of model\.norm's rows share memory"),
    (lambda: llama(view_in_a_class), r"model\.layers\.1\.input_layernorm\.weight and .*Scaled\.rows share memory"),
    (lambda: llama(view_in_a_method), r"model\.norm\.weight and .*Scaled\.scale's held\['rows'\] share memory"),
    (lambda: llama(norms_that_meet), r"model\.norm\.weight and model\.layers\.2\.input_layernorm\.weight share memory"),
    (lambda: llama(lambda m: setattr(m.model.norm, "weight", nn.Parameter(torch.ones(1).expand(64)))), "expanded view"),
    (lambda: llama(lambda m: setattr(m.model, "lock", threading.Lock())), r"attribute model\.lock .*cannot be copied"),
    (lambda: llama(lambda m: setattr(m, "lm_head", None)), "no language modelling head"),
    (lambda: llama(fewer_layers), r"no module list of the \d layers that its config says, .*model\.layers has 1"),
    (lambda: classifier(AutoModelForTokenClassification, 2), "no language modelling head.*with num_labels=1"),
    (lambda: classifier(AutoModelForSequenceClassification, 1), r"returns \(1, 1\) for 11 tokens of one sequence"),
    (lambda: llama(spectral_norm), r"changes model\.layers\.1\.mlp\.up_proj\.parametrizations.*keep such a state out"),
    (lambda: llama(running_mean), r"changes model\.norm\.mean, which each stage would do for itself"),
    (lambda: llama(coin_of_python), r"draws random numbers from Python's generator"),
    (lambda: llama(breaks), r"packed sequence .*: AttributeError: .* 'nope' \(in model\.layers\.1\.mlp\)"),
    (lambda: llama(holds_a_weight), r"\(in model\.norm\); a hook's of model\.norm\S* holds a parameter.*by its module"),
    (lambda: llama(lambda m: setattr(m.model, "act", torch.jit.script(nn.SiLU()))), "model.act is a ScriptModule"),
    (lambda: llama(lambda m: setattr(m, "config", None)), "taken apart into stages: .* AttributeError: 'None"),
    (lambda: llama(short_rows), r"model\.embed_tokens has max_norm=1\.0: its forward would shorten rows"),
    (lambda: llama(parameter_of(torch.zeros(4, dtype=torch.complex64))), r"layers\.1\.own has values of complex64"),
    (lambda: llama(parameter_of(torch.zeros(4, dtype=torch.int8))), r"layers\.1\.own has values of int8.*a buffer"),
    (lambda: llama(parameter_of(torch.zeros(0))), r"layers\.1\.own has the shape \(0,\) and no element"),
    (lambda: llama(quiet_dropout), r"layers\.1\.mlp\.act_fn\.1 is in evaluation while the rest of Llama.* trains"),
    (lambda: llama(quiet_code), r"layers\.1\.mlp is in evaluation while the rest of Llama.* trains"),
    (lambda: llama(drop_channels), r"model\.norm draws random numbers \(dropout1d 0\.5\).*which rank draws them"),
    (lambda: llama(drop_rows), r"mlp draws random numbers \(dropout 0\.2\) for rows that are not the tokens"),
]  # fmt: skip


def unknown_style(model: Any) -> None:
    model._tp_plan = dict(model.tp_plan) | {"model.layers.*.mlp.up_proj": "diagonal"}


def unread_plan(model: Any) -> None:
    """As in a release of transformers that hands on the plan of the head alone, and has another elsewhere."""
    model._tp_plan = {"lm_head": "colwise_rep"}


def plan_of_other_names(model: Any) -> None:
    model._tp_plan = {f"transformer.{name}": style for name, style in model.tp_plan.items()}


DEGREES = [  # refused under some strategies, equal under the other
    (lambda: gemma3n(num_kv_shared_layers=2), "pp2", "tp2", "layer [12] uses what layer [01] computed beside"),
    (lambda: llama(parallel_lists), "pp2", "sp2", r"layer 2 .*was computed around layer 0|the list|around the hidden"),
    (lambda: llama(lambda m: m.model.layers.__setitem__(2, m.model.layers[0])), "pp2", "tp2", "runs twice"),
    (lambda: build_model("weight norm", torch.float32), "tp2", "pp2", r"mlp\.up_proj as a linear layer, but .*tp1"),
    (lambda: build_model("adapters", torch.float32), "tp2", "sp2", r"q_proj as a linear layer, but .*Adapter\); use"),
    (lambda: build_model("frozen base with adapters", torch.float32), "tp2", "pp2", r"q_proj as a linear layer, but"),
    (lambda: llama(unknown_style), "tp2", "pp2", r"up_proj: the .* style 'diagonal' .* not implemented; use"),
    (lambda: llama(unread_plan), "tp2", "pp2", r"names nothing in its layers \(\d+ names, the first 'layers\..*tp1"),
    (lambda: llama(plan_of_other_names), "tp2", "sp2", r"names nothing in its layers \(\d+ names, .*tp1"),
    (lambda: llama(lambda m: setattr(m, "lm_head", nn.Sequential(m.lm_head))), "tp2", "pp2", "lm_head"),
]  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize(("build", "told"), WHOLE, ids=[told for _, told in WHOLE])
def test_refused_under_every_strategy(build: Callable[[], Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        model_source(build(), AS_WRITTEN)


@pytest.mark.drawn
@pytest.mark.parametrize(("build", "refused", "equal", "told"), DEGREES, ids=[row[3] for row in DEGREES])
def test_refused_under_some_strategies(build: Callable[[], Any], refused: str, equal: str, told: str) -> None:
    plan = CausalLM(build()).plan
    with pytest.raises(PlanError, match=told):
        plan.check(place_strategy(StrategyShape.parse(refused), 2, plan.num_layers))
    plan.check(place_strategy(StrategyShape.parse(equal), 2, plan.num_layers))


def test_a_statistic_over_features_that_ranks_share_is_taken_by_each_of_them() -> None:
    source = CausalLM(gemma3n(activation_sparsity_pattern=[0.9] * 4))
    assert source.unnamed.whole == {f"{source.layers_path}.*.mlp"}
    assert {name for name, spec in source.specs.items() if ".mlp." in name and spec.rule.dim is not None} == set()
    source.plan.check(place_strategy(StrategyShape.parse("tp2"), 2, source.plan.num_layers))


def test_nothing_is_dropped_in_an_evaluation() -> None:
    """Every layer of every stage evaluates, though training drops 3 numbers of 10."""
    model = hard_model("dropout").double()
    data = uneven_data(VOCAB, [(7, 30, 3), (23, 5)])
    source = CausalLM(model)
    pipeline = place_strategy(StrategyShape.parse("pp3"), 3, 4).pipelines[0]
    found = run_pipeline(source, pipeline, data)
    plain = Plain(model).evaluate(data)
    assert found.eval_loss == pytest.approx(plain, rel=1e-12)
    assert abs(found.loss / plain - 1) > 1e-6, "training drops"


def test_the_plan_of_each_family_cuts_its_layers() -> None:
    """Without an error, ranks would hold and compute whole layers where a release of transformers keeps its plans
    elsewhere."""
    whole = {
        name for name in FAMILIES if not CausalLM(build_model(name, torch.float32), by_one_rank=True).plan.cuts_layers
    }
    assert whole == {"gpt_oss", "gpt2"}, "which publish none"


# --- What a model takes of its data beside tokens, and how it numbers them, is found; data that do not fit are
# refused.
SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def of_type(model_type: str, **more: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **more))


def roberta(**more: Any) -> Any:
    return of_type("roberta", is_decoder=True, pad_token_id=1, type_vocab_size=2, **more)


class Named(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, segments: Tensor | None = None, **others: Any) -> Any:
        return super().forward(input_ids, **others)


class Unnamed(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("languages", None)
        return super().forward(*args, **kwargs)


class Layer(nn.Module):
    def forward(self, hidden: Tensor, ages: Tensor | None = None) -> Tensor:
        return hidden


def with_a_layer() -> Any:
    model = of_type("llama")
    model.model.layers[1].mlp.add_module("inner", Layer())
    return model


def changed_by_hand() -> Any:
    model, forward = of_type("llama"), LlamaForCausalLM.forward
    model.forward = lambda input_ids, spans=None, **others: forward(model, input_ids, **others)
    return model


@pytest.mark.parametrize(
    ("model", "taken", "left"),
    [
        (lambda: of_type("gpt2"), "token_type_ids", "languages"),
        (lambda: Named(of_type("llama").config), "segments", "token_type_ids"),
        (lambda: Unnamed(of_type("llama").config), "languages", "segments"),
        (with_a_layer, "ages", "languages"),
        (changed_by_hand, "spans", "languages"),
        (roberta, "encoder_hidden_states", "languages"),
    ],
)
def test_names_that_a_forward_takes_are_found(model: Callable[[], Any], taken: str, left: str) -> None:
    names = arguments_of(model())
    assert taken in names
    assert left not in names


def test_types_of_zero_are_none_for_berts_kind_alone() -> None:
    config = HydraConfig(tokens_per_step=60, strategies=("tp1",))
    assert limits_of(config, roberta()).inputs.zero_types
    assert not limits_of(config, of_type("gpt2")).inputs.zero_types


@pytest.mark.parametrize(
    ("model", "first", "uncounted"),
    [(roberta, 2, (1,)), (lambda: roberta(eos_token_id=1), 2, (1,)), (lambda: of_type("gpt2", pad_token_id=1), 0, ())],
)
def test_tokens_by_which_a_model_numbers_are_found(
    model: Callable[[], Any], first: int, uncounted: tuple[int, ...]
) -> None:
    source = CausalLM(model())
    assert (source.first_position, source.uncounted) == (first, uncounted)


def refused(rank: int) -> list[str]:
    """What each way to hand in data says of a padding token inside of a sequence."""
    rank_environment(rank)
    bad, good = {"input_ids": [20, 21, 1, 22, 23]}, {"input_ids": [20, 21, 22, 1], "attention_mask": [1, 1, 1, 0]}
    hydra = {"tokens_per_step": 9, "context_length": 32, "strategies": ["2*tp1"], "self_check": "off"}
    hydra |= {"steps_file": None, "planner": {"ahead": 0}, "faults": {"frozen_seconds": 0}}
    config = {"optimizer": {"type": "AdamW"}, "hydra": hydra}
    texts = []

    def tell(data: Any, share: Any = None) -> None:
        with pytest.raises(Exception) as caught:  # noqa: PT011  (its kind stands in the text)
            ds_hydra.initialize(model=roberta(), training_data=data, config=config)[0].train_batch(share)
        texts.append(f"{type(caught.value).__name__}: {caught.value}")

    tell([bad, good, good])
    tell(Lengths([good, good, bad]))
    tell(None, [bad] if rank else [good])
    tell(iter([good, good, bad]))
    tell(None, [good | {"token_type_ids": [0, 1, 0, 0]}])
    return texts


class Lengths(list[Any]):
    lengths = (3, 3, 5)


def test_such_tokens_are_refused_however_they_come() -> None:
    with shared_source(roberta()):
        told = run_ranks(refused, 2)
    words = "holds the token 1 at position 2, which the model does not count"
    assert any(words in texts[1] for texts in told), "in a step, by the rank that reads it"
    for texts in told:
        assert all(words in texts[number] for number in (0, 2, 3)), texts
        assert "token_type_ids has 1 at token 1" in texts[4]
        assert all(text.startswith("ConfigError") for text in (texts[0], *texts[2:])), texts


@pytest.mark.parametrize(("kind", "counts"), [("gpt2", True), ("llama", False), ("opt", False)])
def test_whether_padding_is_numbered_is_found(kind: str, counts: bool) -> None:
    """A rotary embedding turns by distances alone, and OPT numbers by the mask."""
    more = {"word_embed_proj_dim": 16, "ffn_dim": 16} if kind == "opt" else {}
    assert CausalLM(of_type(kind, **more)).counts_padding is counts


# --- Models built on the meta device: buffers and drawn parameters are those that the constructor makes.
def hollow(make: Any = small_model) -> Any:
    with torch.device("meta"):
        return make()


def of_family(name: str) -> Any:
    model_type, settings = FAMILIES[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))


@pytest.mark.drawn
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_what_is_drawn_is_what_the_constructor_makes(name: str) -> None:
    """Buffers and constants to the bit; random parameters with its mean and deviation."""
    model, real = hollow(lambda: of_family(name)), of_family(name)
    set_buffers(model, {})
    assert not unset_buffers(model)
    for path, buffer in real.named_buffers():
        assert torch.equal(model.get_buffer(path), buffer), path
    for path, made in real.named_parameters():
        drawn = drawn_parameter(model, path, seed=3)
        assert drawn.shape == made.shape
        assert torch.equal(drawn, drawn_parameter(model, path, seed=3))
        if made.std() == 0:
            assert torch.equal(drawn, made), path
        else:
            if made.numel() > 64:
                error = 6 * made.std().item() / made.numel() ** 0.5
                assert abs(drawn.mean() - made.mean()).item() < error, path
                assert abs(drawn.std() - made.std()).item() < error, path
            assert not torch.equal(drawn, drawn_parameter(model, path, seed=4)), path
    assert all(parameter.is_meta for parameter in model.parameters())  # it still takes no memory


def test_what_nothing_sets_is_refused_by_name() -> None:
    model = hollow()
    model.model.layers[1].mlp.gate = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(ConfigError, match=r"does not set all of the parameter model\.layers\.1\.mlp\.gate"):
        drawn_parameter(model, "model.layers.1.mlp.gate", seed=0)
    with torch.device("meta"), pytest.raises(ConfigError, match="Linear has no _init_weights to draw weight by"):
        drawn_parameter(nn.Linear(2, 2), "weight", seed=0)
    model.model.layers[2].register_buffer("scale", torch.empty(3, device="meta"))
    with pytest.raises(ConfigError, match=r"buffer model\.layers\.2\.scale of the model is on the meta device"):
        set_buffers(model, {})
    set_buffers(model, {"model.layers.2.scale": torch.full((3,), 2.0)})
    assert model.model.layers[2].scale.tolist() == [2.0] * 3


def trained(rank: int, **hydra: Any) -> dict[str, Tensor]:
    engine = small_engine(rank, hollow(), **hydra)
    engine.train_batch()
    return engine.fp32_state_dict()


def first_values(rank: int, **hydra: Any) -> dict[str, Tensor]:
    return small_engine(rank, hollow(), **hydra).fp32_state_dict()


@pytest.mark.drawn
def test_random_weights_do_not_depend_on_the_number_of_ranks() -> None:
    one, other = (run_ranks(lambda rank: first_values(rank, initial_weights="random"), n)[0] for n in (1, 4))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one["model.layers.0.mlp.up_proj.weight"].std() > 0.01


@pytest.mark.drawn
def test_a_folder_s_weights_train_as_the_model_that_it_was_saved_from(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)

    def whole(rank: int) -> dict[str, Tensor]:
        engine = small_engine(rank)
        engine.train_batch()
        return engine.fp32_state_dict()

    one, other = run_ranks(whole, 2)[0], run_ranks(lambda r: trained(r, initial_weights=str(tmp_path)), 2)[0]
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_buffers_come_with_the_folder(tmp_path: Path) -> None:
    """A buffer that is saved, as routers' corrections are, belongs to the weights."""

    def with_scale(value: float) -> Any:
        model = small_model()
        model.model.layers[1].register_buffer("scale", torch.full((2,), value))
        return model

    with_scale(3.0).save_pretrained(tmp_path)

    def job(rank: int) -> list[float]:
        model = hollow(lambda: with_scale(1.0))
        small_engine(rank, model, initial_weights=str(tmp_path))
        with pytest.raises(CheckpointError, match=r"other values of the buffer 'model\.layers\.1\.scale'"):
            small_engine(rank, with_scale(1.0)).load_16bit_model(tmp_path)
        return list(model.model.layers[1].scale.tolist())

    assert run_ranks(job, 2)[1] == [3.0, 3.0]


def test_wrong_ways_to_start_are_refused_on_all_ranks(tmp_path: Path) -> None:
    def refused(rank: int) -> None:
        with pytest.raises(ConfigError, match=r"no rank has a value for .* hydra\.initial_weights"):
            small_engine(rank, hollow())
        with pytest.raises(ConfigError, match='is "random" but the model has a value'):
            small_engine(rank, initial_weights="random")
        with pytest.raises(CheckpointError, match="holds neither"):
            small_engine(rank, hollow(), initial_weights=str(tmp_path))

    run_ranks(refused, 2)


# --- Slices of sequences in whole models: which models may be cut, what the self-check tells of it, and what
# stays.
def check(model: Any, **settings: Any) -> CheckResult:
    """The self-check of whole sequences finds nothing; what it says of slices is what is asked for."""
    result = check_strategies(model, [StrategyShape.parse("tp1")], keep=False, **settings)
    assert result.objections() == []
    return result


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "gpt_oss"])
def test_families_that_may_be_cut(name: str) -> None:
    assert check(build_model(name, torch.float32)).no_slices == ""


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["longrope", "dropout (Phi)", "positions from the padding id"])
def test_unusual_models_that_may_be_cut(name: str) -> None:
    options = StageOptions(activation_checkpointing=name == "longrope")
    assert check(hard_model(name), options=options).no_slices == ""


def mix_tokens(model: Any) -> None:
    """Each token with the one before it in its sequence: right in packs, but a slice does not have its first one's."""

    def mix(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        inside = (kwargs["position_ids"] > 0).unsqueeze(-1)
        return out + 0.5 * out.roll(1, dims=1) * inside

    model.model.layers[1].register_forward_hook(mix, with_kwargs=True)


class _Half(nn.Module):
    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return hidden_states * 0.5, None


def leave_attention_out(model: Any) -> None:
    model.model.layers[2].self_attn = _Half()


def attend_twice(model: Any) -> None:
    """By one module: the second time with other keys and values, which have no place of their own."""
    layer = model.model.layers[1]
    attention = layer.self_attn

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = attention

        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            return self.inner(self.inner(hidden_states, **kwargs)[0], **kwargs)

    layer.self_attn = Twice()


CHANGES = [
    (mix_tokens, "^with a sequence in slices, and layers computed again, the loss is .* off"),
    (leave_attention_out, r"^layer \d does not attend by Hugging Face's attention interface"),
    (attend_twice, r"^model\.layers\.1\.self_attn\.inner attends 2 times in one forward"),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("change", "told"), CHANGES, ids=lambda value: getattr(value, "__name__", ""))
def test_models_that_must_stay_whole(change: Callable[[Any], None], told: str) -> None:
    model = build_model("llama", torch.float32)
    change(model)
    no_slices = check(model).no_slices
    assert re.search(told, no_slices), no_slices


MUTANTS = [
    ("llama", mutants.slices_begin_at_zero, "the loss is"),
    ("llama", mutants.labels_are_made_of_slices, "the loss is"),
    ("llama", mutants.slices_see_themselves_only, "the loss is"),
    ("llama", mutants.slices_hand_no_gradients_back, r"the gradient of model\.embed_tokens\.weight is"),
    ("llama", mutants.backwards_run_in_the_order_of_forwards, "only .* tokens have|in reverse order"),
    ("mistral", mutants.windows_forget_a_token, "the loss is"),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "mutant", "told"), MUTANTS, ids=[row[1].__name__ for row in MUTANTS])
def test_what_would_train_slices_wrongly_is_told(name: str, mutant: mutants.Mutant, told: str) -> None:
    with mutant():
        result = check(build_model(name, torch.float32))
    assert re.search(told, result.no_slices), result.no_slices


@pytest.mark.drawn
@pytest.mark.parametrize("frozen", ["", "layers.0."])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_is_kept_of_a_sequence_that_has_run(frozen: str, checkpointing: bool) -> None:
    """In training and in evaluation; also where keys and values have no gradient."""
    model = build_model("llama", torch.float64)
    for name, parameter in model.named_parameters():
        if frozen and ("embed" in name or frozen in name):
            parameter.requires_grad_(False)
    made: list[Contexts] = []
    kept: list[Context] = []

    def init(self: Contexts, total: int) -> None:
        right(self, total)
        made.append(self)

    def of(self: Contexts, module: Any) -> Context:
        context = right_of(self, module)
        kept.append(context)
        return context

    right, right_of = Contexts.__init__, Contexts.of
    source = CausalLM(model, StageOptions(activation_checkpointing=checkpointing))
    data = uneven_data(VOCAB, ((5, 33, 2), (12,))).in_slices()
    with mock.patch.object(Contexts, "__init__", init), mock.patch.object(Contexts, "of", of):
        run_pipeline(source, uneven_pipeline(PipelineShape.of(ParallelScheme(pp=2)), LAYERS), data)
    assert len(made) == 8  # of two sequences and two stages, in training and in evaluation
    assert len(set(map(id, kept))) == 4 * LAYERS
    assert all(not vars(contexts)["_of"] for contexts in made)
