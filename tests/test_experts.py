"""Experts: whole ones spread over the ranks of a stage, and the load balancing loss of routers."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.memory import JobMemory
from ds_hydra.costs.shape_costs import of_one_kind, spreading_rows
from ds_hydra.engine.costs import model_fingerprint
from ds_hydra.engine.job import Job, spread_where_cheaper
from ds_hydra.pipe import expert_parallel
from ds_hydra.pipe.expert_parallel import Routed, _own_experts, balanced, totals_of
from ds_hydra.pipe.models import experts
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.experts import find_experts, for_strategies
from ds_hydra.pipe.models.refusals import refuse_misaligned_experts
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.pipe.stage import StageModule
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.plan.layouts import feasible_schemes
from ds_hydra.profiling.stage_memory import kept_bytes, measure_activations
from ds_hydra.profiling.stage_timer import StageTimer
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.verdicts import CheckResult
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.checks import check, strategies
from tests.support.families import BALANCED, build_model
from tests.support.mutants import gradients_of_other_ranks_are_dropped
from tests.support.tiny_families import class_names, tiny_model


# --- Whole experts spread over the ranks of a stage: their values and gradients, who is refused, and what is
# found out.
@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def experts_of(family: str, implementation: str) -> Any:
    """A layer's stacks of four experts, in FP32, which all implementations know."""
    model = build_model(family, torch.float32)
    model.config._experts_implementation = implementation
    return model.model.layers[0].mlp.experts


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("chosen", ["all", "few", "one"])
def test_parts_of_two_ranks_add_up_to_all_experts(family: str, implementation: str, chosen: str) -> None:
    """Also where one rank's experts are chosen by no token; every parameter has a gradient on each."""
    generator = torch.Generator().manual_seed(2)
    rows, width = torch.randn((9, 64), generator=generator), {"all": 4, "few": 3, "one": 1}[chosen]
    index = torch.stack([torch.randperm(width, generator=generator)[: min(2, width)] for _ in range(9)])
    weights = torch.rand(index.shape, generator=generator)
    asked = torch.randn((9, 64), generator=generator)

    def run(forward: Callable[..., Tensor], module: Any) -> list[Tensor]:
        hidden, of = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        out = forward(hidden, index, of)
        parameters = [parameter for _, parameter in sorted(module.named_parameters())]
        return [out.detach(), *torch.autograd.grad(out, [hidden, of, *parameters], asked)]

    whole = experts_of(family, implementation)
    expected = run(whole.forward, whole)
    parts = []
    for first in (0, 2):
        half = experts_of(family, implementation)
        half.num_experts = 2
        for name, parameter in list(half._parameters.items()):
            half._parameters[name] = torch.nn.Parameter(parameter.detach()[first : first + 2].clone())
        forward = half.forward
        parts.append(run(lambda *given, f=first, own=forward: _own_experts(own, f, 2, *given), half))
    for place, right in enumerate(expected):
        one, other = (part[place] for part in parts)
        found = one + other if place < 3 else torch.cat([one, other])
        assert (found - right).abs().max() <= 1e-5 * right.abs().max().clamp(min=1.0), place


FAMILIES = ("qwen3_moe", "gpt_oss", "mixtral, balanced")


@pytest.mark.drawn
@pytest.mark.parametrize("family", FAMILIES)
def test_they_train_as_one_process_does(family: str) -> None:
    asked = strategies("tp2ep2pp2/v", "tp4ep4", "sp4ep4", "tp2sp2ep4pp2", "tp2sp2ep2")
    result = check(build_model(family, torch.float64), *map(str, asked), keep=False)
    assert result.objections() == []
    assert result.usable(asked) == tuple(asked)


def a_token_is_dropped() -> Any:
    """Each rank leaves out the last of the tokens that chose one of its experts, as where an expert is full."""

    def dropping(
        forward: Any, first: int, count: int, hidden: Tensor, chosen: Tensor, *rest: Any, **more: Any
    ) -> Tensor:
        kept = chosen.clone()
        own = ((chosen >= first) & (chosen < first + count)).nonzero()
        if len(own) > 1:
            kept[tuple(own[-1])] = -1
        return _own_experts(forward, first, count, hidden, kept, *rest, **more)

    return mock.patch.object(expert_parallel, "_own_experts", dropping)


@contextlib.contextmanager
def an_experts_gradient_counts_twice() -> Iterator[None]:
    original = StageModule.install

    def install(self: StageModule, slot: Any, buffer: Tensor) -> Any:
        new = slot.param.name not in self.parameters
        parameter = original(self, slot, buffer)
        if new and slot.param.rule.by_width is not None and self.place.stage.ep > 1:
            parameter.register_hook(lambda gradient: 2 * gradient)
        return parameter

    with mock.patch.object(StageModule, "install", install):
        yield


def weights_of_routes_have_a_ranks_gradient() -> Any:
    """What the router's weights are multiplied by on other ranks does not reach the router."""
    return mock.patch("ds_hydra.pipe.tensor_parallel.copy_to_ranks", lambda x, group: x)


def _given_others(change: Callable[..., tuple[int, Tensor, Tensor]]) -> Any:
    """Own experts are handed another first one, other experts of tokens, or other weights of these."""

    def other(forward: Any, first: int, count: int, hidden: Tensor, chosen: Tensor, gates: Tensor, **_: Any) -> Tensor:
        first, chosen, gates = change(first, count, chosen, gates)
        return _own_experts(forward, first, count, hidden, chosen, gates)

    return mock.patch.object(expert_parallel, "_own_experts", other)


def ranks_of_two_groups_are_mixed() -> Any:
    """A rank answers for the experts that its neighbour holds."""
    return _given_others(lambda first, count, chosen, gates: (first ^ count, chosen, gates))


def gates_are_not_scaled() -> Any:
    return _given_others(lambda first, count, chosen, gates: (first, chosen, torch.ones_like(gates)))


def routing_is_another_when_computed_again() -> Any:
    """In a backward, tokens go where those before them went."""

    def change(first: int, count: int, chosen: Tensor, gates: Tensor) -> tuple[int, Tensor, Tensor]:
        again = torch._C._current_graph_task_id() != -1
        return first, chosen.roll(1, 0) if again else chosen, gates

    return _given_others(change)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("mutant", "text", "told"),
    [
        (ranks_of_two_groups_are_mixed, "tp2ep2", "the loss is .* off"),
        (ranks_of_two_groups_are_mixed, "tp2sp2ep4", "the loss is .* off"),
        (gates_are_not_scaled, "sp2ep2", "the loss is .* off"),
        (routing_is_another_when_computed_again, "tp2ep2", "."),
        (a_token_is_dropped, "tp2ep2", r"the loss is .* off, and model\.layers\.\d+\.mlp\S* is the first module"),
        (a_token_is_dropped, "sp2ep2", "the loss is .* off"),
        (an_experts_gradient_counts_twice, "tp2ep2", r"the gradient of \S*experts\.\S+ is"),
        (an_experts_gradient_counts_twice, "tp2sp2ep4", r"the gradient of \S*experts\.\S+ is"),
        (gradients_of_other_ranks_are_dropped, "sp2ep2", "the gradient of"),
        (weights_of_routes_have_a_ranks_gradient, "tp2ep2", "the gradient of"),
    ],
)
def test_what_would_train_otherwise_is_refused_before_step_0(mutant: Any, text: str, told: str) -> None:
    with mutant():
        (objection,) = check(build_model("qwen3_moe", torch.float32), text, "pp2", keep=False).objections()
    assert re.search(rf"{text} trains otherwise .*{told}.*take ep out of hydra\.strategies", objection)


def planned(family: str, *texts: str) -> CausalLM:
    return for_strategies(CausalLM(build_model(family, torch.float32)), strategies(*texts))


@pytest.mark.parametrize(
    ("family", "texts", "told"),
    [
        ("qwen3_moe, balanced", ["tp4ep4"], r"ep=4 does not divide the model's 6 experts, .*use an ep of 2, 3, 6"),
        ("llama", ["tp2ep2"], "ep=2: LlamaForCausalLM has no experts to spread; use strategies without ep"),
        ("qwen3_moe", ["tp2ep2 + tp2"], "tp2 cuts experts by width, .* write tp2ep2 in its place"),
        ("qwen3_moe", ["2*tp2", "tp2sp2ep2"], "tp2 cuts experts by width, .* write tp2ep2 in its place"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_their_numbers(family: str, texts: list[str], told: str) -> None:
    plan, shape = planned(family, *texts).plan, strategies(*texts)[0]
    with pytest.raises(PlanError, match=told):
        plan.check(place_strategy(shape, shape.num_ranks, plan.num_layers))


def test_a_job_that_cuts_by_width_runs_no_strategy_that_does_not() -> None:
    plan, (shape,) = planned("qwen3_moe", "tp2").plan, strategies("tp2ep2")
    with pytest.raises(PlanError, match="ep=2: the job is set up for experts that are cut by width"):
        plan.check(place_strategy(shape, 2, plan.num_layers))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("JetMoeForCausalLM", r"JetMoeForCausalLM publishes no plan \(ep_plan\) of stacks of whole experts"),
        ("DbrxForCausalLM", "DbrxForCausalLM publishes no plan"),
        ("Llama4ForCausalLM", "Llama4ForCausalLM publishes no plan"),
        ("LongcatFlashForCausalLM", "LongcatFlashForCausalLM publishes no plan"),
    ],
)
def test_families_whose_experts_cannot_be_spread_are_told(name: str, told: str) -> None:
    assert re.search(told, find_experts(tiny_model(name, class_names()[name])).obstacle)


def test_experts_of_a_stage_are_whole_and_one_interval_of_the_masters() -> None:
    plan = planned("qwen3_moe", "tp2sp2ep4").plan
    (shape,) = strategies("tp2sp2ep4")
    strategy = place_strategy(shape, 4, plan.num_layers)
    bucket = next(bucket for bucket in plan.buckets if bucket.name == "layers.1")
    for holder in range(4):
        shapes = {s.param.name.rpartition(".")[2]: s.shape for s in plan.slots(bucket, strategy.stage_of(0), holder)}
        assert shapes["gate_up_proj"] == (1, 96, 64), "one of four, as wide as it is"
        assert shapes["down_proj"] == (1, 64, 48)
    stacks = [param for param in bucket.params if "experts" in param.name]
    assert [list(p.shard_intervals(1, 4)) for p in stacks] == [[(p.numel // 4, p.numel // 2)] for p in stacks]
    assert model_fingerprint(plan) == model_fingerprint(planned("qwen3_moe", "tp2").plan), "a cost table is for both"


def test_a_table_of_experts_that_are_cut_by_width_prices_whole_ones() -> None:
    table = CostTable(
        (SchemeCost(ParallelScheme(2, 2), 1e-6, 0.2, 1.0, 100), SchemeCost(ParallelScheme(), 1e-6, 0.1, 1.0, 9))
    )
    asked = [ParallelScheme(2, 2, 1, 2), ParallelScheme(4, 1, 1, 4), ParallelScheme()]
    found = spreading_rows(table, asked)
    assert [str(cost.scheme) for cost in found.costs] == ["tp2pp2", "tp1", "tp2pp2ep2"]
    assert (found[asked[0]].b, found[asked[0]].derived) == (0.2, "that of tp2pp2")
    assert spreading_rows(found, asked) is found


def test_memory_is_planned_for_the_busiest_rank() -> None:
    """What a layer keeps where all tokens choose a rank's experts is predicted from what it keeps with others."""
    source, tokens = planned("qwen3_moe", "tp2ep2"), 256
    kept = measure_activations(source, 2, 1, torch.device("cpu"), torch.float32, tokens)
    assert 0 < kept.experts < kept.layer

    def to_own(forward: Any, first: int, count: int, hidden: Tensor, chosen: Tensor, *rest: Any, **more: Any) -> Tensor:
        return _own_experts(forward, first, count, hidden, first + chosen % count, *rest, **more)

    with mock.patch.object(expert_parallel, "_own_experts", to_own):
        timer = StageTimer(source, ParallelScheme(2, 3, 1, 2), 1, torch.device("cpu"), torch.float32)
        found = kept_bytes(timer, (tokens,)) / tokens / timer.place.stage.num_layers
    assert found == pytest.approx(kept.routed(2.0).layer, rel=0.01)
    assert kept.routed(2.0).layer > 1.1 * kept.layer
    for scheme in (ParallelScheme(2, 1, 1, 2), ParallelScheme(2)):
        jobs = [JobMemory(source.plan, 2, {(2, 1): kept}, 4, vocab=97, expert_imbalance=x) for x in (1.0, 1.5, 2.0)]
        even, usual, all_on_one = (job.needs(scheme, 0).per_token for job in jobs)
        assert (even < usual < all_on_one) is (scheme.ep > 1)


def _row(text: str, b: float) -> SchemeCost:
    return SchemeCost(ParallelScheme.parse(text), 1e-6, b, 1.0, 100)


def test_proposals_spread_experts_where_that_was_measured_to_be_no_slower(tmp_path: Path) -> None:
    source = CausalLM(build_model("experts for eight", torch.float32))
    by_width = CostTable((_row("tp1", 0.3), _row("tp2", 0.2), _row("sp2", 0.2), _row("tp4", 0.1)))
    slower = replace(by_width, costs=(*by_width.costs, _row("tp2ep2", 0.3), _row("tp4ep4", 0.1)))
    faster = replace(by_width, costs=(*by_width.costs, _row("tp2ep2", 0.1), _row("tp4ep4", 0.11), _row("sp2ep2", 0.1)))
    for name, table, spread in (("slower", slower, False), ("faster", faster, True), ("alone", by_width, False)):
        TableFile(table).save(path := tmp_path / f"{name}.json")
        config = HydraConfig(tokens_per_step=100, cost_table=str(path))
        job = Job(config, source, None, mock.Mock(), None, None, mock.Mock(), 0.0)
        plan = spread_where_cheaper(job).source.plan
        assert bool(plan.experts) is spread, name
        rows = of_one_kind(table, feasible_schemes(plan, 4, 4))
        for cost in rows.costs:
            (shape,) = strategies(str(cost.scheme))
            plan.check(place_strategy(shape, shape.num_ranks, plan.num_layers))
        for fixed in (
            replace(job, config=replace(config, strategies=("tp2",))), replace(job, pre_step=mock.Mock()),
            replace(job, source=CausalLM(build_model("mixtral", torch.float32))),
        ):  # fmt: skip
            assert spread_where_cheaper(fixed).source is fixed.source


def test_rows_of_whole_experts_that_a_table_lacks_are_derived() -> None:
    table = CostTable((_row("tp1", 0.3), _row("tp2", 0.2), _row("tp4", 0.1)))
    schemes = feasible_schemes(planned("experts for eight", "tp2ep2").plan, 4, 4)
    found = {str(cost.scheme): cost.derived for cost in of_one_kind(table, schemes).costs}
    assert found["tp4ep4"] == "that of tp4"
    assert "tp4" not in found


def test_schemes_of_a_plan_are_of_one_kind() -> None:
    by_width, whole = (feasible_schemes(planned("qwen3_moe", text).plan, 4, 4) for text in ("tp2", "tp2ep2"))
    assert {scheme.ep for scheme in by_width} == {1}
    assert {str(scheme) for scheme in whole if scheme.pp == 1} == {
        "tp1", "sp2", "sp2ep2", "sp4", "sp4ep4", "tp2ep2", "tp2sp2ep2", "tp2sp2ep4", "tp4ep4"
    }  # fmt: skip


def test_a_width_that_products_cannot_take_names_ep() -> None:
    model = build_model("qwen3_moe", torch.float32)
    model.config._experts_implementation = "grouped_mm"
    by_width, whole = planned("qwen3_moe", "tp4").specs.values(), planned("qwen3_moe", "tp4ep4").specs.values()
    with pytest.raises(
        ConfigError, match=r"tp=4 leaves of .* use another tp, write tp4ep4, which leaves whole experts"
    ):
        refuse_misaligned_experts(model, by_width, 4, torch.bfloat16)
    refuse_misaligned_experts(model, whole, 4, torch.bfloat16)


def test_text_of_schemes_in_a_strategy() -> None:
    (pipeline,) = StrategyShape.parse("tp2sp4ep8").pipelines
    assert pipeline.scheme == ParallelScheme(2, 1, 4, 8)
    strategy = place_strategy(StrategyShape((pipeline,)), 8, 2)
    assert [strategy.stage_of(rank).holder(rank) for rank in range(8)] == list(range(8))


# --- The load balancing loss of routers: transformers' own for one sequence, found or refused, and checked.
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def small(model_type: str, layers: int = 1, **more: Any) -> Any:
    settings = BALANCED["mixtral, balanced"][1] | EXPERTS | {"num_hidden_layers": layers, "head_dim": 8} | more
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))


@pytest.mark.drawn
@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe"])
def test_of_one_layer_and_one_sequence_it_is_what_transformers_adds(model_type: str) -> None:
    model = small(model_type).eval()
    found = CausalLM(model).balancing
    assert found is not None
    assert model.config.output_router_logits, "only the copy's config was changed"
    tokens = torch.randint(3, 97, (1, 37))
    with torch.no_grad():
        out = model(input_ids=tokens, labels=tokens)
        plain = model(input_ids=tokens, labels=tokens, output_router_logits=False)
    assert found.coefficient * out.aux_loss > 0.1
    assert found.is_models_own
    torch.testing.assert_close(found.loss(out.router_logits), out.loss - plain.loss, rtol=1e-5, atol=1e-6)


def test_of_more_layers_it_is_the_mean_of_each_ones() -> None:
    model = small("mixtral", 3)
    found = CausalLM(model).balancing
    assert found is not None
    assert list(found.routers) == [f"model.layers.{i}.mlp.gate" for i in range(3)]
    logits = tuple(torch.randn(11, 4) for _ in range(3))
    each = [found.loss((of_one,)) for of_one in logits]
    torch.testing.assert_close(found.loss(logits), torch.stack(each).mean())
    assert not torch.isclose(found.loss(logits), found.loss_of_all_together(logits), rtol=1e-3)
    (told,) = CausalLM(model).notes
    assert "of the 3 routers is that of each layer by itself" in told
    torch.testing.assert_close(found.loss_of_all_together(logits[:1]), each[0])


def test_the_gradient_is_that_of_transformers_function() -> None:
    """Two sequences of 5 and 8 tokens, which count 0.3 and 0.7, beside outputs with gradients of their own."""
    own = sys.modules["transformers.models.mixtral.modeling_mixtral"].load_balancing_loss_func
    logits = torch.randn(13, 4, requires_grad=True)
    lengths, counts = torch.tensor([5, 8]), torch.tensor([0.3, 0.7])
    sequence = torch.arange(2).repeat_interleave(lengths)
    expected = sum(c * own((part,), 4, 2) for c, part in zip(counts, logits.split([5, 8]), strict=True))
    scores = logits.sin()
    (aim,) = torch.autograd.grad(expected + scores.sum(), logits)
    totals = totals_of(logits, sequence, 2, 2)
    routed = Routed(sequence, 4 * counts / lengths**2, lambda: totals[:, :4])
    passed, through = balanced(routed, logits, (logits.sin(), logits))
    assert torch.equal(passed, scores)
    assert torch.equal(through, logits)
    passed.mul_(1.0)  # in place, as models do with what a router returns
    (gradient,) = torch.autograd.grad(passed.sum(), logits)
    torch.testing.assert_close(gradient, aim)


def another_kind(*_: Any) -> Tensor:
    return torch.tensor(1.5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: setattr(model, "router_aux_loss_coef", None), "no load balancing loss that ds_hydra knows"),
        (lambda model: setattr(model, "num_experts_per_tok", "two"), "no load balancing loss that ds_hydra knows"),
        (lambda model: setattr(model.model.layers[2], "mlp", model.model.layers[0].mlp), "told apart by module"),
    ],
)
def test_what_no_rule_fits_is_refused(change: Callable[[Any], None], words: str) -> None:
    model = small("mixtral", 3)
    change(model)
    with pytest.raises(ConfigError, match=words + ".*set output_router_logits to false"):
        CausalLM(model)


def test_a_loss_of_another_kind_is_refused() -> None:
    module = sys.modules["transformers.models.mixtral.modeling_mixtral"]
    with (
        mock.patch.object(module, "load_balancing_loss_func", another_kind),
        pytest.raises(ConfigError, match=r"of another kind: 1\.5 for logits whose loss is"),
    ):
        CausalLM(small("mixtral"))


def test_without_a_coefficient_there_is_none() -> None:
    source = CausalLM(small("mixtral", router_aux_loss_coef=0.0))
    assert source.balancing is None
    assert not source.balances


def checked(*strategies: str) -> CheckResult:
    """The self-check of strategies for a model whose routers have a loss."""
    model = build_model("mixtral, balanced", torch.float32)
    return check_strategies(
        model, [*map(StrategyShape.parse, strategies)], StageOptions(token_sharding=True), keep=False
    )


@pytest.mark.drawn
def test_the_self_check_proves_it() -> None:
    found = checked("tp2pp2", "sp2", "tp2sp2", "pp2/v")
    assert found.objections() == []
    assert found.no_slices == ""


def forget_slices(self: Any) -> Tensor:
    return self._counts


def each_slice_alone(self: Any) -> Tensor:
    return (self._counts * self._probabilities).sum(dim=-1)


def losses_of_all_layers(self: Any, logits: tuple[Tensor, ...]) -> Tensor:
    return self.loss_of_all_together(logits)


MISTAKES: list[tuple[str, Any, str, Any, str]] = [
    ("sp2", dist, "all_reduce", lambda *_, **__: None, " off"),
    ("tp1", experts.Routers, "take", lambda self: None, "the loss is"),
    ("tp1", experts.Balancing, "loss", losses_of_all_layers, " off"),
    ("tp1", experts.Balancing, "loss_of_all_together", lambda self, logits: 0.0 * logits[0].sum(), "loss of its own"),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("strategy", "owner", "name", "mistake", "words"), MISTAKES)
def test_the_self_check_finds_mistakes(strategy: str, owner: Any, name: str, mistake: Any, words: str) -> None:
    with mock.patch.object(owner, name, mistake):
        (objection,) = checked(strategy).objections()
    assert words in objection


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "mistake"), [("counts", forget_slices), ("products", each_slice_alone)])
def test_it_finds_mistakes_in_slices(name: str, mistake: Any) -> None:
    with mock.patch.object(experts._Counted, name, mistake):
        assert "with a sequence in slices" in checked("tp1").no_slices
