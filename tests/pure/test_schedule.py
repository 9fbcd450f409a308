"""Schedules, our own and random ones: what is computed and when, with which messages, and that none stands still."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_hydra.pipe.schedules.actions import Action, Order, last_weight_gradient, slots_as_text, slots_from_text
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.check import place
from ds_hydra.pipe.schedules.lower import lower
from ds_hydra.pipe.schedules.registry import (
    evaluation_slots,
    most_alive,
    orders,
    placed,
    schedule_named,
    training_slots,
)
from ds_hydra.pipe.schedules.rendezvous import check_slots
from ds_hydra.pipe.schedules.simulate import alive_counts, peak_alive, simulate, simulate_loads
from ds_hydra.zero_hetero.errors import PlanError
from tests.support.drawn_schedules import STAGES, Made, any_batches, of_kind, order, possible_orders


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
    assert str(caught.value).splitlines()[1:] == [
        "tick      0   1",
        "stage 0   F0  B0  <-- here",
        "stage 1   .   F0",
    ]


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
    batches = Batches.whole(3)
    simulation = simulate(orders("1f1b", batches, 2), batches, lambda _, action: 1.0)
    assert simulation.alive(0) == ((0.0, 1), (1.0, 2), (3.0, 2), (4.0, 2), (5.0, 2), (7.0, 1))
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
