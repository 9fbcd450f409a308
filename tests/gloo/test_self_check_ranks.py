"""The self-check shared out over the ranks of a job, and of a layer list, which needs a process group to be built."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_hydra
import ds_hydra.engine.real_sequences
from ds_hydra.engine import prepare, real_sequences
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.ranks.channel import Channel
from ds_hydra.self_check.cache import cache_folder
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.small_copy import short_layer_list
from ds_hydra.self_check.verdicts import CheckResult
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support import mutants
from tests.support.families import LAYER_LIST, Block, build_model, hard_model, mean_loss
from tests.support.small_job import small_config, small_engine, small_model
from tests.test_real_sequences import PAIR, counts_pairs, norm_of_rows


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_ranks_share_the_runs_and_get_the_same_verdicts() -> None:
    strategies = [StrategyShape.parse(text) for text in ("tp2 + tp1", "pp3", "sp2 + tp1")]

    def program(rank: int) -> list[CheckResult]:
        channel = Channel(dist.group.WORLD, rank, 3)
        model = build_model("llama", torch.float32)
        return [check_strategies(model, strategies, channel=channel) for _ in range(2)]

    per_rank = run_ranks(program, 3)
    first, second = per_rank[0]
    assert {verdict.state for verdict in first.verdicts.values()} == {"equal"}
    assert (first.from_cache, second.from_cache) == (0, 4)
    assert [result[0].verdicts for result in per_rank] == [first.verdicts] * 3
    assert len(list(cache_folder().iterdir())) == 1


def start(model: Any, strategies: list[str] | str, **hydra: Any) -> Any:
    """An engine, as a user's script would make it."""
    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    rank_environment(dist.get_rank())
    block = {"tokens_per_step": 64, "strategies": strategies, "steps_file": None, "planner": {"ahead": 0}}
    block |= hydra
    config = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "hydra": block}
    return ds_hydra.initialize(model=model, training_data=[[3] * 20, [5] * 40] * 4, config=config)[0]


@pytest.mark.drawn
def test_a_job_is_refused_on_all_ranks_before_step_0() -> None:
    def program(rank: int) -> str:
        with mutants.unnamed_parameters_are_complete(), pytest.raises(ConfigError) as refused:
            start(hard_model("activation with parameters"), ["2*tp1", "tp2"])
        return str(refused.value)

    told = run_ranks(program, 2)
    assert told[0] == told[1]
    assert "hydra.strategies[1] 'tp2': tp2 trains otherwise than one process" in told[0]
    assert "strategies[0]" not in told[0]


@pytest.mark.drawn
def test_auto_leaves_out_what_is_refused() -> None:
    def propose(job: Any, found: Any, *_: Any) -> Any:
        best = "pp2" if ParallelScheme(pp=2) in found.table.schemes else "2*tp1"
        return (StrategyShape.parse(best),)

    def program(rank: int) -> list[str]:
        with (
            mutants.what_follows_the_layers_runs_everywhere(),
            mock.patch.object(prepare, "propose", propose),
        ):
            engine = start(hard_model("final norm without parameters"), "auto")
        engine.destroy()
        return [str(strategy) for strategy in engine.crew.prepared.strategies]

    assert run_ranks(program, 2) == [["2*tp1"], ["2*tp1"]]


class Leaky(Block):
    """A layer that does not ask where packed sequences begin."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def layer_list(block: type[Block], depth: int) -> Any:
    """A PipelineModule with a tied embedding, made in a process group of one rank."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    first, *_, norm, head = build_model(LAYER_LIST, torch.float32)._layer_specs
    layers = [first, *(LayerSpec(block) for _ in range(depth)), norm, head]
    return PipelineModule(layers, num_stages=1, loss_fn=mean_loss, partition_method="uniform")


@pytest.mark.drawn
@pytest.mark.parametrize(("block", "depth"), [(Block, 4), (Block, 40), (Leaky, 4)])
def test_layer_lists(block: type[Block], depth: int) -> None:
    strategies = [StrategyShape.parse(text) for text in ("tp2", "pp3", "sp2")]
    (result,) = run_ranks(lambda rank: check_strategies(layer_list(block, depth), strategies, keep=False), 1)
    states = {str(scheme): verdict.state for scheme, verdict in result.verdicts.items()}
    assert states == dict.fromkeys(("tp2", "pp3", "sp2"), "refused" if block is Leaky else "equal"), result.verdicts
    if block is Leaky:
        for strategy in strategies:
            objection = result.objection(strategy)
            assert objection is not None
            assert "the loss is" in objection
            assert "no strategy trains this model" in objection


@pytest.mark.drawn
@pytest.mark.parametrize("depth", [4, 40])
def test_a_layer_list_is_tried_on_real_sequences(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its layers, one sequence at a time; where it has many, in some of them."""
    monkeypatch.setattr(logging.getLogger("ds_hydra.engine.real_sequences"), "info", lambda *told: heard.append(told))
    if depth > 4:
        monkeypatch.setitem(real_sequences._OPERATIONS, "cpu", 2e7)

    def program(rank: int) -> list[Any]:
        start(layer_list(Block, depth), ["tp1"], self_check="off").destroy()
        with pytest.raises(ConfigError, match="the model is not trained as by its own forward") as refused:
            start(layer_list(Leaky, depth), ["tp1"], self_check="off")
        assert ("in one layer of each kind" in str(refused.value)) == (depth > 4)
        return [told[0] for told in heard]

    heard: list[Any] = []
    (told,) = run_ranks(program, 1)
    assert len(told) == 1


def test_of_many_equal_layers_few_are_kept() -> None:
    (left,) = run_ranks(lambda rank: short_layer_list(layer_list(Block, 40), [], 2**30).plan.num_layers, 1)
    assert left == 1 + 3 + 1 + 1


# ---- A job whose model does something else on its own sequences stops on all ranks before it trains. ----


def tokens(length: int, pair: bool) -> Tensor:
    ids = torch.full((length,), 7)
    ids[1:3] = torch.tensor(PAIR if pair else PAIR[::-1])
    return ids


@pytest.fixture
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
@pytest.mark.usefixtures("_no_other_check")
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
@pytest.mark.usefixtures("_no_other_check")
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


@pytest.mark.usefixtures("_no_other_check")
def test_what_comes_later_is_tried_when_it_is_twice_as_long() -> None:
    first, second = run_ranks(handed_in, 2)
    assert first == second
    assert [bool(text) for text in first] == [False, False, False, True, False]
    assert "30 tokens" in first[3]
