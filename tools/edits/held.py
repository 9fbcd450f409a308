"""Edits of what modules, hooks and functions hold, some of which a script changes before each step."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from tools.edits.job import Job
from tools.edits.kind import kind, layers_of


class Gain:
    """A hook, a method and an object that scripts hang on modules."""

    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * self.gain

    def after(self, out: Tensor) -> Tensor:
        return out * self.gain


class Followed(modeling_llama.LlamaMLP):
    """Hands on what its `after` makes of it."""

    after: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.after(super().forward(x))


def _follow(job: Job, after: Callable[[Tensor], Tensor]) -> None:
    layers_of(job)[1].mlp.__class__ = Followed
    layers_of(job)[1].mlp.after = after


def _moving(job: Job, change: Callable[[float], None]) -> None:
    """Let the script change something before each step."""
    job.each_step.append(lambda step: change(1.0 + 0.5 * step))


@kind()
def object_as_a_hook_that_moves(job: Job) -> None:
    hook = Gain()
    layers_of(job)[1].mlp.register_forward_hook(hook)
    _moving(job, lambda gain: setattr(hook, "gain", gain))


@kind("before")
def method_of_an_object_that_moves(job: Job) -> None:
    held = Gain()
    _follow(job, held.after)
    _moving(job, lambda gain: setattr(held, "gain", gain))


@kind("before")
def settings_of_a_partial_that_move(job: Job) -> None:
    settings = {"gain": 1.0}
    _follow(job, functools.partial(lambda held, out: out * held["gain"], settings))
    _moving(job, lambda gain: settings.update(gain=gain))


@kind("before")
def array_that_moves(job: Job) -> None:
    class Weighed(modeling_llama.LlamaMLP):
        array: Any

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(self.array[0])

    layers_of(job)[1].mlp.__class__ = Weighed
    layers_of(job)[1].mlp.array = array = np.ones(2)
    _moving(job, array.fill)


@kind("before")
def closure_that_moves(job: Job) -> None:
    gains = [1.0]
    _follow(job, lambda out: out * gains[0])
    _moving(job, lambda gain: gains.__setitem__(0, gain))


@kind()
def another_module_by_a_reference(job: Job) -> None:
    class Looking(modeling_llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.5 * norm().weight

    norm: Any = weakref.ref(job.model.model.norm)
    layers_of(job)[1].mlp.__class__ = Looking


@kind()
def hook_from_the_tenth_call_on(job: Job) -> None:
    calls = [0]

    def later(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        calls[0] += 1
        return out * (1.5 if calls[0] > 10 else 1.0)

    layers_of(job)[1].mlp.register_forward_hook(later)


@kind()
def hook_of_all_modules(job: Job) -> None:
    nn.modules.module.register_module_forward_hook(
        lambda module, args, out: 1.1 * out if type(module) is nn.Linear else None
    )


@kind()
def weight_by_a_parametrization(job: Job) -> None:
    class Rolled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight + 0.1 * weight.roll(1, 0)

    nn.utils.parametrize.register_parametrization(layers_of(job)[1].mlp.gate_proj, "weight", Rolled())


@kind()
def tied_afterwards(job: Job) -> None:
    job.model.lm_head.weight = job.model.model.embed_tokens.weight


@kind("after")
def row_of_a_weight(job: Job) -> None:
    with torch.no_grad():
        job.model.model.embed_tokens.weight[5].zero_()


@kind("after")
def all_weights_at_once(job: Job) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(job.model.parameters()), 0.9)


@kind("after")
def frequencies_by_their_data(job: Job) -> None:
    job.model.model.rotary_emb.inv_freq.data.mul_(0.5)


@kind("before", family="gpt2")
def dropout_in_evaluation(job: Job) -> None:
    for layer in job.model.transformer.h:
        layer.mlp.dropout = nn.Dropout(0.3).eval()
    job.model.transformer.h[1].mlp.dropout = nn.Tanh()
