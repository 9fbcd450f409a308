"""What a script does to its model after `initialize` is honoured, or refused by name on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from ds_hydra.host.kept_model import KeptModel
from ds_hydra.step.update import ModelNow
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.small_job import small_engine, small_model, whole_state


def kept(model: nn.Module, steps_differ: bool = False) -> KeptModel:
    names = {name: name for name, _ in model.named_parameters(remove_duplicate=False)}
    return KeptModel(model, names, steps_differ=lambda: steps_differ)


def _clamp(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.clamp_(-0.1, 0.1)


def _buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


CHANGES: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "a weight in place": (_clamp, "parameter weight of lm_head"),
    "a weight's memory": (lambda m: setattr(m.lm_head.weight, "data", torch.zeros(97, 32)), "weight of lm_head"),
    "all weights": (lambda m: m.load_state_dict(m.state_dict()), "parameter weight of model.embed_tokens"),
    "a buffer": (_buffer, "buffer inv_freq of model.rotary_emb"),
    "a number": (lambda m: setattr(m.model.layers[2].self_attn, "scaling", 0.2), "attribute scaling of model.layers.2"),
    "a list": (lambda m: m.model.norm.limits.append(3), "attribute limits of model.norm"),
    "what code looks for": (lambda m: setattr(m.model.norm, "gain", 2.0), "attribute gain of model.norm"),
    "an object": (lambda m: setattr(m.model.norm.settings, "gain", 2.0), "attribute settings of model.norm"),
    "an object with slots": (lambda m: setattr(m.model.norm.slotted, "gain", 2.0), "attribute slotted of model.norm"),
    "an array": (lambda m: m.model.norm.array.fill(2.0), "attribute array of model.norm"),
    "what a method is of": (lambda m: setattr(m.model.norm.method.__self__, "gain", 2.0), "method of model.norm"),
    "what a partial holds": (lambda m: m.model.norm.partial.args[0].append(1), "attribute partial of model.norm"),
    "an object that is a hook": (lambda m: setattr(hook_of(m), "gain", 2.0), "forward hooks of model.norm"),
    "a buffer's data": (lambda m: m.model.rotary_emb.inv_freq.data.mul_(0.5), "buffer inv_freq of model.rotary_emb"),
    "a config": (
        lambda m: setattr(m.config, "attention_dropout", 0.5),
        "setting attention_dropout in the config of the model",
    ),
    "a hook": (lambda m: m.model.norm.register_forward_hook(print), "forward hooks of model.norm"),
    "a hook of a gradient": (lambda m: m.lm_head.weight.register_hook(print), "weight of lm_head"),
    "a module": (lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.Tanh()), "act_fn of model.layers.0.mlp"),
    "one more module": (lambda m: m.model.norm.add_module("more", nn.Identity()), "module more of model.norm"),
    "a method": (lambda m: setattr(m.model.norm, "forward", torch.neg), "attribute forward of model.norm"),
    "a part in another mode": (lambda m: m.model.layers[1].eval(), "training of model"),
    "a frozen one": (lambda m: m.model.norm.weight.requires_grad_(True), r"model.norm.weight requires a gradient"),
}


@dataclass(slots=True)
class Scaling:
    """A hook of all forms."""

    gain: float = 1.0

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * self.gain


def hook_of(model: Any) -> Any:
    return next(iter(model.model.norm._forward_hooks.values()))


def changed_model() -> Any:
    model = small_model(tied=False)
    model.model.norm.slotted, model.model.norm.array = Scaling(), np.ones(3)
    model.model.norm.method, model.model.norm.partial = Scaling().__call__, partial(print, [])
    model.model.norm.register_forward_hook(Scaling())
    model.model.norm.reads = lambda: getattr(model.model.norm, "gain", 1.0)
    model.model.norm.limits, model.model.norm.settings = [1, 2], SimpleNamespace(gain=1.0)
    model.model.norm.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told_by_name(name: str) -> None:
    model, (change, words) = changed_model(), CHANGES[name]
    watched = kept(model)
    assert watched.now() == ModelNow()
    change(model)
    assert words in watched.now().problem


@pytest.mark.parametrize("where", ["class", "rotary", "attention", "what attention calls", "a hook of all modules"])
def test_code_that_is_patched_later_is_told(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = kept(small_model())
    if where == "class":
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x)
    elif where == "rotary":
        monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: x)
    elif where == "what attention calls":
        monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", lambda *args, **more: args[0])
    elif where == "a hook of all modules":
        monkeypatch.setitem(nn.modules.module._global_forward_hooks, 0, lambda module, args, out: None)
    else:
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", print)
    assert "was changed after the engine was made" in watched.now().problem


def test_what_changes_no_number_is_no_change() -> None:
    model = small_model()
    watched = kept(model)
    model.config.use_cache = False
    model.config.pad_token_id = 0
    model.eval()
    model.gradient_checkpointing_enable()
    model.model._num_params = 12  # as DeepSpeed-Chat's scripts note it down
    assert watched.now() == ModelNow()
    model.train()
    assert watched.now() == ModelNow()


def test_a_model_with_parts_in_training_is_switched_as_a_whole_and_a_part_of_it_is_told() -> None:
    model = small_model().eval()
    model.model.layers[0].self_attn.train()
    watched = kept(model)
    for switch in (model.train, model.eval, model.train):
        assert watched.now() == ModelNow()
        switch()
    for path in ("model.layers.0.self_attn", "model.layers.1.mlp"):
        model.train()
        model.get_submodule(path).eval()
        assert f"mode of training of {path}" in watched.now().problem


def test_a_parameter_may_be_frozen_and_trained_again_where_no_steps_are_counted() -> None:
    model = small_model(tied=False)
    for steps_differ in (False, True):
        watched = kept(model, steps_differ)
        model.lm_head.weight.requires_grad_(False)
        assert watched.now() == ModelNow("", frozenset({"lm_head.weight"}))
        model.lm_head.weight.requires_grad_(True)
        assert bool(watched.now().problem) is steps_differ


def frozen_midway(rank: int) -> tuple[dict[str, Tensor], ...]:
    engine, states = small_engine(rank), []
    for step in range(4):
        if step == 2:
            for name, parameter in engine.module.named_parameters():
                parameter.requires_grad_("norm" not in name and "layers.1" not in name)
        engine.train_batch()
        states.append({name: value.clone() for name, value in whole_state(engine).items()})
    return tuple(states)


def test_frozen_parameters_and_their_moments_stand_still() -> None:
    for states in run_ranks(frozen_midway, 2):
        for name, value in states[3].items():
            assert torch.equal(value, states[1][name]) is ("norm" in name or "layers.1" in name), name


@pytest.mark.parametrize("who", [0, 1])
def test_ranks_that_differ_are_refused_on_all(who: int) -> None:
    def errors(rank: int) -> list[str]:
        engine = small_engine(rank)
        engine.train_batch()
        told = []
        weight = engine.module.model.layers[2].mlp.up_proj.weight
        for change in (
            lambda: weight.requires_grad_(False),
            lambda: engine.module.model.norm.register_forward_hook(print),
            lambda: engine.optimizer.register_step_pre_hook(lambda *_: None),
        ):
            if rank == who:
                change()
            with pytest.raises(ConfigError) as error:
                engine.train_batch()
            told.append(str(error.value))
            weight.requires_grad_(True)
            engine.module.model.norm._forward_hooks.clear()
        return told

    frozen, hooked, stepped = run_ranks(errors, 2)[1 - who]
    assert frozen.startswith("the ranks have frozen different parameters")
    assert hooked.startswith(f"rank {who}: forward hooks of model.norm")
    assert stepped.startswith(f"rank {who}: optimizer AdamW has the step hook")


def with_spares(rank: int) -> list[dict[str, Tensor]]:
    model = small_model()
    model.register_parameter("spare", nn.Parameter(torch.ones(7)))
    model.model.layers[1].mlp.register_parameter("spare", nn.Parameter(torch.ones(5)))
    engine = small_engine(rank, model)
    before = engine.fp32_state_dict()
    for _ in range(3):
        engine.train_batch()
    return [before, engine.fp32_state_dict()]


def test_parameters_that_no_forward_reads_stay_as_they_are() -> None:
    """In torch they have no gradient, so that nothing decays them."""
    before, after = run_ranks(with_spares, 2)[0]
    still = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert still == {"spare", "model.layers.1.mlp.spare"}
