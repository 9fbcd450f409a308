"""LAMB and Adafactor on ranks beside DeepSpeed's, torch's and transformers' own in one process."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer
from transformers.optimization import Adafactor, AdafactorSchedule

import ds_hydra.engine.engine  # (before forking: the ranks share it)
from ds_hydra.checkpoint.universal import from_universal, to_universal
from ds_hydra.hugging_face import HydraTrainer
from ds_hydra.matrices.sums import Sums
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.case import FLOAT32, Case
from tests.support.equivalence import compare
from tests.support.small_job import same, small_config, small_model
from tests.support.strict import Rules
from tests.support.sum_cases import CASES
from tests.support.trainers import config, logged, settings, trainer_of
from tests.support.whole_jobs import skipping, trained

QUICK = [case.shortened() for case in CASES if case.quick]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.drawn, id=case.name) for case in QUICK]
    + [pytest.param(case, marks=pytest.mark.long, id=f"whole {case.name}") for case in CASES],
)
def test_same_as_one_process(case: Case) -> None:
    aims = replace(case.aims, parameter=1e-5, loss=1e-5) if case.dtype == FLOAT32 else case.aims
    missed = compare(case, timeout=300).missed(aims, case.name)
    assert not missed, missed


@pytest.mark.drawn
@pytest.mark.parametrize("rule", ["connect", "lazy", "blocking"])
def test_nothing_depends_on_what_nccl_does_not_give(rule: str) -> None:
    """Under a transport that serves in one order, lets nobody read what has not come, and connects when first used."""
    (case,) = (replace(case, steps=2) for case in QUICK if case.name == "torch's, experts")
    rules = Rules(**dict.fromkeys(rule.split(), True), stall_s=100)
    missed = compare(case, timeout=240, strict=rules).missed(case.aims, case.name)
    assert not missed, missed


LAMB = {"type": "Lamb", "params": {"lr": 1e-2}}
FACTORED = {"type": "Adafactor", "params": {"lr": 1e-2}}


@pytest.mark.parametrize("optimizer", [LAMB, FACTORED], ids=["LAMB", "Adafactor"])
def test_a_job_goes_on_from_its_checkpoint_to_the_bit_and_another_optimizers_is_refused(
    optimizer: Any, tmp_path: Path
) -> None:
    straight, _ = run_ranks(trained, 2, tmp_path / "straight", optimizer, 4, timeout=120)[0]
    saved, _ = run_ranks(trained, 2, tmp_path / "cut", optimizer, 2, timeout=120)[0]
    assert any(name.endswith(("exp_avg_sq", "factored_sq")) and value.any() for name, value in saved.items())
    resumed, said = run_ranks(trained, 2, tmp_path / "cut", optimizer, 2, "of2", timeout=120)[0]
    assert not said, said
    assert same(resumed, straight)
    from_universal(to_universal(tmp_path / "cut", "of2", tmp_path / "universal"), tmp_path / "back", "b")
    for folder, tag in (("cut", "of2"), ("back", "b")):
        loaded, said = run_ranks(trained, 3, tmp_path / folder, optimizer, 0, tag, timeout=120)[0]
        assert not said, said
        assert same(loaded, saved), folder
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    run_ranks(trained, 1, tmp_path / "adam", adam, 1, timeout=120)
    for folder, other, tag in (("adam", optimizer, "of1"), ("cut", adam, "of2")):
        _, said = run_ranks(trained, 1, tmp_path / folder, other, 0, tag, timeout=120)[0]
        assert any(words in said for words in ("LAMB's", "AdamW", "TorchAdafactor")), said


def test_a_skipped_step_leaves_states_as_they_are() -> None:
    for found in run_ranks(partial(skipping, exchange=Sums, optimizer=FACTORED), 2, timeout=120):
        assert found[:3] == (True, True, True)


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
