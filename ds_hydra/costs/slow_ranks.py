"""Ranks that take longer than costs say in; how many times as long each stage of a strategy takes out. Pure: no torch.

A cost table is of devices that are alike, and one of them may be slow [Note: slow ranks]. What a stage takes longer is
what its slowest rank does, since the ranks of a stage wait for each other: of 2*tp2 with rank 3 at 1.25 the second
pipeline takes 1.25 times as long, whichever sequences it runs. So plans give it fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.zero_hetero.nodes import Cluster

Paces = tuple[float, ...]
"""How many times as long as its costs say each stage of a pipeline takes; empty: each as they say."""

MOST = 1e3  # times as long; a device that is slower than that runs nothing


@dataclass(frozen=True, slots=True)
class SlowRanks:
    """The ranks that are slow; by default none is.

    `paces`: each with how many times as long as its costs say it takes, from 1 on, in rank order. `cluster`: which
    classes their devices are of, where they are of several.
    """

    paces: tuple[tuple[int, float], ...] = ()
    cluster: Cluster | None = None

    def of(self, strategy: StrategyShape) -> tuple[Paces, ...]:
        """For each pipeline of a strategy its stages' paces. PlanError as `place_strategy`."""
        return _paces_of(self, strategy) if self.paces else ((),) * len(strategy.pipelines)

    def to_record(self) -> dict[str, Any]:
        """As JSON holds it; `of_record` is the inverse."""
        record: dict[str, Any] = {"paces": [list(one) for one in self.paces]}
        if self.cluster is not None:
            record |= {"sizes": self.cluster.sizes, "devices": self.cluster.devices}
        return record

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> SlowRanks:
        """Raises KeyError, TypeError or ValueError for what `to_record` has not written."""
        paces = tuple((int(rank), pace_of(pace)) for rank, pace in record["paces"])
        if "sizes" not in record:
            return cls(paces)
        return cls(paces, Cluster(tuple(map(int, record["sizes"])), tuple(map(str, record["devices"]))))


NONE = SlowRanks()


def pace_of(value: object) -> float:
    """A pace of a record; ValueError for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1.0 <= value <= MOST:
        raise ValueError(f"{str(value)[:40]!r} is not how many times as long a stage takes: 1 to {MOST:g}")
    return float(value)


@lru_cache(maxsize=1024)  # each candidate's, for as long as the same ranks are slow
def _paces_of(slow: SlowRanks, strategy: StrategyShape) -> tuple[Paces, ...]:
    of_rank = dict(slow.paces)
    # Which rank runs which stage does not depend on the layers, so any number will do that all pipelines can hold.
    known = [shape.num_layers for shape in strategy.pipelines if shape.num_layers is not None]
    layers = known[0] if known else max(shape.parts * shape.pp for shape in strategy.pipelines)
    placed = place_strategy(strategy, strategy.num_ranks, layers, slow.cluster)
    found = (
        tuple(max(of_rank.get(rank, 1.0) for rank in stage.ranks) for stage in pipeline.stages)
        for pipeline in placed.pipelines
    )
    return tuple(paces if max(paces) > 1.0 else () for paces in found)


def checked(paces: object, stages: int) -> Paces:
    """The paces of a plan's pipeline with so many stages. Raises TypeError or ValueError for what they cannot be."""
    if not isinstance(paces, list) or len(paces) != stages:
        raise ValueError(f"paces {str(paces)[:40]} are not one for each of {stages} stages")
    return tuple(map(pace_of, paces))
