"""1F1B: DeepSpeed's order, how many micro-batches it keeps, and slices of sequences."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_hydra.pipe.schedules.actions import Action, last_weight_gradient, slots_as_text
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.lower import lower
from ds_hydra.pipe.schedules.registry import (
    most_alive,
    orders,
    training_slots,
)
from ds_hydra.pipe.schedules.rendezvous import check_slots
from ds_hydra.pipe.schedules.simulate import peak_alive
from tests.support.drawn_schedules import STAGES, WHOLE, any_batches, of_kind


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
