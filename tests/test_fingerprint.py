"""A kept verdict is found again by a model that computes the same, and by no other one."""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.self_check.cache import fingerprint
from ds_hydra.self_check.check import check_strategies
from tests.support.small_job import small_model

LAG = 0
tools = types.ModuleType("tools_of_a_script")
tools.lag = 0  # type: ignore[attr-defined]


def back(x: Tensor, lag: int) -> Tensor:
    return x + F.pad(x, (0, 0, lag, 0))[:, : x.shape[1]] if lag else x


class Mode(enum.Enum):
    OFF = 0
    ON = 1


@dataclass
class Inner:
    lag: int = 0


@dataclass
class Args:
    inner: Inner = field(default_factory=Inner)


class Slotted:
    __slots__ = ("lag",)

    def __init__(self, lag: int):
        self.lag = lag


class Holder:
    def __init__(self, lag: int):
        self.lag = lag

    def run(self, x: Tensor) -> Tensor:
        return back(x, self.lag)


class OwnInt(int):
    """A number of a class of its own."""


class Own(LlamaMLP):
    args: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class ByGlobal(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(back(x, LAG))


class ByModule(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(back(x, tools.lag))


def forward_with(lag: int) -> Callable[..., Any]:
    return lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(back(x, lag)))


def forward_by_default(lag: int) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor, *, back_by: int = lag) -> Any:
        return self.down_proj(back(x, back_by))

    return forward


def silu_with(lag: int) -> Callable[..., Any]:
    return lambda x, inplace=False: x * torch.sigmoid(back(x, lag))


def rotary_with(lag: int) -> Callable[..., Any]:
    kept = modeling_llama.apply_rotary_pos_emb

    @functools.wraps(kept)
    def turned(q: Tensor, k: Tensor, *rest: Any, **more: Any) -> Any:
        return kept(q.roll(lag, 2), k, *rest, **more)

    return turned


def attribute(of: Callable[[int], Any]) -> Callable[[int], Any]:
    """A value that an MLP of a script holds."""

    def changed(lag: int) -> Any:
        model = small_model()
        model.model.layers[1].mlp.__class__ = Own
        model.model.layers[1].mlp.args = of(lag)
        return contextlib.nullcontext(model)

    return changed


def patched(target: Any, name: str, of: Callable[[int], Any]) -> Callable[[int], Any]:
    @contextlib.contextmanager
    def changed(lag: int) -> Iterator[Any]:
        with mock.patch.object(target, name, of(lag), create=True):
            yield small_model()

    return changed


def read(kind: type, name: str, target: Any) -> Callable[[int], Any]:
    """A variable that the forward of a script's class reads."""

    @contextlib.contextmanager
    def changed(lag: int) -> Iterator[Any]:
        model = small_model()
        model.model.layers[1].mlp.__class__ = kind
        with mock.patch.object(target, name, lag):
            yield model

    return changed


def buffer(lag: int) -> Any:
    model = small_model()
    model.model.layers[1].mlp.register_buffer("lag", torch.tensor(lag), persistent=False)
    return contextlib.nullcontext(model)


def unregistered(lag: int) -> Any:
    """A module in a list that torch does not know of."""
    inner = Own(small_model().config)
    inner.args = lag
    return attribute(lambda _: [inner])(lag)


WAYS: dict[str, Callable[[int], Any]] = {
    "dataclass": attribute(lambda lag: Args(Inner(lag))),
    "tensor": attribute(lambda lag: torch.tensor([lag])),
    "objects in a dict": attribute(lambda lag: {"by": Holder(lag)}),
    "array": attribute(lambda lag: np.array([lag])),
    "number of an array": attribute(np.int64),
    "enumeration": attribute(Mode),
    "own number": attribute(OwnInt),
    "slots": attribute(Slotted),
    "set": attribute(lambda lag: {("lag", lag)}),
    "namespace": attribute(lambda lag: types.SimpleNamespace(lag=lag)),
    "partial": attribute(lambda lag: functools.partial(back, lag=lag)),
    "bound method": attribute(lambda lag: Holder(lag).run),
    "closure in a list": attribute(lambda lag: [lambda x: back(x, lag)]),
    "closure of an object": attribute(lambda lag: (lambda held: lambda x: held.run(x))(Holder(lag))),
    "class": attribute(lambda lag: type("Lagged", (), {"lag": lag})),
    "method of a class": attribute(lambda lag: type("Lagged", (), {"run": staticmethod(lambda x: back(x, lag))})()),
    "module in a list": unregistered,
    "buffer": buffer,
    "global": read(ByGlobal, "LAG", __import__(__name__, fromlist=["LAG"])),
    "variable of a module": read(ByModule, "lag", tools),
    "variable of a class": read(Own, "args", Own),
    "method of an installed class": patched(LlamaMLP, "forward", forward_with),
    "method with a default": patched(LlamaMLP, "forward", forward_by_default),
    "method that is wrapped": patched(LlamaMLP, "forward", lambda lag: torch.no_grad()(forward_with(lag))),
    "variable of an installed class": patched(LlamaMLP, "lag", int),
    "function of transformers": patched(modeling_llama, "apply_rotary_pos_emb", rotary_with),
    "function of torch": patched(nn.functional, "silu", silu_with),
}


def told(way: str, lag: int) -> str | None:
    with WAYS[way](lag) as model:
        return fingerprint(model)


@pytest.mark.drawn
@pytest.mark.parametrize("way", WAYS)
def test_what_a_model_computes_by_is_told_by_value(way: str) -> None:
    assert told(way, 0) == told(way, 0) is not None
    assert told(way, 0) != told(way, 1)


@pytest.mark.parametrize(
    "value", [torch.Generator(), threading.Lock(), itertools.count(), iter([1]), np.array([object()]), memoryview(b"1")]
)
def test_of_what_cannot_be_told_no_verdict_is_kept(value: Any) -> None:
    with attribute(lambda _: {"held": [value]})(0) as model:
        assert fingerprint(model) is None


def test_what_the_engine_itself_leaves_in_transformers_changes_nothing() -> None:
    before = fingerprint(small_model())
    check_strategies(small_model(), [StrategyShape.parse("tp2")], StageOptions(functions="auto"), keep=False)
    assert fingerprint(small_model()) == before is not None


def test_a_value_that_holds_itself_is_told() -> None:
    def of(lag: int) -> Any:
        held: list[Any] = [lag]
        held.append(held)
        return held

    texts = [fingerprint(attribute(of)(lag).enter_result) for lag in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
