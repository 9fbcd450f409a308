"""How a refusal reaches the user: early, once, without a traceback, with an exit code; and what is checked early."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ds_hydra
from ds_hydra.host import launch, uncaught
from ds_hydra.host.environment import check_environment, launched_node_size, launched_number
from ds_hydra.testing import free_port
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, PlanError

BLOCK = {"tokens_per_step": 20, "strategies": ["tp1"], "steps_file": None}
ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}

# Pairs of ranks, forked once torch is there: each pair meets, then both raise what their texts say. The parent tells
# how each has ended, and what it wrote.
MET = """
import gc, json, os, sys, tempfile, torch.distributed as dist
from ds_hydra.host.uncaught import show_refusals_plainly
from ds_hydra.zero_hetero.errors import ConfigError
show_refusals_plainly()
gc.freeze()  # children that end need not visit what imports have made
files, children = {}, {}
for pair, (port, texts) in enumerate(json.loads(sys.argv[1])):
    for rank, text in enumerate(texts):
        files[pair, rank] = tempfile.TemporaryFile()
        child = os.fork()
        if child == 0:
            os.dup2(files[pair, rank].fileno(), 2)
            os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
            dist.init_process_group("gloo")
            if text:
                raise ConfigError(text)
            sys.exit()
        children[child] = pair, rank
ended = {}
while len(ended) < len(children):
    child, status = os.wait()
    file = files[children[child]]
    file.seek(0)
    ended[children[child]] = os.waitstatus_to_exitcode(status), file.read().decode()
print(json.dumps([ended[key] for key in sorted(ended)]))
"""


def environment(**variables: str) -> dict[str, str]:
    path = f"{Path(__file__).parent.parent}:{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **variables}


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(() if "-i" not in arguments else ("-i",)), "-c", code]
    command += [argument for argument in arguments if argument != "-i"]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**variables), timeout=120, input="")


@pytest.mark.parametrize("error", ["ConfigError", "PlanError", "CheckpointError"])
def test_a_refusal_ends_the_script_with_its_text_and_code(error: str) -> None:
    code = f"from ds_hydra.host.uncaught import *; show_refusals_plainly(); raise {error}('lower x')"
    done = run(code)
    expected = {"ConfigError": 78, "PlanError": 78, "CheckpointError": 74}[error]
    assert (done.returncode, done.stderr, done.stdout) == (expected, f"ds_hydra.{error}: lower x\n", "")
    others = run(code, RANK="3", LOCAL_RANK="3")
    assert (others.returncode, others.stderr) == (expected, ""), "rank 0 of the node has told it"


def test_other_errors_and_sessions_are_left_alone() -> None:
    other = run("from ds_hydra.host.uncaught import *; show_refusals_plainly(); raise ValueError('mine')")
    assert other.returncode == 1
    assert "Traceback" in other.stderr
    assert "ValueError: mine" in other.stderr
    session = run("from ds_hydra.host.uncaught import *; show_refusals_plainly(); raise ConfigError('lower x')", "-i")
    assert "Traceback" in session.stderr, "an interactive session goes on"
    twice = "import sys; from ds_hydra.host.uncaught import *; show_refusals_plainly(); one = sys.excepthook; "
    assert run(twice + "show_refusals_plainly(); sys.exit(one is not sys.excepthook)").returncode == 0
    seen = (
        "import sys; sys.excepthook = lambda *e: sys.exit('seen ' + str(e[1])); from ds_hydra.host.uncaught import *; "
    )
    assert "seen mine" in run(seen + "show_refusals_plainly(); raise ValueError('mine')").stderr


@pytest.mark.drawn
def test_ranks_that_have_met_tell_each_refusal_once() -> None:
    pairs = [("same", "same"), ("one", "two"), ("", "only rank 1")]
    done = run(MET, json.dumps([(free_port(), texts) for texts in pairs]))
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout)
    for number, texts in enumerate(pairs):
        codes, errors = zip(*ended[2 * number : 2 * number + 2], strict=True)
        written = "".join(errors)
        assert sorted(line for line in written.splitlines() if "ConfigError" in line) == [
            f"ds_hydra.ConfigError: {text}" for text in sorted({*texts} - {""})
        ]
        assert "Traceback" not in written
        assert codes == tuple(78 if text else 0 for text in texts)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the test process's own hook as it is."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hydra": {**BLOCK, "token_per_step": 1}}, ["token_per_step", "did you mean 'tokens_per_step'"]),
        ({"hydra": BLOCK, "gradient_cliping": 1.0}, ["mean 'gradient_clipping'"]),
        ({"hydra": BLOCK, "optimizer": {**ADAMW, "params": {"lr": "auto"}}}, ["optimizer.params.lr", '"auto"']),
        ({"hydra": BLOCK, "scheduler": {"type": "WarmpLR"}}, ["mean 'WarmupLR'"]),
        ({"hydra": {**BLOCK, "cost_table": "nowhere.json"}}, ["nowhere.json", "ds-hydra profile"]),
        ({"hydra": {**BLOCK, "strategies": ["tp2"]}}, ["uses 2 = 2 ranks but the job has 1"]),
    ],
)
def test_check_config_needs_neither_model_nor_data(
    settings: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"optimizer": ADAMW, **settings}))
    for source in (str(file), file, {"optimizer": ADAMW, **settings}):
        with pytest.raises(ConfigError) as error:
            ds_hydra.check_config(source)
        assert all(word in str(error.value) for word in words), error.value


@pytest.mark.usefixtures("hook")
def test_check_config_tells_whose_job_it_is() -> None:
    assert ds_hydra.check_config({"optimizer": ADAMW, "hydra": BLOCK})
    assert not ds_hydra.check_config({"train_batch_size": 1})
    assert set(uncaught.EXIT_CODES) == {ConfigError, PlanError, CheckpointError}


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "one"), ("RANK", "-1"), ("RANK", "2"), ("WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "2x"),
     ("LOCAL_RANK", ""), ("LOCAL_SIZE", "1.5"), ("MASTER_PORT", "http"), ("MASTER_PORT", "70000")],
)  # fmt: skip
def test_what_a_launcher_sets_are_numbers(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for known, good in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(known, good)
    monkeypatch.setenv(name, value)
    if not value:
        assert launched_number(name) is None
        return
    with pytest.raises(ConfigError, match=f"{name}='?{value}"):
        ds_hydra.check_config({"optimizer": ADAMW, "hydra": {**BLOCK, "strategies": ["tp2"]}})


def test_the_size_of_a_node_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    check_environment()
    assert launched_node_size() is None  # Accelerate's guess
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert launched_node_size() == 2
    monkeypatch.delenv("LOCAL_SIZE")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert launched_node_size() == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_that_another_program_has_is_refused_by_all_ranks(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        for name, value in (("RANK", str(rank)), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
            monkeypatch.setenv(name, value)
        listens = launch._listens_itself
        monkeypatch.setattr(launch, "_listens_itself", lambda port: False)  # as if it were another process
        with pytest.raises(ConfigError, match=f"MASTER_PORT={port} on 127.0.0.1 cannot be used"):
            launch.check_port()
        monkeypatch.setattr(launch, "_listens_itself", listens)
        if rank == 0:
            launch.check_port()  # a store that this process had before is used again
    launch.check_port()
