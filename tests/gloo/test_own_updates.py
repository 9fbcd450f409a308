"""What scripts do to updates, gradients and engine.module past the engine's calls: right, or refused before harm."""

from __future__ import annotations

import contextlib
import copy
import io
import re
import time
from collections import UserDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

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
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

import ds_hydra.host.released
from ds_hydra.engine import steps
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.ends import all_told, codes, ends, mark_fault
from tests.support.small_job import same, small_engine, small_model, whole_state

# --- What a script does to updates and gradients past the engine's calls is refused before harm, or does
# nothing here as in plain DeepSpeed.
BATCHES = [[torch.arange(3 + rank, 20 + 9 * n) for n in range(3)] for rank in range(2)]


def params(engine: Any) -> list[Any]:
    return list(engine.module.parameters())


def parts(engine: Any) -> list[Any]:
    return [part for group in engine.optimizer.param_groups for part in group["params"]]


AFTER: dict[str, Callable[[Any], Any]] = {
    **{
        f"{name} of the optimizer's": change
        for name, change in {
            "a norm that is clipped": lambda engine: torch.nn.utils.clip_grad_norm_(parts(engine), 1.0),
            "a gradient that is scaled": lambda engine: [p.grad.mul_(0.5) for p in parts(engine)],
            "a gradient that is dropped": lambda engine: setattr(parts(engine)[0], "grad", None),
            "values that are clamped": lambda engine: [p.data.clamp_(-0.1, 0.1) for p in parts(engine)],
            "a value that is multiplied": lambda engine: parts(engine)[0].detach().mul_(2),
            "a flag": lambda engine: parts(engine)[0].requires_grad_(False),
            "a hook": lambda engine: parts(engine)[0].register_hook(lambda grad: 2 * grad),
            "a sum of squares": lambda engine: sum(p.square().sum() for p in parts(engine)),
        }.items()
    },
    "a second step": lambda engine: engine.optimizer.step(),
    "a step with a closure": lambda engine: engine.optimizer.step(lambda: 0.0),
}
BETWEEN: dict[str, Callable[[Any], Any]] = {
    **AFTER,
    "the engine's zero_grad": lambda engine: engine.zero_grad(),
    "the optimizer's zero_grad": lambda engine: engine.optimizer.zero_grad(),
    "the module's zero_grad": lambda engine: engine.module.zero_grad(),
    "a norm that is clipped": lambda engine: torch.nn.utils.clip_grad_norm_(params(engine), 0.1),
    "values that are clipped": lambda engine: torch.nn.utils.clip_grad_value_(params(engine), 0.1),
    "a gradient that is scaled": lambda engine: [p.grad.mul_(0.5) for p in params(engine) if p.grad is not None],
    "a norm that is clipped of what was kept": lambda engine: torch.nn.utils.clip_grad_norm_(engine.kept, 0.1),
    "a flag of what was kept": lambda engine: engine.kept[0].requires_grad_(False),
    "a hook of what was kept": lambda engine: engine.kept[0].register_hook(lambda grad: 2 * grad),
}
HARMLESS: tuple[Callable[[Any], Any], ...] = (
    lambda engine: engine.zero_grad(),
    lambda engine: engine.optimizer.zero_grad(),
    lambda engine: engine.module.zero_grad(),
    lambda engine: torch.nn.utils.clip_grad_norm_(params(engine), 0.1),
)


CALLS = ("compile", "allreduce_gradients", "clip_fp32_gradients", "set_data_post_process_func",
         "set_custom_curriculum_learning_schedule")  # fmt: skip


def three_calls(engine: Any, rank: int, between: Callable[[Any], Any] | None = None) -> None:
    engine.backward(engine(BATCHES[rank]).loss)
    if between is not None:
        between(engine)
    engine.step()


def with_kept(rank: int, strategies: list[str]) -> Any:
    """An engine, and the parameters that its model had before."""
    model = small_model()
    kept = list(model.parameters())
    engine: Any = small_engine(rank, model, data=None, context_length=120, strategies=strategies)
    engine.__dict__["kept"] = kept
    return engine


def trained(rank: int, edited: bool) -> tuple[list[str], dict[str, Any]]:
    """Texts of what is refused, and the parameters afterwards."""
    engine, texts = with_kept(rank, ["tp2", "2*tp1"]), []
    for name in CALLS:
        with pytest.raises(ConfigError, match=rf"engine.{name}\(\) would have no effect on planned steps: "):
            getattr(engine, name)(None)
    for _ in range(3):
        three_calls(engine, rank)
        for call in AFTER.values() if edited else ():
            with pytest.raises(ConfigError) as error:
                call(engine)
            texts.append(str(error.value))
        for harmless in HARMLESS if edited else ():
            harmless(engine)
        engine.backward(engine(BATCHES[rank]).loss)
        for call in BETWEEN.values() if edited else ():
            with pytest.raises(ConfigError) as error:
                call(engine)
            texts.append(str(error.value))
        engine.step()
    return texts, whole_state(engine)


@pytest.mark.drawn
def test_updates_are_the_engines() -> None:
    """What was refused has changed nothing, and what plain DeepSpeed does without an effect has none."""
    edited, plain = run_ranks(trained, 2, True), run_ranks(trained, 2, False)
    for (texts, state), (_, right) in zip(edited, plain, strict=True):
        assert same(state, right)
        for text, name in zip(texts, 3 * [*AFTER, *BETWEEN], strict=True):
            assert words_of(name) in text, (name, text)


def words_of(name: str) -> str:
    """What the text says that refuses one of `BETWEEN`."""
    if name == "the module's zero_grad":
        return "was read before the update"
    endings = {"of the optimizer's": "engine.optimizer.param_groups, which is a flat part", "zero_grad": "zero_grad()",
               "step": "AdamW.step()", "closure": "AdamW.step()", "a flag of what was kept": "take it from",
               "a hook of what was kept": "take it from"}  # fmt: skip
    return next((words for ending, words in endings.items() if name.endswith(ending)), "gradient_clipping")


def other_optimizer(engine: Any) -> None:
    engine.optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)


def one_group_less(engine: Any) -> None:
    first, second = engine.optimizer.param_groups
    second["params"] = [*first.pop("params"), *second["params"]]
    engine.optimizer.param_groups = [second]


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "engine.optimizer was set to a SGD, which makes no updates": other_optimizer,
    "of engine.optimizer.param_groups were changed after": one_group_less,
    "engine.module was set to a Sequential, which would not be trained":
        lambda engine: setattr(engine, "module", torch.nn.Sequential(engine.module)),
}  # fmt: skip


def in_place_of_its_own(rank: int) -> list[str]:
    texts = []
    for call in IN_PLACE.values():
        engine = with_kept(rank, ["tp2", "2*tp1"])
        call(engine)
        with pytest.raises(ConfigError) as error:
            three_calls(engine, rank)
        texts.append(str(error.value))
        engine.destroy()
    return texts


@pytest.mark.drawn
def test_what_trains_and_is_trained_is_not_set_by_hand() -> None:
    for texts in run_ranks(in_place_of_its_own, 2):
        for text, words in zip(texts, IN_PLACE, strict=True):
            assert words in text


def in_parts(rank: int) -> list[str]:
    engine, texts = with_kept(rank, ["2*tp1"]), []
    items = [{"input_ids": one} for one in BATCHES[rank]]
    for name, call in BETWEEN.items():
        engine.forward_backward(items)
        if name in ("the engine's zero_grad", "the optimizer's zero_grad"):  # which drop them here too
            call(engine)
            with pytest.raises(ConfigError, match="no gradients to apply"):
                engine.optimizer_step()
            continue
        with pytest.raises(ConfigError) as error:
            call(engine)
        texts.append(str(error.value))
        engine.optimizer_step()
        engine.module.zero_grad()
    return texts


@pytest.mark.drawn
def test_gradients_that_wait_in_parts_are_not_read() -> None:
    for texts in run_ranks(in_parts, 2):
        assert len(texts) == len(BETWEEN) - 2


def in_modes(rank: int, edited: bool) -> dict[str, Any]:
    """A step for each of what a script may have around it, and batches whose memory it uses again."""
    engine = small_engine(rank, data=None, context_length=120, strategies=["tp2", "2*tp1"])
    engine.set_gradient_accumulation_boundary(False)
    memory = torch.zeros(1, 30, dtype=torch.long)
    around: list[tuple[Any, Any]] = [  # batches, updates
        (contextlib.nullcontext, contextlib.nullcontext), (contextlib.nullcontext, torch.no_grad),
        (partial(torch.autocast, "cpu", dtype=torch.bfloat16), torch.inference_mode),
        (partial(torch.device, "meta"), partial(torch.device, "meta")),
    ]  # fmt: skip
    for number, modes in enumerate(around):
        of_batch, of_update = modes if edited else (contextlib.nullcontext,) * 2
        for part in (0, 1):
            ids = torch.arange(3 + part + rank + number, 33 + part + rank + number)[None]
            batch = {"input_ids": memory.copy_(ids) if edited else ids}
            with of_batch():
                loss = engine(UserDict(batch) if part else batch).loss
            with of_update():
                engine.backward(loss)
        memory.zero_()
        engine.set_gradient_accumulation_boundary(True)
        with of_update():
            engine.step()
        engine.set_gradient_accumulation_boundary(False)
    return whole_state(engine)


def test_what_a_script_has_around_a_step_does_not_change_it() -> None:
    edited, plain = run_ranks(in_modes, 2, True), run_ranks(in_modes, 2, False)
    assert all(map(same, edited, plain))


class Halved(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found / 2 if function is torch.nn.functional.silu else found


def evaluating(rank: int) -> list[str]:
    from transformers import AutoConfig, AutoModelForCausalLM

    found = []
    for rate in (0.0, 0.1):
        config = AutoConfig.for_model("gpt2", vocab_size=97, n_embd=32, n_layer=2, n_head=4, resid_pdrop=rate,
                                      embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
        model = AutoModelForCausalLM.from_config(config).eval()
        engine = small_engine(rank, model, data=None, context_length=60, strategies=["tp1"])
        for _ in range(1 + bool(rate)):
            try:
                three_calls(engine, 0)
                found.append("trained")
            except ConfigError as error:
                found.append(str(error))
            engine.train()
        engine.eval()
        with mock.patch.object(steps.logger, "warning") as told:
            engine.train_batch([{"input_ids": torch.arange(9)}])
            found += [str(call.args) for call in told.call_args_list] or ["silent"]
        assert all(module.training for module in model.modules()) or not rate
        engine.train()
        for train in (engine, engine.train_batch, engine.forward_backward):
            for mode in (torch.no_grad, torch.inference_mode):
                with mode(), pytest.raises(RuntimeError, match=rf"trains, and is called within torch\.{mode.__name__}"):
                    train([{"input_ids": torch.arange(9)}])
            for hooks in (lambda x: x / 2, lambda x: x), (torch.Tensor.half, torch.Tensor.float):
                with saved_tensors_hooks(*hooks), pytest.raises(RuntimeError, match=r"within .*saved_tensors_hooks"):
                    train([{"input_ids": torch.arange(9)}])
        with Halved(), pytest.raises(RuntimeError, match=r"engine\(batch\) is called within Halved, which may change"):
            three_calls(engine, 0)
        with Halved():
            engine.train_batch([{"input_ids": torch.arange(9)}])
        engine.destroy()
    return found


def test_a_model_in_evaluation_trains_only_where_its_host_would_put_it_into_training() -> None:
    ((still, silent, refused, trained, told),) = run_ranks(evaluating, 1)
    assert (still, silent, trained) == ("trained", "silent", "trained")
    assert "GPT2LMHeadModel is in evaluation mode" in refused
    assert "Call engine.train()" in refused
    assert "%s has put the whole model into training" in told


class Noted(torch.optim.lr_scheduler.LRScheduler):
    """Notes what its step is given."""

    given: list[Any]

    def get_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None, factor: float = 1.0) -> None:
        self.given = [*getattr(self, "given", []), factor]


def scheduled(rank: int) -> list[float]:
    from ds_hydra.entry import initialize
    from ds_hydra.testing import rank_environment
    from tests.support.small_job import small_config

    rank_environment(rank)
    model, config = small_model(), small_config(1, strategies=["tp1"], context_length=120)
    del config["optimizer"], config["scheduler"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = Noted(optimizer)
    engine = initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]
    for kwargs in (None, {"factor": 0.5}, None):
        engine.backward(engine(BATCHES[0]).loss)
        engine.step(kwargs)
    return scheduler.given


def test_what_a_step_is_given_goes_to_the_schedule() -> None:
    assert run_ranks(scheduled, 1) == [[1.0, 1.0, 0.5, 1.0]]


# --- engine.module after initialize: what scripts ask of it is right, gathered from all ranks, or refused in
# time.
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
    ds_hydra.host.released._WAIT_S = 0.5
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


def saves_alone(rank: int, folder: Path) -> None:
    """A script that trains, and at whose end rank 0 alone saves the weights."""
    engine = small_engine(rank)
    engine.train_batch()
    right = engine.fp32_state_dict()
    if rank == 0:
        time.sleep(0.5)
        mark_fault(folder)
        saved = io.BytesIO()
        torch.save(engine.module.state_dict(), saved)
        saved.seek(0)
        found = torch.load(saved)
        assert all(torch.equal(found[name], value) for name, value in right.items() if name in found)
        print(f"saved {len(found)}")


def destroys_the_groups(rank: int, folder: Path) -> None:
    small_engine(rank).train_batch()
    dist.destroy_process_group()


def test_a_script_may_end_without_groups() -> None:
    found = ends(destroys_the_groups, 2)
    assert codes(found) == [0, 0], all_told(found)


def test_ranks_whose_script_has_ended_help_one_that_reads_the_weights_alone() -> None:
    found = ends(saves_alone, 3)
    assert codes(found) == [0, 0, 0], all_told(found)
    assert re.search(r"saved [1-9]\d", found[0].told), all_told(found)
    assert max(end.seconds for end in found) < 10


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
