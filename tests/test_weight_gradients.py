"""Weight gradients that are put off: equal to plain autograd's for all that a module may be, finished when they say so.

Models run in one process: small ones by the queue itself, whole pipelines by threads. The reference is plain autograd.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from ds_hydra.pipe import weight_gradients
from ds_hydra.pipe.weight_gradients import WeightGradients, add_to_sum
from ds_hydra.profiling.allocations import Allocations

WIDTH = 6


class Net(nn.Module):
    """Three linear layers with something between; `call` says how the second one is used."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)):
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.middle: nn.Module = nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.call = nn.LayerNorm(WIDTH), call
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.call(self.middle, torch.tanh(self.first(x))))))


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


def net(call: Callable[[Any, Tensor], Tensor] | None = None, change: Callable[[Net], None] | None = None) -> Net:
    torch.manual_seed(0)
    made = (Net() if call is None else Net(call)).double()
    if change is not None:
        change(made)
    return made


def frozen(model: Net) -> None:
    model.middle.requires_grad_(False)


def subclass(model: Net) -> None:
    model.middle = Doubled(2 * WIDTH, WIDTH, dtype=torch.float64)


def parametrized(model: Net) -> None:
    parametrizations.weight_norm(model.middle)


def replaced(model: Net) -> None:
    middle: Any = model.middle
    middle.forward = lambda x: F.linear(x, 3.0 * middle.weight)


def widened(model: Net) -> None:
    model.middle.float()


def autocast(layer: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(x.float()).to(x.dtype)


ALL = {"first", "middle", "last"}
NETS: dict[str, tuple[Net, set[str]]] = {
    # how the second layer is used, and the layers of which entries wait after an I
    "plain": (net(), ALL),
    "used twice": (net(lambda layer, x: layer(x) * layer(1.0 - x)), ALL),
    "its weight is used beside it": (net(lambda layer, x: layer(x) + F.linear(x * x, layer.weight)), ALL),
    "in three dimensions": (net(lambda layer, x: layer(x[None])[0]), ALL),
    "by keyword": (net(lambda layer, x: layer(input=x)), ALL),
    "not in the graph": (net(lambda layer, x: layer(x.detach())), {"last"}),
    "frozen": (net(change=frozen), {"first", "last"}),
    "a subclass": (net(change=subclass), {"first", "last"}),
    "parametrized": (net(change=parametrized), {"first", "last"}),
    "another forward": (net(change=replaced), {"first", "last"}),
    "checkpointed": (net(lambda layer, x: checkpoint(layer, x, use_reentrant=False)), {"first", "last"}),
    "autocast": (net(autocast, widened), {"first", "last"}),
}
# Micro-batches of 5, 3 and 4 tokens: which W run together and in which order, after all I or in between.
TURNS = {
    "each at once": ([0], [1], [2]),
    "one behind": ([], [0], [1], [2]),
    "together": ([], [], [0, 1, 2]),
    "in pairs": ([], [1, 0], [], [2]),
}


def tokens(microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randn((5, 3, 4)[microbatch], WIDTH, dtype=torch.float64, generator=generator)


def queue_of(model: nn.Module) -> WeightGradients:
    return WeightGradients(model, {name for name, _ in model.named_parameters()})


def loss_of(model: nn.Module, microbatch: int) -> Tensor:
    return model(tokens(microbatch).requires_grad_()).square().sum()


def names_of(model: nn.Module, parameters: Any) -> set[str]:
    return {name.rpartition(".")[0] for name, parameter in model.named_parameters() if parameter in set(parameters)}


def same(model: nn.Module, plain: nn.Module) -> bool:
    """Whether gradients are equal but for the rounding of sums in another order."""
    others = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        mine, right = parameter.grad, others[name].grad
        if (mine is None) != (right is None):
            return False
        if mine is not None and right is not None and not torch.allclose(mine, right, rtol=1e-12, atol=1e-12):
            return False
    return True


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("name", NETS)
def test_gradients_are_those_of_plain_autograd(name: str, turns: str) -> None:
    original, put_off = NETS[name]
    model, plain = copy.deepcopy(original), copy.deepcopy(original)
    if name == "another forward":
        replaced(model)
        replaced(plain)
    queue = queue_of(model)
    for microbatch in range(3):
        loss_of(plain, microbatch).backward()
    losses = {}
    for microbatch in range(3):
        with queue.of(microbatch):
            losses[microbatch] = loss_of(model, microbatch)
    for turn, together in enumerate(TURNS[turns]):
        if turn in losses:
            with queue.of(turn, backward=True):
                losses.pop(turn).backward()
            assert names_of(model, queue.unfinished) == put_off
        queue.run(together)
    assert queue.unfinished == frozenset()
    assert same(model, plain)


def test_what_is_not_split_runs_as_ever() -> None:
    model, plain = net(), net()
    queue = queue_of(model)
    loss_of(model, 0).backward()
    with torch.no_grad(), queue.of(1):
        assert not loss_of(model, 1).requires_grad
    loss_of(plain, 0).backward()
    assert queue.unfinished == frozenset()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]


def test_weights_are_finished_once_last_layer_first_over_all_micro_batches() -> None:
    model = net()
    queue = queue_of(model)
    finished: list[str] = []
    queue.finished = lambda weight: finished.extend(names_of(model, [weight]))
    for microbatch in range(3):
        with queue.of(microbatch):
            loss = loss_of(model, microbatch)
        with queue.of(microbatch, backward=True):
            loss.backward()
    queue.run([0])
    assert finished == [], "two micro-batches are left"
    queue.run([1, 2])
    assert finished == ["last", "middle", "first"]


def test_entries_are_freed_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept = net(), weight_gradients._Entry
    queue = queue_of(model)
    inputs: list[weakref.ref[Tensor]] = []  # of the entries: last layer first

    def noted(*fields: Any) -> Any:
        inputs.append(weakref.ref(fields[2]))
        return kept(*fields)

    monkeypatch.setattr(weight_gradients, "_Entry", noted)
    alive: list[list[bool]] = []
    queue.finished = lambda _: alive.append([x() is not None for x in inputs])
    with queue.of(0):
        loss = loss_of(model, 0)
    with queue.of(0, backward=True):
        loss.backward()
    queue.run([0])
    assert alive[1][0] is False
    assert [row[2] for row in alive] == [True] * 3
    assert [x() for x in inputs] == [None] * 3


def test_an_error_leaves_nothing_behind() -> None:
    model = net()
    queue = queue_of(model)
    with queue.of(0):
        loss = loss_of(model, 0)
    with queue.of(0, backward=True):
        loss.backward()
    assert names_of(model, queue.unfinished) == ALL
    queue.forget()
    assert queue.unfinished == frozenset()
    queue.run([0])
    assert all(getattr(model, name).weight.grad is None for name in ALL)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "wide"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("count", [5, 400])
def test_several_products_become_one_where_that_is_cheaper(
    count: int, dtype: torch.dtype, wide: torch.dtype, transposed: bool
) -> None:
    """400 tokens are more than a weight of 24 x 24 is worth; the sum may be of a wider type, and a transposed view."""
    layer = nn.Linear(24, 24, bias=False, dtype=dtype)
    model = nn.Sequential(layer)
    queue = queue_of(model)
    total = torch.zeros(24, 24, dtype=wide)
    assert isinstance(layer.weight, nn.Parameter)
    queue.add_to(layer.weight, total.t() if transposed else total)
    xs = [torch.randn(count, 24, dtype=dtype).requires_grad_() for _ in range(3)]
    right = torch.zeros(24, 24, dtype=torch.float64)
    for microbatch, x in enumerate(xs):
        with queue.of(microbatch):
            out = model(x)
        dy = torch.randn_like(out)
        right += dy.double().t() @ x.detach().double()
        with queue.of(microbatch, backward=True):
            out.backward(dy)
    with mock.patch.object(torch, "cat", wraps=torch.cat) as joined:
        queue.run([0, 1, 2])
    assert joined.call_count == (2 if count == 5 else 0)
    assert layer.weight.grad is None
    found = total.t() if transposed else total
    allowed = 1e-12 if dtype == wide else 2.0**-8  # products of 16 bit are rounded once each, and summed in FP32
    assert float((found.double() - right).abs().max()) <= allowed * float(right.abs().max())


def test_a_gradient_is_added_to_a_wider_sum_without_a_wide_copy_of_it() -> None:
    gradient = torch.randn(1024, 2048).bfloat16()
    sums = [torch.randn(1024, 2048), torch.randn(2048, 1024).t(), torch.randn(1024, 2048, 1)[..., 0]]
    for total in sums:
        expected = total + gradient
        with Allocations(torch.device("cpu")) as found:
            add_to_sum(total, gradient)
        assert torch.equal(total, expected)
        assert found.peak <= expected.nbytes // 4
    for few in (torch.ones(()), torch.ones(3)):
        add_to_sum(few, torch.ones_like(few, dtype=torch.bfloat16))
        assert torch.equal(few, torch.full_like(few, 2.0))
