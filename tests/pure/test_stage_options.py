"""How stages compute: every option changes a job's fingerprint, is a setting, and may be given up alone."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from ds_hydra.config.hydra_block import parse_config
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.job_fingerprint import JobFingerprint
from ds_hydra.costs.table_file import TableFile, check_job, read_table_file
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.zero_hetero.errors import ConfigError

JOB = JobFingerprint("1234", "cpu", "float32", "per_sequence_sdpa", num_ranks=4, versions=(("torch", "2"),))
TABLE = CostTable((SchemeCost(ParallelScheme(), 1e-6, 0.1, 1.0, 1000),), "here")
SETTINGS = dict.fromkeys(StageOptions.paths(), "fast_paths")
NAMES = [one.name for one in fields(StageOptions)]


def on(name: str, options: StageOptions = AS_WRITTEN) -> StageOptions:
    """The options with one of them switched on."""
    changed: dict[str, Any] = {name: True if isinstance(getattr(AS_WRITTEN, name), bool) else "auto"}
    return replace(options, **changed)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_changes_the_fingerprint(name: str, tmp_path: Path) -> None:
    job = replace(JOB, stages=on(name))
    TableFile(TABLE, job).save(tmp_path / "t.json")
    found = read_table_file(tmp_path / "t.json")
    assert found.job == job
    setting = SETTINGS.get(name, name)
    with pytest.raises(ConfigError, match=rf"{name}: .* \(profile with the same hydra\.{setting}\)") as error:
        check_job(found, JOB, "t.json")
    assert str(error.value).count("the table has") == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_a_setting(name: str) -> None:
    def parsed(**settings: Any) -> StageOptions:
        found = parse_config({"hydra": {"tokens_per_step": 1, **settings}})
        assert found is not None
        made = found.hydra.stage_options
        assert StageOptions.of_settings(made.activation_checkpointing, made.as_paths()) == made
        return made

    assert parsed(fast_paths="off") == AS_WRITTEN
    assert parsed(fast_paths="auto") == parsed() == StageOptions(False, "auto", True, True)
    asked = {name: True} if name == "activation_checkpointing" else {}
    assert parsed(fast_paths=list(on(name).as_paths()), **asked) == on(name)
    assert parsed(fast_paths=["recompute_mlp"]) == StageOptions(functions="recompute")


@pytest.mark.parametrize("options", [{}, {"functions": "recompute"}, {"token_sharding": True, "functions": "auto"}])
def test_tables_from_before_there_were_all_of_them_say_off(options: dict[str, Any], tmp_path: Path) -> None:
    record = TableFile(TABLE, JOB).to_record()
    del record["job"]["stages"]
    record["job"] |= options
    (tmp_path / "t.json").write_text(json.dumps(record | {"version": 2}))
    assert read_table_file(tmp_path / "t.json").job == replace(JOB, stages=StageOptions(**options))


@pytest.mark.parametrize("stages", [3, {"speed": True}, {"functions": True}, {"sp_overlap": "auto"}, {"sp_overlap": 1}])
def test_options_that_are_none_are_refused(stages: object, tmp_path: Path) -> None:
    record = TableFile(TABLE, JOB).to_record()
    record["job"]["stages"] = stages
    (tmp_path / "t.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"t\.json: .*stages.* cannot be read .*profile again"):
        read_table_file(tmp_path / "t.json")


def test_fallbacks_give_up_all_and_then_one_at_a_time() -> None:
    asked = StageOptions(True, "auto", True, True)
    bare, *single = asked.fallbacks()
    assert bare == StageOptions(True)
    assert single == [
        replace(asked, functions="off"),
        replace(asked, token_sharding=False),
        replace(asked, sp_overlap=False),
    ]
    assert on("sp_overlap").fallbacks() == (AS_WRITTEN,)
    assert AS_WRITTEN.fallbacks() == StageOptions(True).fallbacks() == ()
