"""A rank's world: its number, and all groups, channels and transports that it uses, made of torch's default group.

[Note: worlds]
A world is the set of processes that train together, numbered 0..num_ranks-1. It is made once and handed down; nothing
below asks torch for the default group. So training can go on with other processes: close the world, let torch's
default group be that of the processes that are there, make another world, assemble again. Ranks in strategies, layouts
and plans are always the world's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there are groups: defaults of its arguments hold the one that there is

from ds_hydra.pipe.placement import Strategy
from ds_hydra.ranks.channel import AHEAD_TAG, Channel, Telling
from ds_hydra.ranks.groups import (
    CONNECTING,
    Aborting,
    GroupCache,
    Ranks,
    make_groups,
    nccl_options,
    needed_groups,
    pairs_connect_when_used,
    wait_at_most,
)
from ds_hydra.zero_hetero.clock import Clock, clock_of
from ds_hydra.zero_hetero.nodes import Cluster, NodeSize
from ds_hydra.zero_hetero.transport import (
    Collectives,
    DeviceLane,
    GroupCollectives,
    HostLane,
    Lane,
    MessageCollectives,
    TorchTransport,
    Transport,
    start_gather,
    start_scatter,
)

_OPEN_RECEIVES = 2  # buckets whose receives are open at once on gloo, where all ranks share a machine
_CONNECT_TAG = 1 << 23
_MUCH = 1 << 19  # elements of a rank, of which 16 MiB and more travel among eight

Pair = tuple[int, int]  # (sender, receiver)
Naming = Callable[[str], AbstractContextManager[object]]


@dataclass
class Wait:
    """How long a rank waits for others in one collective, of groups that are made from now on."""

    seconds: float

    @property
    def as_torch_has_it(self) -> timedelta:
        return timedelta(seconds=self.seconds)


@dataclass(frozen=True)
class World:
    """One rank's view of its world [Note: worlds]."""

    rank: int
    num_ranks: int
    cluster: Cluster
    node_size: NodeSize  # the cluster's: which ranks share a node
    device: torch.device
    group: dist.ProcessGroup | None  # all ranks, tensors on `device`; None for a rank alone
    channel: Channel  # small messages of training
    ahead: Telling  # plans of coming steps, told while training goes on
    background: Channel  # small messages of threads beside training: saves, heartbeats
    groups: GroupCache  # tensor and sequence parallel groups
    teams: GroupCache  # of twins: groups of their own, though sequence parallel ranks are twins too
    links: Transport  # between masters and pipelines: pulls and pushes
    edges: Transport  # between the stages of a pipeline
    collectives: Collectives  # of twins, for the same pulls and pushes
    lane: Lane  # where their later steps are begun
    clock: Clock  # dates what this rank does
    _aborting: Aborting | None  # of a job that goes on without ranks that it loses
    _gloo: bool  # the default group is gloo's, which needs no groups of teams
    _shared: tuple[dist.ProcessGroup, ...] = field(repr=False)  # of all ranks: torch's, those of links and edges
    _made: list[dist.ProcessGroup] = field(repr=False)
    _longest_wait: Wait = field(repr=False)

    @classmethod
    def of_process(cls, device: torch.device, cluster: Cluster, *, timeout_s: float, aborts: Aborting | None) -> World:
        """The world of torch's default process group, which must exist; every process of it must call this.

        `cluster` has its ranks; `timeout_s` bounds what a rank waits for others in one collective of the groups made
        here; `aborts` ends the waits of a job that goes on without ranks that it loses.
        """
        everyone = dist.group.WORLD
        assert everyone is not None, "init_distributed has made it"
        rank, num_ranks = dist.get_rank(everyone), dist.get_world_size(everyone)
        made, wait = list[dist.ProcessGroup](), Wait(timeout_s)

        def make(ranks: Sequence[int], backend: str | None = None, options: Any = None) -> dist.ProcessGroup:
            group = dist.new_group(list(ranks), wait.as_torch_has_it, backend, options)
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                made.append(group)
            return group

        def make_apart(options: Any, groups: Sequence[Ranks]) -> dist.ProcessGroup | None:
            own = make_groups(everyone, groups, wait.as_torch_has_it, options)
            if own is not None:
                made.append(own)
            return own

        gloo = dist.get_backend(everyone) == "gloo"
        # On devices only small messages go over gloo, between few pairs of many ranks (`channel.peers_of`). What is to
        # be shut when a rank is gone is there from the start [Note: freeing a thread].
        with nullcontext() if gloo or aborts is not None else pairs_connect_when_used():
            # Neither what a script exchanges in the default group nor a save in the background may meet training.
            control, background = (make(range(num_ranks), "gloo") for _ in range(2))
        # NCCL runs one group's messages in the order they were started: pipelines get a communicator of their own, and
        # so do pulls and pushes, as the default group was made by others, with what it takes of the device.
        quiet, urgent = (None, None) if gloo else (nccl_options(background=True), nccl_options(urgent=True))
        pulls = everyone if gloo else make(range(num_ranks), options=quiet)
        edges = everyone if gloo else make(range(num_ranks), options=nccl_options(background=True, urgent=True))
        # Twins trade while the model's collectives run, and all that shares a communicator ends in one order.
        groups, teams = (GroupCache(rank, partial(make_apart, options)) for options in (urgent, quiet))
        links = TorchTransport(pulls, max_open_receives=_OPEN_RECEIVES if len(cluster.sizes) == 1 else None)
        return cls(
            rank=rank,
            num_ranks=num_ranks,
            cluster=cluster,
            node_size=cluster.node_size,
            device=device,
            group=everyone if num_ranks > 1 else None,
            channel=Channel(control, rank, num_ranks),
            ahead=Telling(control, rank, num_ranks, tag=AHEAD_TAG),
            background=Channel(background, rank, num_ranks),
            groups=groups,
            teams=teams,
            links=links,
            edges=TorchTransport(edges),
            collectives=MessageCollectives(links, rank) if gloo else GroupCollectives(teams.of_team),
            lane=HostLane(early=not gloo) if device.type == "cpu" else DeviceLane(device),
            clock=clock_of(device),
            _aborting=aborts,
            _gloo=gloo,
            _shared=(everyone, pulls, edges) if num_ranks > 1 else (),
            _made=made,
            _longest_wait=wait,
        )

    def __post_init__(self) -> None:
        self.wait_at_most(self._longest_wait.seconds)  # in groups too that were there before

    def connect(
        self,
        strategies: Iterable[Strategy],
        *,
        links: Iterable[Pair],
        edges: Iterable[Pair],
        teams: Sequence[tuple[int, ...]],
        naming: Naming = nullcontext,
    ) -> None:
        """Make the groups of these strategies and use every communicator and pair once, before a step depends on it.

        `links` and `edges` are pairs of (sender, receiver); what is being connected is given a `naming`. Every rank
        must call it, with the same arguments and with nothing under way. Groups and pairs come in one order on all
        ranks, so none waits for another in a circle.
        """
        with naming(f"{CONNECTING} groups of tensor and sequence parallel ranks"):
            self.groups.create(group for strategy in strategies for group in needed_groups(strategy))
            self.teams.create(() if self._gloo else teams)
        found, in_rows = list(dict.fromkeys([*self._shared, *self.groups, *self.teams])), set(self.groups)
        for number, group in enumerate(found, 1):
            with naming(f"{CONNECTING} group {number} of {len(found)}, of ranks {dist.get_process_group_ranks(group)}"):
                self._greet_group(group, exchanges=group in in_rows)
        for transport, pairs in ((self.links, sorted(links)), (self.edges, sorted(edges))):
            with naming(f"{CONNECTING} {len(pairs)} pairs of ranks"):
                self._greet(transport, pairs)
        for team in teams:
            if self.rank in team:
                hello = torch.zeros(2 * len(team), device=self.device)
                own, others = hello.chunk(2)
                with naming(f"{CONNECTING} twins, ranks {list(team)}"):
                    self.collectives.gather(own, team, tag=_CONNECT_TAG).wait()
                    self.collectives.trade(own, others, team, tag=_CONNECT_TAG).wait()

    def _greet_group(self, group: dist.ProcessGroup, *, exchanges: bool) -> None:
        """Every collective that a step or a gather uses in this group, once; `exchanges`: all-to-alls, too.

        NCCL connects the ranks of a communicator when an algorithm needs it, in the host and with memory of the device:
        few bytes may go by another one than many, and an all-to-all connects pairs.
        """
        one = torch.zeros(1, device=self.device)
        dist.all_reduce(one, group=group)
        if self._gloo or (group in self._shared[1:]):  # links and edges carry messages of pairs alone
            return
        for numel in (1,) if self.device.type == "cpu" else (1, _MUCH):
            whole = torch.zeros(group.size() * numel, device=self.device)
            own = whole[:numel]
            dist.all_reduce(whole, group=group)
            start_gather(whole, own.clone(), group).wait()
            if exchanges:
                start_scatter(own.clone(), whole, group).wait()
                dist.all_to_all_single(torch.empty_like(whole), whole, group=group)

    def device_bytes(self) -> int:
        """What this rank's device holds beside the memory of torch's allocator; 0 on a host."""
        if self.device.type != "cuda":
            return 0
        free, whole = torch.cuda.mem_get_info(self.device)
        return whole - free - torch.cuda.memory_reserved(self.device)

    def _greet(self, transport: Transport, pairs: Sequence[Pair]) -> None:
        """Exchange one element over each pair, all of them at once."""
        hello = torch.zeros(1, device=self.device)
        sends = [(receiver, hello) for sender, receiver in pairs if sender == self.rank]
        receives = [(sender, torch.empty_like(hello)) for sender, receiver in pairs if receiver == self.rank]
        transport.exchange(sends, receives, tag=_CONNECT_TAG).wait()

    def settle(self) -> None:
        """Return when the device has done all that was started. RuntimeError where a rank was lost meanwhile, so that
        what has come may be anything [Note: aborting]."""
        if self.device.type != "cpu" and self._aborting is not None:
            torch.cuda.synchronize(self.device)
            self._aborting.check()

    def meet(self) -> None:
        """Return when all ranks have come here with what they had started; as `settle`. A host's waits end in errors,
        so there is nothing to ask for."""
        if self.device.type != "cpu" and self._aborting is not None:
            self.settle()
            self.channel.texts("")

    def wait_at_most(self, seconds: float) -> None:
        """How long a rank waits for others in one collective from now on, in any group of this world."""
        self._longest_wait.seconds = seconds
        wait_at_most(self._longest_wait.as_torch_has_it, [*self._shared, *self._made])

    def close(self) -> None:
        """Destroy the groups that were made for this world, and let go of torch's; it cannot be used afterwards."""
        while self._made:
            dist.destroy_process_group(self._made.pop())
        # A group keeps its threads and sockets for as long as anybody holds it, and an object that holds the world, or
        # its channels, may live on: an error with its traceback does.
        for held in (self.channel, self.ahead, self.background, self.groups, self.teams, self.links, self.edges,
                     self.collectives, self):  # fmt: skip
            vars(held).clear()
