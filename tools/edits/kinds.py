"""Edits of what is trained, of how modules compute, and of how tokens meet."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.llama import modeling_llama

from tools.edits.job import Job
from tools.edits.kind import before_mlps, kind, layers_of

TEMPERATURE = 1.0  # read by code below while it runs


# ---- what is trained ----


@kind()
def freeze_one_weight(job: Job) -> None:
    layers_of(job)[1].mlp.up_proj.weight.requires_grad_(False)


@kind()
def freeze_the_embedding(job: Job) -> None:
    job.model.get_input_embeddings().requires_grad_(False)


@kind()
def freeze_all_norms(job: Job) -> None:
    for name, parameter in job.model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_(False)


@kind("before")
def freeze_and_thaw_midway(job: Job) -> None:
    weight = layers_of(job)[2].self_attn.q_proj.weight
    weight.requires_grad_(False)

    def thaw(step: int) -> None:
        weight.requires_grad_(step > 0)

    job.each_step.append(thaw)


@kind("before")
def a_number_of_each_layer_that_learns(job: Job) -> None:
    for layer in layers_of(job):
        layer.strength = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        layer.register_forward_hook(lambda one, given, out: out * torch.sigmoid(one.strength) * 2.0)


@kind()
def clamp_a_weight(job: Job) -> None:
    with torch.no_grad():
        job.model.lm_head.weight.clamp_(-0.05, 0.05)


@kind()
def load_other_values(job: Job) -> None:
    job.model.load_state_dict({name: 0.9 * value for name, value in job.model.state_dict().items()})


@kind()
def scale_frequencies(job: Job) -> None:
    with torch.no_grad():
        job.model.model.rotary_emb.inv_freq.mul_(0.5)


@kind()
def put_another_parameter(job: Job) -> None:
    mlp = layers_of(job)[0].mlp
    mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight.detach() * 0.8)


@kind()
def gradient_hook(job: Job) -> None:
    layers_of(job)[1].mlp.up_proj.weight.register_hook(lambda gradient: 0.25 * gradient)


@kind()
def hook_after_accumulation(job: Job) -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.0)

    layers_of(job)[1].mlp.up_proj.weight.register_post_accumulate_grad_hook(halve)


# ---- how a module computes ----


@kind()
def change_the_scaling(job: Job) -> None:
    layers_of(job)[2].self_attn.scaling = 0.2


@kind()
def change_an_epsilon(job: Job) -> None:
    layers_of(job)[1].input_layernorm.variance_epsilon = 0.7


@kind()
def forward_hook(job: Job) -> None:
    layers_of(job)[1].mlp.register_forward_hook(lambda module, args, out: 1.7 * out)


@kind()
def forward_pre_hook(job: Job) -> None:
    layers_of(job)[0].register_forward_pre_hook(lambda module, args: (1.2 * args[0], *args[1:]))


@kind()
def backward_hook(job: Job) -> None:
    job.model.model.norm.register_full_backward_hook(lambda module, into, out: tuple(0.5 * one for one in into))


@kind()
def another_activation(job: Job) -> None:
    for layer in layers_of(job):
        layer.mlp.act_fn = nn.Tanh()


@kind()
def another_module(job: Job) -> None:
    layers_of(job)[1].mlp = nn.Sequential(nn.Linear(48, 16).double(), nn.GELU(), nn.Linear(16, 48).double())
    torch.manual_seed(3)
    for parameter in layers_of(job)[1].mlp.parameters():
        nn.init.normal_(parameter, std=0.1)


@kind()
def wrapped_forward(job: Job) -> None:
    mlp = layers_of(job)[2].mlp
    plain = mlp.forward
    mlp.forward = lambda x: 1.4 * plain(x)


@kind()
def class_forward(job: Job) -> None:
    plain = modeling_llama.LlamaMLP.forward
    modeling_llama.LlamaMLP.forward = lambda self, x: plain(self, x) + 0.3 * x  # type: ignore[method-assign]


@kind()
def norm_by_length(job: Job) -> None:
    class Shrinking(modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            out = super().forward(hidden_states)
            return out * 0.6 if hidden_states.shape[-2] > 60 else out

    layers_of(job)[1].post_attention_layernorm.__class__ = Shrinking


@kind()
def rotary_by_length(job: Job) -> None:
    plain = modeling_llama.apply_rotary_pos_emb

    def stretched(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        length = q.shape[-2]
        return plain(q * (math.log(length) / math.log(64) if length > 64 else 1.0), k, cos, sin, unsqueeze_dim)

    modeling_llama.apply_rotary_pos_emb = stretched


@kind()
def global_that_moves(job: Job) -> None:
    class Warm(modeling_llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * TEMPERATURE

    layers_of(job)[1].mlp.__class__ = Warm

    def raise_it(step: int) -> None:
        sys.modules[__name__].TEMPERATURE = 1.0 + step  # type: ignore[attr-defined]

    job.each_step.append(raise_it)


@kind()
def code_that_asks_for_its_rank(job: Job) -> None:
    class Ranked(modeling_llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2.0 + dist.get_rank())

    layers_of(job)[1].mlp.__class__ = Ranked


@kind("before")
def a_part_without_a_gradient(job: Job) -> None:
    class Still(modeling_llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    layers_of(job)[2].mlp.__class__ = Still


@kind("before")
def hidden_states_that_are_detached(job: Job) -> None:
    class Apart(modeling_llama.LlamaDecoderLayer):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(hidden_states.detach(), *args, **kwargs)

    layers_of(job)[1].__class__ = Apart


@kind()
def functions_in_a_list(job: Job) -> None:
    class Followed(modeling_llama.LlamaMLP):
        after: list[Callable[[Tensor], Tensor]]

        def forward(self, x: Tensor) -> Tensor:
            return functools.reduce(lambda out, one: one(out), self.after, super().forward(x))

    norm, mlp = job.model.model.norm, layers_of(job)[1].mlp
    mlp.__class__ = Followed
    mlp.after = [lambda out: out + 0.5 * norm.weight]


@kind()
def settings_of_a_dataclass(job: Job) -> None:
    @dataclass
    class Settings:
        gain: float = 1.0

    class Set(modeling_llama.LlamaMLP):
        settings: Settings

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.settings.gain

    layers_of(job)[3].mlp.__class__ = Set
    layers_of(job)[3].mlp.settings = Settings(gain=1.6)


@kind()
def change_the_head_dimension_scale_in_place(job: Job) -> None:
    for layer in layers_of(job):
        layer.self_attn.scaling *= 0.5


# ---- tokens that meet ----


@kind()
def look_back_50_tokens(job: Job) -> None:
    before_mlps(job, lambda x: x + 0.5 * F.pad(x, (0, 0, 50, 0))[..., : x.shape[-2], :])


@kind()
def look_back_2_tokens(job: Job) -> None:
    before_mlps(job, lambda x: x + 0.5 * F.pad(x, (0, 0, 2, 0))[..., : x.shape[-2], :])


@kind()
def mean_of_64_tokens(job: Job) -> None:
    def mean(x: Tensor) -> Tensor:
        if x.shape[-2] < 64:
            return x
        return torch.cat((x[..., :64, :].mean(dim=-2, keepdim=True) + x[..., :1, :], x[..., 1:, :]), dim=-2)

    before_mlps(job, mean)


@kind()
def convolution_in_latelayers_of(job: Job) -> None:
    for number, layer in enumerate(layers_of(job)):
        layer.mlp.scale = 0.97**number
    before_mlps(job, lambda x: x + sum(0.2 * F.pad(x, (0, 0, n, 0))[..., : x.shape[-2], :] for n in (1, 2, 3)), (3,))


@kind()
def a_convolution_of_another_model(job: Job) -> None:
    config = Lfm2Config(hidden_size=48, num_attention_heads=6, conv_L_cache=3)
    layers_of(job)[2].mlp = nn.Sequential(nn.Linear(48, 48).double(), Lfm2ShortConv(config, 2).double())
    torch.manual_seed(3)
    for parameter in layers_of(job)[2].mlp.parameters():
        nn.init.normal_(parameter, std=0.2)


def _counting(job: Job, token: int) -> None:
    class Counting(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * (1 + (input == token).cumsum(-1)[..., None])

    job.model.model.embed_tokens.__class__ = Counting


@kind()
def count_token_3(job: Job) -> None:
    _counting(job, 3)


@kind()
def count_the_last_token_of_the_vocabulary(job: Job) -> None:
    _counting(job, 96)


@kind()
def restart_at_end_of_text(job: Job) -> None:
    _counting(job, job.model.config.eos_token_id)
