"""A setting that changes how stages compute: the field and what it does are all that is written for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hydra.commands import check as check_command
from ds_hydra.config import hydra_block
from ds_hydra.config.hydra_block import HydraConfig, parse_config
from ds_hydra.costs import job_fingerprint
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile, table_file_from_record
from ds_hydra.engine import job as jobs
from ds_hydra.engine.checked import check_candidates
from ds_hydra.engine.costs import describe_job
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.pipe.stage import StageModule, StagePlace
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.self_check import trial
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.small_job import small_model


@dataclass(frozen=True)
class Options(StageOptions):
    """The field of a new option."""

    halved: bool = False


class Source(CausalLM):
    """What it does, which is wrong: the loss counts for half."""

    def build(self, place: StagePlace, device: torch.device, dtype: torch.dtype) -> StageModule:
        stage = super().build(place, device, dtype)
        forward = stage.forward

        def half(hidden: Tensor | None, batch: Any) -> Tensor:
            return forward(hidden, batch) / 2

        if getattr(self.options, "halved", False) and place.is_last:
            stage.forward = half  # type: ignore[method-assign]
        return stage


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hydra_block, job_fingerprint):
        monkeypatch.setattr(module, "StageOptions", Options)
    for module in (jobs, trial):
        monkeypatch.setattr(module, "CausalLM", Source)


def test_a_new_option_travels_from_the_config_to_the_table_and_back() -> None:
    parsed = parse_config({"hydra": {"tokens_per_step": 1, "fast_paths": "auto"}})
    assert parsed is not None
    asked = parsed.hydra.stage_options
    assert asked == Options(functions="auto", token_sharding=True, sp_overlap=True, tiles=True, halved=True)
    job, other = (
        describe_job(jobs.model_source(small_model(), options), torch.device("cpu"), torch.float32, 2)
        for options in (asked, replace(asked, halved=False))
    )
    (line,) = job.differences(other)
    assert line == "halved: the table has True, the job False (profile with the same hydra.fast_paths)"
    table = CostTable((SchemeCost(ParallelScheme(), 1e-6, 0.1, 1.0, 1000),))
    assert table_file_from_record(TableFile(table, job).to_record(), "t").job == job


@pytest.mark.drawn
def test_the_self_check_tries_it_and_gives_it_up_where_it_is_wrong() -> None:
    asked = Options(token_sharding=True, halved=True)
    model, strategies = small_model(), [StrategyShape.parse("pp2")]
    source = jobs.model_source(model, asked)
    job: Any = SimpleNamespace(source=source, model=model, config=HydraConfig(), checked=None)
    world: Any = SimpleNamespace(channel=None, node_size=None, rank=0)
    checked, other = check_candidates(job, world, strategies)
    assert not checked.objections()
    assert (source.options, other.options) == (asked, replace(asked, halved=False))


def test_the_command_checks_what_a_job_would_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[StageOptions] = []

    def told(model: Any, strategies: Any, options: StageOptions, **_: Any) -> None:
        seen.append(options)
        raise ConfigError("enough")

    monkeypatch.setattr(check_command, "check_strategies", told)
    call = ["examples/llama_tiny.json", "--strategies", "tp1"]
    assert check_command.main(call) == 2
    assert check_command.main([*call, "--all_tokens", "--functions", "off", "--activation_checkpointing"]) == 2
    usual = HydraConfig(tokens_per_step=1).stage_options
    assert seen == [usual, replace(usual, token_sharding=False, functions="off", activation_checkpointing=True)]
