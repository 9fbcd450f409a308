"""Optimizers of whole parameters (Muon, LAMB, Adafactor) on ranks beside the originals in one process."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from transformers import Trainer
from transformers.optimization import Adafactor, AdafactorSchedule

import ds_hydra.engine.engine  # (before forking: the ranks share it)
from ds_hydra.checkpoint.universal import from_universal, to_universal
from ds_hydra.hugging_face import HydraTrainer
from ds_hydra.matrices.exchange import Exchange
from ds_hydra.matrices.sums import Sums
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.case import FLOAT32, Case
from tests.support.equivalence import compare
from tests.support.matrix_cases import CASES, block, iterating_in, skipping, trained
from tests.support.small_job import same, small_config, small_engine, small_model
from tests.support.strict import Rules
from tests.support.trainers import config, logged, settings, trainer_of

QUICK = [case.shortened() for case in CASES if case.quick]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Muon": block(ns_method="standard"),
    "LAMB": {"type": "Lamb", "params": {"lr": 1e-2}},
    "Adafactor": {"type": "Adafactor", "params": {"lr": 1e-2}},
    "AdamW": {"type": "AdamW", "params": {"lr": 1e-2}},
}
STATES = {"Muon": "momentum_buffer", "LAMB": "exp_avg_sq", "Adafactor": "factored_sq"}


def missed_by(case: Case, timeout: float, strict: Rules | None = None) -> Any:
    """The aims that a row misses. Muon's iterations have the row's own type on both sides."""
    narrow = case.dtype == FLOAT32
    aims = replace(case.aims, parameter=1e-5, loss=1e-5) if narrow else case.aims
    iterating = iterating_in(torch.float32 if narrow else torch.float64)
    with iterating if case.optimizer.startswith("Muon") else nullcontext():
        return compare(case, timeout=timeout, strict=strict).missed(aims, case.name)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.drawn, id=f"{case.optimizer}: {case.name}") for case in QUICK]
    + [pytest.param(case, marks=pytest.mark.long, id=f"whole {case.optimizer}: {case.name}") for case in CASES],
)
def test_same_as_one_process(case: Case) -> None:
    missed = missed_by(case, 300)
    assert not missed, missed


@pytest.mark.drawn
@pytest.mark.parametrize("rule", ["connect", "lazy", "blocking"])
@pytest.mark.parametrize("name", ["experts", "torch's, experts"])
def test_nothing_depends_on_what_nccl_does_not_give(name: str, rule: str) -> None:
    """Under a transport that serves in one order, lets nobody read what has not come, and connects when first used."""
    (case,) = (replace(case, steps=2) for case in QUICK if case.name == name)
    missed = missed_by(case, 240, Rules(**dict.fromkeys(rule.split(), True), stall_s=100))
    assert not missed, missed


def test_each_matrix_is_orthogonalized_once_a_step() -> None:
    def counted(rank: int) -> tuple[list[dict[str, int]], dict[str, int]]:
        engine = small_engine(rank, optimizer=OPTIMIZERS["Muon"])
        counts = []
        for _ in range(3):
            engine.train_batch()
            counts.append(dict(engine.optimizer.exchange.counts))
        every = dict.fromkeys(engine.optimizer.heads, 1)
        engine.destroy()
        return counts, every

    ranks = run_ranks(counted, 2, timeout=120)
    for step in range(3):
        total: Counter[str] = Counter()
        for counts, _ in ranks:
            total.update(counts[step])
        assert dict(total) == ranks[0][1], "each matrix has one owner, once a step"
    assert len(ranks[0][1]) == 28
    assert all(counts[0] for counts, _ in ranks), "both ranks work"


@pytest.mark.parametrize(("name", "exchange"), [("Muon", Exchange), ("Adafactor", Sums)])
def test_a_skipped_step_leaves_states_as_they_are(name: str, exchange: type) -> None:
    for found in run_ranks(partial(skipping, exchange=exchange, optimizer=OPTIMIZERS[name]), 2, timeout=120):
        assert any(value.any() for key, value in found.before.items() if key.endswith(STATES[name]))
        assert found[:3] == (True, True, True)


@pytest.mark.parametrize("name", STATES)
def test_a_job_goes_on_from_its_checkpoint_to_the_bit_and_another_optimizers_is_refused(
    name: str, tmp_path: Path
) -> None:
    """In the universal form too, and on other numbers of ranks."""
    optimizer, adam = OPTIMIZERS[name], OPTIMIZERS["AdamW"]
    straight, _ = run_ranks(trained, 2, tmp_path / "straight", optimizer, 4, timeout=120)[0]
    saved, _ = run_ranks(trained, 2, tmp_path / "cut", optimizer, 2, timeout=120)[0]
    assert any(key.endswith(STATES[name]) and value.any() for key, value in saved.items())
    resumed, said = run_ranks(trained, 2, tmp_path / "cut", optimizer, 2, "of2", timeout=120)[0]
    assert not said, said
    assert same(resumed, straight)
    from_universal(to_universal(tmp_path / "cut", "of2", tmp_path / "universal"), tmp_path / "back", "b")
    for folder, tag in (("cut", "of2"), ("back", "b")):
        loaded, said = run_ranks(trained, 3, tmp_path / folder, optimizer, 0, tag, timeout=120)[0]
        assert not said, said
        assert same(loaded, saved), folder
    run_ranks(trained, 1, tmp_path / "adam", adam, 1, timeout=120)
    for folder, other, tag in (("adam", optimizer, "of1"), ("cut", adam, "of2")):
        _, said = run_ranks(trained, 1, tmp_path / folder, other, 0, tag, timeout=120)[0]
        words = ("Muon", "AdamW", "group") if name == "Muon" else ("LAMB's", "AdamW", "TorchAdafactor")
        assert any(word in said for word in words), said


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Any:
    cells = pytest.importorskip("tests.support.elastic_cells")  # where jobs go on at all
    made = cells.Judge(tmp_path_factory.mktemp("stopped"))
    made._jobs |= {name: replace(cells.PLAIN, hydra={"optimizer": OPTIMIZERS[name]}) for name in STATES}
    return made


OF_MUON, OF_SUMS = ("push", "owners' turn", "coming back", "update", "after the update"), ("sums", "totals", "update")


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("name", "phase", "redundancy"),
    [("Muon", phase, kept) for phase in OF_MUON for kept in ("device", "host")]
    + [("LAMB", *row) for row in zip(OF_SUMS, ("device", "host", "device"), strict=True)]
    + [("Adafactor", *row) for row in zip(OF_SUMS, ("host", "device", "host"), strict=True)],
)
def test_a_rank_is_lost_anywhere_in_an_update_and_the_others_go_on(
    name: str, phase: str, redundancy: str, judge: Any
) -> None:
    """To the bit what a stop and a restart come to; copies are compared in each step."""
    cells, jobs = (importlib.import_module(f"tests.support.elastic_{module}") for module in ("cells", "job"))
    own = {"owners' turn": (Exchange, "owners_turn"), "coming back": (Exchange, "finish"),
           "sums": (Sums, "add"), "totals": (Sums, "give"), **jobs._entries()}  # fmt: skip
    lost = (jobs.Loss(phase, 1, cells.FAULT_STEP),)
    course = cells.Course(f"{name}, {phase}, {redundancy}", lost, mode=name, redundancy=redundancy)
    with mock.patch.object(jobs, "_entries", return_value=own):
        assert judge.wrong(course) == []


def by_trainer(rank: int, folder: Path, kind: Any, num_ranks: int) -> Any:
    rank_environment(rank)
    if num_ranks == 1:
        del os.environ["LOCAL_RANK"]
    engine = config() if num_ranks > 1 else None
    arguments = settings(folder / str(num_ranks), num_ranks, engine, save_strategy="no", optim="adafactor")
    trainer = trainer_of(kind, arguments)
    trainer.train()
    return logged(trainer)


@pytest.mark.drawn
def test_trainers_adafactor_is_transformers(tmp_path: Path) -> None:
    found, right = (run_ranks(by_trainer, n, tmp_path, kind, n)[0] for kind, n in ((HydraTrainer, 2), (Trainer, 1)))
    for mine, its in zip(found, right, strict=True):
        assert mine == pytest.approx(its, rel=1e-4)


def test_a_rate_of_its_own_is_told_and_no_schedule_reads_it() -> None:
    def made(rank: int) -> tuple[list[float], str]:
        rank_environment(rank)
        blocks = {key: value for key, value in small_config(1).items() if key not in ("optimizer", "scheduler")}
        model = small_model()
        own = Adafactor(model.parameters(), warmup_init=True)
        try:
            ds_hydra.initialize(model=model, config=blocks, optimizer=own, lr_scheduler=AdafactorSchedule(own))
        except ConfigError as error:
            said = str(error)
        data = [torch.arange(3, 40)] * 64
        engine = ds_hydra.initialize(model=model, config=blocks, optimizer=own, training_data=data)[0]
        rates = []
        for _ in range(2):
            engine.train_batch()
            rates.append(engine.get_lr()[0])
        engine.destroy()
        return rates, said

    ((rates, said),) = run_ranks(made, 1, timeout=120)
    assert rates == [1e-6, 2e-6]
    assert "AdafactorSchedule reads rates" in said


# Without clipping, which ZeRO does to what has been orthogonalized.
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Muon", "params": {"lr": 1e-2, "ns_method": "standard", "torch_adam": True, "eps": 1e-4}},
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 0.0,
}


def trained_by_calls(rank: int, ours: bool) -> list[float]:
    """Losses of a script of the three calls; the engine's line alone differs."""
    rank_environment(rank)
    torch.compiler.set_stance("force_eager")
    random = torch.Generator().manual_seed(rank)
    model = small_model(tied=False)
    if ours:
        block = {"strategies": ["tp2", "pp2", "2*tp1"], "choose": "cycle", "context_length": 40, "self_check": "off",
                 "steps_file": None, "planner": {"ahead": 0}, "faults": {"frozen_seconds": 0}}  # fmt: skip
        engine = ds_hydra.initialize(model=model, config={**CONFIG, "hydra": block})[0]
    else:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        engine = deepspeed.initialize(model=model, config=CONFIG)[0]
    found = []
    for _ in range(5):
        tokens = torch.randint(3, 97, (2, 40), generator=random)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    return found


def test_losses_are_those_of_plain_deepspeed_by_the_same_config() -> None:
    with iterating_in(torch.float32):
        theirs, ours = (run_ranks(trained_by_calls, 2, mine, timeout=200) for mine in (False, True))
    for rank in range(2):
        assert ours[rank] == pytest.approx(theirs[rank], rel=1e-5)
