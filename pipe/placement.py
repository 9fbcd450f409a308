"""Places the stages of a pipeline or strategy on ranks. Pure: no torch.

[Note: rank order]
Pipelines tile the ranks 0..N-1 in the order the strategy names them. Inside a pipeline the tensor
parallel rank runs fastest, then the sequence parallel rank, then the stage, so that the chattiest
neighbours sit closest together: rank = first + (stage * sp + sp_rank) * tp + tp_rank.

Stages take ranks of their class in the order in which the strategy names them. Each goes to the first node that has
enough of them left, so that tensor parallel groups stay inside nodes where they can: on two nodes of seven H20,
(tp4@h20 > tp4@h20) + (tp2@h20 > tp2@h20 > tp1@h20 > tp1@h20) is on ranks 0..3, 7..10, 4..5, 11..12, 6 and 13. A stage
that fits no node takes its tensor parallel groups one by one in the same way, and a group that fits none the next ranks
that are free. Who stands where is a function of the strategy and the cluster alone, so all ranks know it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ds_hydra.pipe.schedules.list_walk import place_of, virtual_stage
from ds_hydra.pipe.shape import DEFAULT_SCHEDULE, LayerRange, PipelineShape, StageShape, StrategyShape
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.nodes import Cluster, NodeSize, largest_node, listed, node_of

_ROUNDING = 1e-6  # layers: a share of 2/3 of 3 layers is 2 of them, whatever a float makes of it


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers of a pipeline and the ranks that hold them; in a V, two ranges of layers.

    `ranks[sp_rank * tp + tp_rank]` is a global rank; layers run from `first_layer` up to, not
    including, `last_layer`. Stages of one pipeline may differ in all of it (Hetu v2).
    """

    ranks: tuple[int, ...]
    first_layer: int
    last_layer: int
    tp: int = 1
    sp: int = 1
    second: LayerRange | None = None  # of a V, nearer to the model's end [Note: virtual stages]
    ep: int = 1  # 1, tp or tp * sp ranks that share the experts, whole ones [Note: whole experts]

    def __post_init__(self) -> None:
        if len(self.ranks) != self.tp * self.sp:
            raise PlanError(
                f"stage with tp={self.tp}, sp={self.sp} needs {self.tp * self.sp} ranks but was given "
                f"{len(self.ranks)}: {self.ranks}"
            )
        if self.first_layer >= self.last_layer:
            raise PlanError(f"stage on ranks {self.ranks} holds no layer ({self.first_layer}..{self.last_layer})")

    @property
    def ranges(self) -> tuple[LayerRange, ...]:
        """The layers of each part."""
        own = LayerRange(self.first_layer, self.last_layer)
        return (own,) if self.second is None else (own, self.second)

    @property
    def num_layers(self) -> int:
        """Layers of all parts."""
        return sum(last - first for first, last in self.ranges)

    def part(self, part: int) -> Stage:
        """One of its ranges of layers as a stage of its own."""
        first, last = self.ranges[part]
        return replace(self, first_layer=first, last_layer=last, second=None)

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(tp_rank, sp_rank) of a global rank of this stage."""
        sp_rank, tp_rank = divmod(self.ranks.index(rank), self.tp)
        return tp_rank, sp_rank

    @property
    def holders(self) -> int:
        """How many of its ranks hold different parameters: ranks that are as many places apart hold the same."""
        return max(self.tp, self.ep)

    def holder(self, rank: int) -> int:
        """Which of `holders` a global rank is: its tensor parallel rank, or its place where all ranks share experts."""
        return self.ranks.index(rank) % self.holders

    def tp_ranks(self, rank: int) -> tuple[int, ...]:
        """The tensor parallel group that `rank` is in, in order of tp_rank."""
        _, sp_rank = self.coordinates(rank)
        return self.ranks[sp_rank * self.tp : (sp_rank + 1) * self.tp]

    def sp_ranks(self, rank: int) -> tuple[int, ...]:
        """The sequence parallel group that `rank` is in, in order of sp_rank."""
        tp_rank, _ = self.coordinates(rank)
        return self.ranks[tp_rank :: self.tp]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One model replica: its stages in order of their layers, and the schedule that they run."""

    stages: tuple[Stage, ...]
    schedule: str = DEFAULT_SCHEDULE

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for stage in self.stages for rank in stage.ranks)

    @property
    def parts(self) -> int:
        """Ranges of layers that each stage holds: 1, or 2 for a V."""
        return len(self.stages[0].ranges)

    @property
    def ranges(self) -> tuple[LayerRange, ...]:
        """The layers of each virtual stage, in the model's order [Note: virtual stages]."""
        places = (place_of(virtual, len(self.stages)) for virtual in range(self.parts * len(self.stages)))
        return tuple(self.stages[stage].ranges[part] for stage, part in places)

    def stage_index(self, rank: int) -> int:
        """Index of the stage that holds `rank`; PlanError if none does."""
        for index, stage in enumerate(self.stages):
            if rank in stage.ranks:
                return index
        raise PlanError(f"rank {rank} is in no stage of the pipeline on ranks {self.ranks}")


@dataclass(frozen=True, slots=True)
class Strategy:
    """The pipelines that share the ranks in one step."""

    pipelines: tuple[Pipeline, ...]

    def __post_init__(self) -> None:
        """Ranks must tile [0, N) and each pipeline hold the same layers, each exactly once."""
        ranks = sorted(rank for pipeline in self.pipelines for rank in pipeline.ranks)
        if ranks != list(range(len(ranks))):
            raise PlanError(f"the pipelines' ranks must tile 0..{len(ranks) - 1} but are {ranks}")
        num_layers = self.pipelines[0].ranges[-1].last
        for index, pipeline in enumerate(self.pipelines):
            ranges = pipeline.ranges
            cuts = [0, *(held.last for held in ranges)]
            if [held.first for held in ranges] != cuts[:-1] or cuts[-1] != num_layers:
                raise PlanError(
                    f"pipeline {index} does not hold layers 0..{num_layers} once each: its stages hold "
                    + ", ".join(f"{first}..{last}" for first, last in ranges)
                )

    @property
    def num_ranks(self) -> int:
        return sum(len(stage.ranks) for pipeline in self.pipelines for stage in pipeline.stages)

    @property
    def most_stages(self) -> int:
        """Stages of the longest pipeline."""
        return max(len(pipeline.stages) for pipeline in self.pipelines)

    def locate(self, rank: int) -> tuple[int, int]:
        """(pipeline index, stage index) of a global rank."""
        for index, pipeline in enumerate(self.pipelines):
            if rank in pipeline.ranks:
                return index, pipeline.stage_index(rank)
        raise PlanError(f"rank {rank} is in no pipeline of a strategy over {self.num_ranks} ranks")

    def stage_of(self, rank: int) -> Stage:
        """The stage that holds a global rank."""
        pipeline, stage = self.locate(rank)
        return self.pipelines[pipeline].stages[stage]


def split_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage, as even as can be; later stages take the remainder's lack (they carry the head).

    Raises PlanError when a stage would hold none.
    """
    if num_stages > num_layers:
        raise PlanError(
            f"{num_stages} stages for {num_layers} layers: a stage needs at least one layer, so use pp <= {num_layers}"
        )
    base, extra = divmod(num_layers, num_stages)
    return tuple(base + (index < extra) for index in range(num_stages))


def place_pipeline(shape: PipelineShape, first_rank: int, num_layers: int) -> Pipeline:
    """A pipeline on consecutive ranks [Note: rank order]; layers are split evenly where the shape does not say.

    Raises PlanError when a stage would hold none, or the shape was made for another number of layers.
    """
    stages: list[Stage] = []
    rank = first_rank
    for stage, (own, *second) in zip(shape.stages, _layers_of_stages(shape, num_layers), strict=True):
        ranks = tuple(range(rank, rank + stage.num_ranks))
        stages.append(Stage(ranks, *own, stage.tp, stage.sp, second[0] if second else None, stage.ep))
        rank += stage.num_ranks
    return Pipeline(tuple(stages), shape.schedule)


def _layers_of_stages(shape: PipelineShape, num_layers: int) -> list[tuple[LayerRange, ...]]:
    if shape.num_layers not in (None, num_layers):
        raise PlanError(f"pipeline {shape} is for {shape.num_layers} layers but the model has {num_layers}")
    parts = shape.parts  # refuses ranges that make no V
    if shape.num_layers is not None:
        return [stage.layers for stage in shape.stages]
    if parts == 2 and 2 * shape.pp > num_layers:
        raise PlanError(
            f"pipeline {shape}: its {shape.pp} stages hold two ranges of layers each, {2 * shape.pp} in all, but the "
            f"model has {num_layers} layers; use pp <= {num_layers // 2}"
        )
    ends = accumulate(split_layers(num_layers, parts * shape.pp), initial=0)
    ranges = [LayerRange(first, last) for first, last in pairwise(ends)]
    return [tuple(ranges[virtual_stage(stage, part, shape.pp)] for part in range(parts)) for stage in range(shape.pp)]


def place_strategy(shape: StrategyShape, num_ranks: int, num_layers: int, cluster: Cluster | None = None) -> Strategy:
    """Put the pipelines of a strategy on ranks 0..num_ranks-1, in order [Note: rank order]; stages that ask for a class
    of devices on ranks of `cluster` that have them.

    Raises PlanError when the pipelines' ranks do not add up to `num_ranks`, or to those of each class.
    """
    needed = shape.num_ranks
    if needed != num_ranks:
        raise PlanError(
            f"strategy {str(shape)!r} uses {needed} ranks but the job has {num_ranks}: "
            + (f"add pipelines for {num_ranks - needed} more" if needed < num_ranks else f"remove {needed - num_ranks}")
        )
    if shape.devices or (cluster is not None and cluster.devices and cluster.mixed):
        return place_on(shape, cluster, num_layers)
    first_ranks = accumulate((pipeline.num_ranks for pipeline in shape.pipelines), initial=0)
    return Strategy(
        tuple(
            place_pipeline(pipeline, first_rank, num_layers)
            for pipeline, first_rank in zip(shape.pipelines, first_ranks, strict=False)
        )
    )


def whole_layers(share: float, layers: int) -> int:
    """How many of so many layers a share of them is, rounded up [Note: recomputed layers]."""
    return math.ceil(share * layers - _ROUNDING)


def check_heads(heads: int, tp: int) -> None:
    """Refuse a degree by which attention heads cannot be cut; 1 stands for one that does not cut them."""
    if heads % tp:
        raise PlanError(
            f"tp={tp} does not divide the model's {heads} attention heads; use strategies with a tp that does"
        )


def check_experts(counts: Sequence[int], no_ep: str, tp: int, sp: int, ep: int) -> None:
    """Refuse degrees by which experts cannot be spread.

    `counts` are the numbers of experts of a model whose experts are spread as whole ones (none: they are cut by width),
    and `no_ep` says why they cannot be.
    """
    if ep > 1 and no_ep:
        raise PlanError(f"ep={ep}: {no_ep}")
    for count in counts if ep > 1 else ():
        if count % ep:
            fit = ", ".join(str(n) for n in range(2, count + 1) if count % n == 0)
            raise PlanError(
                f"ep={ep} does not divide the model's {count} experts, of which each rank holds as many; use an ep of "
                f"{fit}"
            )
    if counts and tp > 1 and ep == 1:
        shape = f"tp{tp}" + f"sp{sp}" * (sp > 1)
        raise PlanError(
            f"{shape} cuts experts by width, but other strategies of the job spread whole ones, and masters have one "
            f"order: write {shape}ep{tp} in its place, or take ep out of all strategies"
        )


def place_on(shape: StrategyShape, cluster: Cluster | None, num_layers: int) -> Strategy:
    """The pipelines of a strategy on ranks of the classes that its stages name.

    Raises PlanError where a stage names a class that the job has not, or none beside others that do, and where the
    stages of a class need more ranks than there are of it, or fewer.
    """
    if cluster is None or not cluster.mixed:
        device = next(iter(sorted(shape.devices)))
        raise PlanError(
            f"strategy {str(shape)!r} asks for devices of class {device!r}, but "
            + ("all devices of the job are alike" if cluster else "nothing says which ranks have them")
            + ": leave '@...' out, or name the classes of the nodes in hydra.cluster"
        )
    _check(shape, cluster)
    free = _Free(cluster)
    return Strategy(tuple(
        Pipeline(tuple(replace(stage, ranks=free.take(wanted))
                       for stage, wanted in zip(placed.stages, pipeline.stages, strict=True)), placed.schedule)
        for pipeline in shape.pipelines
        for placed in (place_pipeline(pipeline, 0, num_layers),)
    ))  # fmt: skip


def crossing_groups(strategy: Strategy, node_size: NodeSize) -> Iterator[tuple[int, ...]]:
    """The tensor parallel groups of a placed strategy that lie on more nodes than they must."""
    for pipeline in strategy.pipelines:
        for stage in pipeline.stages:
            for first in range(0, len(stage.ranks), stage.tp):
                group = stage.ranks[first : first + stage.tp]
                if len({node_of(rank, node_size) for rank in group}) > -(-len(group) // largest_node(node_size)):
                    yield group


def _check(shape: StrategyShape, cluster: Cluster) -> None:
    classes, asked = cluster.classes, dict[str, int]()
    for pipeline in shape.pipelines:
        for index, stage in enumerate(pipeline.stages):
            if stage.device not in classes:
                what = f"asks for devices of class {stage.device!r}" if stage.device else "names no class of devices"
                raise PlanError(
                    f"strategy {str(shape)!r}: stage {index} of pipeline {pipeline} {what}, but the job has "
                    f"{listed(cluster)}: name one of these in each stage, such as "
                    f"{str(replace(pipeline, stages=_on(pipeline.stages, min(classes))))!r}"
                )
            asked[stage.device] = asked.get(stage.device, 0) + stage.num_ranks
    wrong = [
        f"{asked.get(device, 0)} of {device}, of which the job has {len(ranks)}"
        for device, ranks in classes.items()
        if asked.get(device, 0) != len(ranks)
    ]
    if wrong:
        raise PlanError(
            f"strategy {str(shape)!r} uses ranks that are not those of the job: {'; '.join(wrong)}. Its stages must "
            "use all ranks of each class, once each"
        )


def _on(stages: Sequence[StageShape], device: str) -> tuple[StageShape, ...]:
    return tuple(replace(stage, device=stage.device or device) for stage in stages)


class _Free:
    """The ranks of each class that no stage has taken yet, by node."""

    def __init__(self, cluster: Cluster) -> None:
        self._left: dict[str, dict[int, list[int]]] = {}
        for device, ranks in cluster.classes.items():
            nodes = self._left.setdefault(device, {})
            for rank in ranks:
                nodes.setdefault(node_of(rank, cluster.node_size), []).append(rank)

    def take(self, stage: StageShape) -> tuple[int, ...]:
        """Ranks for a stage, in the order of its own."""
        nodes = self._left[stage.device].values()
        whole = next((node for node in nodes if len(node) >= stage.num_ranks), None)
        if whole is not None:
            return _first(whole, stage.num_ranks)
        return tuple(rank for _ in range(stage.sp) for rank in self._group(stage))

    def _group(self, stage: StageShape) -> tuple[int, ...]:
        nodes = self._left[stage.device].values()
        whole = next((node for node in nodes if len(node) >= stage.tp), None)
        if whole is not None:
            return _first(whole, stage.tp)
        found: list[int] = []
        for node in nodes:
            found += _first(node, min(len(node), stage.tp - len(found)))
        return tuple(found)


def _first(node: list[int], count: int) -> tuple[int, ...]:
    taken = tuple(node[:count])
    del node[:count]
    return taken
