"""One engine on one set of ranks after another, in the same process: nothing but the checkpoint is carried over."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.config.hydra_block import HydraConfig, parse_config
from ds_hydra.host.released import ReleasedParameter
from ds_hydra.testing import rank_environment, run_ranks
from tests.support.small_job import same, small_config, small_engine, small_model, whole_state

STRATEGIES_OF_3 = ["tp2 + tp1", "pp2 + tp1", "3*tp1"]


def config_of_3() -> dict[str, Any]:
    config = small_config(4, faults={"frozen_seconds": 9.0})
    config["hydra"]["strategies"] = STRATEGIES_OF_3
    return config


def hydra_block(config: dict[str, Any]) -> HydraConfig:
    parsed = parse_config(config)
    assert parsed is not None
    return parsed.hydra


def regroup(rank: int, num_ranks: int, store: Path) -> None:
    """Torch's default group becomes that of the first `num_ranks` processes."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(str(store), num_ranks), rank=rank, world_size=num_ranks)
    rank_environment(rank)


def train(engine: Any, steps: int) -> list[float]:
    return [float(engine.train_batch()) for _ in range(steps)]


@pytest.mark.drawn
def test_fewer_ranks_go_on_in_the_same_process_as_after_a_restart(tmp_path: Path) -> None:
    """4 ranks train and save; the first 3 go on at once, and for comparison after a stop; equal to the bit."""

    def stay(rank: int) -> tuple[list[float], dict[str, Tensor]] | None:
        engine = small_engine(rank, config=small_config(4, faults={"frozen_seconds": 9.0}))
        train(engine, 3)
        engine.save_checkpoint(tmp_path / "checkpoint")
        engine.crew.close()
        engine.crew.world.close()
        if rank == 3:
            dist.destroy_process_group()
            return None
        regroup(rank, 3, tmp_path / "store")
        engine.assemble(replace(engine.job, config=hydra_block(config_of_3())))
        assert engine.load_checkpoint(tmp_path / "checkpoint")[0] is not None
        losses = train(engine, 4)
        state = whole_state(engine)
        engine.destroy()
        return losses, state

    def restart(rank: int) -> tuple[list[float], dict[str, Tensor]]:
        engine = small_engine(rank, config=config_of_3())
        engine.load_checkpoint(tmp_path / "checkpoint")
        losses = train(engine, 4)
        state = whole_state(engine)
        engine.destroy()
        return losses, state

    stayed = run_ranks(stay, 4, timeout=120)
    restarted = run_ranks(restart, 3, timeout=120)
    assert stayed[3] is None
    for one, other in zip(stayed[:3], restarted, strict=True):
        assert one is not None
        assert one[0] == other[0]
        assert same(one[1], other[1])


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
