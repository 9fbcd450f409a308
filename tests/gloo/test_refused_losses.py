"""Fields and losses that cannot be trained on: refused on all ranks with rank and item, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hydra.losses import DPO, GSPO, Distillation, dapo, grpo
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError
from tests.support.families import build_model
from tests.support.small_job import same, shared_source, small_engine, whole_state

Change = Callable[[dict[str, Any]], dict[str, Any]]


class Refusal(NamedTuple):
    """What rank 1 does to its second item, the loss, and the words that both ranks must be told."""

    name: str
    change: Change
    words: tuple[str, ...]
    loss: Any = dapo()
    arguments: dict[str, Any] = {}  # noqa: RUF012  (of forward_backward, on rank 1)


def _with(**columns: Any) -> Change:
    return lambda item: item | columns


def _without(name: str) -> Change:
    return lambda item: {key: value for key, value in item.items() if key != name}


def _same(item: dict[str, Any]) -> dict[str, Any]:
    return item


def _unnamed(item: dict[Any, Any]) -> dict[Any, Any]:
    return item | {7: 1.0}


def normalised(log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """A loss that looks at other tokens and does not say so."""
    return -(fields["advantages"] - fields["advantages"].mean()) * log_probs


def noisy(log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """A loss that draws."""
    return -torch.rand_like(log_probs) * log_probs


def averaged(log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """A loss that is no number for each token."""
    return -log_probs.mean()


def unreachable(log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """A loss without a gradient."""
    return -log_probs.detach()


ITEM = "item 1 of the data"
REFUSALS = (
    Refusal("field too short", _with(advantages=[0.5] * 5), ("rank 1", ITEM, "6 input_ids", "'advantages'", "(5,)")),
    Refusal("field with NaN", _with(advantages=[0.1, 0.2, float("nan"), 0, 0, 0]), ("rank 1", ITEM, "nan at token 2")),
    Refusal("infinite scalar", _with(advantages=float("inf")), ("rank 1", ITEM, "'advantages' holds inf")),
    Refusal("field of text", _with(source="web"), ("rank 1", ITEM, "source holds no numbers")),
    Refusal("field missing in an item", _without("old_log_probs"), ("rank 1", ITEM, "has the fields advantages,")),
    Refusal("field of one item", _with(margin=1.0), ("rank 1", ITEM, "margin")),
    Refusal("wider field", _with(advantages=[[1.0, 2.0]] * 6), ("rank 1", ITEM, "advantages (2 a token)")),
    Refusal("taken name", _with(num_targets=3), ("rank 1", ITEM, "'num_targets'", "rename it")),
    Refusal("a column without a name", _unnamed, ("rank 1", ITEM, "a column 7", "called by its name")),
    Refusal("mixes_tokens of text", _same, ("rank 1", "True or False, not 'no'"), dapo(), {"mixes_tokens": "no"}),
    Refusal("temperature of 0", _with(temperature=0.0), ("rank 1", ITEM, "temperature must be a positive number")),
    Refusal("temperature twice", _with(temperature=1.0), ("rank 1", ITEM, "as an argument too"), dapo(),
            {"temperature": 0.5}),
    Refusal("a loss that mixes tokens", _same, ("rank 0", "depends on others", "mixes_tokens=True"), normalised),
    Refusal("a loss that draws", _same, ("rank 0", "draws random numbers"), noisy),
    Refusal("a loss of all tokens", _same, ("rank 0", "returned ()"), averaged),
    Refusal("a loss without a gradient", _same, ("rank 0", "no gradient"), unreachable),
    Refusal("no loss", _same, ("rank 0", "but is a str"), "dapo"),
    Refusal("a field that the loss lacks", _same, ("reference_log_probs",), DPO()),
    Refusal("a field that a loss of tokens lacks", _same, ("rank 0", "KeyError: 'reference_log_probs'"), grpo()),
    Refusal("candidates that are not there", _same, ("rank 0", "'teacher_ids'"), Distillation()),
    Refusal("normaliser of 0", _same, ("rank 1", "normaliser must be a positive number"), dapo(), {"normaliser": 0}),
    Refusal("another normaliser", _same, ("rank 0 asked for", "rank 1 for", "over 7.0"), dapo(), {"normaliser": 7}),
    Refusal("too short a sequence", _with(input_ids=[5], advantages=0.0, old_log_probs=0.0),
            ("rank 1", "1 of fewer than two tokens"), GSPO()),
)  # fmt: skip


def items(rank: int) -> list[dict[str, Any]]:
    """Three of each rank, all alike but for their tokens."""
    return [
        {"input_ids": [5 + rank, 6, 7 + number, 8, 9, 10], "advantages": [0.0, 0.1, -0.2, 0.3, 0.5 * number, 1.0],
         "old_log_probs": [-4.0] * 6}
        for number in range(3)
    ]  # fmt: skip


def test_what_cannot_be_trained_on_is_refused_on_all_ranks_and_nothing_changes() -> None:
    """One case after the other, with gradients of an earlier call waiting."""
    with shared_source(build_model("llama", torch.float32)):
        by_rank = run_ranks(_on_rank, 2, timeout=300)
    cases = [(case.name, case.words) for case in REFUSALS]
    cases += [(name, ("1 forward_backward() calls wait",)) for name in ("a checkpoint", "a whole step")]
    for (name, words), ((told, unchanged), (other, also)) in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert told == other, name
        assert unchanged and also, name  # noqa: PT018
        assert all(one in told for one in words), (name, told)


def _on_rank(rank: int) -> list[tuple[str, bool]]:
    engine = small_engine(rank, model=build_model("llama", torch.float32), data=None, strategies=["2*tp1", "tp2"])
    engine.forward_backward(items(rank), dapo())
    before, found = _state(engine), []
    for case in REFUSALS:
        own = items(rank)
        if rank == 1:
            own[1] = case.change(own[1])
        given = partial(engine.forward_backward, own, case.loss, **(case.arguments if rank == 1 else {}))
        found.append((_told(given), same(before, _state(engine)) and engine.steps.parts.count == 1))
    for call in (lambda: engine.save_checkpoint("nowhere"), lambda: engine.train_batch(items(rank))):
        found.append((_told(call), same(before, _state(engine))))
    engine.optimizer_step()
    assert not same(before, _state(engine)), "the step that was waiting moves the parameters"
    return found


def _told(call: Callable[[], Any]) -> str:
    try:
        call()
    except (CheckpointError, ConfigError, KeyError) as error:  # of the loss itself: it stays what it is
        return str(error)
    return "done"


def _state(engine: Any) -> dict[str, Tensor]:
    """Masters, moments and gradients."""
    masters = engine.crew.masters.trained
    gradients = masters.gather_full(engine.crew.world.group, source=masters.grads)
    return whole_state(engine) | {f"{name}/grad": value for name, value in gradients.items()}
