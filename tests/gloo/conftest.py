"""What tests on forked ranks share."""

from __future__ import annotations

import deepspeed.comm.mori
import deepspeed.module_inject.auto_ep_config
import deepspeed.moe.ep_experts  # noqa: F401  (before forking: the ranks share what each of them would import)
import pytest
import torch

import ds_hydra.engine.engine
import ds_hydra.entry  # noqa: F401
from ds_hydra.engine.fingerprint import describe_job
from ds_hydra.planner.selection import warm_up
from ds_hydra.self_check.cache import fingerprint
from tests.support.small_job import small_model, small_source


@pytest.fixture(autouse=True, scope="session")
def _compiled_kernels() -> None:
    """The planner's kernels are loaded before ranks are forked: each rank of each test would load them again."""
    warm_up()


@pytest.fixture(autouse=True, scope="session")
def _traced_model() -> None:
    """The source of the small job's stages is found before ranks are forked, too, and so are versions of packages and
    what our own sources hold."""
    describe_job(small_source(), torch.device("cpu"), torch.float32, 1)
    fingerprint(small_model())
