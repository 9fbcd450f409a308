"""A job whose model does something else on its own sequences stops on all ranks before it trains on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_hydra.engine.real_sequences
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.small_job import small_config, small_engine, small_model
from tests.test_real_sequences import PAIR, counts_pairs, norm_of_rows


def tokens(length: int, pair: bool) -> Tensor:
    ids = torch.full((length,), 7)
    ids[1:3] = torch.tensor(PAIR if pair else PAIR[::-1])
    return ids


@pytest.fixture(autouse=True)
def _no_other_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this one: the self-check is asked for, and finds nothing."""
    monkeypatch.setattr("ds_hydra.engine.prepare.check_candidates", lambda job, *_: (_Nothing(), job.source))


class _Nothing:
    no_slices, notes = "", ()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: [] if name == "objections" else args[0] if args else None


def engine(rank: int, model: Any, **arguments: Any) -> Any:
    return small_engine(
        rank, model, small_config(2, self_check="on", strategies=["pp2", "tp2"], tokens_per_step=70), **arguments
    )


@pytest.mark.drawn
@pytest.mark.parametrize("operations", [None, 1e7])
def test_known_data_are_tried_before_step_0(operations: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if operations is not None:  # in few layers
        monkeypatch.setitem(ds_hydra.engine.real_sequences._OPERATIONS, "cpu", operations)

    def job(rank: int, pair: bool) -> str:
        model = small_model()
        counts_pairs(model)
        try:
            made = engine(rank, model, data=[tokens(n, pair) for n in (4, 60, 9)])
        except ConfigError as error:
            return str(error)
        made.train_batch()
        return ""

    assert run_ranks(lambda rank: job(rank, False), 2) == ["", ""]
    first, second = run_ranks(lambda rank: job(rank, True), 2)
    assert first == second
    assert "on real sequences of 4 and 60 tokens" in first
    assert ("one layer of each kind" in first) is (operations is not None)


def counts_last_token(model: Any) -> None:
    """Of the vocabulary, which the data have nowhere."""
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: out * (1 + (args[0] == 96).cumsum(-1)[..., None])
    )


@pytest.mark.drawn
@pytest.mark.parametrize("change", [norm_of_rows(100), counts_last_token])
@pytest.mark.parametrize("self_check", ["on", "off"])
def test_a_row_is_filled_and_has_special_tokens(change: Callable[[Any], Any], self_check: str) -> None:
    def job(rank: int) -> str:
        model = small_model()
        change(model)
        with pytest.raises(ConfigError) as told:
            small_engine(
                rank, model, small_config(2, self_check=self_check, strategies=["pp2"], tokens_per_step=130),
                data=[tokens(n, False) for n in (4, 60, 9, 30, 31)],
            )  # fmt: skip
        return str(told.value)

    first, second = run_ranks(job, 2)
    assert first == second
    assert "on real sequences of 4 and 60 tokens the model is not trained as by its own forward" in first


def handed_in(rank: int) -> list[str]:
    model, told = small_model(), []
    counts_pairs(model)
    made = engine(rank, model, data=None)
    for length, pair in ((8, False), (9, True), (15, True), (30, True), (60, False)):
        # The other rank has the longest sequence; of the pairs in sequences no longer than twice nobody is told.
        share = [tokens(length, pair), tokens(4, False)] if rank == 1 else [tokens(5, False)]
        try:
            made.train_batch(share)
            told.append("")
        except ConfigError as error:
            told.append(str(error))
    return told


def test_what_comes_later_is_tried_when_it_is_twice_as_long() -> None:
    first, second = run_ranks(handed_in, 2)
    assert first == second
    assert [bool(text) for text in first] == [False, False, False, True, False]
    assert "30 tokens" in first[3]
