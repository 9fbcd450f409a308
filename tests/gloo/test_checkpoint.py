"""Saving and loading: damage is refused on all ranks; DeepSpeed's, Hugging Face's and PEFT's formats in and out."""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.checkpoint import checkpointer
from ds_hydra.checkpoint.folder import complete_tags
from ds_hydra.checkpoint.universal import from_universal, to_universal
from ds_hydra.commands import convert
from ds_hydra.ranks.channel import Channel
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import CheckpointError
from tests.support.case import FLOAT32, Case
from tests.support.damages import DAMAGES, JOBS, damaged, forged, save
from tests.support.equivalence import make_engine, samples_of, traced_once
from tests.support.families import base_family, build_model
from tests.support.folder_trials import HOW, MOVES, ORDERS, PLANTS, SAVES, Saver, in_order, interrupted, planted
from tests.support.folder_trials import NAMES as NAMES_IN_FOLDER
from tests.support.small_job import same, sequences, small_engine, small_model, whole_state


# --- Saving and loading in an engine: damage is refused on all ranks; other formats come in and go out.
def saved(folder: Path, num_ranks: int = 2, steps: int = 1) -> dict[str, Tensor]:
    """A folder with two tags, "old" and "new"; the state of "new"."""

    def run(rank: int) -> dict[str, Tensor]:
        engine = small_engine(rank)
        engine.save_checkpoint(folder, "old")
        for _ in range(steps):
            engine.train_batch()
        engine.save_checkpoint(folder, "new", client_state={"note": [1, 2]})
        return whole_state(engine)

    return run_ranks(run, num_ranks)[0]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    saved(folder)
    return folder


# Saved by as many ranks as load, and by more: 400 damages and 300 forgeries besides those that a run draws.
LONG = [
    pytest.param(kind, saved_by, tried, range(n * count, (n + 1) * count), marks=pytest.mark.long)
    for tried, count in ((damaged, 67), (forged, 50))
    for n, (kind, saved_by) in enumerate((kind, saved_by) for saved_by in (2, 3) for kind in JOBS)
]


@pytest.mark.parametrize(
    ("kind", "saved_by", "tried", "seeds"),
    [
        ("usual", 3, damaged, range(len(DAMAGES))),
        pytest.param("usual", 3, forged, range(40), marks=pytest.mark.drawn),
        *LONG,
    ],
)
def test_a_changed_checkpoint_is_refused_or_loaded_whole(
    kind: str, saved_by: int, tried: Callable[..., dict[str, list[str]]], seeds: range, tmp_path: Path
) -> None:
    save(kind, tmp_path / "saved", saved_by)
    found = tried(kind, tmp_path / "saved", tmp_path / "run", seeds)
    assert {what: wrong for what, wrong in found.items() if wrong} == {}
    assert sum("(refused" in what for what in found) > len(seeds) // 4
    assert any("(loaded" in what for what in found)


@pytest.mark.parametrize("tag", ["../x", ""])
def test_a_tag_is_no_path(tag: str, tmp_path: Path) -> None:
    def run(rank: int) -> None:
        engine = small_engine(rank)
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(CheckpointError, match="not a name"):
                call(tmp_path, tag)

    run_ranks(run, 1)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_leaves_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk on one rank, a folder that is a file: an error on all, no new tag, the old one loads."""

    def run(rank: int) -> list[str]:
        engine = small_engine(rank, checkpoint={"dir": str(tmp_path), "asynchronous": False, "resume": False})
        engine.save_checkpoint(tmp_path, "old", client_state={"a": 1})
        engine.crew.world.channel.texts("")
        messages = []
        from ds_hydra.checkpoint import shard_file

        write = shard_file._write_all

        def full(handle: int, data: memoryview) -> None:
            raise OSError(28, "No space left on device", "rank_00001.safetensors")

        shard_file._write_all = full if rank == 1 else write
        for target, state in ((tmp_path, None), (tmp_path / "latest", None), (tmp_path, {"x": torch.ones(1)})):
            try:
                engine.save_checkpoint(target, "new", client_state=state)
            except CheckpointError as error:
                messages.append(str(error))
        shard_file._write_all = write
        assert engine.load_checkpoint(tmp_path)[1] == {"a": 1}
        return messages

    for messages in run_ranks(run, 2):
        assert len(messages) == 3
        assert "rank 1" in messages[0]
        assert "free space" in messages[0]
        assert "latest" in messages[1]
        assert "client_state" in messages[2]
    assert [path.name for path in sorted(tmp_path.glob("[!.]*"))] == ["latest", "old"]


def test_a_folder_that_is_gone_in_the_end_is_told_as_an_error_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the manifest can be written, nor what was written removed: the ranks hear of it all the same."""
    from ds_hydra.checkpoint import folder, write

    def stale(*_: Any) -> None:
        raise OSError(116, "Stale file handle")

    saver = Saver(tmp_path, Channel(None, 0, 1))
    monkeypatch.setattr(write, "_finish", stale)
    monkeypatch.setattr(folder, "remove", stale)
    with pytest.raises(CheckpointError, match="Stale file handle: correct that or save elsewhere"):
        saver.save(1, "a")


def test_saving_in_the_background_is_saving(tmp_path: Path) -> None:
    """Training goes on while files are written; what is saved is the state at the call, also the second time."""

    def run(rank: int) -> tuple[bool, list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        from ds_hydra.checkpoint import write

        go = threading.Event()
        original = write.write_shard
        write.write_shard = lambda *args: (go.wait(30), original(*args))[1]
        engine = small_engine(rank, checkpoint={"dir": str(tmp_path), "asynchronous": True})
        engine.train_batch()
        states = [whole_state(engine)]
        engine.save_checkpoint(tmp_path)
        engine.train_batch()
        states.append(whole_state(engine))
        busy = engine.crew.checkpoints.writer.busy
        go.set()
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        other, loaded = small_engine(rank), []
        for tag in ("global_step1", "global_step2"):
            other.load_checkpoint(tmp_path, tag)
            loaded.append(whole_state(other))
        return busy, states, loaded

    for busy, states, loaded in run_ranks(run, 2):
        assert busy
        assert all(map(same, states, loaded))
    assert [tag for _, tag in complete_tags(tmp_path)] == ["global_step2", "global_step1"]


def test_what_was_frozen_begins_without_moments(tmp_path: Path) -> None:
    """A checkpoint of a partly frozen model goes on with all of it trained, in other buckets."""

    def run(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        model = small_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".layers.1." not in name)
        engine = small_engine(rank, model)
        engine.train_batch()
        engine.save_checkpoint(tmp_path)
        before, frozen = whole_state(engine), engine.crew.masters.frozen.gather_full(engine.crew.world.group)
        engine.destroy()
        other = small_engine(rank)
        other.train_batch()
        other.load_checkpoint(tmp_path)
        return frozen, before, whole_state(other)

    for frozen, before, after in run_ranks(run, 2):
        assert frozen
        assert all(torch.equal(after[name], value) for name, value in before.items())
        for name, value in frozen.items():
            assert torch.equal(after[f"{name}/master"], value)
            assert not any(after[f"{name}/{key}"].any() for key in ("exp_avg", "exp_avg_sq"))


def test_a_failed_save_in_the_background_is_raised_by_the_next(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        from ds_hydra.checkpoint import shard_file

        def full(handle: int, data: memoryview) -> None:
            raise OSError(28, "No space left on device")

        engine = small_engine(rank, checkpoint={"dir": str(tmp_path), "asynchronous": True})
        write, shard_file._write_all = shard_file._write_all, full
        engine.save_checkpoint(tmp_path)
        with pytest.raises(CheckpointError, match="free space"):
            engine.wait_for_checkpoint()
        shard_file._write_all = write
        engine.save_checkpoint(tmp_path)
        engine.destroy()

    run_ranks(run, 2)
    assert [tag for _, tag in complete_tags(tmp_path)] == ["global_step0"]


@pytest.mark.parametrize("kills", [15, pytest.param(100, marks=pytest.mark.long)])
def test_killed_while_saving_one_tag_always_loads(kills: int, tmp_path: Path) -> None:
    """Saves over the same tags again and again, killed at random instants: no tag is ever half there."""
    pause = random.Random(0)
    last = 0
    for _ in range(kills):
        Saver.killed(tmp_path, first=last + 1, seconds=pause.uniform(0.0, 0.2))
        step = Saver.verify(tmp_path)
        assert step >= last
        last = step
    assert last > 1


@pytest.mark.parametrize(
    ("which", "each"),
    [pytest.param(which, 4, marks=pytest.mark.drawn) for which in SAVES]
    + [pytest.param(which, 1, marks=pytest.mark.long) for which in SAVES],
)
def test_a_save_that_is_interrupted_at_any_call_leaves_the_old_or_the_new(
    which: str, each: int, tmp_path: Path
) -> None:
    """Each fourth call of some seventy, or every one, in four ways."""
    tried = 0
    for at, how in enumerate(HOW):
        nth = 1 + at % each
        while (wrong := interrupted(tmp_path / "run", which, nth, how)) is not None:
            assert not wrong, f"{how} call {nth}: {wrong}"
            nth, tried = nth + each, tried + 1
    assert tried > 200 // each


@pytest.mark.parametrize(
    ("frozen", "each"),
    [pytest.param(frozen, len(ORDERS) // 20, marks=pytest.mark.drawn) for frozen in (MOVES + 1, 2, 4, 6)]
    + [pytest.param(frozen, 1, marks=pytest.mark.long) for frozen in range(1, MOVES + 2)],
)
def test_two_jobs_in_one_folder_in_any_order(frozen: int, each: int, tmp_path: Path) -> None:
    """One of two that are alive saves, the other is told; who was frozen and comes back saves no more."""
    for order in ORDERS[::each]:
        assert not in_order(tmp_path / "run", order, frozen), order


@pytest.mark.parametrize("what", PLANTS)
def test_what_others_have_put_into_a_folder_is_neither_followed_nor_waited_for(what: str, tmp_path: Path) -> None:
    if what == "stranger's" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    for name in NAMES_IN_FOLDER:
        assert not planted(tmp_path / "trial", what, name), name


def test_nan_is_neither_saved_nor_loaded(tmp_path: Path) -> None:
    def run(rank: int) -> list[str]:
        engine = small_engine(rank)
        engine.save_checkpoint(tmp_path, "good")
        masters, told = engine.crew.masters.trained.flat, []
        if rank == 1:
            masters[3] = float("nan")
        for bad in (False, True):
            if bad:
                checkpointer.check_masters = lambda masters: None
            try:
                engine.save_checkpoint(tmp_path, "bad")
                engine.load_checkpoint(tmp_path, "bad")
            except CheckpointError as error:
                told.append(str(error))
        engine.load_checkpoint(tmp_path, "good")
        assert not masters.isnan().any()
        return told

    for saving, loading in run_ranks(run, 2):
        assert "saving checkpoint" in saving
        assert "failed on rank 1: 1 of" in saving
        assert "loading checkpoint" in loading
        assert "are NaN: go on from a checkpoint of before" in loading


def test_shards_are_safetensors(template: Path) -> None:
    tensors = load_file(template / "new" / "rank_00000.safetensors")
    assert {name.rpartition("/")[2] for name in tensors} == {"master", "exp_avg", "exp_avg_sq", "cpu"}


# --- Checkpoints of DeepSpeed and folders of Hugging Face, into ours and out of them.
TOKENS = sequences()[2]


def test_hugging_face_folders_go_out_and_in(tmp_path: Path) -> None:
    """Export in shards, load by from_pretrained; load into an engine on other ranks: the same parameters."""
    from transformers import AutoModelForCausalLM

    def export(rank: int) -> dict[str, Tensor]:
        engine = small_engine(rank)
        engine.train_batch()
        engine.save_16bit_model(tmp_path / "hf", max_shard_size="20KB")
        return engine.fp32_state_dict()

    trained = run_ranks(export, 2)[0]
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items() if name in trained)
    assert model.config.tie_word_embeddings

    def back(rank: int) -> dict[str, Tensor]:
        engine = small_engine(rank)
        engine.load_16bit_model(tmp_path / "hf")
        with pytest.raises(CheckpointError, match="safetensors"):
            engine.load_16bit_model(tmp_path)
        return engine.fp32_state_dict()

    assert same(run_ranks(back, 4)[0], trained)


def deepspeed_engine(rank: int, universal: bool = False, stage: int = 1, bf16: bool = False) -> Any:
    """Plain DeepSpeed with ZeRO on the same model."""

    rank_environment(rank)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = small_model(tied=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "gradient_clipping": 1.0,
        "checkpoint": {"load_universal": universal},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def deepspeed_step(engine: Any, tokens: Tensor) -> float:
    logits = engine(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, tokens[1:])
    engine.backward(loss)
    engine.step()
    return loss.item()


def our_config(**hydra: Any) -> dict[str, Any]:
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "hydra": {"tokens_per_step": 100, "strategies": ["pp2"], "steps_file": None, "planner": {"ahead": 0},
                  "self_check": "off", "faults": {"frozen_seconds": 0}, **hydra},
    }  # fmt: skip


def our_engine(rank: int, tokens: Tensor, **hydra: Any) -> Any:
    import ds_hydra

    rank_environment(rank)
    return ds_hydra.initialize(model=small_model(tied=False), training_data=[tokens], config=our_config(**hydra))[0]


@pytest.mark.parametrize(
    ("stage", "bf16"),
    [(1, False), pytest.param(2, True, marks=pytest.mark.drawn), pytest.param(3, False, marks=pytest.mark.drawn)],
)
def test_from_deepspeed_and_on(tmp_path: Path, stage: int, bf16: bool) -> None:
    """DeepSpeed trains, and we go on as the errors say: FP32 weights are equal to the bit, the next losses equal."""

    def theirs(rank: int) -> tuple[list[float], dict[str, Tensor]]:
        engine = deepspeed_engine(rank, stage=stage, bf16=bf16)
        for _ in range(2):
            deepspeed_step(engine, TOKENS)
        engine.save_checkpoint(str(tmp_path / "ds"), tag="t", client_state={"best": 1.5})
        weights = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
        return [deepspeed_step(engine, TOKENS) for _ in range(2)], weights

    losses, weights = run_ranks(theirs, 2)[0]

    def refused(rank: int) -> list[Any]:
        engine = our_engine(rank, TOKENS)
        found: list[Any] = []
        with pytest.raises(CheckpointError) as told:
            engine.load_checkpoint(tmp_path / "ds")
        found.append(str(told.value))
        if stage < 3:
            found.append(engine.load_checkpoint(tmp_path / "ds", load_module_only=True))
            found.append((engine.fp32_state_dict(), engine.global_steps))
        with pytest.raises(CheckpointError, match=f"names as its latest, is a checkpoint of .*{stage}"):
            our_engine(rank, TOKENS, checkpoint={"dir": str(tmp_path / "ds")})
        return found

    told, *loaded = run_ranks(refused, 2)[0]
    if loaded:
        right = {name: value.bfloat16().float() if bf16 else value for name, value in weights.items()}
        assert loaded[0] == (str(tmp_path / "ds/t"), {"best": 1.5})
        assert same(loaded[1][0], right)
        assert loaded[1][1] == 0
    (command,) = re.findall("`ds-hydra convert ([^`]+)`", told)
    assert convert.main(command.split()) == 0

    def ours(rank: int) -> tuple[dict[str, Tensor], list[float], int]:
        engine = our_engine(rank, TOKENS)
        engine.load_checkpoint(tmp_path / "ds")
        return engine.fp32_state_dict(), [float(engine.train_batch()) for _ in range(2)], engine.global_steps

    state, mine, step = run_ranks(ours, 2)[0]
    assert same(state, weights)
    assert step == 4
    assert mine == pytest.approx(losses, rel=2e-2 if bf16 else 1e-5)


@pytest.mark.drawn
def test_to_deepspeed_and_on(tmp_path: Path) -> None:
    """We train, DeepSpeed goes on."""

    def ours(rank: int) -> tuple[dict[str, Tensor], list[float]]:
        engine = our_engine(rank, TOKENS)
        for _ in range(2):
            engine.train_batch()
        engine.save_checkpoint(tmp_path / "ours")
        return engine.fp32_state_dict(), [float(engine.train_batch()) for _ in range(2)]

    weights, losses = run_ranks(ours, 2)[0]
    to_universal(tmp_path / "ours", None, tmp_path / "ds", "t_universal")

    def theirs(rank: int) -> tuple[dict[str, Tensor], list[float], int]:
        engine = deepspeed_engine(rank, universal=True)
        path, _ = engine.load_checkpoint(str(tmp_path / "ds"))
        assert path is not None
        loaded = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        return loaded, [deepspeed_step(engine, TOKENS) for _ in range(2)], engine.global_steps

    loaded, mine, step = run_ranks(theirs, 2)[0]
    assert same(loaded, weights)
    assert step == 4
    assert mine == pytest.approx(losses, rel=1e-5)


def test_a_pickle_with_a_payload_is_not_run(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    place = tmp_path / "uni" / "zero" / "w"
    place.mkdir(parents=True)
    torch.save({"param": Payload()}, place / "fp32.pt")
    torch.save({"global_steps": 1}, tmp_path / "uni" / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"fp32\.pt"):
        from_universal(tmp_path / "uni", tmp_path / "out", "a")
    assert not (tmp_path / "executed").exists()


# --- Adapters on ranks: saved as PEFT saves them, and loaded by PEFT.
SAVED_TOKENS = torch.arange(3, 40)[None]


def _kept(rank: int, case: Case) -> tuple[int, int, int]:
    """Elements that the optimizer has here, elements of frozen weights, and bytes of their gradients."""
    engine = make_engine(case, samples_of(case))
    engine.train_batch()
    moved = sum(p.numel() for group in engine.optimizer.param_groups for p in group["params"])
    frozen = engine.crew.masters.frozen
    return moved, frozen.flat.numel(), sum(grad.nbytes for grad in frozen.grads)


def test_frozen_weights_are_shared_out_without_gradients_or_states() -> None:
    case = Case("", "lora", ("tp2",), FLOAT32, steps=1).shortened()
    with traced_once(case):
        found = run_ranks(_kept, 2, case, timeout=120)
    parameters = list(build_model("lora", torch.float32).parameters())
    for which, trained in ((0, True), (1, False)):
        assert sum(each[which] for each in found) == sum(p.numel() for p in parameters if p.requires_grad is trained)
    assert all(num_bytes == 0 for _, _, num_bytes in found)


def _pulled(rank: int, case: Case, folder: str) -> list[int]:
    """Bytes that came in a step: the first, the next, one after an evaluation, one after loading."""
    data = samples_of(case)
    engine = make_engine(case, data)
    engine.save_checkpoint(folder)
    found: list[int] = []

    def step() -> None:
        engine.train_batch()
        found.append(engine.last_step.pull_bytes)

    step()
    step()
    engine.eval_batch(data[:4])
    step()
    engine.load_checkpoint(folder)
    step()
    return found


def test_frozen_weights_are_pulled_when_they_may_have_changed(tmp_path: Path) -> None:
    case = Case("", "lora", ("tp2",), FLOAT32, steps=2).shortened()
    with traced_once(case):
        results = run_ranks(_pulled, 2, case, str(tmp_path), timeout=120)
    for first, again, evaluated, loaded in results:
        assert first == loaded
        assert again == evaluated < first / 4


def _save(rank: int, case: Case, folder: str) -> dict[str, Tensor] | None:
    """Train, save; the logits of the model in one process with the parameters that the ranks hold."""
    engine = make_engine(case, samples_of(case))
    for _ in range(case.steps):
        engine.train_batch()
    engine.save_16bit_model(folder)
    values = engine.fp32_state_dict()
    return values if rank == 0 else None


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=SAVED_TOKENS).logits
    return logits


@pytest.mark.drawn
@pytest.mark.parametrize(
    "family",
    ["lora with biases", "lora and whole modules", "lora beside another", "dora", "lora and tokens"],
)  # fmt: skip
def test_peft_loads_what_was_saved(family: str, tmp_path: Path) -> None:
    """The base that it started from and the saved adapters make the model that was trained."""
    case = Case("", family, ("tp2", "pp2"), FLOAT32, steps=2).shortened()
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "model.safetensors").write_text("a base model")
    with traced_once(case):
        values = run_ranks(_save, 2, case, str(tmp_path), timeout=120)[0]
    trained = build_model(family, torch.float32)
    before = _logits(trained)
    trained.load_state_dict(values)
    base = build_model(base_family(family), torch.float32)
    loaded = PeftModel.from_pretrained(base, str(tmp_path))
    assert torch.equal(_logits(loaded), _logits(trained))
    assert not torch.allclose(_logits(loaded), before, atol=1e-3), "training has moved it"
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        keys = set(file.keys())
    assert not [key for key in keys if "base_layer.weight" in key or "original_module" in key], "the base is not saved"
    if family == "lora beside another":
        loaded.load_adapter(str(tmp_path / "other"), "other")
        state, expected = loaded.state_dict(), trained.state_dict()
        assert all(torch.equal(state[name], value) for name, value in expected.items() if ".other." in name)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert (tmp_path / "model.safetensors").read_text() == "a base model"
