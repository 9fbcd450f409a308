"""Plain DeepSpeed jobs to measure against: a model and a step's sequences in, one token-weighted update out.

Each baseline is what a careful user would write. One sequence is a micro-step, so nothing is padded and attention is
SDPA's causal kernel; gradients are reduced in the last micro-step only; sequences are spread over the ranks by their
cost, longest first; the loss is the sum of token losses over the targets of the whole step, multiplied by what
DeepSpeed will divide by. The optimizer is torch's fused AdamW, and no extension is compiled.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

IGNORED = -100
OPTIMIZER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
GRADIENT_CLIPPING = 1.0


class Baseline(Protocol):
    """One DeepSpeed engine on this rank."""

    engine: Any

    def step(self, sequences: Sequence[Tensor]) -> Tensor:
        """Run one update on the whole job's sequences; returns this rank's share of the loss."""


@dataclass(frozen=True)
class Shape:
    """What the cost of a sequence depends on."""

    hidden: int
    layers: int
    ffn: int
    vocab: int

    def cost(self, length: int) -> float:
        """Multiplications of one forward."""
        per_token = self.layers * (4 * self.hidden**2 + 3 * self.hidden * self.ffn) + self.hidden * self.vocab
        return length * per_token + self.layers * self.hidden * length**2


def spread(sequences: Sequence[Tensor], num_parts: int, shape: Shape, most: int | None = None) -> list[list[Tensor]]:
    """Longest first, each to the part with the least cost so far; no part gets more than `most` sequences."""
    parts: list[list[Tensor]] = [[] for _ in range(num_parts)]
    loads = [0.0] * num_parts
    for sequence in sorted(sequences, key=len, reverse=True):
        allowed = [i for i in range(num_parts) if most is None or len(parts[i]) < most]
        part = min(allowed, key=loads.__getitem__)
        parts[part].append(sequence)
        loads[part] += shape.cost(len(sequence))
    return parts


def num_targets(sequences: Sequence[Tensor]) -> int:
    """Tokens that are predicted: all but the first of each sequence."""
    return sum(len(sequence) - 1 for sequence in sequences)


def base_config(**more: Any) -> dict[str, Any]:
    """DeepSpeed's config, all of it in favour of speed on CPU."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": GRADIENT_CLIPPING,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1, "overlap_comm": False, "reduce_scatter": False},  # fastest on gloo of four
        "steps_per_print": None,
        **more,
    }


def prepare() -> None:
    """Settings of the process before its first engine: nothing compiled, no chatter."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def start(model: nn.Module, config: dict[str, Any], mpu: Any = None) -> Any:
    """A DeepSpeed engine with torch's fused AdamW."""

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, fused=True, **OPTIMIZER)  # type: ignore[arg-type]

    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)[0]


class Zero1:
    """ZeRO-1 data parallelism over all ranks, or over groups of `tp` ranks that AutoTP shards the model for."""

    def __init__(self, model: Any, shape: Shape, tp: int = 1):
        config = base_config()
        if tp > 1:
            config["tensor_parallel"] = {"autotp_size": tp, "vocab_parallel_lm_head": True}
        self.shape, self.tp = shape, tp
        self.engine = start(copy.deepcopy(model), config)
        self.num_replicas = dist.get_world_size() // tp

    def step(self, sequences: Sequence[Tensor]) -> Tensor:
        """Run one update on the whole job's sequences; returns this rank's share of the loss."""
        total = num_targets(sequences)
        mine = spread(sequences, self.num_replicas, self.shape)[dist.get_rank() // self.tp]

        def loss(sequence: Tensor) -> Tensor:
            row = sequence.unsqueeze(0)
            # Hugging Face divides the sum of token losses by num_items_in_batch.
            return self.engine(input_ids=row, labels=row, num_items_in_batch=total, use_cache=False).loss

        share = _accumulate(self.engine, mine, loss, self.num_replicas)
        return share if dist.get_rank() % self.tp == 0 else torch.zeros(())


class Ulysses:
    """ZeRO-1 with every sequence shared by groups of `sp` ranks through UlyssesSPAttentionHF.

    Its own data loader gathers tensors of unequal size, which gloo refuses: so each rank cuts its part of a sequence
    itself. Lengths must be multiples of `sp`, as its attention asks. It puts its attention in the place of SDPA for all
    models of the process, and here for no longer than its own steps.
    """

    def __init__(self, model: Any, shape: Shape, sp: int = 2):
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        self.shape, self.sp = shape, sp
        model = copy.deepcopy(model)
        mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", sp, micro_batch_size=1)
        self._attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
        self.engine = start(model, base_config(), mpu)

    def step(self, sequences: Sequence[Tensor]) -> Tensor:
        """Run one update on the whole job's sequences; returns this rank's share of the loss."""
        ALL_ATTENTION_FUNCTIONS["sdpa"] = self._attention
        try:
            return self._step(sequences)
        finally:
            del ALL_ATTENTION_FUNCTIONS["sdpa"]

    def _step(self, sequences: Sequence[Tensor]) -> Tensor:
        replica, sp_rank = divmod(dist.get_rank(), self.sp)
        num_replicas, total = dist.get_world_size() // self.sp, num_targets(sequences)
        mine = spread(sequences, num_replicas, self.shape)[replica]

        def loss(sequence: Tensor) -> Tensor:
            cut = len(sequence) // self.sp
            part = slice(cut * sp_rank, cut * (sp_rank + 1))
            positions = torch.arange(len(sequence))[part].unsqueeze(0)
            labels = F.pad(sequence[1:], (0, 1), value=IGNORED)[part].unsqueeze(0)
            return self.engine(
                input_ids=sequence[part].unsqueeze(0),
                position_ids=positions,
                labels=labels,
                shift_labels=labels,
                num_items_in_batch=total,
                use_cache=False,
            ).loss

        return _accumulate(self.engine, mine, loss, num_replicas)


def _accumulate(engine: Any, sequences: Sequence[Tensor], loss_of: Callable[[Tensor], Tensor], divisor: int) -> Tensor:
    """One micro-step a sequence, reduction in the last; `divisor` is what DeepSpeed will divide gradients by.

    DeepSpeed needs a backward on every rank: one without a sequence runs two tokens that count nothing.
    """
    share = torch.zeros(())
    if not sequences:
        sequences, divisor = [torch.zeros(2, dtype=torch.int64)], 0
    for index, sequence in enumerate(sequences):
        engine.set_gradient_accumulation_boundary(index == len(sequences) - 1)
        loss = loss_of(sequence)
        share += loss.detach() * (divisor > 0)
        engine.backward(loss * divisor)
    engine.step()
    return share


class _Embedding(nn.Module):
    def __init__(self, embedding: nn.Module):
        super().__init__()
        self.embedding = embedding

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids)


class _Layer(nn.Module):
    """A decoder layer with the rotary table of the longest sequence at hand."""

    def __init__(self, layer: nn.Module, cos: Tensor, sin: Tensor):
        super().__init__()
        self.layer = layer
        self.cos, self.sin = cos, sin

    def forward(self, hidden: Tensor) -> Tensor:
        length = hidden.shape[1]
        out = self.layer(hidden, position_embeddings=(self.cos[:, :length], self.sin[:, :length]), use_cache=False)
        return out[0] if isinstance(out, tuple) else out


class _Head(nn.Module):
    def __init__(self, norm: nn.Module, head: nn.Module):
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))


class Pipeline:
    """PipelineModule with `pp` stages and dynamic shapes, ZeRO-1 over its replicas.

    Each replica must run equally many micro-batches: an odd sequence is paired with one of two tokens that counts
    nothing.
    """

    def __init__(self, model: Any, shape: Shape, longest: int, pp: int = 2):
        from deepspeed.pipe import PipelineModule

        self.shape, self.pp, self.total = shape, pp, 1
        self.num_replicas = dist.get_world_size() // pp
        model = copy.deepcopy(model)
        cos, sin = model.model.rotary_emb(torch.zeros(1, 1, shape.hidden), torch.arange(longest).unsqueeze(0))
        layers = [
            _Embedding(model.model.embed_tokens),
            *(_Layer(layer, cos, sin) for layer in model.model.layers),
            _Head(model.model.norm, model.lm_head),
        ]
        module = PipelineModule(
            layers, num_stages=pp, loss_fn=self._loss, partition_method="uniform", dynamic_shape=True
        )
        self.engine = start(module, base_config())
        self.scale = 1.0

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.squeeze(0), labels.squeeze(0), ignore_index=IGNORED, reduction="sum")
        return losses * self.scale

    def step(self, sequences: Sequence[Tensor]) -> Tensor:
        """Run one update on the whole job's sequences; returns this rank's share of the loss."""
        most = -(-len(sequences) // self.num_replicas)
        mine = spread(sequences, self.num_replicas, self.shape, most)[self.engine.grid.get_data_parallel_rank()]
        rows = [(s.unsqueeze(0), F.pad(s[1:], (0, 1), value=IGNORED).unsqueeze(0)) for s in mine]
        nothing = torch.zeros(1, 2, dtype=torch.int64)
        rows += [(nothing, torch.full_like(nothing, IGNORED))] * (most - len(rows))
        self.engine.set_train_batch_size(most * self.num_replicas)
        self.scale = most * self.num_replicas / num_targets(sequences)
        loss = self.engine.train_batch(iter(rows))
        return loss if dist.get_rank() == 0 else torch.zeros(())
