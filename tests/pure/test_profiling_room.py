"""Profiling times what training runs, on devices too, and goes on where memory ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from ds_hydra.commands.profile_request import Request
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.profiling import link_timer, step_timer, survey
from ds_hydra.profiling.entry import SchemeEntry
from ds_hydra.profiling.ladder import make_ladder
from ds_hydra.profiling.link_timer import SIZES, message_sizes
from ds_hydra.profiling.links import Links
from ds_hydra.profiling.local_group import LocalGroup
from ds_hydra.profiling.stage_timer import Timing
from ds_hydra.profiling.step_timer import step_costs
from ds_hydra.profiling.survey import RepeatBudget, Survey
from ds_hydra.profiling.within_memory import within_memory
from ds_hydra.zero_hetero.clock import HostClock
from tests.support.fake_device import FakeDevice, FakeDeviceClock, Queued

CPU = torch.device("cpu")
MOST_ELEMENTS = 4096
FULL = torch.OutOfMemoryError("device out of memory")


def stand_in(clock_of: Callable[[FakeDevice], Any]) -> float:
    """Seconds of the copies of a stand-in for four ranks, on a device that takes a second for each."""
    device = FakeDevice()
    group = LocalGroup(0, 4, clock_of(device))
    with Queued(device, 1.0, lambda: ""):
        group.allgather([[torch.empty(2) for _ in range(4)]], [torch.ones(2)])
    device.wait()
    return group.take().seconds


def test_a_stand_ins_copies_are_timed_on_the_device() -> None:
    assert stand_in(FakeDeviceClock) == pytest.approx(4.0 + 5.0, abs=5.0)  # four copies, and what they allocate
    assert stand_in(FakeDeviceClock) >= 4.0
    assert stand_in(lambda device: HostClock(lambda: device.host_s)) < 1e-3


def test_messages_up_to_the_jobs_largest() -> None:
    assert message_sizes(1000) == SIZES
    assert message_sizes(300_000_000) == (*SIZES, 1 << 25, 1 << 27, 300_000_000)


def test_the_jobs_shard_and_largest_message() -> None:
    buckets = [SimpleNamespace(numel=n, trainable=t) for n, t in ((4000, True), (600, True), (9000, False))]
    source = SimpleNamespace(plan=SimpleNamespace(buckets=buckets, num_layers=4), width=lambda layer: 16)
    of: dict[str, Any] = dict.fromkeys(Request.__dataclass_fields__)
    of |= {"source": source, "num_gpus": 2, "dtype": torch.bfloat16}
    short = Request(**{**of, "rungs": make_ladder(2, 16, 3)})
    assert short.shard_elements == 2300
    assert short.largest_message == 2 * 9000 // 2  # half of the largest bucket, to a rank that holds all of it
    assert Request(**{**of, "rungs": make_ladder(2, 4096, 3)}).largest_message == 2 * 8192 * 16


class CountingOptimizer(torch.optim.SGD):
    """Tells how many elements it was made for; a device takes 2 ms of each of its operations."""

    sizes: ClassVar[list[int]] = []

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, lr=1.0)
        self.sizes.append(self.param_groups[0]["params"][0].numel())


def test_the_update_is_timed_on_the_device_at_the_shards_size() -> None:
    device = FakeDevice()
    CountingOptimizer.sizes.clear()
    with Queued(device, 1e-3, lambda: "update") as queue:
        costs = step_costs(
            CPU, Links(()), elements=5000, make_optimizer=CountingOptimizer, clock=FakeDeviceClock(device)
        )
    assert CountingOptimizer.sizes == [5000]
    assert costs["update_elements"] == 5000
    # Norm, clipping and update are some operations of 1 ms each: far more than a launch, far less than all of them.
    assert 3e-3 < 1e-3 * costs["update_ms_per_element"] * 5000 < queue.launched["update"] / 5


def test_the_update_of_a_shard_that_does_not_fit_is_timed_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def full_like(parameter: torch.Tensor, value: float) -> torch.Tensor:
        tried.append(parameter.numel())
        if parameter.numel() > MOST_ELEMENTS // 3:
            raise FULL
        return torch.empty_like(parameter).fill_(value)

    monkeypatch.setattr(step_timer, "MOST_ELEMENTS", MOST_ELEMENTS)
    monkeypatch.setattr(torch, "full_like", full_like)
    costs = step_costs(CPU, Links(()), elements=4 * MOST_ELEMENTS, make_optimizer=CountingOptimizer)
    assert tried == [MOST_ELEMENTS, MOST_ELEMENTS // 2, MOST_ELEMENTS // 4]
    assert costs["update_elements"] == MOST_ELEMENTS // 4


class SmallDevice:
    """A stage timer with memory for so many tokens; a token takes 2 ms."""

    most_tokens = 0
    block_tokens = None
    scheme = ParallelScheme()
    place = SimpleNamespace(stage=SimpleNamespace(first_layer=0, last_layer=4))
    source = SimpleNamespace(plan=SimpleNamespace(no_slices=""))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not self.most_tokens:
            raise FULL

    def time(self, lengths: Sequence[int], *, warm_up: int = 1) -> Timing:
        if sum(lengths) > self.most_tokens:
            raise FULL
        return Timing(2.0 * sum(lengths), ())

    def time_parts(self, lengths: Sequence[int], start: int = 0) -> tuple[Timing, ...]:
        """It keeps half as much again as in one."""
        if 1.5 * (sum(lengths) + start) > self.most_tokens:
            raise FULL
        return tuple(Timing(ms * sum(lengths), ()) for ms in (0.6, 0.8, 0.6))


def measured(most_tokens: int, monkeypatch: pytest.MonkeyPatch) -> SchemeEntry | None:
    monkeypatch.setattr(survey, "StageTimer", SmallDevice)
    monkeypatch.setattr(SmallDevice, "most_tokens", most_tokens)
    source: Any = SimpleNamespace(plan=SimpleNamespace(num_layers=4))
    rungs = make_ladder(16, 1024, 5)
    return Survey(source, CPU, torch.float32, Links(()), rungs, budget=RepeatBudget(0.0, 2, 2)).measure(
        ParallelScheme()
    )


def test_the_ladder_stops_where_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = measured(400, monkeypatch)
    assert entry is not None
    (stage,) = entry.stages
    assert max(sum(point.lengths) for point in stage.points) <= 400
    assert stage.no_room_tokens is not None
    assert 400 < stage.no_room_tokens <= 1024
    assert entry.record()["stages"][0]["no_room_tokens"] == stage.no_room_tokens
    assert entry.cost(10_000).max_length == stage.no_room_tokens - 1
    assert entry.cost(100).max_length == 100
    assert 0 < max(sum(point.lengths) + point.start for point in stage.split_points) <= 400 / 1.5
    assert stage.split is not None
    assert stage.split.forward.b == pytest.approx(0.3, abs=5e-3)
    whole = measured(10_000, monkeypatch)
    assert whole is not None
    assert max(sum(point.lengths) + point.start for point in whole.stages[0].split_points) > 1000
    assert whole.stages[0].no_room_tokens is None
    assert whole.cost(10_000).max_length == 10_000


@pytest.mark.parametrize("most_tokens", [0, 16])
def test_a_scheme_without_room_for_two_lengths_is_left_out(most_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(most_tokens, monkeypatch) is None


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    def broken() -> None:
        raise RuntimeError("a shape is wrong")

    with pytest.raises(RuntimeError, match="shape is wrong"):
        within_memory(broken)
    assert within_memory(lambda: 7) == 7


def test_links_go_as_far_as_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a group of one rank, with the collectives that such a group knows."""
    sizes: list[int] = []

    def prepare(numel: int) -> Callable[[], object]:
        if 4 * numel > 1 << 23:
            raise FULL
        sizes.append(4 * numel)
        return lambda: None

    monkeypatch.setattr(link_timer, "_calls", lambda *args: {"all_reduce": prepare})
    alone = SimpleNamespace(get_rank=lambda: 0, all_reduce=lambda *a, **k: None, barrier=lambda group: None,
                            ReduceOp=torch.distributed.ReduceOp)  # fmt: skip
    monkeypatch.setattr(link_timer, "dist", alone)
    group: Any = None
    (figure,) = link_timer.time_links([0, 1], group, CPU, sizes=message_sizes(1 << 27), repeats=2)
    assert sizes == list(SIZES)
    assert figure.largest_bytes == 1 << 23
