"""Schedules that split backwards: what ZB-H1 runs, how long it takes, and what runs together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.pipe.schedules.actions import Order, slots_as_text, slots_from_text, turns
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.lower import lower
from ds_hydra.pipe.schedules.registry import most_alive, orders, placed, splits_backward
from ds_hydra.pipe.schedules.rendezvous import check_slots
from ds_hydra.pipe.schedules.simulate import peak_alive, simulate_loads

STAGES = st.integers(1, 7)


@st.composite
def any_batches(draw: st.DrawFn) -> Batches:
    """Whole sequences and sequences in up to three slices."""
    return Batches.in_slices(draw(st.lists(st.integers(1, 3), max_size=8)))


def of_kind(order: Order, kind: str) -> list[int]:
    return [action.microbatch for action in order if action.kind == kind]


@given(any_batches(), STAGES)
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
        assert of_kind(split, "weight_gradient") == of_kind(split, "input_gradient")
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
