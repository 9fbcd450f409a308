"""The cost table file: for which job it was measured, how, with which error; no write loses an old one. Pure.

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
"stages" takes. Since version 5 a scheme may have a "floor", in ms. A table without "job", such as a published
one, fits any job. Rows that cannot be true are repaired as a file is read [Note: costs that can be true]. Keys that are
not known are refused, so that a mistyped one is not silently without effect.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ds_hydra.costs.activations import Activations
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.job_fingerprint import JobFingerprint, read_job
from ds_hydra.costs.peak import SEEN, Peak, believed
from ds_hydra.costs.shares import Shares, Terms
from ds_hydra.costs.slow_ranks import NONE, SlowRanks
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.safe_json import parse_json

logger = logging.getLogger(__name__)
_FORMAT, _VERSION = "ds-hydra cost table", 5
_READ_VERSIONS = (1, 2, 3, 4, 5)
_TABLE_KEYS = ("format", "version", "source", "unit", "schemes", "slow")
_EVIDENCE_KEYS = ("job", "measured", "links", "step", "activations", "peak")
_COST_KEYS = ("scheme", "a", "b", "c", "max_length", "util_length")
_MORE_KEYS = {"shares": 2, "derived": 4, "stages": 4, "floor": 5}  # each with the version that began it
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
    repairs: tuple[str, ...] = ()  # a line for each row that could not be true; not in the file

    def to_record(self) -> dict[str, Any]:
        """As the file holds it."""
        record = table_record(self.table)
        if self.job is not None:
            record["job"] = asdict(self.job) | {"versions": dict(self.job.versions)}
        for name in ("measured", "links", "step"):
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
    return TableFile(table, job, measured, record.get("links"), record.get("step"), activations, peak, lines)


def load_table(path: str | Path) -> CostTable:
    """The table of a file alone; what was repaired is logged. ConfigError as `read_table_file`."""
    return told(read_table_file(path)).table


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
         **({"floor": k.floor} if k.floor else {})}
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
                          floor=row.get("floor", 0.0))  # fmt: skip
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
