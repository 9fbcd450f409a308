"""Models that cannot be trained in packs or stages: a row each, with the sentence that the user sees before step 0."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from ds_hydra.engine.models import model_source
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.stage_options import AS_WRITTEN
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.runs import run_pipeline, uneven_data
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.families import FAMILIES, VOCAB, build_model
from tests.support.hard_models import HARD_MODELS, hard_model

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
