"""What a script does to updates and gradients past the engine's calls is refused before harm, or does nothing here as
in plain DeepSpeed."""

from __future__ import annotations

import contextlib
from collections import UserDict
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from ds_hydra.engine import steps
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.small_job import same, small_engine, small_model, whole_state

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
    from ds_hydra import initialize
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
