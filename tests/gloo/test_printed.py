"""What is printed runs: configs and settings under their hosts, examples by their commands, public configs."""

from __future__ import annotations

import ast
import base64
import copy
import json
import math
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import hjson
import pytest
import torch
import torch.distributed as dist
from accelerate import DeepSpeedPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers import TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

import ds_hydra.engine.engine  # noqa: F401  (the same)
from ds_hydra.commands.__main__ import main
from ds_hydra.config.deepspeed_settings import BATCH_KEYS, KNOWN_SETTINGS
from ds_hydra.config.hydra_block import parse_config
from ds_hydra.engine.job import model_source
from ds_hydra.hugging_face.accelerator import for_engine
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.testing import free_port, rank_environment, run_ranks
from tests.support.pages import PLACES, ROOT, printed, printed_block
from tests.support.printed_hosts import (
    ACCELERATE,
    BY_TRAINER,
    CALLS,
    DATA,
    FIRST_LOSS,
    LENGTHS,
    ROWS,
    SFT,
    SMALL,
    TRAINER,
    load_model,
    one_step,
    save_model,
)
from tests.support.public_configs import CONFIGS as PUBLIC
from tests.support.small_job import (
    USUAL,
    find_before_forks,
    in_place_of_looking,
    sequences,
    small_config,
    small_engine,
    small_source,
)
from tests.support.swapped import SWAP, script

# --- What is printed runs: each config and setting of a page, an example or a text trains a step under its
# hosts.
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
    '"hydra": { "context_length": 16384, "strategies": "auto" }': Row((*BY_TRAINER, ACCELERATE)),
    '"hydra": { "tokens_per_step": 65536, //': Row((CALLS, DATA), ranks=8, comments=(
        '"too_long": "error"', '"too_long": "truncate"', '"too_long": "skip"', '"strategies": "auto"',
        '"choose": "cycle"')),
    '"hydra": {"strategies": "auto"}': Row((CALLS, *BY_TRAINER, ACCELERATE), beside={"context_length": 64}),
    '"hydra": { "checkpoint": {"dir"': Row((CALLS, DATA)),
    '{ // What ds-hydra adds': Row((DATA,), ranks=8),
    '{ "gradient_accumulation_steps": 2,': Row((ACCELERATE,)),
    '{ "optimizer": {"type": "Muon"': Row((CALLS, DATA), ranks=4),
    '{ "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": { "type": "AdamW", '
    '"params": { "lr": 1e-3': Row((CALLS,)),
    '{ "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": { "type": "AdamW", '
    '"params": { "lr": 2e-3': Row((CALLS,)),
    '{ "train_micro_batch_size_per_gpu": "auto",': Row(BY_TRAINER),
    '{ "bf16": { "enabled": "auto" },': Row(BY_TRAINER),
}  # fmt: skip
"""Printed config -> its row, by the config's first words, with one space in the place of any white space."""

SETTINGS: dict[str, Row] = {
    '"strategies": ["tp4 + 2*pp2", "sp4 + 4*tp1"]': Row(ranks=8),
    '"strategies": "auto"': Row(),
    '"reorder_steps": 2': Row((DATA,)),
    '"chunks": "off"': Row(),
    '"self_check": "off"': Row(),
    '"deterministic": true': Row(),
    '"activation_checkpointing": true': Row(),
    '"activation_checkpointing": "all"': Row(),
    '"offload": ["activations"]': Row(),
    '"offload": ["optimizer"]': Row(),
    '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}': Row(),
    '"losses": "early"': Row((CALLS,)),
    '"losses": "step"': Row((CALLS,)),
    '"choose": "cycle"': Row(beside={"strategies": ["tp2", "2*tp1"]}),
    '"cost_correction": "apply"': Row(),
    '"planner": {"ahead": 0}': Row(),
    '"planner": {"highs": false}': Row(),
    '"method": "highs"': Row(within="planner"),
    '"frozen_seconds": 0': Row(within="faults"),
    '"steps_file": null': Row(),
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
    '"redundancy": "host"': "needs two hosts: tests/gloo/test_launchers.py",
    '"redundancy": "off"': "of ranks that go on: tests/gloo/test_going_on.py",
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


# --- Each example runs by the command that its docstring prints, after its diff; and by what `ds-hydra init`
# writes.
ONE_STEP = {
    "examples/grpo.py": "--updates 1",
    "examples/train.py": "--steps 1 --max_files 20",
    "examples/swap/accelerated.py": "--steps 1",
    "examples/swap/grpo.py": "--iterations 1",
    "examples/swap/lora.py": "--steps 1",
    "examples/swap/sft.py": "--max_steps 1 --use_cpu true --report_to none",
    "examples/swap/streaming.py": "--steps 1",
    "examples/swap/three_calls.py": "--steps 1",
    "examples/swap/trainer.py": "--max_steps 1 --use_cpu true --report_to none",
}
"""Script -> options that end it soon, behind those of its docstring's command."""

_AUTO: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
_OPTIMIZED = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
}
CONFIGS = {"its own": None, "ZeRO-3 with auto": _AUTO}
KINDS = ("accelerated", "grpo", "lora", "sft", "three_calls", "trainer")


class Command(NamedTuple):
    """A script of the examples, and how its docstring starts it."""

    path: str
    ranks: int
    arguments: tuple[str, ...]


def commands() -> Iterator[Command]:
    """Those that the docstrings of the examples print."""
    for path in sorted(ROOT.glob("examples/**/*.py")):
        for line in (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines():
            words = shlex.split(line) if path.name in line else []
            at = next((number for number, word in enumerate(words) if word.endswith(".py")), 0)
            if at and {"deepspeed", "torchrun"} & set(words):
                yield Command(words[at], int(words[at - 1]), tuple(words[at + 1 :]))


COMMANDS = {command.path: command for command in commands()}


def run(rank: int, path: str, arguments: list[str], folder: str) -> None:
    """On a forked rank: a script, after its diff if there is one, with its work in this folder."""
    rank_environment(rank)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str((ROOT / path).parent))
    monkeypatch.setattr(sys, "argv", [path, *arguments])
    if (ROOT / path).with_suffix(".diff").is_file():
        script(Path(path).stem).main()
    else:
        runpy.run_path(str(ROOT / path), run_name="__main__")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder of work, from which examples are found as from the checkout's root."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def test_each_example_prints_how_it_is_started() -> None:
    made = {str(path.relative_to(ROOT)) for path in ROOT.glob("examples/**/*.py")}
    assert set(COMMANDS) == set(ONE_STEP) == made - {"examples/corpus.py", "examples/swap/task.py"}


@pytest.mark.drawn
@pytest.mark.parametrize("path", COMMANDS)
def test_an_example_runs_by_the_command_that_it_prints(path: str, place: Path) -> None:
    command = COMMANDS[path]
    run_ranks(run, command.ranks, path, [*command.arguments, *ONE_STEP[path].split()], str(place), timeout=300)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], list[str]]:
    """Options of `ds-hydra init` about the job of the examples' task."""
    folder = tmp_path_factory.mktemp("job")
    task = runpy.run_path(str(SWAP / "task.py"))
    task["make_model"]().save_pretrained(folder / "model")
    lengths = folder / "lengths.txt"
    lengths.write_text("".join(f"{len(one)}\n" for one in task["make_data"]()))
    return lambda: ["--model", str(folder / "model"), "--gpus", "2", "--lengths", str(lengths)]


@pytest.mark.drawn
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_starts_with_what_init_writes(
    kind: str, config: str, place: Path, job: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"examples/swap/{kind}.py"
    command = COMMANDS[path]
    (named,) = (word for word in command.arguments if word.endswith(".json"))
    own = hjson.loads((ROOT / named).read_text())
    del own["hydra"]
    given = CONFIGS[config] or own
    if given is not own and kind != "accelerated":  # Accelerate takes no optimizer from a config beside the script's
        given = {**given, **_OPTIMIZED}
    (place / "config.json").write_text(json.dumps(given))
    code = main(["init", str(ROOT / path), str(place / "config.json"), *job(), "--out", str(place / "written.json")])
    told = capsys.readouterr()
    assert code == 0, told.err
    for line in (ROOT / path).with_suffix(".diff").read_text().splitlines():
        if line.startswith("+") and "import" in line:
            assert line[1:].strip() in told.out
    arguments = ["written.json" if word == named else word for word in command.arguments]
    run_ranks(run, 2, path, [*arguments, *ONE_STEP[path].split()], str(place), timeout=300)


# --- A config with the block as README prints it, in every form and by every host: what each sees, and a step
# trained.
AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "steps_per_print": 1,
}
ZERO: dict[str, dict[str, Any]] = {
    "none": {},
    "1": {"zero_optimization": {"stage": 1}},
    "3": {
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
            "allgather_bucket_size": "auto",
            "offload_optimizer": {"device": "auto"},
        }
    },
}


def as_dict(config: dict[str, Any], folder: Path) -> Any:
    return config


def as_path(config: dict[str, Any], folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder / "config.json")


def as_base64(config: dict[str, Any], folder: Path) -> Any:
    return base64.urlsafe_b64encode(json.dumps(config).encode()).decode()


def as_object(config: dict[str, Any], folder: Path) -> Any:
    return HfDeepSpeedConfig(config)


FORMS: tuple[Callable[..., Any], ...] = (as_dict, as_path, as_base64, as_object)


@pytest.mark.parametrize("form", [*FORMS, None], ids=str)
@pytest.mark.parametrize("zero", ZERO)
def test_the_block_is_nobodys_but_the_engines(
    form: Callable[..., Any] | None, zero: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever may be "auto" in it; a host has values for what is its own, and sees stage 1. None: a file named as
    Accelerate's launcher names it."""
    block = printed_block()["hydra"] | {"fast_paths": "auto", "chunks": "auto", "elastic": {"strategies": "auto"}}
    config = {"gradient_clipping": "auto", "steps_per_print": 5, "hydra": block} | ZERO[zero]
    written = copy.deepcopy(config)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", as_path(config, tmp_path))
    plugin = DeepSpeedPlugin(None if form is None else form(config, tmp_path))
    plugin.deepspeed_config_process(must_match=False, **{"gradient_clipping": 0.5})
    assert config == written
    assert (plugin.zero_stage, plugin.is_zero3_init_enabled()) == (1, False)
    assert plugin.deepspeed_config["hydra"] == written["hydra"]
    given = for_engine(plugin.deepspeed_config)
    assert (given["gradient_clipping"], given["steps_per_print"], given["hydra"]) == (0.5, 5, written["hydra"])
    zeros = given.get("zero_optimization")
    assert zeros == (None if zero == "none" else {"stage": int(zero)} | (zeros or {}))
    assert "auto" not in json.dumps(zeros)


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
def test_a_model_is_loaded_whole_under_stage_3(form: Callable[..., Any], tmp_path: Path) -> None:
    for block, cut in ((printed_block(), False), ({}, True)):
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, deepspeed=form(AUTO | ZERO["3"] | block, tmp_path))
        assert is_deepspeed_zero3_enabled() == cut
        del arguments


@pytest.mark.drawn
@pytest.mark.parametrize("host", [*BY_TRAINER, ACCELERATE])
@pytest.mark.parametrize("zero", ["none", "3"])
def test_a_step_is_trained_with_the_block_as_printed(host: str, zero: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", **SMALL)
    config = AUTO | ZERO[zero] | printed_block()
    for found in run_ranks(one_step, 2, host, config, "model", str(tmp_path), timeout=300):
        logged = found.logged
        assert logged["loss"] == pytest.approx(FIRST_LOSS[host], abs=0.05)
        assert found.steps == 1
        if host != ACCELERATE:
            assert logged["hydra/strategy"] in ("2*tp1", "tp2", "sp2", "pp2")
            assert logged["hydra/step_ms"] > 0 <= logged["hydra/wait"] < 1
        if host == SFT:
            assert 2 * ROWS * min(LENGTHS) < logged["num_tokens"] < 2 * ROWS * max(LENGTHS)


@pytest.mark.drawn
@pytest.mark.parametrize("host", [TRAINER, ACCELERATE])
def test_so_is_one_that_accelerates_launcher_names_the_config_of(host: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", **SMALL)
    options = (
        f"--use_deepspeed --num_processes 2 --num_machines 1 --mixed_precision no --main_process_port {free_port()}"
    )
    config = as_path(AUTO | ZERO["3"] | printed_block(), tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--deepspeed_config_file", config,
         "-m", "tests.support.printed_hosts", host, str(tmp_path / "model")],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("LOSS ")]
    assert losses == pytest.approx([FIRST_LOSS[host]] * 2, abs=0.05)


# --- Configs of ZeRO 2 and 3, offloaded and otherwise as people have them, train as the same settings of ZeRO 1
# alone.
BY_CALLS = ("DeepSpeed-Chat", "ZeRO++", "cifar", "bing_bert")
BY_STEPS = ("GPT-NeoX", "BLOOM", "HelloDeepSpeed")
PUBLIC_BY_TRAINER = ("transformers ZeRO-3, offloaded", "LLaMA-Factory z2_autotp", "transformers with Ulysses")
OF_UPDATES = ("optimizer", "scheduler", "bf16", "gradient_clipping")  # what is trained hangs on these alone
STEPS = 2


def public_job(name: str, num_ranks: int) -> dict[str, Any]:
    """The config with a block, for as many sequences as there are here; in BF16, as CPUs have no FP16."""
    config = dict(PUBLIC[name].config)
    for key in (*BATCH_KEYS, "fp16"):
        config.pop(key, None)
    optimizer = config.get("optimizer") or {"type": "AdamW", "params": {"lr": 1e-2}}
    updates = {"optimizer": optimizer, "bf16": config.get("bfloat16") or {"enabled": name != "cifar"}}
    return {**config, **updates, "hydra": small_config(num_ranks)["hydra"]}


def losses(rank: int, config: dict[str, Any], by_calls: bool) -> list[float]:
    engine = small_engine(rank, config=config, data=None if by_calls else ...)
    found, data = [], sequences()
    for step in range(STEPS):
        if by_calls:
            tokens = torch.stack([data[0][:3], data[step + 2][:3]]) + rank
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        else:
            engine.train_batch()
        found.append(engine.last_step.loss)
    engine.destroy()
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", [*BY_CALLS, *BY_STEPS])
def test_it_trains_as_with_zero_1(name: str, num_ranks: int) -> None:
    find_before_forks()
    small_source()
    config = public_job(name, num_ranks)
    alone = {key: value for key, value in config.items() if key in (*OF_UPDATES, "hydra")}
    alone["zero_optimization"] = {"stage": 1}

    def run(rank: int) -> tuple[list[float], list[float]]:
        assert dist.get_world_size() == num_ranks
        return losses(rank, config, name in BY_CALLS), losses(rank, alone, name in BY_CALLS)

    for found, expected in run_ranks(run, num_ranks):
        assert len(set(found)) == STEPS, "the update changed nothing"
        assert found == expected


@pytest.mark.drawn
@pytest.mark.parametrize("name", PUBLIC_BY_TRAINER)
def test_a_trainer_makes_an_update_with_it(name: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", **SMALL)
    config = {**PUBLIC[name].config, **printed_block(), "activation_checkpointing": {"number_checkpoints": "auto"}}
    for found in run_ranks(one_step, 2, TRAINER, config, "model", str(tmp_path), timeout=300):
        assert found.logged["loss"] == pytest.approx(FIRST_LOSS[TRAINER], abs=0.05)
        assert found.steps == 1
