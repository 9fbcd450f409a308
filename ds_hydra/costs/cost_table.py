"""Cost tables: coefficients of each parallel scheme, their file, and checks of their rows. Pure: no torch.

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

[Note: costs that can be true]
Attention to all tokens before takes a model some FLOPs for each token and each of these: 7 * width a layer, two
products forward and five backward, half of each masked. A row that implies more of them in a second than its ranks'
devices compute is wrong, however well it fits the lengths that it was measured at; three quarters of the peak, counted
without the backward's own forward, are the most that kernels reach. So is, most likely, one whose a * ranks is 1.4
times apart from that of schemes with as many heads on a rank: where the square is 1 % of the time, a fit does not see
it. In short sequences that does no harm, but all that is derived from the row runs long ones.

An example: 60 layers of width 6,656 take 2.8e6 FLOPs a token^2. At 0.94e-6 ms on each of 4 ranks that is 744 TFLOP/s a
rank, of an A800's 312; `tp2pp2` next to it has 187.

Such a row gets the a * ranks of the nearest scheme that can be true: as many heads on a rank, then as many ranks. Its b
and c stay: b was fitted together with a, so it may be some percent too high.

[Note: table file]
JSON of one object. "schemes" is the cost table: for each scheme its text, a, b, c, max_length and util_length, with
"format", "version", "unit" and "source". The text of a scheme may be that of any pipeline, so it can name stages by
their layers and by a class of devices. Since version 2 a scheme may have its measured "shares", too: "forward" and
"weight" with one number for each of a, b and c, "until_weight" and "context", and perhaps "recomputed"
[Note: shares of a micro-batch]. A measured table adds its evidence: "job" says what it was measured for, "measured" how
each entry was made, with every point, the fit, and each stage's own coefficients; "links", "step" and "activations" are
figures that were measured beside it. Since version 3 all of a job's stage options [Note: stage options] are the
"stages" of "job"; before, some of them stood in "job" itself, and what did not was off. Since version 4 "peak" has the
FLOPs of the model's attention a token^2, "attention_flops", and of a "device" in a second, "device_flops"; and a scheme
that was not measured as it stands says what it is "derived" from, and perhaps which share of its costs each of its
"stages" takes. Since version 5 a scheme may have a "floor", in ms. Of a model with an encoder of images "images" has
"a" and "b", ms of a unit's patches squared and of its patches, and "keep", bytes that a patch keeps. A table without
"job", such as a published one, fits any job. Rows that cannot be true are repaired as a file is read
[Note: costs that can be true]. Keys that are not known are refused, so that a mistyped one is not silently without
effect.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median_high
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_hydra.costs.job_fingerprint import JobFingerprint, read_job
from ds_hydra.costs.memory import Activations
from ds_hydra.costs.shares import NONE, Paces, Shares, SlowRanks, Terms
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from ds_hydra.zero_hetero.files import parse_json

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
    beside: float = 0.0  # tokens that a first stage could keep in place of what a microsecond of a load keeps
    holds: int = 0  # tokens for which there is memory, those in place of loads among them; 0: MaxLen
    paces: Paces = ()  # with what slow ranks the costs count; empty: none

    def __post_init__(self) -> None:
        # Tables are also written by hand, so each figure is checked as it comes from JSON: True is an int to Python.
        for key in ("a", "b", "c", "floor", "beside", "max_length", "util_length"):
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

    def tokens_beside(self, beside_us: int) -> int:
        """Tokens in place of which the first stage keeps what such a load does."""
        return math.ceil(self.beside * beside_us)

    @property
    def most_held(self) -> int:
        """Tokens of a micro-batch for which there is memory, whether it may have so many or not."""
        return int(self.holds or self.max_length)

    @property
    def room(self) -> int:
        """Tokens that a stage keeps at once, in whatever micro-batches [Note: shares of a micro-batch]."""
        return self.scheme.pp * self.most_held

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

    `slow` are ranks that take longer than the costs say: which pipelines they slow down depends on the layout.
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
        """The table of a file; what was repaired of it is logged. ConfigError names file, key and remedy for what is
        missing, unknown or impossible."""
        return told(read_table_file(path)).table


MOST_APART, SIBLINGS_APART = 2.0, 1.4  # times the a * ranks of other schemes, and of those with as many heads on a rank
ATTENTION_OF_PEAK = 0.75  # of causal attention by model FLOPs, six of the seven products: what no kernel has passed
SEEN = 0.2  # of a micro-batch's time: less of a square is hardly seen by a fit
CAUSAL_FLOPS = 7.0  # FLOPs of a layer for each token, token before and unit of width, the masked half left out

# Dense BF16 with FP32 sums, in TFLOP/s as the makers' data sheets say, by part of the device's name; the first that
# fits counts, so a longer name stands before a shorter one that it holds.
_PEAK_TFLOPS = (
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
)


@dataclass(frozen=True, slots=True)
class Peak:
    """What bounds a table's squares: FLOPs of the model's attention, a token^2, and of a device in a second."""

    attention_flops: float
    device_flops: float
    device: str = ""  # its name, for a reader

    @classmethod
    def of(cls, width: int, layers: int, device: str) -> Peak | None:
        """Of a model with full attention, `width` features of all its query heads, on a device of this name; None for a
        device whose peak is not known."""
        peak = peak_tflops(device)
        return None if peak is None else cls(CAUSAL_FLOPS * width * layers, 1e12 * peak, device)

    @property
    def least(self) -> float:
        """The least a * ranks, in ms a token^2."""
        return 1e3 * self.attention_flops * 6 / 7 / (ATTENTION_OF_PEAK * self.device_flops)

    def tflops(self, square: float) -> float:
        """TFLOP/s of a rank in attention, for an a * ranks in ms a token^2."""
        return self.attention_flops / square / 1e9 if square else math.inf


def known_devices() -> tuple[str, ...]:
    """Parts of the names of devices whose peak is known."""
    return tuple(name for name, _ in _PEAK_TFLOPS)


def peak_tflops(name: str) -> float | None:
    """The data sheet's dense BF16 TFLOP/s of a device; None for one that is not listed."""
    return next((peak for part, peak in _PEAK_TFLOPS if part in name), None)


def square_of(cost: SchemeCost) -> float:
    """a * ranks, in ms a token^2: what attention takes of all ranks together."""
    return cost.a * cost.scheme.num_ranks


def believed(
    table: CostTable, peak: Peak | None = None, fixed: Collection[ParallelScheme] = ()
) -> tuple[CostTable, tuple[str, ...]]:
    """The table with rows that cannot be true repaired, and a line for each [Note: costs that can be true].

    Rows of `fixed` schemes, whose squares were well seen, need only be possible at the `peak`. ConfigError where no row
    is left to repair others by. Pipelines whose stages differ are left as they are.
    """
    rows = {cost.uniform: square_of(cost) for cost in table.costs if isinstance(cost.scheme, ParallelScheme)}
    least = peak.least if peak else 0.0
    doubts = {scheme: doubt for scheme in rows if (doubt := _doubt(scheme, rows, peak, scheme in fixed))}
    if not doubts:
        return table, ()
    good = [scheme for scheme, square in rows.items() if scheme not in doubts and square > least]
    if not good:
        listed = "; ".join(f"{scheme}: {doubt}" for scheme, doubt in doubts.items())
        raise ConfigError(f"no row of the cost table can be true: {listed}. Measure again, with longer sequences")
    costs, lines = [], []
    for cost in table.costs:
        if cost.scheme not in doubts:
            costs.append(cost)
            continue
        scheme = cost.uniform
        by = min(good, key=lambda other: _distance(scheme, other))
        costs.append(replace(cost, a=rows[by] / scheme.num_ranks, derived=f"a by that of {by}"))
        lines.append(
            f"a of {scheme} is {cost.a:.3g} ms a token^2, {doubts[scheme]}; {costs[-1].a:.3g} by the measured {by} is "
            "taken instead"
        )
    return replace(table, costs=tuple(costs)), tuple(lines)


def _doubt(scheme: ParallelScheme, rows: dict[ParallelScheme, float], peak: Peak | None, is_fixed: bool) -> str:
    """Why a row cannot be true, in words; empty: it can."""
    square = rows[scheme]
    if peak is not None and square < peak.least:
        rate = f"{peak.tflops(square):,.0f} TFLOP/s of attention on each device" if square else "no time for attention"
        most = f"{peak.tflops(peak.least):,.0f} of its {peak.device_flops / 1e12:.0f}"
        return f"{rate}, where {peak.device or 'one'} reaches {most}"
    possible = [other for other, its in rows.items() if peak is None or its >= peak.least]
    alike = [other for other in possible if _heads(other) == _heads(scheme)]
    # Of two that differ the lower one is doubted: an attention that is too cheap is what plans run into.
    middle = median_high(rows[other] for other in (alike if len(alike) > 2 else possible))
    apart = SIBLINGS_APART if peak is not None and len(alike) > 2 else MOST_APART
    if is_fixed or middle / apart <= square <= apart * middle or middle == 0.0:
        return ""
    whose = "schemes with as many heads on a rank have" if len(alike) > 2 else "the others have"
    return f"{square / middle:.2g} times the a * ranks that {whose}"


def _heads(scheme: ParallelScheme) -> int:
    """Ranks that share the heads."""
    return scheme.tp * scheme.sp


def _distance(scheme: ParallelScheme, other: ParallelScheme) -> tuple[float, float, ParallelScheme]:
    heads, ranks = _heads(other) / _heads(scheme), other.num_ranks / scheme.num_ranks
    return abs(math.log(heads)), abs(math.log(ranks)), other


logger = logging.getLogger(__name__)
_FORMAT, _VERSION = "ds-hydra cost table", 5
_READ_VERSIONS = (1, 2, 3, 4, 5)
_TABLE_KEYS = ("format", "version", "source", "unit", "schemes", "slow")
_EVIDENCE_KEYS = ("job", "measured", "links", "step", "activations", "peak", "images")
_IMAGE_KEYS = ("a", "b", "keep")
_COST_KEYS = ("scheme", "a", "b", "c", "max_length", "util_length")
# Each with the version that began it.
_MORE_KEYS = {"shares": 2, "derived": 4, "stages": 4, "floor": 5, "beside": 5, "holds": 5}
_SHARES_KEYS = ("forward", "weight", "until_weight", "context")
_MORE_SHARES_KEYS = ("recomputed", "state")
_MOST_FLOPS = 1e30
_MOST = 1e15  # bytes of activations of a token: more is a mistake, and products of it would overflow


@dataclass(frozen=True)
class TableFile:
    """A cost table with its evidence, see [Note: table file]; `measured` and `links` are plain JSON."""

    table: CostTable
    job: JobFingerprint | None = None
    measured: Mapping[str, Mapping[str, Any]] | None = None  # by scheme
    links: Mapping[str, Any] | None = None
    step: Mapping[str, float] | None = None  # what a step costs besides its pipelines
    activations: Mapping[tuple[int, int], Activations] | None = None  # by (TP, SP)
    peak: Peak | None = None  # of the device, and what the model's attention needs of it
    images: Mapping[str, float] | None = None  # what an encoder takes for an image [Note: price of an image]
    repairs: tuple[str, ...] = ()  # a line for each row that could not be true; not in the file

    def to_record(self) -> dict[str, Any]:
        """As the file holds it."""
        record = table_record(self.table)
        if self.job is not None:
            record["job"] = asdict(self.job) | {"versions": dict(self.job.versions)}
        for name in ("measured", "links", "step", "images"):
            if getattr(self, name):
                record[name] = getattr(self, name)
        if self.activations:
            record["activations"] = activations_record(self.activations)
        if self.peak is not None:
            record["peak"] = asdict(self.peak)
        return record

    def save(self, path: str | Path) -> None:
        """Write whole or not at all: the old file stays when the new one cannot be written."""
        write_atomically(path, json.dumps(self.to_record(), indent=1, allow_nan=False) + "\n")

    def merged(self, other: TableFile) -> TableFile:
        """This table extended by another's schemes, whose entries win. ConfigError when they are for different jobs."""
        if self.job is not None and other.job is not None:
            differences = self.job.differences(other.job)
            if self.job.num_ranks != other.job.num_ranks:
                differences.append(f"num_ranks: {self.job.num_ranks} and {other.job.num_ranks} (MaxLen depends on it)")
            if differences:
                raise ConfigError(
                    "the cost tables cannot be merged:\n  " + "\n  ".join(differences) + "\nWrite them to two files"
                )
        costs: dict[str, SchemeCost] = {str(cost.scheme): cost for cost in (*self.table.costs, *other.table.costs)}
        return TableFile(
            CostTable(tuple(costs.values()), other.table.source or self.table.source),
            other.job or self.job,
            {**(self.measured or {}), **(other.measured or {})},
            other.links or self.links,
            other.step or self.step,
            {**(self.activations or {}), **(other.activations or {})},
            other.peak or self.peak,
            other.images or self.images,
        )


def read_table_file(path: str | Path) -> TableFile:
    """The table of a file with its evidence. ConfigError names file, key and remedy for whatever is wrong."""
    return table_file_from_record(_read_json(path), str(path))


def table_file_from_record(record: Any, place: str) -> TableFile:
    """Inverse of `TableFile.to_record`; `place` is what errors call it. ConfigError as `read_table_file`."""
    table = read_table(record, place)
    if table.slow.paces:
        raise ConfigError(f'{place}: which ranks are "slow" is what a job finds out while it trains; leave it out')
    job = read_job(record["job"], place) if record.get("job") is not None else None
    try:
        activations = activations_from_record(record["activations"]) if "activations" in record else None
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f'{place}: "activations" cannot be read ({error}); profile again') from error
    peak, measured = _read_peak(record.get("peak"), place), record.get("measured")
    try:
        table, repairs = believed(table, peak, _fixed(table, measured))
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    lines = tuple(f"{place}: {line}" for line in repairs)
    images = _read_images(record.get("images"), place)
    return TableFile(table, job, measured, record.get("links"), record.get("step"), activations, peak, images, lines)


def told(found: TableFile) -> TableFile:
    """The same, with what was repaired logged."""
    for line in found.repairs:
        logger.warning("%s", line)
    return found


def _read_peak(record: object, place: str) -> Peak | None:
    if record is None:
        return None
    names = {field.name for field in fields(Peak)}
    numbers = [record.get(name) for name in ("attention_flops", "device_flops")] if isinstance(record, dict) else []
    if not numbers or set(record) - names or not all(_is_above_0(number) for number in numbers):  # type: ignore[call-overload]
        raise ConfigError(
            f'{place}: "peak" must hold "attention_flops" and "device_flops", numbers above 0, and perhaps "device", '
            f"but is {str(record)[:80]}"
        )
    return Peak(**record)  # type: ignore[arg-type]


def _read_images(record: Any, place: str) -> Mapping[str, float] | None:
    if record is None:
        return None
    known = isinstance(record, dict) and set(record) == set(_IMAGE_KEYS)
    if not known or not _is_above_0(record["b"]) or not all(not one or _is_above_0(one) for one in record.values()):
        raise ConfigError(f'{place}: "images" must hold "a", "b" and "keep", numbers of at least 0, and b above it, '
                          f"but is {str(record)[:80]}; profile again")  # fmt: skip
    return dict(record)


def _is_above_0(number: object) -> bool:
    return not isinstance(number, bool) and isinstance(number, int | float) and 0.0 < number < _MOST_FLOPS


def _fixed(table: CostTable, measured: object) -> set[ParallelScheme]:
    """Schemes whose measured points fix the very a that the table has, where the square was a good part of the time."""
    found: set[ParallelScheme] = set()
    for scheme in table.schemes:
        cost, entry = table[scheme], measured.get(str(scheme)) if isinstance(measured, dict) else None
        if not isinstance(entry, dict) or "a" in entry.get("unidentified", ("a",)):
            continue
        fits = [stage["fit"]["a"] for stage in entry["stages"] if stage["index"] == entry["slowest_stage"]]
        if fits == [cost.a] and cost.square_share(cost.max_length) >= SEEN:
            found.add(scheme)
    return found


def table_record(table: CostTable) -> dict[str, Any]:
    """A cost table as JSON holds it; `read_table` is the inverse."""
    rows = [
        {"scheme": str(k.scheme), "a": k.a, "b": k.b, "c": k.c, "max_length": k.max_length,
         "util_length": k.util_length, **({"shares": _shares_record(k.shares)} if k.shares else {}),
         **({"derived": k.derived} if k.derived else {}), **({"stages": k.stages} if k.stages else {}),
         **({"floor": k.floor} if k.floor else {}), **({"beside": k.beside, "holds": k.holds} if k.beside else {})}
        for k in table.costs
    ]  # fmt: skip
    slow = {"slow": table.slow.to_record()} if table.slow.paces else {}
    return {"format": _FORMAT, "version": _VERSION, "source": table.source, "unit": "ms", "schemes": rows, **slow}


def read_table(record: object, place: str) -> CostTable:
    """The cost table in a file's JSON, read strictly; `place` is what errors call it."""
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise ConfigError(f"{place}: 'format' must be {_FORMAT!r}; give a table that `ds-hydra profile` wrote")
    version = record.get("version")
    if isinstance(version, bool) or version not in _READ_VERSIONS:
        raise ConfigError(
            f"{place}: 'version' is {version!r} but this release reads {_READ_VERSIONS[0]} to {_READ_VERSIONS[-1]}; "
            "write the table again with `ds-hydra profile`"
        )
    unknown = sorted(set(record) - {*_TABLE_KEYS, *_EVIDENCE_KEYS})
    if unknown or record.get("unit", "ms") != "ms":
        raise ConfigError(f"{place}: " + (f"unknown keys {unknown}; remove them" if unknown else "'unit' must be 'ms'"))
    rows = record.get("schemes")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{place}: 'schemes' must be a list with at least one scheme; profile again")
    more = [key for key, since in _MORE_KEYS.items() if version >= since]
    costs = tuple(_read_scheme(row, more, f"{place}: schemes[{index}]") for index, row in enumerate(rows))
    try:
        slow = SlowRanks.of_record(record["slow"]) if "slow" in record else NONE
        return CostTable(costs, str(record.get("source", "")), slow)
    except (KeyError, TypeError) as error:
        raise ConfigError(f'{place}: "slow" cannot be read ({error}); leave it out') from error
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error


def _read_scheme(row: object, more: Sequence[str], place: str) -> SchemeCost:
    if not isinstance(row, dict):
        raise ConfigError(f"{place} must be an object with {', '.join(_COST_KEYS)} but is {row!r}")
    missing = [key for key in _COST_KEYS if key not in row]
    known = (*_COST_KEYS, *more)
    unknown = sorted(set(row) - set(known))
    if missing or unknown:
        wrong = f"missing {', '.join(missing)}" if missing else f"unknown keys {unknown}; known: {', '.join(known)}"
        raise ConfigError(f"{place} ({row.get('scheme', 'unnamed')}): {wrong}")
    try:
        shares = _read_shares(row["shares"]) if "shares" in row else None
        key, figures = PipelineShape.parse(str(row["scheme"])).cost_key, {key: row[key] for key in _COST_KEYS[1:]}
        stages = tuple(map(_share_of_costs, row.get("stages", ())))
        return SchemeCost(key, **figures, shares=shares, derived=str(row.get("derived", "")), stages=stages,
                          floor=row.get("floor", 0.0), beside=row.get("beside", 0.0),
                          holds=row.get("holds", 0))  # fmt: skip
    except ValueError as error:  # ConfigError and PlanError are ValueErrors: each gets its place
        raise ConfigError(f"{place}: {error}") from error


def _share_of_costs(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f'"stages" must hold a number for each stage but holds {value!r}')
    return float(value)


def _shares_record(shares: Shares) -> dict[str, Any]:
    return {"forward": shares.forward._asdict(), "weight": shares.weight._asdict(),
            "until_weight": shares.until_weight, "context": shares.context,
            "recomputed": shares.recomputed} | ({"state": shares.state} if shares.state else {})  # fmt: skip


def _read_shares(record: object) -> Shares:
    """ConfigError for what is no number, missing, unknown or out of range."""
    if not isinstance(record, dict) or set(record) - set(_MORE_SHARES_KEYS) != set(_SHARES_KEYS):
        raise ConfigError(f'"shares" must hold {", ".join(_SHARES_KEYS)}, each once; profile again')
    terms = [record["forward"], record["weight"]]
    if not all(isinstance(part, dict) and set(part) == set(Terms._fields) for part in terms):
        raise ConfigError('"forward" and "weight" of "shares" must hold one number for each of a, b and c')
    memory = {key: value for key, value in record.items() if key not in ("forward", "weight")}
    numbers = [*terms[0].values(), *terms[1].values(), *memory.values()]
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        raise ConfigError(f'"shares" must be numbers but are {record}')
    return Shares(Terms(**terms[0]), Terms(**terms[1]), **memory)


def activations_record(figures: Mapping[tuple[int, int], Activations]) -> dict[str, dict[str, float]]:
    """Activations by (TP, SP) as JSON holds them, by the text "TP,SP"."""
    return {f"{tp},{sp}": asdict(figure) for (tp, sp), figure in figures.items()}


def activations_from_record(record: Mapping[str, Mapping[str, float]]) -> dict[tuple[int, int], Activations]:
    """Inverse of `activations_record`. Raises AttributeError, TypeError or ValueError for anything else."""
    for key, figures in record.items():
        for name, figure in figures.items():
            if isinstance(figure, bool) or not isinstance(figure, int | float) or not 0 <= figure <= _MOST:
                raise ValueError(f"{name} of {key!r} must be a number from 0 to {_MOST:g} but is {str(figure)[:40]}")
    return {(int(tp), int(sp)): Activations(**v) for (tp, sp), v in ((k.split(","), v) for k, v in record.items())}


def _read_json(path: str | Path) -> Any:
    try:
        return parse_json(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"cannot read the cost table {path}: {error.strerror}; write one with `ds-hydra profile`"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"the cost table {path} is not JSON: {error}; write it again with `ds-hydra profile`"
        ) from error


def check_job(found: TableFile, job: JobFingerprint, place: str) -> None:
    """ConfigError listing every difference between what a table was measured for and a job."""
    if found.job is None:
        return
    differences = found.job.differences(job)
    if differences:
        raise ConfigError(
            f"the cost table {place} was not measured for this job:\n  " + "\n  ".join(differences) + "\n"
            "Write one with `ds-hydra profile`, or leave out hydra.cost_table for an estimate"
        )


def write_atomically(path: str | Path, text: str) -> None:
    """Replace a file's content; ConfigError, with the old content in place, when that fails (a full disk, say)."""
    target = Path(path)
    # Written beside the target and renamed over it, so that the target is at every moment the old file or the new one.
    # The process id keeps two writers out of each other's draft.
    draft = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # before the rename: else a crash could leave the new name on an empty file
        draft.replace(target)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        kept = "; the old file was left as it is" if target.exists() else ""
        raise ConfigError(f"cannot write {target}: {error.strerror or error}{kept}") from error
