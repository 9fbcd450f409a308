"""A Llama as a careful user writes it for `torch.compile`: no library between the script and torch's operators.

The shape of torchtitan's model: blocks that are compiled one by one, attention outside of them, packs of whole
sequences, and the loss in chunks, so that the logits of a pack are never all in memory. It takes Hugging Face's weights
by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries, keys, values (T, heads, d) -> (T, heads, d)
_CHUNK = 2048  # tokens whose logits are there at once


def tables_of(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embeddings, (T, 1, d), FP32 (Su et al., 2021)."""
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None].float() * theta ** (-steps / head_dim)
    both = torch.cat((angles, angles), dim=-1)[:, None]
    return both.cos(), both.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (T, heads, d) by rotary embeddings."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


class Block(nn.Module):
    """A layer, whose attention stands between two functions that are compiled."""

    def __init__(self, config: Any):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.heads, self.kv_heads, self.eps = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.rms_norm_eps,
        )
        self.head = hidden // self.heads
        self.input_layernorm, self.post_attention_layernorm = (nn.Parameter(torch.ones(hidden)) for _ in range(2))
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(hidden, self.kv_heads * self.head, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x (T, hidden)."""
        h = F.rms_norm(x, (x.shape[-1],), self.input_layernorm, self.eps)
        q = self.q_proj(h).view(-1, self.heads, self.head)
        k, v = (one(h).view(-1, self.kv_heads, self.head) for one in (self.k_proj, self.v_proj))
        return turned(q, cos, sin), turned(k, cos, sin), v

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """What the layer hands on, of its input and what attention has found."""
        x = x + self.o_proj(attended.flatten(1))
        h = F.rms_norm(x, (x.shape[-1],), self.post_attention_layernorm, self.eps)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return self.after(x, attend(*self.before(x, cos, sin)))


class PlainLlama(nn.Module):
    """A language model with tied embeddings."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))

    @classmethod
    def of(cls, model: Any) -> PlainLlama:
        """With the weights of Hugging Face's Llama, whose embeddings are tied."""
        with torch.device("meta"):
            plain = cls(model.config)
        names = {"model.": "", "self_attn.": "", "mlp.": "", "layernorm.weight": "layernorm", "norm.weight": "norm"}
        values: dict[str, Tensor] = {}
        for name, value in model.state_dict().items():
            for old, new in names.items():
                name = name.replace(old, new)
            if name != "lm_head.weight":
                values[name] = value
        plain.load_state_dict(values, assign=True)
        return plain

    def compile_blocks(self, **options: Any) -> None:
        """Compile what stands before and after attention in each block: one graph for all of them."""
        for block in self.layers:
            for name in ("before", "after"):
                setattr(block, name, torch.compile(getattr(block, name), **options))

    def loss(self, tokens: Tensor, positions: Tensor, targets: Tensor, attend: Attend) -> Tensor:
        """Sum of the tokens' losses; a target of -100 counts nothing."""
        head = self.config.hidden_size // self.config.num_attention_heads
        cos, sin = tables_of(positions, head, self.config.rope_parameters["rope_theta"])
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x, cos, sin, attend)
        x = F.rms_norm(x, (x.shape[-1],), self.norm, self.config.rms_norm_eps)
        parts = zip(x.split(_CHUNK), targets.split(_CHUNK), strict=True)
        return torch.stack([checkpoint(self._chunk, part, wanted, use_reentrant=False) for part, wanted in parts]).sum()

    def _chunk(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(x, self.embed_tokens.weight).float()
        return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
