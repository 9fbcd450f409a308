"""What a careful user would write for one GPU: Hugging Face's model, packs, flash attention, FP32 masters, AdamW.

It computes what the engine computes: BF16 parameters, gradients summed over the micro-batches in FP32, FP32 masters
and moments, the norm clipped. Its batches lie on the device before a step begins, its `cu_seqlens` are made once a
pack, and the logits of a pack are all in memory, so that the head is not computed twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from tools.gpu.job import CLIPPING, OPTIMIZER

NAME = "plain_varlen"
_IGNORED = -100


@dataclass(frozen=True)
class PlainPack:
    """Whole sequences side by side, on the device."""

    tokens: Tensor  # (1, T)
    positions: Tensor  # (1, T), restarting at each sequence
    targets: Tensor  # (T,), the next token of the same sequence, _IGNORED after its last
    lengths: tuple[int, ...]
    bounds: Tensor  # int32 (sequences + 1,): where sequences begin, and where the last one ends

    @classmethod
    def of(cls, rows: Sequence[Tensor], device: torch.device) -> PlainPack:
        """A pack of sequences of tokens."""
        lengths = tuple(len(row) for row in rows)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        targets = torch.cat([torch.cat((row[1:], row.new_tensor([_IGNORED]))) for row in rows])
        return cls(
            torch.cat(list(rows))[None].to(device),
            torch.cat([torch.arange(length) for length in lengths])[None].to(device),
            targets.to(device),
            lengths,
            ends.to(device, torch.int32),
        )

    @property
    def num_targets(self) -> int:
        return sum(length - 1 for length in self.lengths)


def plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    plain_pack: PlainPack,
    **_: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's calling convention (1, heads, T, d); torch's varlen kernel on a GPU, SDPA by sequence on a CPU."""
    assert attention_mask is None, "no mask function is registered for it"
    grouped = query.shape[1] != key.shape[1]
    if not query.is_cuda:
        parts = zip(*(x.split(plain_pack.lengths, dim=2) for x in (query, key, value)), strict=True)
        outs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
            for q, k, v in parts
        ]
        return torch.cat(outs, dim=2).transpose(1, 2), None
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = plain_pack.bounds, max(plain_pack.lengths)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    grouping: dict[str, Any] = {}
    if grouped and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        grouping = {"enable_gqa": True}
    elif grouped:  # torch before 2.12
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=(-1, 0), **grouping)
    assert isinstance(out, Tensor), "asked for no more than the output"
    return out.unsqueeze(0), None


class PlainLoop:
    """Trains `model`, which it takes over, on packs."""

    def __init__(self, model: Any, device: torch.device):
        AttentionInterface.register(NAME, plain_attention)
        model.config._attn_implementation = NAME
        self.model = model.to(device).train()
        self.params = list(model.parameters())
        self.masters: list[Tensor] = [nn.Parameter(p.detach().float().clone()) for p in self.params]
        self.sums = [torch.zeros_like(master) for master in self.masters]  # their gradients
        for parameter, master, total in zip(self.params, self.masters, self.sums, strict=True):
            # Not `model.to(bfloat16)`, which would round the rotary embedding's frequencies too.
            parameter.data = parameter.data.bfloat16()
            master.grad = total
            parameter.register_post_accumulate_grad_hook(_into(total))
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **OPTIMIZER)

    def step(self, packs: Sequence[PlainPack]) -> float:
        """One update; returns the mean loss of all targets, and so waits for the device."""
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)
            torch._foreach_zero_(self.sums)
        targets = sum(pack.num_targets for pack in packs)
        losses = [self.forward_and_backward(pack, targets) for pack in packs]
        torch.nn.utils.clip_grad_norm_(self.masters, CLIPPING)
        self.optimizer.step()
        return float(torch.stack(losses).sum())

    def forward_and_backward(self, pack: PlainPack, targets: int) -> Tensor:
        """A pack's share of the loss of a step with so many targets; gradients go to the masters."""
        out = self.model(input_ids=pack.tokens, position_ids=pack.positions, use_cache=False, plain_pack=pack)
        loss = F.cross_entropy(out.logits[0].float(), pack.targets, ignore_index=_IGNORED, reduction="sum") / targets
        loss.backward()
        return loss.detach()


def _into(total: Tensor) -> Any:
    def accumulate(parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    return accumulate
