"""Agents over real sockets: whoever dies, freezes or joins, all others find the same next view."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from ds_hydra.elastic.agent import MemberAgent, end_frozen, take_token
from ds_hydra.elastic.messages import Member, Report, Roster, View
from ds_hydra.ranks.channel import first_channel
from ds_hydra.watchdog.host import Identity, host, listen, started, stopped
from tests.support.ends import End, ends, mark_fault
from tools import aims, machine

FROZEN_S = 1.5  # after which a silent member counts as frozen


def views(place: Path) -> dict[str, list[Any]]:
    """Of each process, by the number in its file's name."""
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in place.glob("*.views")}


def as_json(view: View) -> Any:
    return TypeAdapter(View).dump_python(view, mode="json", exclude={"tables"})


def train(agent: MemberAgent, name: str, place: Path, *, until: int) -> None:
    """Go on until a view has so many members; note each view that was installed."""
    committed = 0
    while True:
        if agent.wanted:  # as a step's numbers tell it to all
            (place / "wanted").touch()
        if agent.fault(0.02) or (place / "wanted").exists():
            view = agent.park(Report(committed, layout_epoch=agent.view.epoch))
            with (place / f"{name}.views").open("a") as file:
                file.write(json.dumps([time.time(), as_json(view)]) + "\n")
            agent.rebuilt()
            if len(view.members) == until:
                time.sleep(0.5)  # so that none leaves while the others still find it
                return
        committed += 1


def run(
    tmp_path: Path,
    num: int,
    lost: dict[int, tuple[float, str]],
    until: int,
    *,
    joins: bool = False,
    frozen_s: float = FROZEN_S,
) -> tuple[list[End], dict[str, list[Any]], float]:
    """Ranks that end so many seconds after the start, and in which way; views, and the time of the first end."""

    def program(rank: int, place: Path) -> None:
        if rank >= num:  # a process that joins
            while not (tmp_path / "invitation").exists():
                time.sleep(0.02)
            agent = MemberAgent.join(tmp_path / "invitation", frozen_s=frozen_s, heartbeat_s=0.25)
            view = agent.park(Report())
            (tmp_path / f"{rank}.views").write_text(json.dumps([time.time(), as_json(view)]) + "\n")
            agent.rebuilt()
            time.sleep(0.5)
            return
        with first_channel() as channel:
            agent = MemberAgent.start(channel, folder=tmp_path, frozen_s=frozen_s, heartbeat_s=0.25)
        if joins and rank == 0:
            agent.invitation.write(tmp_path / "invitation")
        if rank in lost:
            after, how = lost[rank]
            time.sleep(after)
            (tmp_path / f"{rank}.gone").write_text(repr(time.time()))
            mark_fault(place)
            if how == "exit":
                os._exit(3)
            os.kill(os.getpid(), getattr(signal, how))
        train(agent, str(rank), tmp_path, until=until)

    found = ends_with_joiner(program, num) if joins else ends(program, num, limit_s=40)
    gone = min((float(path.read_text()) for path in tmp_path.glob("*.gone")), default=0.0)
    return found, views(tmp_path), gone


def ends_with_joiner(program: Any, num: int) -> list[End]:
    """The ranks, and beside them a process that joins."""
    pid = os.fork()
    if pid == 0:
        try:
            program(num, Path())
        finally:
            os._exit(0)
    found = ends(program, num, limit_s=40)
    os.waitpid(pid, 0)
    return found


def same_last(seen: dict[str, list[Any]], names: Sequence[int]) -> View:
    """The view that all of these processes have last."""
    last = [seen[str(name)][-1][1] for name in names]
    assert all(one == last[0] for one in last)
    return TypeAdapter(View).validate_python(last[0])


@pytest.mark.drawn
@pytest.mark.parametrize(("lost", "how"), [(0, "SIGKILL"), (1, "SIGKILL"), (3, "exit"), (0, "SIGSTOP"), (2, "SIGSTOP")])
def test_survivors_go_on_in_one_view(lost: int, how: str, tmp_path: Path) -> None:
    found, seen, gone = run(tmp_path, 4, {lost: (0.6, how)}, until=3)
    stay = [rank for rank in range(4) if rank != lost]
    view = same_last(seen, stay)
    assert [one.id for one in view.members] == stay
    assert [one.id for one in view.former] == [0, 1, 2, 3]
    assert {number: report.layout_epoch for number, report in view.reports.items()} == dict.fromkeys(stay, 0)
    assert [end.code for end in found] == [(3 if how == "exit" else -9) if rank == lost else 0 for rank in range(4)]
    assert max(seen[str(rank)][-1][0] for rank in stay) - gone < (6.0 if how == "SIGSTOP" else 3.0)


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1, 3])
@pytest.mark.parametrize(("how", "repeats", "more_s"), [("SIGKILL", 34, 0.0), ("SIGSTOP", 10, FROZEN_S)])
def test_the_next_view_is_there_soon(how: str, repeats: int, more_s: float, lost: int, tmp_path: Path) -> None:
    """Seconds from a member's death, or from when it counts as frozen, until the last survivor has it."""
    times, stay = list[float](), [rank for rank in range(4) if rank != lost]
    for number in range(repeats):
        place = tmp_path / str(number)
        place.mkdir()
        _, seen, gone = run(place, 4, {lost: (0.4 + 0.01 * number, how)}, until=3)
        assert [one.id for one in same_last(seen, stay).members] == stay
        times.append(max(seen[str(rank)][-1][0] for rank in stay) - gone - more_s)
    assert statistics.median(times) <= machine.limit(aims.VIEW_MEDIAN_S, waits=True).here, times
    assert max(times) <= machine.limit(aims.VIEW_WORST_S, waits=True).here, times


@pytest.mark.parametrize(("second", "after"), [(1, 0.6), (1, 0.75), (4, 0.9)])
def test_two_that_die_at_once_or_one_after_the_other_leave_one_view(second: int, after: float, tmp_path: Path) -> None:
    _, seen, _ = run(tmp_path, 5, {0: (0.6, "SIGKILL"), second: (after, "SIGKILL")}, until=3)
    stay = [rank for rank in range(5) if rank not in (0, second)]
    assert [one.id for one in same_last(seen, stay).members] == stay


def test_that_a_member_has_left_an_error_tells_all_others(tmp_path: Path) -> None:
    """Only the coordinator is connected to member 1, and its training waits for that of member 2, which has failed."""

    def program(rank: int, place: Path) -> None:
        with first_channel() as channel:
            agent = MemberAgent.start(channel, folder=None, frozen_s=9.0, heartbeat_s=0.25)
        if rank == 1:
            time.sleep(1.0)  # by then it is connected
            agent.close()
            (tmp_path / "left").touch()
            return
        while not (tmp_path / "left").exists():
            time.sleep(0.02)
        deadline = time.monotonic() + 5.0
        while not (agent.fault(5.0) if rank == 2 else agent.faulty):
            assert time.monotonic() < deadline, "it has not heard of it"
            time.sleep(0.02)
        view = agent.park(Report(0, layout_epoch=0))
        (tmp_path / f"{rank}.views").write_text(json.dumps([time.time(), as_json(view)]))
        agent.rebuilt()
        time.sleep(0.5)  # so that none leaves while the others still find it

    found = ends(program, 4, limit_s=30)
    assert [end.code for end in found] == [0] * 4, found
    assert [one.id for one in same_last(views(tmp_path), (0, 2, 3)).members] == [0, 2, 3]


def test_a_process_joins_with_a_new_id(tmp_path: Path) -> None:
    _, seen, _ = run(tmp_path, 2, {}, until=3, joins=True)
    view = same_last(seen, [0, 1, 2])
    assert [one.id for one in view.members] == [0, 1, 2]
    assert view.reports[2] == Report()


def test_a_member_that_answers_is_not_killed_and_a_frozen_one_is() -> None:
    """An order to kill may have waited in a cable that was cut, until all was well again."""
    with listen("127.0.0.1") as listener:
        living = subprocess.Popen(["sleep", "30"])
        me = Identity(host(), living.pid, started(living.pid))
        member = Member(1, me.host, listener.getsockname()[:2], me.pid, me.started)
        answers = threading.Thread(target=lambda: listener.accept()[0].send(b"n" * 16))
        answers.start()
        end_frozen(member)
        answers.join()
        assert living.poll() is None
        living.send_signal(signal.SIGSTOP)
        while not stopped(me):
            time.sleep(0.01)
        end_frozen(member)
        assert living.wait(timeout=5) == -signal.SIGKILL
    silent = subprocess.Popen(["sleep", "30"])
    end_frozen(Member(2, me.host, member.address, silent.pid, started(silent.pid)))
    assert silent.wait(timeout=5) == -signal.SIGKILL, "nobody answers"


def test_of_a_token_there_is_one(tmp_path: Path) -> None:
    first, second = (Roster(epoch, (Member(0, "host", ("a", 1)),), 1) for epoch in (1, 2))
    assert take_token(tmp_path, "run-0", first) == first
    assert take_token(tmp_path, "run-0", second) == first
    (tmp_path / "epochs" / "run-1").write_text('{"epoch":')
    with pytest.raises(ValueError, match="is not whole"):
        take_token(tmp_path, "run-1", second)
