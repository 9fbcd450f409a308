"""Candidate strategies in; an error before step 0, where one of their stages cannot be built, out."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ds_hydra.pipe.models.refusals import refuse_misaligned_experts
from ds_hydra.pipe.placement import Strategy
from ds_hydra.pipe.stage import ModelSource, StagePlace

_META = torch.device("meta")


def build_stages(source: ModelSource, strategies: Iterable[Strategy], rank: int, dtype: torch.dtype) -> int:
    """Build each stage that `rank` will have once, without memory and without a message; how many there are.

    A strategy may be used for the first time after hours. Errors of the model's own code pass through. ConfigError for
    experts that the kernel which they run by cannot take.
    """
    built: set[object] = set()
    for strategy in strategies:
        pipeline = strategy.pipelines[strategy.locate(rank)[0]]
        sharding = source.plan.token_sharding
        for place in StagePlace.all_of(pipeline, rank, lambda members: None, token_sharding=sharding):
            kind = (*place.stage.ranges, place.stage.tp, place.tp_rank)
            if kind not in built:
                module = source.build(place, _META, dtype).module
                needed = source.plan.needed(place.stage)
                specs = (param for bucket in source.plan.buckets for param in bucket.params if param.name in needed)
                refuse_misaligned_experts(module, specs, place.stage.tp, dtype)
                built.add(kind)
    return len(built)
