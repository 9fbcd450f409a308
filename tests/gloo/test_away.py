"""States of an engine on the host and back: what stays on the device, and that training goes on to the bit."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.engine import away
from ds_hydra.losses import dapo
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.masters import as_tensors
from tests.support.families import build_model
from tests.support.post_training import rollouts, share
from tests.support.small_job import same, shared_source, small_engine, small_model, whole_state
from tools import aims

KINDS = ("model", "optimizer", "grad")


def storages() -> dict[int, int]:
    """Bytes of all memory that Python's tensors have, by its address."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, torch.nn.Parameter) and one.device.type == "cpu":  # what is released asks for values
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def what_stays(rank: int) -> tuple[float, int, bool]:
    """The share of an engine's bytes that is there without those on the host, tensors of the optimizer's states that
    live on, and whether the gradients that wait come back."""
    before = storages()
    engine = small_engine(rank, data=None, model=small_model(hidden=64))
    for step in range(2):
        engine.forward_backward(share(rank, rollouts(step)), dapo())
        engine.optimizer_step()
    engine.forward_backward(share(rank, rollouts(2)), dapo())
    full = sum(size for at, size in storages().items() if at not in before)
    moments = (value for state in engine.optimizer.state.values() for value in state.values())
    states = [weakref.ref(value) for value in moments if value.dim()]
    copies: list[Tensor] = []
    on_host = away._on_host

    def noted(value: Tensor) -> Tensor:
        copies.append(on_host(value))
        return copies[-1]

    with mock.patch.object(away, "_on_host", noted):
        engine.to("cpu")
    kept = {one.untyped_storage().data_ptr() for one in copies}
    left = sum(size for at, size in storages().items() if at not in before and at not in kept)
    with as_tensors():
        shown = all(not param.any() for group in engine.optimizer.param_groups for param in group["params"])
    assert shown, "a script that looks at them sees zeros, and no memory that is gone"
    alive = sum(one() is not None for one in states)
    return left / full, alive, engine.optimizer_step() > 0


def test_what_is_moved_to_the_host_is_gone_from_the_device() -> None:
    for stays, alive, goes_on in run_ranks(what_stays, 2, timeout=120):
        assert stays <= aims.STAYS_ON_DEVICE
        assert alive == 0
        assert goes_on


Between = Callable[[Any], object]  # what happens to an engine between two of its calls


def trained(rank: int, between: Between, model: Any = None) -> dict[str, Tensor]:
    """A job in parts and in whole steps, with log-probabilities between them."""
    engine = small_engine(rank, data=None, model=model, strategies=["tp2", "pp2", "2*tp1"])
    for step in range(3):
        items = share(rank, rollouts(step))
        between(engine)
        for item, old in zip(items, engine.log_probs(items).log_probs, strict=True):
            item["old_log_probs"] = old
        for half in (slice(0, None, 2), slice(1, None, 2)):
            engine.forward_backward(items[half], dapo(), normaliser=100)
            between(engine)
        engine.optimizer_step()
        between(engine)
        engine.train_batch([{"input_ids": item["input_ids"]} for item in items])
    between(engine)
    found = whole_state(engine)
    engine.destroy()
    return found


def there_and_back(engine: Any) -> None:
    engine.to("cpu")
    engine.reload_states()


def by_kinds(engine: Any) -> None:
    """One kind after the other, which come back in another order."""
    for kind in KINDS[:: 1 if engine.global_steps % 2 else -1]:
        engine.to("cpu", **{name: name == kind for name in KINDS})
    engine.crew.away.bring_back(("grad",))
    engine.crew.away.bring_back(("model",))


def by_names_of_deepspeed(engine: Any) -> None:
    engine.reload_states()
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.lp_grads])
    assert engine.crew.away.kinds == {"optimizer", "grad"}


CALLS = 4  # of `between` in each step of `trained`
WAYS: tuple[Between, ...] = (there_and_back, lambda engine: engine.to("cpu"), by_kinds, by_names_of_deepspeed)


def all_ways(first: int) -> Between:
    """Each way in turn, another one between the same calls of the next step; begun with another `first`, the ways that
    it had not between those calls."""
    calls = itertools.count()

    def between(engine: Any) -> None:
        call = next(calls)
        WAYS[(first + call + call // CALLS) % len(WAYS)](engine)

    return between


@pytest.mark.drawn
@pytest.mark.parametrize(("family", "first"), [("", 0), ("lora", 2)])
def test_training_goes_on_to_the_bit(family: str, first: int) -> None:
    def model() -> Any:
        return build_model(family, torch.float32) if family else small_model()

    def all_equal(rank: int) -> bool:
        right = trained(rank, lambda engine: None, model())
        return same(right, trained(rank, all_ways(first), model()))

    with shared_source(model()):
        assert run_ranks(all_equal, 2, timeout=200) == [True, True]


def test_what_is_saved_and_exported_from_the_host_is_what_was_there(tmp_path: Path) -> None:
    def job(rank: int) -> list[bool]:
        engine = small_engine(rank, data=None)
        engine.train_batch([[5, 6, 7, 8]] * 3)
        right, exported = whole_state(engine), dict(engine.full_parameters())
        found = []
        engine.to("cpu")
        found.append(same(exported, dict(engine.full_parameters())))
        found.append(engine.crew.away.kinds == {"optimizer"})  # an export needs no states of the optimizer
        engine.to("cpu")
        engine.save_checkpoint(tmp_path)
        engine.train_batch([[5, 6, 7, 8]] * 3)
        engine.to("cpu")
        engine.load_checkpoint(tmp_path)
        found.append(same(right, whole_state(engine)))
        engine.to("cpu")
        engine.destroy()  # with its states still there
        return found

    assert run_ranks(job, 2, timeout=120) == [[True] * 3] * 2


def test_gradients_that_are_dropped_meanwhile_are_dropped() -> None:
    def job(rank: int) -> str:
        engine = small_engine(rank, data=None)
        engine.forward_backward([[5, 6, 7, 8]])
        engine.to("cpu")
        engine.optimizer.zero_grad()
        with pytest.raises(ConfigError) as caught:
            engine.optimizer_step()
        return str(caught.value)

    assert "has no gradients to apply" in run_ranks(job, 1)[0]


@pytest.mark.parametrize("device", ["cuda:0", "meta", torch.bfloat16, None])
def test_no_other_device(device: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine.to\(.*can be moved to the host"):
        away.wants_host(device, torch.device("cpu"))
