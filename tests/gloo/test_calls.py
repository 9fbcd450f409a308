"""Calls of all ranks: alike or named, set-up that fails together, steps that a thread makes ready."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.engine import crew
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape
from ds_hydra.plan.step_plan import Phase, PipelinePlan, StepPlan
from ds_hydra.ranks.channel import AHEAD_TAG, Channel, Telling, first_channel, together
from ds_hydra.step.batching import agreed, row_of
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.ends import TRACEBACK, all_told, codes, ends, mark_fault
from tests.support.small_job import (
    LENGTHS,
    same,
    sequences,
    small_config,
    small_engine,
    told,
    whole_state,
)
from tests.support.strict import strict_world

# --- Calls that ranks do not make alike: named on all ranks, before anything has changed or soon after both
# wait.
FAULTS = {"frozen_seconds": 9.0}
SHARE = [list(range(3, 3 + length)) for length in (9, 20, 33)]
SOON_S = 10.0

Script = Callable[[Any, Path], Any]


def _step(engine: Any, _: Path) -> None:
    engine.train()
    engine.backward(engine({"input_ids": torch.tensor(SHARE[:1])}))
    engine.step()


def _evaluated(engine: Any, _: Path) -> None:
    engine.eval()
    try:
        engine({"input_ids": torch.tensor(SHARE[:1])})
    finally:
        engine.train()


HANDED: dict[str, Script] = {
    "train_batch()": lambda engine, _: engine.train_batch(SHARE),
    "step()": _step,
    "engine(batch) after eval()": _evaluated,
    "eval_batch()": lambda engine, _: engine.eval_batch(SHARE),
    "evaluate()": lambda engine, _: engine.evaluate(SHARE),
    "predict()": lambda engine, _: engine.predict(SHARE, lambda logits, labels: logits.argmax(-1).double()),
    "log_probs()": lambda engine, _: engine.log_probs(SHARE),
    "forward_backward()": lambda engine, _: engine.forward_backward(SHARE),
    "save_checkpoint()": lambda engine, place: engine.save_checkpoint(place / "saved"),
    "load_checkpoint()": lambda engine, place: engine.load_checkpoint(place / "saved"),
    "save_16bit_model()": lambda engine, place: engine.save_16bit_model(place / "model"),
    "load_16bit_model()": lambda engine, place: engine.load_16bit_model(place / "model"),
    "fp32_state_dict()": lambda engine, _: engine.fp32_state_dict(),
    "full_parameters()": lambda engine, _: list(engine.full_parameters()),
}
"""Calls whose names are compared before anything else is exchanged."""


def test_two_different_calls_are_refused_on_both_ranks_and_change_nothing(tmp_path: Path) -> None:
    """Every ordered pair, one after the other in one job, and both ranks can go on after each."""

    def refused(rank: int) -> tuple[list[str], bool, float]:
        engine = small_engine(rank, data=None, context_length=128, planner={"ahead": 0})
        before, missed, longest = whole_state(engine), list[str](), 0.0
        for pair in permutations(HANDED, 2):
            began = time.monotonic()
            expected = f"ConfigError: rank 0 calls {pair[0]}, rank 1 calls {pair[1]}: every rank must make the same"
            text = told(partial(HANDED[pair[rank]], engine, tmp_path))
            missed += [] if text.startswith(expected) else [f"{pair}: {text}"]
            longest = max(longest, time.monotonic() - began)
        unchanged = same(before, whole_state(engine)) and not list(tmp_path.iterdir())
        for name in ("step()", "evaluate()", "save_checkpoint()", "load_checkpoint()", "train_batch()"):
            HANDED[name](engine, tmp_path)
        return missed, unchanged and engine.global_steps == 2, longest

    for missed, unchanged, longest in run_ranks(refused, 2):
        assert missed == []
        assert unchanged
        assert longest < 5.0


DRAWN: dict[str, Script] = {"train_batch()": lambda engine, _: engine.train_batch()}
PARTS: dict[str, Script] = {"optimizer_step()": lambda engine, _: engine.optimizer_step()}
REFUSED = {
    "drawn": {"train_batch()", "step()", "forward_backward()"},
    "parts": {"train_batch()", "step()", "save_checkpoint()", "load_checkpoint()", "load_16bit_model()"},
}
"""What an engine with training data, or with gradients that wait for an update, refuses on each rank by itself."""


def _ends_of(calls: tuple[str, str], *, ahead: int, drawn: bool, num_ranks: int = 2, strict: bool = False) -> Any:
    """How ranks end of which rank 0 makes one call and the others another."""
    scripts = HANDED | (DRAWN if drawn else PARTS)

    def program(rank: int, place: Path) -> None:
        # As a script has it that calls init_distributed() itself.
        dist.distributed_c10d._set_pg_timeout(timedelta(minutes=30), dist.group.WORLD)
        data: dict[str, Any] = {} if drawn else {"data": None, "context_length": 128}
        engine = small_engine(rank, faults=FAULTS, timeout_seconds=60, planner={"ahead": ahead}, **data)
        if drawn:
            for _ in range(4):  # all strategies have been built, so that the next step is ready
                engine.train_batch()
        else:
            engine.forward_backward(SHARE)
        if rank == num_ranks - 1:
            mark_fault(place)
        scripts[calls[rank > 0]](engine, place)

    def strictly(rank: int, place: Path) -> None:
        with strict_world():
            program(rank, place)

    return ends(strictly if strict else program, num_ranks)


def _check(found: Any, calls: tuple[str, str], others: str = "rank 1 calls") -> None:
    assert codes(found) == [78] * len(found), all_told(found)
    assert max(end.seconds for end in found) < SOON_S
    assert all_told(found).count(f"rank 0 calls {calls[0]}, {others} {calls[1]}: every rank must") == 1
    assert TRACEBACK not in all_told(found)


LATE = [
    (call, other, kind)
    for call, kind in (("train_batch()", "drawn"), ("optimizer_step()", "parts"))
    for other in HANDED
    if other not in REFUSED[kind]
]


@pytest.mark.long
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("call", "other", "kind"), LATE)
def test_a_call_with_other_messages_before_is_named_soon(
    call: str, other: str, kind: str, first: bool, ahead: int
) -> None:
    """A step of training data begins with a plan or with parameters, an update with a norm: heartbeats tell."""
    calls = (call, other) if first else (other, call)
    _check(_ends_of(calls, ahead=ahead, drawn=kind == "drawn"), calls)


@pytest.mark.parametrize(
    ("calls", "kind", "ahead", "strict"),
    [
        (("save_checkpoint()", "train_batch()"), "drawn", 2, False),
        (("train_batch()", "evaluate()"), "drawn", 0, False),
        (("log_probs()", "optimizer_step()"), "parts", 0, True),
    ],
)
def test_some_of_these(calls: tuple[str, str], kind: str, ahead: int, strict: bool) -> None:
    _check(_ends_of(calls, ahead=ahead, drawn=kind == "drawn", strict=strict), calls)


def test_of_more_ranks_each_is_named() -> None:
    calls = "save_checkpoint()", "train_batch()"
    _check(_ends_of(calls, ahead=0, drawn=True, num_ranks=4), calls, "ranks 1, 2, 3 call")


@pytest.mark.parametrize("call", ["save_checkpoint()", "train_batch()"])
@pytest.mark.parametrize("other", ["barrier", "busy"])
def test_a_rank_that_is_alone_in_a_call_waits_as_long_as_the_config_says(call: str, other: str) -> None:
    """Also where the script has made the groups itself, with a longer time."""

    def program(rank: int, place: Path) -> None:
        dist.distributed_c10d._set_pg_timeout(timedelta(minutes=30), dist.group.WORLD)
        engine = small_engine(rank, faults=FAULTS, timeout_seconds=4)
        engine.train_batch()
        mark_fault(place)
        if rank == 0:
            (HANDED | DRAWN)[call](engine, place)
        elif other == "barrier":
            dist.barrier()
        else:
            time.sleep(10)

    found = ends(program, 2)
    assert 3.5 < found[0].seconds < 12.0
    told = all_told(found)
    assert told.count(f"it waited in vain for rank 1 in {call}: every rank must make this call") == 1, told
    assert codes(found) == [75, 75] if other == "barrier" else codes(found)[0] == 75, told


def test_a_rank_that_is_busy_while_another_waits_ends_nothing() -> None:
    def job(rank: int) -> int:
        engine = small_engine(rank, faults=FAULTS, timeout_seconds=60)
        engine.train_batch()
        if rank == 1:
            time.sleep(6)
        engine.train_batch()
        engine.evaluate(SHARE)
        if rank == 0:
            time.sleep(6)
        engine.fp32_state_dict()
        engine.destroy()
        return int(engine.global_steps)

    assert run_ranks(job, 2) == [2, 2]


@pytest.mark.parametrize("how", ["evaluation", "training", "handed"])
def test_a_rank_whose_script_ends_is_told_with_the_right_number_of_steps(how: str) -> None:
    def program(rank: int, place: Path) -> None:
        engine = small_engine(rank, faults=FAULTS, data=None, context_length=128, timeout_seconds=60)
        batches = 5 - 2 * rank
        for _ in range(1 if how == "evaluation" else batches):
            HANDED["step()" if how == "training" else "train_batch()"](engine, place)
        for _ in range(batches if how == "evaluation" else 0):
            HANDED["engine(batch) after eval()"](engine, place)
        if rank == 1:
            mark_fault(place)

    found = ends(program, 2)
    assert codes(found) == [78, 0], all_told(found)
    assert max(end.seconds for end in found) < 5.0
    steps = "1 step," if how == "evaluation" else "3 steps,"
    assert all_told(found).count(f"rank 1's script ended after {steps}") == 1, all_told(found)
    assert "drop_last" in all_told(found)
    assert "Restart" not in all_told(found)


def test_a_save_by_one_rank_is_named_where_the_other_ranks_script_has_ended() -> None:
    def program(rank: int, place: Path) -> None:
        engine = small_engine(rank, faults=FAULTS, data=None, context_length=128, timeout_seconds=60)
        HANDED["train_batch()"](engine, place)
        if rank == 0:
            engine.save_checkpoint(str(place))
        else:
            time.sleep(1)
            mark_fault(place)

    found = ends(program, 2)
    assert codes(found) == [78, 0], all_told(found)
    assert max(end.seconds for end in found) < 5.0
    told = all_told(found)
    assert told.count("rank 1's script ended after 1 step, or destroyed its engine, while rank 0 calls save_check") == 1
    assert "`if rank == 0:`" in told


# --- A part of set-up that fails on some ranks fails on all, with the cause and not with a closed connection.
def outcomes(failing: Mapping[int, Exception], num_ranks: int = 3) -> list[str]:
    def program(rank: int) -> str:
        with first_channel() as channel:

            def fails() -> None:
                with together(channel, "reading the table"):
                    if rank in failing:
                        raise failing[rank]

            text = told(fails)
            return str(channel.texts(str(rank))) if text == "no error" else text  # the channel can still be used

    return run_ranks(program, num_ranks)


@pytest.mark.parametrize(
    ("failing", "texts"),
    [
        ({}, ["['0', '1', '2']"] * 3),
        (
            {1: ConfigError("no such file")},
            ["ConfigError: reading the table failed on rank 1: no such file", "ConfigError: no such file"],
        ),
        (
            {1: MemoryError("of 3 GiB"), 2: PlanError("too long")},
            ["RuntimeError: reading the table failed on rank 1 and 1 more: MemoryError: of 3 GiB",
             "MemoryError: of 3 GiB", "PlanError: too long"],
        ),
        (dict.fromkeys(range(3), ConfigError("the same")), ["ConfigError: the same"] * 3),
    ],
)  # fmt: skip
def test_the_first_ranks_error_is_told_by_those_that_did_not_fail(
    failing: Mapping[int, Exception], texts: list[str]
) -> None:
    found = outcomes(failing)
    assert found[: len(texts)] == texts
    assert all(text == texts[0] for rank, text in enumerate(found) if rank not in failing)


class Unreadable:
    """Data that one rank cannot read."""

    @property
    def lengths(self) -> list[int]:
        if dist.get_rank() == 1:
            raise OSError("/data/tokens.bin is not on this node")
        return [20] * 16

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.arange(3, 23)


def test_data_that_one_rank_cannot_read_is_told_by_all() -> None:
    first, second = run_ranks(lambda rank: told(lambda: small_engine(rank, data=Unreadable())), 2)
    assert second == "OSError: /data/tokens.bin is not on this node"
    assert first == f"RuntimeError: reading the data failed on rank 1: {second}"


def test_memory_that_one_rank_lacks_is_told_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    masters = crew.ModelMasters

    def scarce(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return masters(*args, **kwargs)

    monkeypatch.setattr(crew, "ModelMasters", scarce)
    first, second = run_ranks(lambda rank: told(lambda: small_engine(rank)), 2)
    assert second == "OutOfMemoryError: tried to allocate 20 GiB"
    assert first == f"RuntimeError: allocating the master shards failed on rank 1: {second}"


@pytest.mark.parametrize(("schedule", "words"), [("list", "ranks [1] hold other costs, from which"), ("1f1b", "6")])
def test_costs_must_be_equal_where_orders_are_made_from_them(schedule: str, words: str) -> None:
    phase = Phase((PipelinePlan(PipelineShape.parse(f"pp2/{schedule}"), (), 0.0),))
    plan = StepPlan(0, (), (), (phase,), 0.0)

    def program(rank: int) -> str:
        costs = CostTable((SchemeCost(ParallelScheme(pp=2), 0.0, 1.0, 0.0, 100 + rank),))
        try:
            with first_channel() as channel:
                return str(agreed(plan.step, channel.rows(row_of(plan, costs, 3))))
        except PlanError as error:
            return str(error)

    assert all(words in text for text in run_ranks(program, 2))


def test_a_forked_rank_computes_in_one_thread_whatever_libraries_ask_for() -> None:
    """Its parent has used OpenMP, whose threads are not in a forked child."""

    def threads(rank: int) -> tuple[int, float, str]:
        torch.set_num_threads(2)
        return torch.get_num_threads(), float(torch.ones(2_000_000).exp().mean()), os.environ["MKL_NUM_THREADS"]

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _ = torch.randn(600, 600) @ torch.randn(600, 600)
        torch.ones(2_000_000).exp()
        found = run_ranks(threads, 2, timeout=20)
    finally:
        torch.set_num_threads(before)
    assert found == [(1, pytest.approx(2.7182817), "1")] * 2


def test_a_model_of_one_layer_trains() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    def job(rank: int) -> list[float]:
        config = AutoConfig.for_model(
            "llama", vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
            max_position_embeddings=256,
        )  # fmt: skip
        torch.manual_seed(0)
        engine = small_engine(
            rank, AutoModelForCausalLM.from_config(config), small_config(2, strategies=["2*tp1", "tp2"])
        )
        return [float(engine.train_batch()) for _ in range(3)]

    one, other = run_ranks(job, 2)
    assert one == other
    assert one[2] < 5.0


def test_texts_in_no_encoding_travel_as_they_are() -> None:
    """As names of files may be."""
    name = b"/data/\xff".decode(errors="surrogateescape")

    def program(rank: int) -> tuple[list[str], str]:
        with first_channel() as channel:
            return channel.texts(name), channel.tell(name)

    assert run_ranks(program, 2) == [([name, name], name)] * 2


# --- Steps that a thread makes ready are the steps that training would have made itself, with two small
# messages each.
STEPS, STOP, USED_BEFORE = 6, 4, 3  # strategies take turns: each was used once before this step


class Watched:
    """The training data, and which thread read how many of them; item `bad` cannot be read."""

    def __init__(self, bad: int | None = None) -> None:
        self.items, self.lengths, self._bad = sequences(), LENGTHS, bad
        self.readers: list[str] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.readers.append(threading.current_thread().name)
        if index == self._bad:
            raise OSError("the disk is gone")
        return self.items[index]


def job(rank: int, data: Watched, ahead: int, **hydra: Any) -> Any:
    return small_engine(rank, data=data, planner={"ahead": ahead}, **hydra)


def messages(engine: Any, steps: int) -> list[int]:
    """Train, and count this rank's small messages in each step."""
    found = [0]
    with mock.patch.multiple(Telling, tell=_counting(Telling.tell, found)), mock.patch.multiple(
        Channel, rows=_counting(Channel.rows, found), exchange=_counting(Channel.exchange, found)
    ):  # fmt: skip
        for _ in range(steps):
            engine.train_batch()
            found.append(0)
    return found[:-1]


def _counting(original: Any, found: list[int]) -> Any:
    def counted(*args: Any) -> Any:
        found[-1] += 1
        return original(*args)

    return counted


def trained(rank: int, ahead: int, folder: Path) -> Any:
    """A run: messages, and again after a load in its middle; state; readers; whether the load changed nothing."""
    data = Watched()
    engine = job(rank, data, ahead, total_steps=STEPS)
    counted = messages(engine, STOP)
    engine.save_checkpoint(folder)
    counted += messages(engine, STEPS - STOP)
    state, readers = whole_state(engine), list(data.readers)
    engine.load_checkpoint(folder)  # back to step 4
    again = messages(engine, STEPS - STOP)
    equal = same(whole_state(engine), state)
    engine.destroy()
    return counted, again, state, readers, equal


@pytest.mark.drawn
def test_steps_made_ready_are_the_same_to_the_bit(tmp_path: Path) -> None:
    plain = run_ranks(trained, 2, 0, tmp_path / "0")
    ready = run_ranks(trained, 2, 2, tmp_path / "2")
    for (counted, again, state, readers, equal), one in zip(ready, plain, strict=True):
        assert same(state, one[2])
        assert equal
        assert one[4]
        # Of each step one sequence is read again when it begins, none else twice, and none beyond the last step.
        assert 0 <= len(readers) - len(one[3]) <= STEPS
        assert set(one[3]) == {"MainThread"}
        assert "next-step" in readers
        assert one[0] == [3] * STEPS  # plan, agreement, figures
        # The plan of step 1 and that of step 2 are told in step 1; no plan is told in the last.
        assert counted[0] == 4
        assert counted[USED_BEFORE:] == [2] * (STEPS - USED_BEFORE - 1) + [1]
        assert again == [4, 1]


def broken(rank: int, ahead: int, bad: int) -> tuple[int, str, str]:
    """Steps that were trained before an item could not be read, the error, and its traceback."""
    engine = job(rank, Watched(bad), ahead)
    try:
        for _ in range(STEPS):
            engine.train_batch()
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        steps = engine.global_steps
        # Nothing stands still: a script that catches the error meets it again.
        with pytest.raises(type(error)):
            engine.train_batch()
        engine.destroy()
        return steps, f"{type(error).__name__}: {error}", text
    return STEPS, "", ""


@pytest.mark.drawn
def test_what_the_thread_cannot_read_is_raised_in_its_step() -> None:
    order = run_ranks(lambda rank: [small_engine(rank).sampler.batch(step) for step in range(STEPS)], 1)[0]
    step, bad = 4, next(i for i in order[4] if all(i not in drawn for drawn in order[:4]))
    for ahead in (0, 2):
        found = run_ranks(broken, 2, ahead, bad)
        assert {steps for steps, _, _ in found} == {step}
        own = [text for _, error, text in found if error == "OSError: the disk is gone"]
        others = [error for _, error, _ in found if f"making step {step + 1} ready failed on rank" in error]
        assert own
        assert len(own) + len(others) == 2
        assert all("__getitem__" in text and ("_make" in text) == (ahead > 0) for text in own)


@pytest.mark.drawn
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_a_text_reaches_all_ranks_beside_collectives(num_ranks: int) -> None:
    """A thread waits for texts of rank 0's, a long one too, while all ranks use the same group."""
    texts = ["", "plan", "é" * 40_000]

    def run(rank: int) -> list[str]:
        heard: list[str] = []
        telling = Telling(dist.group.WORLD, rank, num_ranks, tag=AHEAD_TAG)
        channel = Channel(dist.group.WORLD, rank, num_ranks)

        def listen() -> None:
            heard.extend(telling.tell(text if rank == 0 else None) for text in texts)

        thread = threading.Thread(target=listen)
        if rank != 0:
            thread.start()
        for number in range(20):
            assert channel.rows(torch.tensor([rank + number])).flatten().tolist() == [
                other + number for other in range(num_ranks)
            ]
            assert channel.tell(str(number)) == str(number)
            if number == 9 and rank == 0:
                thread.start()
        thread.join(30)
        return heard

    assert run_ranks(run, num_ranks) == [texts] * num_ranks
