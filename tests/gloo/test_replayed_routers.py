"""Choices of experts that are given to routers on ranks, and those that routers make by themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from torch import nn

from ds_hydra.losses import dapo
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.experts import find_routing
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.families import build_model
from tests.support.small_job import refused_calls, shared_source, small_engine
from tools import aims
from tools.post_training import routes
from tools.post_training.equality import LAYOUTS
from tools.post_training.rollouts import rollouts, share

MIXTRAL = "mixtral"


def worst(rows: list[routes.Row]) -> float:
    return max(max(row.of_loss, row.of_gradients, row.of_log_probs) for row in rows)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        (MIXTRAL, (LAYOUTS[5], LAYOUTS[7])),
        (MIXTRAL, routes.SPREAD[:1]),
        ("norms of queries and keys (GLM-4.5)", LAYOUTS[1:2]),
        pytest.param("granite, experts", LAYOUTS[4:5], marks=pytest.mark.long),  # a hybrid
    ],
)
def test_experts_that_are_given_are_those_of_one_process(family: str, layouts: tuple[Any, ...]) -> None:
    rows = routes.compare(family, layouts)
    assert worst(rows) <= aims.POST_TRAINING, rows
    assert not any(row.choices_off for row in rows), rows


@pytest.mark.drawn
def test_one_expert_of_one_token_is_felt() -> None:
    def off(items: list[dict[str, Any]]) -> None:
        if len(items) == routes.PER_RANK[2]:
            choices = items[3]["routed_experts"]
            items[3]["routed_experts"] = choices.clone()
            items[3]["routed_experts"][5, 2, 0] = next(e for e in range(4) if e not in choices[5, 2].tolist())

    rows = routes.compare(MIXTRAL, LAYOUTS[3:4], ["PPO"], off)
    assert rows[0].of_gradients > 1e-5, rows
    assert not rows[0].choices_off, "what is given is what is used"


def changed(change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changes(item: dict[str, Any]) -> dict[str, Any]:
        choices = item["routed_experts"].clone()
        found = change(choices)
        return item | {"routed_experts": choices if found is None else found}

    return changes


def put(expert: int) -> Callable[[torch.Tensor], None]:
    return lambda choices: choices.__setitem__((2, 1, 0), expert)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "a router missing": (changed(lambda choices: choices[:, :3]), "4 routers and 2 experts of a token"),
    "too many experts": (changed(lambda choices: torch.cat((choices, choices), dim=2)), "2 experts of a token"),
    "a token missing": (changed(lambda choices: choices[1:]), "it is to have whole numbers of the shape"),
    "numbers": (changed(lambda choices: choices.double()), "and the type float64"),
    "an expert too high": (changed(put(4)), "at token 2 routed_experts names the expert 4 of model.layers.1.mlp.gate"),
    "a negative one": (changed(put(-1)), "names the expert -1 of model.layers.1.mlp.gate (0 to 3), which there is not"),
    "one twice": (changed(lambda choices: choices.__setitem__((2, 1, 0), choices[2, 1, 1])), "(0 to 3), twice"),
    "none": (lambda item: {name: item[name] for name in item if name != "routed_experts"}, "the same fields"),
}


def test_choices_that_cannot_be_used_are_refused_on_all_ranks_and_nothing_changes() -> None:
    def on_rank(rank: int) -> tuple[list[str], bool]:
        model = build_model(MIXTRAL, torch.float32)
        engine = small_engine(rank, model=model, data=None, strategies=["tp2", "2*tp1"])
        own = [{name: item[name] for name in ("input_ids", "labels", "advantages", "routed_experts")}
               for item in share(rank, routes.routed(rollouts(count=4), 4), (2, 2))]  # fmt: skip
        calls: list[Callable[[], Any]] = []
        for change, _ in REFUSED.values():
            given = [own[0], change(own[1]) if rank == 1 else own[1]]
            calls += [partial(engine.forward_backward, given, dapo()), partial(engine.log_probs, given)]
        return refused_calls(engine, calls, lambda: engine.forward_backward(own, dapo()))

    with shared_source(build_model(MIXTRAL, torch.float32)):
        (told, right), (others, also) = run_ranks(on_rank, 2, timeout=120)
    assert right
    assert also
    assert told == others
    for number, (name, (_, words)) in enumerate(REFUSED.items()):
        for text in told[2 * number : 2 * number + 2]:
            assert words in text, (name, text)
            assert "rank 1" in text, (name, text)


class Sorting(nn.Module):
    """A router that finds its experts by sorting, and asks for the largest in vain."""

    def __init__(self, router: Any, *, asks: bool) -> None:
        super().__init__()
        self.weight, self.asks = router.weight, asks

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        if self.asks:
            torch.topk(logits, 2, dim=-1)
        chosen = logits.argsort(dim=-1, descending=True)[:, :2]
        return logits, logits.gather(-1, chosen).softmax(-1), chosen


@pytest.mark.parametrize(
    ("asks", "words"),
    [(False, r"model\.layers\.2\.mlp of Mixtral.* chooses its experts otherwise: .*by torch\.topk"),
     (True, r"model\.layers\.2\.mlp\.gate \(Sorting\) does not choose its experts by the torch\.topk")],
)  # fmt: skip
def test_routers_that_choose_otherwise_are_refused_by_name(asks: bool, words: str) -> None:
    model = build_model(MIXTRAL, torch.float32)
    model.model.layers[2].mlp.gate = Sorting(model.model.layers[2].mlp.gate, asks=asks)
    with pytest.raises(ConfigError, match=words):
        find_routing(CausalLM(model, by_one_rank=True))


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no routers: .*by torch\.topk"):
        find_routing(CausalLM(build_model("llama", torch.float32), by_one_rank=True))
