"""Muon on ranks beside DeepSpeed's and torch's own in one process."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import ds_hydra.engine.engine  # (before forking: the ranks share it)
from ds_hydra.checkpoint.universal import from_universal, to_universal
from ds_hydra.matrices.exchange import Exchange
from ds_hydra.testing import rank_environment, run_ranks
from tests.support.case import FLOAT32, Case
from tests.support.equivalence import compare
from tests.support.muon_cases import CASES, block, iterating_in
from tests.support.small_job import same, small_engine, small_model
from tests.support.strict import Rules
from tests.support.whole_jobs import skipping, trained

QUICK = [case.shortened() for case in CASES if case.quick]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.drawn, id=case.name) for case in QUICK]
    + [pytest.param(case, marks=pytest.mark.long, id=f"whole {case.name}") for case in CASES],
)
def test_same_as_one_process(case: Case) -> None:
    narrow = case.dtype == FLOAT32
    aims = replace(case.aims, parameter=1e-5, loss=1e-5) if narrow else case.aims
    with iterating_in(torch.float32 if narrow else torch.float64):
        missed = compare(case, timeout=300).missed(aims, case.name)
    assert not missed, missed


@pytest.mark.drawn
@pytest.mark.parametrize("rule", ["connect", "lazy", "blocking"])
def test_nothing_depends_on_what_nccl_does_not_give(rule: str) -> None:
    """Under a transport that serves in one order, lets nobody read what has not come, and connects when first used."""
    (case,) = (replace(case, steps=2) for case in QUICK if case.name == "experts")
    rules = Rules(**dict.fromkeys(rule.split(), True), stall_s=100)
    with iterating_in(torch.float64):
        missed = compare(case, timeout=240, strict=rules).missed(case.aims, case.name)
    assert not missed, missed


MUON = {"optimizer": block(ns_method="standard")}


def test_each_matrix_is_orthogonalized_once_a_step() -> None:

    def counted(rank: int) -> tuple[list[dict[str, int]], dict[str, int]]:
        engine = small_engine(rank, **MUON)
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


def test_a_skipped_step_leaves_momentum_as_it_is() -> None:
    for found in run_ranks(partial(skipping, exchange=Exchange, optimizer=MUON["optimizer"]), 2, timeout=120):
        assert any(value.any() for name, value in found.before.items() if name.endswith("momentum_buffer"))
        assert found[:3] == (True, True, True)


def test_a_checkpoint_is_of_muon_or_refused_and_goes_through_the_universal_form(tmp_path: Path) -> None:
    muon, adam = MUON["optimizer"], {"type": "AdamW", "params": {"lr": 1e-2}}
    state, _ = run_ranks(trained, 2, tmp_path / "muon", muon, 3, timeout=120)[0]
    assert any(name.endswith("q_proj.weight/momentum_buffer") and value.any() for name, value in state.items())
    run_ranks(trained, 1, tmp_path / "adam", adam, 1, timeout=120)
    for folder, optimizer, tag, words in (("adam", muon, "of1", "Muon"), ("muon", adam, "of3", "AdamW")):
        _, said = run_ranks(trained, 1, tmp_path / folder, optimizer, 0, tag, timeout=120)[0]
        assert "group" in said or words in said, said
    out = to_universal(tmp_path / "muon", "of3", tmp_path / "universal")
    from_universal(out, tmp_path / "back", "b")
    for folder, tag in (("muon", "of3"), ("back", "b")):
        loaded, said = run_ranks(trained, 3, tmp_path / folder, muon, 0, tag, timeout=120)[0]
        assert not said, said
        assert same(loaded, state), folder


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
