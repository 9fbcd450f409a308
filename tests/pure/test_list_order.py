"""Orders made from times: they end, keep within memory and above the bound, take what the walk says; V included."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.pipe.schedules.actions import Order, slots_as_text, slots_from_text
from ds_hydra.pipe.schedules.batches import Batches, Work
from ds_hydra.pipe.schedules.check import place
from ds_hydra.pipe.schedules.list_order import list_order
from ds_hydra.pipe.schedules.list_walk import BACKWARD, FORWARD, NEVER, WEIGHT, Jobs, Walk, begin, next_forward
from ds_hydra.pipe.schedules.lower import lower
from ds_hydra.pipe.schedules.registry import evaluation_slots, orders, training_slots
from ds_hydra.pipe.schedules.rendezvous import check_slots
from ds_hydra.pipe.schedules.simulate import peak_units, simulate_works
from ds_hydra.pipe.schedules.virtual import virtual_stage
from ds_hydra.zero_hetero.errors import PlanError
from tests.support.schedule_cases import bound, mutants, random_works, refused

ONES = Work(1, 1, 1)


def any_works(most: int = 10, parts: tuple[int, ...] = (1, 2)) -> st.SearchStrategy[Batches]:
    """See `random_works`; the tool sweeps over far more of them."""
    return st.builds(random_works, st.randoms(use_true_random=False), st.just(most), st.sampled_from(parts))


def order(text: str) -> Order:
    return tuple(action for slot in slots_from_text(text) for action in slot)


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
