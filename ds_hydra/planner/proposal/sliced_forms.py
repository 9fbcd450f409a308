"""A pipeline whose stages hold named layers in, forms of it that may run sequences in slices out. Pure: no torch."""

from __future__ import annotations

import itertools
from dataclasses import replace

from ds_hydra.pipe.shape import LayerRange, PipelineShape


def by_list(pipeline: PipelineShape) -> PipelineShape:
    """The same stages under the list order."""
    return PipelineShape(pipeline.stages, "list")


def by_v(pipeline: PipelineShape) -> PipelineShape:
    """As many layers in each stage, half of them from each end of the model; by the list order alone where a stage has
    no layer for that."""
    held = [stage.layers[0].last - stage.layers[0].first for stage in pipeline.stages]
    if min(held) < 2:
        return by_list(pipeline)
    lower = [number // 2 for number in held]
    upper = [number - half for number, half in zip(held, lower, strict=True)]
    ends = list(itertools.pairwise(itertools.accumulate([*lower, *reversed(upper)], initial=0)))
    return PipelineShape(tuple(
        replace(stage, layers=(LayerRange(*ends[at]), LayerRange(*ends[-1 - at])))
        for at, stage in enumerate(pipeline.stages)
    ), "list")  # fmt: skip
