"""The planner's own process where messages are known: `python -m ds_hydra.simulate.producer`. Pure: no torch.

It is `planner.producer`, and simulates the best plans of each step with their messages before it chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.planner.producer import StepMs, main
from ds_hydra.simulate.job_record import read_job
from ds_hydra.simulate.step import Simulator


def step_ms_of(record: Mapping[str, Any], table: CostTable) -> StepMs:
    """What steps of the job in a record take, with these costs in place of its own."""
    job = read_job(record)
    return Simulator(replace(job, found=replace(job.found, table=table))).step_ms


if __name__ == "__main__":
    main(step_ms_of)
