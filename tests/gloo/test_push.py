"""Pulls and pushes of a step: one order, messages, types on the wire, what is held, and a trace of it."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hydra.engine.record import measured_spans
from ds_hydra.pipe.attention.backends import varlen_attention
from ds_hydra.pipe.contexts import Contexts
from ds_hydra.pipe.placement import place_pipeline
from ds_hydra.pipe.rows import Chunk, MicroBatch, Pack
from ds_hydra.pipe.runtime import StageRuntime
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.batches import Work as BatchWork
from ds_hydra.pipe.schedules.registry import training_slots
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.report.trace import trace_faults
from ds_hydra.testing import run_ranks, whole_gradients
from ds_hydra.watchdog import Activity
from ds_hydra.zero_hetero import masters as master_shards
from ds_hydra.zero_hetero.clock import HostClock, Stopwatch
from ds_hydra.zero_hetero.layout import even_layout, layout_of_intervals
from ds_hydra.zero_hetero.link import Link
from ds_hydra.zero_hetero.masters import MasterShards
from ds_hydra.zero_hetero.pushes import Pulls, PushBucket, Pushes
from ds_hydra.zero_hetero.transfer_plan import plan_transfer
from ds_hydra.zero_hetero.transport import (
    HostLane,
    InProcessTransport,
    Post,
    TorchTransport,
    Transport,
    Work,
    start_gather,
)
from tests.support.small_job import STRATEGIES, small_config, small_engine
from tests.support.strict import StrictTransport

# --- Pulls and pushes of a step: gradients leave in one order as the last backward passes them.
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


# --- The gradient's norm takes one message between all ranks, and that comes when a rank has all its sums.
class Watched:
    """torch.distributed as `grad_norm` sees it; keeps what it is asked for, and the rank's gradients at that moment."""

    def __init__(self, gradients: Callable[[], Tensor]) -> None:
        self.gradients = gradients
        self.seen: list[tuple[str, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        found = start_gather if name == "start_gather" else getattr(dist, name)
        if name == "get_world_size":
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen.append((name, self.gradients()))
            return found(*args, **kwargs)

        return call


def norms(rank: int) -> list[tuple[list[str], bool, float, float]]:
    """Of each step: the calls for the norm, whether gradients were final by then, the norm, and one made of them."""
    config = {**small_config(2), "gradient_clipping": 0.0}
    engine = small_engine(rank, config=config)
    masters = engine.crew.masters.trained
    steps = []

    def gradients() -> Tensor:
        return torch.cat(masters.grads)

    def put(grads: Sequence[Tensor] | None) -> None:
        MasterShards.put_grads(masters, grads)
        for grad in masters.grads:
            grad.fill_(7.0)  # what a push has not overwritten is seen

    masters.put_grads = put  # type: ignore[method-assign]
    for _ in STRATEGIES[2]:
        watched = Watched(gradients)
        master_shards.dist, master_shards.start_gather = watched, watched.start_gather  # type: ignore[assignment]
        engine.train_batch()
        master_shards.dist, master_shards.start_gather = dist, start_gather
        squares = torch.zeros(1, dtype=torch.float64) + gradients().double().square().sum()
        dist.all_reduce(squares)
        final = all(torch.equal(seen, gradients()) and not (seen == 7.0).any() for _, seen in watched.seen)
        steps.append(([name for name, _ in watched.seen], final, engine.last_step.grad_norm, float(squares.sqrt())))
    engine.destroy()
    return steps


def test_one_message_makes_the_norm_and_comes_after_all_sums() -> None:
    for steps in run_ranks(norms, 2, timeout=120):
        for calls, final, norm, expected in steps:
            assert calls == ["start_gather"]
            assert final
            assert abs(norm - expected) < 1e-9 * expected


# --- Gradients travel in the type that the config names: what it costs in bytes, and what 16 bit loses.
def step(rank: int, wire: str | None) -> tuple[dict[str, Tensor], int]:
    """Gradients of an FP32 step, whole on rank 0, and the bytes that this rank has pushed."""
    config = small_config(2, strategies=["2*tp1"]) | {"gradient_clipping": 0.0}
    engine = small_engine(rank, config=config if wire is None else {**config, "communication_data_type": wire})
    engine.train_batch()
    found = whole_gradients(engine), engine.last_step.push_bytes
    engine.destroy()
    return found


@pytest.mark.drawn
def test_the_wire_has_the_type_of_the_config() -> None:
    runs = {wire: run_ranks(step, 2, wire, timeout=120)[0] for wire in (None, "fp32", "bf16", "fp16")}
    assert runs["bf16"][1] == runs["fp16"][1] == runs["fp32"][1] // 2 > 0
    wide = runs["fp32"][0]
    assert all(torch.equal(wide[name], gradient) for name, gradient in runs[None][0].items())
    apart = {
        wire: max(float((runs[wire][0][name] - wide[name]).norm() / wide[name].norm()) for name in wide)
        for wire in ("bf16", "fp16")
    }
    assert 2.0**-12 < apart["bf16"] < 2.0**-8, apart
    assert 0 < apart["fp16"] < apart["bf16"], apart


# --- Tensors under way to other stages: a rank holds a few of them, however many micro-batches a step has.
STAGES, COUNT, EDGE = 4, 32, 3


class Part:
    """A range of layers that multiplies what it gets by a weight; no gradient is put off."""

    leaves: frozenset[Any] = frozenset()

    def __init__(self, place: StagePlace) -> None:
        self.place, self.weight = place, torch.full((EDGE,), 1.5, requires_grad=True)
        put_off = nullcontext()
        self.weight_gradients = mock.Mock(unfinished=frozenset(), of=lambda *_, **__: put_off)

    def forward(self, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        out = (torch.ones(1, 2, EDGE) if hidden is None else hidden) * self.weight
        return out.sum() if self.place.is_last else out

    def take_router_loss(self) -> None:
        """It has no routers."""

    def take_imbalances(self) -> tuple[float, ...]:
        """Nor experts."""
        return ()


class Counted(StageRuntime):
    """Notes after each turn's messages how many sends are open."""

    most = 0

    def _communicate(self, run: Any, messages: Any) -> None:
        super()._communicate(run, messages)
        self.most = max(self.most, len(run.sending))


@pytest.mark.drawn
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("schedule", ["v", "list", "zb-h1"])
def test_a_rank_holds_as_many_sent_tensors_as_two_for_each_stage(schedule: str, strict: bool) -> None:
    pipeline = place_pipeline(PipelineShape.parse(f"pp{STAGES}/{schedule}"), 0, 2 * STAGES)
    work = BatchWork(forward=10, backward=12, weight=8, kept=2, until_weight=1)
    works = (work,) * COUNT if schedule != "zb-h1" else ()
    known = Batches((-1,) * COUNT, pipeline.parts, works, room=2 * STAGES * pipeline.parts)

    def run(rank: int) -> tuple[int, float]:
        transport: Transport = TorchTransport()
        if strict:
            transport = StrictTransport(dist.new_group())
        parts: list[Any] = [Part(place) for place in StagePlace.all_of(pipeline, rank, lambda _: None)]
        runtime = Counted(
            parts, pipeline, rank, transport, [(EDGE, EDGE)] * pipeline.parts, torch.device("cpu"), torch.float32,
            activity=Activity(), watch=Stopwatch(None),
        )  # fmt: skip
        batches = [MicroBatch(Pack((2,)), torch.zeros(1, 2))] * COUNT
        runtime.run(training_slots(schedule, known, STAGES, rank), batches)
        return runtime.most, float(sum(part.weight.grad.sum() for part in parts))

    found = run_ranks(run, STAGES, timeout=60)
    expected = COUNT * 2 * EDGE * 1.5 ** (STAGES * pipeline.parts - 1)
    assert [total for _, total in found] == [pytest.approx(expected * pipeline.parts)] * STAGES
    assert max(most for most, _ in found) <= 2 * STAGES


# --- Ranks that share queries, of which some compute none of a slice: gradients of its keys are those of one
# process.
HEADS = 2
ROWS = (((4, 40), 0, 4), ((6,), 4, 10))  # lengths, and which tokens of a sequence of ten the first of them are


def gradients(rank: int, sp: int) -> list[torch.Tensor]:
    """Of the queries, keys and values of this rank's tokens, row by row."""
    if sp > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    contexts, leaves, losses = Contexts(10), list[torch.Tensor](), list[torch.Tensor]()
    generator = torch.Generator().manual_seed(0)
    for lengths, start, stop in ROWS:
        pack = Pack(lengths, sp_rank=rank, sp=sp, chunk=Chunk(start, stop, contexts))
        whole = [torch.randn(sum(lengths), HEADS, 4, dtype=torch.float64, generator=generator) for _ in range(4)]
        q, k, v, wanted = (x[slice(*pack.local)].clone() for x in whole)
        leaves += [x.requires_grad_() for x in (q, k, v)]
        losses.append((varlen_attention(q, k, v, pack, context=contexts.of("layer")) * wanted).sum())
    for loss in reversed(losses):
        loss.backward()  # type: ignore[no-untyped-call]
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def test_a_slice_whose_queries_others_compute() -> None:
    """Of the first row the last ranks compute queries of the sequence beside the slice alone."""
    (alone,) = run_ranks(gradients, 1, 1)
    shared = [torch.cat(parts) for parts in zip(*run_ranks(gradients, 3, 3), strict=True)]
    assert len(alone) == len(shared) == 6
    for one, other in zip(alone, shared, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-13)


# --- A traced step of a real run: what every rank did, in the order that was predicted, by the rules of a
# trace.
def job(rank: int, folder: str) -> list[float]:
    """Three steps, of which the second is traced."""
    engine: Any = small_engine(
        rank,
        strategies=["2*tp1", "pp2/v", "tp2"],
        steps_file=f"{folder}/steps.jsonl",
        trace={"steps": [2], "profiler": True},
    )
    losses = [float(engine.train_batch()) for _ in range(3)]
    engine.destroy()
    return losses


def computing(record: dict[str, Any], process: str) -> list[str]:
    """Forwards and backwards of a process, in order of time; weights' gradients may run together."""
    (pid,) = {e["pid"] for e in record["traceEvents"] if e["name"] == "process_name" and e["args"]["name"] == process}
    events = [e for e in record["traceEvents"] if e["pid"] == pid and e.get("cat") in ("forward", "backward")]
    names = [event["name"] for event in sorted(events, key=lambda event: event["ts"])]
    return [name for name in names if not name.startswith("W")]


def test_a_traced_step_is_written_with_what_was_predicted(tmp_path: Path) -> None:
    run_ranks(job, 2, str(tmp_path), timeout=240)
    assert sorted(path.name for path in tmp_path.glob("trace_*")) == ["trace_step2.json"]
    record = json.loads((tmp_path / "trace_step2.json").read_text())
    assert not trace_faults(record)
    for rank in range(2):
        measured = computing(record, f"rank {rank} measured")
        assert measured == computing(record, f"rank {rank} predicted")
        assert measured[0] == "F0"
        assert "F0'" in measured
        assert json.loads((tmp_path / f"profile_step2_rank{rank}.json").read_text())["traceEvents"]
    kinds = {(event["cat"], event["name"]) for event in record["traceEvents"] if event["ph"] == "X"}
    assert {("pull", "pull"), ("push", "push"), ("control", "schedule"), ("norm", "norm")} <= kinds


def test_a_trace_begins_with_the_step_s_first_pull() -> None:
    """The update of the step before comes first among the laps, and is left out."""
    now = iter(range(100))
    watch = Stopwatch(HostClock(lambda: float(next(now))))
    with watch.lap("optimizer"):
        pass
    with watch.lap("pull"):
        pass
    with watch.lap("run"), watch.lap("forward", microbatch=3):
        pass
    spans = measured_spans(watch.take(), 7)
    assert [(span.rank, span.name, span.start_s, span.stop_s) for span in spans] == [
        (7, "pull", 0.0, 1.0), (7, "schedule", 2.0, 5.0), (7, "F3", 3.0, 4.0)
    ]  # fmt: skip
