"""What scripts do to their model, data and loss: a table by name, with when it can be done and to which model."""

from __future__ import annotations

import functools
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.llama import modeling_llama

from tests.support.edits.job import IGNORED, Edit, Item, Job

TEMPERATURE = 1.0  # read by code below while it runs


class Kind(NamedTuple):
    """An edit; `when` it is made: before `initialize`, after it, or either; and of which model."""

    edit: Edit
    when: tuple[str, ...] = ("before", "after")
    family: str = "llama"


# ---- parts of a model, and ways to change them ----


def layer(job: Job, number: int) -> Any:
    return job.model.model.layers[number]


def mlp(job: Job, number: int = 1) -> Any:
    return layer(job, number).mlp


def freeze(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(False)


def subclass(module: Any, forward: Callable[..., Any], **attributes: Any) -> None:
    """Give a module a class of the script's own: `forward` gets the module, its class's own forward and the input."""
    kind = type(module)

    def forward_of_class(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, functools.partial(kind.forward, self), *args, **kwargs)

    module.__class__ = type("Changed", (kind,), {"forward": forward_of_class})
    for name, value in attributes.items():
        setattr(module, name, value)


def before_mlp(change: Callable[[Tensor], Tensor], number: int = 1) -> Edit:
    """Let an MLP see what `change` makes of its input."""
    return lambda job: subclass(mlp(job, number), lambda self, plain, x: plain(change(x)))


def before_each_step(job: Job, change: Callable[[float], Any]) -> None:
    """Let the script change something before each step, by 1.0, 1.5, 2.0."""
    job.each_step.append(lambda step: change(1.0 + 0.5 * step))


def behind_mlp(job: Job, after: Callable[[Tensor], Tensor]) -> None:
    """Let an MLP hand on what `after`, which it holds, makes of its output."""
    subclass(mlp(job), lambda self, plain, x: self.after(plain(x)), after=after)


def hooked(module: Any, hook: Callable[[Tensor], Tensor]) -> None:
    """A forward hook of the output alone."""
    module.register_forward_hook(lambda module, args, out: hook(out))


def back(x: Tensor, tokens: int) -> Tensor:
    """Each token's row, so many tokens later."""
    return F.pad(x, (0, 0, tokens, 0))[..., : x.shape[-2], :]


def randomly(parameters: Iterable[Tensor], std: float) -> None:
    torch.manual_seed(3)
    for parameter in parameters:
        nn.init.normal_(parameter, std=std)


# ---- what is trained ----


def freeze_and_thaw(job: Job) -> None:
    weight = layer(job, 2).self_attn.q_proj.weight
    weight.requires_grad_(False)
    job.each_step.append(lambda step: weight.requires_grad_(step > 0))


def strengths(job: Job) -> None:
    for one in job.model.model.layers:
        one.strength = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        one.register_forward_hook(lambda one, given, out: out * torch.sigmoid(one.strength) * 2.0)


@torch.no_grad()
def write(values: Callable[..., Any], *arguments: Any) -> None:
    """Write to values past torch's gradients."""
    values(*arguments)


def another_parameter(job: Job) -> None:
    mlp(job, 0).down_proj.weight = nn.Parameter(mlp(job, 0).down_proj.weight.detach() * 0.8)


def drop_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.0)


def roll_weight(job: Job) -> None:
    class Rolled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight + 0.1 * weight.roll(1, 0)

    nn.utils.parametrize.register_parametrization(mlp(job).gate_proj, "weight", Rolled())


TRAINED: dict[str, Kind] = {
    "freeze one weight": Kind(lambda job: freeze([mlp(job).up_proj.weight])),
    "freeze the embedding": Kind(lambda job: freeze(job.model.get_input_embeddings().parameters())),
    "freeze all norms": Kind(lambda job: freeze(p for name, p in job.model.named_parameters() if "norm" in name)),
    "freeze and thaw midway": Kind(freeze_and_thaw, ("before",)),
    "a number of each layer that learns": Kind(strengths, ("before",)),
    "clamp a weight": Kind(lambda job: write(job.model.lm_head.weight.clamp_, -0.05, 0.05)),
    "load other values": Kind(
        lambda job: job.model.load_state_dict({name: 0.9 * value for name, value in job.model.state_dict().items()})
    ),
    "scale frequencies": Kind(lambda job: write(job.model.model.rotary_emb.inv_freq.mul_, 0.5)),
    "frequencies by their data": Kind(lambda job: job.model.model.rotary_emb.inv_freq.data.mul_(0.5), ("after",)),
    "row of a weight": Kind(lambda job: write(job.model.model.embed_tokens.weight[5].zero_), ("after",)),
    "all weights at once": Kind(lambda job: write(torch._foreach_mul_, list(job.model.parameters()), 0.9), ("after",)),
    "put another parameter": Kind(another_parameter),
    "tied afterwards": Kind(lambda job: setattr(job.model.lm_head, "weight", job.model.model.embed_tokens.weight)),
    "weight by a parametrization": Kind(roll_weight),
    "gradient hook": Kind(lambda job: mlp(job).up_proj.weight.register_hook(lambda gradient: 0.25 * gradient)),
    "hook after accumulation": Kind(
        lambda job: mlp(job).up_proj.weight.register_post_accumulate_grad_hook(drop_gradient)
    ),
}


# ---- how a module computes ----


def another_module(job: Job) -> None:
    layer(job, 1).mlp = nn.Sequential(nn.Linear(48, 16).double(), nn.GELU(), nn.Linear(16, 48).double())
    randomly(mlp(job).parameters(), 0.1)


def wrapped_forward(job: Job) -> None:
    plain = mlp(job, 2).forward
    mlp(job, 2).forward = lambda x: 1.4 * plain(x)


def class_forward(job: Job) -> None:
    plain = modeling_llama.LlamaMLP.forward
    modeling_llama.LlamaMLP.forward = lambda self, x: plain(self, x) + 0.3 * x  # type: ignore[method-assign]


def each_layer(job: Job, change: Callable[[Any], None]) -> None:
    for one in job.model.model.layers:
        change(one)


def norm_by_length(job: Job) -> None:
    def shrink(self: Any, plain: Any, x: Tensor) -> Tensor:
        return plain(x) * 0.6 if x.shape[-2] > 60 else plain(x)

    subclass(layer(job, 1).post_attention_layernorm, shrink)


def rotary_by_length(job: Job) -> None:
    plain = modeling_llama.apply_rotary_pos_emb

    def stretched(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        length = q.shape[-2]
        return plain(q * (math.log(length) / math.log(64) if length > 64 else 1.0), k, cos, sin, unsqueeze_dim)

    modeling_llama.apply_rotary_pos_emb = stretched


def global_that_moves(job: Job) -> None:
    class Warm(modeling_llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * TEMPERATURE

    mlp(job).__class__ = Warm
    job.each_step.append(lambda step: setattr(sys.modules[__name__], "TEMPERATURE", 1.0 + step))


def without_gradient(self: Any, plain: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return plain(x)  # type: ignore[no-any-return]


def functions_in_a_list(job: Job) -> None:
    norm = job.model.model.norm
    after = [lambda out: out + 0.5 * norm.weight]
    subclass(
        mlp(job), lambda self, plain, x: functools.reduce(lambda out, one: one(out), self.after, plain(x)), after=after
    )


@dataclass
class Settings:
    gain: float = 1.0


COMPUTED: dict[str, Kind] = {
    "change the scaling": Kind(lambda job: setattr(layer(job, 2).self_attn, "scaling", 0.2)),
    "change the head dimension scale in place": Kind(
        lambda job: each_layer(job, lambda one: setattr(one.self_attn, "scaling", one.self_attn.scaling * 0.5))
    ),
    "change an epsilon": Kind(lambda job: setattr(layer(job, 1).input_layernorm, "variance_epsilon", 0.7)),
    "forward hook": Kind(lambda job: hooked(mlp(job), lambda out: 1.7 * out)),
    "forward pre hook": Kind(
        lambda job: layer(job, 0).register_forward_pre_hook(lambda module, args: (1.2 * args[0], *args[1:]))
    ),
    "backward hook": Kind(
        lambda job: job.model.model.norm.register_full_backward_hook(
            lambda module, into, out: tuple(0.5 * one for one in into)
        )
    ),
    "another activation": Kind(lambda job: each_layer(job, lambda one: setattr(one.mlp, "act_fn", nn.Tanh()))),
    "another module": Kind(another_module),
    "wrapped forward": Kind(wrapped_forward),
    "class forward": Kind(class_forward),
    "norm by length": Kind(norm_by_length),
    "rotary by length": Kind(rotary_by_length),
    "global that moves": Kind(global_that_moves),
    "code that asks for its rank": Kind(
        lambda job: subclass(mlp(job), lambda self, plain, x: plain(x) * (2.0 + dist.get_rank()))
    ),
    "a part without a gradient": Kind(lambda job: subclass(mlp(job, 2), without_gradient), ("before",)),
    "hidden states that are detached": Kind(
        lambda job: subclass(layer(job, 1), lambda self, plain, x, *args, **more: plain(x.detach(), *args, **more)),
        ("before",),
    ),
    "functions in a list": Kind(functions_in_a_list),
    "settings of a dataclass": Kind(
        lambda job: subclass(
            mlp(job, 3), lambda self, plain, x: plain(x) * self.settings.gain, settings=Settings(gain=1.6)
        )
    ),
    "layers in another order": Kind(
        lambda job: setattr(job.model.model, "layers", nn.ModuleList([layer(job, n) for n in (2, 0, 3, 1)])),
        ("before",),
    ),
}


# ---- what modules, hooks and functions hold, some of which a script changes before each step ----


class Gain:
    """A hook, a method and an object that scripts hang on modules."""

    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * self.gain

    def after(self, out: Tensor) -> Tensor:
        return out * self.gain


def object_as_a_hook(job: Job) -> None:
    hook = Gain()
    mlp(job).register_forward_hook(hook)
    before_each_step(job, lambda gain: setattr(hook, "gain", gain))


def method_of_an_object(job: Job) -> None:
    held = Gain()
    behind_mlp(job, held.after)
    before_each_step(job, lambda gain: setattr(held, "gain", gain))


def settings_of_a_partial(job: Job) -> None:
    settings = {"gain": 1.0}
    behind_mlp(job, functools.partial(lambda held, out: out * held["gain"], settings))
    before_each_step(job, lambda gain: settings.update(gain=gain))


def array_that_moves(job: Job) -> None:
    subclass(mlp(job), lambda self, plain, x: plain(x) * float(self.array[0]), array=np.ones(2))
    before_each_step(job, mlp(job).array.fill)


def closure_that_moves(job: Job) -> None:
    gains = [1.0]
    behind_mlp(job, lambda out: out * gains[0])
    before_each_step(job, lambda gain: gains.__setitem__(0, gain))


def module_by_a_reference(job: Job) -> None:
    norm: Any = weakref.ref(job.model.model.norm)
    subclass(mlp(job), lambda self, plain, x: plain(x) + 0.5 * norm().weight)


def hook_from_the_tenth_call_on(job: Job) -> None:
    calls = [0]

    def later(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        calls[0] += 1
        return out * (1.5 if calls[0] > 10 else 1.0)

    mlp(job).register_forward_hook(later)


def dropout_in_evaluation(job: Job) -> None:
    for one in job.model.transformer.h:
        one.mlp.dropout = nn.Dropout(0.3).eval()
    job.model.transformer.h[1].mlp.dropout = nn.Tanh()


HELD: dict[str, Kind] = {
    "object as a hook that moves": Kind(object_as_a_hook),
    "method of an object that moves": Kind(method_of_an_object, ("before",)),
    "settings of a partial that move": Kind(settings_of_a_partial, ("before",)),
    "array that moves": Kind(array_that_moves, ("before",)),
    "closure that moves": Kind(closure_that_moves, ("before",)),
    "another module by a reference": Kind(module_by_a_reference),
    "hook from the tenth call on": Kind(hook_from_the_tenth_call_on),
    "hook of all modules": Kind(
        lambda job: nn.modules.module.register_module_forward_hook(
            lambda module, args, out: 1.1 * out if type(module) is nn.Linear else None
        )
    ),
    "dropout in evaluation": Kind(dropout_in_evaluation, ("before",), "gpt2"),
}


# ---- attention ----


def tilted(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
    tilt = torch.linspace(0.5, 1.5, query.shape[1], dtype=query.dtype)[None, :, None, None]
    return sdpa_attention_forward(module, query * tilt, key, value, mask, **more)


def attention_registered(job: Job) -> None:
    AttentionInterface.register("tilted", tilted)
    job.model.config._attn_implementation = "tilted"


def attention_patched(job: Job) -> None:
    ALL_ATTENTION_FUNCTIONS["sdpa"] = tilted
    if job.model.config._attn_implementation != "sdpa":
        job.model.config._attn_implementation = "sdpa"


def what_attention_calls_patched(job: Job) -> None:
    plain = F.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = lambda query, *args, **more: plain(1.3 * query, *args, **more)


class Late:
    """Attention with a state."""

    calls = 0

    def __call__(self, module: nn.Module, query: Tensor, *args: Any, **more: Any) -> Any:
        self.calls += 1
        return sdpa_attention_forward(module, query * (1.5 if self.calls > 30 else 1.0), *args, **more)


def eager_attention_patched(job: Job) -> None:
    plain = modeling_llama.eager_attention_forward
    job.model.config._attn_implementation = "eager"
    modeling_llama.eager_attention_forward = lambda module, query, *args, **more: plain(
        module, 2 * query, *args, **more
    )


def biased(self: Any, plain: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    out, weights = plain(hidden_states, *args, **kwargs)
    return out + 0.1 * hidden_states, weights


ATTENTION: dict[str, Kind] = {
    "own attention registered": Kind(attention_registered),
    "attention patched": Kind(attention_patched),
    "what attention calls patched": Kind(what_attention_calls_patched),
    "attention that is an object": Kind(lambda job: ALL_ATTENTION_FUNCTIONS.__setitem__("sdpa", Late())),
    "eager attention patched": Kind(eager_attention_patched),
    "attention subclass": Kind(lambda job: subclass(layer(job, 2).self_attn, biased)),
}


# ---- tokens that meet, or that the values of all tokens decide on ----


def mean_of_64_tokens(x: Tensor) -> Tensor:
    if x.shape[-2] < 64:
        return x
    return torch.cat((x[..., :64, :].mean(dim=-2, keepdim=True) + x[..., :1, :], x[..., 1:, :]), dim=-2)


def convolution_in_late_layers(job: Job) -> None:
    for number, one in enumerate(job.model.model.layers):
        one.mlp.scale = 0.97**number
    before_mlp(lambda x: x + sum(0.2 * back(x, n) for n in (1, 2, 3)), 3)(job)


def convolution_of_another_model(job: Job) -> None:
    config = Lfm2Config(hidden_size=48, num_attention_heads=6, conv_L_cache=3)
    layer(job, 2).mlp = nn.Sequential(nn.Linear(48, 48).double(), Lfm2ShortConv(config, 2).double())
    randomly(mlp(job, 2).parameters(), 0.2)


def embedding(job: Job, forward: Callable[..., Tensor]) -> None:
    """Another forward of the embedding, which gets its own and the ids."""
    subclass(job.model.model.embed_tokens, lambda self, plain, ids: forward(plain, ids))


def counting(job: Job, token: int) -> None:
    embedding(job, lambda plain, ids: plain(ids) * (1 + (ids == token).cumsum(-1)[..., None]))


def pairs(plain: Any, ids: Tensor) -> Tensor:
    found: Tensor = plain(ids) + 0.5 * plain((31 * ids + F.pad(ids, (1, 0))[..., :-1]) % 97)
    return found


def rounded(x: Tensor, largest: Tensor) -> Tensor:
    """In steps of a seventh of `largest`, with the gradient of x."""
    step = largest / 7
    return x + (torch.round(x / step) * step - x).detach()


def own_backward(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return change(gradient)

    return Own.apply  # type: ignore[no-any-return]


def batch_norm(job: Job) -> None:
    norm = nn.BatchNorm1d(48).double()
    mlp(job).register_module("act", norm)
    before_mlp(lambda x: norm(x.flatten(0, -2)).view(x.shape))(job)


MEETING: dict[str, Kind] = {
    "look back 50 tokens": Kind(before_mlp(lambda x: x + 0.5 * back(x, 50))),
    "look back 2 tokens": Kind(before_mlp(lambda x: x + 0.5 * back(x, 2))),
    "mean of 64 tokens": Kind(before_mlp(mean_of_64_tokens)),
    "convolution in late layers": Kind(convolution_in_late_layers),
    "a convolution of another model": Kind(convolution_of_another_model),
    "count token 3": Kind(lambda job: counting(job, 3)),
    "count the last token of the vocabulary": Kind(lambda job: counting(job, 96)),
    "restart at end of text": Kind(lambda job: counting(job, job.model.config.eos_token_id)),
    "embedding of two tokens": Kind(lambda job: embedding(job, pairs), ("before",)),
    "gradient reversal": Kind(before_mlp(own_backward(lambda gradient: -0.5 * gradient)), ("before",)),
    "gradient over its largest entry": Kind(
        before_mlp(own_backward(lambda gradient: 1e-3 * gradient / (gradient.abs().max() + 1e-9))), ("before",)
    ),
    "gradients of tokens that meet": Kind(
        before_mlp(own_backward(lambda gradient: gradient + 0.5 * F.pad(gradient, (0, 0, 0, 1))[..., 1:, :])),
        ("before",),
    ),
    "rounded by the largest of each token": Kind(
        before_mlp(lambda x: rounded(x, x.detach().abs().amax(-1, keepdim=True))), ("before",)
    ),
    "rounded by the largest of all tokens": Kind(before_mlp(lambda x: rounded(x, x.detach().abs().max())), ("before",)),
    "batch norm": Kind(batch_norm, ("before",)),
}


# ---- experts, sinks, windows, recurrent layers and convolutions ----

OTHER_LAYERS: dict[str, Kind] = {
    "freeze a router": Kind(lambda job: freeze(mlp(job).gate.parameters()), family="qwen3_moe"),
    "one expert for each token": Kind(lambda job: setattr(mlp(job).gate, "top_k", 1), family="qwen3_moe"),
    "router that sees the mean of all tokens": Kind(
        lambda job: mlp(job).gate.register_forward_pre_hook(
            lambda module, given: (given[0] - given[0].flatten(0, -2).mean(0),)
        ),
        family="qwen3_moe",
    ),
    "hook of experts": Kind(lambda job: hooked(mlp(job).experts, lambda out: 1.2 * out), family="qwen3_moe"),
    "limit of experts": Kind(lambda job: setattr(mlp(job).experts, "limit", 0.05), family="gpt_oss"),
    "freeze sinks": Kind(lambda job: freeze([layer(job, 1).self_attn.sinks]), family="gpt_oss"),
    "softcap of the logits": Kind(
        lambda job: setattr(job.model.config, "final_logit_softcapping", 0.5), ("before",), "gemma3_text"
    ),
    "windows in other layers": Kind(
        lambda job: setattr(job.model.config, "sliding_window", 5), ("before",), "gemma3_text"
    ),
    "freeze the decay": Kind(lambda job: freeze([layer(job, 0).linear_attn.A_log]), family="qwen3_next"),
    "tokens meet before a delta rule": Kind(
        lambda job: hooked(layer(job, 0).linear_attn.in_proj_qkvz, lambda out: out + 0.3 * back(out, 1)),
        family="qwen3_next",
    ),
    "mean behind a delta rule": Kind(
        lambda job: hooked(layer(job, 2).linear_attn, lambda out: out - 0.5 * out.mean(dim=-2, keepdim=True)),
        family="qwen3_next",
    ),
    "limits of time steps": Kind(
        lambda job: setattr(layer(job, 0).mamba, "time_step_limit", (0.0, 0.02)), family="granitemoehybrid"
    ),
    "bounded before a convolution": Kind(
        lambda job: layer(job, 2).conv.in_proj.register_forward_pre_hook(lambda module, given: (given[0].tanh(),)),
        family="lfm2",
    ),
}


# ---- losses ----


def each(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)


def trained_on(loss: Callable[[Tensor, Tensor], Tensor]) -> Kind:
    return Kind(lambda job: setattr(job, "loss_fn", loss), ("before",))


def by_label_counts(logits: Tensor, labels: Tensor) -> Tensor:
    counts = torch.bincount(labels.flatten().clamp(min=0), minlength=logits.shape[-1])
    return each(logits, labels) / counts[labels.clamp(min=0)].clamp(min=1)


def reading_a_weight(job: Job) -> None:
    weight = job.model.get_input_embeddings().weight
    job.loss_fn = lambda logits, labels: each(logits, labels) + 0.1 * weight[labels.clamp(min=0)].square().sum(-1)


def with_a_temperature(job: Job) -> None:
    temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    job.loss_fn = lambda logits, labels: each(logits * temperature, labels)


def of_the_hardest(logits: Tensor, labels: Tensor) -> Tensor:
    losses = each(logits, labels)
    return losses if len(losses) <= 70 else losses * (losses >= losses.topk(70).values[-1])


def with_a_state(job: Job) -> None:
    calls: list[int] = []

    def warming(logits: Tensor, labels: Tensor) -> Tensor:
        calls.append(1)
        return each(logits, labels) * (1 + 0.1 * len(calls))

    job.loss_fn = warming


def from_an_iterator(job: Job) -> None:
    weights = itertools.chain(itertools.repeat(1.0, 20), itertools.repeat(3.0))
    job.loss_fn = lambda logits, labels: each(logits, labels) * next(weights)


LOSSES: dict[str, Kind] = {
    "loss by label counts": trained_on(by_label_counts),
    "loss that reads a weight": Kind(reading_a_weight, ("before",)),
    "loss with a temperature that learns": Kind(with_a_temperature, ("before",)),
    "loss of neighbours": trained_on(lambda x, y: each(x, y) + 0.3 * F.pad(each(x, y), (1, 0))[..., :-1]),
    "loss with z term": trained_on(lambda x, y: each(x, y) + 1e-2 * x.logsumexp(-1).square()),
    "focal loss": trained_on(lambda x, y: each(x, y) * (1 - (-each(x, y)).exp()) ** 2),
    "loss with a state": Kind(with_a_state, ("before",)),
    "loss that draws from an iterator": Kind(from_an_iterator, ("before",)),
    "loss of the hardest of many": trained_on(of_the_hardest),
}


# ---- data ----


class Changing(list[Item]):
    """Items whose tokens are others with each `shift`."""

    shift = 0

    def __getitem__(self, index: Any) -> Any:
        item = super().__getitem__(index)
        return item | {"input_ids": (item["input_ids"] + self.shift) % 97}


class Drawn(Changing):
    """Each read is another one."""

    def __getitem__(self, index: Any) -> Any:
        self.shift += 1
        return super().__getitem__(index)


def items_of_a_stage(job: Job) -> None:
    job.data = staged = Changing(job.data)
    job.each_step.append(lambda step: setattr(staged, "shift", step))


def of_items(change: Callable[[Item], dict[str, Tensor]], family: str = "llama") -> Kind:
    """What `change` makes of each item is put into it."""

    def edit(job: Job) -> None:
        for item in job.data:
            item |= change(item)

    return Kind(edit, ("before",), family)


def padded(before: int, behind: int, *, left_out: int = 0) -> Callable[[Item], dict[str, Tensor]]:
    """Padding at both ends, which the mask tells; so many first labels are left out."""

    def change(item: Item) -> dict[str, Tensor]:
        length, ends = len(item["input_ids"]), (before, behind)
        mask = F.pad(torch.ones(length), ends).long()
        labels = F.pad(item["labels"], ends, value=IGNORED)
        labels[before : before + left_out] = IGNORED
        return {"attention_mask": mask, "input_ids": F.pad(item["input_ids"], ends), "labels": labels}

    return change


def mask_with_a_hole(item: Item) -> dict[str, Tensor]:
    mask = torch.ones_like(item["input_ids"])
    mask[4:6] = 0
    return {"attention_mask": mask, "labels": torch.where(mask == 1, item["labels"], IGNORED)}


def labels_of_an_answer(item: Item) -> dict[str, Tensor]:
    labels = item["labels"].clone()
    labels[: len(labels) // 3] = IGNORED
    return {"labels": labels}


def padding_token_inside(job: Job) -> None:
    for item in job.data:
        item["input_ids"][2::7] = job.model.config.pad_token_id


DATA: dict[str, Kind] = {
    "items of a stage": Kind(items_of_a_stage, ("before",)),
    "padding before a label": of_items(padded(3, 0), "gpt2"),
    "mask with a hole": of_items(mask_with_a_hole),
    "padding at the end": of_items(padded(0, 5)),
    "padding at the front": of_items(padded(4, 0, left_out=1), "gpt2"),
    "items drawn anew": Kind(lambda job: setattr(job, "data", Drawn(job.data)), ("before",)),
    "labels of an answer": of_items(labels_of_an_answer),
    "token types": of_items(
        lambda item: {"token_type_ids": (torch.arange(len(item["input_ids"])) > len(item["input_ids"]) // 2).long()},
        "gpt2",
    ),
    "padding token inside": Kind(padding_token_inside, ("before",), "roberta"),
    "positions of their own": of_items(lambda item: {"position_ids": 2 * torch.arange(len(item["input_ids"]))}),
}

KINDS: dict[str, Kind] = TRAINED | COMPUTED | HELD | ATTENTION | MEETING | OTHER_LAYERS | LOSSES | DATA
SAME = {"padding at the end"}  # those that leave the plain job as it was
