"""Real sequences through a stage and through the model's own forward, in the job's type."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ds_hydra.data.tokens import TokenSequence
from ds_hydra.engine.real_sequences import stages_of_few
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.self_check.real import OwnModel, RealData, difference_on
from ds_hydra.self_check.runs import run_stage
from ds_hydra.self_check.small_copy import with_layers
from tests.support.families import build_model, kept_in_fp32, vocab_size

CPU = torch.device("cpu")
PAIR = (23, 9)  # of tokens, which drawn sequences hardly have


def real_data(vocabulary: int, lengths: tuple[int, ...] = (7, 90, 7)) -> RealData:
    draw = np.random.default_rng(0)
    sequences = []
    for length in lengths:
        tokens = draw.integers(4, vocabulary, length)
        tokens[1:3] = PAIR
        labels = np.append(tokens[1:], -100)
        labels[: length // 3] = -100
        sequences.append(TokenSequence(tokens, labels, 3.0, np.ones((length, 2))))  # fields, which no model reads
    return RealData.of(sequences)


def difference(model: Any, dtype: torch.dtype, lengths: tuple[int, ...] = (7, 90), **options: Any) -> str | None:
    values = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    own = OwnModel(model, values, CausalLM(model, StageOptions(**options)))
    return difference_on(own, real_data(vocab_size("llama"), lengths), dtype, CPU)


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_llama_is_as_far_off_as_from_itself(dtype: torch.dtype) -> None:
    model = build_model("llama", torch.float32)
    model.model.norm.weight.requires_grad_(False)
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: 2 * gradient)
    assert difference(model, dtype, functions="auto", activation_checkpointing=True) is None


@pytest.mark.drawn
@pytest.mark.parametrize("family", ["dropout (Phi)", "mixtral", "olmoe, balanced", "gemma3_text"])
def test_other_families_agree_in_bf16(family: str) -> None:
    assert difference(build_model(family, torch.float32), torch.bfloat16) is None


def test_what_a_model_keeps_in_fp32_is_so_in_stages() -> None:
    """Weights and corrections of routers, trained and frozen, by whose last bits experts are chosen."""
    model, kept = kept_in_fp32()
    source = CausalLM(model, computed_in=torch.bfloat16)
    source.values = values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    data = real_data(97)
    losses, gradients = run_stage(source, data, factor=1.0, device=CPU, dtype=torch.bfloat16)
    assert source.wide == kept
    assert source.plan.frozen_wide
    assert {name for name, gradient in gradients.items() if gradient.dtype == torch.float32} == kept & set(gradients)
    own = OwnModel(model, values, source)
    assert difference_on(own, data, torch.bfloat16, CPU) is None
    assert kept <= {name for name, value in source.values.items() if value.dtype == torch.float32}
    with torch.no_grad():
        logits = [model(input_ids=torch.from_numpy(one.input_ids)[None]).logits[0].float() for one in data.given]
    targets = torch.from_numpy(np.concatenate([one.labels for one in data.given]))
    plain = nn.functional.cross_entropy(torch.cat(logits), targets, ignore_index=-100, reduction="none")
    assert float((losses - plain).norm() / plain.norm()) < 1e-6, "rounded routers are 1e-4 off"


def counts_pairs(model: Any) -> None:
    """What no drawn token shows: a mark that counts in its pack how often one token followed another."""
    embedding = model.model.embed_tokens

    def marked(ids: Tensor) -> Tensor:
        found = (ids[:, 1:] == PAIR[1]) & (ids[:, :-1] == PAIR[0])
        marks = nn.functional.pad(found.cumsum(-1), (1, 0)).unsqueeze(-1)
        values = nn.Embedding.forward(embedding, ids)
        return values * (1 + 0.5 * marks.to(values.dtype))

    embedding.forward = marked


def norm_of_rows(limit: int) -> Callable[[Any], None]:
    """A norm that does something else in long rows."""

    def scaled(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return 0.7 * out if out.shape[1] > limit else out

    return lambda model: model.model.norm.register_forward_hook(scaled)


def looks_back(lag: int) -> Callable[[Any], None]:
    def shifted(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out + 0.5 * nn.functional.pad(args[0], (0, 0, lag, 0))[:, : out.shape[1]]

    return lambda model: model.model.layers[1].mlp.register_forward_hook(shifted)


def mean_of_block(size: int) -> Callable[[Any], None]:
    """The mean of the first tokens of a row, where there are so many."""

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out + out[:, :size].mean(1, keepdim=True) if out.shape[1] > size else out

    return lambda model: model.model.layers[1].mlp.register_forward_hook(hook)


ATTACKS: dict[str, tuple[Callable[[Any], None], tuple[int, ...]]] = {
    "pairs": (counts_pairs, (7, 90)),
    "norm 92": (norm_of_rows(92), (7, 90)),
    "norm 1000": (norm_of_rows(1000), (7, 900, 200)),
    "back 50": (looks_back(50), (7, 90, 7)),
    "back 300": (looks_back(300), (7, 310, 7)),
    "block 64": (mean_of_block(64), (7, 90, 7)),
}


@pytest.mark.drawn
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_packing_changes_is_found(attack: str, dtype: torch.dtype) -> None:
    model = build_model("llama", torch.float32)
    change, lengths = ATTACKS[attack]
    change(model)
    told = difference(model, dtype, lengths)
    assert told is not None
    assert "where rounding explains" in told


def test_what_packing_changes_is_found_where_fused_attention_drops() -> None:
    """Drawn by torch it would be as far from itself as from any stage."""
    model = build_model("llama", torch.float32)
    model.config.attention_dropout, model.config._attn_implementation = 0.2, "sdpa"
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    assert difference(model, torch.float32) is None
    counts_pairs(model)
    assert difference(model, torch.float32) is not None
    assert model.config._attn_implementation == "sdpa"


def test_a_copy_in_few_layers_has_their_values() -> None:
    model = build_model("llama_8_layers", torch.float32)
    few = with_layers(model, "model.layers", [1, 6])
    paths = [name for name, _ in few.named_parameters(remove_duplicate=False)]
    names = {path: re.sub(r"layers\.([01])", lambda at: f"layers.{(1, 6)[int(at[1])]}", path) for path in paths}
    values = {name: model.get_parameter(whole).detach() for name, whole in names.items()}
    own = OwnModel(few, values, CausalLM(few))
    assert difference_on(own, real_data(vocab_size("llama")), torch.float32, CPU) is None
    assert few.config.num_hidden_layers == 2
    values["model.norm.weight"] = values["model.norm.weight"] * float("nan")
    with pytest.raises(FloatingPointError):
        difference_on(own, real_data(vocab_size("llama")), torch.float32, CPU)


@pytest.mark.parametrize("family", ["llama_8_layers", "gemma2"])
def test_a_copy_in_few_layers_computes_by_what_was_recognised_in_the_whole(family: str) -> None:
    model, options = build_model(family, torch.float32), StageOptions(functions="kernels")
    kept = [1, model.config.num_hidden_layers - 1]
    whole, few = CausalLM(model, options), with_layers(model, "model.layers", kept)
    assert whole.functions.norms
    assert stages_of_few(few, "model.layers", kept, whole).functions == CausalLM(few, options).functions
