"""The job: what is trained, on what, and how. Nothing here depends on which ranks train it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.data.sampler import Order
from ds_hydra.data.sequences import SequenceData
from ds_hydra.engine.pre_step import Callback
from ds_hydra.host.optimizers import OptimizerRecipe
from ds_hydra.host.precision import DataTypes
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.self_check.verdicts import CheckResult


@dataclass(frozen=True)
class Job:
    """Everything that an assembly of the engine starts from, whichever ranks it is for."""

    config: HydraConfig
    source: ModelSource
    model: Any  # as the user made it, for what can be told from its structure: its values move to the masters
    recipe: OptimizerRecipe
    data: SequenceData | None  # map-style; None: they are streamed, or handed in
    sampler: Order | None  # of the training data, if there are any; loading a checkpoint moves its place
    types: DataTypes
    clipping: float  # largest norm of a step's gradient; 0 does not clip
    pre_step: Callback | None = None  # the user's own; None: the job plans by itself
    checked: CheckResult | None = None  # what an assembly for other ranks has found of its strategies
