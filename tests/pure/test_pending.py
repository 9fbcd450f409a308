"""A loss before its step: what scripts do with it, and when it may be read."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from ds_hydra.config.deepspeed_settings import screen_deepspeed_settings
from ds_hydra.host.batch_sizes import batch_sizes
from ds_hydra.host.pending import Collected, PendingLoss, Term
from ds_hydra.zero_hetero.errors import ConfigError


def handed_out() -> tuple[Collected, Any]:
    """What a step settles, and its `PendingLoss`, of which torch's stubs do not say that arithmetic keeps the class."""
    entry = Collected(None, lambda loss, **_: None)
    return entry, PendingLoss([Term(entry, 1.0)])


def test_arithmetic_now_and_the_value_after_the_step() -> None:
    entry, loss = handed_out()
    other_entry, other = handed_out()
    made = {
        "half": loss / 2,
        "both": (loss + other) / 2,
        "sum": sum([loss, other]),
        "minus": 1 - loss * 3 + 0.5,
        "difference": other - loss,
        "negative": -loss,
        "tensor": torch.tensor(2.0) * loss.detach().float().mean(),
    }
    assert not any(one.is_known for one in made.values())
    assert (f"{loss:.4f}", str(loss)) == ("pending", "PendingLoss(pending)")
    entry.settle(3.0)
    other_entry.settle(5.0)
    assert {name: one.item() for name, one in made.items()} == {
        "half": 1.5, "both": 4.0, "sum": 8.0, "minus": -7.5, "difference": 2.0, "negative": -3.0, "tensor": 6.0,
    }  # fmt: skip
    assert (f"{loss:.2f}", float(loss / 4), str(loss)) == ("3.00", 0.75, "tensor(3.)")


def test_a_known_loss_is_a_scalar_tensor() -> None:
    entry, loss = handed_out()
    entry.settle(3.0)
    assert torch.stack([loss, loss / 3]).tolist() == [3.0, 1.0]
    assert loss.repeat(2).tolist() == torch.tensor([loss, loss]).tolist() == [3.0, 3.0]
    assert (type(loss.detach()), type(loss * 2), type(loss.loss)) == (torch.Tensor,) * 3
    assert (loss < 4, loss == 3.0, abs(-loss), loss**2, max(loss, 1.0), bool(loss)) == (True, True, 3.0, 9.0, 3.0, True)
    written = copy.deepcopy(loss)
    assert isinstance(loss.div_(2), PendingLoss)
    loss += 1
    assert (loss.item(), loss.detach().numpy(), written.item(), torch.is_tensor(loss)) == (2.5, 2.5, 3.0, True)
    saved = io.BytesIO()
    torch.save(loss, saved)
    saved.seek(0)
    assert torch.load(saved) == 2.5
    loss.copy_(torch.tensor(3.0))
    total: Any = 0.0
    for _ in range(3):
        total = total + loss
    assert total.item() == 9.0


def test_what_is_written_before_the_step_counts_after_it() -> None:
    (entry, loss), (other_entry, other) = handed_out(), handed_out()
    total, kept = torch.ones(1), loss.clone()
    total += loss
    total -= other.detach()
    kept.div_(4).add_(1)
    kept += other
    spoilt = torch.ones(())
    spoilt += loss
    spoilt *= 2
    assert (total.isnan().item(), kept.shape) == (True, ())
    entry.settle(3.0)
    assert (kept.is_known, total.isnan().item()) == (False, True)
    other_entry.settle(5.0)
    assert (total.tolist(), kept.item(), spoilt.isnan().item()) == ([-1.0], 6.75, True)
    with pytest.raises(ConfigError, match=r"shape \(2,\)"):
        handed_out()[1] + torch.zeros(2)


READS = [
    float, bool, abs, copy.deepcopy, torch.exp,
    lambda loss: loss.item(), lambda loss: loss.tolist(), lambda loss: loss.numpy(), lambda loss: loss < 3,
    lambda loss: loss**2, lambda loss: loss * loss, lambda loss: 1 / loss, lambda loss: torch.stack([loss]),
    lambda loss: torch.save(loss, io.BytesIO()), lambda loss: torch.tensor([loss]), lambda loss: loss.data.item(),
    lambda loss: torch.full((2,), loss), lambda loss: torch.full_like(loss, loss),
    lambda loss: torch.zeros(2)[0].add_(loss),
]  # fmt: skip


@pytest.mark.parametrize("read", READS)
def test_reading_it_before_the_step_says_what_to_do(read: Any) -> None:
    with pytest.raises(RuntimeError, match=r"not computed yet.*engine\.step\(\).*engine\.last_step\.loss"):
        read(handed_out()[1])


def test_it_stands_for_the_whole_output() -> None:
    _, loss = handed_out()
    assert loss.loss is loss[0] is loss["loss"] is loss
    assert ("loss" in loss, "logits" in loss, loss[None].shape) == (True, False, (1,))
    for read in (lambda: loss.logits, lambda: loss[1], lambda: loss["logits"], lambda: loss[:2], lambda: list(loss)):
        with pytest.raises(ConfigError, match=r"forward_backward\(batch, loss\).*loss_fn\(logits, labels\)"):
            read()


@pytest.mark.parametrize(
    "mix",
    [
        lambda loss: loss + torch.zeros((), requires_grad=True),
        lambda loss: torch.ones((), requires_grad=True) * loss,
        lambda loss: loss / torch.ones(2),
    ],
)
def test_what_would_get_a_gradient_or_has_many_numbers_is_refused_beside_it(mix: Any) -> None:
    with pytest.raises(ConfigError, match=r"stands beside this loss.*loss_fn"):
        mix(handed_out()[1])


def test_backward_of_the_loss_is_the_engines() -> None:
    called: list[Any] = []
    loss = PendingLoss([Term(Collected(None, lambda loss, **kwargs: called.append((loss, kwargs))), 1.0)]) / 2
    loss.requires_grad_(True).backward()
    loss.backward(torch.tensor(3.0), retain_graph=True)
    assert called[0] == (loss, {"retain_graph": False})
    assert (called[1][0].terms[0].factor, called[1][1]) == (1.5, {"retain_graph": True})
    with pytest.raises(ConfigError, match="create_graph"):
        loss.backward(create_graph=True)
    with pytest.raises(RuntimeError, match="has run already"):
        PendingLoss((), 1.0).backward()


def test_the_number_alone_has_no_gradient() -> None:
    entry, loss = handed_out()
    with torch.no_grad():
        doubled = loss * 2
    parts = [loss.detach(), loss.data, doubled, loss + loss.detach(), torch.zeros_like(loss)]
    assert [part.requires_grad for part in parts] == [False, False, False, True, False]
    assert loss.clone().detach_().requires_grad is False
    with pytest.raises(RuntimeError, match="keeps its gradient"):
        loss.requires_grad = False
    entry.settle(3.0)
    assert [part.item() for part in parts] == [3.0, 3.0, 6.0, 6.0, 0.0]


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({}, 1),
        ({"gradient_accumulation_steps": 3}, 3),
        ({"gradient_accumulation_steps": "3", "train_batch_size": 12.0}, 3),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, 4),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 8}, 8),
    ],
)
def test_accumulation_steps(config: dict[str, Any], steps: int) -> None:
    assert batch_sizes(config, 2).accumulation == steps


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"gradient_accumulation_steps": "auto"}, "transformers' Trainer fills in"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be from 1 to .* but is 0"),
        ({"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2}, "9 is not a multiple"),
    ],
)
def test_bad_accumulation_steps(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        batch_sizes(config, 2)


def test_accelerates_steps_per_print_means_never() -> None:
    kept, _ = screen_deepspeed_settings({"steps_per_print": float("inf")})
    assert kept["steps_per_print"] > 10**14
