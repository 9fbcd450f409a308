"""Recurrent layers whose heads tensor parallel ranks share: which they are, what stays whole, what is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers.models.bamba import modeling_bamba

from ds_hydra.pipe.model_plan import ParamSpec, ShardRule
from ds_hydra.pipe.models import find_heads, own_heads, recurrent_heads
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.facts import ModelFacts
from ds_hydra.pipe.models.recurrent_heads import HeadCut, head_cut
from ds_hydra.pipe.placement import place_pipeline
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.compare import compare
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.precision import doubled
from ds_hydra.self_check.runs import run_pipeline, uneven_data
from ds_hydra.self_check.shrink import shrunk_config
from tests.support.families import build_model, hf_config

# Of the first layer: the module, the degrees, and what rank 0 of 4 has of some parameters (of a degree that it has not,
# all of it).
FOUND: dict[str, tuple[str, tuple[int, ...], dict[str, tuple[int, ...]]]] = {
    "qwen3_next": ("linear_attn", (2,), {"in_proj_qkvz.weight": (96, 64), "out_proj.weight": (64, 32)}),
    "qwen3_5": ("linear_attn", (2, 4), {"in_proj_qkv.weight": (24, 64), "conv1d.weight": (24, 1, 4), "A_log": (1,),
                                        "norm.weight": (8,), "out_proj.weight": (64, 8)}),
    "nemotron_h": ("mixer", (2, 4, 8, 16), {"in_proj.weight": (32 + 32 + 8 + 8 + 4, 64), "conv1d.bias": (48,),
                                            "norm.weight": (32,), "D": (4,)}),
    "bamba": ("mamba", (2, 4, 8, 16), {"in_proj.weight": (32 + 32 + 8 + 8 + 4, 64), "out_proj.weight": (64, 32)}),
}  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize("family", FOUND)
def test_ranks_share_heads(family: str) -> None:
    path, degrees, shapes = FOUND[family]
    source = CausalLM(build_model(family, torch.float32))
    module = f"model.layers.0.{path}"
    assert source.head_cuts[module][0].degrees == degrees
    assert {name: source.specs[f"{module}.{name}"].shard_shape(0, 4) for name in shapes} == shapes
    assert source.plan.no_tp == ""
    assert ModelFacts.from_json(source.facts.to_json()) == source.facts


def test_blocks_of_unequal_size_are_cut_each_for_itself() -> None:
    """Two key heads of 2 rows and four value heads of 3, in one weight: of q, k and v."""
    spec = ParamSpec("mixed", (20, 5), ShardRule(0, blocks=((4, 2), (4, 2), (12, 4)), degrees=(2, 4)))
    assert spec.shard_ranges(1, 2) == ((2, 4), (6, 8), (14, 20))
    assert spec.shard_ranges(3, 4) == ((2, 4), (6, 8), (17, 20)), "ranks 2 and 3 hold the same key heads"
    assert spec.shard_shape(3, 4) == (7, 5)
    assert list(spec.shard_intervals(1, 2)) == [(10, 20), (30, 40), (70, 100)]
    assert list(spec.shard_intervals(1, 3)) == [(0, 100)], "of another degree each rank holds the whole"
    assert ShardRule(gradient="partial", degrees=(2,)).of(3).gradient == "complete"


def biased(model: Any) -> None:
    """Adds up over ranks what must count once."""
    mixer = model.model.layers[0].mamba
    mixer.out_proj = nn.Linear(mixer.out_proj.in_features, mixer.out_proj.out_features)


def of_a_part_that_nobody_knows(model: Any) -> None:
    model.model.layers[0].mamba.another = nn.Linear(2, 2)


def normed_otherwise(model: Any) -> None:
    norm = model.model.layers[0].mamba.norm
    norm.forward = lambda hidden, gate: type(norm).forward(norm, hidden, 2 * gate)


@pytest.mark.drawn
@pytest.mark.parametrize("change", [biased, of_a_part_that_nobody_knows, normed_otherwise])
def test_what_is_made_otherwise_stays_whole(change: Callable[[Any], None]) -> None:
    model = build_model("bamba", torch.float32)
    change(model)
    source = CausalLM(model)
    assert list(source.head_cuts) == ["model.layers.2.mamba"]
    assert source.specs["model.layers.0.mamba.A_log"].rule == ShardRule()


def channels_are_cut_as_one() -> Any:
    """Of q, k and v together a rank has a consecutive part."""

    return _with_rules(lambda rule: replace(rule, blocks=()))


def _with_rules(changed: Callable[[ShardRule], ShardRule]) -> Any:
    def cut(module: nn.Module) -> HeadCut | None:
        found = head_cut(module)
        return found and replace(found, rules={name: changed(rule) for name, rule in found.rules.items()})

    return mock.patch.object(recurrent_heads, "head_cut", cut)


def test_a_cut_that_computes_something_else_is_left_out() -> None:
    with channels_are_cut_as_one(), mock.patch.object(find_heads, "head_cut", lambda m: recurrent_heads.head_cut(m)):
        source = CausalLM(build_model("qwen3_5", torch.float32))
    assert not source.head_cuts


def norms_count_as_complete() -> Any:
    """Each rank has the gradient of what its own heads make of a weight that all of them read."""
    return _with_rules(lambda rule: replace(rule, gradient="complete"))


def norms_are_of_a_rank() -> Any:
    right = own_heads.gated_norm

    def own(norm: Any, groups: int, rank: int, tp: int, group: Any, *given: Tensor) -> Tensor:
        return right(norm, groups, rank, tp, (), *given)

    return mock.patch.object(own_heads, "gated_norm", own)


def squares_have_the_gradient_of_a_rank() -> Any:
    right = own_heads.copy_to_ranks
    return mock.patch.object(own_heads, "copy_to_ranks", lambda x, group: x if x.shape[-1] == 1 else right(x, group))


def hidden_states_have_the_gradient_of_a_rank() -> Any:
    return mock.patch.object(own_heads, "copy_to_ranks", lambda x, group: x)


MUTANTS = [
    ("qwen3_5", channels_are_cut_as_one),
    ("qwen3_5", norms_count_as_complete),
    ("qwen3_next", hidden_states_have_the_gradient_of_a_rank),
    ("bamba", norms_are_of_a_rank),
    ("bamba", squares_have_the_gradient_of_a_rank),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("family", "mutant"), MUTANTS, ids=[f"{f}-{m.__name__}" for f, m in MUTANTS])
def test_what_trying_does_not_see_differs_from_one_process(family: str, mutant: Callable[[], Any]) -> None:
    """By the comparison of which the self-check consists."""
    data, model = uneven_data(97, [(6, 33), (12,)]), build_model(family, torch.float64)
    with mutant(), doubled():
        source = CausalLM(model)
    right = Plain(model, source.flow.draws, source.layers_path).outcome(data)
    with mutant():
        found = run_pipeline(source, place_pipeline(PipelineShape.parse("tp2"), 0, 4), data)
    assert compare(right, found).what is not None


@pytest.mark.drawn
def test_the_self_check_finds_what_trying_did_not() -> None:
    with channels_are_cut_as_one():
        result = check_strategies(build_model("qwen3_5", torch.float32), [StrategyShape.parse("tp2")], keep=False)
    (objection,) = result.objections()
    assert "tp2 trains otherwise" in objection


@pytest.mark.drawn
def test_the_self_check_proves_more_groups_than_ranks_and_fewer() -> None:
    """Its small copy has the model's groups, or as many as its heads can have."""
    config = hf_config("nemotron_h")
    config.n_groups = 8
    assert shrunk_config(config, 4, 1).n_groups == 8
    shapes = [StrategyShape.parse("tp4")]
    result = check_strategies(build_model("nemotron_h", torch.float32), shapes, keep=False)
    assert (result.objections(), result.no_slices) == ([], "")


def test_no_kernel_norms_a_part_of_a_group() -> None:
    """The kernel that fuses a whole layer takes the norm of what it is given."""
    source = CausalLM(build_model("bamba", torch.float32))
    called: list[str] = []
    for shape in ("tp1", "tp2"):
        fused = mock.patch.object(
            modeling_bamba, "mamba2_split_conv1d_scan_combined", lambda *_, shape=shape, **__: called.append(shape)
        )
        with fused:
            run_pipeline(source, place_pipeline(PipelineShape.parse(shape), 0, 4), uneven_data(97, [(9, 4)]))
    assert set(called) == {"tp1"}
