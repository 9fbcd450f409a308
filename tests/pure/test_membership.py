"""Who goes on when members die, freeze, part or join: one machine by itself, and many over a made-up network."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.elastic import messages as m
from ds_hydra.elastic.membership import Membership, Patience, State
from ds_hydra.elastic.messages import Member, Report
from tests.support.drawn_members import KINDS, befall, parted, tried, wrong_in
from tests.support.simulated_members import Cluster


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 10_000), marks=pytest.mark.long)], ids=len)
def test_orders_of_events_that_are_drawn_leave_one_view_or_none(seeds: range) -> None:
    assert not [f"{seed} ({kinds}): {what}" for seed in seeds for what, kinds, _ in [tried(seed)] if what]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.floats(0, 12)), max_size=6),
    st.integers(1, 6), st.booleans(), st.integers(0, 2**32),
)  # fmt: skip
def test_whatever_befalls_members_they_end_in_one_view(
    what: list[tuple[str, float]], num: int, folder: bool, seed: int
) -> None:
    cluster, rng = Cluster(seed, num, folder=folder), random.Random(seed)
    for kind, when in what:
        befall(cluster, rng, kind, lambda when=when: 1.0 + when)  # type: ignore[misc]
    assert not wrong_in(cluster, {kind for kind, _ in what})


@pytest.mark.drawn
@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 100), marks=pytest.mark.long)], ids=len)
@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("sides", [((0, 1), (2, 3)), ((0,), (1, 2, 3)), ((3,), (0, 1, 2)), ((1, 3), (0, 2))])
@pytest.mark.parametrize("heals", [None, 0.5, 3.0, 20.0])
def test_of_a_job_in_two_parts_one_side_goes_on_at_most(
    seeds: range, sides: Sequence[Sequence[int]], folder: bool, heals: float | None
) -> None:
    for seed in range(5):
        cluster = Cluster(seed, 4, folder=folder)
        cluster.at(1.0, lambda c=cluster: c.partition(sides))  # type: ignore[misc]
        if heals is not None:
            cluster.at(1.0 + heals, lambda c=cluster: c.partition([]))  # type: ignore[misc]
        assert not wrong_in(cluster, {"partition"})
        on = cluster.survivors
        if heals == 0.5:
            assert on == [0, 1, 2, 3], "nobody was silent for long"
        elif heals == 3.0:
            continue  # as long as it takes to be taken for frozen
        elif len(sides[0]) == len(sides[1]):
            assert on in ([sorted(side) for side in sides] if folder else [[]]), "half may only go on by the folder"
        else:
            assert on == list(sides[1]), "more than half may"


BACK_IN_THE_TURN_OF_A_VOTE = (375, 482, 770)
"""Seeds of networks that are back while the lesser part counts its votes, which then has the majority's too."""


@pytest.mark.parametrize(
    "seeds",
    [range(20), BACK_IN_THE_TURN_OF_A_VOTE, pytest.param(range(20, 3000), marks=pytest.mark.long)],
    ids=["some", "back in the turn of a vote", "many"],
)
def test_of_the_greater_part_of_a_job_that_is_parted_for_a_while_nobody_ends(seeds: Sequence[int]) -> None:
    assert not [f"{seed}: {text}" for seed in seeds if (text := parted(seed))]


def test_all_but_one_may_die_at_once_where_that_is_known() -> None:
    for folder in (True, False):
        cluster = Cluster(0, 5, folder=folder)
        for key in (0, 1, 3, 4):
            cluster.at(1.0, lambda c=cluster, k=key: c.kill(k))  # type: ignore[misc]
        assert not wrong_in(cluster, set() if folder else {"partition"})
        assert cluster.survivors == ([2] if folder else [])


@pytest.mark.parametrize("leaving", [(0,), (3,), (0, 1), (0, 2, 4)])
def test_members_that_have_had_notice_leave_and_the_others_go_on_in_one_view(leaving: tuple[int, ...]) -> None:
    for seed in range(8):
        cluster = Cluster(seed, 5, folder=seed % 2 == 0)
        cluster.at(1.0, lambda c=cluster: c.notice(leaving))  # type: ignore[misc]
        cluster.run(30.0)
        assert not cluster.end()
        assert cluster.survivors == sorted({*range(5)} - {*leaving})
        assert [len(cluster.nodes[key].views) for key in cluster.survivors] == [2] * (5 - len(leaving))
        assert not any(node.told for node in cluster.nodes.values())


@pytest.mark.parametrize("fault", ["kill", "suspect", "break_connection"])
def test_what_befalls_members_while_others_leave_ends_in_one_view(fault: str) -> None:
    for seed in range(12):
        cluster, rng = Cluster(seed, 5, folder=seed % 2 == 0), random.Random(seed)
        lost, when = rng.randrange(5), 1.0 + rng.random()
        cluster.at(1.0, lambda c=cluster: c.notice((0, 3)))  # type: ignore[misc]
        args = (lost,) if fault == "kill" else (lost, rng.randrange(5))
        cluster.at(when, lambda c=cluster, args=args: getattr(c, fault)(*args))  # type: ignore[misc]
        assert not wrong_in(cluster, {fault})
        assert {1, 2, 4} - {lost} <= {*cluster.survivors}


@pytest.mark.parametrize("again", [0.05, 0.3, 0.6, 1.0])
def test_a_second_death_in_whatever_state_is_survived(again: float) -> None:
    for seed, (first, second) in enumerate([(0, 1), (1, 0), (4, 0), (2, 3)]):
        cluster = Cluster(seed, 5, folder=seed % 2 == 0)
        cluster.at(1.0, lambda c=cluster, k=first: c.kill(k))  # type: ignore[misc]
        cluster.at(1.0 + again, lambda c=cluster, k=second: c.kill(k))  # type: ignore[misc]
        assert not wrong_in(cluster, {"kill"})
        assert cluster.survivors == sorted({0, 1, 2, 3, 4} - {first, second})


@pytest.mark.parametrize("coordinator", [False, True], ids=["another", "coordinator"])
@pytest.mark.parametrize("first", ["leaves", "fails"])
def test_an_error_that_a_member_has_left_behind_calls_a_round(first: str, coordinator: bool) -> None:
    """That it has left, only the coordinator knows. Another one meets the error, and the coordinator may wait for that
    one in vain, or it meets it itself."""
    cluster = Cluster(0, 4, folder=False)
    cluster.delay_s = 0.0  # the word of it comes before a heartbeat finds nobody
    leaves, fails = (1.0, 1.2) if first == "leaves" else (1.2, 1.0)
    cluster.at(leaves, lambda: cluster.leave(1))
    cluster.at(fails, lambda: cluster.fail(0 if coordinator else 2))
    cluster.run(30.0)
    assert cluster.survivors == [0, 2, 3]
    assert not cluster.end()
    assert [len(node.views) for node in cluster.nodes.values()] == [2, 1, 2, 2]


def test_errors_that_all_have_alike_and_those_after_an_old_leave_call_no_round() -> None:
    cluster = Cluster(0, 4, folder=False)
    for key in range(4):
        cluster.at(1.0, lambda key=key: cluster.fail(key))  # type: ignore[misc]
    cluster.at(6.0, lambda: cluster.leave(3))
    cluster.run(30.0)
    assert [len(node.views) for node in cluster.nodes.values()] == [1] * 4
    cluster.at(40.0, lambda: cluster.fail(1))  # it goes on without 3 from here
    cluster.at(50.0, lambda: cluster.fail(0))
    cluster.run(60.0)
    assert [len(node.views) for node in cluster.nodes.values()] == [2, 2, 2, 1]


def test_joiners_get_new_ids_and_the_last_ranks() -> None:
    cluster = Cluster(0, 2, folder=False)
    cluster.at(1.0, lambda: cluster.join(100))
    cluster.at(9.0, lambda: cluster.join(101))
    cluster.at(5.0, lambda: cluster.kill(1) if cluster.nodes[100].goes_on else None)
    cluster.run(30.0)
    assert not cluster.end()
    view = cluster.nodes[0].views[-1]
    assert [one.id for one in view.members] == [0, 2, 3], "id 1 has been used"
    assert view.reports[3] == Report()
    assert [one.id for one in view.former] == [0, 2]
    assert cluster.nodes[101].views == [view]


def test_a_spare_waits_while_there_are_as_many_members_as_at_first() -> None:
    cluster = Cluster(0, 3, folder=True, most=3)
    for key in (100, 101):
        cluster.at(1.0, lambda key=key: cluster.join(key))  # type: ignore[misc]
    cluster.run(10.0)
    assert [len(node.views) for node in cluster.nodes.values()] == [1, 1, 1, 0, 0]
    cluster.kill(0)  # the coordinator, at which they have knocked
    cluster.run(40.0)
    assert not cluster.end()
    assert [len(view.members) for view in cluster.nodes[1].views] == [3, 2, 3]
    assert sum(bool(cluster.nodes[key].views) for key in (100, 101)) == 1, "who knocks first at the next one"


def test_where_training_cannot_use_so_many_members_who_wants_to_join_waits_for_other_numbers() -> None:
    cluster = Cluster(0, 3, folder=True)
    for node in cluster.nodes.values():
        node.machine.unfit.add(4)
    cluster.at(1.0, lambda: cluster.join(100))
    cluster.run(10.0)
    assert [len(node.views) for node in cluster.nodes.values()] == [1, 1, 1, 0]
    cluster.kill(2)
    cluster.run(40.0)
    assert not cluster.end()
    assert [one.id for one in cluster.nodes[0].views[-1].members] == [0, 1, 3]


# One machine, by hand.


def members(count: int) -> tuple[Member, ...]:
    return tuple(Member(number, "host", ("host", number + 1), pid=number) for number in range(count))


START = m.Roster(0, members(4), 4)


def machine(number: int, *, folder: bool = False) -> Membership:
    return Membership(START.members[number], START, folder=folder)


def done(mine: Membership, event: str, *given: object) -> list[m.Action]:
    """What a machine does when something happens."""
    getattr(mine, event)(*given)
    return mine.taken()


def stop(number: int, candidate: int) -> m.Stop:
    return m.Stop(m.Ballot(number, candidate), START.epoch, planned=False)


def sent(actions: Sequence[m.Action], kind: type) -> list[Any]:
    return [one.message for one in actions if isinstance(one, m.Send) and isinstance(one.message, kind)]


SECOND = m.Roster(1, members(3), 4)


def install(number: int, candidate: int) -> m.Install:
    return m.Install(m.Ballot(number, candidate), 0, SECOND, START.members, ("store", 1), (Report(),) * 3)


def test_who_has_voted_again_goes_on_by_the_later_round_only() -> None:
    """The later candidate tells the others this member's report, which an install of the older round makes false."""
    mine = machine(2)
    done(mine, "hear", 0, stop(1, 0))
    assert mine.state is State.ABORTING
    assert sent(done(mine, "park", Report(7)), m.Vote)[0].ballot == m.Ballot(1, 0)
    assert sent(done(mine, "hear", 1, stop(2, 1)), m.Vote)[0].ballot == m.Ballot(2, 1)
    assert not any(isinstance(one, m.GoOn) for one in done(mine, "hear", 0, install(1, 0)))
    assert mine.state is State.VOTED
    assert any(isinstance(one, m.GoOn) for one in done(mine, "hear", 1, install(2, 1)))
    assert mine.state is State.REBUILDING


def test_who_has_promised_accepts_nothing_older() -> None:
    mine = machine(2)
    done(mine, "hear", 1, stop(2, 1))
    assert sent(done(mine, "hear", 0, stop(1, 0)), m.Newer)
    assert not done(mine, "hear", 0, m.Propose(m.Ballot(1, 0), 0, SECOND))
    assert sent(done(mine, "hear", 1, m.Propose(m.Ballot(2, 1), 0, SECOND)), m.Word)


def test_what_was_accepted_before_is_proposed_again_and_never_installed() -> None:
    voter, candidate = machine(2), machine(1)
    done(voter, "hear", 0, stop(1, 0))
    done(voter, "hear", 0, m.Propose(m.Ballot(1, 0), 0, SECOND))
    done(candidate, "park", Report(7))
    (called,) = {one.ballot for one in sent(done(candidate, "lose", 0, True), m.Stop)}
    done(voter, "park", Report(7))
    (vote,) = sent(done(voter, "hear", 1, m.Stop(called, START.epoch, planned=False)), m.Vote)
    assert vote.accepted == (m.Ballot(1, 0), SECOND)
    done(candidate, "hear", 3, m.Vote(called, START.epoch, None, Report(7), None))
    proposed = sent(done(candidate, "hear", 2, vote), m.Propose)
    assert {one.roster for one in proposed} == {SECOND}
    accept = m.Word("accept", 0, called.number)
    actions = [action for sender in (2, 3) for action in done(candidate, "hear", sender, accept)]
    assert candidate.roster == SECOND
    assert sent(actions, m.Stop), "its successor is sought"
    assert not any(isinstance(one, m.OpenStore | m.GoOn) for one in actions)


def test_training_that_cannot_be_freed_ends_its_process() -> None:
    mine = machine(2)
    done(mine, "hear", 0, stop(1, 0))
    ended = [turn for turn in range(30) for one in done(mine, "tick") if isinstance(one, m.Exit)]
    assert ended[0] == Patience().stuck - 1


def test_what_an_old_epoch_says_is_answered_by_what_is_so_now() -> None:
    mine = machine(0)
    done(mine, "hear", 1, m.Newer(SECOND))
    for old in (m.Word("fault", 0), m.Word("ask", 0), stop(5, 3)):
        (answer,) = sent(done(mine, "hear", 3, old), m.Newer)
        assert answer.roster == SECOND
    assert any(isinstance(one, m.Exit) for one in done(machine(3), "hear", 0, answer))


def test_a_frozen_member_is_killed_by_one_of_its_host() -> None:
    mine = machine(0)
    assert done(mine, "silent", 2) == [m.KillProcess(START.members[2])]
    assert mine.state is State.RUNNING, "until its death is known"
    done(mine, "lose", 2, True)
    assert mine.state is State.ABORTING


def _counts_nobody(self: Membership) -> None:
    current = self.round
    if current is not None and current.value is None and self.roster.ids - self.lost <= set(current.votes):
        current.value = self._next_roster(current)
        self._decided(current.value)


def _takes_its_own(self: Membership, epoch: int, roster: m.Roster | None) -> None:
    if epoch == self.roster.epoch and self.round is not None and self.round.value is not None:
        self._decided(self.round.value)


@pytest.mark.parametrize(("part", "mutant"), [("token", _takes_its_own), ("_count", _counts_nobody)])
def test_a_machine_with_a_mistake_is_found(
    part: str, mutant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Membership, part, mutant)
    assert any("has two views" in tried(seed)[0] for seed in range(300))
