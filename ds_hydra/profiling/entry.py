"""What was measured of a scheme in; its row of a cost table, and its record in the table's file, out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from ds_hydra.costs.activations import Activations
from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.costs.shares import Terms
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.profiling.fit import Fit, Point
from ds_hydra.profiling.split_fit import SplitFit, SplitPoint

How = Literal["ranks", "local shapes"]
UTILISED = 0.85  # of the best throughput: where UtilLen lies (Hydraulis, appendix D)


@dataclass(frozen=True)
class StageEntry:
    """One stage of a scheme: what was measured of it and its own coefficients."""

    index: int
    num_layers: int
    how: How
    points: tuple[Point, ...]
    fit: Fit
    block_tokens: int | None = None  # a micro-batch of more computes its head twice
    no_room_tokens: int | None = None  # tokens of the micro-batch at which the device ran out of memory
    split_points: tuple[SplitPoint, ...] = ()  # with the backward split
    split: SplitFit | None = None  # None: the model or the memory did not allow any
    shared_square: bool = False  # a is that of all schemes with as many heads on a rank [Note: shared squares]

    def record(self) -> dict[str, Any]:
        """As the table file holds it."""
        split = {} if self.split is None else {
            "split": asdict(self.split) | {"forward": self.split.forward._asdict(),
                                           "weight": self.split.weight._asdict()},
            "split_points": [asdict(point) for point in self.split_points],
        }  # fmt: skip
        return {
            "index": self.index,
            "num_layers": self.num_layers,
            "chunk_tokens": self.block_tokens,
            "no_room_tokens": self.no_room_tokens,
            "fit": asdict(self.fit),
            "points": [asdict(point) for point in self.points],
            **({"shared_square": True} if self.shared_square else {}),
            **split,
        }


@dataclass(frozen=True)
class SchemeEntry:
    """One scheme: its slowest stage's coefficients are the scheme's."""

    scheme: ParallelScheme
    stages: tuple[StageEntry, ...]
    clock: str
    scaled_links: bool  # some collective's time was scaled from a group of another size

    @property
    def slowest(self) -> StageEntry:
        """The stage with the largest load in the middle of the ladder, on a logarithmic scale."""
        # Which stage that is depends on the lengths: a large head weighs per token, c per micro-batch.
        probe = self.stages[0].points[len(self.stages[0].points) // 2]
        return max(self.stages, key=lambda stage: stage.fit.predict(probe))

    def cost(self, max_length: int, kept: Activations | None = None) -> SchemeCost:
        """The scheme's row of a cost table; `kept` tells what stays from a part of the backward to the next.

        With PP = 1 a plan fills its micro-batches, so their heads are computed twice if any are; with more it keeps
        them small. Where the device ran out of memory MaxLen is smaller, whatever the memory model says.
        """
        max_length = min([max_length, *(s.no_room_tokens - 1 for s in self.stages if s.no_room_tokens is not None)])
        fit, block = self.slowest.fit, self.slowest.block_tokens
        filled = self.scheme.pp == 1 and block is not None and max_length > block
        a, b = fit.a, fit.b + (fit.r if filled else 0.0)
        b = b if a or b else 1e-9  # a table refuses costs that do not grow with the length
        split, shares = self.slowest.split, None
        if split is not None and kept is not None:
            shares = kept.shares(split.forward, split.weight)
        derived = "a fitted with all schemes of as many heads on a rank" if self.slowest.shared_square else ""
        return SchemeCost(self.scheme, a, b, fit.c, max_length, utilised_length(fit, max_length), shares, derived,
                          floor=fit.floor)  # fmt: skip

    def record(self) -> dict[str, Any]:
        """As the table file holds it."""
        slowest = self.slowest
        return {
            "how": slowest.how,
            "clock": self.clock,
            "scaled_links": self.scaled_links,
            "slowest_stage": slowest.index,
            "held_out_median": slowest.fit.held_out_median,
            "held_out_p90": slowest.fit.held_out_p90,
            "unidentified": list(slowest.fit.unidentified),
            "stages": [stage.record() for stage in self.stages],
        }


def utilised_length(fit: Fit, max_length: int) -> int:
    """UtilLen: the fewest tokens with 85% of the best throughput l / T(l) up to `max_length`."""
    lengths = np.unique(np.geomspace(1, max_length, 512).astype(np.int64))
    rate = lengths / np.maximum(fit.floor, fit.a * lengths.astype(np.float64) ** 2 + fit.b * lengths + fit.c)
    return int(lengths[int(np.argmax(rate >= UTILISED * rate.max()))])


def entry_from_record(scheme: ParallelScheme, record: Mapping[str, Any]) -> SchemeEntry:
    """Inverse of `SchemeEntry.record`."""
    stages = tuple(_stage_from_record(stage, record["how"]) for stage in record["stages"])
    return SchemeEntry(scheme, stages, record["clock"], record["scaled_links"])


def _stage_from_record(stage: Mapping[str, Any], how: How) -> StageEntry:
    fit, split = stage["fit"], stage.get("split")
    lists = {key: tuple(fit[key]) for key in ("standard_errors", "unidentified")}
    points = (Point(**{**point, "lengths": tuple(point["lengths"])}) for point in stage["points"])
    in_parts = (SplitPoint(**{**p, "lengths": tuple(p["lengths"])}) for p in stage.get("split_points", ()))
    return StageEntry(
        stage["index"], stage["num_layers"], how, tuple(points), Fit(**{**fit, **lists}), stage.get("chunk_tokens"),
        stage.get("no_room_tokens"), tuple(in_parts),
        None if split is None else SplitFit(
            **{**split, "forward": Terms(**split["forward"]), "weight": Terms(**split["weight"])}
        ),
        stage.get("shared_square", False),
    )  # fmt: skip
