"""The profiling tool's life: a table that a job takes, a run that goes on where it was interrupted, bad input."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ds_hydra
from ds_hydra.commands.profile import main as profile_main
from ds_hydra.commands.profile_session import Session
from ds_hydra.config.hydra_block import parse_config
from ds_hydra.costs.analytic import model_shape
from ds_hydra.costs.cost_table import CostTable, read_table_file
from ds_hydra.engine.costs import describe_job, job_cost_table
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.profiling.stage_timer import hollow_source
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.profiled import LINKS, write_model

CPU = torch.device("cpu")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path)


def profile(model: Path, out: Path, *more: str) -> int:
    links = out.with_name("links.json")
    links.write_text(json.dumps(LINKS.to_record()))
    return profile_main(
        ["--model", str(model), "--gpus", "2", "--out", str(out), "--links", str(links), "--ranks", "1", "--rungs", "3",
         "--seconds", "0.005", "--clock", "cpu", "--quick", *more]
    )  # fmt: skip


@pytest.mark.drawn
def test_the_tool_writes_a_table_that_a_job_takes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.json"
    assert profile(model, out, "--schemes", "tp1", "sp2") in (0, 1)  # 1: noise above the aims
    assert "ds-hydra profile: 2 schemes in" in capsys.readouterr().out
    assert profile(model, out, "--schemes", "pp2", "--merge") in (0, 1)
    assert [str(s) for s in CostTable.load(out).schemes] == ["tp1", "sp2", "pp2"]
    found = read_table_file(out)
    assert found.job is not None
    assert found.measured is not None
    assert found.measured["sp2"]["how"] == "local shapes"
    for cost in found.table.costs:
        assert cost.shares is not None
        assert 0.1 < cost.shares.forward.b <= 0.6
        assert found.activations is not None
        assert cost.shares.context == found.activations[cost.uniform.tp, cost.uniform.sp].context
    assert not list(tmp_path.glob("*.partial"))

    parsed = parse_config({"hydra": {"tokens_per_step": 64, "strategies": ["2*tp1", "sp2"], "cost_table": str(out)}})
    assert parsed is not None
    source = hollow_source(model, parsed.hydra.stage_options)
    shape = model_shape(source.plan, 32, 96)
    job = describe_job(source, CPU, torch.float32, 2)
    assert job_cost_table(parsed.hydra, shape, (), 64, job).table == found.table
    with pytest.raises(ConfigError, match=r"(?s)not measured for this job.*dtype.*'bfloat16'"):
        job_cost_table(parsed.hydra, shape, (), 64, describe_job(source, CPU, torch.bfloat16, 2))


@pytest.mark.drawn
def test_an_interrupted_run_goes_on_where_it_was(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, measured = tmp_path / "table.json", []
    real = Session.save_partial

    def interrupt(self: Session) -> None:
        real(self)
        measured.append(len(self.done))
        if len(self.done) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Session, "save_partial", interrupt)
    assert profile(model, out, "--schemes", "tp1", "pp2") == 130
    assert not out.exists()
    assert "1 of 2 schemes" in capsys.readouterr().out
    assert profile(model, out, "--schemes", "tp1", "pp2") in (0, 1)
    assert "going on after 1 schemes" in capsys.readouterr().out
    assert measured == [0, 1, 2]


def longest_of(rank: int, model: Path, table: Path) -> int:
    """MaxLen of tp1 that a job of 2 ranks takes from a table, whose figure is of whole sequences."""
    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    rank_environment(rank)
    block = {"tokens_per_step": 64, "strategies": ["2*tp1"], "cost_table": str(table), "steps_file": None,
             "planner": {"ahead": 0}, "self_check": "off", "chunks": "off"}  # fmt: skip
    config = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "hydra": block}
    job = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    engine: Any = ds_hydra.initialize(model=job, training_data=[[3] * 20] * 4, config=config)[0]
    engine.destroy()
    return engine.crew.plans.table[ParallelScheme()].max_length


@pytest.mark.drawn
def test_maxlen_of_a_measured_table_follows_the_number_of_ranks(model: Path, tmp_path: Path) -> None:
    """Fewer ranks share the masters, so each has less room for tokens than in the job that the table was made for."""
    found = {}
    for gpus in ("2", "8"):
        out = tmp_path / f"table{gpus}.json"
        assert profile(model, out, "--schemes", "tp1", "--gpus", gpus) in (0, 1)
        limit = CostTable.load(out)[ParallelScheme()].max_length
        found[gpus] = (limit, *run_ranks(longest_of, 2, model, out))
    assert found["2"][0] == found["2"][1] == found["2"][2]
    assert found["8"][0] > found["8"][1] == found["8"][2]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schemes", "tp3"), "cannot be cut by tp3"),
        (("--schemes", "tp1", "--device_memory", "0.00001"), "no scheme fits"),
        (("--longest", "1"), "shortest < longest"),
        (("--schemes", "tq2"), "cannot read the term"),
    ],
)
def test_bad_input_is_told(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert profile(model, tmp_path / "t.json", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()


def test_models_that_are_none_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile(tmp_path / "missing.json", tmp_path / "t.json") == 2
    assert "does not exist" in capsys.readouterr().err
