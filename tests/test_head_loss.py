"""Head and loss as one: what autograd finds, in any blocks; and heads behind which there is something else."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hydra.pipe import head_loss
from ds_hydra.pipe.contexts import Contexts
from ds_hydra.pipe.head_loss import HeadLoss
from ds_hydra.pipe.loss import blockwise_loss, token_losses
from ds_hydra.pipe.models.plain_head import PlainHead
from ds_hydra.pipe.rows import Chunk, MicroBatch, Pack

Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor]
TOKENS, WIDTH, VOCAB = 97, 32, 53


def micro_batch(tokens: int, vocab: int, dtype: torch.dtype) -> MicroBatch:
    """Random labels, some of them ignored, and weights of this type."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[::7] = -100
    weights = torch.rand(tokens, generator=generator).to(dtype)
    return MicroBatch(
        Pack((tokens,)), torch.zeros(1, tokens), None, labels, weights, torch.full((tokens,), torch.nan, dtype=dtype)
    )


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
    monkeypatch.setattr(head_loss, "HEAD_LOGITS_AT_ONCE", rows * VOCAB)
    monkeypatch.setattr(head_loss, "LOGITS_AT_ONCE", 3 * VOCAB)
    hidden, weight = values(TOKENS, WIDTH, VOCAB)
    found = results(as_one, hidden, weight, factor=0.37, needed=needed)
    torch.testing.assert_close(found, results(by_autograd, hidden, weight, factor=0.37, needed=needed))


def test_a_weights_gradient_is_as_good_in_many_blocks_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, width, vocab = 2048, 64, 512
    hidden, weight = (one.bfloat16() for one in values(tokens, width, vocab))
    true = results(by_autograd, hidden.double(), weight.double())[2]
    assert true is not None
    errors: dict[int, float] = {}
    for blocks in (1, 16, 128):
        monkeypatch.setattr(head_loss, "HEAD_LOGITS_AT_ONCE", tokens * vocab // blocks)
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
    narrow = head_loss._narrow(wide, torch.bfloat16)
    assert torch.equal(narrow, expected)
    assert narrow.data_ptr() == wide.data_ptr()


def test_of_forwards_that_wait_for_their_backwards_one_holds_a_weights_gradient() -> None:
    head = HeadLoss(0, VOCAB, None)
    batch = micro_batch(TOKENS, VOCAB, torch.float64)
    hidden, weight = values(TOKENS, WIDTH, VOCAB)
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
    hidden, weight = values(TOKENS, WIDTH, VOCAB)
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
        self.head = nn.Linear(WIDTH, VOCAB, **{"bias": False} | options)
        self.before, self.after = before, after

    def forward(self, hidden: Tensor) -> Tensor:
        return self.after(self.head(self.before(hidden)))


def as_it_is(x: Tensor) -> Tensor:
    return x


def twice(model: Model) -> Model:
    """A model that calls its head two times."""
    model.after = lambda logits: (model.head(torch.zeros(1, 1, WIDTH)), logits)[1]
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
    hidden = torch.randn(1, 1, WIDTH)
    found = PlainHead.of(model, model.head)
    assert (found is not None and found.is_all(hidden, lambda: model(hidden))) == plain
    assert "forward" not in vars(model.head), "it computes again"
