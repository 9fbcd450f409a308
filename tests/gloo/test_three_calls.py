"""engine(batch), backward, step: the update of DeepSpeed's own loop, or of train_batch, as hydra.loss_norm says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from torch import Tensor

import ds_hydra
import ds_hydra.engine.engine
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.testing import OneProcess, Sample, float64_throughout, rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.equivalence import decay_groups
from tests.support.families import build_model, reference_model, vocab_size
from tests.support.small_job import shared_source

FAMILY, RANKS, ACCUMULATION, STEPS = "llama", 2, 2, 3
ADAMW: dict[str, Any] = {"lr": 2e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
LENGTHS = (((9, 30), (12,)), ((5, 7, 3), (20, 4)))  # of each rank's batches in a step
FACTORS = (1.0, 0.5)  # that the script puts on the losses of its batches


def batch_of(step: int, rank: int, number: int) -> list[Sample]:
    """A batch; the first third of each sequence is a prompt."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + number)
    samples: list[Sample] = []
    for length in LENGTHS[rank][number]:
        tokens = torch.randint(3, vocab_size(FAMILY), (length,), generator=generator)
        labels = tokens.clone()
        labels[: length // 3] = IGNORED
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def num_targets(sample: Sample) -> int:
    return int((sample["labels"][1:] != IGNORED).sum())


def collated(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """As a collator pads it."""
    size = max(len(sample["input_ids"]) for sample in samples)

    def padded(name: str, value: int) -> Tensor:
        return torch.stack([torch.nn.functional.pad(s[name], (0, size - len(s[name])), value=value) for s in samples])

    mask = torch.stack([(torch.arange(size) < len(sample["input_ids"])).long() for sample in samples])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", IGNORED), "attention_mask": mask}


def engine_of(rank: int, **hydra: Any) -> Any:
    rank_environment(rank)
    model = build_model(FAMILY, torch.float64)
    settings = {"tokens_per_step": 100, "choose": "cycle", "self_check": "off", "steps_file": None}
    config = {
        "optimizer": {"type": "AdamW", "params": ADAMW | {"torch_adam": True}},
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": ACCUMULATION,
        "hydra": settings | {"planner": {"ahead": 0}, "faults": {"frozen_seconds": 0}} | hydra,
    }
    return ds_hydra.initialize(model=model, model_parameters=decay_groups(model), config=config)[0]


def trained(rank: int, loss_norm: str, by_hand: bool) -> tuple[list[Any], dict[str, Tensor]]:
    """As a script written for DeepSpeed; `by_hand`: as Accelerate drives it."""
    engine = engine_of(rank, strategies=["tp2", "pp2", "sp2"], loss_norm=loss_norm)
    losses = []
    for step in range(STEPS):
        pending, returned = [], []
        for number, factor in enumerate(FACTORS):
            loss = engine(**collated(batch_of(step, rank, number))).loss * factor
            pending.append(loss)
            if by_hand:
                engine.set_gradient_accumulation_boundary(number == ACCUMULATION - 1)
                returned.append(ACCUMULATION * engine.backward(loss / ACCUMULATION, scale_wrt_gas=False))
            else:
                assert engine.is_gradient_accumulation_boundary() == (number == ACCUMULATION - 1)
                # A part without a gradient counts in the number alone.
                returned.append(ACCUMULATION * engine.backward(engine.scale(loss + loss.detach())) / 2)
            engine.step()
            assert engine.was_step_applied() == (number == ACCUMULATION - 1)
        assert engine.global_steps == step + 1
        assert torch.allclose(torch.stack(returned), torch.stack(pending))
        losses.append((engine.last_step.loss, [float(loss) for loss in pending]))
    return losses, engine.fp32_state_dict()


def expected(loss_norm: str) -> tuple[list[Any], dict[str, Tensor]]:
    """One process, one sequence at a time; what each counts is written out here. Losses of steps and of batches."""
    reference = OneProcess(
        reference_model(FAMILY, torch.float64), lambda model: torch.optim.AdamW(decay_groups(model), **ADAMW), clip=1.0
    )
    losses = []
    for step in range(STEPS):
        batches = [
            (batch_of(step, rank, number), factor) for rank in range(RANKS) for number, factor in enumerate(FACTORS)
        ]
        whole = sum(num_targets(sample) for batch, _ in batches for sample in batch)
        samples, weights = [], []  # of each token
        for batch, factor in batches:
            of_batch = sum(map(num_targets, batch))
            one = 1 / whole if loss_norm == "token" else 1 / (RANKS * ACCUMULATION * of_batch)
            samples += batch
            weights += [torch.full((len(sample["labels"]) - 1,), one * factor, dtype=torch.float64) for sample in batch]
        own = [factor * mean_of(reference, batch) for batch, factor in batches]
        losses.append((reference.step(samples, weights).loss, own))
    return losses, {name: parameter.detach() for name, parameter in reference.parameters.items()}


@torch.no_grad()
def mean_of(reference: OneProcess, batch: Sequence[Sample]) -> float:
    """As the model's own forward gives it."""
    outputs = reference.model(**collated(batch), use_cache=False)
    return float(outputs.loss)


@pytest.mark.drawn
@pytest.mark.parametrize(("loss_norm", "by_hand"), [("token", False), ("batch", False), ("batch", True)])
def test_the_update_is_that_of_one_process(loss_norm: str, by_hand: bool) -> None:
    with float64_throughout(reference_model(FAMILY, torch.float64)):
        losses, parameters = expected(loss_norm)
        with shared_source(build_model(FAMILY, torch.float64)):
            results = run_ranks(trained, RANKS, loss_norm, by_hand)
        for rank, (own_losses, own) in enumerate(results):
            for (loss, of_batches), (right, of_all) in zip(own_losses, losses, strict=True):
                assert loss == pytest.approx(right, rel=1e-9)
                assert of_batches == pytest.approx(of_all[rank * ACCUMULATION : (rank + 1) * ACCUMULATION], rel=1e-6)
            for name, value in parameters.items():
                assert torch.allclose(own[name], value, rtol=1e-9, atol=1e-9 * float(value.abs().max())), name


def evaluated(rank: int) -> list[Any]:
    engine = engine_of(rank, strategies=["tp2"])
    engine.eval()
    with torch.no_grad():
        own = engine(collated(batch_of(0, rank, 0))).loss
        mean = own.detach().clone().float()
        torch.distributed.all_reduce(mean)
        alone = engine(collated(batch_of(0, 0, 0)) if rank == 0 else [])
    engine.train()
    engine.tput_timer.update_epoch_count()  # as DeepSpeed-Chat's scripts do
    handed_out = []
    for number in range(ACCUMULATION):
        handed_out.append(engine(collated(batch_of(0, rank, number))).loss)
        engine.backward(handed_out[-1])
        engine.step()
    trained = sum(handed_out) / ACCUMULATION
    torch.distributed.all_reduce(trained)
    return [type(own), own.item(), (mean / RANKS).item(), alone.item(), trained.item() / RANKS]


def test_a_loss_is_a_tensor_of_its_own_batch_in_collectives_too() -> None:
    reference = OneProcess(
        reference_model(FAMILY, torch.float64), lambda model: torch.optim.AdamW(model.parameters()), clip=1.0
    )
    losses = [
        [mean_of(reference, batch_of(0, rank, number)) for number in range(ACCUMULATION)] for rank in range(RANKS)
    ]
    with shared_source(build_model(FAMILY, torch.float64)):
        results = run_ranks(evaluated, RANKS)
    for rank, (kind, own, mean, alone, trained) in enumerate(results):
        assert kind is Tensor
        assert own == pytest.approx(losses[rank][0], rel=1e-6)
        assert mean == pytest.approx((losses[0][0] + losses[1][0]) / 2, rel=1e-6)
        assert alone == (own if rank == 0 else pytest.approx(float("nan"), nan_ok=True))
        assert trained == pytest.approx(sum(map(sum, losses)) / RANKS / ACCUMULATION, rel=1e-6)


def misused(rank: int) -> list[str]:
    engine = engine_of(rank, strategies=["2*tp1"])
    batch = collated(batch_of(0, rank, 0))
    found = []

    def note(call: Any) -> None:
        try:
            call()
            found.append("no error")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")

    note(lambda: engine(batch, batch))
    note(lambda: engine.backward(torch.tensor(1.0)))
    engine(batch)  # without backward: left out
    engine.step()
    loss = engine(batch)
    engine.backward(loss)
    engine.step()
    note(lambda: engine.backward(loss))
    loss = engine(batch)
    note(lambda: engine.backward(loss.detach()))
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    note(lambda: engine.backward(2 * loss))
    engine.backward(engine(batch if rank == 0 else {"input_ids": [[1, 2, 99999]]}))
    engine.step()
    note(engine.step)
    engine.eval()
    note(lambda: engine.backward(engine(batch).loss))
    note(lambda: engine.backward(torch.tensor(1.0)))
    engine.train()
    note(lambda: engine(**batch, num_items_in_batch=7))
    for _ in range(ACCUMULATION):  # nothing of the bad step is left
        engine.backward(engine(batch))
        engine.step()
    return [*found, f"{engine.global_steps} {engine.last_step.num_sequences}"]


def test_misuse_is_refused_on_all_ranks() -> None:
    with shared_source(build_model(FAMILY, torch.float64)):
        first, second = run_ranks(misused, RANKS)
    assert first == second
    assert "give one batch" in first[0]
    assert "given a Tensor that is not a loss of engine(batch)" in first[1]
    assert "has run already" in first[2]
    assert "without a gradient: give it before detach()" in first[3]
    assert "for the second time: add the losses up" in first[4]
    assert all("call engine.train() before engine(batch)" in found for found in first[6:8])
    assert "failed on rank 1: item 3 of the data holds the token id 99999" in first[5]
    assert "num_items_in_batch=7) would have no effect" in first[8]
    assert first[9] == f"2 {ACCUMULATION * sum(len(LENGTHS[rank][0]) for rank in range(RANKS))}"


def without_targets(rank: int) -> list[str]:
    engine, told = engine_of(rank, strategies=["2*tp1"], loss_norm="batch"), []
    for empty in (True, False):
        for number in range(ACCUMULATION):
            batch = collated(batch_of(0, rank, number))
            if empty and rank == 1 and number == 1:
                batch["labels"] = torch.full_like(batch["labels"], IGNORED)
            engine.backward(engine(batch))
            try:
                engine.step()
            except ConfigError as error:
                told.append(str(error))
    return [*told, str(engine.global_steps)]


def test_a_batch_without_targets_has_no_mean() -> None:
    with shared_source(build_model(FAMILY, torch.float64)):
        first, second = run_ranks(without_targets, RANKS)
    assert first == second
    assert "failed on rank 1: batch 1 has no target" in first[0]
    assert first[1:] == ["1"]


def test_batches_means_need_batches() -> None:
    def job(rank: int) -> None:
        model = build_model(FAMILY, torch.float32)
        hydra = {"tokens_per_step": 20, "strategies": ["tp1"], "loss_norm": "batch", "steps_file": None}
        config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "hydra": hydra}
        ds_hydra.initialize(model=model, training_data=[[5] * 30], config=config)

    with pytest.raises(ConfigError, match="of the batches that a script hands in"):
        run_ranks(job, 1)
