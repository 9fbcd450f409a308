"""A run that stops and goes on is the run that never stopped, on other ranks and in the same process too."""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hydra.checkpoint.folder import complete_manifests, complete_tags
from ds_hydra.config.hydra_block import HydraConfig, parse_config
from ds_hydra.engine import saving
from ds_hydra.host.released import ReleasedParameter
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError
from tests.support.families import build_model
from tests.support.small_job import same, sequences, shared_source, small_config, small_engine, small_model, whole_state

# --- A run that stops and goes on is the run that never stopped: parameters to the bit, sequences one by one.
STEPS = 5


def undisturbed(rank: int) -> list[dict[str, Tensor]]:
    """State after each step."""
    engine = small_engine(rank)
    states = []
    for _ in range(STEPS):
        engine.train_batch()
        states.append(whole_state(engine))
    return states


def interrupted(rank: int, folder: Path, states: list[dict[str, Tensor]], stop: int) -> list[int]:
    """Stop after a step, go on in a new engine, stop a step later, go on in a third: steps whose states differ."""
    differ: list[int] = []
    engine = small_engine(rank)
    for _ in range(stop):
        engine.train_batch()
    for again in (1, STEPS - stop - 1):
        engine.save_checkpoint(folder)
        engine = small_engine(rank)
        engine.load_checkpoint(folder)
        for _ in range(again):
            engine.train_batch()
            if not same(whole_state(engine), states[engine.global_steps - 1]):
                differ.append(engine.global_steps)
    return differ


@pytest.fixture(scope="module")
def states() -> list[dict[str, Tensor]]:
    """Those of 4 ranks that never stopped."""
    found: list[dict[str, Tensor]] = run_ranks(undisturbed, 4)[0]
    return found


@pytest.mark.drawn
@pytest.mark.parametrize("stop", [1, 3])
def test_stopping_twice_changes_no_bit(stop: int, states: list[dict[str, Tensor]], tmp_path: Path) -> None:
    """With both rows it has gone on after each step but the last."""
    assert not same(states[0], states[1])
    assert run_ranks(interrupted, 4, tmp_path, states, stop, timeout=200) == [[]] * 4


def dropping_model() -> Any:
    """A model with dropout of every kind."""
    model = small_model()
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Sequential(layer.mlp.act_fn, torch.nn.Dropout(0.1))
        layer.self_attn.attention_dropout = 0.1
    return model


def dropping(rank: int) -> Any:
    """An engine that trains it, on a rank whose generator nobody else's is."""
    model = dropping_model()
    torch.manual_seed(rank + 17)
    return small_engine(rank, model)


def dropped(rank: int, folder: Path) -> tuple[bool, bool]:
    """Stop and go on with generators that are somewhere else: is it the same run? And with another seed?"""
    engine = dropping(rank)
    for _ in range(2):
        engine.train_batch()
    engine.save_checkpoint(folder)
    engine.train_batch()
    engine.train_batch()
    undisturbed = whole_state(engine)
    again = dropping(rank)
    again.load_checkpoint(folder)
    torch.manual_seed(rank + 4711)
    again.train_batch()
    again.train_batch()
    other = dropping(rank)
    other.crew.stepper._seed += 1
    other.load_checkpoint(folder)
    other.train_batch()
    other.train_batch()
    return same(whole_state(again), undisturbed), same(whole_state(other), undisturbed)


@pytest.mark.drawn
def test_dropout_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    with shared_source(dropping_model()):
        results = run_ranks(dropped, 2, tmp_path, timeout=200)
    for same_seed, other_seed in results:
        assert same_seed
        assert not other_seed


def leg(
    rank: int, folder: Path, steps: int, reorder: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[tuple[int, ...]]]:
    """Load, train, save: state after loading, state when saved, sequences trained on."""
    engine = small_engine(rank, reorder_steps=reorder)
    engine.load_checkpoint(folder)
    loaded = whole_state(engine)
    order = []
    for _ in range(steps):
        order.append(engine.sampler.batch(engine.global_steps))
        engine.train_batch()
    engine.save_checkpoint(folder)
    return loaded, whole_state(engine), order


def all_batches(rank: int, steps: int, reorder: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The sequences of each step as they are run, and as they are drawn."""
    samplers = [small_engine(rank, reorder_steps=way).sampler for way in (reorder, 1)]
    made, drawn = ([sampler.batch(step) for step in range(steps)] for sampler in samplers)
    return made, drawn


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("ranks", "steps", "reorder"),
    [
        pytest.param((8, 4, 6, 8), (2, 2, 2, 2), 1, marks=pytest.mark.long),
        ((3, 4), (2, 1), 1),
        pytest.param((4, 2), (1, 3), 2, id="within a pair"),
    ],
)
def test_any_number_of_ranks_goes_on(
    ranks: tuple[int, ...], steps: tuple[int, ...], reorder: int, tmp_path: Path
) -> None:
    """Masters and moments survive to the bit, and no sequence is repeated or left out."""
    saved: dict[str, Tensor] = {}
    order: list[tuple[int, ...]] = []
    for num_ranks, count in zip(ranks, steps, strict=True):
        results = run_ranks(leg, num_ranks, tmp_path, count, reorder, timeout=200)
        loaded, after, drawn = results[0]
        assert all(same(other[0], loaded) and other[2] == drawn for other in results)
        assert not saved or same(loaded, saved)
        saved, order = after, order + drawn
    undisturbed, drawn = run_ranks(all_batches, 1, sum(steps), reorder)[0]
    assert order == undisturbed
    assert sorted(sum(order, ())) == sorted(sum(drawn, ()))


def test_steps_that_are_not_known_ahead_are_not_reordered() -> None:
    def refused(rank: int) -> list[str]:
        given: list[Any] = [None, iter([])]
        told = []
        for data in given:
            try:
                small_engine(rank, data=data, reorder_steps=2, context_length=64)
            except ConfigError as error:
                told.append(str(error))
        return told

    no_data, stream = run_ranks(refused, 1)[0]
    assert "hydra.reorder_steps 2 needs" in no_data
    assert "handed in one by one" in no_data
    assert "a stream" in stream


@pytest.mark.drawn
def test_resume_happens_by_itself(states: list[dict[str, Tensor]], tmp_path: Path) -> None:
    """With hydra.checkpoint a restarted script needs no line of its own, and passes over what is damaged."""
    config = {"checkpoint": {"dir": str(tmp_path), "every": 2, "keep_last": 2}}

    def run(rank: int, steps: int) -> tuple[int, dict[str, Tensor]]:
        engine = small_engine(rank, **config)
        begun = engine.global_steps
        for _ in range(steps):
            engine.train_batch()
        return begun, whole_state(engine)

    assert run_ranks(run, 4, 4)[0][0] == 0
    begun, state = run_ranks(run, 4, 1)[0]
    assert begun == 4
    assert same(state, states[4])
    path = tmp_path / "global_step4" / "rank_00001.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert run_ranks(run, 2, 0)[0][0] == 2
    for path in tmp_path.glob("*/rank_00000.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(RuntimeError, match="none of the 2 checkpoints"):
        run_ranks(run, 2, 0)


def test_random_state_goes_on_with_the_same_ranks(tmp_path: Path) -> None:
    def run(rank: int) -> tuple[Tensor, Tensor, Any]:
        engine = small_engine(rank)
        torch.manual_seed(rank)
        engine.save_checkpoint(tmp_path, client_state={"rank": 0})
        expected = torch.rand(3)
        path, client = engine.load_checkpoint(tmp_path)
        return expected, torch.rand(3), (path, client)

    for expected, drawn, loaded in run_ranks(run, 2):
        assert torch.equal(expected, drawn)
        assert loaded == (str(tmp_path / "global_step0"), {"rank": 0})


def second_stage(rank: int, folder: Path, steps: int, data: list[Tensor], **hydra: Any) -> Any:
    """A job on other data that begins with the weights in a folder, after some steps."""
    config = {"dir": str(folder), "every": 1, "resume": "weights"}
    engine = small_engine(rank, data=data, checkpoint=config, **hydra)
    begun = engine.global_steps, engine.fp32_state_dict(), engine.get_lr(), engine.sampler.saved(engine.global_steps)
    for _ in range(steps):
        engine.train_batch()
    state = whole_state(engine)
    engine.destroy()
    return begun, state


@pytest.mark.drawn
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_second_stage_begins_with_the_weights_alone(num_ranks: int, tmp_path: Path) -> None:
    """Other data, ranks and strategies: step 0 with nothing else of the first; a restart goes on with its own."""
    other = [data[: len(data) // 2 + 2] for data in sequences()]

    def first(rank: int) -> Any:
        engine = small_engine(rank)
        for _ in range(3):
            engine.train_batch()
        engine.save_checkpoint(tmp_path / "run")
        return engine.fp32_state_dict()

    def by_hand(rank: int) -> Any:
        engine = small_engine(rank, data=other)
        engine.load_checkpoint(tmp_path / "run", load_module_only=True)
        for _ in range(2):
            engine.train_batch()
        return whole_state(engine)

    def refused(rank: int) -> str:
        with pytest.raises(CheckpointError) as error:
            small_engine(rank, data=other, checkpoint={"dir": str(tmp_path / "run")})
        return str(error.value)

    weights = run_ranks(first, 2)[0]
    for text in run_ranks(refused, num_ranks):
        assert text.count("another job") == 1
        assert '"resume": "weights"' in text
        assert "global_step3" in text
    expected = run_ranks(by_hand, num_ranks)[0]
    (step, begun, lr, place), state = run_ranks(second_stage, num_ranks, tmp_path / "run", 1, other)[0]
    assert step == 0
    assert same(begun, weights)
    assert lr == [0.0, 0.0]
    assert (place["step"], place["position"]) == (0, 0)
    assert not same(state, expected)
    (step, _, _, place), state = run_ranks(second_stage, num_ranks, tmp_path / "run", 1, other)[0]
    assert (step, place["step"]) == (1, 1)
    assert same(state, expected)
    assert [found.stage for found in complete_manifests(tmp_path / "run")] == [1, 1, 0]


def test_going_back_begins_a_branch_that_a_restart_follows(tmp_path: Path) -> None:
    """What the script has named stays, as do checkpoints of the branch that was left."""

    def run(rank: int, steps: int, back_to: str = "") -> int:
        engine = small_engine(rank, checkpoint={"dir": str(tmp_path), "every": 1, "keep_last": 2})
        begun = engine.global_steps
        if back_to:
            engine.load_checkpoint(tmp_path, back_to)
        for _ in range(steps):
            engine.train_batch()
            if engine.global_steps == 1:
                engine.save_checkpoint(tmp_path, "best")
        engine.destroy()
        return begun

    assert run_ranks(run, 2, 4) == [0, 0]
    assert [tag for _, tag in complete_tags(tmp_path)] == ["global_step4", "global_step3", "best"]
    assert run_ranks(run, 2, 1, "best") == [4, 4]
    assert run_ranks(run, 2, 1) == [2, 2]
    assert sorted(complete_tags(tmp_path)) == [
        (1, "best"), (2, "global_step2"), (3, "global_step3"), (4, "global_step4"),
    ]  # fmt: skip
    assert complete_tags(tmp_path)[0] == (3, "global_step3")
    assert not list(tmp_path.glob(".*"))
    assert run_ranks(run, 2, 2) == [3, 3]
    assert [tag for _, tag in complete_tags(tmp_path)] == ["global_step5", "global_step4", "best"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_is_tried_again_at_the_next_steps(asynchronous: bool, tmp_path: Path) -> None:
    """A disk that is full for a while costs no job; one that stays full ends it after seven tries."""

    def run(rank: int) -> tuple[list[int], int, str]:
        from ds_hydra.checkpoint import shard_file

        block = {"dir": str(tmp_path), "every": 3, "asynchronous": asynchronous}
        engine = small_engine(rank, checkpoint=block)
        write, saved = shard_file._write_all, []

        def full(handle: int, data: memoryview) -> None:
            raise OSError(28, "No space left on device")

        for step in range(1, 8):
            shard_file._write_all = full if rank == 1 and step < 5 else write
            engine.train_batch()
            if engine.crew.checkpoints.writer.busy:
                engine.crew.checkpoints.writer._thread.join()
            saved = [number for number, _ in complete_tags(tmp_path)]
        engine.wait_for_checkpoint()
        shard_file._write_all = full
        saving._TRIES = 2
        told = ""
        while not told and engine.global_steps < 13:
            try:
                engine.train_batch()
            except CheckpointError as error:
                told = str(error)
        return saved, engine.global_steps, told

    for saved, ended, told in run_ranks(run, 2):
        assert max(saved) >= 5
        assert 8 < ended < 13
        assert "free space" in told


def test_a_second_job_in_the_folder_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    """One that lives goes on; the other ends with 74 before its first step, though the same command."""

    def first(rank: int) -> None:
        engine = small_engine(rank, checkpoint={"dir": str(tmp_path), "every": 1})
        engine.train_batch()
        (tmp_path / ".began").touch()
        while not (tmp_path / ".ended").exists():
            time.sleep(0.1)
        engine.train_batch()

    def second(rank: int) -> str:
        with pytest.raises(CheckpointError) as error:
            small_engine(rank, checkpoint={"dir": str(tmp_path), "every": 1})
        return str(error.value)

    with ThreadPoolExecutor(1) as beside:
        lives = beside.submit(run_ranks, first, 1)
        while not (tmp_path / ".began").exists():
            time.sleep(0.1)
        told = run_ranks(second, 2)
        (tmp_path / ".ended").touch()
        lives.result()
    assert all("is in use: process" in text and "is alive" in text for text in told)
    assert [step for step, _ in complete_tags(tmp_path)] == [2, 1]


def test_weights_of_nowhere_are_refused(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        with pytest.raises(CheckpointError, match="holds no checkpoint to take them from"):
            small_engine(rank, checkpoint={"dir": str(tmp_path), "resume": "weights"})

    run_ranks(run, 2)


def test_what_cannot_be_written_is_told_before_step_0(tmp_path: Path) -> None:
    """A folder that is a file, on all ranks; one that only one rank cannot write in, too."""
    (tmp_path / "file").write_text("")

    def run(rank: int) -> list[str]:
        told = []
        with pytest.raises(CheckpointError) as error:
            small_engine(rank, checkpoint={"dir": str(tmp_path / "file")})
        told.append(str(error.value))
        from ds_hydra.checkpoint import folder as folders

        def full(path: Path, text: str) -> None:
            raise OSError(28, "No space left on device", str(path))

        if rank == 1:
            folders.write_durably = full
        with pytest.raises(CheckpointError) as error:
            small_engine(rank, checkpoint={"dir": str(tmp_path / "run")})
        return [*told, str(error.value)]

    for first, second in run_ranks(run, 2):
        assert str(tmp_path / "file") in first
        assert "save elsewhere" in first
        assert "failed on rank 1" in second
        assert "free space" in second
    assert not list((tmp_path / "run").iterdir())


# --- A job whose ranks share the heads of recurrent layers goes on with ranks that share them otherwise.
FAMILY = "nemotron_h"


def leg_of_heads(rank: int, saved: Path, strategies: list[str], steps: int, to: Path) -> Any:
    """Load, train, save: state after loading, and when saved."""
    engine = small_engine(rank, build_model(FAMILY, torch.float32), strategies=strategies)
    engine.load_checkpoint(saved)
    loaded = whole_state(engine)
    for _ in range(steps):
        engine.train_batch()
    engine.save_checkpoint(to)
    return loaded, whole_state(engine)


@pytest.mark.long
def test_heads_that_were_shared_otherwise_go_on(tmp_path: Path) -> None:
    """The state is the same to the bit, and so is the next step, but for rounding, whoever shares the heads then."""
    with shared_source(build_model(FAMILY, torch.float32)):
        first = run_ranks(leg_of_heads, 4, tmp_path, ["tp4", "tp2sp2"], 2, tmp_path, timeout=300)[0][1]
        ends: list[dict[str, Tensor]] = []
        for number, strategy in enumerate(("sp2", "tp2", "tp1")):
            ranks = 1 if strategy == "tp1" else 2
            to = tmp_path / str(number)
            loaded, end = run_ranks(leg_of_heads, ranks, tmp_path, [strategy], 1, to, timeout=300)[0]
            assert same(loaded, first), strategy
            ends.append(end)
    *shared, alone = ends
    for end in shared:
        assert not same(end, first)
        for name, value in alone.items():
            torch.testing.assert_close(end[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()), msg=name)


# --- One engine on one set of ranks after another, in the same process: nothing but the checkpoint is carried
# over.
def hydra_block(config: dict[str, Any]) -> HydraConfig:
    parsed = parse_config(config)
    assert parsed is not None
    return parsed.hydra


def train(engine: Any, steps: int) -> list[float]:
    return [float(engine.train_batch()) for _ in range(steps)]


@pytest.mark.long
def test_many_assemblies_leave_no_trace(tmp_path: Path) -> None:
    """Threads, descriptors and memory are flat; with heartbeats, a planning process and saves in the background."""

    def many(rank: int) -> list[tuple[int, int, int]]:
        hydra: dict[str, Any] = {
            "faults": {"frozen_seconds": 9.0},
            "planner": {"ahead": 1},
            "checkpoint": {"dir": str(tmp_path / "checkpoint"), "asynchronous": True, "keep_last": 1, "resume": False},
        }
        engine = small_engine(rank, config=small_config(2, **hydra))
        seen = []
        for _ in range(7):
            train(engine, 1)
            engine.save_checkpoint(tmp_path / "checkpoint")
            engine.crew.close()
            engine.crew.world.close()
            engine.assemble(engine.job)
            engine.load_checkpoint(tmp_path / "checkpoint")
            gc.collect()
            seen.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), _resident_kib()))
        assert engine.global_steps == 7
        engine.destroy()
        return seen

    for seen in run_ranks(many, 2, timeout=180):
        threads, descriptors, memory = zip(*seen, strict=True)
        assert threads[6] <= threads[3], seen
        assert descriptors[6] <= descriptors[3], seen
        assert memory[6] <= memory[3] + 4 * 1024, seen


def _resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_masters_of_a_second_assembly_have_no_values_until_loaded() -> None:
    def again(rank: int) -> bool:
        engine = small_engine(rank)
        engine.crew.close()
        engine.crew.world.close()
        engine.assemble(engine.job)
        return all(torch.count_nonzero(shard) == 0 for shard in engine.crew.masters.shards)

    assert run_ranks(again, 2, timeout=60) == [True, True]


@pytest.mark.drawn
def test_a_second_assembly_checks_other_strategies(tmp_path: Path) -> None:
    """The self-check copies the model in its own widths, since a hook holds a module; its values are gone by then."""

    def again(rank: int) -> list[float]:
        os.environ["XDG_CACHE_HOME"] = str(tmp_path / str(rank))
        model = small_model()
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(lambda _, args, out, own=layer: out * own.mlp.factor)
            layer.mlp.register_buffer("factor", torch.tensor(0.9))
        config = small_config(2, self_check="on", strategies=["2*tp1"])
        engine = small_engine(rank, model, config)
        train(engine, 1)
        engine.save_checkpoint(tmp_path / "checkpoint")
        engine.crew.close()
        engine.crew.world.close()
        config["hydra"]["strategies"] = ["tp2", "pp2"]
        engine.assemble(replace(engine.job, config=hydra_block(config)))
        engine.load_checkpoint(tmp_path / "checkpoint")
        assert all(isinstance(parameter, ReleasedParameter) for parameter in model.parameters())
        assert not any(buffer.is_meta for buffer in model.buffers())
        return train(engine, 1)

    one, other = run_ranks(again, 2, timeout=200)
    assert one == other
