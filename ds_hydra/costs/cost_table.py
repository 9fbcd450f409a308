"""Coefficients of a parallel scheme in, milliseconds and MaxLen out. Pure: no torch.

[Note: cost model]
A micro-batch costs one pipeline stage, forward plus backward, `sum(a*l*l + b*l) + c` milliseconds over its
sequences of l tokens: c is paid once per micro-batch (Hydraulis, appendix C.2, prints T(l) with c inside). Where a host
launches a device's kernels, it never costs less than `floor`: launching takes the host as long for 100 tokens as for
1000, while the device waits. A pipeline runs its micro-batches one after the other and drains once, so its time is
`sum(loads) + (PP - 1) * largest load`. Where stages differ, the costs are those of the slowest, and PP - 1 is what the
others take of its time, added up: of stages that take 10, 5 and 8 ms, 1.3. MaxLen, the tokens that a micro-batch may
hold, follows from the memory model (appendix C.1) and is a hard limit.

Example, c = 5: sequences that cost 20 and 10 ms in one micro-batch are a load of 35 ms, in two they are 25 and 15. A
pipeline of two stages takes 35 + 35 = 70 ms for the first and 40 + 25 = 65 ms for the second, because its stages work
side by side; with PP = 1 it takes 35 and 40 ms.

`SchemeCost.sequence_ms` and its inverse `tokens_in` are the only places that know the quadratic: bounds, dispatch and
packing take what they return, and need no more of it than that it grows with the length.

A slice of s tokens that follow p others adds `a*((p + s)^2 - p^2) + b*s = a*(2*p*s + s*s) + b*s`: its tokens attend to
all before them. So the slices of a sequence add up to what it costs as a whole, and a cut costs no more than a further
micro-batch, c. With a = 0.5 and b = 2, 4 tokens take 16 ms: the first 3 take 10.5, and the last one 5.5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds_hydra.costs.shares import Shares
from ds_hydra.costs.slow_ranks import NONE, Paces, SlowRanks
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.zero_hetero.errors import ConfigError, PlanError

# Beyond any measurement (30 years, 10^14 tokens), and far from where their products leave the range of numbers.
MOST_MS, MOST_TOKENS = 1e12, 2**48


@dataclass(frozen=True, slots=True)
class SchemeCost:
    """Time and memory coefficients of one scheme [Note: cost model].

    `max_length` (MaxLen) is the most tokens a micro-batch may hold; `util_length` (UtilLen, appendix D) the
    tokens from which on the device is well used: no plan asks for more micro-batches than tokens / UtilLen.
    """

    scheme: ParallelScheme | PipelineShape
    a: float  # ms per token^2
    b: float  # ms per token
    c: float  # ms per micro-batch
    max_length: int  # tokens
    util_length: int = 1  # tokens
    shares: Shares | None = None  # of forward, backward and weights' gradients, if they were measured
    derived: str = ""  # from what and how, where these were not measured as they stand
    stages: tuple[float, ...] = ()  # what each stage takes, as a share of these costs; empty: all of them, each
    floor: float = 0.0  # ms that the launches of a micro-batch take, however few its tokens
    paces: Paces = ()  # with what slow ranks the costs count; empty: none

    def __post_init__(self) -> None:
        # Tables are also written by hand, so each figure is checked as it comes from JSON: True is an int to Python.
        for key in ("a", "b", "c", "floor", "max_length", "util_length"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"scheme {self.scheme}: {key} must be a finite number but is {value!r}")
            if value < 0:
                raise ConfigError(f"scheme {self.scheme}: {key} must not be negative but is {value}")
            most = MOST_TOKENS if key.endswith("_length") else MOST_MS
            if value > most:
                raise ConfigError(f"scheme {self.scheme}: {key} is {value:g}, more than {most:g}; profile again")
        if self.a == 0 and self.b == 0:
            raise ConfigError(
                f"scheme {self.scheme}: a and b are both 0, so T(l) does not grow with l (not monotone); measure "
                "at two lengths at least"
            )
        for key in ("max_length", "util_length"):
            if int(getattr(self, key)) != getattr(self, key):
                raise ConfigError(
                    f"scheme {self.scheme}: {key} counts tokens and must be a whole number, not {getattr(self, key)}"
                )
        if self.stages and not (len(self.stages) == self.scheme.pp and all(0.0 < one <= 1.0 for one in self.stages)):
            raise ConfigError(
                f"scheme {self.scheme}: stages must have a share above 0 and of at most 1 for each of its "
                f"{self.scheme.pp} stages but is {self.stages}"
            )
        if not 1 <= self.util_length <= self.max_length:
            raise ConfigError(
                f"scheme {self.scheme}: needs 1 <= util_length <= max_length but has util_length="
                f"{self.util_length}, max_length={self.max_length}; leave out schemes that do not fit the memory"
            )

    @property
    def uniform(self) -> ParallelScheme:
        """`scheme` where all of its stages are alike, as in every shipped table."""
        assert isinstance(self.scheme, ParallelScheme), f"the stages of {self.scheme} differ"
        return self.scheme

    @property
    def fills(self) -> float:
        """How many times the load of the slowest stage the first micro-batch takes until all stages are through with
        it: PP where they are alike [Note: cost model]."""
        return 1.0 + sum(self.stages) - max(self.stages) if self.stages else self.scheme.pp

    @property
    def stage_shares(self) -> tuple[float, ...]:
        """What each stage takes, as a share of these costs."""
        return self.stages or (1.0,) * self.scheme.pp

    def paced(self, paces: Paces) -> SchemeCost:
        """Costs of a pipeline whose stages take so many times as long; the same for none that do."""
        if not paces:
            return self
        takes = [pace * share for pace, share in zip(paces, self.stage_shares, strict=True)]
        most = max(takes)
        stages = tuple(one / most for one in takes) if min(takes) < most else ()
        return replace(self, a=most * self.a, b=most * self.b, c=most * self.c, floor=most * self.floor, stages=stages,
                       paces=paces)  # fmt: skip

    @property
    def room(self) -> int:
        """Tokens that a stage keeps at once, in whatever micro-batches [Note: shares of a micro-batch]."""
        return self.scheme.pp * int(self.max_length)

    def sequence_ms(self, lengths: NDArray[np.int64] | Sequence[int]) -> NDArray[np.float64]:
        """What each sequence adds to its micro-batch, in ms: (sequences,) tokens in, (sequences,) ms out."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.a * tokens * tokens + self.b * tokens

    def tokens_in(self, ms: float) -> float:
        """The length, in tokens and parts of one, of a sequence that adds this many ms: inverse of `sequence_ms`."""
        # The root of a*l^2 + b*l = ms in the form that does not divide by a, which may be 0.
        return 2.0 * ms / (self.b + math.sqrt(self.b * self.b + 4.0 * self.a * ms)) if ms > 0 else 0.0

    def square_share(self, tokens: float) -> float:
        """The share of a*l^2 in the time of one sequence of so many tokens."""
        square = self.a * tokens * tokens
        return square / (square + self.b * tokens + self.c)

    def slices_ms(self, slices: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
        """What each slice (start, stop) of a sequence adds to its micro-batch, in ms; (0, l) is a whole sequence."""
        ends = np.asarray(slices, dtype=np.int64).reshape(-1, 2)
        return self.sequence_ms(ends[:, 1]) - self.sequence_ms(ends[:, 0])

    def load_ms(self, lengths: NDArray[np.int64] | Sequence[int]) -> float:
        """One stage, forward and backward, of one micro-batch that holds these sequences."""
        # `fsum` is exact, so the load does not depend on the order of the sequences.
        return self.packed_ms(self.sequence_ms(lengths).tolist())

    def packed_ms(self, work: Sequence[float]) -> float:
        """The same from what each sequence adds, as `sequence_ms` gives it (ms)."""
        return max(self.floor, math.fsum(work) + self.c)

    def pipeline_ms(self, loads: Sequence[float]) -> float:
        """Time of micro-batches with these loads, all in ms: sum(loads) + (PP - 1) * max(loads); 0 for none.

        The flow-shop formula: a stage works through all loads, and the pipeline drains over the largest of them. Where
        stages differ, the slowest one works, and the others take their shares of the largest load besides.
        """
        return math.fsum(loads) + (self.fills - 1) * max(loads) if len(loads) else 0.0


@dataclass(frozen=True)
class CostTable:
    """The costs of every scheme that the job may use, in the order given; a scheme occurs once.

    `slow` are ranks that take longer than the costs say: which pipelines they slow down depends on the strategy.
    """

    costs: tuple[SchemeCost, ...]
    source: str = ""
    slow: SlowRanks = NONE

    def __post_init__(self) -> None:
        if not self.costs:
            raise ConfigError(
                "a cost table needs at least one scheme but has none; measure one with `ds-hydra profile`"
            )
        seen: set[tuple[ParallelScheme | PipelineShape, Paces]] = set()
        for cost in self.costs:
            if (cost.scheme, cost.paces) in seen:
                raise ConfigError(f"the cost table names scheme {cost.scheme} twice; keep one entry")
            seen.add((cost.scheme, cost.paces))

    @property
    def schemes(self) -> tuple[ParallelScheme, ...]:
        """The uniform schemes that it has."""
        return tuple(cost.scheme for cost in self.costs if isinstance(cost.scheme, ParallelScheme))

    @property
    def max_length(self) -> int:
        """The longest sequence that any scheme of the table can hold, in tokens."""
        return max(cost.max_length for cost in self.costs)

    def __getitem__(self, shape: ParallelScheme | PipelineShape) -> SchemeCost:
        """Costs of a scheme, or of a pipeline; PlanError when there are none."""
        scheme = shape.cost_key if isinstance(shape, PipelineShape) else shape
        for cost in self.costs:
            if cost.scheme == scheme and not cost.paces:
                return cost
        raise PlanError(
            f"the cost table has no entry for scheme {scheme}: it has {', '.join(str(k.scheme) for k in self.costs)}; "
            "measure that scheme too, or take it out of the strategies"
        )

    def paced(self, shape: ParallelScheme | PipelineShape, paces: Paces) -> SchemeCost:
        """The same where the pipeline's stages take so many times as long."""
        return self[shape].paced(paces)

    def for_strategies(self, strategies: Iterable[StrategyShape]) -> CostTable:
        """The table with a further entry for each of their pipelines that has slow ranks."""
        if not self.slow.paces:
            return self
        keys = dict.fromkeys(
            (pipeline.cost_key, paces)
            for strategy in strategies
            for pipeline, paces in zip(strategy.pipelines, self.slow.of(strategy), strict=True)
            if paces
        )
        return replace(self, costs=(*self.costs, *(self.paced(scheme, paces) for scheme, paces in keys)))

    def shares(self, shape: ParallelScheme | PipelineShape) -> Shares:
        """A scheme's shares, measured or the usual ones [Note: shares of a micro-batch]. PlanError as for its costs."""
        cost = self[shape]
        if cost.shares is not None:
            return cost.shares
        least = min(one.b * one.scheme.num_ranks for one in self.costs)
        rate = cost.b * cost.scheme.num_ranks
        return Shares.usual(least / rate if rate else 1.0)

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """The table of a file. ConfigError names file, key and remedy for what is missing, unknown or impossible."""
        from ds_hydra.costs.table_file import load_table  # the format builds on this class, so it is imported late

        return load_table(path)
