"""Schedules by simulation: every action once, in a possible order, every message met by its neighbour, to the end."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_hydra.pipe.schedules.one_f_one_b import Action, Kind, Step, forward_only, one_f_one_b

SIZES = (st.integers(0, 12), st.integers(1, 7))


def streams(num_microbatches: int, num_stages: int, training: bool = True) -> list[tuple[Step, ...]]:
    make = one_f_one_b if training else forward_only
    return [make(num_microbatches, num_stages, stage) for stage in range(num_stages)]


def of_kind(stream: tuple[Step, ...], *kinds: Kind) -> list[int]:
    return [action.microbatch for step in stream for action in step if action.kind in kinds]


def simulate(stages: list[tuple[Step, ...]]) -> None:
    """Run all stages as the runtime does: a step sends at once and waits for what it receives; fail on a standstill."""
    position = [0] * len(stages)
    begun = [-1] * len(stages)
    mail: set[tuple[int, Action]] = set()
    done: set[tuple[int, str, int]] = set()
    while any(at < len(stream) for at, stream in zip(position, stages, strict=True)):
        moved = False
        for stage, stream in enumerate(stages):
            if position[stage] == len(stream):
                continue
            step = stream[position[stage]]
            if begun[stage] < position[stage]:
                begun[stage] = position[stage]
                moved = True
                for action in step:
                    if action.kind == "send_activation":
                        assert (stage, "forward", action.microbatch) in done, "a stage sends what it has computed"
                        mail.add((stage + 1, Action("recv_activation", action.microbatch)))
                    elif action.kind == "send_gradient":
                        assert (stage, "backward", action.microbatch) in done
                        mail.add((stage - 1, Action("recv_gradient", action.microbatch)))
            wanted = {(stage, action) for action in step if action.kind.startswith("recv")}
            if not wanted <= mail:
                continue
            mail -= wanted
            done |= {(stage, action.kind, action.microbatch) for _, action in wanted}
            for kind, microbatch in step:
                if kind == "forward":
                    assert stage == 0 or (stage, "recv_activation", microbatch) in done
                elif kind == "backward":
                    assert (stage, "forward", microbatch) in done
                    assert stage == len(stages) - 1 or (stage, "recv_gradient", microbatch) in done
                done.add((stage, kind, microbatch))
            position[stage] += 1
            moved = True
        assert moved, f"nobody can go on at steps {position}"
    assert not mail, "everything that was sent has been received"


@given(*SIZES)
@example(1, 7)
@example(12, 1)
def test_training_ends_and_does_everything_once(num_microbatches: int, num_stages: int) -> None:
    stages = streams(num_microbatches, num_stages)
    simulate(stages)
    each = list(range(num_microbatches))
    for stage, stream in enumerate(stages):
        assert of_kind(stream, "forward") == of_kind(stream, "backward") == each
        inner = (stage > 0, stage < num_stages - 1)
        assert of_kind(stream, "recv_activation") == of_kind(stream, "send_gradient") == each * inner[0]
        assert of_kind(stream, "send_activation") == of_kind(stream, "recv_gradient") == each * inner[1]


@given(*SIZES)
def test_evaluation_ends_and_keeps_to_forwards(num_microbatches: int, num_stages: int) -> None:
    stages = streams(num_microbatches, num_stages, training=False)
    simulate(stages)
    for stream in stages:
        assert of_kind(stream, "forward") == list(range(num_microbatches))
        assert not of_kind(stream, "backward", "send_gradient", "recv_gradient")


@given(*SIZES)
def test_few_micro_batches_are_in_flight(num_microbatches: int, num_stages: int) -> None:
    """What makes it 1F1B: a stage holds at most as many activations as there are stages from it on."""
    for stage, stream in enumerate(streams(num_microbatches, num_stages)):
        held = most = 0
        for step in stream:
            for action in step:
                held += (action.kind == "forward") - (action.kind == "backward")
                most = max(most, held)
        assert most <= num_stages - stage


@given(*SIZES)
def test_messages_of_two_neighbours_pair_up_in_order(num_microbatches: int, num_stages: int) -> None:
    """Per edge and direction, the k-th send meets the k-th receive: messages need no tag of their own."""
    stages = streams(num_microbatches, num_stages)
    for stage in range(num_stages - 1):
        here, there = stages[stage], stages[stage + 1]
        assert of_kind(here, "send_activation") == of_kind(there, "recv_activation")
        assert of_kind(there, "send_gradient") == of_kind(here, "recv_gradient")


def test_the_simulation_sees_broken_schedules() -> None:
    stages = streams(3, 2)
    silent = stages[0][:1] + stages[0][2:]
    with pytest.raises(AssertionError, match="nobody can go on"):
        simulate([silent, stages[1]])
    early = (stages[0][1], stages[0][0], *stages[0][2:])
    with pytest.raises(AssertionError, match="sends what it has computed"):
        simulate([early, stages[1]])
    with pytest.raises(AssertionError, match="has been received"):
        simulate([stages[0][:-1], stages[1]])


def test_two_stages_as_text() -> None:
    assert of_text(one_f_one_b(3, 2, 0)) == "F0 | >0 | F1 | <0 >1 B0 | F2 | <1 >2 B1 | <2 B2"


def of_text(stream: tuple[Step, ...]) -> str:
    signs = {"forward": "F", "backward": "B", "send_activation": ">", "recv_gradient": "<"}
    signs |= {"recv_activation": "->", "send_gradient": "<-"}
    return " | ".join(" ".join(f"{signs[kind]}{microbatch}" for kind, microbatch in step) for step in stream)
