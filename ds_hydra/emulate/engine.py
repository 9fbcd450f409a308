"""An emulated model in; the engine that trains real ones, on virtual time, out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.costs.rank_bytes import push_turns
from ds_hydra.costs.shape_costs import with_shapes
from ds_hydra.emulate.clock import VirtualClock, VirtualLane
from ds_hydra.emulate.group import ClockedGroup
from ds_hydra.emulate.small_model import small_model
from ds_hydra.emulate.stage import EmulatedSource, at_rank_0
from ds_hydra.emulate.transport import ClockedTransport
from ds_hydra.engine.engine import HydraEngine
from ds_hydra.engine.guard import Guard
from ds_hydra.engine.job import Job
from ds_hydra.pipe.models.facts import ModelFacts
from ds_hydra.pipe.placement import Strategy
from ds_hydra.ranks.world import World
from ds_hydra.report.calibration import StepCosts, folded, stage_loads
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.zero_hetero.collectives import MessageCollectives


class EmulatedModel(nn.Module):
    """Small parameters, all of them 1, in the place of the model of a job; it has no forward of its own."""

    def __init__(self, cluster: SimulatedJob):
        super().__init__()
        sizes = cluster.element_bytes, cluster.gradient_bytes
        self.cluster, self.small = cluster, small_model(cluster.plan, cluster.hidden, *sizes)
        for bucket in self.small.plan.buckets:
            for param in bucket.params:
                value = nn.Parameter(torch.ones(param.shape), requires_grad=param.trainable)
                self.register_parameter(param.name, value)


class EmulatedEngine(HydraEngine):
    """Trains an `EmulatedModel` on the virtual time of `clock`. The config must name a cost table.

    A step begins for all ranks at once, when the last of them has ended the step before.
    """

    module: EmulatedModel

    def source_of(self, model: EmulatedModel, facts: ModelFacts | None = None) -> EmulatedSource:
        """See `HydraEngine`."""
        self.clock = VirtualClock()
        values = {name: parameter.detach() for name, parameter in model.named_parameters()}
        return EmulatedSource(model.small, values, self.clock)

    def world_of_process(self) -> World:
        """See `HydraEngine`: the same groups and transports, on virtual time."""
        world, speeds = super().world_of_process(), self.module.cluster.links

        def clocked(transport: Any) -> ClockedTransport:
            return ClockedTransport(transport, world.rank, self.clock, speeds, self.module.small)

        group = None if world.group is None else ClockedGroup(world.group, self.clock, speeds)
        self._moving = links, teams = clocked(world.links), clocked(world.links)
        if speeds.one_cable:
            links.share_cable(teams)
        return replace(
            world,
            links=links,
            edges=clocked(world.edges),
            collectives=MessageCollectives(teams, world.rank),
            lane=VirtualLane(self.clock),
            group=group,
            clock=self.clock,
        )

    def assemble(self, job: Job | None = None, *, guard: Guard | None = None) -> None:
        """See `HydraEngine`; then stages know what they cost."""
        super().assemble(job, guard=guard)
        source, crew, cluster = self._emulated, self.crew, self.module.cluster
        source.links = self._moving
        crew.stepper.runtimes.turns_of = self._turns_of
        # What stages that differ take, as the cluster's own table says it where it does.
        table = with_shapes(cluster.table, crew.prepared.strategies, crew.prepared.memory)
        for shape, strategy in crew.prepared.strategies.items():
            for piece, pipeline in zip(shape.pipelines, strategy.pipelines, strict=True):
                cost, shares = table[piece], table.shares(piece)
                loads = stage_loads(cost, source.plan.num_layers, cluster.found)
                source.prices[at_rank_0(pipeline)] = folded(loads, piece.parts)
                source.costs[at_rank_0(pipeline)] = cost, shares
        self._step_costs = StepCosts.of(cluster.found.step)
        owned = sum(bucket.numel for bucket in cluster.plan.buckets if bucket.trainable) / cluster.num_ranks
        update_s = self._step_costs.update_ms_per_element * owned / 1e3
        assert self.optimizer is not None, "the crew has installed it"
        self.optimizer.register_step_pre_hook(lambda *_: self.clock.compute(update_s))
        self._wait_for_all()

    @property
    def pace(self) -> float:
        """How many times as long as its costs say this rank's device takes from now on."""
        return self._emulated.pace

    @pace.setter
    def pace(self, pace: float) -> None:
        self._emulated.pace = pace

    @property
    def _emulated(self) -> EmulatedSource:
        source = self.job.source
        assert isinstance(source, EmulatedSource), "made by `source_of`"
        return source

    def _turns_of(self, strategy: Strategy) -> list[int]:
        """How many pushes each push of this rank waits for, with the memory of the job that is emulated."""
        cluster = self.module.cluster
        turns = push_turns(cluster.plan, strategy, cluster.elements, node_size=cluster.links.node_size)
        return [int(turn) for turn in turns[:, self.crew.world.rank]]

    def train_batch(self, data_iter: Any = None, **arguments: Any) -> Tensor:
        """See `HydraEngine`."""
        self.clock.compute(self._step_costs.fixed_ms / 1e3)
        loss = super().train_batch(data_iter, **arguments)
        self._wait_for_all()
        return loss

    def _wait_for_all(self) -> None:
        """All ranks go on at the latest of their times; `ended_s` keeps what each had come to."""
        mine = torch.tensor([self.clock.now()], dtype=torch.float64)
        self.ended_s: Sequence[float] = self.crew.world.channel.rows(mine).flatten().tolist()
        self.clock.wait_until(max(self.ended_s))
