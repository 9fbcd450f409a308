"""Model shape and devices, or a table file, in; milliseconds and MaxLen of every parallel scheme out. Pure: no torch.

[Note: cost model]
A micro-batch costs one pipeline stage, forward plus backward, `sum(a*l*l + b*l) + c` milliseconds over its
sequences of l tokens: c is paid once per micro-batch (Hydraulis, appendix C.2, prints T(l) with c inside). A
pipeline runs its micro-batches one after the other and drains once, so its time is
`sum(loads) + (PP - 1) * largest load`. MaxLen, the tokens that a micro-batch may hold, follows from the memory
model (appendix C.1) and is a hard limit.

`SchemeCost.sequence_ms` is the only place that knows the quadratic: bounds, dispatch and packing take what it
returns, and need no more of it than that it grows with the length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds_hydra.pipe.shape import ParallelScheme, parse_strategy
from ds_hydra.zero_hetero.errors import ConfigError, PlanError

FORMAT = "ds-hydra cost table"
VERSION = 1
# How a measured table came about; `table_file` reads these.
EVIDENCE = ("job", "measured", "links", "step", "activations")


@dataclass(frozen=True, slots=True)
class SchemeCost:
    """Time and memory coefficients of one scheme [Note: cost model].

    `max_length` (MaxLen) is the most tokens a micro-batch may hold; `util_length` (UtilLen, appendix D) the
    tokens from which on the device is well used: no plan asks for more micro-batches than tokens / UtilLen.
    """

    scheme: ParallelScheme
    a: float  # ms per token^2
    b: float  # ms per token
    c: float  # ms per micro-batch
    max_length: int  # tokens
    util_length: int = 1  # tokens

    def __post_init__(self) -> None:
        for key in ("a", "b", "c", "max_length", "util_length"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"scheme {self.scheme}: {key} must be a finite number but is {value!r}")
            if value < 0:
                raise ConfigError(f"scheme {self.scheme}: {key} must not be negative but is {value}")
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
        if not 1 <= self.util_length <= self.max_length:
            raise ConfigError(
                f"scheme {self.scheme}: needs 1 <= util_length <= max_length but has util_length="
                f"{self.util_length}, max_length={self.max_length}; leave out schemes that do not fit the memory"
            )

    def sequence_ms(self, lengths: NDArray[np.int64] | Sequence[int]) -> NDArray[np.float64]:
        """What each sequence adds to its micro-batch, in ms: (sequences,) tokens in, (sequences,) ms out."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.a * tokens * tokens + self.b * tokens

    def load_ms(self, lengths: NDArray[np.int64] | Sequence[int]) -> float:
        """One stage, forward and backward, of one micro-batch that holds these sequences."""
        return math.fsum(self.sequence_ms(lengths).tolist()) + self.c

    def pipeline_ms(self, loads: Sequence[float]) -> float:
        """Flow-shop time of micro-batches with these loads (ms): sum(loads) + (PP-1) * max(loads); 0 for none."""
        return math.fsum(loads) + (self.scheme.pp - 1) * max(loads) if len(loads) else 0.0

    def paper_ms(self, loads: Sequence[float]) -> float:
        """Eq. 1 of Hydraulis: max(loads) * (PP - 1 + V) for V micro-batches; 0 for none."""
        return max(loads) * (self.scheme.pp - 1 + len(loads)) if len(loads) else 0.0


@dataclass(frozen=True)
class CostTable:
    """The costs of every scheme that the job may use, in the order given; a scheme occurs once."""

    costs: tuple[SchemeCost, ...]
    source: str = ""

    def __post_init__(self) -> None:
        if not self.costs:
            raise ConfigError("a cost table needs at least one scheme but has none")
        seen: set[ParallelScheme] = set()
        for cost in self.costs:
            if cost.scheme in seen:
                raise ConfigError(f"the cost table names scheme {cost.scheme} twice; keep one entry")
            seen.add(cost.scheme)

    @property
    def schemes(self) -> tuple[ParallelScheme, ...]:
        return tuple(cost.scheme for cost in self.costs)

    @property
    def max_length(self) -> int:
        """The longest sequence that any scheme of the table can hold, in tokens."""
        return max(cost.max_length for cost in self.costs)

    def __getitem__(self, scheme: ParallelScheme) -> SchemeCost:
        for cost in self.costs:
            if cost.scheme == scheme:
                return cost
        raise PlanError(
            f"the cost table has no entry for scheme {scheme}: it has {', '.join(map(str, self.schemes))}; "
            "measure that scheme too, or take it out of the strategies"
        )

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read a table; ConfigError names file, key and remedy for whatever is missing, unknown or impossible."""
        try:
            record = json.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(
                f"cannot read the cost table {path}: {error.strerror}; write one with tools/profile_schemes"
            ) from error
        except ValueError as error:
            raise ConfigError(f"the cost table {path} is not JSON: {error}") from error
        return read_table(record, str(path))

    def save(self, path: str | Path) -> None:
        """Write the table so that `load` gives it back unchanged."""
        Path(path).write_text(json.dumps(self.to_record(), indent=1) + "\n")

    def to_record(self) -> dict[str, object]:
        rows = [
            {"scheme": str(k.scheme), "a": k.a, "b": k.b, "c": k.c, "max_length": k.max_length,
             "util_length": k.util_length}
            for k in self.costs
        ]  # fmt: skip
        return {"format": FORMAT, "version": VERSION, "source": self.source, "unit": "ms", "schemes": rows}


def read_table(record: object, place: str) -> CostTable:
    """The strict reading of a table's JSON, as `to_record` gives it; `place` is what errors call it."""
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ConfigError(f"{place}: 'format' must be {FORMAT!r}; this is not a cost table")
    if record.get("version") != VERSION:
        raise ConfigError(
            f"{place}: 'version' is {record.get('version')!r} but this release reads {VERSION}; "
            "write the table again with tools/profile_schemes"
        )
    unknown = sorted(set(record) - {"format", "version", "source", "unit", "schemes", *EVIDENCE})
    if unknown or record.get("unit", "ms") != "ms":
        raise ConfigError(f"{place}: " + (f"unknown keys {unknown}" if unknown else "'unit' must be 'ms'"))
    rows = record.get("schemes")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{place}: 'schemes' must be a list with at least one scheme")
    costs = tuple(_read_scheme(row, f"{place}: schemes[{index}]") for index, row in enumerate(rows))
    try:
        return CostTable(costs, str(record.get("source", "")))
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _read_scheme(row: object, place: str) -> SchemeCost:
    keys = ("scheme", "a", "b", "c", "max_length", "util_length")
    if not isinstance(row, dict):
        raise ConfigError(f"{place} must be an object with {', '.join(keys)} but is {row!r}")
    missing = [key for key in keys if key not in row]
    unknown = sorted(set(row) - set(keys))
    if missing or unknown:
        raise ConfigError(
            f"{place} ({row.get('scheme', 'unnamed')}): "
            + (f"missing {', '.join(missing)}" if missing else f"unknown keys {unknown}; known: {', '.join(keys)}")
        )
    try:
        schemes = parse_strategy(str(row["scheme"]))
        if len(schemes) != 1:
            raise ConfigError(f"{row['scheme']!r} names {len(schemes)} pipelines where one scheme is due")
        return SchemeCost(scheme=schemes[0], **{key: row[key] for key in keys[1:]})
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error
