"""When a stage starts its first push: never while a message of its pipeline is left, and as early as that allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.pipe.schedules.actions import (
    Action,
    Slot,
    backward_of_first_push,
    last_weight_gradient,
    slots_from_text,
)
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import evaluation_slots, training_slots
from tests.support.schedule_cases import random_works

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
