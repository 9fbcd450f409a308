"""Candidate strategies in; an error before step 0, where one of their stages cannot be built, out."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ds_hydra.pipe.placement import Strategy
from ds_hydra.pipe.stage import ModelSource, StagePlace

_META = torch.device("meta")


def build_stages(source: ModelSource, strategies: Iterable[Strategy], rank: int, dtype: torch.dtype) -> int:
    """Build each stage that `rank` will have once, without memory and without a message; how many there are.

    A strategy may be used for the first time after hours. Errors of the model's own code pass through.
    """
    built: set[object] = set()
    for strategy in strategies:
        for place in StagePlace.all_of(strategy.pipelines[strategy.locate(rank)[0]], rank, lambda members: None):
            kind = (*place.stage.ranges, place.stage.tp, place.tp_rank)
            if kind not in built:
                source.build(place, _META, dtype)
                built.add(kind)
    return len(built)
