"""`ds-hydra launch`: whose options are whose, what is started, and the exit code of a job."""

from __future__ import annotations

import argparse
import base64
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_hydra.commands.launch import as_ours, main, read_options
from ds_hydra.commands.launch_node import Job, code_of, job_of
from ds_hydra.config.hydra_block import ElasticConfig, HydraConfig
from ds_hydra.elastic.agent import Invitation
from ds_hydra.host.environment import INVITATION, JOINS, MEMBERS_FOLDER, MOST_RANKS, longest_wait_s, members_folder
from ds_hydra.zero_hetero.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "respawn", "spares", "others"),
    [
        ("--num_gpus 2 a.py --x 1", 0, 0, "--x 1"),
        ("--respawn 3 --num_gpus 2 --spares=1 a.py --x 1", 3, 1, "--x 1"),
        ("--num_gpus 2 --spares 1 --respawn=3 a.py", 3, 1, ""),
        ("--num_gpus 2 a.py --respawn 3 --spares 2", 0, 0, "--respawn 3 --spares 2"),
        ("--respawn 1 a.py --respawn x", 1, 0, "--respawn x"),
    ],
)
def test_what_follows_the_script_is_the_scripts(given: str, respawn: int, spares: int, others: str) -> None:
    options = read_options(given.split())
    assert (options.respawn, options.spares, options.user_args) == (respawn, spares, others.split())


def test_a_number_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        read_options(["--respawn", "often", "a.py"])
    assert left.value.code == 2
    assert "--respawn: a number of processes of each node is asked for, but it is 'often'" in capsys.readouterr().err


def test_deepspeeds_command_for_a_node_starts_ours_there() -> None:
    command = ["python", "-m", "deepspeed.launcher.launch", "--world_info=x", "a.py"]
    assert as_ours(command, ["--respawn=2"]) == [
        "python", "-m", "ds_hydra.commands.launch_node", "--respawn=2", "--world_info=x", "a.py",
    ]  # fmt: skip
    assert as_ours(["pkill -f ", "-m\\ deepspeed.launcher.launch\\ x"], ["--respawn=2"])[1].endswith("launch_node\\ x")


@pytest.mark.parametrize("words", [["--launcher", "openmpi", "a.py"], ["--autotuning", "run", "a.py"]])
def test_what_would_start_ranks_otherwise_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        ([0, 0], 0),
        ([-9, 0, 0], 0),  # lost, and the others went on
        ([-9, 75, 0], 0),
        ([0, 1], 1),  # failed when the job was over
        ([-9, 75, 75], 75),
        ([78, 78], 78),
        ([-9, -9], 137),
        ([], 1),
    ],
)
def test_the_exit_code_is_the_survivors(ended: list[int], code: int) -> None:
    assert code_of(ended) == code


def on_node(number: int) -> argparse.Namespace:
    """What DeepSpeed tells a node of two, with three places and two."""
    world = base64.urlsafe_b64encode(json.dumps({"a": [0, 1, 2], "b": [0, 1]}).encode()).decode()
    return argparse.Namespace(
        world_info=world, node_rank=number, master_addr="a", master_port=29500, no_python=False, module=False,
        no_local_rank=False, bind_cores_to_rank=False, bind_core_list=None, enable_each_rank_log="None",
        training_script="a.py", training_script_args=["--x"],
    )  # fmt: skip


def test_ranks_of_a_node_and_who_joins(tmp_path: Path) -> None:
    job: Job = job_of(on_node(1), tmp_path)
    assert job.command[-3:] == ("a.py", "--local_rank=%LOCAL_RANK%", "--x")
    second = job.of_rank(1)
    expected = {"RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_ADDR": "a"}
    assert expected.items() <= second.items()
    assert second[MEMBERS_FOLDER] == str(tmp_path)
    assert JOINS not in second
    joiner = job.of_joiner(1)
    assert {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1", JOINS: "1"}.items() <= joiner.items()
    assert joiner["MASTER_PORT"] != second["MASTER_PORT"]


def test_the_last_places_of_each_node_are_spares(tmp_path: Path) -> None:
    jobs = [job_of(on_node(node), tmp_path, 1) for node in range(2)]
    assert [(job.first, job.num_local, job.num_ranks, job.spares) for job in jobs] == [(0, 2, 3, 1), (2, 1, 3, 1)]
    assert [job.of_joiner(1)[MOST_RANKS] for job in jobs] == ["3", "3"]
    assert jobs[1].of_joiner(1)["LOCAL_RANK"] == "1"
    with pytest.raises(ConfigError, match="--spares 2: node b has 2 places"):
        job_of(on_node(0), tmp_path, 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda place: place.mkdir(0o700), ""),
        (lambda place: (place.mkdir(), place.chmod(0o777)), "mode 0777, and must be of user"),
        (lambda place: (place.mkdir(), place.chmod(0o770)), "mode 0770"),
        (lambda place: place.symlink_to("/tmp"), "it is a link and no folder"),
        (lambda place: place.touch(), "it is a file and no folder"),
        (lambda place: None, "No such file or directory. Make one of your own, `mkdir -m 700"),
    ],
)
def test_the_secret_of_a_job_lies_only_where_nobody_else_writes(
    make: Callable[[Path], object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "members"
    make(place)
    monkeypatch.setenv(MEMBERS_FOLDER, str(place))
    if words:
        with pytest.raises(ConfigError, match=words):
            members_folder()
        return
    assert members_folder() == place
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (place / f"{INVITATION}.{os.getpid()}").symlink_to(victim)
    Invitation("secret", (), None, "run").write(place / INVITATION)
    assert victim.read_text() == "mine"
    assert oct((place / INVITATION).stat().st_mode)[-3:] == "600"
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="it belongs to user"):
        members_folder()


def test_only_an_elastic_job_that_has_begun_waits_for_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    elastic, plain = HydraConfig(1, elastic=ElasticConfig(), timeout_seconds=20), HydraConfig(1, timeout_seconds=20)
    assert [longest_wait_s(one, begun=False) for one in (elastic, plain)] == [300, 20]
    assert [longest_wait_s(one, begun=True) for one in (elastic, plain)] == [20, 20]
    monkeypatch.setenv(JOINS, "1")
    assert longest_wait_s(elastic, begun=False) == 20  # the others have begun
