"""Losses and logits that a script reads before their step: drawn loops beside one process and DeepSpeed's own engine,
and who waits in vain is named."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.engine.rounds import _LEAST, LogitRun, Rounds
from ds_hydra.host import three_calls
from ds_hydra.host.three_calls import ThreeCalls
from ds_hydra.testing import float64_throughout, run_ranks
from tests.support.drawn_loops import (
    FAMILY,
    Loop,
    Order,
    always,
    engine_of,
    expected,
    orders,
    plain_engine,
    plain_loop,
    run_order,
    script,
)
from tests.support.ends import all_told, codes, ends, mark_fault
from tests.support.families import build_model, reference_model
from tests.support.small_job import collated, lines_of, shared_source
from tests.support.strict import Rules, strict_world


def compare(loop: Loop, folder: Path, run: Callable[..., Any] = script) -> list[Any]:
    with float64_throughout(reference_model(FAMILY, torch.float64)):
        told, parameters = expected(loop)
        with shared_source(build_model(FAMILY, torch.float64)):
            results = run_ranks(run, loop.ranks, loop, folder, timeout=120)
    for rank, (losses, own, _) in enumerate(results):
        assert losses == pytest.approx(told[rank], rel=1e-9), rank
        for name, value in parameters.items():
            assert torch.allclose(own[name], value, rtol=1e-9, atol=1e-9 * float(value.abs().max())), name
    return results


SEEDS = [pytest.param(seed, marks=pytest.mark.drawn if seed < 18 else pytest.mark.long) for seed in range(60)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_loop_trains_as_one_process(seed: int, tmp_path: Path) -> None:
    compare(Loop.of(seed), tmp_path)


def padded(rank: int, masks: bool) -> list[str]:
    """What is told where a loss is of all places, or of those that are tokens."""
    lines, loop = lines_of("ds_hydra.engine.rounds"), plain_loop(steps=2, accumulation=1)
    engine = engine_of(rank, loop, torch.float32)
    for step in range(2):
        batch = collated(loop.batch(step, rank, 0))
        of_places = engine(**batch).logits.exp().sum(-1)
        engine.backward((of_places * batch["attention_mask"] if masks else of_places).mean())
        engine.step()
    return [line for line in lines if "padding" in line]


@pytest.mark.drawn
@pytest.mark.parametrize("masks", [False, True])
def test_a_loss_of_padding_is_told_once(masks: bool) -> None:
    with shared_source(build_model(FAMILY, torch.float32)):
        assert [len(lines) for lines in run_ranks(padded, 2, masks)] == ([0, 0] if masks else [1, 1])


# --- Mutants of what a batch counts; drawn loops must find each.
def scaled() -> Any:
    counts = LogitRun.counts
    return mock.patch.object(LogitRun, "counts", lambda self, one: counts(self, one) * 1.0001)


def of_the_next_rank() -> Any:
    """Ranks hand what their batches count to each other."""
    counts = LogitRun.counts

    def others(self: Any, one: Any) -> Tensor:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own := counts(self, one))
        other = found[(dist.get_rank() + 1) % len(found)][: len(own)]
        return torch.nn.functional.pad(other, (0, 0, 0, len(own) - len(other)))

    return mock.patch.object(LogitRun, "counts", others)


def without_one_batch() -> Any:
    counts, left = LogitRun.counts, iter([1.0, 0.0])
    return mock.patch.object(LogitRun, "counts", lambda self, one: counts(self, one) * next(left, 1.0))


def factor_twice() -> Any:
    count = ThreeCalls._count
    return mock.patch.object(ThreeCalls, "_count", lambda self, entry, by: count(self, entry, by * by))


def factor_of_the_step_twice() -> Any:
    scale = Rounds._scale

    def squared(self: Any, said: Tensor) -> float | None:
        return None if (found := scale(self, said)) is None else found * float(said[:, _LEAST].min())

    return mock.patch.object(Rounds, "_scale", squared)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("mutant", "made"),
    [(scaled, "distilled"), (of_the_next_rank, "smoothed"), (without_one_batch, "rewards"), (factor_twice, "distilled"),
     (factor_twice, "clamp"), (factor_of_the_step_twice, "half")],
)  # fmt: skip
def test_what_a_batch_counts_wrongly_is_found(mutant: Any, made: str, tmp_path: Path) -> None:
    loop = always(plain_loop(steps=2, norm="batch", early=made == "half"), made)
    with mutant(), pytest.raises(AssertionError):
        compare(loop, tmp_path)


PLAIN = {"SGD": 1e-6, "AdamW": 1e-5}  # how far parameters may be apart, beside the largest of a tensor


@pytest.mark.drawn
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_drawn_loop_trains_as_with_deepspeed(seed: int, tmp_path: Path) -> None:
    """Under ZeRO 0, 1 and 2, in FP32."""
    loop = Loop.of(seed, steps=3, plain=True)
    stages = {"plain": lambda rank: script(rank, loop, tmp_path, plain_engine(rank, loop, seed % 3)),
              "ours": lambda rank: script(rank, loop, tmp_path, engine_of(rank, loop, torch.float32))}  # fmt: skip
    with shared_source(build_model(FAMILY, torch.float32)):
        plain, ours = (run_ranks(run, loop.ranks, timeout=120) for run in stages.values())
    for (losses, right, _), (found, own, _) in zip(plain, ours, strict=True):
        assert found == pytest.approx(losses, rel=PLAIN[loop.optimizer])
        for name, value in right.items():
            assert float((own[name] - value).abs().max() / value.abs().max()) < PLAIN[loop.optimizer], name


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("made", "norm", "twice"), [("told", "token", 0), ("half", "batch", 0), ("square", "token", 4)]
)
def test_only_what_counts_otherwise_than_it_ran_with_runs_twice(
    made: str, norm: str, twice: int, tmp_path: Path
) -> None:
    """Losses are read in the first step; half of a loss, that of the first step, is what later batches run with."""
    loop = always(plain_loop(norm=norm, early=norm == "batch"), made)
    for _, _, ran in compare(loop, tmp_path):
        assert ran == [ran[0], twice, twice, twice]


def counted_messages(rank: int, loop: Loop, losses: str) -> tuple[list[dict[str, int]], dict[str, Tensor]]:
    """Operations of torch.distributed in each step, and parameters."""
    engine, counts = engine_of(rank, loop, torch.float32, losses=losses), Counter[str]()
    names = ("all_gather", "all_gather_into_tensor", "all_reduce", "isend", "irecv", "batch_isend_irecv", "broadcast",
             "reduce_scatter_tensor", "send", "recv", "barrier", "all_to_all_single")  # fmt: skip
    for name in names:
        setattr(dist, name, count(getattr(dist, name), counts))
    found = []
    for step in range(1 + max(step for step, _ in loop.batches)):
        counts.clear()
        for number in range(len(loop.batches[step, rank])):
            engine.backward(engine(**collated(loop.batch(step, rank, number))).loss / 2)
            engine.step()
        found.append(dict(counts))
    return found, engine.fp32_state_dict()


def count(function: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[function.__name__] += 1
        return function(*args, **kwargs)

    return counting


def test_who_reads_nothing_early_has_the_same_bits_and_no_message_more_from_step_2_on() -> None:
    with shared_source(build_model(FAMILY, torch.float32)):
        auto, step = (run_ranks(counted_messages, 2, plain_loop(), losses) for losses in ("auto", "step"))
    for (messages, parameters), (fewer, same) in zip(auto, step, strict=True):
        assert messages[1:] == fewer[1:]
        assert sum(messages[0].values()) > sum(fewer[0].values()) > 10
        assert all(torch.equal(parameters[name], value) for name, value in same.items())


def in_vain(rank: int, folder: Path, when: int, first: str) -> None:
    """Rank 1 reads in a step, the other one waits in a barrier."""
    faults = {"frozen_seconds": 7.0}
    loop = plain_loop(accumulation=1)
    engine = engine_of(rank, loop, faults=faults, steps_file=str(folder / "steps.jsonl"))
    for step in range(3):
        loss = engine(**collated(loop.batch(step, rank, 0))).loss
        if step == when and rank == 1:
            mark_fault(folder)
            loss.item() if first == "read" else engine(**collated(loop.batch(step, rank, 0)))
        if step == when:
            dist.barrier()
        engine.backward(loss)
        engine.step()


@pytest.mark.parametrize(
    ("when", "first", "told"),
    [
        (2, "read", 'reads a loss before its step, for the first time in the job, at .*test_early_losses.py.*"early"'),
        (0, "batch", "computes a loss that may be read .*test_early_losses.py.*give all ranks as many batches"),
    ],
)
def test_who_waits_in_vain_is_named_within_ten_seconds(when: int, first: str, told: str) -> None:
    with shared_source(build_model(FAMILY, torch.float64)):
        found = ends(lambda rank, folder: in_vain(rank, folder, when, first), 2)
    assert codes(found) == [75, 75], all_told(found)
    assert re.search(f"rank 1 {told}", all_told(found), re.DOTALL), all_told(found)
    assert max(end.seconds for end in found) < 10


# --- Drawn orders of reads under NCCL's rules. Those that can go on run one after the other in one job, each as if the
# job began with it; one in which a rank must wait in vain has a job of its own.
RULES = [Rules(connect=True, lazy=True), Rules(blocking=True), Rules(one_queue=True, sleeps=1)]


def ordered(rank: int, number: int, rules: Rules, found: list[Order], place: Path | None = None) -> int:
    """How many of the orders came to their end."""
    modes = mock.patch.object(three_calls, "refuse_modes")  # the transport's own is none of a script
    with strict_world(rules), modes:
        loop = Loop(0, number, 2)
        engine = engine_of(rank, loop, torch.float32, faults={"frozen_seconds": 9.0}, timeout_seconds=100)
        begins = (lambda: None) if place is None else functools.partial(mark_fault, place, again=True)
        for order in found:
            run_order(rank, engine, order, begins)
        engine.destroy()
    return len(found)


def goes_on(number: int, first: int, count: int) -> None:
    found = list(orders(number, first, count, still=False))
    with shared_source(build_model(FAMILY, torch.float32)):
        assert run_ranks(ordered, number, number, RULES[first % 3], found, timeout=900) == [count] * number


def stands_still(number: int, first: int) -> None:
    found = list(orders(number, first, 1, still=True))
    with shared_source(build_model(FAMILY, torch.float32)):
        left = ends(lambda rank, place: ordered(rank, number, RULES[first % 3], found, place), number)
    assert codes(left) == [75] * number, all_told(left)
    assert re.search("reads a loss before its step|computes a loss that may be read", all_told(left)), all_told(left)
    assert max(end.seconds for end in left) < 10


@pytest.mark.drawn
@pytest.mark.parametrize("number", [2, 3])
def test_orders_of_reads_go_on_under_the_strict_transport(number: int) -> None:
    goes_on(number, 0, 5)


@pytest.mark.drawn
@pytest.mark.parametrize("first", range(3))
def test_an_order_of_reads_that_cannot_go_on_is_named(first: int) -> None:
    stands_still(2 + first % 2, 50 * first)


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 1900, 90))
def test_more_orders_of_reads_go_on_or_are_named(first: int) -> None:
    for number, most in ((2, 22), (3, 18)):
        goes_on(number, first, most)
        for more in range(5):
            stands_still(number, first + 97 * more)
