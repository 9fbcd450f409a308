"""Schedules: what is computed and when, with which messages, and that none stands still."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_hydra.pipe.placement import Stage
from ds_hydra.pipe.rows import edge, split_tokens
from ds_hydra.pipe.schedules.actions import Action, Order, last_weight_gradient, slots_as_text, slots_from_text, turns
from ds_hydra.pipe.schedules.batches import Batches, Work
from ds_hydra.pipe.schedules.check import check_slots, lower, place
from ds_hydra.pipe.schedules.list_walk import (
    BACKWARD,
    FORWARD,
    NEVER,
    WEIGHT,
    Jobs,
    Walk,
    begin,
    next_forward,
    virtual_stage,
)
from ds_hydra.pipe.schedules.orders import list_order
from ds_hydra.pipe.schedules.registry import (
    evaluation_slots,
    most_alive,
    orders,
    placed,
    schedule_named,
    splits_backward,
    training_slots,
)
from ds_hydra.pipe.schedules.simulate import (
    alive_counts,
    peak_alive,
    peak_units,
    simulate,
    simulate_loads,
    simulate_works,
)
from ds_hydra.zero_hetero.errors import PlanError
from tests.support.schedule_cases import (
    STAGES,
    WHOLE,
    Made,
    any_batches,
    bound,
    mutants,
    of_kind,
    order,
    possible_orders,
    random_works,
    refused,
)


# --- Schedules, our own and random ones: what is computed and when, with which messages, and that none stands
# still.
@given(possible_orders())
@example(  # the note's: further ahead
    Made(tuple(map(order, ("F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"))), Batches.whole(4))
)
def test_lowering_any_order_stands_still_nowhere_and_sends_all_once(made: Made) -> None:
    stages = lower(*made)
    check_slots(stages, made.batches)
    for stage, (slots, computed) in enumerate(zip(stages, made.orders, strict=True)):
        assert tuple(action for slot in slots for action in slot if action.computes) == computed
        each = sorted({action.microbatch for action in computed})
        before, after = each * (stage > 0), each * (stage < len(stages) - 1)
        assert sorted(of_kind(slots, "recv_activation")) == sorted(of_kind(slots, "send_gradient")) == before
        assert sorted(of_kind(slots, "send_activation")) == sorted(of_kind(slots, "recv_gradient")) == after
        for slot in slots:
            sides = {
                1 if action.kind in ("send_activation", "recv_gradient") else -1
                for action in slot
                if not action.computes
            }
            assert len(sides) <= 1, "messages of a slot are with one neighbour"


@given(possible_orders())
def test_text_reads_back(made: Made) -> None:
    for slots in lower(*made):
        assert slots_from_text(slots_as_text(slots)) == slots


def test_text_is_stable() -> None:
    first, last = (training_slots("1f1b", Batches.whole(3), 2, stage) for stage in range(2))
    assert slots_as_text(first) == "F0 | >0 | F1 | <0 >1 B0 | F2 | <1 >2 B1 | <2 B2"
    assert slots_as_text(last) == "->0 F0 | B0 | <-0 ->1 F1 | B1 | <-1 ->2 F2 | B2 | <-2"
    assert slots_as_text(evaluation_slots(Batches.whole(2), 3, 1)) == "->0 F0 | >0 | ->1 F1 | >1"
    assert slots_as_text([order("F0 I0 W0")]) == "F0 I0 W0"


@pytest.mark.parametrize("wrong", ["F", "X1", "F-1", "F01", "F0 || B0", "F0 |", "F0B0"])
def test_text_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(PlanError, match=r"schedule: .* in .* is no action; an action is one of F B I W <- < -> > and"):
        slots_from_text(wrong)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ((-1, 1), "micro-batch 1 follows micro-batch 1, but the slice before its own must be in an earlier one"),
        ((-2,), "micro-batch 0 follows micro-batch -2"),
        ((-1, 0, 0), "micro-batches 1 and 2 both follow micro-batch 0"),
    ],
)
def test_chains_that_cannot_be_are_refused(before: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Batches(before)


@given(any_batches(), STAGES)
def test_evaluation_ends_and_keeps_to_forwards(batches: Batches, num_stages: int) -> None:
    stages = [evaluation_slots(batches, num_stages, stage) for stage in range(num_stages)]
    check_slots(stages, batches)
    for slots in stages:
        assert of_kind(slots, "forward") == list(range(len(batches)))
        assert {action.kind for slot in slots for action in slot} <= {"forward", "send_activation", "recv_activation"}
        assert last_weight_gradient(slots) is None


def test_the_last_weight_gradient_of_a_split_backward_is_its_second_part() -> None:
    assert last_weight_gradient([order("F0 F1 I0 I1 W1 W0")]) == Action("weight_gradient", 0)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("F0 B0", "B0 F0"), r"stage 1 runs B0 before it has the output of micro-batch 0"),
        (("F0 F0 B0", "F0 B0"), r"stage 0 runs F0, but already has the output of micro-batch 0"),
        (("F0 B0 W0", "F0 B0"), r"stage 0 runs W0, but already has the weight gradient of micro-batch 0"),
        (("F0 W0 I0", "F0 B0"), r"stage 0 runs W0 before it has the input gradient of micro-batch 0"),
        (("F0 F1 B0", "F0 F1 B0 B1"), r"stage 0 ends without the input gradient of micro-batch 1"),
        (("F0 I0", "F0 B0"), r"stage 0 ends without the weight gradient of micro-batch 0"),
        (("F0 >0 B0", "F0 B0"), r"stage 0 lists >0; an order holds what is computed"),
        (("F0 B0 F1 B1", "F0 F1 B0 B1"), r"stage 0 waits at B0 for the input gradient of stage 1, which itself waits"),
    ],
)
def test_orders_that_cannot_run_are_shown(texts: tuple[str, ...], message: str) -> None:
    made = tuple(map(order, texts))
    batches = Batches.whole(1 + max(action.microbatch for row in made for action in row))
    with pytest.raises(PlanError, match=message) as caught:
        place(made, batches)
    assert str(caught.value).count("<-- here") == 1


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("F0 F1 B1 B0", "F1 F0 B1 B0"), "stage 1 runs F1 before it has the output of micro-batch 0, which holds the"),
        (("F0 F1 B0 B1", "F0 F1 B1 B0"), "stage 0 runs B0 before it has the input gradient of micro-batch 1, which"),
        (("F0 F1 I0 I1 W0 W1",), "stage 0 runs I0 before it has the input gradient of micro-batch 1, which holds the"),
        (("F0 F1 B1",), "stage 0 ends without the input gradient of micro-batch 0"),
        (("F0 F1 F2 B2 B1 B0",), "stage 0 runs F2 but there are 2 micro-batches, from 0 on"),
    ],
)
def test_orders_against_a_chain_are_shown(texts: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        place(tuple(map(order, texts)), Batches((-1, 0)))
    assert str(caught.value).count("<-- here") == 1


def test_the_grid_shows_the_error_where_it_is() -> None:
    made = list(orders("1f1b", Batches.whole(3), 2))
    made[1] = order("F0 B0 F1 B2 B1 F2")
    with pytest.raises(PlanError) as caught:
        place(tuple(made), Batches.whole(3))
    assert str(caught.value).splitlines() == [
        "schedule: stage 1 runs B2 before it has the output of micro-batch 2",
        "tick      0   1   2   3   4",
        "stage 0   F0  F1  .   B0  F2",
        "stage 1   .   F0  B0  F1  B2  <-- here",
    ]
    with pytest.raises(PlanError, match="stage 0 waits at B0") as caught:
        place((order("F0 B0 F1 B1"), order("F0 F1 B0 B1")), Batches.whole(2))
    assert str(caught.value).splitlines()[1:] == ["tick      0   1", "stage 0   F0  B0  <-- here", "stage 1   .   F0"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("F0 | >0 | B0", "->0 F0 | B0 | <-0"), r"stage 0 runs B0 before it has <0"),
        (("F0 | >0 | <0 B0", "F0 | B0 | <-0"), r"stage 1 runs F0 before it has ->0"),
        (("F0 | <0 B0", "->0 F0 | B0 | <-0"), r"stage 0 waits for ever for stage 1 at <0"),
        ((">0 F0 | <0 B0", "->0 F0 | B0 | <-0"), r"stage 0 has not computed what it sends by >0"),
        (("F0 | >0 >0 | <0 B0", "->0 F0 | B0 | <-0"), r"stage 0 lists >0 twice"),
        (("F0 | B0 | <-0",), r"stage 0 has no neighbour for <-0"),
        (("F0 F1 | >0 | >1", "->1 F1 | ->0 F0"), r"stage 0 is at >0 while stage 1 is at ->1"),
        (  # every output is sent at once: the note of `lower` says why this cannot be
            (
                "F0 | >0 F1 | >1 F2 | >2 F3 | <0 >3 B0 | <1 B1 | <2 B2 | <3 B3",
                "->0 F0 | B0 | <-0 ->1 F1 | B1 | <-1 ->2 F2 | B2 | <-2 ->3 F3 | B3 | <-3",
            ),
            r"stage 0 waits for ever for stage 1 at >2",
        ),
    ],
)
def test_slots_that_do_not_end_are_shown(texts: tuple[str, ...], message: str) -> None:
    stages = [slots_from_text(text) for text in texts]
    batches = Batches.whole(1 + max(action.microbatch for slots in stages for slot in slots for action in slot))
    with pytest.raises(PlanError, match=message) as caught:
        check_slots(stages, batches)
    assert str(caught.value).count("<-- here") == 1


@given(possible_orders(), st.floats(0.0, 3.0))
def test_simulation_of_any_order_keeps_to_its_rules(made: Made, transfer: float) -> None:
    simulation = simulate(*made, lambda stage, action: 1.0 + stage + action.microbatch, transfer=transfer)
    times = [{timed.action: timed for timed in row} for row in simulation.stages]
    for stage, row in enumerate(simulation.stages):
        assert tuple(timed.action for timed in row) == made.orders[stage]
        free = 0.0
        for action, start, stop in row:
            sources = [0.0]
            if action.kind == "forward" and stage > 0:
                sources = [times[stage - 1][action].stop + transfer]
            elif action.kind in ("backward", "input_gradient") and stage < len(made.orders) - 1:
                results = [Action("backward", action.microbatch), Action("input_gradient", action.microbatch)]
                sources = [times[stage + 1][r].stop + transfer for r in results if r in times[stage + 1]]
            assert start == max(free, *sources), "as soon as the stage is free and its input is there"
            assert stop == start + 1.0 + stage + action.microbatch
            free = stop
    assert simulation.total == max((row[-1].stop for row in simulation.stages if row), default=0.0)


def test_1f1b_takes_what_it_takes_on_paper() -> None:
    def total(loads: list[float], num_stages: int) -> float:
        batches = Batches.whole(len(loads))
        return simulate_loads(placed("1f1b", batches, num_stages), [loads] * num_stages)

    assert total([3.0] * 5, 4) == pytest.approx(3.0 * (5 + 3))
    assert total([3.0, 4.0, 5.0], 1) == pytest.approx(12.0)
    assert total([], 4) == 0.0
    assert total([6.0], 3) == pytest.approx(18.0)
    # two stages, loads 3 then 6: the second stage starts after 1, runs 1+2 and 2+4; its last backward ends at 10
    assert total([3.0, 6.0], 2) == pytest.approx(14.0)
    # two stages and a message of 1: F0 until 1, over at 2, F0 and B0 until 5, back at 6, B0 until 8
    one = Batches.whole(1)
    made = orders("1f1b", one, 2)
    assert simulate(made, one, lambda _, action: 1.0 if action.kind == "forward" else 2.0, transfer=1.0).total == 8.0


def test_micro_batches_alive_over_time() -> None:
    assert alive_counts(orders("1f1b", Batches.whole(3), 2)[0]) == (1, 2, 2, 2, 2, 1)
    # Between I and W 0.9 of a micro-batch stays.
    assert alive_counts(order("F0 F1 I0 F2 W0 I1 W1 I2 W2")) == (1, 2, 2, 2.9, 2.9, 2, 1.9, 1, 0.9)
    assert alive_counts(order("F0 F1 I0 I1 W1 W0")) == (1, 2, 2, 1.9, 1.8, 0.9)
    assert alive_counts(order("F0 F1 F2")) == (1, 1, 1)


def test_only_schedules_of_bounded_memory_are_trained_by(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_hydra.pipe.schedules import registry

    def all_forwards_first(batches: Batches, num_stages: int) -> tuple[Order, ...]:
        forwards, backwards = (slots_from_text(" ".join(f"{sign}{m}" for m in range(len(batches)))) for sign in "FB")
        return ((*forwards[0], *backwards[0]),) * num_stages

    schedule = registry.Schedule("forwards-first", all_forwards_first)
    monkeypatch.setitem(registry.SCHEDULES, "forwards-first", schedule)
    assert peak_alive(orders("forwards-first", Batches.whole(6), 2)) == (6, 6)
    with pytest.raises(
        PlanError, match=r"keeps \(4\.0, 4\.0\) micro-batches .* with 4 in a step, and \(8\.0, 8\.0\) with 8"
    ):
        most_alive("forwards-first", 2)
    with pytest.raises(
        PlanError, match="schedule '1F1B' is not known; choose from 1f1b, forwards-first, list, v, zb-h1"
    ):
        schedule_named("1F1B")


# --- 1F1B: DeepSpeed's order, how many micro-batches it keeps, and slices of sequences.
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_1f1b_is_deepspeeds_slot_by_slot(num_stages: int) -> None:
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    kinds = {"ForwardPass": "forward", "BackwardPass": "backward", "SendGrad": "send_gradient"}
    kinds |= {"RecvGrad": "recv_gradient", "SendActivation": "send_activation", "RecvActivation": "recv_activation"}
    for num_microbatches in range(1, 17):
        for stage in range(num_stages):
            seen = dict.fromkeys(kinds.values(), 0)  # the k-th action of a kind belongs to micro-batch k
            theirs = []
            for instructions in TrainSchedule(num_microbatches, num_stages, stage).steps():
                slot = []
                for instruction in instructions:
                    if kind := kinds.get(type(instruction).__name__):
                        slot.append(Action(kind, seen[kind]))  # type: ignore[arg-type]
                        seen[kind] += 1
                theirs += [tuple(slot)] if slot else []
            assert training_slots("1f1b", Batches.whole(num_microbatches), num_stages, stage) == tuple(theirs)
    assert training_slots("1f1b", Batches.whole(0), num_stages, 0) == ()


@given(WHOLE, STAGES)
@example(Batches.whole(1), 7)
@example(Batches.whole(12), 1)
def test_1f1b_keeps_few_micro_batches_and_messages_in_order(batches: Batches, num_stages: int) -> None:
    """A stage keeps at most as many activations as there are stages from it on; messages need no tag of their own."""
    made = orders("1f1b", batches, num_stages)
    assert peak_alive(made) == tuple(min(len(batches), num_stages - stage) for stage in range(num_stages))
    assert most_alive("1f1b", num_stages) == tuple(num_stages - stage for stage in range(num_stages))
    stages = lower(made, batches)
    check_slots(stages, batches)
    for slots in stages:
        for kind in ("forward", "backward", "send_activation", "recv_activation", "send_gradient", "recv_gradient"):
            assert of_kind(slots, kind) == sorted(of_kind(slots, kind))
        last = last_weight_gradient(slots)
        assert last == (Action("backward", len(batches) - 1) if len(batches) else None)


@given(any_batches(), STAGES)
def test_1f1b_runs_chains_forward_and_back(batches: Batches, num_stages: int) -> None:
    """It ends, with the same backwards on all stages: each chain as a whole, its last slice first."""
    made = orders("1f1b", batches, num_stages)
    check_slots(lower(made, batches), batches)
    for stage in made:
        assert of_kind((stage,), "forward") == list(range(len(batches)))
        assert of_kind((stage,), "backward") == [m for chain in batches.chains for m in reversed(chain)]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), STAGES)
def test_1f1b_keeps_no_more_than_the_longest_chain_needs(slices: list[int], num_stages: int) -> None:
    """Seq1F1B: PP - s micro-batches on stage s, and as many more as the longest chain has further slices."""
    made = orders("1f1b", Batches.in_slices(slices), num_stages)
    most = [num_stages - stage + max(slices) - 1 for stage in range(num_stages)]
    assert peak_alive(made) == tuple(min(sum(slices), count) for count in most)
    assert most_alive("1f1b", num_stages, max(slices)) == tuple(most)


def test_1f1b_of_slices_on_paper() -> None:
    batches = Batches.in_slices([1, 3, 1])
    assert batches == Batches((-1, -1, 1, 2, -1))
    assert batches.chains == ((0,), (1, 2, 3), (4,))
    assert batches.after == (-1, 2, 3, -1, -1)
    first, last = orders("1f1b", batches, 2)
    assert slots_as_text([last]) == "F0 F1 F2 B0 F3 B3 F4 B2 B1 B4"
    assert slots_as_text([first]) == "F0 F1 F2 F3 B0 F4 B3 B2 B1 B4"


# --- Schedules that split backwards: what ZB-H1 runs, how long it takes, and what runs together.
@st.composite
def some_batches(draw: st.DrawFn) -> Batches:
    """Whole sequences and sequences in up to three slices."""
    return Batches.in_slices(draw(st.lists(st.integers(1, 3), max_size=8)))


def kind_of(order: Order, kind: str) -> list[int]:
    return [action.microbatch for action in order if action.kind == kind]


@given(some_batches(), STAGES)
def test_zb_h1_splits_1f1b_and_ends(batches: Batches, num_stages: int) -> None:
    """The forwards and input gradients are 1F1B's; stage s is s input gradients ahead of its weight gradients."""
    assert (splits_backward("zb-h1"), splits_backward("1f1b")) == (True, False)
    made = orders("zb-h1", batches, num_stages)
    check_slots(lower(made, batches), batches)
    for stage, (split, joined) in enumerate(zip(made, orders("1f1b", batches, num_stages), strict=True)):
        without = [action for action in split if action.kind != "weight_gradient"]
        assert [(a.kind == "forward", a.microbatch) for a in without] == [
            (a.kind == "forward", a.microbatch) for a in joined
        ]
        assert kind_of(split, "weight_gradient") == kind_of(split, "input_gradient")
        ahead = 0
        for action in split:
            ahead += (action.kind == "input_gradient") - (action.kind == "weight_gradient")
            assert ahead <= stage + 1
    assert peak_alive(made)[0] == peak_alive(orders("1f1b", batches, num_stages))[0]


@given(st.integers(1, 12), STAGES, st.data())
def test_zb_h1_takes_no_longer_than_1f1b_and_leaves_a_third_of_its_bubble(
    count: int, num_stages: int, data: st.DataObject
) -> None:
    batches = Batches.whole(count)
    loads = data.draw(st.lists(st.floats(0.5, 9.0), min_size=count, max_size=count))
    split, joined = (
        simulate_loads(placed(name, batches, num_stages), [loads] * num_stages) for name in ("zb-h1", "1f1b")
    )
    assert split <= joined * (1 + 1e-9)
    if count >= 2 * num_stages - 1:
        equal = simulate_loads(placed("zb-h1", batches, num_stages), [[3.0] * count] * num_stages)
        assert equal == pytest.approx(3.0 * count + (num_stages - 1))
    assert most_alive("zb-h1", num_stages) == pytest.approx([num_stages - 0.1 * s for s in range(num_stages)])


def test_zb_h1_on_paper() -> None:
    stages = [slots_as_text([stage]) for stage in orders("zb-h1", Batches.whole(4), 3)]
    assert stages == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_weight_gradients_that_follow_each_other_are_one_turn() -> None:
    (slots,) = [slots_from_text("F0 B0 | ->1 F1 | I1 | <-1 W1 | W2 | >3 | W3 W4 | F5 W5 | W6")]
    assert [(slots_as_text([m]), slots_as_text([a])) for m, a in turns(slots)] == [
        ("", "F0"), ("", "B0"), ("->1", "F1"), ("", "I1"), ("<-1", "W1 W2"), (">3", ""), ("", "W3 W4"), ("", "F5"),
        ("", "W5 W6"),
    ]  # fmt: skip


# --- Orders made from times: they end, keep within memory and above the bound, take what the walk says; V
# included.
ONES = Work(1, 1, 1)


def any_works(most: int = 10, parts: tuple[int, ...] = (1, 2)) -> st.SearchStrategy[Batches]:
    """See `random_works`; the tool sweeps over far more of them."""
    return st.builds(random_works, st.randoms(use_true_random=False), st.just(most), st.sampled_from(parts))


def with_room(batches: Batches, room: int) -> Batches:
    return Batches(batches.before, batches.parts, batches.works, room)


@given(any_works(), st.integers(1, 5))
def test_the_list_order_ends_within_memory_and_above_the_bound(batches: Batches, num_stages: int) -> None:
    made = orders("list", batches, num_stages)
    check_slots(lower(made, batches), batches)
    assert max(map(peak_units, made, [batches] * num_stages)) <= batches.room
    assert simulate_works(made, batches) >= bound(batches, num_stages)
    assert made == list_order(Batches(batches.before, batches.parts, batches.works, batches.room), num_stages)


def walked_by_all(jobs: Jobs, walk: Walk) -> int:
    """The list order by its definition: for each action of a stage all its micro-batches are looked at."""
    n, now, stages = len(jobs.forward), 0, range(jobs.num_stages)
    while now < NEVER:
        for stage in stages:
            if walk.free[stage] > now:
                continue
            came: dict[int, int] = {}
            for part in range(jobs.parts):
                first = virtual_stage(stage, part, jobs.num_stages) * n
                for m in range(n):
                    at, after, is_last = first + m, jobs.after[m], first == (jobs.parts * jobs.num_stages - 1) * n
                    arrival = walk.forward_stop[at] if is_last else walk.backward_stop[at + n]
                    waits = after >= 0 and walk.backward_stop[first + after] > now
                    if arrival <= now and walk.backward_stop[at] == NEVER and not waits:
                        came[at] = arrival
            forward = next_forward(jobs, walk, stage, now)
            if came:
                begin(jobs, walk, stage, now, BACKWARD, min(came, key=came.__getitem__))
            elif forward >= 0:
                begin(jobs, walk, stage, now, FORWARD, forward)
            elif walk.num_paid[stage] < walk.num_owing[stage]:
                owing = walk.owing[stage * jobs.parts * n + walk.num_paid[stage]]
                begin(jobs, walk, stage, now, WEIGHT, owing)
        stop, now = now, min((free for one in stages if (free := walk.free[one]) > now), default=NEVER)
    return stop


@given(any_works(), st.integers(1, 5))
def test_gradients_come_in_order_so_that_not_all_are_looked_at(batches: Batches, num_stages: int) -> None:
    assert list_order(batches, num_stages) == list_order(batches, num_stages, walked_by_all)


@given(any_works(most=4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_every_violation_of_a_dependency_is_refused(batches: Batches, num_stages: int, rng: Random) -> None:
    made = lower(orders("list", batches, num_stages), batches)
    for what, broken in mutants(made, batches, rng):
        assert refused(broken, batches), what


def test_equal_micro_batches_take_what_they_take_on_paper() -> None:
    """F = B = W = 1, 4 stages: 1F1B takes 33; the list 29 with as much memory, with a quarter more 27, the bound."""
    tens = (Work(1, 1, 1, 10, 9),) * 8
    eight = Batches((-1,) * 8, works=tens, room=40)
    assert simulate_works(orders("1f1b", eight, 4), eight) == 33
    assert simulate_works(orders("list", eight, 4), eight) == 29
    assert simulate_works(orders("list", with_room(eight, 50), 4), with_room(eight, 50)) == 27 == bound(eight, 4)


def test_the_note_s_example_and_a_v_as_text() -> None:
    two = Batches((-1, -1), works=(ONES, ONES))
    assert [slots_as_text([row]) for row in orders("list", two, 2)] == ["F0 F1 I0 W0 I1 W1", "F0 I0 F1 I1 W0 W1"]
    one = Batches((-1,), parts=2, works=(ONES,))
    first, last = (training_slots("list", one, 2, stage) for stage in range(2))
    assert slots_as_text(first) == "F0 | >0 | ->0' F0' | I0' | <-0' | W0' | <0 I0 | W0"
    assert slots_as_text(last) == "->0 F0 | F0' | >0' | <0' I0' | I0 | <-0 | W0' | W0"
    assert slots_from_text(slots_as_text(last)) == last
    joined = Batches((-1, -1), works=(Work(1, 2), Work(1, 2)))
    assert [slots_as_text([row]) for row in orders("list", joined, 2)] == ["F0 F1 B0 B1", "F0 B0 F1 B1"]


def test_memory_is_reserved_for_a_whole_sequence() -> None:
    """Two sequences in two slices each, and room for three: the second one waits until one slice has given its up."""
    works = (Work(2, 2, 1, 10, 10),) * 4
    slices = Batches((-1, 0, -1, 2), works=works, room=30)
    assert slices.runs == (range(2), range(2, 4))
    for row in orders("list", slices, 3):
        assert slots_as_text([row]).index("W1") < slots_as_text([row]).index("F2")
    crossed = Batches((-1, -1, 0, 1), works=works, room=30)
    assert crossed.runs == (range(4),)
    with pytest.raises(PlanError, match=r"micro-batches 0 to 3 live together and need 40 units .* which has 30"):
        orders("list", crossed, 3)


def test_schedules_say_what_they_lack() -> None:
    with pytest.raises(PlanError, match="orders 2 micro-batches by their times but knows 0"):
        orders("list", Batches.whole(2), 2)
    for name in ("1f1b", "zb-h1"):
        with pytest.raises(PlanError, match=f"schedule {name}: .* one range of layers"):
            orders(name, Batches((-1,), parts=2, works=(ONES,)), 2)
    with pytest.raises(PlanError, match="1 works for 2 micro-batches"):
        Batches((-1, -1), works=(ONES,))
    with pytest.raises(PlanError, match=r"micro-batch 0 has .* take 1 us or more"):
        Batches((-1,), works=(Work(0, 1),))
    with pytest.raises(PlanError, match="3 ranges of layers: a schedule knows 1, or 2 for a V"):
        Batches((-1,), parts=3)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("F0 F0' B0' B0", "F0' F0 B0' B0"), "stage 1 runs F0' before it has the output of micro-batch 0$"),
        (("F0 F0' B0' B0", "F0 F0' B0 B0'"), "stage 1 runs B0 before it has the input gradient of .* in the second"),
        (("F0 B0", "F0 F0' B0' B0"), "stage 0 ends without the output of micro-batch 0 in the second part"),
        (("F0' F0 B0' B0", "F0 F0' B0' B0"), "stage 0 waits at F0' for the output of stage 1, which itself waits"),
    ],
)
def test_a_v_turns_round_in_the_last_stage(texts: tuple[str, ...], message: str) -> None:
    one = Batches((-1,), parts=2)
    with pytest.raises(PlanError) as caught:
        place(tuple(map(order, texts)), one)
    assert re.search(message, str(caught.value).splitlines()[0])


def test_evaluation_of_a_v_takes_turns() -> None:
    four = Batches((-1,) * 4, parts=2)
    stages = [evaluation_slots(four, 2, stage) for stage in range(2)]
    check_slots(stages, four)
    computed = [tuple(action for slot in slots for action in slot if action.computes) for slots in stages]
    assert slots_as_text(computed[:1]) == "F0 F1 F2 F0' F3 F1' F2' F3'"


# --- Edges between stages: whatever tp and sp the two sides have, every receiver gets every row it holds, once.
DEGREES = st.integers(1, 5)


def first_rows(num_tokens: int, sp: int) -> list[int]:
    return [sum(split_tokens(num_tokens, sp)[:rank]) for rank in range(sp)]


@given(DEGREES, DEGREES, DEGREES, DEGREES, st.integers(1, 60), st.booleans())
def test_every_row_arrives_once(
    src_tp: int, src_sp: int, dst_tp: int, dst_sp: int, num_tokens: int, backwards: bool
) -> None:
    width = src_tp * src_sp
    src = Stage(tuple(range(width)), 0, 1, src_tp, src_sp)
    dst = Stage(tuple(range(width, width + dst_tp * dst_sp)), 1, 2, dst_tp, dst_sp)
    if backwards:
        src, dst = dst, src
    sends, receives = edge(src, dst, num_tokens)
    src_first, dst_first = first_rows(num_tokens, src.sp), first_rows(num_tokens, dst.sp)
    sent: Counter[tuple[int, int, int, int]] = Counter()
    for sender, rows in sends.items():
        base = src_first[src.coordinates(sender)[1]]
        local = split_tokens(num_tokens, src.sp)[src.coordinates(sender)[1]]
        for peer, start, stop in rows:
            assert 0 <= start < stop <= local
            sent[sender, peer, base + start, base + stop] += 1
    arrived: Counter[tuple[int, int, int, int]] = Counter()
    for receiver, rows in receives.items():
        sp_rank = dst.coordinates(receiver)[1]
        filled: list[int] = []
        for peer, start, stop in rows:
            filled += range(start, stop)
            arrived[peer, receiver, dst_first[sp_rank] + start, dst_first[sp_rank] + stop] += 1
        assert filled == list(range(split_tokens(num_tokens, dst.sp)[sp_rank]))
    assert sent == arrived
    assert set(sent.values()) <= {1}


@given(DEGREES, DEGREES, st.integers(1, 60))
def test_equal_stages_exchange_with_their_twins_only(tp: int, sp: int, num_tokens: int) -> None:
    src = Stage(tuple(range(tp * sp)), 0, 1, tp, sp)
    dst = Stage(tuple(range(100, 100 + tp * sp)), 1, 2, tp, sp)
    sends, _ = edge(src, dst, num_tokens)
    for sender, rows in sends.items():
        held = split_tokens(num_tokens, sp)[src.coordinates(sender)[1]]
        assert rows == ([(sender + 100, 0, held)] if held else [])


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 60))
def test_tensor_parallel_senders_share_the_work(src_tp: int, dst_tp: int, num_tokens: int) -> None:
    src = Stage(tuple(range(src_tp)), 0, 1, src_tp)
    dst = Stage(tuple(range(10, 10 + dst_tp)), 1, 2, dst_tp)
    loads = [sum(stop - start for _, start, stop in rows) for rows in edge(src, dst, num_tokens)[0].values()]
    assert sum(loads) == dst_tp * num_tokens
    if src_tp >= dst_tp:  # each sender has one receiver at most, whose rows are cut among its senders
        assert max(loads) == -(-num_tokens // (src_tp // dst_tp))
    else:
        assert max(loads) <= -(-dst_tp // src_tp) * num_tokens


@given(DEGREES, DEGREES, DEGREES, DEGREES, st.integers(1, 60))
def test_ranks_that_share_tokens_send_each_row_once(
    src_tp: int, src_sp: int, dst_tp: int, dst_sp: int, num_tokens: int
) -> None:
    src = Stage(tuple(range(src_tp * src_sp)), 0, 1, src_tp, src_sp)
    dst = Stage(tuple(range(100, 100 + dst_tp * dst_sp)), 1, 2, dst_tp, dst_sp)
    sends, receives = edge(src, dst, num_tokens, token_sharding=True)
    firsts = [first_rows(num_tokens, len(stage.ranks)) for stage in (src, dst)]
    sent = Counter(
        (rank, rows.peer, firsts[0][index] + row)
        for index, rank in enumerate(src.ranks)
        for rows in sends[rank]
        for row in range(rows.start, rows.stop)
    )
    arrived = Counter(
        (rows.peer, rank, firsts[1][index] + row)
        for index, rank in enumerate(dst.ranks)
        for rows in receives[rank]
        for row in range(rows.start, rows.stop)
    )
    assert sent == arrived
    assert sorted(row for _, _, row in sent.elements()) == list(range(num_tokens))
