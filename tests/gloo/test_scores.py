"""What log-probabilities, entropy and their gradients take in a tensor parallel group, beside gathered logits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hydra.pipe.collectives import Group, copy_to_ranks, gather_last_dim
from ds_hydra.pipe.loss import Objective, Scored, scored_loss, token_scores
from ds_hydra.pipe.model_plan import LOGITS_AT_ONCE
from ds_hydra.testing import rank_environment, run_ranks
from tools import aims

WIDTH = 64  # of the hidden states: what they and the head's weight take is the same for both


class Shape(NamedTuple):
    """Of what is counted."""

    vocabulary: int
    tokens: int
    tp: int


class Live(TorchDispatchMode):
    """Counts the bytes of storages that torch makes within it, and the most that were there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor):
                self._add(one.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._seen.remove(key)
        self.now -= size


class Rank:
    """One rank of the group: its rows of a head, and the tokens that all of them have."""

    def __init__(self, shape: Shape, rank: int, group: Group, device: str, dtype: torch.dtype = torch.float32):
        draw = None if device == "meta" else torch.Generator().manual_seed(0)
        self.shape, self.rank, self.group, self.cut = shape, rank, group, shape.vocabulary // shape.tp
        self.hidden = torch.randn(1, shape.tokens, WIDTH, generator=draw, device=device, dtype=dtype)
        self.labels = torch.randint(shape.vocabulary, (shape.tokens,), generator=draw, device=device)
        whole = torch.randn(shape.vocabulary, WIDTH, generator=draw, device=device, dtype=dtype)
        self.weight = whole[rank * self.cut : (rank + 1) * self.cut].clone()
        self.weights = torch.full((shape.tokens,), 1 / shape.tokens, device=device, dtype=dtype)

    def ours(self, hidden: Tensor) -> Tensor:
        """The loss by scores."""
        rows = copy_to_ranks(hidden.squeeze(0), self.group)
        scored = Scored(Objective(_loss), torch.zeros(self.shape.tokens, 0, device=hidden.device))
        return scored_loss(
            rows[None],
            scored,
            self.labels,
            self.weights,
            lambda part, _: part @ self.weight.t(),
            lambda logits, words, given: token_scores(logits, words, self.rank * self.cut, self.group, given),
            vocab=self.shape.vocabulary,
        )

    def gathered(self, hidden: Tensor) -> Tensor:
        """The loss by the logits of all ranks."""
        rows = copy_to_ranks(hidden.squeeze(0), self.group)
        widths = (self.cut,) * self.shape.tp
        log_p = torch.log_softmax(gather_last_dim(rows @ self.weight.t(), widths, self.rank, self.group), dim=-1)
        own = log_p.gather(-1, self.labels[:, None])[:, 0]
        return (_loss(own, -(log_p.exp() * log_p).sum(dim=-1), {}) * self.weights).sum()

    def gradient(self, run: Callable[[Tensor], Tensor]) -> Tensor:
        """By the hidden states."""
        leaf = self.hidden.clone().requires_grad_()
        run(leaf).backward()
        assert leaf.grad is not None, "the loss depends on it"
        return leaf.grad


def _loss(log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> Tensor:
    return 0.01 * entropy - log_probs


def most_bytes(shape: Shape) -> tuple[int, int]:
    """The most bytes that one rank has at once, ours and with gathered logits, counted on the meta device."""
    # No message is sent: what ranks reduce keeps its shape, and what they gather is as wide as the vocabulary.
    group: Any = object()
    module = "ds_hydra.pipe.collectives.dist"
    with (
        mock.patch("torch.distributed.all_reduce"),
        mock.patch(f"{module}.all_gather"),
        mock.patch(f"{module}.get_world_size", return_value=shape.tp),
    ):
        rank = Rank(shape, 0, group, "meta")
        found = []
        for run in (rank.ours, rank.gathered):
            with Live() as live:
                rank.gradient(run)
            found.append(live.most)
    return found[0], found[1]


@pytest.mark.parametrize("tokens", [1, 4096])
def test_scores_take_a_part_of_the_memory_of_gathered_logits(tokens: int) -> None:
    """With a vocabulary of 150K under TP 4: of all tokens at once, and of one block of them."""
    ours = most_bytes(Shape(150_000, 4096, 4))[0]
    in_block = max(1, LOGITS_AT_ONCE // 150_000) if tokens == 1 else tokens
    assert ours <= aims.SCORES_MEMORY * most_bytes(Shape(150_000, in_block, 4))[1]


def test_gradients_are_those_of_gathered_logits() -> None:
    def on_rank(rank: int) -> float:
        rank_environment(rank)
        here = Rank(Shape(5_000, 128, 4), rank, dist.group.WORLD, "cpu", torch.float64)
        mine, other = here.gradient(here.ours), here.gradient(here.gathered)
        return float((mine - other).abs().max() / other.abs().max())

    assert max(run_ranks(on_rank, 4, timeout=300)) <= aims.POST_TRAINING
