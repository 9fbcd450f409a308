"""A simulated job as JSON, for the planner's own process, and back. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from ds_hydra.costs.table_file import table_file_from_record
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.links import LinkModel
from ds_hydra.zero_hetero.nodes import Cluster

_PLAN, _LINKS, _CLUSTER = TypeAdapter(ModelPlan), TypeAdapter(LinkModel), TypeAdapter(Cluster)
_NUMBERS = ("hidden", "num_ranks", "element_bytes", "gradient_bytes", "sum_bytes", "shift", "lanes")


def job_record(job: SimulatedJob) -> dict[str, Any]:
    """All of a job but its memory, which says nothing of times; `read_job` is the inverse."""
    return {
        "plan": _PLAN.dump_python(job.plan, mode="json"),
        "links": _LINKS.dump_python(job.links, mode="json"),
        "found": job.found.to_record(),
        **({"cluster": _CLUSTER.dump_python(job.cluster, mode="json")} if job.cluster else {}),
        **{name: getattr(job, name) for name in _NUMBERS},
    }


def read_job(record: Mapping[str, Any]) -> SimulatedJob:
    """The job of a record. KeyError or ValueError, of which ConfigError is one, for what `job_record` does not give."""
    return SimulatedJob(
        plan=_PLAN.validate_python(record["plan"]),
        links=_LINKS.validate_python(record["links"]),
        found=table_file_from_record(record["found"], "the simulated job's costs"),
        cluster=_CLUSTER.validate_python(record["cluster"]) if "cluster" in record else None,
        **{name: record[name] for name in _NUMBERS},
    )
