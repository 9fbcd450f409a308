"""Messages around a step: hidden pulls, when pushes start, where sums lie, scratch memory, exchanges over ports."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.model_plan import ModelPlan, gradient_places, plan_transfers, push_order, twins_of
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.pipe.schedules.actions import Action, Slot, backward_of_first_push, last_weight_gradient, slots_from_text
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import evaluation_slots, training_slots
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.plan.step_plan import Phase, StepPlan
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.pipelines import longest_outside, with_hidden_pulls
from ds_hydra.simulate.links import LinkModel, Parcels, Port, Routes, Speed, Wires
from ds_hydra.step.strategy_runtime import pull_link, push_link
from ds_hydra.zero_hetero import scratch_plan
from ds_hydra.zero_hetero.contributions import Place, check_places, places_of_sums
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import ALIGNMENT, even_layout, layout_of_intervals
from ds_hydra.zero_hetero.link import Cuts, Scratch
from ds_hydra.zero_hetero.scratch_plan import Window, end_of, in_turn, side_by_side
from ds_hydra.zero_hetero.transfer_plan import SliceColumns, TransferPlan, plan_transfer
from ds_hydra.zero_hetero.transport import InProcessTransport, MessageCollectives, Post
from ds_hydra.zero_hetero.twin_plan import TwinPull, TwinPush
from tests.pure.test_strategy import large_strategies
from tests.support.emulated_job import square_model
from tests.support.planner_cases import fused_llama_plan
from tests.support.schedule_cases import random_works

# --- Plans of steps whose pulls a light first micro-batch does not hide.
TABLE = CostTable((
    SchemeCost(ParallelScheme(2, 1), a=0.0, b=0.5, c=1.0, max_length=1000, util_length=100),
    SchemeCost(ParallelScheme(1, 1), a=0.0, b=1.0, c=1.0, max_length=400, util_length=50),
))  # fmt: skip
STRATEGIES = tuple(map(StrategyShape.parse, ("tp2 + 2*tp1", "2*tp2")))
PULLS_MS = 60.0


def taken_ms(plan: StepPlan) -> float:
    """What a step takes whose pulls a pipeline's first forward hides, and nothing else."""
    taken = []
    for pipeline in plan.pipelines:
        loads = [TABLE[pipeline.shape].load_ms(batch.lengths) for batch in pipeline.microbatches]
        taken.append(sum(loads) + max(0.0, PULLS_MS - loads[0] / 3.0) if loads else PULLS_MS)
    return max(taken)


def planner(**more: Any) -> Planner:
    options = PlannerOptions(kernels="compiled", highs="off")
    return Planner(TABLE, STRATEGIES, options, **more)


# One sequence fills a row of tp2, and beside it the search runs a light micro-batch.
LENGTHS = [1000, *([10] * 105)]


def test_a_light_first_micro_batch_gives_its_sequences_away() -> None:
    plain, simulated = (planner(step_ms=ms).plan(0, range(106), LENGTHS) for ms in (None, taken_ms))
    assert taken_ms(plain) > 1.04 * taken_ms(simulated)
    assert simulated.step_ms == taken_ms(simulated)


def test_no_more_than_usual_moves_nothing() -> None:
    usual = planner(step_ms=lambda plan: plan.predicted_ms).plan(0, range(106), LENGTHS)
    assert usual.phases == planner().plan(0, range(106), LENGTHS).phases
    one_pipeline = replace(usual, phases=(Phase(usual.pipelines[:1]),))
    assert with_hidden_pulls(one_pipeline, TABLE, 2.0 * usual.predicted_ms) is None
    assert (
        with_hidden_pulls(replace(usual, phases=(*usual.phases, *usual.phases)), TABLE, 2.0 * usual.predicted_ms)
        is None
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=20, max_size=60), st.integers(900, 1000))
def test_what_is_moved_stays_a_plan(short: list[int], long: int) -> None:
    lengths = [long, *short]
    plan = planner().plan(0, range(len(lengths)), lengths)
    found = with_hidden_pulls(plan, TABLE, taken_ms(plan))
    event(f"moved: {found is not None}")
    if found is not None:
        validate_plan(found, TABLE, 4)  # every sequence once, in rows that hold it, in the times that it says
        assert found.phases != plan.phases


def test_the_heaviest_micro_batches_run_first_and_last() -> None:
    for count, order in ((1, [1.0]), (2, [1.0, 2.0]), (5, [4.0, 1.0, 2.0, 3.0, 5.0])):
        loaded: list[tuple[float, tuple[int, ...]]] = [(float(load), (load,)) for load in range(count, 0, -1)]
        assert [load for load, _ in longest_outside(loaded)] == order


# --- The order in which all ranks start their pushes follows from the strategy: stages push side by side.
def order_of(text: str, plan: ModelPlan) -> tuple[int, ...]:
    shape = StrategyShape.parse(text)
    return push_order(plan, place_strategy(shape, shape.num_ranks, plan.num_layers))


@pytest.mark.parametrize(
    ("strategy", "order"),
    [
        ("2*tp1", (5, 4, 3, 2, 1, 0)),
        # Embedding and layers 0 and 1 are buckets 0 to 2 of the first stage, layers 2 and 3 and the head 3 to 5.
        ("2*pp2", (5, 2, 4, 1, 3, 0)),
        # Two stages are done before the first, with buckets 0 and 1, begins its last backward; the second is done then.
        ("pp4", (5, 4, 3, 1, 2, 0)),
        # Where weights' gradients are put off, all four stages end together.
        ("pp4/list", (5, 1, 4, 3, 2, 0)),
        # Both stages of one hold a third of what the other pipeline holds: whoever comes last to a bucket decides.
        ("tp2 + pp2", (5, 4, 2, 1, 3, 0)),
        # The parts of a V: buckets 0, 1, 4 and 5 of the first rank, 2 and 3 of the other.
        ("2*pp2/v", (5, 4, 3, 1, 2, 0)),
    ],
)
def test_stages_push_side_by_side(strategy: str, order: tuple[int, ...]) -> None:
    assert order_of(strategy, square_model(4)) == order


@pytest.mark.parametrize("strategy", ["tp4 + 2*pp2 + pp4/v", "3*tp1 + pp5", "sp2pp3 + tp2"])
def test_every_bucket_leaves_once_and_those_of_a_stage_from_last_to_first(strategy: str) -> None:
    plan = square_model(8)
    shape = StrategyShape.parse(strategy)
    placed = place_strategy(shape, shape.num_ranks, plan.num_layers)
    order = push_order(plan, placed)
    assert sorted(order) == list(range(len(plan.buckets)))
    if all(stage.num_layers == 8 for pipeline in placed.pipelines for stage in pipeline.stages):
        assert list(order) == sorted(order, reverse=True)


# --- When a stage starts its first push: never while a message of its pipeline is left, and as early as that
# allows.
MET_BY = {
    "send_activation": ("recv_activation", 1),
    "recv_activation": ("send_activation", -1),
    "send_gradient": ("recv_gradient", -1),
    "recv_gradient": ("send_gradient", 1),
}
FirstPush = Callable[[Sequence[Slot]], Action | None]


def events(stage: int, slots: Sequence[Slot], first_push: Action | None) -> list[frozenset[tuple[int, Action]] | None]:
    """What holds up a stage's host, in order: messages, each named by its receiver, and its first push, None.

    Every exchange holds it up until the other end has come, the push until all stages have.
    """
    found: list[frozenset[tuple[int, Action]] | None] = []
    for slot in slots:
        messages = []
        for action in slot:
            if action.kind.startswith("recv"):
                messages.append((stage, action))
            elif action.kind.startswith("send"):
                kind, side = MET_BY[action.kind]
                there = stage + (-side if action.part else side)
                messages.append((there, Action(kind, action.microbatch, action.part)))  # type: ignore[arg-type]
        found += [frozenset(messages)] if messages else []
        found += [None] if first_push is not None and first_push in slot else []
    return found if None in found else [*found, None]


def all_end(stages: Sequence[Sequence[Slot]], first_push: FirstPush) -> bool:
    """Whether all stages of a pipeline come to their ends although each exchange and push blocks."""
    left = [events(stage, slots, first_push(slots)) for stage, slots in enumerate(stages)]
    while any(left):
        heads = [row[0] if row else frozenset() for row in left]
        if all(head is None for head in heads):
            left = [row[1:] for row in left]
            continue
        # An exchange is over when its messages stand at the head of two stages.
        moving = [
            stage
            for stage, head in enumerate(heads)
            if head and all(sum(message in (other or ()) for other in heads) == 2 for message in head)
        ]
        if not moving:
            return False
        for stage in moving:
            left[stage] = left[stage][1:]
    return True


def stages_of(num_microbatches: int, num_stages: int) -> list[tuple[Slot, ...]]:
    return [training_slots("1f1b", Batches.whole(num_microbatches), num_stages, stage) for stage in range(num_stages)]


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_no_stage_waits_in_a_push_for_one_that_waits_for_it(num_stages: int) -> None:
    for num_microbatches in range(20):
        stages = stages_of(num_microbatches, num_stages)
        assert all_end(stages, backward_of_first_push)
        assert all_end(stages, lambda _: None)
        if num_stages > 1 and num_microbatches > 0:
            assert not all_end(stages, last_weight_gradient), "the rule before this one"


@given(st.randoms(use_true_random=False), st.sampled_from([1, 2]), st.integers(1, 4))
def test_nor_under_the_list_order_or_in_a_v(rng: Random, parts: int, num_stages: int) -> None:
    batches = random_works(rng, 6, parts)
    stages = [training_slots("list", batches, num_stages, stage) for stage in range(num_stages)]
    assert all_end(stages, backward_of_first_push)
    if all(work.weight for work in batches.works) and len(batches):
        starts = [backward_of_first_push(slots) for slots in stages]
        assert all(start is not None and start.kind == "weight_gradient" for start in starts), "all overlap"


@given(st.integers(1, 200), st.integers(1, 8))
def test_only_the_first_stage_pushes_within_its_last_backward(num_microbatches: int, num_stages: int) -> None:
    first, *others = stages_of(num_microbatches, num_stages)
    assert backward_of_first_push(first) == Action("backward", num_microbatches - 1)
    assert [backward_of_first_push(slots) for slots in others] == [None] * (num_stages - 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("F0 | >0 | F1 | <0 >1 B0 | F2 | <1 >2 B1 | <2 B2", Action("backward", 2)),
        ("->0 F0 | B0 | <-0 ->1 F1 | B1 | <-1 ->2 F2 | B2 | <-2", None),
        ("F0 | >0 | <0 B0 | ->1 F1", None),  # a receive follows
        ("->0 F0 | I0 | <-0 | W0", Action("weight_gradient", 0)),  # the gradient of the input has left
        ("->0 F0 | I0 | W0 | <-0", None),
        ("->0 F0 | I0 | ->1 F1 | I1 W0 | <-1 | W1", Action("weight_gradient", 1)),
        ("F0 | F1 | I0 | I1 | W0 | W1", Action("weight_gradient", 0)),  # all input gradients are there
        ("F0 | F1 | I0 | W0 | B1", Action("backward", 1)),
        ("F0 | F1 | I0 | B1 | W0", Action("weight_gradient", 0)),
        ("F0 B0 | F1", Action("backward", 0)),
        ("", None),
    ],
)
def test_pushes_start_where_no_message_follows(text: str, expected: Action | None) -> None:
    assert backward_of_first_push(slots_from_text(text)) == expected


def test_evaluation_pushes_nothing() -> None:
    assert backward_of_first_push(evaluation_slots(Batches.whole(3), 2, 0)) is None
    assert backward_of_first_push(evaluation_slots(Batches.whole(3), 1, 0)) is None


# --- Sums lie where nobody needs the bytes any more, and take little beside the gradients.
UNIT = 256
PUSHES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30)


def units(*places: tuple[int, int]) -> tuple[Place, ...]:
    return tuple(Place(UNIT * start, UNIT * stop) for start, stop in places)


def test_places_by_example() -> None:
    """The example of [Note: where sums lie]: buckets 2, 1 and 0 are pushed in this order."""
    gradients = units((12, 20), (4, 12), (0, 4))
    assert places_of_sums(gradients, (4 * UNIT, 4 * UNIT, 2 * UNIT)) == units((20, 24), (16, 20), (14, 16))
    # Gradients need not end aligned.
    odd = (Place(100, 1000), Place(0, 100))
    assert places_of_sums(odd, (256, 256)) == (Place(1024, 1280), Place(512, 768))


@given(PUSHES, st.randoms())
def test_no_sum_lies_where_bytes_may_be_in_use(pushes: list[tuple[int, int]], random: object) -> None:
    sizes = [UNIT * held for held, _ in pushes]
    of_buckets = [Place(start, stop) for start, stop in pairwise([0, *accumulate(sizes)])]
    random.shuffle(of_buckets)  # type: ignore[attr-defined]
    places = places_of_sums(tuple(of_buckets), tuple(UNIT * owned for _, owned in pushes))
    # Byte by byte: gradients are in use until their push is over, a sum from then on.
    for number, place in enumerate(places):
        used = {at for other in of_buckets[number:] for at in range(other.start, other.stop, UNIT)}
        used |= {at for other in places[:number] for at in range(other.start, other.stop, UNIT)}
        assert not used & set(range(place.start, place.stop, UNIT))


@pytest.mark.parametrize(
    ("sums", "what"),
    [
        (units((0, 1), (2, 3)), "sum of push 0 .* gradients of push 1"),
        (units((8, 9), (1, 2)), "sum of push 1 .* gradients of push 1"),  # its own are still to be sent
        (units((8, 10), (9, 10)), "sum of push 1 .* sum of push 0"),
    ],
)
def test_what_would_be_written_while_it_is_in_use_is_refused(sums: tuple[Place, ...], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        check_places(units((4, 8), (0, 4)), sums)


@given(large_strategies(), st.sampled_from([2, 4]))
def test_little_is_needed_behind_the_gradients_of_real_plans(strategy: object, grad_bytes: int) -> None:
    """At most what the sums of one bucket for each stage take, or what gradients are less than sums."""
    plan = fused_llama_plan(8, hidden=32, vocab=64)
    for twins in twins_of(strategy, 8):  # type: ignore[arg-type]
        found = gradient_places(plan, strategy, twins, grad_bytes=grad_bytes, master_bytes=4)  # type: ignore[arg-type]
        sums = sum(place.stop - place.start for place in found.sums)
        assert found.pushed_bytes <= found.num_bytes <= found.pushed_bytes + sums


# --- Scratch memory: windows never meet, planned sizes are those of the links, and handing it out costs little.
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
        transfers = plan_transfers(fused_llama_plan(8, hidden=32, vocab=64), strategy, node_size)
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


# --- Messages of an exchange over ports and cables, against a simulation of each by itself.
def by_ports(plans: list[TransferPlan], ready: list[list[float]], links: LinkModel) -> list[tuple[list, list]]:
    """What `Wires` computes for all messages at once, message by message with `Port`."""
    size = plans[0].num_ranks
    out, into = [Port() for _ in range(size)], [Port() for _ in range(size)]
    results = []
    for plan, begin in zip(plans, ready, strict=True):
        heads, left, came = {}, list(begin), list(begin)
        for rank in range(size):
            for message in sorted(plan.sends(rank), key=lambda m: (m.dst - rank) % size):
                speed = links.speed(rank, message.dst)
                heads[rank, message.dst] = out[rank].serve(begin[rank], speed.wire_s(message.numel)) + speed.latency_s
                left[rank] = out[rank].free_s
        for rank in range(size):
            for message in sorted(plan.recvs(rank), key=lambda m: heads[m.src, rank]):
                into[rank].serve(heads[message.src, rank], links.speed(message.src, rank).wire_s(message.numel))
                came[rank] = into[rank].free_s
        results.append((left, came))
    return results


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_an_exchange_is_what_ports_make_of_its_messages(seed: int) -> None:
    rng = random.Random(seed)
    size, numel = rng.randint(1, 9), rng.randint(9, 60)
    links = LinkModel(
        rng.randint(1, size), Speed(rng.random(), rng.uniform(1, 9)), Speed(rng.random(), rng.uniform(1, 9))
    )
    plans, ready, known = [], [], list[Routes]()
    cuts: list[list[int]] = []
    for _ in range(3):
        if rng.random() < 0.3:  # a gather: all ranks have equal messages for each other
            each = np.arange(size)
            src, dst = np.repeat(each, size), np.tile(each, size)
            plans.append(TransferPlan(size, SliceColumns(src, dst, src, src, np.full(size * size, rng.randint(1, 9)))))
            ready.append([20 * rng.random() for _ in range(size)])
            continue
        if not cuts or rng.random() < 0.5:
            cuts = [sorted(rng.sample(range(numel + 1), 2)) for _ in range(size)]
        times = rng.randint(1, 3)  # as large messages, which may go the same ways
        layout = layout_of_intervals(times * numel, [(times * start, times * stop) for start, stop in cuts])
        plan = plan_transfer(even_layout(times * numel, size), layout)
        plans.append(plan if rng.random() < 0.5 else plan.transposed())
        ready.append([rng.choice([0.0, 20 * rng.random()]) for _ in range(size)])
    wires = Wires(size)
    for plan, begin, (left, came) in zip(plans, ready, by_ports(plans, ready, links), strict=True):
        found = wires.exchange(Parcels.of_plan(plan, links, 1, known), np.array(begin))
        assert found.left == pytest.approx(left)
        assert found.came == pytest.approx(came)
        assert (found.left_from <= found.left).all()
        assert (found.came_from <= found.came).all()


@pytest.mark.parametrize(("node_size", "then", "came"), [
    (1, 0.0, (10.0, 12.0, 17.0)),  # each has half of the cable until 12; what comes next waits for what was begun first
    (1, 6.0, (10.0, 16.0, 16.0)),
    (1, 20.0, (10.0, 26.0, 11.0)),
    (2, 0.0, (10.0, 6.0, 11.0)),  # inside a node nothing is shared
])  # fmt: skip
def test_two_communicators_share_the_cable_between_nodes(
    node_size: int, then: float, came: tuple[float, float, float]
) -> None:
    """Transfers of 10 seconds over one, of 6 over the other from `then` on, and of 1 over the first again."""
    links = LinkModel(node_size, Speed(0.0, 1.0), Speed(0.0, 1.0), one_cable=True)

    def parcels(size: int) -> Parcels:
        sent, received = (layout_of_intervals(size, own) for own in ([(0, size), (0, 0)], [(0, 0), (0, size)]))
        return Parcels.of_plan(plan_transfer(sent, received), links, 1)

    one, other = Wires.pair(2, links)
    turns = ((one, 10, 0.0), (other, 6, then), (one, 1, 0.0))
    found = [wires.exchange(parcels(size), np.full(2, ready)).came[1] for wires, size, ready in turns]
    assert found == pytest.approx(came)


def test_all_ranks_of_a_node_share_its_cable() -> None:
    """Of ranks 0 and 1, who send 4 and 10 bytes to ranks 2 and 3, the first is through when both have sent 4."""
    links = LinkModel(2, Speed(0.0, 1e9), Speed(0.0, 1.0), node_cable=True)

    def parcels(*sizes: int) -> Parcels:
        ends = np.cumsum([0, *sizes]).tolist()
        own = [(start, stop) for start, stop in pairwise(ends)]
        sent, received = (
            layout_of_intervals(ends[-1], [*own, (0, 0), (0, 0)]),
            layout_of_intervals(ends[-1], [(0, 0), (0, 0), *own]),
        )
        return Parcels.of_plan(plan_transfer(sent, received), links, 1)

    one, other = Wires.pair(4, links)
    first = one.exchange(parcels(4, 10), np.zeros(4))
    assert first.left[:2].tolist() == first.came[2:].tolist() == [8.0, 14.0]
    assert other.exchange(parcels(1, 1), np.zeros(4)).came[2:].tolist() == [16.0, 16.0], "when those before are through"


def test_what_stays_on_a_node_waits_for_nothing_on_its_cable() -> None:
    """Rank 1 sends 8 bytes to rank 2 on the other node, then 1 byte to rank 0 beside it."""
    links = LinkModel(2, Speed(0.0, 1.0), Speed(0.0, 1.0), node_cable=True)

    def parcels(numel: int, to: int) -> Parcels:
        sent, received = (
            layout_of_intervals(numel, [(0, numel if rank == holder else 0) for rank in range(4)]) for holder in (1, to)
        )
        return Parcels.of_plan(plan_transfer(sent, received), links, 1)

    wires, _ = Wires.pair(4, links)
    assert wires.exchange(parcels(8, 2), np.zeros(4)).came.tolist() == [0.0, 0.0, 8.0, 0.0]
    both = wires.exchange(parcels(1, 0), np.zeros(4))
    assert both.came.tolist() == both.left[[1, 0, 2, 3]].tolist() == [1.0, 0.0, 0.0, 0.0]
