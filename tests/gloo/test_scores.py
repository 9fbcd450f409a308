"""What log-probabilities and entropies take of memory in a tensor parallel group, beside gathered logits."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hydra.pipe.collectives import copy_to_ranks, gather_last_dim
from ds_hydra.pipe.loss import Objective, Scored, scored_loss, token_scores
from ds_hydra.pipe.model_plan import LOGITS_AT_ONCE
from tools import aims

WIDTH = 64  # of the hidden states: what they and the head's weight take is the same for both


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


def _loss(log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> Tensor:
    return 0.01 * entropy - log_probs


def most_bytes(vocabulary: int, tokens: int, tp: int) -> tuple[int, int]:
    """The most bytes that one rank of a group has at once, ours and by gathered logits, counted on the meta device."""
    group: Any = object()
    with torch.device("meta"):
        hidden, weight = torch.randn(1, tokens, WIDTH), torch.randn(vocabulary // tp, WIDTH)
        labels, weights = torch.zeros(tokens, dtype=torch.long), torch.randn(tokens)
        scored = Scored(Objective(_loss), torch.zeros(tokens, 0))

    def ours(rows: Tensor) -> Tensor:
        return scored_loss(
            rows[None], scored, labels, weights, lambda part, _: part @ weight.t(),
            lambda logits, words, given: token_scores(logits, words, 0, group, given), vocab=vocabulary,
        )  # fmt: skip

    def gathered(rows: Tensor) -> Tensor:
        log_p = torch.log_softmax(gather_last_dim(rows @ weight.t(), (vocabulary // tp,) * tp, 0, group), dim=-1)
        own = log_p.gather(-1, labels[:, None])[:, 0]
        return (_loss(own, -(log_p.exp() * log_p).sum(dim=-1), {}) * weights).sum()

    # No message is sent: what ranks reduce keeps its shape, and what they gather is as wide as the vocabulary.
    module, found = "ds_hydra.pipe.collectives.dist", []
    with (
        mock.patch("torch.distributed.all_reduce"),
        mock.patch(f"{module}.all_gather"),
        mock.patch(f"{module}.get_world_size", return_value=tp),
    ):
        for loss in (ours, gathered):
            with Live() as live:
                loss(copy_to_ranks(hidden.clone().requires_grad_().squeeze(0), group)).backward()
            found.append(live.most)
    return found[0], found[1]


@pytest.mark.parametrize("tokens", [1, 4096])
def test_scores_take_a_part_of_the_memory_of_gathered_logits(tokens: int) -> None:
    """With a vocabulary of 150K under TP 4: of all tokens at once, and of one block of them."""
    ours = most_bytes(150_000, 4096, 4)[0]
    in_block = max(1, LOGITS_AT_ONCE // 150_000) if tokens == 1 else tokens
    assert ours <= aims.SCORES_MEMORY * most_bytes(150_000, in_block, 4)[1]
