"""What is printed runs: each config and setting of a page, an example or a text trains a step under its hosts."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import hjson
import pytest

import ds_hydra.engine.engine  # noqa: F401  (the same)
from ds_hydra.config.deepspeed_settings import KNOWN_SETTINGS
from ds_hydra.config.hydra_block import parse_config
from ds_hydra.engine.job import model_source
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.testing import run_ranks
from tests.support.pages import PLACES, ROOT, printed
from tests.support.printed_hosts import (
    ACCELERATE,
    BY_TRAINER,
    CALLS,
    DATA,
    ROWS,
    TRAINER,
    load_model,
    one_step,
    save_model,
)
from tests.support.small_job import USUAL, find_before_forks, in_place_of_looking

ALL = (CALLS, DATA, *BY_TRAINER, ACCELERATE)


@dataclass(frozen=True)
class Row:
    """Which hosts a printed config is for, and what a job has beside it that the page leaves to its reader."""

    hosts: tuple[str, ...] = ALL
    ranks: int = 2
    within: str = ""  # the block of a setting whose name alone does not tell it
    beside: Mapping[str, Any] = field(default_factory=dict)  # in the block "hydra"
    config: Mapping[str, Any] = field(default_factory=dict)  # beside that block
    model: Mapping[str, Any] = field(default_factory=dict)
    files: Callable[[Path], None] | None = None  # makes those that the config names
    comments: tuple[str, ...] = ()  # settings that comments within the block name besides


def cost_table(folder: Path) -> None:
    shutil.copy(ROOT / "examples" / "cost_tables" / "example_cpu.json", folder / "cost_table.json")


def lengths(folder: Path) -> None:
    (folder / "lengths.txt").write_text("".join(f"{length}\n" for length in (3, 60, 17, 9, 33, 700) * 9))


_EXPERTS = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
BLOCKS: dict[str, Row] = {
    '"hydra": { "tokens_per_step": 65536, "context_length": 16384, "strategies": "auto" }': Row(),
    '"hydra": { "context_length": 16384, "strategies": "auto" }': Row((*BY_TRAINER, ACCELERATE)),
    '"hydra": { "tokens_per_step": 65536, //': Row((CALLS, DATA), ranks=8, comments=(
        '"too_long": "error"', '"too_long": "truncate"', '"too_long": "skip"', '"strategies": "auto"',
        '"choose": "cycle"')),
    '"hydra": {"strategies": "auto"}': Row((CALLS, *BY_TRAINER, ACCELERATE), beside={"context_length": 64}),
    '"hydra": { "checkpoint": {"dir"': Row((CALLS, DATA)),
    '{ // What ds-hydra adds': Row((DATA,), ranks=8),
    '{ "gradient_accumulation_steps": 2,': Row((ACCELERATE,)),
    '{ "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": { "type": "AdamW", '
    '"params": { "lr": 1e-3': Row((CALLS,)),
    '{ "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": { "type": "AdamW", '
    '"params": { "lr": 2e-3': Row((CALLS,)),
    '{ "train_micro_batch_size_per_gpu": "auto",': Row(BY_TRAINER),
}  # fmt: skip
"""Printed config -> its row, by the config's first words, with one space in the place of any white space."""

SETTINGS: dict[str, Row] = {
    '"strategies": ["tp4 + 2*pp2", "sp4 + 4*tp1"]': Row(ranks=8),
    '"strategies": "auto"': Row(),
    '"chunks": "off"': Row(),
    '"self_check": "off"': Row(),
    '"deterministic": true': Row(),
    '"activation_checkpointing": true': Row(),
    '"choose": "cycle"': Row(beside={"strategies": ["tp2", "2*tp1"]}),
    '"cost_correction": "apply"': Row(),
    '"planner": {"ahead": 0}': Row(),
    '"planner": {"highs": false}': Row(),
    '"method": "highs"': Row(within="planner"),
    '"frozen_seconds": 0': Row(within="faults"),
    '"trace": {"steps": [10, 20]}': Row(),
    '"profiler": true': Row(within="trace", beside={"trace": {"steps": [1, 2]}}),
    '"loss_norm": "batch"': Row((CALLS, *BY_TRAINER, ACCELERATE)),
    '"loss_norm": "micro_batch"': Row((CALLS, DATA)),
    '"zero_optimization": {"stage": 1}': Row(),
    '"zero_optimization": {"stage": 3, ...}': Row(),
    '"steps_per_print": 5': Row(),
    '"bf16": {"enabled": true}': Row(),
    '"data_types": {"grad_accum_dtype": "bf16"}': Row((CALLS, DATA), config={"bf16": {"enabled": True}}),
    '"zero_allow_untested_optimizer": true': Row((CALLS, DATA)),
    '"checkpoint": {"dir": ...}': Row((CALLS, DATA)),
    '"cost_table": "cost_table.json"': Row(files=cost_table),
    '"lengths": "lengths.txt"': Row((CALLS, *BY_TRAINER, ACCELERATE), files=lengths),
    '"hydra": {"initial_weights": "my_model/"}': Row((CALLS, DATA)),
    '"strategies": ["tp8ep8", "2*tp2sp2ep4", "8*tp1"]': Row((DATA, TRAINER), ranks=8, model=_EXPERTS),
}  # fmt: skip
"""The same for settings that a sentence or a text of the package names."""

NOT_RUN = {
    '"elastic": {}': "ranks that go on are started by ds-hydra launch: tests/gloo/test_launchers.py",
    '"hydra": {"strategies": ["2*tp2", "tp2pp2"], "elastic"': "the same: tests/gloo/test_going_on.py loses ranks",
    '"redundancy": "host"': "needs two hosts: tests/gloo/test_two_hosts.py",
    '"cluster": [{"nodes": 2,': "23 GPUs of a driver's names: tests/pure/test_cluster.py",
    '"cluster": [{"nodes": 4,': "48 GPUs of two classes: tests/pure/test_cluster.py",
    '"device": "nvidia"': "names of a GPU's driver: tests/pure/test_cluster.py",
    '"resume": "weights"': "needs the checkpoint of a stage before: tests/gloo/test_resume.py begins with one",
    '"hydra": {"checkpoint": {"resume": "weights"}}': "the same",
    '"replay": "phases.jsonl"': "tests/test_docs.py makes that file; tests/gloo/test_phases.py replays such",
    '"lengths": [512,': "a line that the planner's process reads, and no setting",
    '"checkpoint": {"load_universal": true}': "a setting of plain DeepSpeed for what ds-hydra convert writes",
}
"""Printed config -> why no job runs it here, and what tries it."""


def key_of(text: str) -> str:
    """The longest of the table's first words that a printed config begins with."""
    return max((start for start in (*BLOCKS, *SETTINGS, *NOT_RUN) if text.startswith(start)), key=len, default="")


@dataclass(frozen=True)
class Case:
    """A printed config under one host; `instead`: a setting of the comments within it, in the place of its own."""

    key: str
    text: str
    host: str
    instead: str = ""

    def __str__(self) -> str:
        return f"{self.key} {self.instead}| {self.host}"

    @property
    def row(self) -> Row:
        return (BLOCKS | SETTINGS)[self.key]


def cases_of(table: Mapping[str, Row]) -> list[Case]:
    """Of each row that a printed config has, in the order of the table."""
    texts = {key_of(one.key): one.text for one in printed()}
    return [
        Case(key, texts[key], host, instead)
        for key, row in table.items()
        if key in texts
        for host in row.hosts
        for instead in ("", *row.comments)
    ]


def config_of(case: Case) -> tuple[dict[str, Any], str]:
    """The settings of a job that has what is printed, and the text of their file, in which that stands as it is."""
    text = case.text.replace(", ...", "").replace("...", '"saved"')
    whole = text.lstrip().startswith("{")
    printed = dict(hjson.loads(text if whole else "{" + text + "}"))
    config = copy.deepcopy(printed)
    if "hydra" not in config and within_block(config, case.row):
        for name in (*case.row.within.split(), "hydra"):
            config = {name: config}
    block = config.setdefault("hydra", {})
    for one in (case.row.beside, hjson.loads("{" + case.instead + "}")):
        for name, value in one.items():
            block[name] = {**value, **block.get(name, {})} if isinstance(value, dict) else value
    block.setdefault(*(("tokens_per_step", 500) if case.host == DATA else ("context_length", 1024)))
    rest: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": 1},
        **case.row.config,
    }
    if case.host in (CALLS, DATA):
        rest["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    added = {name: value for name, value in rest.items() if name not in config}
    if config != printed:  # something was added within
        return config | added, json.dumps(config | added)
    more = "".join(f",\n{json.dumps(name)}: {json.dumps(value)}" for name, value in added.items())
    inner = text.strip()[1:-1] if whole else text
    return config | added, "{" + inner + more + "}"


def within_block(config: Mapping[str, Any], row: Row) -> bool:
    """Whether settings belong to the block "hydra"; the others are DeepSpeed's."""
    place = f"hydra.{row.within}.".replace("..", ".")
    if all(place + name in PLACES for name in config):
        return True
    assert not row.within
    assert set(config) <= KNOWN_SETTINGS
    return False


class Tiny(NamedTuple):
    """A folder of a tiny model, and where its stages come from, which each rank would find again."""

    folder: Path
    source: ModelSource


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Mapping[str, Any]], Tiny]:
    """A tiny model of these sizes; made once."""
    made: dict[str, Tiny] = {}
    find_before_forks()

    def tiny(sizes: Mapping[str, Any]) -> Tiny:
        name = json.dumps(sizes)
        if name not in made:
            save_model(folder := tmp_path_factory.mktemp("model"), **sizes)
            made[name] = Tiny(folder, model_source(load_model(str(folder)), USUAL))
        return made[name]

    return tiny


@pytest.mark.drawn
@pytest.mark.parametrize("case", cases_of(BLOCKS), ids=str)
def test_a_printed_block_trains(case: Case, models: Any, tmp_path: Path) -> None:
    check(case, models(case.row.model), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("case", cases_of(SETTINGS), ids=str)
def test_a_printed_setting_trains(case: Case, models: Any, tmp_path: Path) -> None:
    check(case, models(case.row.model), tmp_path)


def check(case: Case, tiny: Tiny, tmp_path: Path) -> None:
    """One step as printed, on forked ranks, by the settings that are printed."""
    config, text = config_of(case)
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "my_model").symlink_to(tiny.folder)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if case.row.files:
        case.row.files(tmp_path)
    job = case.host, "config.json", "my_model", str(tmp_path)
    with in_place_of_looking(tiny.source):
        ranks = run_ranks(one_step, case.row.ranks, *job, timeout=300)
    for found in ranks:
        assert found.steps == 1
        assert math.isfinite(found.logged["loss"])
        expected = parse_config({"hydra": config["hydra"]})
        assert expected is not None
        for name in config["hydra"]:
            assert getattr(found.block, name) == getattr(expected.hydra, name), f"{name} is not in force"


def test_each_printed_config_is_claimed() -> None:
    keys = {one.key: one.place for one in printed()}
    unclaimed = [f"{place}: {key}" for key, place in keys.items() if not key_of(key)]
    assert not unclaimed, "no row says which hosts they are for: add them to BLOCKS or SETTINGS"
    assert {key_of(key) for key in keys} == {*BLOCKS, *SETTINGS, *NOT_RUN}, "a printed config is gone"
    for case in cases_of(BLOCKS):
        value = case.instead.partition(": ")[2]
        assert value in case.text, f"{case.text} does not name {value}"
