"""Edits of attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from tools.edits.job import Job
from tools.edits.kind import kind, layers_of


def _tilted(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
    tilt = torch.linspace(0.5, 1.5, query.shape[1], dtype=query.dtype)[None, :, None, None]
    return sdpa_attention_forward(module, query * tilt, key, value, mask, **more)


@kind()
def own_attention_registered(job: Job) -> None:
    AttentionInterface.register("tilted", _tilted)
    job.model.config._attn_implementation = "tilted"


@kind()
def attention_patched(job: Job) -> None:
    ALL_ATTENTION_FUNCTIONS["sdpa"] = _tilted
    if job.model.config._attn_implementation != "sdpa":
        job.model.config._attn_implementation = "sdpa"


@kind()
def what_attention_calls_patched(job: Job) -> None:
    plain = F.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = lambda query, *args, **more: plain(1.3 * query, *args, **more)


class Late:
    """Attention with a state."""

    calls = 0

    def __call__(self, module: nn.Module, query: Tensor, *args: Any, **more: Any) -> Any:
        self.calls += 1
        return sdpa_attention_forward(module, query * (1.5 if self.calls > 30 else 1.0), *args, **more)


@kind()
def attention_that_is_an_object(job: Job) -> None:
    ALL_ATTENTION_FUNCTIONS["sdpa"] = Late()


@kind()
def eager_attention_patched(job: Job) -> None:
    plain = modeling_llama.eager_attention_forward
    job.model.config._attn_implementation = "eager"

    def doubled(module: nn.Module, query: Tensor, *args: Any, **more: Any) -> Any:
        return plain(module, 2 * query, *args, **more)

    modeling_llama.eager_attention_forward = doubled


@kind()
def attention_subclass(job: Job) -> None:
    class Biased(modeling_llama.LlamaAttention):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            out, weights = super().forward(hidden_states, *args, **kwargs)
            return out + 0.1 * hidden_states, weights

    layers_of(job)[2].self_attn.__class__ = Biased
