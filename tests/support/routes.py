"""Choices of experts that travel with the tokens, under many strategies, against one process whose routers make them.

The routers of the one process are written out here, and know no `topk`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hydra.testing import float64_throughout, run_ranks, whole_gradients
from tests.support.families import build_model, reference_model
from tests.support.post_training import (
    LOSSES,
    PER_RANK,
    RANKS,
    Layout,
    Planned,
    Scores,
    apart,
    engine_of,
    once_by,
    picked,
    rollouts,
    scores_of,
    share,
)  # fmt: skip
from tests.support.small_job import shared_source

EXPERTS, CHOSEN = 4, 2
SPREAD = (Layout("tp2ep2 + sp2ep2"), Layout("2*tp2ep2", recompute=True))  # whole experts
Off = Callable[[list[dict[str, Any]]], None]
Weigh = Callable[[Tensor, Tensor], Tensor]


class Row(NamedTuple):
    """One loss under one layout: the largest relative differences, and choices that came back otherwise."""

    family: str
    layout: str
    loss: str
    of_loss: float
    of_gradients: float
    of_log_probs: float
    choices_off: int  # of those that were given, and of those that the routers made by themselves


def _router(choose: Weigh, router: Any, chosen: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
    return logits, torch.stack([choose(logits[t], logits[t, own]) for t, own in enumerate(chosen)]), chosen


# What each of a token's experts counts, of its logits (experts,) and those of the experts that were chosen (chosen,).
WEIGHTS: dict[str, Weigh] = {
    "mixtral": lambda logits, own: own.exp() / own.exp().sum(),
    "qwen3_moe": lambda logits, own: own.exp() / logits.exp().sum(),
    "granite, experts": lambda logits, own: own.exp() / own.exp().sum(),
    "norms of queries and keys (GLM-4.5)": lambda logits, own: own.sigmoid() / (own.sigmoid().sum() + 1e-20),
}


def _routers(model: Any) -> list[Any]:
    return [module for module in model.modules() if re.search("TopK(Router|Gating)$", type(module).__name__, re.I)]


@contextlib.contextmanager
def choosing(model: Any, family: str, choices: Tensor) -> Iterator[None]:
    """Within it the routers of a plain model choose these experts (tokens, routers, chosen)."""
    for index, router in enumerate(_routers(model)):
        router.forward = partial(_router, WEIGHTS[family], router, choices[:, index])
    yield
    for router in _routers(model):
        del router.forward


def own_choices(model: Any, item: dict[str, Any]) -> Tensor:
    """What the routers of a plain model choose, (tokens, routers, chosen)."""
    found: list[Tensor] = []
    hooks = [router.register_forward_hook(lambda _, __, out: found.append(out[2])) for router in _routers(model)]
    model(input_ids=item["input_ids"][None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1)


def routed(items: list[dict[str, Any]], routers: int) -> list[dict[str, Any]]:
    """The items with experts that no router would choose by itself."""
    draw = torch.Generator().manual_seed(7)
    for item in items:
        scores = torch.rand(len(item["input_ids"]), routers, EXPERTS, generator=draw)
        item["routed_experts"] = scores.argsort(-1)[..., :CHOSEN]
    return items


class Known(NamedTuple):
    """What one process finds, of all items: by loss its number and gradients, and log-probabilities of the last; and
    what its routers choose by themselves."""

    losses: dict[str, tuple[float, dict[str, Tensor]]]
    log_probs: list[Tensor]
    choices: list[Tensor]


def known_of(model: Any, family: str, items: list[dict[str, Any]], losses: Sequence[str]) -> Known:
    """By plain torch."""
    found, log_probs = dict[str, tuple[float, dict[str, Tensor]]](), list[Tensor]()
    for name in losses:
        model.zero_grad()
        scores: list[Scores] = []
        for item in items:
            with choosing(model, family, item["routed_experts"]):
                scores.append(scores_of(model, item))
        loss = LOSSES[name].plain(items, scores)
        loss.backward()
        found[name] = float(loss.detach()), {n: one.grad.clone() for n, one in model.named_parameters()}
        log_probs = [one[0].detach() * (item["labels"] != -100) for one, item in zip(scores, items, strict=True)]
    with torch.no_grad():
        return Known(found, log_probs, [own_choices(model, item) for item in items])


def compare(
    family: str, layouts: Sequence[Layout], losses: Sequence[str] = ("PPO", "GSPO"), off: Off | None = None
) -> list[Row]:
    """A row for each layout and loss; `off` changes the items that the ranks get, and not those of one process."""
    model: Any = reference_model(family, torch.float64)
    items = routed(rollouts(), len(_routers(model)))
    spread = any("ep" in one.strategy for one in layouts)  # which ranks find by themselves
    shared = contextlib.nullcontext() if spread else shared_source(build_model(family, torch.float64))
    with float64_throughout(model), shared:
        known = known_of(model, family, items, losses)

        def on_ranks(rank: int) -> list[Row]:
            planned = Planned()
            engine = engine_of(rank, family, planned, layouts=layouts)
            begin = sum(PER_RANK[:rank])
            of_rank = slice(begin, begin + PER_RANK[rank])
            mine = known._replace(log_probs=known.log_probs[of_rank], choices=known.choices[of_rank])
            given, rows = [dict(item) for item in share(rank, items)], list[Row]()
            if off is not None:
                off(given)
            for planned.layout in layouts:
                rows += [_row(engine, planned, name, given, mine)._replace(family=family) for name in losses]
            return rows

        by_rank = run_ranks(on_ranks, RANKS, timeout=600)
    return [
        of[0]._replace(of_log_probs=max(one.of_log_probs for one in of), choices_off=sum(one.choices_off for one in of))
        for of in zip(*by_rank, strict=True)
    ]


def _row(engine: Any, planned: Planned, name: str, given: list[dict[str, Any]], known: Known) -> Row:
    """Of this rank."""
    compared, choices = LOSSES[name], [item["routed_experts"] for item in given]
    own = [one | {"routed_experts": of} for one, of in zip(picked(given, compared), choices, strict=True)]
    engine.forward_backward(own, compared.loss)
    told, gradients = engine.steps.parts.losses[0], whole_gradients(engine)
    engine.zero_grad()
    with once_by(engine, planned):
        log_probs, _, again = engine.log_probs(given, routed_experts=True)
        free = engine.log_probs([{"input_ids": item["input_ids"]} for item in given], routed_experts=True)
    wrong = sum(int((one != other).sum()) for one, other in zip(again, choices, strict=True))
    for one, other in zip(free.routed_experts, known.choices, strict=True):
        wrong += int((one.sort(-1)[0] != other.sort(-1)[0]).sum())
    of_log_probs = max([apart(a, b) for a, b in zip(known.log_probs, log_probs, strict=True)], default=0.0)
    right, by_name = known.losses[name]
    worst = max(apart(one, gradients[at]) for at, one in by_name.items()) if gradients else 0.0  # of the first rank
    return Row("", str(planned.layout), name, abs(told - right) / abs(right), worst, of_log_probs, wrong)
