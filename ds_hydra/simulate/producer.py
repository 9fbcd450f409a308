"""The planner's own process where messages are known. Pure: no torch.

It is `planner.producer`, and simulates the best plans of each step with their messages before it chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import ds_hydra.planner.producer as producer
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.planner.recipe import StepMs
from ds_hydra.simulate.job import read_job
from ds_hydra.simulate.step import Simulator


def step_ms_of(record: Mapping[str, Any], table: CostTable) -> StepMs:
    """What steps of the job in a record take, with these costs in place of its own."""
    job = read_job(record)
    return Simulator(replace(job, found=replace(job.found, table=table))).step_ms


def main(requests: Iterable[str], tell: producer.Tell) -> None:
    """Answer requests one by one until they end."""
    producer.main(requests, tell, step_ms_of)
