"""The load balancing loss of routers: transformers' own for one sequence, found or refused, and checked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ds_hydra.pipe.models import balancing
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.router_loss import Routed, balanced, totals_of
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.verdicts import CheckResult
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.families import BALANCED, build_model

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
    ("tp1", balancing.Routers, "take", lambda self: None, "the loss is"),
    ("tp1", balancing.Balancing, "loss", losses_of_all_layers, " off"),
    ("tp1", balancing.Balancing, "loss_of_all_together", lambda self, logits: 0.0 * logits[0].sum(), "loss of its own"),
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
    with mock.patch.object(balancing._Counted, name, mistake):
        assert "with a sequence in slices" in checked("tp1").no_slices
