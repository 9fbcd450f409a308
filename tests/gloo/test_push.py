"""Pulls and pushes of a step: gradients leave in one order as the last backward passes them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.layout import even_layout, layout_of_intervals
from ds_hydra.zero_hetero.link import Link
from ds_hydra.zero_hetero.pushes import Pulls, PushBucket, Pushes
from ds_hydra.zero_hetero.transfer_plan import plan_transfer
from ds_hydra.zero_hetero.transport import HostLane, InProcessTransport, Post, TorchTransport, Transport, Work

WIDTH = 6
NUM_LAYERS = 4
NUMEL = WIDTH * WIDTH + WIDTH


class Recorder:
    """A transport that notes which tags it starts."""

    serial = False

    def __init__(self, inner: Transport):
        self.inner = inner
        self.tags: list[int] = []

    def exchange(self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], tag: int = 0) -> Work:
        self.tags.append(tag)
        return self.inner.exchange(sends, recvs, tag)


class Stack:
    """Some layers of an MLP whose parameters and gradients are views of one flat buffer per layer."""

    def __init__(self, layers: list[int], dtype: torch.dtype):
        self.layers = layers
        self.buffers = [torch.zeros(NUMEL if layer in layers else 0, dtype=dtype) for layer in range(NUM_LAYERS)]
        self.grads = [torch.zeros_like(buffer) for buffer in self.buffers]
        self.params: dict[int, tuple[nn.Parameter, ...]] = dict.fromkeys(range(NUM_LAYERS), ())
        for layer in layers:
            weight, bias = (nn.Parameter(part) for part in self.split(self.buffers[layer]))
            weight.grad, bias.grad = self.split(self.grads[layer])
            self.params[layer] = (weight, bias)

    @staticmethod
    def split(flat: Tensor) -> tuple[Tensor, Tensor]:
        return flat[: WIDTH * WIDTH].view(WIDTH, WIDTH), flat[WIDTH * WIDTH :]

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            weight, bias = self.params[layer]
            x = torch.tanh(x @ weight + bias)
        return x


def initial(layer: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(layer)) * 0.5


def batch(index: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 + index))


def layers_of(rank: int) -> list[int]:
    """Ranks 0 and 1 are replicas of everything; 2 and 3 the two stages of a third, without batches of their own."""
    return {0: [0, 1, 2, 3], 1: [0, 1, 2, 3], 2: [0, 1], 3: [2, 3]}[rank]


def one_step(rank: int, room: int | None = None) -> tuple[list[int], list[int], list[Tensor], int]:
    """Pull, run 2 (rank 0) or 1 (rank 1) micro-batches, push; tags in order, summed gradients, early pushes.

    `room` as in `Pushes`.
    """
    stack = Stack(layers_of(rank), torch.float32)
    masters = even_layout(NUMEL, 4)
    start, stop = ((p.start, p.stop) for p in masters.pieces[rank]).__next__()
    shards = [initial(layer)[start:stop].clone() for layer in range(NUM_LAYERS)]
    summed = [torch.full((stop - start,), 7.0) for _ in range(NUM_LAYERS)]
    pull_transport, push_transport = Recorder(TorchTransport()), Recorder(TorchTransport())
    plans = [
        plan_transfer(masters, layout_of_intervals(NUMEL, [(0, NUMEL * (b in layers_of(r))) for r in range(4)]))
        for b in range(NUM_LAYERS)
    ]
    pulls = Pulls([Link(plan, rank, pull_transport) for plan in plans], shards, stack.buffers)
    pulls.start()
    for bucket in range(NUM_LAYERS):
        pulls.wait(bucket)
    pulls.finish()
    pushes = Pushes(
        [
            PushBucket(Link(plan.transposed(), rank, push_transport), stack.params[b], stack.grads[b], summed[b])
            for b, plan in enumerate(plans)
        ],
        first_tag=10,
        room=room,
    )
    batches = {0: [0, 1], 1: [2], 2: [], 3: []}[rank]
    for index, number in enumerate(batches):
        if index == len(batches) - 1:
            assert push_transport.tags == []  # gradients are not final before
            pushes.arm()
        stack(batch(number)).square().sum().backward()
    early = len(push_transport.tags)
    pushes.finish()
    return pull_transport.tags, push_transport.tags, summed, early


def test_step_over_replicas_and_stages() -> None:
    results = run_ranks(one_step, 4)
    reference = Stack([0, 1, 2, 3], torch.float32)
    for layer in range(NUM_LAYERS):
        reference.buffers[layer].copy_(initial(layer))
    for index in range(3):
        reference(batch(index)).square().sum().backward()
    for layer in range(NUM_LAYERS):
        summed = torch.cat([result[2][layer] for result in results])
        torch.testing.assert_close(summed, reference.grads[layer], rtol=1e-6, atol=1e-6)
    assert [result[0] for result in results] == [[0, 1, 2, 3]] * 4
    assert [result[1] for result in results] == [[13, 12, 11, 10]] * 4
    assert [result[3] for result in results] == [4, 4, 0, 0]  # all had left when the last backward was over
    again = run_ranks(one_step, 4)
    assert all(torch.equal(a, b) for r, s in zip(results, again, strict=True) for a, b in zip(r[2], s[2], strict=True))


def test_with_room_for_one_push_the_others_leave_later_and_give_the_same_bits() -> None:
    wide, narrow = run_ranks(one_step, 4), run_ranks(one_step, 4, 1)
    for one, other in zip(wide, narrow, strict=True):
        assert one[:2] == other[:2]  # the same order on all ranks
        assert all(torch.equal(a, b) for a, b in zip(one[2], other[2], strict=True))
    assert [result[3] for result in narrow] == [1, 1, 0, 0]  # on a host nobody waits for memory within a backward


def pushes_of_two(early: bool) -> tuple[list[int], int, int]:
    """Rank 0 of two replicas runs its last backward with room for one push, rank 1 has started its own before.

    Tags that left within the backward, bytes of scratch memory, bytes that all pushes together would take.
    """
    post, stacks = Post(), [Stack([0, 1, 2, 3], torch.float32) for _ in range(2)]
    plan = plan_transfer(even_layout(NUMEL, 2), layout_of_intervals(NUMEL, [(0, NUMEL)] * 2)).transposed()
    transports = [Recorder(InProcessTransport(post, rank)) for rank in range(2)]
    masters = [[torch.empty(NUMEL // 2) for _ in range(NUM_LAYERS)] for _ in range(2)]
    one, other = (
        Pushes(
            [
                PushBucket(Link(plan, rank, transports[rank]), stack.params[b], stack.grads[b], masters[rank][b])
                for b in range(NUM_LAYERS)
            ],
            lane=HostLane(early=early),
            room=room,
        )
        for rank, (stack, room) in enumerate(zip(stacks, (1, None), strict=True))
    )
    other._unready = [set() for _ in other.buckets]
    other._issue_ready()
    one.arm()
    stacks[0](batch(0)).square().sum().backward()
    return transports[0].tags, one.scratch_bytes, other.scratch_bytes


def test_where_a_push_leaves_that_lacks_memory_follows_from_the_program_alone() -> None:
    """On a device each leaves in its own hook; on a host it does in the end, though the one before is over."""
    tags, scratch, whole = pushes_of_two(early=True)
    assert tags == [3, 2, 1, 0]
    assert NUM_LAYERS * scratch == whole
    assert pushes_of_two(early=False)[0] == [3]


@pytest.mark.parametrize(
    ("early", "room", "order"),
    [(True, None, "3 2 +3 1 +2 0 +1 | +0"), (True, 1, "3 2 +3 1 +2 0 +1 | +0"), (False, None, "3 2 1 0 | +3 +2 +1 +0")],
)
def test_sums_are_told_at_the_same_places_whatever_memory_there_is(early: bool, room: int | None, order: str) -> None:
    """One behind the pushes on a device, so that the network has the next one; at the end on a host."""
    stack = Stack([0, 1, 2, 3], torch.float32)
    plan = plan_transfer(even_layout(NUMEL, 1), layout_of_intervals(NUMEL, [(0, NUMEL)])).transposed()
    events: list[str] = []

    class Noted(Link):
        def push(self, src: Tensor, dst: Tensor, *, tag: int = 0, **how: Any) -> Any:
            events.append(str(tag))
            return super().push(src, dst, tag=tag, **how)

    sums = [torch.full((NUMEL,), float("nan")) for _ in range(NUM_LAYERS)]
    link = Noted(plan, 0, TorchTransport())
    pushes = Pushes(
        [PushBucket(link, stack.params[b], stack.grads[b], sums[b]) for b in range(NUM_LAYERS)],
        lane=HostLane(early=early),
        room=room,
    )

    def summed(index: int) -> None:
        assert torch.equal(sums[index], stack.grads[index])
        events.append(f"+{index}")

    pushes.fill(sums, summed)
    pushes.arm()
    stack(batch(0)).square().sum().backward()
    events.append("|")
    pushes.finish()
    assert " ".join(events) == order


def recorded_pushes() -> tuple[Stack, Recorder, list[Tensor], Pushes]:
    """One rank's pushes to itself: layers, what is sent when, and where sums arrive."""
    stack = Stack([0, 1, 2, 3], torch.float32)
    plan = plan_transfer(even_layout(NUMEL, 1), layout_of_intervals(NUMEL, [(0, NUMEL)])).transposed()
    transport = Recorder(TorchTransport())
    summed = [torch.empty(NUMEL) for _ in range(NUM_LAYERS)]
    pushes = Pushes(
        [PushBucket(Link(plan, 0, transport), stack.params[b], stack.grads[b], summed[b]) for b in range(NUM_LAYERS)]
    )
    return stack, transport, summed, pushes


def test_a_gradient_that_waits_keeps_its_push_until_it_is_final() -> None:
    stack, transport, summed, pushes = recorded_pushes()
    stack(batch(0)).square().sum().backward()
    pushes.final(stack.params[3][0])  # not armed: more may come
    assert transport.tags == []
    pushes.arm(waiting=[stack.params[2][0], stack.params[1][0], stack.params[1][1]])
    assert transport.tags == [3]
    pushes.final(stack.params[1][0])
    assert transport.tags == [3]
    stack.grads[2][0] += 5.0  # what it has waited for
    pushes.final(stack.params[2][0])
    assert transport.tags == [3, 2]
    pushes.final(stack.params[1][1])
    assert transport.tags == [3, 2, 1, 0]
    pushes.finish()
    assert all(torch.equal(mine, sent) for mine, sent in zip(stack.grads, summed, strict=True))


def test_pushes_leave_while_the_backward_runs_and_wait_for_higher_buckets() -> None:
    stack, transport, summed, pushes = recorded_pushes()
    seen: list[tuple[int, list[int]]] = []
    for layer in range(NUM_LAYERS):
        stack.params[layer][0].register_hook(lambda _, layer=layer: seen.append((layer, list(transport.tags))))
    pushes.arm()
    stack(batch(0)).square().sum().backward()
    for layer, tags in seen:  # a layer's gradients arrive when those above it have left
        assert tags == [b for b in (3, 2, 1, 0) if b > layer]
    with pytest.raises(RuntimeError, match="armed twice"):
        pushes.arm()
    pushes.finish()
    # A last backward that misses layer 3 holds back the others: the order is the same on all ranks.
    transport.tags.clear()
    pushes.arm()
    stack.layers = [0, 1, 2]
    stack(batch(1)).square().sum().backward()
    assert transport.tags == []
    pushes.finish()
    assert transport.tags == [3, 2, 1, 0]
    assert all(torch.equal(a, b) for a, b in zip(summed, stack.grads, strict=True))


def test_a_later_phase_adds_to_what_the_masters_hold() -> None:
    stack = Stack([0, 1, 2, 3], torch.float32)
    plan = plan_transfer(even_layout(NUMEL, 1), layout_of_intervals(NUMEL, [(0, NUMEL)])).transposed()
    masters = [torch.full((NUMEL,), 9.0) for _ in range(NUM_LAYERS)]
    for layer, buffer in enumerate(stack.buffers):
        buffer.copy_(initial(layer))
    pushes = Pushes(
        [PushBucket(Link(plan, 0, TorchTransport()), stack.params[b], stack.grads[b], masters[b]) for b in range(4)]
    )
    phases: list[list[Tensor]] = []
    for phase in range(3):
        for grad in stack.grads:
            grad.zero_()
        if phase < 2:  # in the third phase this rank has nothing to run
            pushes.arm(accumulate=phase > 0)
            stack(batch(phase)).square().sum().backward()
        pushes.finish(accumulate=phase > 0)
        phases.append([grad.clone() for grad in stack.grads])
    assert all(torch.equal(total, a + b + c) for total, a, b, c in zip(masters, *phases, strict=True))
    assert not any(torch.equal(total, b) for total, b in zip(masters, phases[1], strict=True))
    pushes.arm()
    with pytest.raises(RuntimeError, match="accumulate=False but finish with accumulate=True"):
        pushes.finish(accumulate=True)


def test_pushes_that_are_dropped_leave_nothing_behind() -> None:
    stack = Stack([0, 1, 2, 3], torch.float32)
    plan = plan_transfer(even_layout(NUMEL, 1), layout_of_intervals(NUMEL, [(0, NUMEL)])).transposed()
    buckets = [
        PushBucket(Link(plan, 0, TorchTransport()), stack.params[b], stack.grads[b], torch.empty(NUMEL))
        for b in range(4)
    ]
    pushes = Pushes(buckets)
    stack(batch(0)).square().sum().backward()
    left: list[weakref.ref[Any]] = [weakref.ref(pushes), weakref.ref(stack.params[0][0])]
    del pushes
    stack(batch(0)).square().sum().backward()  # hooks without an owner do nothing
    del buckets, stack
    gc.collect()
    assert [reference() for reference in left] == [None, None]


def test_pull_casts_once_and_keeps_its_buffers() -> None:
    def body(rank: int) -> list[Tensor]:
        masters = even_layout(10, 2)
        shards = [torch.arange(5) + 5.0 * rank + 1 / 3, torch.arange(5) + 5.0 * rank]
        buffers = [torch.zeros(10, dtype=torch.bfloat16), torch.zeros(10)]
        plan = plan_transfer(masters, layout_of_intervals(10, [(0, 10)] * 2))
        pulls = Pulls([Link(plan, rank, TorchTransport()) for _ in buffers], shards, buffers, first_tag=4)
        for _ in range(2):
            buffers[1].fill_(-1)
            pulls.start()
            with pytest.raises(RuntimeError, match=r"\[0, 1\] are still under way"):
                pulls.start()
            pulls.wait(1)
            pulls.wait(1)
            assert torch.equal(buffers[1], torch.arange(10.0))  # complete before finish
            pulls.finish()
        return buffers

    for low, full in run_ranks(body, 2):
        assert torch.equal(low, (torch.arange(10) + 1 / 3).bfloat16())
        assert torch.equal(full, torch.arange(10.0))
