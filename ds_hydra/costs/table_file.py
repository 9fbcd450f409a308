"""The cost table file: for which job it was measured, how, with which error; no write loses an old one. Pure.

[Note: table file]
The file is a cost table that `CostTable.load` reads, with two additions: "job" says what it was measured for, and
"measured" holds per scheme how the entry was made, every point, the fit, and each stage's own coefficients. A table
without "job", such as a published one, fits any job.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ds_hydra.costs.cost_table import CostTable, SchemeCost, read_table
from ds_hydra.costs.memory import Activations, activations_from_record, activations_record
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.zero_hetero.errors import ConfigError

# What must be equal between a table and a job; library versions are told but do not refuse.
_MUST_MATCH = {
    "model": "profile this model",
    "device": "profile on this device",
    "dtype": "profile with this job's dtype, or change bf16/fp16 in the config",
    "activation_checkpointing": "profile with the same hydra.activation_checkpointing",
    "attention": "profile with the same attention backend",
}


@dataclass(frozen=True, slots=True)
class JobPrint:
    """What a cost table depends on."""

    model: str  # fingerprint
    device: str
    dtype: str
    attention: str
    activation_checkpointing: bool
    num_ranks: int = 0  # MaxLen was made for this many: the masters are shared by them
    threads: int = 0  # of a rank, on a CPU
    versions: tuple[tuple[str, str], ...] = ()  # library, version

    def differences(self, job: JobPrint) -> list[str]:
        """What forbids a table with this print to be used for `job`, one line each."""
        return [
            f"{name}: the table has {getattr(self, name)!r}, the job {getattr(job, name)!r} ({remedy})"
            for name, remedy in _MUST_MATCH.items()
            if getattr(self, name) != getattr(job, name)
        ]


@dataclass(frozen=True)
class TableFile:
    """A cost table with the record of its making; `measured` and `links` are plain JSON."""

    table: CostTable
    job: JobPrint | None = None
    measured: Mapping[str, Mapping[str, Any]] | None = None  # by scheme
    links: Mapping[str, Any] | None = None
    step: Mapping[str, float] | None = None  # what a step costs besides its pipelines
    activations: Mapping[tuple[int, int], Activations] | None = None  # by (TP, SP)

    def to_record(self) -> dict[str, Any]:
        """As the file holds it."""
        record: dict[str, Any] = self.table.to_record()
        if self.job is not None:
            record["job"] = asdict(self.job) | {"versions": dict(self.job.versions)}
        for name in ("measured", "links", "step"):
            if getattr(self, name):
                record[name] = getattr(self, name)
        if self.activations:
            record["activations"] = activations_record(self.activations)
        return record

    def save(self, path: str | Path) -> None:
        """Write whole or not at all: the old file stays when the new one cannot be written."""
        write_atomically(path, json.dumps(self.to_record(), indent=1) + "\n")

    def merged(self, other: TableFile) -> TableFile:
        """This table extended by another's schemes, whose entries win. ConfigError when they are for different jobs."""
        if self.job is not None and other.job is not None:
            differences = self.job.differences(other.job)
            if self.job.num_ranks != other.job.num_ranks:
                differences.append(f"num_ranks: {self.job.num_ranks} and {other.job.num_ranks} (MaxLen depends on it)")
            if differences:
                raise ConfigError("the cost tables cannot be merged:\n  " + "\n  ".join(differences))
        costs: dict[str, SchemeCost] = {str(cost.scheme): cost for cost in (*self.table.costs, *other.table.costs)}
        return TableFile(
            CostTable(tuple(costs.values()), other.table.source or self.table.source),
            other.job or self.job,
            {**(self.measured or {}), **(other.measured or {})},
            other.links or self.links,
            other.step or self.step,
            {**(self.activations or {}), **(other.activations or {})},
        )


def read_table_file(path: str | Path) -> TableFile:
    """Read a table with its record. ConfigError names what is wrong with the file."""
    table = CostTable.load(path)
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    return table_file_from_record(table, record, str(path))


def table_file_from_record(table: CostTable, record: Mapping[str, Any], place: str) -> TableFile:
    """Inverse of `TableFile.to_record`."""
    job = record.get("job")
    parsed: JobPrint | None = None
    if job is not None:
        names = {field.name for field in fields(JobPrint)}
        if not isinstance(job, Mapping) or not set(_MUST_MATCH) <= set(job) <= names:
            raise ConfigError(f'{place}: "job" must hold {", ".join(sorted(_MUST_MATCH))}; profile again')
        parsed = JobPrint(**{**job, "versions": tuple(dict(job.get("versions", {})).items())})
    try:
        activations = activations_from_record(record["activations"]) if "activations" in record else None
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f'{place}: "activations" cannot be read ({error}); profile again') from error
    return TableFile(table, parsed, record.get("measured"), record.get("links"), record.get("step"), activations)


def check_job(found: TableFile, job: JobPrint, place: str) -> None:
    """ConfigError listing every difference between what a table was measured for and a job."""
    if found.job is None:
        return
    differences = found.job.differences(job)
    if differences:
        raise ConfigError(
            f"the cost table {place} was not measured for this job:\n  " + "\n  ".join(differences) + "\n"
            "Write one with tools/profile_schemes, or leave out hydra.cost_table for an estimate"
        )


def model_fingerprint(plan: ModelPlan) -> str:
    """Hash of names, shapes and shard rules of all parameters, and of the heads: equal for equally shaped models."""
    shapes = [(p.name, p.shape, p.trainable, p.rule.dim, p.rule.parts) for b in plan.buckets for p in b.params]
    text = repr((shapes, plan.num_heads, plan.num_kv_heads, plan.num_layers))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_atomically(path: str | Path, text: str) -> None:
    """Replace a file's content; ConfigError, with the old content in place, when that fails (a full disk, say)."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        kept = "; the old file was left as it is" if target.exists() else ""
        raise ConfigError(f"cannot write {target}: {error.strerror or error}{kept}") from error


def parse_record(record: Mapping[str, Any], place: str) -> TableFile:
    """A table and its record from JSON that is in memory."""
    return table_file_from_record(read_table(record, place), record, place)
