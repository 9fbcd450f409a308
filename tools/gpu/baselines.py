"""What part "training" compares with: loops that a careful user would write for one GPU, each of the same packs.

All compute what the engine computes: packs, varlen attention, gradients summed over the micro-batches in FP32, the norm
clipped, FP32 masters and moments, a fused AdamW. Their batches lie on the device before a step begins.

  plain loop      Hugging Face's model as it is; the logits of a pack are all in memory, and nothing is computed twice
  compiled        the same, each layer under `torch.compile(dynamic=True)`, attention outside of its graphs
  Liger           the same with Liger's kernels for norms, rotary, SwiGLU and the head with its loss
  plain Llama     a Llama in torch's own operators, compiled block by block, its loss in chunks
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from tools.gpu.bench import CLIPPING, OPTIMIZER
from tools.gpu.plain_llama import PlainLlama

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
        AttentionInterface.register(NAME, torch.compiler.disable(plain_attention))
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
        loss = self.sum_of_losses(pack) / targets
        loss.backward()
        return loss.detach()

    def sum_of_losses(self, pack: PlainPack) -> Tensor:
        """A pack's loss, with all its logits in memory."""
        out = self.model(input_ids=pack.tokens, position_ids=pack.positions, use_cache=False, plain_pack=pack)
        return F.cross_entropy(out.logits[0].float(), pack.targets, ignore_index=_IGNORED, reduction="sum")


def _into(total: Tensor) -> Any:
    def accumulate(parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    return accumulate


def _compiling(device: torch.device) -> dict[str, Any]:
    """On a CPU graphs are captured and not compiled: tiny shapes need no C++ compiler."""
    return {"dynamic": True} if device.type == "cuda" else {"dynamic": True, "backend": "aot_eager"}


class CompiledLoop(PlainLoop):
    """With its layers compiled one by one."""

    def __init__(self, model: Any, device: torch.device):
        super().__init__(model, device)
        for layer in self.model.model.layers:
            layer.compile(**_compiling(device))


class LigerLoop(PlainLoop):
    """With Liger's kernels in the model, and its head and loss in one."""

    def __init__(self, model: Any, device: torch.device):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=False, cross_entropy=False)
        super().__init__(model, device)
        self._loss = LigerFusedLinearCrossEntropyLoss(ignore_index=_IGNORED, reduction="sum")

    def sum_of_losses(self, pack: PlainPack) -> Tensor:
        """A pack's loss, by Liger's head and loss in one."""
        hidden = self.model.model(
            input_ids=pack.tokens, position_ids=pack.positions, use_cache=False, plain_pack=pack
        ).last_hidden_state
        found: Tensor = self._loss(self.model.lm_head.weight, hidden[0], pack.targets)
        return found


class LlamaLoop(PlainLoop):
    """Of a plain Llama, compiled block by block."""

    def __init__(self, model: Any, device: torch.device):
        super().__init__(PlainLlama.of(model), device)
        self.model.compile_blocks(**_compiling(device))

    def sum_of_losses(self, pack: PlainPack) -> Tensor:
        """A pack's loss, in chunks."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
            scale = q.shape[-1] ** -0.5
            return plain_attention(self.model, rows[0], rows[1], rows[2], None, scaling=scale, plain_pack=pack)[0][0]

        found: Tensor = self.model.loss(pack.tokens[0], pack.positions[0], pack.targets, attend)
        return found


class Baseline(NamedTuple):
    """One that the engine is compared with."""

    loop: type[PlainLoop]
    aim: float  # the engine's tokens per second over its; 0: it is told and no aim
    package: str = ""  # that it needs
    on_cpu: bool = True

    def why_not(self, device: torch.device) -> str:
        """Why it does not run here; "": it does."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return "" if self.on_cpu or device.type == "cuda" else "its kernels need a GPU"


BASELINES = {
    "plain loop": Baseline(PlainLoop, 1.10),
    "compiled layers": Baseline(CompiledLoop, 1.0),
    "Liger": Baseline(LigerLoop, 1.05, "liger_kernel", on_cpu=False),
    "plain Llama, compiled": Baseline(LlamaLoop, 0.0),
}
