"""What a model takes of its data beside tokens, and how it numbers them, is found; data that do not fit are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import ds_hydra
import ds_hydra.engine.engine
from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.host.model_limits import arguments_of, limits_of
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.testing import rank_environment, run_ranks
from tests.support.sources import shared_source

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
