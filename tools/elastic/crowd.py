"""What one loss costs the coordinator of many members: real sockets, real agents, several processes, no training.

The coordinator has a process of its own, and so has the member that dies; the others share processes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ds_hydra.elastic import agent as agent_module
from ds_hydra.elastic import links
from ds_hydra.elastic.agent import Invitation, MemberAgent
from ds_hydra.elastic.freeing import carried, open_sockets
from ds_hydra.elastic.membership import Patience
from ds_hydra.elastic.messages import Roster
from ds_hydra.elastic.view import Member, Report
from ds_hydra.zero_hetero.norm_table import NormTable
from tools import aims, machine

PER_PROCESS, PER_HOST, LIMIT_S = 64, 8, 300.0
SELDOM_S = 2.0  # turns of members that are not measured
FROZEN_S = 60.0  # many members share few cores, so silence here says nothing
SLOW = Patience(stuck=400, again=80, give_up=2000)


def crowd(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each number of members: CPU seconds of the coordinator's process from the death on until its next view,
    the bytes that it has sent and got, and by how much its latest heartbeat was late."""
    rows = []
    for count in (16,) if quick else (64, 256, 1024):
        with TemporaryDirectory() as folder:
            found = measured(count, Path(folder))
        row = {"members": count, "CPU, s": found["cpu"], "MB sent": found["sent"] / 1e6, "MB got": found["got"] / 1e6,
               "latest heartbeat, s": found["late"], "s to the view": found["took"]}  # fmt: skip
        limits = {"CPU, s": machine.limit(aims.LOSS_CPU_S).here, "MB sent": aims.LOSS_MB, "MB got": aims.LOSS_MB,
                  "latest heartbeat, s": machine.limit(aims.BEAT_LATE_S, waits=True).here}  # fmt: skip
        missed += [f"{count} members: {name} {row[name]:.2f}, not at most {most}"
                   for name, most in limits.items() if row[name] > most]  # fmt: skip
        rows.append(row)
    return rows


def measured(count: int, folder: Path) -> dict[str, float]:
    """What the coordinator of so many members, of which the last one dies, tells of that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=count) for _ in range(count)]
    members = tuple(
        # Without a start time nobody can take its process, which it shares, for a frozen one's, and kill it.
        Member(number, f"host{number // PER_HOST}", one.getsockname()[:2])
        for number, one in enumerate(listeners)
    )
    groups = [range(1), range(count - 1, count)]
    groups += [range(first, min(first + PER_PROCESS, count - 1)) for first in range(1, count - 1, PER_PROCESS)]
    pids = []
    try:
        for own in groups:
            pid = os.fork()
            if pid == 0:
                _end_with(partial(_live, own, members, listeners, folder))
            pids.append(pid)
        for one in listeners:
            one.close()
        _until(lambda: (folder / "ready").exists(), "the members have not met")
        (folder / "dies").write_text(repr(time.monotonic()))
        os.kill(pids[1], signal.SIGKILL)
        _until(lambda: len(list(folder.glob("*.on"))) == count - 1, "not all have the next view")
        _until(lambda: (folder / "told").exists(), "the coordinator has not told what it measured")
        return dict(json.loads((folder / "told").read_text()))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _end_with(program: Callable[[], None]) -> None:
    try:
        program()
    finally:
        os._exit(1)


def _until(there: Callable[[], bool], otherwise: str, poll_s: float = 0.05) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not there():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{otherwise} within {LIMIT_S:.0f} s")
        time.sleep(poll_s)


def _live(own: range, members: Sequence[Member], listeners: Sequence[socket.socket], folder: Path) -> None:
    """A process with some of the members; the coordinator's measures itself."""
    for number, one in enumerate(listeners):
        if number not in own:
            one.close()
    roster, invitation = Roster(0, tuple(members), len(members)), Invitation("5e" * 32, (), None, "run")
    agents = []
    # The members that are not measured share a few cores: they look around seldom, and may be answered late.
    agent_module.open_store, links._CONNECT_S = (lambda host: ((host, 1), None)), LIMIT_S
    if own[0] != 0:
        agent_module.TURN_S = SELDOM_S  # type: ignore[attr-defined]
        os.nice(10)
    for number in own:
        agent = MemberAgent(members[number], listeners[number], invitation, roster, frozen_s=FROZEN_S, patience=SLOW)
        table, last = (NormTable(step, ((1.0, 0.0, 1.0),) * len(members)) for step in (4, 3))
        report = Report(4, table.name, last.name, 0)
        # On the agents' own threads: a thousand threads that train would be what is measured.
        agent.on_abort(partial(agent._tell, partial(agent._machine.park, report, (table, last))),
                       partial(_on, agent, folder / f"{number}.on"))  # fmt: skip
        agents.append(agent)
    if own[0] == 0:
        _measure(agents[0], len(members), folder)
    time.sleep(LIMIT_S)


def _on(agent: MemberAgent, place: Path) -> None:
    place.touch()
    agent._tell(agent._machine.rebuilt)


def _measure(agent: MemberAgent, count: int, folder: Path) -> None:
    own, beaten, late = agent._links, time.monotonic(), 0.0
    to_all = own._to_all

    def noted(word: Any) -> None:
        nonlocal beaten, late
        to_all(word)
        now, beaten = time.monotonic(), beaten
        late, beaten = max(late, now - beaten - own.beat_s), now

    own._to_all = noted  # type: ignore[method-assign]
    _until(lambda: len(own._peers) == count - 1, "the coordinator has not all connections")
    time.sleep(2 * own.beat_s)  # those that both ends have made, and a heartbeat that knows how many there are
    before, cpu, late = carried(open_sockets()), time.process_time(), 0.0
    (folder / "ready").touch()
    _until(lambda: agent.view.epoch > 0, "no next view", 0.005)
    took, spent = time.monotonic() - float((folder / "dies").read_text()), time.process_time() - cpu
    time.sleep(2 * own.beat_s)  # until what was sent is acknowledged, and the next heartbeat is there
    after = carried(open_sockets())
    sent, got = (sum(after[one][at] - before.get(one, (0, 0))[at] for one in after) for at in (0, 1))
    told = {"cpu": spent, "sent": sent, "got": got, "late": late, "took": took}
    (folder / "told.new").write_text(json.dumps(told))
    (folder / "told.new").replace(folder / "told")
