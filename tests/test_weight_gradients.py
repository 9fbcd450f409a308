"""Backwards of stages: weight gradients that are put off, layers computed again, head and loss as one."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import ds_hydra.pipe.loss as pipe_loss
from ds_hydra.pipe import weight_gradients
from ds_hydra.pipe.contexts import Contexts
from ds_hydra.pipe.loss import HeadLoss, blockwise_loss, token_losses
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.cut import PlainHead, Recomputing
from ds_hydra.pipe.placement import whole_layers
from ds_hydra.pipe.rows import Chunk, MicroBatch, Pack
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.pipe.weight_gradients import WeightGradients, add_to_sum
from ds_hydra.profiling.stage_memory import Allocations
from ds_hydra.self_check.runs import Outcome, compare, run_pipeline, uneven_data
from ds_hydra.self_check.schemes import uneven_pipeline
from tests.support.families import build_model

# --- Weight gradients that are put off: equal to plain autograd's for all that a module may be, finished when
# they say so. Models run in one process: small ones by the queue itself, whole pipelines by threads. The
# reference is plain autograd.
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


# --- Pipelines whose backwards are split: rows of the training table; here hooks of parameters.
def hooked() -> Any:
    """Hooks that double one gradient and note how often."""
    model = build_model("llama", torch.float64)
    model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: 2.0 * gradient)
    return model


def ran(model: Any, shape: str) -> Outcome:
    source, data = CausalLM(model), uneven_data(97, ((5, 33, 2), (12,), (7, 3), (21,)))
    return run_pipeline(source, uneven_pipeline(PipelineShape.parse(shape), source.plan.num_layers), data)


def test_hooks_of_parameters_see_the_gradient_of_each_micro_batch() -> None:
    name, doubled = "model.layers.1.mlp.up_proj.weight", ran(hooked(), "pp2/zb-h1")
    single = ran(build_model("llama", torch.float64), "pp2/zb-h1").gradients[name]
    assert torch.allclose(doubled.gradients[name], 2.0 * single, rtol=1e-12)
    assert compare(ran(hooked(), "tp1"), doubled).what is None


# --- Layers that the backward computes again: as many as the share says, the first ones, and no others.
@given(st.integers(1, 200), st.data())
def test_a_share_of_whole_layers_is_that_many(layers: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, layers))
    assert whole_layers(number / layers, layers) == number
    assert whole_layers((number + 0.1) / (layers + 1), layers) <= layers


def test_other_shares_are_rounded_up() -> None:
    assert [whole_layers(share, 7) for share in (0.0, 0.01, 0.5, 0.99, 1.0)] == [0, 1, 4, 7, 7]


@pytest.mark.parametrize(("share", "twice"), [(0.0, 0), (0.3, 2), (0.5, 2), (1.0, 4)])
def test_the_first_layers_run_once_more_in_the_backward(share: float, twice: int) -> None:
    layers: Any = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)).double()
    calls, of_hooks = [0] * 4, [0] * 4
    for place, layer in enumerate(layers):
        layer[0].register_forward_hook(lambda *_, place=place: calls.__setitem__(place, calls[place] + 1))
        layer.register_forward_hook(lambda *_, place=place: of_hooks.__setitem__(place, of_hooks[place] + 1))

    def gradients() -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
        out = x
        for layer in layers:
            out = layer(out)
        return list(torch.autograd.grad(out.sum(), [x, *layers.parameters()]))

    kept = gradients()
    recomputing = Recomputing(4)
    recomputing.install(layers)
    assert all(map(torch.equal, kept, gradients())), "none to begin with"
    recomputing.take(share)
    calls[:], of_hooks[:] = [0] * 4, [0] * 4
    assert all(map(torch.equal, kept, gradients()))
    assert calls == [2] * twice + [1] * (4 - twice)
    assert of_hooks == [1] * 4, "hooks of a layer run with its call"
    with torch.no_grad():
        layers[0](torch.zeros(2, 3, dtype=torch.float64))
    assert calls[0] == 2 + (twice > 0), "nothing is computed again where there is no backward"


# --- Head and loss as one: what autograd finds, in any blocks; and heads behind which there is something else.
Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor]
TOKENS, HEAD_WIDTH, VOCAB = 97, 32, 53


def micro_batch(tokens: int, vocab: int, dtype: torch.dtype) -> MicroBatch:
    """Random labels, some of them ignored, and weights of this type."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[::7] = -100
    weights = torch.rand(tokens, generator=generator).to(dtype)
    return MicroBatch(
        Pack((tokens,)), torch.zeros(1, tokens), None, labels, weights, torch.full((tokens,), torch.nan, dtype=dtype)
    )


@pytest.mark.parametrize("parts", ["whole", "transposed", "of a stack", "apart"])
def test_a_product_on_a_gpu_adds_to_rows_that_lie_side_by_side(parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of which ranks have parts of the rows is a transposed view, and so is its sum."""
    of = {"whole": torch.randn(5, 8), "transposed": torch.randn(8, 5).t(), "apart": torch.randn(5, 16)[:, ::2],
          "of a stack": torch.randn(5, 3, 8)[:, 1]}  # fmt: skip
    layer, total, x, dy = nn.Linear(8, 5, bias=False).bfloat16(), of[parts], torch.randn(7, 8), torch.randn(7, 5)
    expected, outs = total + dy.bfloat16().float().t() @ x.bfloat16().float(), []

    def addmm(total: Tensor, left: Tensor, right: Tensor, *, out_dtype: torch.dtype, beta: int, out: Tensor) -> Tensor:
        outs.append(out.stride(1) == 1)
        return out.copy_(total + left.to(out_dtype) @ right.to(out_dtype))

    queue = WeightGradients(nn.Sequential(layer), [])
    queue.add_to(layer._parameters["weight"], total)  # type: ignore[arg-type]
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch, "addmm", addmm)
    queue.add(layer, x.bfloat16(), dy.bfloat16())
    torch.testing.assert_close(total, expected, rtol=0, atol=3e-2)
    assert outs == ([] if parts == "apart" else [True])


def values(tokens: int, width: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Hidden states (1, tokens, width) and a weight (vocab, width), in FP64."""
    generator = torch.Generator().manual_seed(2)
    return tuple(  # type: ignore[return-value]
        torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        for shape, scale in (((1, tokens, width), 1.0), ((vocab, width), 0.1))
    )


def as_one(hidden: Tensor, weight: Tensor, batch: MicroBatch) -> Tensor:
    return HeadLoss(0, len(weight), None)(hidden, weight, batch)


def by_autograd(hidden: Tensor, weight: Tensor, batch: MicroBatch) -> Tensor:
    return blockwise_loss(
        hidden, batch, lambda part, _: part @ weight.t(), lambda logits, labels: token_losses(logits, labels, 0, None),
        vocab=len(weight),
    )  # fmt: skip


def results(
    loss_of: Callable[[Tensor, Tensor, MicroBatch], Tensor], hidden: Tensor, weight: Tensor, *, factor: float = 1.0,
    needed: tuple[bool, bool] = (True, True),
) -> Results:  # fmt: skip
    """The loss, both gradients, and the losses of the tokens."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    batch = micro_batch(hidden.shape[1], len(weight), wide)
    hidden, weight = (
        one.detach().clone().requires_grad_(need) for one, need in zip((hidden, weight), needed, strict=True)
    )
    loss = loss_of(hidden, weight, batch)
    if any(needed):
        (loss * factor).backward()
    assert batch.token_losses is not None
    return loss.detach(), hidden.grad, weight.grad, batch.token_losses


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("rows", [TOKENS, 20, 1])
def test_gradients_are_those_of_autograd_in_any_blocks(
    monkeypatch: pytest.MonkeyPatch, rows: int, needed: tuple[bool, bool]
) -> None:
    monkeypatch.setattr(pipe_loss, "HEAD_LOGITS_AT_ONCE", rows * VOCAB)
    monkeypatch.setattr(pipe_loss, "LOGITS_AT_ONCE", 3 * VOCAB)
    hidden, weight = values(TOKENS, HEAD_WIDTH, VOCAB)
    found = results(as_one, hidden, weight, factor=0.37, needed=needed)
    torch.testing.assert_close(found, results(by_autograd, hidden, weight, factor=0.37, needed=needed))


def test_a_weights_gradient_is_as_good_in_many_blocks_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, width, vocab = 2048, 64, 512
    hidden, weight = (one.bfloat16() for one in values(tokens, width, vocab))
    true = results(by_autograd, hidden.double(), weight.double())[2]
    assert true is not None
    errors: dict[int, float] = {}
    for blocks in (1, 16, 128):
        monkeypatch.setattr(pipe_loss, "HEAD_LOGITS_AT_ONCE", tokens * vocab // blocks)
        found = results(as_one, hidden, weight)[2]
        assert found is not None
        assert found.dtype == torch.bfloat16
        errors[blocks] = float((found.double() - true).norm() / true.norm())
    assert max(errors.values()) <= 1.1 * errors[1], errors
    assert errors[1] < 5e-3


@pytest.mark.parametrize("numel", [1, 2, 7, 64, 1000])
def test_a_tensor_becomes_narrow_in_its_own_memory(numel: int) -> None:
    wide = torch.randn(numel, 1)
    expected = wide.bfloat16()
    narrow = pipe_loss._narrow(wide, torch.bfloat16)
    assert torch.equal(narrow, expected)
    assert narrow.data_ptr() == wide.data_ptr()


def test_of_forwards_that_wait_for_their_backwards_one_holds_a_weights_gradient() -> None:
    head = HeadLoss(0, VOCAB, None)
    batch = micro_batch(TOKENS, VOCAB, torch.float64)
    hidden, weight = values(TOKENS, HEAD_WIDTH, VOCAB)
    inputs = [hidden.clone().requires_grad_() for _ in range(3)]
    weight.requires_grad_()
    losses = [head(one, weight, batch) for one in inputs]
    assert [loss.grad_fn.sums is not None for loss in losses] == [True, False, False]  # type: ignore[union-attr]
    found = []
    for loss in reversed(losses):
        loss.backward()
        found.append(weight.grad)
        weight.grad = None
    assert all(torch.equal(one, found[0]) for one in found)  # type: ignore[arg-type]
    assert all(torch.equal(one.grad, inputs[0].grad) for one in inputs)  # type: ignore[arg-type]
    dropped = head(inputs[0], weight, batch)
    assert dropped.grad_fn.sums is not None  # type: ignore[union-attr]
    del dropped, loss, losses
    gc.collect()
    assert head(inputs[0], weight, batch).grad_fn.sums is not None, "what nobody goes back through holds nothing"  # type: ignore[union-attr]


def test_of_a_sequence_in_slices_the_last_one_holds_the_weights_gradient() -> None:
    """Its backward is the first: by the time of the others' nothing is held beside what they make."""
    head, contexts = HeadLoss(0, VOCAB, None), Contexts(2 * TOKENS)
    hidden, weight = values(TOKENS, HEAD_WIDTH, VOCAB)
    weight.requires_grad_()
    whole = micro_batch(TOKENS, VOCAB, torch.float64)
    cut = [replace(whole, pack=Pack((TOKENS,), chunk=Chunk(start, start + TOKENS, contexts))) for start in (0, TOKENS)]
    losses = [head(hidden.clone().requires_grad_(), weight, batch) for batch in cut]
    assert [loss.grad_fn.sums is not None for loss in losses] == [False, True]  # type: ignore[union-attr]
    found = []
    for loss in reversed(losses):
        loss.backward()
        found.append(weight.grad)
        weight.grad = None
    assert torch.equal(*found)  # type: ignore[arg-type]


class Model(nn.Module):
    """What follows the layers of a model, as its forward has it."""

    def __init__(self, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor], **options: Any):
        super().__init__()
        self.head = nn.Linear(HEAD_WIDTH, VOCAB, **{"bias": False} | options)
        self.before, self.after = before, after

    def forward(self, hidden: Tensor) -> Tensor:
        return self.after(self.head(self.before(hidden)))


def as_it_is(x: Tensor) -> Tensor:
    return x


def twice(model: Model) -> Model:
    """A model that calls its head two times."""
    model.after = lambda logits: (model.head(torch.zeros(1, 1, HEAD_WIDTH)), logits)[1]
    return model


def watched(model: Model) -> Model:
    """A model whose logits somebody looks at."""
    model.head.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("model", "plain"),
    [
        (Model(as_it_is, as_it_is), True),
        (Model(lambda x: x[:, slice(0, None), :], as_it_is), True),
        (Model(as_it_is, as_it_is, bias=True), False),
        (Model(lambda x: x * 2.0, as_it_is), False),
        (Model(lambda x: x.mul_(2.0), as_it_is), False),
        (Model(lambda x: x[..., :1].expand(x.shape), as_it_is), False),
        (Model(as_it_is, lambda logits: 30.0 * torch.tanh(logits / 30.0)), False),
        (Model(as_it_is, lambda logits: logits.div_(2.0)), False),
        (Model(as_it_is, lambda logits: (logits.mean(), logits)[1]), False),
        (Model(as_it_is, lambda logits: logits if logits.shape[-1] == VOCAB else -logits), True),
        (twice(Model(as_it_is, as_it_is)), False),
        (watched(Model(as_it_is, as_it_is)), False),
    ],
    ids=["plain", "some rows", "bias", "scaled", "scaled in place", "other strides", "capped", "divided in place",
         "looked at", "asked for its shape", "twice", "watched"],
)  # fmt: skip
def test_a_head_is_plain_if_nothing_else_happens(model: Model, plain: bool) -> None:
    hidden = torch.randn(1, 1, HEAD_WIDTH)
    found = PlainHead.of(model, model.head)
    assert (found is not None and found.is_all(hidden, lambda: model(hidden))) == plain
    assert "forward" not in vars(model.head), "it computes again"
