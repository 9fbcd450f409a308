"""What runs the strategies of a job on this rank: tried before step 0, built when a step first uses it, and kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ds_hydra.pipe.models.refusals import failing, refuse_misaligned_experts
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.pipe.stage import ModelSource, StagePlace
from ds_hydra.step.connections import connections_of
from ds_hydra.step.strategy_runtime import StrategyRuntime
from ds_hydra.zero_hetero.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from ds_hydra.pipe.runtime import Doing
    from ds_hydra.plan.step_plan import Phase, StepPlan
    from ds_hydra.ranks.world import World
    from ds_hydra.step.arena import Arena
    from ds_hydra.step.model_masters import ModelMasters

_META = torch.device("meta")


class Runtimes:
    """The runtime of each strategy that was used. `strategies` are the candidates by their text; all ranks ask for the
    same ones in the same order."""

    def __init__(
        self,
        source: ModelSource,
        masters: ModelMasters,
        world: World,
        arena: Arena,
        activity: Doing,
        *,
        strategies: Mapping[str, Strategy],
        grad_dtype: torch.dtype,
        wire_dtype: torch.dtype,
    ):
        self._source, self._masters, self._world, self._arena, self._activity = source, masters, world, arena, activity
        self._strategies, self._grad_dtype, self._wire_dtype = strategies, grad_dtype, wire_dtype
        self.built: dict[str, StrategyRuntime] = {}
        # Which pushes wait for which where the model is a small one that stands for another: the other's.
        self.turns_of: Callable[[Strategy], Sequence[int]] | None = None

    def connect(self) -> None:
        """Connect what steps under the candidates use; every rank must call it before the first step."""
        self._connect(self._strategies.values())

    def can_build(self, plan: StepPlan) -> bool:
        """Whether all strategies of a plan were used before, so that its micro-batches are built without a message;
        equal on all ranks."""
        return all(str(phase.shape) in self.built for phase in plan.phases)

    def strategy_of(self, phase: Phase) -> Strategy:
        """A phase's strategy, placed on the ranks."""
        placed = self._strategies.get(str(phase.shape))
        return placed or place_strategy(
            phase.shape, self._world.num_ranks, self._source.plan.num_layers, self._world.cluster
        )

    def of(self, phase: Phase) -> StrategyRuntime:
        """The runtime of a phase's strategy."""
        # A strategy that is no candidate, as HiGHS composes them and replayed plans may bring one, is connected at its
        # first use; that takes all ranks. They agree on the moment without a message: a plan is the same on all of
        # them, so they meet a strategy for the first time in the same step, before its first phase begins.
        name = str(phase.shape)
        if name not in self.built:
            strategy = self.strategy_of(phase)
            if name not in self._strategies:
                self._connect([strategy])
            self.built[name] = StrategyRuntime(
                strategy,
                self._source,
                self._masters,
                self._arena,
                self._world,
                self._activity,
                grad_dtype=self._grad_dtype,
                wire_dtype=self._wire_dtype,
                turns=None if self.turns_of is None else self.turns_of(strategy),
            )
        return self.built[name]

    def _connect(self, strategies: Collection[Strategy]) -> None:
        """Connect what steps under these strategies use, so that none of them has to."""
        world = self._world
        pairs = connections_of(self._source.plan, strategies, world.node_size)
        world.connect(strategies, links=pairs.links, edges=pairs.edges, teams=pairs.teams, naming=self._activity)

    def close(self) -> None:
        """Let go of all strategies, their memory and their groups; it cannot be used afterwards."""
        for runtime in self.built.values():
            runtime.close()
        vars(self).clear()


def build_stages(source: ModelSource, strategies: Iterable[Strategy], rank: int, dtype: torch.dtype) -> int:
    """Build each stage that `rank` will have once, without memory and without a message; how many there are.

    A strategy may be used for the first time after hours. ConfigError for an error of the model's own code, and for
    experts that the kernel which they run by cannot take.
    """
    built: set[object] = set()
    for strategy in strategies:
        pipeline = strategy.pipelines[strategy.locate(rank)[0]]
        sharding = source.plan.token_sharding
        for place in StagePlace.all_of(pipeline, rank, lambda members: None, token_sharding=sharding):
            kind = (*place.stage.ranges, place.stage.tp, place.stage.ep, place.holder)
            if kind not in built:
                try:
                    module = source.build(place, _META, dtype).module
                except (ConfigError, PlanError):
                    raise
                except Exception as error:
                    raise ConfigError(f"no stage of {strategy} can be built: {failing(error)}") from error
                needed = source.plan.needed(place.stage)
                specs = (param for bucket in source.plan.buckets for param in bucket.params if param.name in needed)
                refuse_misaligned_experts(module, specs, place.stage.tp, dtype)
                built.add(kind)
    return len(built)
