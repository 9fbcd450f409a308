"""Each example runs by the command that its docstring prints, after its diff; and by what `ds-hydra init` writes."""

from __future__ import annotations

import ast
import json
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import hjson
import pytest

import ds_hydra.engine.engine  # noqa: F401  (the same)
from ds_hydra.commands.__main__ import main
from ds_hydra.testing import rank_environment, run_ranks
from tests.support.pages import ROOT
from tools.swap.scripts import SWAP, script

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
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    }
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
