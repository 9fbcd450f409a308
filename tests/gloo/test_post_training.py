"""Steps in parts, fields, and losses of log-probabilities on ranks: what a public loop of GRPO asks of an engine."""

from __future__ import annotations

import importlib.util
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.losses import GSPO
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.families import build_model, kept_in_fp32
from tests.support.small_job import same, small_config, small_engine, small_model, whole_state
from tools import aims
from tools.post_training import equality, refusals
from tools.post_training.equality import Layout
from tools.post_training.memory import Live
from tools.post_training.rollouts import rollouts, share

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3


@pytest.mark.parametrize(
    ("family", "layouts", "losses"),
    [
        ("llama", [equality.LAYOUTS[5], equality.LAYOUTS[7]], ["GRPO", "GSPO", "DPO", "distillation", "own, mixing"]),
        ("lora", [equality.LAYOUTS[4]], ["PPO", "DPO"]),
    ],
)
def test_losses_are_those_of_one_process(family: str, layouts: list[Layout], losses: list[str]) -> None:
    """Each under one of the layouts; those of TRL's trainers, and of a public loop of GRPO, are compared by the quick
    forms of `tools.check_post_training` and `tools.check_swap`."""
    cases = list(product(layouts, losses))[:: len(layouts)]
    rows, slices = equality.compare(family, cases)
    assert {row.loss for row in rows} == set(losses)
    assert slices > 0 or family == "lora"
    assert max(max(row.of_loss, row.of_gradients) for row in rows) <= aims.POST_TRAINING, rows


def test_a_step_may_be_split_into_any_calls_with_evaluations_between_them() -> None:
    rows = equality.splits([equality.LAYOUTS[1]])
    assert max(max(by_one, against) for _, _, by_one, against in rows) <= aims.POST_TRAINING, rows


def test_what_cannot_be_trained_on_is_refused_on_all_ranks_and_nothing_changes() -> None:
    wrong = [one for one in refusals.refused() if not one.right]
    assert not wrong, wrong


def whole_and_in_parts(rank: int) -> list[Any]:
    """A job by `train_batch` and the same by its parts, with the schedule moved by hand; at last a dropped gradient."""

    def sequences(step: int) -> list[Any]:
        return [{"input_ids": item["input_ids"], "labels": item["labels"]} for item in share(rank, rollouts(step))]

    states, records = [], []
    for in_parts in (False, True):
        engine = small_engine(rank, data=None)
        for step in range(STEPS):
            if not in_parts:
                engine.train_batch(sequences(step))
            else:
                engine.forward_backward([[5, 6, 7]] * 2)
                (engine.zero_grad if step % 2 else engine.optimizer.zero_grad)()
                loss = engine.forward_backward(sequences(step))
                norm = engine.optimizer_step()
                engine.lr_scheduler.step()
                record = engine.last_step
                assert (float(loss), norm) == (pytest.approx(record.loss, rel=1e-6), record.grad_norm)
        states.append(whole_state(engine))
        record = engine.last_step
        records.append(
            (record.step, record.loss, record.grad_norm, record.learning_rate, record.num_targets, record.plan)
        )
        engine.destroy()
    return [same(*states), *records]


def test_the_parts_of_a_step_make_the_step_to_the_bit() -> None:
    for equal, whole, parts in run_ranks(whole_and_in_parts, 4, timeout=200):
        assert equal
        assert whole == parts


def example(rank: int) -> list[float]:
    """The script of examples/ on this rank: rewards of its updates."""
    rank_environment(rank)
    spec = importlib.util.spec_from_file_location("grpo", ROOT / "examples" / "grpo.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.CONFIG["hydra"] |= {"self_check": "off", "planner": {"ahead": 0}}
    with mock.patch("sys.argv", ["grpo.py", "--updates", "6"]):
        found: list[float] = script.main()
    return found


def test_the_example_learns() -> None:
    first, *_, last = run_ranks(example, 2, timeout=200)[0]
    assert first < 0.7
    assert last > 0.85


def test_optimizer_step_needs_gradients() -> None:
    def refused(rank: int) -> str:
        engine = small_engine(rank, data=None)
        with pytest.raises(ConfigError) as caught:
            engine.optimizer_step()
        return str(caught.value)

    assert "has no gradients to apply" in run_ranks(refused, 1)[0]


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
def test_full_parameters_are_what_a_folder_of_the_model_holds(family: str, tmp_path: Path) -> None:
    def given(rank: int) -> tuple[list[str], dict[str, torch.Tensor], int]:
        engine = small_engine(rank, model=build_model(family, torch.float32), data=None, strategies=["tp2", "2*tp1"])
        engine.train_batch([[5, 6, 7, 8]] * 3)
        engine.save_16bit_model(tmp_path)
        masters = engine.crew.masters
        largest = 4 * max(sum(param.numel for param in bucket.params) for bucket in masters.buckets)
        with Live() as live:
            for _ in engine.full_parameters():
                pass
        assert live.most - masters.trained.flat.nbytes < 2 * largest, "a bucket at a time"
        found = dict(engine.full_parameters())
        return list(found), found if rank else {}, len(list(engine.full_parameters(ranks=[1])))

    (names, _, none), (others, found, count) = run_ranks(given, 2, timeout=120)
    assert names == others
    assert (none, count) == (0, len(names))
    folder = load_file(tmp_path / "model.safetensors")
    assert folder.keys() == found.keys()
    assert all(torch.equal(folder[name], found[name]) for name in folder)
    assert family != "qwen3_moe" or any("experts.3." in name for name in names)


def test_what_a_model_keeps_in_fp32_leaves_it_so(tmp_path: Path) -> None:
    """As transformers saves and loads it; plain DeepSpeed's BF16 rounds it."""

    def given(rank: int) -> tuple[dict[str, Tensor], ...]:
        config = small_config(2, strategies=["tp2", "2*tp1"], context_length=64) | {"bf16": {"enabled": True}}
        engine = small_engine(rank, kept_in_fp32()[0], config, data=None)
        engine.train_batch([[5, 6, 7, 8]] * 3)
        engine.save_16bit_model(tmp_path)
        return engine.fp32_state_dict(), engine.module.state_dict(), dict(engine.full_parameters())

    (masters, read, found), _ = run_ranks(given, 2, timeout=120)
    folder, kept = load_file(tmp_path / "model.safetensors"), kept_in_fp32()[1]
    assert same(folder, found)
    assert len(kept) == sum(value.dtype == torch.float32 for value in folder.values()) < len(folder)
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").named_parameters():
        assert value.dtype == read[name].dtype == (torch.float32 if name in kept else torch.bfloat16), name
        assert torch.equal(value, masters[name].to(value.dtype)), name
        assert torch.equal(value, read[name]), name


@pytest.mark.parametrize("family", ["lora and whole modules", "lora of the ends", "lora beside another"])
def test_full_parameters_of_a_peft_model(family: str, tmp_path: Path) -> None:
    def given(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        model = build_model(family, torch.float32)
        engine = small_engine(rank, model=model, data=None, strategies=["2*tp1", "pp2"])
        engine.train_batch([[5, 6, 7, 8]] * 3)
        engine.save_16bit_model(tmp_path)
        found = [dict(engine.full_parameters(adapters=how)) for how in ("merged", "alone")]
        none = [list(engine.full_parameters(adapters=how, ranks=[1])) for how in ("merged", "alone")]
        return (found[0], found[1], 0) if rank else ({}, {}, len(none[0]) + len(none[1]))

    (_, _, none), (merged, alone, _) = run_ranks(given, 2, timeout=120)
    assert none == 0
    folder = load_file(tmp_path / "adapter_model.safetensors")
    assert folder.keys() == alone.keys()
    assert all(torch.equal(folder[name], alone[name]) for name in folder)
    again = build_model(family, torch.float32)
    set_peft_model_state_dict(again, folder)
    right = again.merge_and_unload().state_dict()
    assert right.keys() == merged.keys()
    assert all(torch.allclose(right[name], merged[name], rtol=1e-6, atol=1e-7) for name in right)


def test_what_cannot_be_merged_is_refused() -> None:
    def refused(rank: int) -> list[str]:
        found = []
        for family in ("lora with biases of its own", "llama"):
            engine = small_engine(rank, model=build_model(family, torch.float32), data=None)
            for how in ("merged", "alone", "both"):
                try:
                    found.append(str(len(dict(engine.full_parameters(adapters=how)))))
                except ConfigError as error:
                    found.append(str(error))
        return found

    biases, alone, both, whole, none, _ = run_ranks(refused, 1)[0]
    assert 'has a bias and the layer none, so it cannot be merged: take adapters "alone"' in biases
    assert int(alone) > 0
    assert int(whole) > 0
    assert '"merged" or "alone", and not \'both\'' in both
    assert "of a PEFT model, and this one is none" in none


def test_engines_of_one_process_group_train_as_if_each_were_alone() -> None:
    """Actor, critic and reference of a loop: models of their own, whose calls alternate. The reference is frozen."""

    def started(rank: int, which: int, trains: bool = True) -> Any:
        strategies = [["2*tp1", "pp2"], ["tp2", "2*tp1"], ["pp2"]][which]
        model, config = small_model(hidden=32 + 16 * which), small_config(2, strategies=strategies)
        if not trains:
            model.requires_grad_(False)
            del config["optimizer"], config["scheduler"]
        return small_engine(rank, data=None, model=model, config=config)

    def stepped(engine: Any, rank: int, which: int, step: int, reference: list[Tensor]) -> None:
        items = share(rank, rollouts(10 * which + step))
        assert len(reference) in (0, len(items))
        engine.forward_backward(items, GSPO())
        engine.optimizer_step()

    def job(rank: int) -> list[bool]:
        alone = []
        for which in range(3):
            engine = started(rank, which)
            for step in range(2 if which < 2 else 0):
                stepped(engine, rank, which, step, [])
            alone.append(whole_state(engine))
            right = engine.log_probs(share(rank, rollouts(1))).log_probs
            engine.destroy()
        engines = [started(rank, which, trains=which < 2) for which in range(3)]
        with pytest.raises(ConfigError, match="every parameter of the model is frozen: the engine evaluates"):
            engines[2].forward_backward(share(rank, rollouts(1)), GSPO())
        for step in range(2):
            engines[2].to("cpu")
            found = engines[2].log_probs(share(rank, rollouts(step))).log_probs
            for which in range(2):
                stepped(engines[which], rank, which, step, found)
        agrees = [same(one, whole_state(other)) for one, other in zip(alone[:2], engines[:2], strict=True)]
        for engine in engines:
            engine.destroy()
        agrees.append(all(torch.allclose(a, b, atol=2e-6) for a, b in zip(found, right, strict=True)))
        return agrees

    assert run_ranks(job, 2, timeout=200) == [[True] * 3] * 2
