"""PEFT's adapters in one process, and classes of language models against the committed list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, VeraConfig, get_peft_model

from ds_hydra.engine.job import model_source
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.small_copy import small_copy
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.families import build_model
from tests.support.tiny_families import (
    CRASHES,
    DIFFERS,
    EQUAL,
    REASONS,
    ROWS,
    SHAPES,
    class_names,
    drawn_names,
    entry,
    expected,
    judge,
    short,
)
from tools import aims


# --- PEFT's adapters in one process: what is refused by name, and what the self-check makes of a mistake.
def lora(family: str = "llama", **settings: Any) -> Any:
    config = LoraConfig(r=2, **({"target_modules": ["q_proj"]} | settings))
    return get_peft_model(build_model(family, torch.float32), config)


def peft(config: Any, **options: Any) -> Any:
    return get_peft_model(build_model("llama", torch.float32), config, **options)


def merged() -> Any:
    model = lora()
    model.merge_adapter()
    return model


def disabled() -> Any:
    model = lora()
    model.base_model.disable_adapter_layers()
    return model


def quantized() -> Any:
    model = build_model("llama", torch.float32)
    model.is_quantized = True
    return model


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: lora(use_dora=True, target_modules=["embed_tokens"]), r"embed_tokens is a LoRA .*DoraEmbeddingVariant"),
    (lambda: lora(target_parameters=["o_proj.weight"]), r"o_proj is a .*ParamWrapper of 'weight', which is no stack"),
    (lambda: peft(IA3Config(target_modules=["k_proj"], feedforward_modules=[])), "'default' is of the kind IA3, which"),
    (lambda: peft(VeraConfig(target_modules=["q_proj"])), "'default' is of the kind VERA, .*peft.LoraConfig"),
    (lambda: peft(PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")), "is of the kind PREFIX_TUNING"),
    (lambda: peft(LoraConfig(target_modules=["q_proj"]), mixed=True), "PeftMixedModel, with adapters of several"),
    (merged, r"q_proj is merged into its layer .*unmerge_adapter"),
    (disabled, r"q_proj is disabled .*enable_adapter_layers"),
    (quantized, "quantized weights"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_refused_by_name(build: Callable[[], Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        model_source(build(), StageOptions(token_sharding=True))


@pytest.fixture(scope="module")
def model() -> Any:
    return base_of(lora(target_modules="all-linear", lora_dropout=0.1))


def test_a_small_copy_has_the_adapters(model: Any) -> None:
    small = small_copy(model, [PipelineShape.parse("tp2")], memory_bytes=0.0).model  # none of its own widths
    names = {name for name, parameter in small.named_parameters() if parameter.requires_grad}
    assert names == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "lora_dropout" in repr(small)


@pytest.mark.drawn
def test_the_self_check_finds_adapters_equal(model: Any) -> None:
    candidates = [StrategyShape.parse(text) for text in ("tp2pp2", "sp2")]
    result = check_strategies(model, candidates, StageOptions(token_sharding=True), keep=False)
    assert result.objections() == []
    assert {verdict.state for verdict in result.verdicts.values()} == {"equal"}


@pytest.mark.drawn
def test_adapters_of_a_model_that_recomputes_its_layers() -> None:
    """Then PEFT puts a hook on the embeddings, by which what they make has a gradient though they are frozen."""
    base = build_model("llama", torch.float32)
    base.gradient_checkpointing_enable()
    model = base_of(get_peft_model(base, LoraConfig(r=2, target_modules="all-linear")))
    assert model.model.embed_tokens._forward_hooks
    small = small_copy(model, [PipelineShape.parse("tp2")], memory_bytes=0.0).model
    assert small.model.embed_tokens._forward_hooks
    result = check_strategies(model, [StrategyShape.parse("pp2/v")], StageOptions(token_sharding=True), keep=False)
    assert result.objections() == []


def test_adapters_may_be_wider_than_their_base() -> None:
    """PEFT keeps them in FP32 beside a base in 16 bit; here all is computed in one type."""
    wide = get_peft_model(build_model("llama", torch.bfloat16), LoraConfig(target_modules="all-linear"))
    assert {p.dtype for p in wide.parameters()} == {torch.float32, torch.bfloat16}
    plan = model_source(wide, StageOptions(token_sharding=True)).plan
    assert (plan.no_tp, plan.no_pp, plan.no_slices, plan.no_token_sharding) == ("", "", "", "")


# --- The causal language model classes of transformers: each comes to what the committed list says. A run takes a
# hundredth and one that is refused, where the pipeline of a TP 3 and an SP 3 stage stands for all shapes.
@pytest.mark.parametrize("name", [*drawn_names(one_in=100), "ProphetNetForCausalLM"])
def test_equal_or_refused_as_listed(name: str) -> None:
    listed = expected()[name]
    _, verdicts = judge(name, {"mixed": SHAPES["mixed"]})
    assert short(verdicts["mixed"]) == (listed if isinstance(listed, str) else listed["mixed"]), verdicts


@pytest.mark.long
@pytest.mark.parametrize("name", [*class_names(), *ROWS])
def test_every_class_under_every_shape(name: str) -> None:
    """`python -m tests.support.tiny_families` writes the list anew."""
    _, verdicts = judge(name)
    assert not {DIFFERS, CRASHES} & set(map(short, verdicts.values())), verdicts
    assert entry(verdicts) == (EQUAL if name in ROWS else expected()[name]), verdicts


@pytest.mark.drawn
def test_attention_hands_on_rows_that_can_be_viewed_as_features() -> None:
    assert judge("AfmoeForCausalLM", {"sp3": "sp3"})[1]["sp3"] == EQUAL  # its code has `view` where others reshape


@pytest.mark.drawn
@pytest.mark.parametrize(
    "name",
    [
        "AriaTextForCausalLM",  # experts stored (experts, in, out)
        "Gemma3nForCausalLM",  # a mean over features of which a rank has a part: its MLP is computed whole
        "InklingForCausalLM",  # parameters of its own in what the plan sums, and a norm within the embeddings
    ],
)
def test_tensor_parallel_ranks_share_it(name: str) -> None:
    assert judge(name, {"tp3": "tp3"})[1]["tp3"] == EQUAL


def test_the_list_names_every_class_with_few_reasons() -> None:
    listed = expected()
    assert set(listed) == set(class_names())
    words = {word for each in listed.values() for word in ([each] if isinstance(each, str) else each.values())}
    assert words <= {EQUAL, *(reason for _, reason in REASONS)}
    assert sum(each == EQUAL for each in listed.values()) >= aims.FAMILIES_EQUAL
