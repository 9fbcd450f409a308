"""NCCL's rules for a whole engine: within `strict_world` its links, edges, lane and collectives are strict ones.

The world is laid out as on devices: small messages have a gloo group of their own, and so have the stages' edges, and
every team of twins. What one communicator carries, exchanges and collectives alike, runs in the order of its start; by
the rule `one_queue` all that a rank starts does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.support.strict import StrictTransport
from tests.support.strict_collectives import StrictCollectives, strict_collectives
from tests.support.strict_line import Line, Owner, Rules
from tests.support.strict_memory import StrictLane, StrictMemory


@contextmanager
def strict_world(rules: Rules | None = None) -> Iterator[list[StrictTransport]]:
    """Worlds made within it are strict; the transports so far. At the end every exchange must have been waited for."""
    from ds_hydra.ranks import world

    rules = rules or Rules()
    made: list[StrictTransport] = []
    lanes: list[StrictLane] = []
    devices = OnDevices(rules)
    collectives = StrictCollectives(rules, devices.line_of)
    owners: list[Owner] = [collectives]

    def transport(group: dist.ProcessGroup, **_: Any) -> StrictTransport:
        own = dist.new_group(list(range(group.size())))
        made.append(StrictTransport(own, ("links", "edges")[len(made) % 2], rules, devices.line_of(group)))
        devices.transports[group] = made[-1]
        owners.append(made[-1])
        return made[-1]

    def lane(*, early: bool) -> StrictLane:
        assert early, "the default group is NCCL's"
        lanes.append(StrictLane())
        return lanes[-1]

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(world, "TorchTransport", transport))
        stack.enter_context(mock.patch.object(world, "HostLane", lane))
        stack.enter_context(mock.patch.object(world, "dist", devices))
        stack.enter_context(strict_collectives(collectives))
        stack.enter_context(StrictMemory(owners, lanes))
        yield made
    for strict in made:
        strict.close()
    devices.close()


@contextmanager
def one_push_at_a_time() -> Iterator[None]:
    """Engines made within it have room for one push."""
    from ds_hydra.step import strategy_runtime

    with mock.patch.object(strategy_runtime, "room_for_pushes", return_value=0):
        yield


class OnDevices:
    """torch.distributed, but for a default group that is NCCL's: groups are, unless they are made as gloo's."""

    def __init__(self, rules: Rules | None = None) -> None:
        self._rules = rules or Rules()
        self._of_hosts: set[dist.ProcessGroup] = set()
        self._lines: dict[dist.ProcessGroup | None, Line] = {}
        self.transports: dict[dist.ProcessGroup, StrictTransport] = {}

    def get_backend(self, group: dist.ProcessGroup) -> str:
        return "nccl"

    def new_group(
        self, ranks: Any, timeout: Any = None, backend: str | None = None, options: Any = None
    ) -> dist.ProcessGroup:
        group = dist.new_group(ranks, timeout, backend)
        if backend == "gloo":
            self._of_hosts.add(group)
        return group

    def line_of(self, group: dist.ProcessGroup) -> Line | None:
        """On which line a group's messages and collectives run; None for those of hosts."""
        if group in self._of_hosts:
            return None
        if group in self.transports:
            self.transports[group].made = True
        key = None if self._rules.one_queue else group
        if key not in self._lines:
            self._lines[key] = Line()
        return self._lines[key]

    def close(self) -> None:
        """Return when everything is over."""
        for line in self._lines.values():
            line.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)
