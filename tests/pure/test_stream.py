"""Steps of a stream: whole items in order, pass after pass, and places from which the rest follows exactly."""

from __future__ import annotations

import json
import math
import random
import time
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ds_hydra.data.sampler import TokenBudgetSampler
from ds_hydra.data.state_json import state_from_json, state_to_json
from ds_hydra.data.stream import StreamSampler, StreamSteps, is_stream
from ds_hydra.data.tokens import Limits
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError
from tests.support.streams import REAL_STREAMS, STREAMS, Plain, Stateful, WithEpoch

LIMITS = Limits(context_length=20, too_long="skip")
ITEMS = [[number] * length for number, length in enumerate((4, 5, 7, 3, 1, 8, 30, 2, 6, 4, 9))]


def sampler_of(stream: Any, budget: int = 10, ahead: int = 2) -> StreamSampler:
    return StreamSampler(stream, budget, LIMITS, ahead, reads=True)


def firsts(sampler: StreamSampler, steps: range) -> list[list[int]]:
    """The items of each step, by their tokens."""
    return [[int(one.input_ids[0]) for one in sampler.taken(step).values()] for step in steps]


def test_a_step_takes_whole_items_until_it_has_its_tokens() -> None:
    sampler = sampler_of(Plain([[1] * 4, [2] * 5, [3] * 7, [4] * 3]))
    assert firsts(sampler, range(3)) == [[1, 2, 3], [4, 1, 2], [3, 4]]
    assert [sampler.batch(2), sampler.batch_lengths(2)] == [(6, 7), (7, 3)]
    sampler.close()


def test_what_is_left_out_is_told_and_costs_no_step(caplog: pytest.LogCaptureFixture) -> None:
    sampler = sampler_of(Plain(ITEMS))
    assert firsts(sampler, range(3)) == [[0, 1, 2], [3, 5], [7, 8, 9]]
    assert "1 skipped as too long, 1 of fewer than two tokens" in caplog.text
    sampler.close()


@pytest.mark.drawn
@pytest.mark.parametrize("kind", [*STREAMS, *REAL_STREAMS])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_place_is_where_the_step_begins_however_far_was_read(kind: Any, ahead: int) -> None:
    whole = sampler_of(kind(ITEMS), ahead=ahead)
    expected, places, ids = [], [], []
    for step in range(9):
        places.append(json.loads(json.dumps(whole.saved(step))))
        ids.append(whole.batch(step))
        expected += firsts(whole, range(step, step + 1))
    whole.close()
    assert len(set(map(tuple, expected))) > 3
    for begin in range(9):
        stream = kind(ITEMS)
        again = sampler_of(stream, ahead=ahead)
        again.check_saved(places[begin])
        again.restore(places[begin])
        assert json.loads(json.dumps(again.saved(begin))) == places[begin]
        assert firsts(again, range(begin, 9)) == expected[begin:]
        assert again.batch(8) == ids[8]
        again.close()


def test_going_back_with_the_same_stream() -> None:
    for kind in STREAMS:
        sampler = sampler_of(kind(ITEMS))
        expected = firsts(sampler, range(2))
        place = sampler.saved(2)
        expected += firsts(sampler, range(2, 6))
        sampler.restore(place)
        assert firsts(sampler, range(2, 6)) == expected[2:], kind
        sampler.close()


def test_only_a_stream_without_state_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    for kind, again in ((Plain, True), (Stateful, False), (WithEpoch, False)):
        caplog.clear()
        sampler = sampler_of(kind(ITEMS), ahead=0)
        firsts(sampler, range(2))
        place = sampler.saved(2)
        stream = kind(ITEMS)
        restored = sampler_of(stream, ahead=0)
        restored.restore(place)
        firsts(restored, range(2, 3))
        assert (stream.reads > place["items"]) == again
        assert ("read again and passed over" in caplog.text) == again


def test_reading_stays_ahead_without_being_asked() -> None:
    stream = Plain(ITEMS)
    sampler = sampler_of(stream, ahead=2)
    sampler.batch(0)
    deadline = time.monotonic() + 10
    while not sampler.ready(2) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sampler.ready(2)
    assert not sampler.ready(3)
    sampler.close()


def test_streams_that_end_for_good() -> None:
    sampler = sampler_of(iter(ITEMS[:3]), ahead=0)
    sampler.batch(0)
    with pytest.raises(ConfigError, match="pass 2 over them gave no sequence"):
        sampler.batch(1)
    with pytest.raises(ConfigError, match="pass 1 over them gave no sequence of at least two tokens in 2 items"):
        sampler_of(Plain([[1], [2]]), ahead=0).batch(0)


def test_an_iterator_cannot_go_back_but_can_be_read_forward() -> None:
    sampler = sampler_of(iter(ITEMS), ahead=0)
    expected = firsts(sampler, range(3))
    place = sampler_of(iter(ITEMS), ahead=0)
    firsts(place, range(1))
    forward = sampler_of(iter(ITEMS), ahead=0)
    forward.restore(place.saved(1))
    assert firsts(forward, range(1, 3)) == expected[1:]
    sampler.restore(place.saved(1))
    with pytest.raises(ConfigError, match="an iterator, which cannot go back"):
        sampler.batch(1)


def test_places_of_other_data_are_refused() -> None:
    stateful, plain = sampler_of(Stateful(ITEMS), ahead=0), sampler_of(Plain(ITEMS), ahead=0)
    firsts(stateful, range(1))
    with pytest.raises(ConfigError, match=r"state_dict\(\) of the stream that it was saved with"):
        plain.check_saved(stateful.saved(1))
    mapped = TokenBudgetSampler([5, 6], 5)
    with pytest.raises(ConfigError, match="saved with map-style data"):
        plain.check_saved(mapped.saved(0))
    with pytest.raises(ConfigError, match="saved with a stream"):
        mapped.check_saved(plain.saved(0))
    shorter = sampler_of(Plain(ITEMS[:1]), ahead=0)
    firsts(plain, range(1))
    shorter.restore(plain.saved(1))
    with pytest.raises(ConfigError, match="ended after 1 items, but the checkpoint was saved after 3"):
        shorter.batch(1)


def test_what_a_stream_needs() -> None:
    with pytest.raises(ConfigError, match=r"need hydra\.context_length"):
        StreamSampler(Plain(ITEMS), 10, Limits(), 2, reads=True)
    split = Plain(ITEMS)
    split._distributed = type("Split", (), {"rank": 0, "world_size": 4})()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="split by node"):
        sampler_of(split)
    with pytest.raises(ConfigError, match=r"hydra\.total_steps"):
        len(StreamSteps(None, lambda: 0))
    assert list(StreamSteps(5, lambda: 3)) == [3, 4]


def test_what_counts_as_a_stream() -> None:
    numbers: Any = [1, 2]
    loader = torch.utils.data.DataLoader(numbers)
    assert all(map(is_stream, (iter([1]), Plain([]), Stateful([]), loader, {1, 2})))
    assert not any(map(is_stream, ([1], (1,), {"a": 1}, "text", torch.tensor([1]), 17, range(3))))


STATES: list[Any] = [
    {"at": 3, "seed": 2**127 + 1, "done": False, "name": "x", "none": None, "loss": math.inf},
    {1: ("a", (2, 3)), "!odd": {4, 5}, (1, 2): frozenset({"b"})},
    OrderedDict(b=1, a=[deque([1, 2]), b"\x00\xff"]),
    {"numpy": np.random.default_rng(1).bit_generator.state, "python": random.Random(1).getstate()},
    {"old": np.random.RandomState(1).get_state(), "scalar": np.float32(1.5), "big": np.arange(3, dtype=">i4")},
    {"tensor": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(), "none": torch.empty(0, 2), "0": torch.tensor(7)},
]


@pytest.mark.parametrize("state", STATES, ids=range(len(STATES)))
def test_a_state_keeps_its_types_as_json(state: Any) -> None:
    again = state_from_json(json.loads(json.dumps(state_to_json(state), allow_nan=False)))
    assert equal_trees(again, state)


def equal_trees(one: Any, other: Any) -> bool:
    """Equal values of equal types, tensors and arrays among them."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal_trees(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(equal_trees, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype.name == other.dtype.name and np.array_equal(one, other)
    return bool(one == other)


class Named(NamedTuple):
    """What JSON would make a plain tuple of."""

    at: int


def itself() -> list[Any]:
    state: list[Any] = []
    state.append(state)
    return state


@pytest.mark.parametrize("state", [object(), Named(1), {"f": print}, torch.ones(1, requires_grad=True), itself()])
def test_a_state_that_json_cannot_hold_is_refused_at_the_first_step(state: Any) -> None:
    class Odd(Stateful):
        def state_dict(self) -> Any:
            return {"inner": state}

    with pytest.raises(ConfigError, match=r"cannot be saved: state_dict\(\)"):
        sampler_of(Odd(ITEMS), ahead=0).batch(0)
    lax = StreamSampler(Odd(ITEMS), 10, LIMITS, 0, reads=True, saves=False)
    firsts(lax, range(1))
    with pytest.raises(CheckpointError, match=r"cannot be saved: state_dict\(\)"):
        lax.saved(1)


@pytest.mark.parametrize(
    "change",
    [
        {"state": {"torch": "gASVAAAA"}}, {"state": {}}, {"state": 3}, {"state": {"json": {"!tensor": 1}}},
        {"state": {"json": {"!tensor": {"dtype": "int64", "shape": [3], "data": "AAAA"}}}},
        {"state": {"json": {"!object": []}}}, {"state": {"json": {"!tuple": [], "x": 1}}}, {"items": -1},
        {"sequences": 1.5}, {"passes": 2**61}, {"step": "1"},
    ],
)  # fmt: skip
def test_a_forged_place_is_refused_before_anything_moves(change: dict[str, Any]) -> None:
    sampler = sampler_of(Stateful(ITEMS), ahead=0)
    firsts(sampler, range(1))
    with pytest.raises((ConfigError, CheckpointError), match=r"tag|pickle"):
        sampler.check_saved({**sampler.saved(1), **change})
