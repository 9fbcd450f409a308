"""FP32 masters and optimizer states in the host's memory: training, saving and resuming are those of states on the
device, to the bit."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from torch import Tensor

import ds_hydra.engine.engine
from ds_hydra.pipe.on_host import _LEAVING, Coming, HostStore
from ds_hydra.step import host_states
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.masters import as_tensors
from tests.support.small_job import (
    find_before_forks,
    same,
    sequences,
    small_config,
    small_engine,
    small_model,
    whole_state,
)

RUN = 96  # elements; a multiple of what a CPU's kernels take at once, whose last ones may differ by a rounding
OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}
BF16 = {"bf16": {"enabled": True}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
    "SGD": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "Adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},  # it has states before its first step
    "Lion": {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}},
}


class LateStore(HostStore):
    """One whose copies are made as late as they may be, when they are waited for; until then there is NaN."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._lane: Any = SimpleNamespace(wait=lambda copy: copy())

    def up(self, host: Tensor) -> Coming:
        there = torch.full_like(host, math.nan)
        return Coming(self._lane, lambda: there.copy_(host), there)

    def down(self, tensor: Tensor, host: Tensor) -> None:
        while len(self._leaving) >= _LEAVING:
            self._lane.wait(self._leaving.popleft()[0])
        host.fill_(math.nan)
        self._leaving.append((lambda: host.copy_(tensor), tensor))


@contextlib.contextmanager
def in_runs(run: int = RUN) -> Iterator[None]:
    with mock.patch.object(host_states, "RUN", run), mock.patch.object(host_states, "HostStore", LateStore):
        yield


def engine_of(rank: int, ranks: int, name: str, offloaded: bool, *, bf16: bool = False, **hydra: Any) -> Any:
    config = small_config(ranks, **hydra) | {"optimizer": OPTIMIZERS[name]} | (OFFLOADED if offloaded else {})
    engine = small_engine(rank, config=config | (BF16 if bf16 else {}))
    assert engine.crew.masters.trained.on_host == offloaded
    return engine


def both_ways(rank: int, ranks: int, name: str, between: Callable[[Any, int], object], bf16: bool) -> tuple[bool, int]:
    """Whether states on the host train as those on the device, and runs of an update."""
    found, runs = [], 0
    for offloaded in (False, True):
        engine = engine_of(rank, ranks, name, offloaded, bf16=bf16)
        losses = []
        for step in range(4):
            losses.append(float(engine.train_batch()))
            between(engine, step)
        found.append((losses, whole_state(engine), {k: v.clone() for k, v in engine.module.state_dict().items()}))
        if offloaded:
            states = engine.crew.masters.states
            runs = len(states._runs())
            homes = {home.untyped_storage().data_ptr() for home in states._homes.values()}
            kept = [v for state in engine.optimizer.state.values() for v in state.values() if v.dim()]
            assert all(value.untyped_storage().data_ptr() in homes for value in kept), "states have one place each"
            with as_tensors():
                params = [param for group in engine.optimizer.param_groups for param in group["params"]]
                assert all(param.untyped_storage().nbytes() <= 8 for param in params), "none is left on the device"
        engine.destroy()
    (losses, states_there, weights), (other, states_here, others) = found
    return losses == other and same(states_there, states_here) and same(weights, others), runs


def in_environment(rank: int, run: Callable[[int], Any]) -> Any:
    rank_environment(rank)
    return run(rank)


def nothing(engine: Any, step: int) -> None:
    pass


def freezes(engine: Any, step: int) -> None:
    """Some parameters are not trained in some steps, and the optimizer leaves their states."""
    for name, param in engine.module.named_parameters():
        param.requires_grad_(step == 2 or "layers.1" not in name)


def goes_away(engine: Any, step: int) -> None:
    """All that training keeps moves to the host between two steps, too."""
    engine.to("cpu")


@pytest.mark.parametrize(
    ("ranks", "name", "between", "bf16"),
    [
        (4, "AdamW", nothing, False),
        pytest.param(4, "AdamW", nothing, True, marks=pytest.mark.drawn),
        pytest.param(1, "AdamW", nothing, False, marks=pytest.mark.drawn),
        (2, "SGD", freezes, False),
        pytest.param(2, "Adagrad", nothing, False, marks=pytest.mark.drawn),
        pytest.param(3, "Lion", nothing, True, marks=pytest.mark.drawn),
        (2, "AdamW", goes_away, True),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_results_are_those_of_states_on_the_device(ranks: int, name: str, between: Any, bf16: bool) -> None:
    find_before_forks()
    with in_runs():
        for equal, runs in run_ranks(both_ways, ranks, ranks, name, between, bf16, timeout=300):
            assert equal
            assert runs > 4


class CountsInGroups(torch.optim.Optimizer):
    """Adam's second moment, corrected by a number of steps that each group counts, and a rate that it lowers itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"steps": 0, "rate": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            group["rate"] *= 0.9
            for param in group["params"]:
                state = self.state[param]
                before = state.get("square", torch.zeros_like(param))
                state["square"] = 0.9 * before + 0.1 * param.grad.square()  # another tensor each time
                root = (state["square"] / (1 - 0.9 ** group["steps"])).sqrt_()
                param.sub_(group["rate"] * param.grad / (root + 1e-8))


def counted(rank: int) -> bool:
    found = []
    for offloaded in (False, True):
        model = small_model()
        config = small_config(2) | (OFFLOADED if offloaded else {}) | {"zero_allow_untested_optimizer": True}
        del config["optimizer"], config["scheduler"]
        engine = ds_hydra.initialize(
            model=model, optimizer=CountsInGroups(model.parameters()), training_data=sequences(), config=config
        )[0]
        for _ in range(3):
            engine.train_batch()
        assert [group["steps"] for group in engine.optimizer.param_groups] == [3]
        found.append(whole_state(engine))
        engine.destroy()
    return same(*found)


def test_an_optimizer_that_counts_in_its_groups_counts_each_step_once() -> None:
    with in_runs():
        assert all(run_ranks(in_environment, 2, counted, timeout=120))


def saved_by(rank: int, folder: str, offloaded: bool) -> dict[str, Tensor]:
    """Two steps, a checkpoint, and two steps more."""
    engine = engine_of(rank, 2, "AdamW", offloaded, checkpoint={"dir": folder, "resume": False})
    for step in range(4):
        engine.train_batch()
        if step == 1:
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()
    found = whole_state(engine)
    engine.destroy()
    return found


def resumed_by(rank: int, folder: str, ranks: int, offloaded: bool) -> dict[str, Tensor]:
    engine = engine_of(rank, ranks, "AdamW", offloaded)
    assert engine.load_checkpoint(folder)[0] is not None
    while engine.global_steps < 4:
        engine.train_batch()
    found = whole_state(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("first", [False, pytest.param(True, marks=pytest.mark.drawn)])
def test_a_job_goes_on_from_the_checkpoint_of_the_other_kind(first: bool, tmp_path: Path) -> None:
    with in_runs():
        whole = run_ranks(saved_by, 2, str(tmp_path), first, timeout=120)[0]
        assert same(run_ranks(resumed_by, 2, str(tmp_path), 2, not first, timeout=120)[0], whole)
        other = [run_ranks(resumed_by, 3, str(tmp_path), 3, kind, timeout=120)[0] for kind in (False, True)]
    assert same(*other), "ranks of another number cut the masters, and so the runs, otherwise"


def stay(rank: int, optimizer: dict[str, Any]) -> tuple[bool, list[str]]:
    told: list[str] = []
    with mock.patch.object(
        logging.getLogger("ds_hydra.engine.prepare"), "warning", lambda *words: told.append(words[0] % words[1:])
    ):
        engine = small_engine(rank, config=small_config(2) | OFFLOADED | {"optimizer": optimizer})
    engine.train_batch()
    return engine.crew.masters.trained.on_host, told


def test_states_of_optimizers_of_whole_parameters_stay_on_the_devices_and_it_is_said() -> None:
    (on_host, told), (_, others) = run_ranks(stay, 2, {"type": "Muon", "params": {"lr": 1e-3}}, timeout=120)
    assert not on_host
    assert not others
    assert [line for line in told if "muon needs whole parameters at once" in line]


def callable_muon(rank: int) -> None:
    model = small_model()
    config = small_config(1) | OFFLOADED
    del config["optimizer"], config["scheduler"]
    ds_hydra.initialize(
        model=model, optimizer=lambda groups: torch.optim.Adafactor(groups), training_data=sequences(), config=config
    )


def test_a_callable_that_makes_an_optimizer_of_whole_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="made TorchAdafactor, which needs whole parameters"):
        run_ranks(in_environment, 1, callable_muon, timeout=120)
