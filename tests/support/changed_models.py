"""Models that their users changed after the config made them: a name in, a changed model out.

A stage that were made from the config again would lose each of these changes without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.integrations.neftune import activate_neftune
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.support.own_models import Attending, Convolved, Recurrent

Change = Callable[[Any], None]


class Scaled(LlamaForCausalLM):
    """Logits times an attribute that an instance is given; its constructor takes more than a config."""

    def __init__(self, config: Any, factor: float = 1.0):
        super().__init__(config)
        self.factor = factor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * self.factor
        return out


class Adapter(nn.Module):
    """A linear layer with a low-rank one beside it, as adapters are made."""

    def __init__(self, inner: nn.Linear, rank: int = 4):
        super().__init__()
        self.inner = inner
        self.down = nn.Parameter(0.1 * torch.randn(rank, inner.in_features, dtype=inner.weight.dtype))
        self.up = nn.Parameter(0.1 * torch.randn(inner.out_features, rank, dtype=inner.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.down.T @ self.up.T


class LowRank(nn.Module):
    """A frozen linear layer with trained low-rank ones beside it, laid out as peft lays them out."""

    def __init__(self, base: nn.Linear, rank: int = 4):
        super().__init__()
        own: dict[str, Any] = {"bias": False, "dtype": base.weight.dtype}
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, **own)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, **own)})
        self.scaling = {"default": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        beside = self.lora_B["default"](self.lora_A["default"](x))
        out: Tensor = self.base_layer(x) + beside * self.scaling["default"]
        return out


class Tempered(LlamaMLP):
    """An MLP with a parameter of its own between its linear layers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * self.temperature)


def _activation(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.PReLU(init=0.2).to(model.dtype)


def _hooks(model: Any) -> None:
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: out * 1.5 + 0.1)  # as NEFTune's
    model.model.layers[2].register_forward_pre_hook(lambda module, args: (args[0] * 1.1, *args[1:]))
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 2)
    model.model.norm.register_forward_hook(lambda module, args, out: out * 1.3)
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 0.7,))


def _closures(model: Any) -> None:
    layer, mlp = model.model.layers[1], model.model.layers[2].mlp
    layer.mlp.register_forward_hook(lambda module, args, out: out + 0.1 * layer.input_layernorm.weight)
    forward = mlp.forward
    mlp.forward = lambda x: 1.7 * forward(x)


def _parameter_hooks(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: 0 * gradient)
    model.model.embed_tokens.weight.register_hook(lambda gradient: 2 * gradient)


def _attributes(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 0.3
    model.model.layers[2].self_attn.scaling = 0.9
    model.config.rms_norm_eps = 0.5  # read by nothing any more


def _subclass(model: Any) -> None:
    model.__class__ = Scaled
    model.factor = 2.0


def _bare_parameters(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.__class__ = Tempered
        layer.mlp.temperature = nn.Parameter(1.0 + 0.1 * torch.randn(96, dtype=model.dtype))


def _weight_norm(model: Any) -> None:
    for layer in model.model.layers:
        nn.utils.parametrizations.weight_norm(layer.mlp.up_proj)


def _adapters(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)


def _frozen_base(model: Any) -> None:
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name)))
    model.lm_head = LowRank(model.lm_head)


def _keywords(model: Any) -> None:
    """What a layer and its attention are handed by name."""

    def tilt(module: Any, args: Any, kwargs: Any) -> Any:
        cosines, sines = kwargs["position_embeddings"]
        return args, {**kwargs, "position_embeddings": (0.9 * cosines, sines)}

    model.model.layers[2].register_forward_pre_hook(tilt, with_kwargs=True)
    model.model.layers[0].self_attn.register_forward_pre_hook(tilt, with_kwargs=True)


def _no_final_norm(model: Any) -> None:
    model.model.norm = nn.Identity()


def _shared_layers(model: Any) -> None:
    model.model.layers[2].mlp = model.model.layers[0].mlp


def _parts_of_one_memory(model: Any) -> None:
    """Weights of a layer one after the other, and of two others column beside column: they do not meet."""
    layer, (one, other) = model.model.layers[0], (model.model.layers[at].mlp.up_proj for at in (1, 2))
    weights = [linear.weight for linear in layer.modules() if isinstance(linear, nn.Linear)]
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
        weight.data = part.view(weight.shape)
    both = torch.stack((one.weight.detach(), other.weight.detach()), dim=-1)
    one.weight, other.weight = nn.Parameter(both[..., 0]), nn.Parameter(both[..., 1])


def _mixing(*kinds: Any) -> Change:
    """Modules in which tokens meet beside the attention, one kind in each layer."""

    def change(model: Any) -> None:
        torch.manual_seed(1)
        for layer, kind in zip(model.model.layers, kinds, strict=False):
            layer.mlp = kind(layer.mlp, model.config.hidden_size, model.dtype)

    return change


MIXING = "convolutions, a GRU and attention in layers"


# Name -> what is done to a Llama. Tensor parallel ranks take those of the first table, not those of the second.
def _noisy(model: Any) -> None:
    """As Trainer's neftune_noise_alpha has it."""
    activate_neftune(model, 4.0)


NOISY = "noise of embeddings"
CHANGED: Mapping[str, Change] = {
    NOISY: _noisy,
    "replaced activations": _activation,
    "hooks of modules": _hooks,
    "hooks that hold other modules": _closures,
    "hooks of keywords": _keywords,
    "hooks of parameters": _parameter_hooks,
    "changed attributes": _attributes,
    "a subclass with its own forward": _subclass,
    "parameters beside linear layers": _bare_parameters,
    "no final norm": _no_final_norm,
    "layers that share weights": _shared_layers,
    "weights that are parts of one memory": _parts_of_one_memory,
}
CHANGED_LINEARS: Mapping[str, Change] = {
    MIXING: _mixing(Convolved, Recurrent, Attending, Convolved),
    "weight norm": _weight_norm,
    "adapters": _adapters,
    "frozen base with adapters": _frozen_base,
}
