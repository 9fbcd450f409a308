"""What cannot be trained is refused on every rank with the remedy, and data that fail end all ranks."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import ds_hydra
import ds_hydra.engine.engine
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.pipe.models import causal_lm
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.testing import run_ranks
from ds_hydra.watchdog import watchdog
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.ends import TRACEBACK, all_told, codes, ends, mark_fault
from tests.support.families import LAYERS, VOCAB, Block, build_model
from tests.support.small_job import (
    Blinks,
    failing,
    lines_of,
    sequences,
    shared_source,
    small_engine,
    start_deepspeed,
    told,
)

# --- What cannot be trained is refused on every rank, with what is wrong and what to do, and nobody waits.
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
DATA = [list(range(3, 3 + length)) for length in (9, 5, 20, 33)] * 4


@pytest.fixture(autouse=True, scope="module")
def _traced_model() -> Iterator[None]:
    with shared_source(build_model("llama", torch.float32)):
        yield


class Lazy:
    """Data whose lengths are known without reading them; sequence `bad` cannot be trained on once it was read `good`
    times."""

    def __init__(self, bad: int, item: Callable[[], Any], good: int = 0):
        self.lengths, self._bad, self._item, self._good = [20] * 8, bad, item, good

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        self._good -= index == self._bad
        return self._item() if index == self._bad and self._good < 0 else [3] * 20


def start(strategy: str, model: Any = "llama", data: Any = DATA, **hydra: Any) -> Any:
    """An engine, as a user's script would make it."""
    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    settings = {"tokens_per_step": 60, "strategies": [strategy], "steps_file": None, "planner": {"ahead": 0}}
    settings["self_check"] = "off"  # has tests of its own
    model = build_model(model, torch.float32) if isinstance(model, str) else model
    config = {"optimizer": ADAMW, "hydra": settings | hydra}
    return ds_hydra.initialize(model=model, training_data=data, config=config)[0]


def errors(num_ranks: int, job: Callable[[], Any]) -> list[str]:
    """Every rank's error, as the class name and the text; a rank that hangs fails the test."""

    def run(rank: int) -> str:
        watchdog.end_process = lambda code: None  # it would end ranks before they could say their own error
        return told(job)

    return run_ranks(run, num_ranks, timeout=90)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("ranks", "strategy", "words"),
    [
        (3, "tp3", ["PlanError", "q_proj", "8 heads cannot be shared by tp=3", "divides 8"]),
        (LAYERS + 1, f"pp{LAYERS + 1}", ["PlanError", f"{LAYERS + 1} stages for {LAYERS} layers", f"pp <= {LAYERS}"]),
        (2, "tp2 + tp1", ["ConfigError", "= 3 ranks but the job has 2"]),
    ],
)
def test_strategies_that_fit_neither_the_model_nor_the_ranks(ranks: int, strategy: str, words: list[str]) -> None:
    for text in errors(ranks, lambda: start(strategy)):
        assert all(word in text for word in words), text


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("data", "settings", "words"),
    [
        ([], {}, ["the training data are empty"]),
        ([[5], []], {}, ["no sequence is left"]),
        (DATA, {"context_length": 32}, ["longer than hydra.context_length 32", "sequence", "33 tokens", "truncate"]),
        (DATA, {"tokens_per_step": 10**9}, ["hydra.tokens_per_step 1000000000", "268 tokens", "at most 268"]),
        (DATA, {"context_length": 100_000}, ["hydra.context_length 100000", "positions", "at most"]),
        ([{"input_ids": d, "loss_mask": [1] * len(d)} for d in DATA], {}, ["'loss_mask'", "rename it"]),
        ([{"input_ids": d, "position_ids": [7] * len(d)} for d in DATA], {}, ["position_ids has 7", "seq_lengths"]),
        ([*DATA, [999] * 9], {}, ["item 16 of the data holds the token id 999", f"vocabulary of {VOCAB}"]),
        (Lazy(2, lambda: 5), {"tokens_per_step": 1}, None),
    ],
)
def test_data_that_cannot_be_trained_on(data: Any, settings: dict[str, Any], words: list[str] | None) -> None:
    def job() -> None:
        engine = start("2*tp1", data=data, **settings)
        for _ in range(8):
            engine.train_batch()

    for text in errors(2, job):
        assert all(word in text for word in words or ["Error"]), text


def test_sequence_that_no_strategy_holds(tmp_path: Path) -> None:
    schemes = [ParallelScheme(1), ParallelScheme(2)]
    costs = tuple(SchemeCost(s, a=1e-6, b=1e-3, c=0.1, max_length=16 * s.tp, util_length=8) for s in schemes)
    table = CostTable(costs, source="measured")
    path = tmp_path / "table.json"
    TableFile(table).save(path)
    for text in errors(2, lambda: start("2*tp1", cost_table=str(path))):
        assert "33 tokens" in text, text
        assert "16" in text, text
    for text in errors(
        2, lambda: start("tp2", data=[d for d in DATA if len(d) < 33], cost_table=str(path)).train_batch()
    ):
        assert text == "no error"


def test_links_of_a_cost_table_that_cannot_be_read(tmp_path: Path) -> None:
    """Also where nothing needs them, as under a single strategy."""
    cost = SchemeCost(ParallelScheme(1), a=1e-6, b=1e-3, c=0.1, max_length=64, util_length=8)
    path = tmp_path / "table.json"
    TableFile(CostTable((cost,), source="measured"), links={"links": [{"operation": "all_reduce"}]}).save(path)
    for text in errors(2, lambda: start("2*tp1", cost_table=str(path))):
        assert text.startswith("ConfigError: links of the cost table: links[0]: missing "), text


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("item", "words"),
    [
        (lambda: [3] * 19 + [VOCAB], [f"token id {VOCAB}", f"vocabulary of {VOCAB}"]),
        (lambda: [-1] + [3] * 19, ["token id -1"]),
        (lambda: [3] * 7, ["has 7 tokens but the dataset gave its length as 20"]),
        (lambda: 1 / 0, ["ZeroDivisionError"]),
    ],
)
def test_sequence_that_one_rank_cannot_load_is_an_error_on_all(item: Callable[[], Any], words: list[str]) -> None:
    def job() -> None:
        engine = start("pp2 + 2*tp1", data=Lazy(5, item, good=2), tokens_per_step=80)
        for _ in range(2):
            engine.train_batch()

    texts = errors(4, job)
    assert all(word in text for word in words for text in texts), texts
    others = [text for text in texts if "making step" in text]
    assert others[0].startswith("RuntimeError" if words == ["ZeroDivisionError"] else "ConfigError"), texts
    assert 0 < len(others) < 4, texts


def tiny(model_type: str, **settings: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(sizes | settings)))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: tiny("xlm", emb_dim=32, n_heads=2, n_layers=2), ["layer 0", "once for each sequence of a pack"]),
        (lambda: build_model("llama", torch.float32).model, ["LlamaModel", "ForCausalLM"]),
        (lambda: nn.Linear(2, 2), ["Linear", "Hugging Face causal language model or a DeepSpeed PipelineModule"]),
    ],
)
def test_models_that_cannot_be_cut_or_packed(model: Callable[[], Any], words: list[str]) -> None:
    for text in errors(1, lambda: start("tp1", model=model())):
        assert all(word in text for word in words), text


def test_unknown_attention_features_are_never_dropped() -> None:
    """Doge adds a mask of its own to the scores: packed attention refuses it, and its layers do without packs."""
    model = tiny("doge", num_attention_heads=4, num_key_value_heads=2)
    refused = mock.patch.object(causal_lm, "find_boxes", side_effect=ConfigError("no boxes"))
    with refused, pytest.raises(ConfigError, match=r"attention_mask, which .* would train another model.*no boxes"):
        CausalLM(model)
    assert all(CausalLM(model).boxes.of)


def test_encoder_decoders_are_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ds_hydra.ConfigError, match="encoder-decoder"):
        CausalLM(T5ForConditionalGeneration(T5Config(**sizes)))


def test_layer_lists_that_cannot_be_packed() -> None:
    def job() -> None:
        from deepspeed.pipe import LayerSpec, PipelineModule

        start_deepspeed(0)
        layers = [nn.Embedding(VOCAB, 64), LayerSpec(Block), LayerSpec(nn.Linear, 64, VOCAB)]
        with pytest.raises(ds_hydra.ConfigError, match="no loss_fn"):
            start("tp1", model=PipelineModule(layers, num_stages=1))
        folded = [*layers, nn.Flatten(0, 1)]
        with pytest.raises(ds_hydra.ConfigError, match=r"layer 3 hands on \(4, 97\)"):
            start("tp1", model=PipelineModule(folded, num_stages=1, loss_fn=nn.CrossEntropyLoss()))

    assert errors(1, job) == ["no error"]


def test_a_step_without_targets_is_told_and_leaves_no_nan() -> None:
    def job(rank: int) -> tuple[list[str], list[float], bool]:
        masked = {"input_ids": [3, 4, 5, 6], "labels": [-100] * 4}
        engine = start("2*tp1", data=[masked] * 6, tokens_per_step=12)
        logging.getLogger("ds_hydra.step.stepper").setLevel(logging.WARNING)
        lines = lines_of("ds_hydra.step.stepper")
        losses = [float(engine.train_batch()), float(engine.eval_batch([[3, 4, 5], [6, 7]]))]
        finite = all(bool(value.isfinite().all()) for value in engine.fp32_state_dict().values())
        engine.destroy()
        return lines, losses, finite

    (texts, losses, finite), (others, *_) = run_ranks(job, 2)
    assert others == []
    assert len(texts) == 1
    assert texts[0].startswith("step 1: none of its 3 sequences (12 tokens) has a target, all labels are -100")
    assert losses[0] == 0.0
    assert losses[1] > 0.0
    assert finite


# --- How ranks end where what fails is the script's data: an iterator, a dataset, a rank that reads.
FAULTS = {"frozen_seconds": 9.0}


HANDED = {
    "bug": (ValueError("my tokenizer broke"), [75, 1, 75]),
    "storage": (OSError(5, "Input/output error", "/data/tokens.bin"), [75, 1, 75]),
    "exit": (SystemExit(7), [75, 7, 75]),
}


@pytest.mark.drawn
@pytest.mark.parametrize("kind", HANDED)
def test_an_iterator_that_fails_keeps_its_traceback_on_its_rank(kind: str) -> None:
    raised, expected = HANDED[kind]

    def program(rank: int, place: Path) -> None:
        engine = small_engine(rank, data=None, faults=FAULTS)
        handed = failing(raised)(rank)
        while True:
            engine.train_batch(handed)

    found = ends(program, 3)
    assert codes(found) == expected, all_told(found)
    if kind == "exit":
        assert all_told(found).count("SystemExit") == 1
        return
    assert found[1].told.count(TRACEBACK) == 1
    assert "my_tokenizer" in found[1].told
    assert found[1].told.rstrip().endswith(f"{type(raised).__name__}: {raised}")
    assert found[0].told + found[2].told == ""


@pytest.mark.drawn
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("kind", ["storage", "memory", "vocabulary"])
def test_a_dataset_that_fails_does_so_with_the_code_of_its_error(kind: str, ahead: int) -> None:
    def program(rank: int, place: Path) -> None:
        data = Blinks(sequences())
        data.rank = rank
        if kind == "memory":
            data.error = MemoryError("of 3 GiB")
        elif kind == "vocabulary":
            data = Blinks([torch.full((60,), 999 if i == 5 else 9) for i in range(32)])
        engine = small_engine(rank, data=data, faults=FAULTS, planner={"ahead": ahead}, strategies=["2*tp1"])
        for _ in range(8):
            engine.train_batch()

    found = ends(program, 2)
    if kind == "vocabulary":
        assert codes(found) == [78, 78], all_told(found)
        assert all_told(found).count("999") == 1
        assert TRACEBACK not in all_told(found)
        assert "estart" not in all_told(found)
        return
    assert codes(found) == [75, 1], all_told(found)
    assert found[0].told == ""
    assert found[1].told.rstrip().endswith("of 3 GiB" if kind == "memory" else "'/data/tokens.bin'")


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_goes_while_data_are_read_ends_the_others(how: str) -> None:
    """Before there is a world, masters or plans."""

    def program(rank: int, place: Path) -> None:
        class Watched(list[Any]):
            def __getitem__(self, index: Any) -> Any:
                if rank == 1 and index == 20:
                    mark_fault(place)
                    os.kill(os.getpid(), getattr(signal, how))
                return {"input_ids": super().__getitem__(index).tolist()}  # says no length, so that it is read

        small_engine(rank, data=Watched(sequences()), faults={**FAULTS, "frozen_seconds": 2.0}, timeout_seconds=40)

    found = ends(program, 2)
    assert codes(found) == [75, -9], all_told(found)
    assert max(end.seconds for end in found) < 5.0
    assert all_told(found).startswith("[ds_hydra] rank 0 ends in step 1 (assembly): rank 1 ")
