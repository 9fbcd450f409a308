"""What torch's operators for GPUs compute, on any device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class Flash:
    """torch's two operators for GPUs, by the whole score matrix: their arguments, by name, are those of its schema."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _given(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(name)
        schema = getattr(torch.ops.aten, name).default._schema
        names = [each.name for each in schema.arguments if not each.kwarg_only]
        assert len(args) + len(set(names) & set(options)) == len(names)
        assert set(options) <= {each.name for each in schema.arguments}
        return dict(zip(names, args, strict=False)) | options

    def _scores(self, given: dict[str, Any]) -> Tensor:
        """(heads, queries, keys) of the row."""
        q, k, left = given["query"], given["key"], given["window_size_left"]
        assert given["is_causal"] == (left == -1)
        assert given["window_size_right"] == 0
        own, others = given["cum_seq_q"].tolist(), given["cum_seq_k"].tolist()
        scores = torch.full((q.shape[1], len(q), len(k)), float("-inf"), dtype=q.dtype)
        for (start, stop), (first, last) in zip(pairwise(own), pairwise(others), strict=True):
            distance = torch.arange(last - (stop - start), last)[:, None] - torch.arange(first, last)[None]
            hidden = (distance < 0) | ((distance > left) & (left >= 0))
            keys = k[first:last].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            part = torch.einsum("ihd,jhd->hij", q[start:stop], keys) * given["scale"]
            scores[:, start:stop, first:last] = part.masked_fill(hidden, float("-inf"))
        return scores

    def _flash_attention_forward(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        given = self._given("_flash_attention_forward", args, options)
        scores, v = self._scores(given), given["value"]
        v = v.repeat_interleave(scores.shape[0] // v.shape[1], dim=1)
        out = torch.einsum("hij,jhd->ihd", torch.softmax(scores, dim=-1), v)
        return out, torch.logsumexp(scores, dim=-1), torch.tensor(5), torch.tensor(6), torch.tensor(7)

    def _flash_attention_backward(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        given = self._given("_flash_attention_backward", args, options)
        assert (int(given["rng_state"]), int(given["unused"])) == (5, 6)
        q, k, v, grad = (given[name] for name in ("query", "key", "value", "grad_out"))
        weights = torch.exp(self._scores(given) - given["logsumexp"][..., None])
        shared = q.shape[1] // k.shape[1]
        wide = [x.repeat_interleave(shared, dim=1) for x in (k, v)]
        delta = (grad * given["out"]).sum(-1).T[..., None]
        inner = weights * (torch.einsum("ihd,jhd->hij", grad, wide[1]) - delta) * given["scale"]
        dk, dv = torch.einsum("hij,ihd->jhd", inner, q), torch.einsum("hij,ihd->jhd", weights, grad)
        dk, dv = (x.unflatten(1, (-1, shared)).sum(2) for x in (dk, dv))
        return torch.einsum("hij,jhd->ihd", inner, wide[0]), dk, dv
