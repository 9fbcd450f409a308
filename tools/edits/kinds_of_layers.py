"""Edits of experts, of recurrent layers and of sinks; of windows; and of what only a backward does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.edits.job import Job
from tools.edits.kind import before_mlps, kind, layers_of

# ---- what routers and experts do ----


@kind(family="qwen3_moe")
def freeze_a_router(job: Job) -> None:
    layers_of(job)[1].mlp.gate.requires_grad_(False)


@kind(family="qwen3_moe")
def one_expert_for_each_token(job: Job) -> None:
    layers_of(job)[1].mlp.gate.top_k = 1


@kind(family="qwen3_moe")
def router_that_sees_the_mean_of_all_tokens(job: Job) -> None:
    def centred(module: Any, given: tuple[Tensor]) -> tuple[Tensor]:
        return (given[0] - given[0].flatten(0, -2).mean(0),)

    layers_of(job)[1].mlp.gate.register_forward_pre_hook(centred)


@kind(family="qwen3_moe")
def hook_of_experts(job: Job) -> None:
    layers_of(job)[1].mlp.experts.register_forward_hook(lambda module, given, out: 1.2 * out)


@kind(family="gpt_oss")
def limit_of_experts(job: Job) -> None:
    layers_of(job)[1].mlp.experts.limit = 0.05


# ---- sinks and windows ----


@kind(family="gpt_oss")
def freeze_sinks(job: Job) -> None:
    layers_of(job)[1].self_attn.sinks.requires_grad_(False)


@kind("before", family="gemma3_text")
def softcap_of_the_logits(job: Job) -> None:
    job.model.config.final_logit_softcapping = 0.5


@kind("before", family="gemma3_text")
def windows_in_other_layers(job: Job) -> None:
    job.model.config.sliding_window = 5


# ---- recurrent layers and convolutions ----


@kind(family="qwen3_next")
def freeze_the_decay(job: Job) -> None:
    layers_of(job)[0].linear_attn.A_log.requires_grad_(False)


@kind(family="qwen3_next")
def tokens_meet_before_a_delta_rule(job: Job) -> None:
    def shifted(module: Any, given: Any, out: Tensor) -> Tensor:
        return out + 0.3 * F.pad(out, (0, 0, 1, 0))[..., :-1, :]

    layers_of(job)[0].linear_attn.in_proj_qkvz.register_forward_hook(shifted)


@kind(family="qwen3_next")
def mean_behind_a_delta_rule(job: Job) -> None:
    def centred(module: Any, given: Any, out: Tensor) -> Tensor:
        return out - 0.5 * out.mean(dim=-2, keepdim=True)

    layers_of(job)[2].linear_attn.register_forward_hook(centred)


@kind(family="granitemoehybrid")
def limits_of_time_steps(job: Job) -> None:
    layers_of(job)[0].mamba.time_step_limit = (0.0, 0.02)


@kind(family="lfm2")
def bounded_before_a_convolution(job: Job) -> None:
    layers_of(job)[2].conv.in_proj.register_forward_pre_hook(lambda module, given: (given[0].tanh(),))


# ---- what only a backward does, or the values of all tokens decide ----


def _own_backward(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return change(gradient)

    return Own.apply  # type: ignore[no-any-return]


@kind("before")
def gradient_reversal(job: Job) -> None:
    before_mlps(job, _own_backward(lambda gradient: -0.5 * gradient))


@kind("before")
def gradient_over_its_largest_entry(job: Job) -> None:
    before_mlps(job, _own_backward(lambda gradient: 1e-3 * gradient / (gradient.abs().max() + 1e-9)))


@kind("before")
def gradients_of_tokens_that_meet(job: Job) -> None:
    before_mlps(job, _own_backward(lambda gradient: gradient + 0.5 * F.pad(gradient, (0, 0, 0, 1))[..., 1:, :]))


def _rounded(x: Tensor, largest: Tensor) -> Tensor:
    """In steps of a seventh of `largest`, with the gradient of x."""
    step = largest / 7
    return x + (torch.round(x / step) * step - x).detach()


@kind("before")
def rounded_by_the_largest_of_each_token(job: Job) -> None:
    before_mlps(job, lambda x: _rounded(x, x.detach().abs().amax(-1, keepdim=True)))


@kind("before")
def rounded_by_the_largest_of_all_tokens(job: Job) -> None:
    before_mlps(job, lambda x: _rounded(x, x.detach().abs().max()))


@kind("before")
def batch_norm(job: Job) -> None:
    norm = nn.BatchNorm1d(48).double()
    layers_of(job)[1].mlp.register_module("act", norm)
    before_mlps(job, lambda x: norm(x.flatten(0, -2)).view(x.shape))


@kind("before")
def embedding_of_two_tokens(job: Job) -> None:
    class Pairs(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 0.5 * super().forward((31 * input + F.pad(input, (1, 0))[..., :-1]) % 97)

    job.model.model.embed_tokens.__class__ = Pairs


@kind("before")
def layers_in_another_order(job: Job) -> None:
    job.model.model.layers = nn.ModuleList([layers_of(job)[number] for number in (2, 0, 3, 1)])
