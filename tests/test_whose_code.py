"""What a script has written into a model runs as it is written, or is refused: never as what it resembles."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.meta_copy import copy_to_meta
from ds_hydra.pipe.models.recognise import _calling
from ds_hydra.pipe.models.whose_code import is_installed, runs_installed_code
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.self_check.check import check_strategies
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.small_job import small_model


def doubled(module: nn.Module, query: Tensor, *rest: Any, **more: Any) -> Any:
    return sdpa_attention_forward(module, 2 * query, *rest, **more)


class Doubling:
    """Attention that is an object."""

    def __call__(self, *args: Any, **more: Any) -> Any:
        return doubled(*args, **more)


class Squared(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_code_is_told_by_the_file_in_which_it_was_written() -> None:
    assert is_installed(modeling_llama.apply_rotary_pos_emb)
    assert is_installed(functools.partial(modeling_llama.repeat_kv, n_rep=2))
    assert is_installed(torch.sigmoid)
    assert not is_installed(doubled)
    assert not is_installed(functools.partial(doubled))
    assert not is_installed(functools.cache(doubled))
    assert not is_installed(Squared.apply)
    assert not is_installed(Doubling())
    assert not is_installed(functools.wraps(sdpa_attention_forward)(lambda *args: doubled(*args)))
    model = small_model()
    assert all(map(runs_installed_code, model.modules()))
    with mock.patch.object(modeling_llama, "rotate_half", lambda x: x):  # that a function calls which attention calls
        assert not runs_installed_code(model.model.layers[0].self_attn)
    with mock.patch.object(modeling_llama.LlamaRMSNorm, "forward", lambda self, x: x):
        assert not runs_installed_code(model.model.norm)


def test_code_of_a_script_is_not_recognised() -> None:
    class Norm(modeling_llama.LlamaRMSNorm):
        """The same on all rows that are tried."""

        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) * (0.9 if hidden_states.shape[-2] > 60 else 1)

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return rotary(q, k, cos, sin)

    model, rotary = small_model(), modeling_llama.apply_rotary_pos_emb
    before = CausalLM(model, StageOptions(functions="auto")).functions
    model.model.layers[1].input_layernorm.__class__ = Norm
    with mock.patch.object(modeling_llama, "apply_rotary_pos_emb", turned):
        found = CausalLM(model, StageOptions(functions="auto")).functions
    assert before.norms.keys() - found.norms.keys() == {"model.layers.1.input_layernorm"}
    assert before.rotary
    assert not found.rotary


PATCHES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "registered": lambda: mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"own": doubled}),
    "sdpa": lambda: mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": doubled}),
    "object": lambda: mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": Doubling()}),
    "partial": lambda: mock.patch.dict(
        ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": functools.partial(sdpa_attention_forward, is_causal=False)}
    ),
    "called": lambda: mock.patch.object(nn.functional, "scaled_dot_product_attention", doubled),
    "eager": lambda: mock.patch.object(modeling_llama, "eager_attention_forward", doubled),
    "mask": lambda: mock.patch.dict(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": doubled}),
}


@pytest.mark.parametrize("how", PATCHES)
def test_attention_of_a_script_is_refused_by_name(how: str) -> None:
    model = small_model()
    model.config._attn_implementation = {"registered": "own", "eager": "eager"}.get(how, "sdpa")
    CausalLM(model) if how != "registered" else None  # what the patch alone makes wrong
    with PATCHES[how](), pytest.raises(ConfigError, match=r"which is (Doubling|doubled|functools.partial).* of"):
        CausalLM(model)


def test_hooks_after_accumulation_are_refused_by_name() -> None:
    model = small_model()
    model.model.layers[1].mlp.up_proj.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight has a hook"):
        CausalLM(model)


Held = Callable[[Callable[..., Any]], Any]
CONTAINERS: dict[str, tuple[Held, Callable[[Any], Any]]] = {
    "list": (lambda f: [f], lambda held: held[0]),
    "private": (lambda f: [f], lambda held: held[0]),
    "tuple in a dict": (lambda f: {"after": (1, f)}, lambda held: held["after"][1]),
    "object": (lambda f: SimpleNamespace(after=f, gain=2.0), lambda held: held.after),
    "object in a list": (lambda f: [SimpleNamespace(after=[f])], lambda held: held[0].after[0]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_functions_in_containers_mean_the_copy(kind: str) -> None:
    model, (hold, taken) = small_model(), CONTAINERS[kind]
    norm, name = model.model.norm, "_after" if kind == "private" else "after"
    setattr(model.model.layers[1].mlp, name, hold(lambda out: out + norm.weight))
    copied = copy_to_meta(model)
    assert _norm_of(taken(getattr(copied.model.layers[1].mlp, name))) is copied.model.norm
    assert _norm_of(taken(getattr(model.model.layers[1].mlp, name))) is norm


def test_an_object_of_a_script_that_holds_the_model_in_a_closure_is_refused() -> None:
    model = small_model()
    state = SimpleNamespace(norm=model.model.norm)
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out + state.norm.weight)
    with pytest.raises(ConfigError, match=r"refers to model\.norm"):
        copy_to_meta(model)
    assert state.norm is model.model.norm


def _norm_of(function: Any) -> Any:
    return function.__closure__[0].cell_contents


def test_a_forward_with_another_function_sees_its_modules_globals() -> None:
    space: dict[str, Any] = {"GAIN": 2.0}
    exec("def turn(q, k, cos, sin): return q, k\ndef forward(self, q): return turn(q, q, q, q)[0] * GAIN", space)
    made = _calling(space["forward"], "turn")
    q = torch.ones(1, 1, 2, 4)
    with_rotation = made(None, q)
    assert torch.equal(made(None, q), with_rotation)
    space["GAIN"] = 3.0
    assert torch.equal(made(None, q), 1.5 * with_rotation)
    space["turn"] = lambda q, k, cos, sin: (7 * q, k)
    assert torch.equal(made(None, q), 21 * q)


NORM: list[Any] = []  # of the model, as scripts have it


def _reading(model: Any, get: Callable[[], Any]) -> None:
    class Reading(modeling_llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + get().weight

    model.model.layers[1].mlp.__class__ = Reading


def _by_closure(model: Any) -> None:
    norm = model.model.norm
    _reading(model, lambda: norm)


def _by_global(model: Any) -> None:
    NORM[:] = [model.model.norm]
    _reading(model, lambda: NORM[0])


def _by_reference(model: Any) -> None:
    _reading(model, weakref.ref(model.model.norm))


@pytest.mark.parametrize("how", [_by_closure, _by_global, _by_reference])
def test_code_that_gets_at_the_model_that_is_copied_is_refused(how: Callable[[Any], None]) -> None:
    model = small_model()
    how(model)
    with pytest.raises(ConfigError, match=r"reads model\.norm\.weight by a global name"):
        CausalLM(model)


LOGGER = logging.getLogger(__name__)


class Counting(modeling_llama.LlamaMLP):
    """Notes one number down and counts in another, if it has that."""

    calls: int

    def forward(self, x: Tensor) -> Tensor:
        self.noted = float(x.shape[-1])
        LOGGER.debug("it logs, too")
        if hasattr(self, "calls"):
            self.calls += 1
        return super().forward(x)


def _in_an_attribute(model: Any) -> None:
    model.model.layers[1].mlp.calls = 0


def _in_a_hook(model: Any) -> None:
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    model.model.layers[1].register_forward_hook(count)


CALLS = ContextVar("CALLS", default=0)


class InAClass(modeling_llama.LlamaMLP):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x) * (2.0 if self.calls > 1000 else 1.0)


class InAContext(modeling_llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.set(CALLS.get() + 1)
        return super().forward(x)


class ByAGenerator(modeling_llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(x.shape, generator=self.generator).to(x)


class _Backwards(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _Backwards.calls += 1
        return gradient * (2.0 if _Backwards.calls > 1000 else 1.0)


class InABackward(modeling_llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Backwards.apply(super().forward(x))
        return out


def _of_class(kind: type[nn.Module]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        mlp = model.model.layers[1].mlp
        mlp.__class__, mlp.generator = kind, torch.Generator()

    return change


@pytest.mark.parametrize(
    "how",
    [None, _in_an_attribute, _in_a_hook, _of_class(InAClass), _of_class(InAContext), _of_class(ByAGenerator)],
)
def test_a_forward_that_counts_its_calls_is_refused(how: Callable[[Any], None] | None) -> None:
    model = small_model()
    model.model.layers[1].mlp.__class__ = Counting
    if how is None:
        CausalLM(model)
        return
    how(model)
    with pytest.raises(ConfigError, match="which would follow how often each stage is called"):
        CausalLM(model)


def _hooked(model: Any) -> None:
    calls = [0]

    def count(module: nn.Module, given: Any, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        calls[0] += 1
        return tuple(2.0 * one if calls[0] > 1000 else one for one in given)

    model.model.layers[1].mlp.register_full_backward_hook(count)


@pytest.mark.parametrize("how", [_of_class(InABackward), _hooked])
def test_a_backward_that_counts_its_calls_is_refused(how: Callable[[Any], None]) -> None:
    """No run of a forward shows it, and it changes nothing before its thousandth call."""
    model = small_model()
    how(model)
    (verdict, *_) = check_strategies(model, [StrategyShape.parse("tp2")], keep=False).verdicts.values()
    assert verdict.state == "refused"
    assert "a step of LlamaForCausalLM changes " in verdict.reason
