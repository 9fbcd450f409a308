"""Models as scripts write them in one class, in nanoGPT's shape: it runs its layers itself, and has the head."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class OneClassConfig(PretrainedConfig):
    model_type = "one_class"
    attribute_map: ClassVar = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    }

    def __init__(
        self,
        vocab_size: int = 97,
        n_embd: int = 64,
        n_layer: int = 4,
        n_head: int = 8,
        block_size: int = 1024,
        dropout: float = 0.0,
        cap: float = 0.0,
        **more: Any,
    ):
        self.vocab_size, self.n_embd, self.n_layer, self.n_head = vocab_size, n_embd, n_layer, n_head
        self.block_size, self.dropout, self.cap = block_size, dropout, cap
        super().__init__(**more)


class Attention(nn.Module):
    """Causal attention of a script's own, which knows of no packs."""

    def __init__(self, config: OneClassConfig):
        super().__init__()
        width = config.n_embd
        self.heads, self.dropout = config.n_head, config.dropout
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.resid = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = (part.view(rows, tokens, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(width, 2))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.resid(self.c_proj(found.transpose(1, 2).reshape(rows, tokens, width)))
        return out


class OneBlock(nn.Module):
    def __init__(self, config: OneClassConfig):
        super().__init__()
        width = config.n_embd
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(width), nn.LayerNorm(width), Attention(config)
        self.mlp = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width), nn.Dropout(config.dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class OneClass(PreTrainedModel):
    """Runs its layers and has the head; logits with a cap, if the config has one."""

    config_class = OneClassConfig
    _tied_weights_keys: ClassVar = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: OneClassConfig):
        super().__init__(config)
        width = config.n_embd
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, width),
                "wpe": nn.Embedding(config.block_size, width),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(OneBlock(config) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer["wte"]

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> CausalLMOutput:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.transformer["drop"](self.transformer["wte"](input_ids) + self.transformer["wpe"](positions))
        layers: Any = self.transformer["h"]
        for layer in layers:
            x = layer(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        if self.config.cap:
            logits = self.config.cap * torch.tanh(logits / self.config.cap)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


AutoConfig.register(OneClassConfig.model_type, OneClassConfig)
AutoModelForCausalLM.register(OneClassConfig, OneClass)


class Convolved(nn.Module):
    """An MLP behind a short causal convolution of each feature."""

    def __init__(self, mlp: nn.Module, width: int, dtype: torch.dtype):
        super().__init__()
        self.mlp, self.conv = mlp, nn.Conv1d(width, width, 4, groups=width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(x + self.conv(F.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2))
        return out


class Recurrent(nn.Module):
    """An MLP beside a GRU."""

    def __init__(self, mlp: nn.Module, width: int, dtype: torch.dtype):
        super().__init__()
        self.mlp, self.gru = mlp, nn.GRU(width, width, batch_first=True, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) + self.gru(x)[0]  # type: ignore[no-any-return]


class Attending(nn.Module):
    """An MLP beside torch's own attention."""

    def __init__(self, mlp: nn.Module, width: int, dtype: torch.dtype):
        super().__init__()
        self.mlp, self.mha = mlp, nn.MultiheadAttention(width, 4, batch_first=True, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.mlp(x) + self.mha(x, x, x, attn_mask=later, need_weights=False)[0]  # type: ignore[no-any-return]
