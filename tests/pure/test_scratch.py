"""Scratch memory: windows never meet, planned sizes are those of the links, and handing it out costs little."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.pipe.placement import Strategy
from ds_hydra.pipe.transfers import plan_transfers
from ds_hydra.step.strategy_runtime import pull_link, push_link
from ds_hydra.zero_hetero import scratch_plan
from ds_hydra.zero_hetero.collectives import MessageCollectives
from ds_hydra.zero_hetero.layout import ALIGNMENT
from ds_hydra.zero_hetero.scratch import Cuts, Scratch
from ds_hydra.zero_hetero.scratch_plan import Window, end_of, in_turn, side_by_side
from ds_hydra.zero_hetero.transport import InProcessTransport, Post
from ds_hydra.zero_hetero.twin_plan import TwinPull, TwinPush
from tests.pure.test_connections import large_strategies
from tests.support.fused_llama import llama_plan


def test_windows_by_example() -> None:
    assert in_turn((4, 4, 4, 2), 10) == (Window(0, 4, 0), Window(4, 8, 0), Window(0, 4, 1), Window(4, 6, 2))
    assert in_turn((3, 12, 3), 10) == (Window(0, 3, 0), Window(0, 12, 1), Window(0, 3, 2))  # 12 has it alone
    assert side_by_side([3, 0, 4]) == (Window(0, 3, 0), Window(3, 3, 0), Window(3, 7, 0))
    assert end_of(()) == 0


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40).map(tuple), st.integers(0, 200))
def test_windows_of_transfers_that_may_be_open_together_never_meet(sizes: tuple[int, ...], room: int) -> None:
    windows = in_turn(sizes, room)
    assert [window.stop - window.start for window in windows] == list(sizes)
    assert end_of(windows) <= max(room, *sizes)
    for index, window in enumerate(windows):
        assert window.after <= index, "it waits for earlier ones only"
        for other in windows[window.after : index]:
            assert window.stop <= other.start or other.stop <= window.start or window.start == window.stop
    if sum(sizes) <= room:
        assert not any(window.after for window in windows)


@settings(max_examples=20, deadline=None)
@given(
    large_strategies(), st.sampled_from([1, 4, 64]), st.sampled_from([1, 500, 1 << 18]), st.sampled_from([300, 1 << 24])
)
def test_what_is_planned_is_what_links_take(strategy: Strategy, node_size: int, large: int, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch_plan, "LARGE", large)
        patch.setattr(scratch_plan, "AT_ONCE", at_once)
        ranks = range(0, strategy.num_ranks, 1 + strategy.num_ranks // 5)
        transfers = plan_transfers(llama_plan(8, hidden=32, vocab=64), strategy, node_size)
        for pull, push in {id(one): one for one in transfers}.values():
            assert push is not None
            planned = scratch_plan.pull_scratch(pull.enter if isinstance(pull, TwinPull) else pull)
            for rank in ranks:
                transport = InProcessTransport(Post(), rank)
                world: Any = SimpleNamespace(
                    links=transport, collectives=MessageCollectives(transport, rank), lane=None
                )
                assert pull_link(pull, rank, world).pull_scratch == planned[rank]
                for grads, wire in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)):
                    if isinstance(push, TwinPush):
                        sizes = wire.itemsize, torch.float32.itemsize
                        counted = scratch_plan.twin_push_bytes(push, sizes, grads.itemsize)
                    else:
                        counted = scratch_plan.push_scratch(push, cast=grads != wire) * wire.itemsize
                    assert push_link(push, rank, world).push_bytes(grads, wire, torch.float32) == counted[rank]


def test_cuts_are_aligned_and_share_the_memory() -> None:
    cuts = Cuts([3, 64, 65])
    buffer = torch.zeros(cuts.numel + 7)
    parts = cuts.of(buffer)
    assert [part.numel() for part in parts] == [3, 64, 65]
    for number, part in enumerate(parts):
        part.fill_(number + 1)
        assert (part.data_ptr() - buffer.data_ptr()) % (4 * ALIGNMENT) == 0
    assert buffer.count_nonzero() == 3 + 64 + 65
    assert Cuts([]).of(buffer) == ()


def test_memory_that_only_another_strategy_needed_is_given_back() -> None:
    scratch = Scratch("cpu", 4096)
    scratch.at(Window(0, 4096, 0), torch.float32).fill_(1.0)
    scratch.fit(256)
    assert scratch.num_bytes == 256
    assert scratch.at(Window(128, 256, 0), torch.bfloat16).shape == (64,)
    block = scratch.at(Window(0, 256, 0), torch.uint8)
    scratch.fit(256)
    assert scratch.at(Window(0, 256, 0), torch.uint8).data_ptr() == block.data_ptr(), "nothing is allocated anew"
    with pytest.raises(AssertionError, match="beyond the 256 bytes"):
        scratch.at(Window(0, 512, 0), torch.uint8)
