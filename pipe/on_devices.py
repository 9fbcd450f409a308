"""A strategy whose stages name device classes and the job's cluster in, its stages on ranks out. Pure: no torch.

Stages take ranks of their class in the order in which the strategy names them. Each goes to the first node that has
enough of them left, so that tensor parallel groups stay inside nodes where they can: on two nodes of seven H20,
(tp4@h20 > tp4@h20) + (tp2@h20 > tp2@h20 > tp1@h20 > tp1@h20) is on ranks 0..3, 7..10, 4..5, 11..12, 6 and 13. A stage
that fits no node takes its tensor parallel groups one by one in the same way, and a group that fits none the next ranks
that are free. Who stands where is a function of the strategy and the cluster alone, so all ranks know it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ds_hydra.pipe.placement import Pipeline, Stage, Strategy, place_pipeline
from ds_hydra.pipe.shape import StageShape, StrategyShape
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.nodes import Cluster, NodeSize, largest_node, listed, node_of


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
        Pipeline(tuple(_moved(stage, free.take(wanted)) for stage, wanted in zip(placed.stages, pipeline.stages,
                                                                                 strict=True)), placed.schedule)
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


def _moved(stage: Stage, ranks: tuple[int, ...]) -> Stage:
    return replace(stage, ranks=ranks)


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
