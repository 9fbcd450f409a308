"""engine.module after initialize: what scripts ask of it is right, gathered from all ranks, or refused in time."""

from __future__ import annotations

import copy
import io
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from torch import Tensor, nn

import ds_hydra.host.lent_values
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.small_job import same, small_engine, small_model, whole_state


def weight(engine: Any) -> Any:
    return engine.module.model.layers[1].mlp.up_proj.weight


def reads(rank: int) -> list[str]:
    """What differs from the gathered parameters."""
    engine = small_engine(rank)
    for _ in range(2):
        engine.train_batch()
        state = engine.module.state_dict()
    right, own = engine.fp32_state_dict(), weight(engine)
    expected = right["model.layers.1.mlp.up_proj.weight"]
    saved, whole = io.BytesIO(), io.BytesIO()
    torch.save(state, saved)
    torch.save(engine.module, whole)
    saved.seek(0), whole.seek(0)
    loaded = torch.load(whole, weights_only=False)
    ids = torch.tensor([[5, 6, 7 + rank]])
    plain = small_model()
    plain.load_state_dict(right)
    found: dict[str, Any] = {
        "names": list(state) == list(right),
        "state": all(torch.equal(state[name], right[name]) for name in right),
        "file": all(torch.equal(value, right[name]) for name, value in torch.load(saved).items()),
        "the model's file": all(torch.equal(value, right[name]) for name, value in loaded.state_dict().items()),
        "its generate": loaded.generate(ids, max_new_tokens=4).shape == (1, 7),
        "once in a file": state["lm_head.weight"] is state["model.embed_tokens.weight"],
        "a part": torch.equal(engine.module.lm_head.state_dict()["weight"], right["lm_head.weight"]),
        "tied": (state["lm_head.weight"] == state["model.embed_tokens.weight"]).all(),
        "detach": torch.equal(own.detach(), expected),
        "data": torch.equal(own.data.float().cpu(), expected) and own.data.shape == expected.shape,
        "numpy": (own.data.cpu().numpy() == expected.numpy()).all() and not own.data.requires_grad,
        "DeepSpeed's": torch.equal(safe_get_full_fp32_param(own), expected),
        "what changes nothing": own.to("cpu") is own and engine.module.to(engine.device).float() is engine.module,
        "what all have": dist.broadcast(own.data, 0) is None,
        "norm": torch.equal(own.norm(), expected.norm()) and float(own.sum()) == float(expected.sum()),
        "stack": torch.equal(torch.stack([own, own])[1], expected) and torch.equal(own[3], expected[3]),
        "moving average": torch.allclose(torch.zeros_like(own).lerp_(own, 0.5), expected / 2),
        "copy": torch.equal(copy.deepcopy(engine.module).model.layers[1].mlp.up_proj.weight, expected),
        "forward": torch.allclose(engine.module.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits),
        "generate": torch.equal(*(m.generate(ids, max_new_tokens=4, do_sample=False) for m in (engine.module, plain))),
        "counts": sum(p.numel() for p in engine.module.parameters()) == sum(p.numel() for p in plain.parameters()),
        "flags": [p.requires_grad for p in engine.module.parameters()] == [True] * len(list(plain.parameters())),
        "kinds": all(isinstance(p, nn.Parameter) for p in engine.module.parameters()),
        "place": (own.is_meta, own.is_cpu, own.is_cuda) == (False, True, False),
        "device": engine.module.device == engine.device == own.device and own.dtype == torch.float32,
        "text": "model.layers.1.mlp.up_proj.weight" in repr(own),
        "no gradient": own.grad is None and engine.module.zero_grad() is None,
    }
    engine.module.train()
    engine.train_batch()
    return [name for name, equal in found.items() if not equal]


def test_values_are_gathered_when_all_ranks_ask() -> None:
    assert run_ranks(reads, 2) == [[], []]


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "in place": lambda engine, own: own.clamp_(-1, 1),
    "an item": lambda engine, own: own.__setitem__(0, 1.0),
    "its data": lambda engine, own: setattr(own, "data", torch.zeros(2)),
    "its data in place": lambda engine, own: own.data.mul_(2),
    "a gradient": lambda engine, own: setattr(own, "grad", torch.zeros(())),
    "an output": lambda engine, own: torch.add(torch.ones(()), 1, out=own),
    "all at once": lambda engine, own: torch._foreach_mul_(list(engine.module.parameters()), 0.5),
    "an initialisation": lambda engine, own: nn.init.zeros_(own),
    "a collective": lambda engine, own: dist.all_reduce(own.data),
    "a part of it": lambda engine, own: (own.data[2:4].zero_(), own.norm()),
    "an alias": lambda engine, own: (own.detach().mul_(2), own.norm()),
    "DeepSpeed's": lambda engine, own: safe_set_full_fp32_param(own, torch.zeros(2)),
    "a state": lambda engine, own: engine.module.load_state_dict({"lm_head.weight": torch.zeros(97, 32)}, strict=False),
}


def test_writes_are_refused() -> None:
    def told(rank: int) -> list[str]:
        engine, texts = small_engine(rank), []
        for write in WRITES.values():
            with pytest.raises(ConfigError) as error, torch.no_grad():
                write(engine, weight(engine))
            texts.append(str(error.value))
        kept = weight(engine).detach()
        engine.train_batch()
        kept += 1
        weight(engine)[0].detach().zero_()
        with pytest.raises(ConfigError) as error:
            engine.train_batch()
        texts.append(str(error.value))
        engine.train_batch()
        return texts

    for text in (text for texts in run_ranks(told, 2) for text in texts):
        assert re.search("share its value|whose value the ranks share", text), text
        assert "engine.load_16bit_model(folder)" in text


def with_gradients(rank: int) -> list[str]:
    engine, texts = small_engine(rank), []
    own, ids = weight(engine), torch.tensor([[5, 6, 7]])
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=1e-3)
    for call in (
        lambda: engine.module(input_ids=ids, labels=ids).loss.backward(),
        lambda: own.pow(2).sum().backward(),
        lambda: torch.autograd.grad(own.sum(), own),
        lambda: safe_get_full_grad(own),
        optimizer.step,
        lambda: safe_get_full_optimizer_state(own, "exp_avg"),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        texts.append(str(error.value))
    penalty = sum(parameter.square().sum() for parameter in engine.module.parameters())
    engine.module.requires_grad_(False)
    return [*texts, str(penalty.requires_grad), str(own.sum().requires_grad)]


def test_gradients_are_the_engines() -> None:
    for found in run_ranks(with_gradients, 2):
        assert all("gets no gradient in the script: the engine computes them" in text for text in found[:4])
        assert "Pass the optimizer to ds_hydra.initialize(optimizer=...)" in found[4]
        assert "engine.save_checkpoint(folder) saves it" in found[5]
        assert found[6:] == ["True", "False"]


def alone(rank: int) -> list[Any]:
    ds_hydra.host.lent_values._WAIT_S = 0.5
    engine = small_engine(rank)
    found: list[Any] = []
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"read on 1 of 2 ranks.*save_16bit_model") as error:
            torch.save(engine.module.state_dict(), io.BytesIO())
        found += ["model.embed_tokens.weight" in str(error.value), time.monotonic() - began < 10]
    # Later all of them ask, and one of them late.
    torch.distributed.barrier()
    time.sleep(0.2 * rank)
    value: Tensor = engine.module.model.embed_tokens.weight.detach()
    found.append(torch.equal(value, engine.fp32_state_dict()["model.embed_tokens.weight"]))
    engine.train_batch()
    return found


def test_a_rank_that_asks_alone_is_refused_in_time() -> None:
    assert run_ranks(alone, 2) == [[True, True, True], [True]]


def test_empty_ones_of_a_kind_lie_where_they_are_asked_for() -> None:
    def kinds(rank: int) -> list[str]:
        own = weight(small_engine(rank))
        return [str(made.device) for made in (torch.ones_like(own), torch.empty_like(own, device="meta"))]

    assert run_ranks(kinds, 1) == [["cpu", "meta"]]


def trained_by_two(rank: int) -> tuple[bool, str]:
    """Whether an engine of a model that another one has trained trains as one of a copy of that model, with groups of
    the parameters from before; and what the first engine then says."""
    batch = [torch.arange(3 + rank, 20 + 9 * n) for n in range(3)]

    def trained(model: Any) -> Any:
        engine = small_engine(rank, model, data=None, context_length=120, strategies=["tp2", "2*tp1"])
        for _ in range(4):  # the first two at a rate of 0
            engine.backward(engine(batch).loss)
            engine.step()
        return engine

    model, copied = small_model(), small_model()
    first = trained(model)
    copied.load_state_dict(model.state_dict())
    model.generate(torch.arange(3, 9)[None], max_new_tokens=2)
    right, found = trained(copied), trained(model)
    first.backward(first(batch).loss)
    with pytest.raises(ConfigError) as error:
        first.step()
    return same(whole_state(found), whole_state(right)), str(error.value)


@pytest.mark.drawn
def test_a_model_that_was_trained_can_be_given_to_another_engine() -> None:
    for equal, text in run_ranks(trained_by_two, 2):
        assert equal
        assert "of the model was changed after the engine was made" in text
