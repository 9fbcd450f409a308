"""Members of an elastic job over a network that is not there: delays, lost connections, deaths, partitions, joiners.

The machines are the real ones; the network, the folder and the training of each member are made of a seed.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ds_hydra.elastic import messages as m
from ds_hydra.elastic.membership import TURN_S, Membership, State
from ds_hydra.elastic.messages import Member, Report, View, to_apply
from ds_hydra.zero_hetero.norm_table import NormTable

FROZEN_S = 3.0
CONNECT_S = 2.0


@dataclass
class Node:
    """A process: its machine, and what its training does."""

    key: int  # of the process: its id, where it was there at the start
    machine: Membership
    alive: bool = True
    frozen: bool = False
    told: str = ""  # why it ended by itself
    parked: int = 0  # how often its training has parked
    views: list[View] = field(default_factory=list)
    asked: int = 0  # the view whose end was asked for
    leaves: bool = False  # it has had notice
    stuck: bool = False  # its training can never be freed
    silent: dict[int, float] = field(default_factory=dict)  # since when those that it watches are

    @property
    def goes_on(self) -> bool:
        return self.alive and bool(self.views) and self.machine.state is State.RUNNING


def table_of(step: int) -> NormTable:
    return NormTable(step, ((float(step), 0.0, 0.0),))


class Wrong(AssertionError):
    """What members may never do."""


class Cluster:
    """So many members, in hosts of so many."""

    def __init__(self, seed: int, num_members: int, *, folder: bool, per_host: int = 2, stuck: float = 0.0,
                 most: int | None = None):  # fmt: skip
        self.random, self.now, self._order = random.Random(seed), 0.0, 0
        self.changed = 0.0  # when a member's training last went on, or a member ended
        self.folder, self.stuck, self.delay_s, self.most = folder, stuck, 0.1, most
        self.tokens: dict[int, m.Roster] = {}
        self.folder_fails: set[int] = set()  # keys of nodes that do not see it
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._last: dict[tuple[int, int], float] = defaultdict(float)  # when the last message of a pair comes
        self._broken: dict[tuple[int, int], float] = defaultdict(float)  # messages sent before are gone
        self._connecting: dict[tuple[int, int], list[m.Message]] = {}
        self.cut: set[frozenset[int]] = set()  # pairs that cannot reach each other
        self.per_host = per_host
        members = tuple(self.process(key, key) for key in range(num_members))
        start = m.Roster(0, members, num_members)
        self.nodes = {one.id: Node(one.id, Membership(one, start, folder=folder, most=most)) for one in members}
        view = View(0, members, (), ("start", 0))
        for node in self.nodes.values():
            node.views.append(view)
        self.epochs: dict[int, View] = {0: view}
        self.owners: dict[int, int] = {one.id: one.id for one in members}  # keys, by id
        for key in self.nodes:
            self._tick(key)

    def process(self, key: int, number: int) -> Member:
        return Member(number, f"host{key // self.per_host}", ("host", key + 1), pid=key)

    # What befalls them.

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (when, self._order, what))

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, what = heapq.heappop(self._queue)
            what()
        self.now = until

    def kill(self, key: int) -> None:
        self.nodes[key].alive = False

    def leave(self, key: int) -> None:
        """It says that it leaves to those that are connected to it, and ends."""
        node = self.nodes[key]
        watchers = {other.key for other in self.nodes.values() if node.machine.me in other.machine.watched}
        for other in watchers | {one.pid for one in node.machine.watched}:
            self._send(node, other, m.Word("bye", node.machine.roster.epoch))
        node.alive = False

    def fail(self, key: int) -> None:
        """Its training meets an error, as of a member that is gone."""
        self._event(key, "fail")

    def notice(self, keys: Iterable[int]) -> None:
        """These members leave at the end of the step, of which all know."""
        for key in keys:
            self.nodes[key].leaves = True
        for node in self.nodes.values():
            self._park_planned(node, len(node.views), frozenset(keys))

    def freeze(self, key: int) -> None:
        self.nodes[key].frozen = True

    def partition(self, sides: Sequence[Iterable[int]]) -> None:
        """Members of different sides cannot reach each other; who is on no side reaches all."""
        of = {key: side for side, keys in enumerate(sides) for key in keys}
        self.cut = {frozenset((a, b)) for a in of for b in of if of[a] != of[b]}

    def break_connection(self, a: int, b: int) -> None:
        """All that is under way between them is lost; they can connect again."""
        self._broken[a, b] = self._broken[b, a] = self.now

    def thaw(self, key: int) -> None:
        self.nodes[key].frozen = False

    def suspect(self, key: int, other: int) -> None:
        """A member takes a living one for lost."""
        self._lost(self.nodes[key], other, False, 0.0)

    def join(self, key: int) -> None:
        me = self.process(key, -1)
        self.nodes[key] = Node(key, Membership(me, None, folder=self.folder, most=self.most))
        self._tick(key)

    # What the network, the folder and training do.

    def _reach(self, a: int, b: int) -> bool:
        return frozenset((a, b)) not in self.cut

    def _event(self, key: int, event: str, *given: object) -> None:
        node = self.nodes[key]
        if node.frozen and node.alive:
            self.at(self.now + 0.1, lambda: self._event(key, event, *given))  # it lies unread
        elif node.alive:
            getattr(node.machine, event)(*given)
            actions = node.machine.taken()
            if (me := node.machine.me.id) >= 0 and self.owners.setdefault(me, key) != key:
                raise Wrong(f"id {me} has two processes")
            for action in actions:
                self._do(node, action)

    def _do(self, node: Node, action: m.Action) -> None:
        if not node.alive:
            return
        later = self.random.uniform
        match action:
            case m.Send(to, message):
                self._send(node, to.pid if to.host else self.owners[to.id], message)
            case m.Abort():
                if not node.stuck and self.random.random() >= self.stuck:
                    self.at(self.now + later(0.05, 0.9), lambda: self._park(node, len(node.views)))
                else:
                    node.stuck = True
            case m.GoOn(view):
                self._goes_on(node, view)
            case m.TakeToken(epoch, roster):
                if self.folder_fails & {node.key}:
                    self.at(self.now + later(0, 0.2), lambda: self._event(node.key, "token", epoch, None))
                else:
                    self.at(self.now + later(0, 0.1), lambda: self._take(node, epoch, roster))
            case m.OpenStore(epoch):
                store = f"store{node.key}", epoch
                self.at(self.now + later(0, 0.1), lambda: self._event(node.key, "opened", epoch, store))
            case m.KillProcess(member):
                if self.process(member.pid, -1).host != node.machine.me.host:
                    raise Wrong(f"{node.key} is to kill a process of another host")
                if self.nodes[member.pid].frozen:  # it is looked at first, as `end_frozen` does
                    self.kill(member.pid)
            case m.Exit(why, behind):
                node.alive, node.told, self.changed = False, "" if behind and node.leaves else why, self.now

    def _take(self, node: Node, epoch: int, roster: m.Roster) -> None:
        if not node.alive:
            return
        decided = self.tokens.setdefault(epoch, roster)
        self.at(self.now + self.random.uniform(0, 0.1), lambda: self._event(node.key, "token", epoch, decided))

    def _send(self, node: Node, to: int, message: m.Message) -> None:
        sender, pair = node.machine.me.id, (node.key, to)
        other = self.nodes.get(to)
        if sender < 0:  # it answers over the connection of who has made it a member
            sender = next((one.id for one in other.machine.roster.members if one.pid == node.key), -1) if other else -1
            if sender < 0:
                return
        if pair in self._connecting:
            self._connecting[pair].append(message)
        elif not self._reach(*pair):
            waiting = self._connecting[pair] = [message]
            self.at(self.now + CONNECT_S / 2, lambda: self._connected(node, to, waiting, last=False))
            self.at(self.now + CONNECT_S, lambda: self._connected(node, to, waiting, last=True))
        elif other is None or not other.alive:
            self._lost(node, to, True, 0.05)
        else:
            # In order, as over one connection.
            self._last[pair] = max(self._last[pair], self.now + self.random.uniform(0.0, self.delay_s))
            sent, wire = self.now, m.to_wire(message, node.machine.rosters)
            self.at(self._last[pair], lambda: self._comes(pair, sent, sender, wire))

    def _connected(self, node: Node, to: int, waiting: list[m.Message], *, last: bool) -> None:
        """One connection is made at a time, with what is to be said then; it is tried twice, and fails at the last."""
        pair = node.key, to
        if self._connecting.get(pair) is not waiting or not (last or self._reach(*pair)):
            return
        del self._connecting[pair]
        if not self._reach(*pair):
            self._lost(node, to, False, 0.05)
        elif node.alive:
            for message in waiting:
                self._send(node, to, message)

    def _comes(self, pair: tuple[int, int], sent: float, sender: int, message: dict[str, Any]) -> None:
        if self._reach(*pair) and self._broken[pair] <= sent:
            told = m.from_wire(message, self.nodes[pair[1]].machine.rosters)
            if told is not None:
                self._event(pair[1], "hear", sender, told)

    def _lost(self, node: Node, key: int, dead: bool, within: float) -> None:
        for member in node.machine.roster.members:
            if member.pid == key:
                self.at(
                    self.now + self.random.uniform(0, within), partial(self._event, node.key, "lose", member.id, dead)
                )

    def _tick(self, key: int) -> None:
        node = self.nodes[key]
        if not node.alive:
            return
        self.at(self.now + TURN_S * self.random.uniform(0.8, 1.2), lambda: self._tick(key))
        if node.frozen:
            return
        self._event(key, "tick")
        if node.machine.me.id < 0:
            self._knock(node)
        watched = {one.pid for one in node.machine.watched}
        watchers = {
            other.key
            for other in self.nodes.values()
            if other.alive and node.machine.me in other.machine.watched and self._reach(key, other.key)
        }
        for other in watched | watchers:
            self._send(node, other, node.machine.beat())
        self._listen(node, watched)
        if node.alive and node.machine.wanted and node.asked < len(node.views):
            others = [self.nodes[one.pid] for one in node.machine.roster.members]
            if all(each.goes_on and each.machine.installed == node.machine.installed for each in others):
                node.asked = len(node.views)  # the wish travels with a step that all complete
                for each in others:
                    self._park_planned(each, len(each.views))

    def _listen(self, node: Node, watched: set[int]) -> None:
        """Who is silent for long is told."""
        node.silent = {other: node.silent.get(other, self.now) for other in watched}
        for other in watched:
            if self.nodes[other].alive and not self.nodes[other].frozen and self._reach(node.key, other):
                node.silent[other] = self.now
            elif self.now - node.silent[other] > FROZEN_S and self.nodes[other].alive:
                self._event(node.key, "silent", next(one.id for one in node.machine.watched if one.pid == other))

    def _knock(self, node: Node) -> None:
        for other in self.nodes.values():
            machine = other.machine
            if other.goes_on and machine.coordinator == machine.me.id and self._reach(node.key, other.key):
                self._event(other.key, "knock", node.machine.me)

    def _park(self, node: Node, views: int, leaving: frozenset[int] = frozenset()) -> None:
        """Training is free, unless it has gone on since."""
        if node.alive and len(node.views) == views and node.machine.report is None:
            if node.frozen:
                self.at(self.now + 0.2, lambda: self._park(node, views, leaving))
                return
            node.parked += 1
            epoch = node.views[-1].epoch if node.views else -1
            held = [table_of(node.parked - back) if self.random.random() < 0.5 else None for back in (0, 1)]
            table, last = (one.name if one else None for one in held)
            tables = [one for one in held if one]
            self._event(node.key, "park", Report(node.parked, table, last, epoch), tables, leaving)

    def _park_planned(self, node: Node, views: int, leaving: frozenset[int] = frozenset()) -> None:
        """Training parks at the end of its step."""
        if node.alive and len(node.views) == views and node.machine.report is None:
            if node.goes_on and not node.frozen and self.random.random() < 0.5:
                self._park(node, views, leaving)
            else:
                self.at(self.now + 0.2, lambda: self._park_planned(node, views, leaving))

    def _goes_on(self, node: Node, view: View) -> None:
        known = self.epochs.setdefault(view.epoch, view)
        if repr(known) != repr(view):
            raise Wrong(f"epoch {view.epoch} has two views: {known} and {view}")
        if self.most is not None and len(view.members) > self.most:
            raise Wrong(f"epoch {view.epoch} has {len(view.members)} members, and spares should wait for {self.most}")
        me = node.machine.me.id
        if node.views and view.epoch <= node.views[-1].epoch:
            raise Wrong(f"member {me} went from epoch {node.views[-1].epoch} to {view.epoch}")
        mine = view.reports[me]
        name = to_apply(mine, view.reports.values())
        if name is not None and name not in (mine.table, mine.last) and name not in view.tables:
            raise Wrong(f"member {me} lacks the table by which it completes its step")
        if node.views and mine.committed != node.parked:
            raise Wrong(f"epoch {view.epoch} has a report of member {me} that is old: {mine}, not {node.parked}")
        newest = max((report.layout_epoch for report in view.reports.values()), default=-1)
        if view.former != self.epochs[newest].members:
            raise Wrong(f"epoch {view.epoch} names the wrong former members")
        node.views.append(view)
        self.changed = self.now
        count = len(node.views)
        self.at(self.now + self.random.uniform(0, 0.6), lambda: self._rebuilt(node, count))

    def _rebuilt(self, node: Node, views: int) -> None:
        if len(node.views) == views:
            self._event(node.key, "rebuilt")

    # What must hold.

    def end(self) -> str:
        """What is wrong once all is quiet; "" if nothing is."""
        living = [node for node in self.nodes.values() if node.alive and not node.frozen and node.views]
        waiting = [node for node in living if not node.goes_on]
        if waiting:
            return f"members {[node.key for node in waiting]} neither go on nor end"
        epochs = {node.views[-1].epoch for node in living}
        if len(epochs) > 1:
            return f"two sides go on: {[(node.key, node.views[-1].epoch) for node in living]}"
        if living and living[0].machine.roster.ids != {node.machine.me.id for node in living}:
            return f"the last view holds {sorted(living[0].machine.roster.ids)}, and {[n.key for n in living]} live"
        return ""

    @property
    def survivors(self) -> list[int]:
        return [node.key for node in self.nodes.values() if node.goes_on]
