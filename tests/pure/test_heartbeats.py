"""How often ranks send a heartbeat, and with whom small messages connect them."""

from __future__ import annotations

import pytest

from ds_hydra.ranks.channel import peers_of, told_by
from ds_hydra.watchdog.meeting import places
from ds_hydra.watchdog.watchdog import beat_seconds


@pytest.mark.parametrize(
    ("num_heard", "heartbeat_s", "frozen_s", "expected"),
    [(2, 1.0, 9.0, 1.0), (256, 1.0, 9.0, 1.0), (512, 1.0, 9.0, 2.0), (1024, 1.0, 9.0, 3.0), (1024, 5.0, 9.0, 5.0)],
)
def test_ranks_beat_less_often_where_one_hears_many(
    num_heard: int, heartbeat_s: float, frozen_s: float, expected: float
) -> None:
    assert beat_seconds(num_heard, heartbeat_s, frozen_s) == expected


def test_the_first_rank_of_a_host_hears_the_others_and_rank_0_hears_those() -> None:
    assert places(["a"]) == [(None, ())]
    assert places(["a"] * 3) == [(None, (1, 2)), (0, ()), (0, ())]
    # Ranks of a host need not be consecutive.
    assert places(["a", "b", "a", "b", "c", "b"]) == [
        (None, (1, 2, 4)),
        (0, (3, 5)),
        (0, ()),
        (1, ()),
        (0, ()),
        (1, ()),
    ]
    many = places([f"node{rank // 8}" for rank in range(1024)])
    assert len(many[0].below) == 7 + 127
    assert {len(place.below) for place in many[1:]} == {0, 7}
    heard = [below for place in many for below in place.below]
    assert sorted(heard) == list(range(1, 1024))


def test_small_messages_connect_few_ranks() -> None:
    assert peers_of(0, 2) == {1}
    assert peers_of(3, 8) == {1, 2, 4, 5, 7}  # 1, 2 and 4 away
    for num_ranks in (33, 64, 1000, 1024):
        assert max(len(peers_of(rank, num_ranks)) for rank in range(num_ranks)) <= 20
        assert all(rank in peers_of(peer, num_ranks) for rank in (0, 5) for peer in peers_of(rank, num_ranks))


def test_a_text_is_told_once_to_each_rank_and_enters_a_node_once() -> None:
    assert [told_by(rank, 8) for rank in range(4)] == [[4, 2, 1], [], [3], []]
    for num_ranks in (1, 2, 3, 7, 8, 63, 64):
        told = [(rank, receiver) for rank in range(num_ranks) for receiver in told_by(rank, num_ranks)]
        assert sorted(receiver for _, receiver in told) == list(range(1, num_ranks))
        assert all(receiver in peers_of(rank, num_ranks) for rank, receiver in told)
        entered = [receiver // 8 for rank, receiver in told if rank // 8 != receiver // 8]
        assert sorted(entered) == list(range(1, -(-num_ranks // 8)))
