"""How a micro-batch's time divides into forward, backward and weights' gradients; slow ranks. Pure: no torch.

[Note: shares of a micro-batch]
A cost table tells what a micro-batch takes as a whole, a*l^2 + b*l + c. A schedule that splits the backward needs the
parts: F, the forward; B, the gradient of the input; W, the gradients of the weights. Each is a share of a, b and c, as
measured where the table has it. Else:

  a   F 1/3, B 2/3        attention: its backward computes two products for each one of the forward; it has no weights
  b   W w, the rest in    matrix products: a third each. Messages of TP and what is done element by element is in F and
      halves                B only, so w is less, the more of the time they take
  c   F 1/3, B 1/2, W 1/6   launches of kernels, mostly

w is 0.3, for nine tenths of the computing time in matrix products with weights, times the share of computing in the
scheme's b. The scheme with the least b * ranks of the table is taken to compute only. LLaMA 32B on A800: b * ranks is
0.85 ms a token at TP 1 and 2, 0.95 at 4, 1.14 at 8 and 1.64 at 16, so w is 0.30, 0.27, 0.22 and 0.16.

Memory is counted in tokens that a stage keeps with all their activations. From B to W it keeps nine tenths: inputs and
output gradients of the matrix products. A slice that others follow keeps more than its tokens: the gradients of its
keys and values, summed in FP32. These are 8 bytes a hidden unit where a layer keeps 36 to 50 of them, so up to 0.22;
less by kv heads / heads. Where layers carry states from slice to slice [Note: carried states], such a slice keeps them
and their gradients too, as many bytes whatever its length: so many tokens more. Of a layer that the backward computes
again a token keeps the input only, and keys and values for the slices behind it: 2 and 4 of these 36 bytes, 0.17. That
costs a further F, and leaves no W for later: what was computed again would have to stay for it.

MaxLen tokens fit PP times on the first stage, which under 1F1B keeps PP micro-batches. So a stage has room for
PP * MaxLen tokens, in whatever micro-batches.

A cost table is of devices that are alike, and one of them may be slow [Note: slow ranks]. What a stage takes longer is
what its slowest rank does, since the ranks of a stage wait for each other: of 2*tp2 with rank 3 at 1.25 the second
pipeline takes 1.25 times as long, whichever sequences it runs. So plans give it fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.nodes import Cluster

COMPUTING_IN_WEIGHTS = 0.3  # of the computing time of b: nine tenths of a third
UNTIL_WEIGHT = 0.9  # of what is kept from forward to backward, what the weights' gradients need
CONTEXT = 0.22  # tokens that a token counts more in a slice that others follow
_MOST_CONTEXT = 1e6
RECOMPUTED = 0.17  # tokens that a token counts in a layer that is computed again


class Terms(NamedTuple):
    """A figure for each of a, b and c."""

    a: float
    b: float
    c: float


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of one scheme's costs [Note: shares of a micro-batch]; the input's gradient has what is left of time."""

    forward: Terms
    weight: Terms
    until_weight: float = UNTIL_WEIGHT
    context: float = CONTEXT
    recomputed: float = RECOMPUTED
    state: float = 0.0  # tokens that a slice which others follow counts more, for the states that it hands on

    def __post_init__(self) -> None:
        for name in Terms._fields:
            forward, weight = getattr(self.forward, name), getattr(self.weight, name)
            if not (forward >= 0.0 and weight >= 0.0 and forward + weight <= 1.0):
                raise ConfigError(
                    f"shares of {name}: forward {forward!r} and weight {weight!r} must be at least 0 and together at "
                    "most 1; the rest is the backward's"
                )
        within = 0.0 <= self.until_weight <= 1.0 and 0.0 <= self.recomputed <= 1.0
        if not (within and 0.0 <= self.context <= _MOST_CONTEXT and 0.0 <= self.state <= _MOST_CONTEXT):
            raise ConfigError(
                f"shares of memory: until_weight {self.until_weight!r} and recomputed {self.recomputed!r} must be "
                f"within 0..1, and context {self.context!r} and state {self.state!r} within 0..{_MOST_CONTEXT:g}"
            )

    @classmethod
    def usual(cls, computing: float = 1.0) -> Shares:
        """Where none were measured; `computing` is the share of computing in b, the rest being messages."""
        w = COMPUTING_IN_WEIGHTS * computing
        return cls(Terms(1 / 3, (1.0 - w) / 2, 1 / 3), Terms(0.0, w, 1 / 6))


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
