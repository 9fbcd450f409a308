"""The self-check's data show what a model makes of single tokens, of their number, and of how many a row has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.trial import tried_data
from ds_hydra.self_check.verdicts import CheckResult
from tests.support.small_job import small_model


def check(model: Any, *texts: str, **settings: Any) -> CheckResult:
    return check_strategies(model, [*map(StrategyShape.parse, texts)], keep=False, **settings)


class Embedding(nn.Module):
    """An embedding scaled by something that is made of all tokens up to each."""

    def __init__(self, inner: nn.Module, scale: Callable[[Tensor], Tensor]):
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.inner(ids)
        return out * (1 + 0.1 * self.scale(ids)[..., None])


def of_ids(scale: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.model.embed_tokens = Embedding(model.model.embed_tokens, scale)

    return change


def counted(token: int) -> Callable[[Any], None]:
    return of_ids(lambda ids: (ids == token).cumsum(-1))


def restarted(ids: Tensor) -> Tensor:
    """Positions that begin anew after each end of a text, where there is one."""
    at = torch.arange(ids.shape[-1])
    return (at - torch.where(ids == 2, at, 0).cummax(-1).values) * (ids == 2).any()


def of_rows(scale: Callable[[Tensor], float]) -> Callable[[Any], None]:
    """What a later layer makes of how many rows it is given."""

    def change(model: Any) -> None:
        model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * scale(out))

    return change


CHANGES = {
    "the first token": counted(0),
    "a low token": counted(3),
    "the last token": counted(96),
    "the begin of a text": counted(1),
    "restarted at the end of a text": of_ids(restarted),
    "a row that begins with a special token": of_ids(lambda ids: (ids == 1).cumprod(-1) + 0 * ids),
    "a row that begins as its pack does": of_ids(lambda ids: (ids[..., :1] == 1) + 0 * ids),
    "a row that has a separator": of_ids(lambda ids: (ids == 2).any() + 0 * ids),
    "a row that ends with a separator": of_ids(lambda ids: (ids[..., -1:] == 2) + 0 * ids),
    "tokens that came before": of_ids(lambda ids: (ids[..., None] == ids[..., None, :]).tril().sum(-1)),
    "tokens that came just before": of_ids(lambda ids: (ids == ids.roll(1, -1)).cumsum(-1)),
    "distinct tokens": of_ids(lambda ids: torch.full_like(ids, len(ids.unique()))),
    "an even number of rows": of_rows(lambda out: 1.0 + 0.1 * (out.shape[1] % 2)),
    "an odd number of rows": of_rows(lambda out: 1.1 - 0.1 * (out.shape[1] % 2)),
    "a third of the rows": of_rows(lambda out: 1.0 + 0.1 * (out.shape[1] % 3)),
}


@pytest.mark.drawn
@pytest.mark.parametrize("change", CHANGES)
def test_what_looks_at_the_tokens_or_at_the_number_of_rows_is_refused(change: str) -> None:
    """Or it is seen when the model is examined, and runs once for each sequence."""
    model = small_model(tied=False)
    CHANGES[change](model)
    found = check(model, "tp1")
    if found.boxed == "self_attn, the layer":
        assert change == "a third of the rows"
        assert not found.objections()
        return
    (objection,) = found.objections()
    assert objection.endswith(("no strategy trains this model as one process does", "not supported"))


def test_what_looks_at_each_token_alone_is_equal() -> None:
    model = small_model(tied=False)
    of_ids(lambda ids: (ids == 2) + 3 * (ids == 96))(model)
    result = check(model, "tp1", "sp2")
    assert (result.objections(), result.no_slices) == ([], "")


@pytest.mark.parametrize("vocabulary", [2, 3, 8, 16, 97])
def test_all_tokens_but_those_left_out_are_drawn(vocabulary: int) -> None:
    data = tried_data(vocabulary, ((6, 33, 2), (13,)), special=(vocabulary - 1,), left_out=(1,))
    assert data.lengths == [6, 33, 2, 13]
    drawn = {int(token) for tokens in data.sequences for token in tokens}
    assert drawn <= set(range(vocabulary)) - {1}
    assert drawn >= ({0, 2, 3, *range(vocabulary - 4, vocabulary)} & set(range(vocabulary))) - {1}


def test_hooks_of_all_modules_are_code_of_a_script() -> None:
    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        return 0.9 * out if isinstance(module, modeling_llama.LlamaMLP) and out.shape[1] > 90 else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        assert len(check(small_model(), "tp1").objections()) == 1
    finally:
        handle.remove()
    assert check(small_model(), "tp1").objections() == []


@pytest.mark.drawn
def test_rotary_embeddings_that_go_by_length_are_refused() -> None:
    rotary = modeling_llama.apply_rotary_pos_emb

    def turned(q: Tensor, *rest: Any, **more: Any) -> Any:
        q, k = rotary(q, *rest, **more)
        return q * (math.log(q.shape[2], 64) if q.shape[2] > 64 else 1), k

    with mock.patch.object(modeling_llama, "apply_rotary_pos_emb", turned):
        assert len(check(small_model(), "tp1", "sp2").objections()) == 2
    assert check(small_model(), "tp1").objections() == []
