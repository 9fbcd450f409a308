"""Jobs on Ray, as far as it goes without Ray: what is refused, room in a cluster, who counts as lost. Pure."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_hydra.commands.launch_node import Job, Node, is_member
from ds_hydra.host.environment import INVITATION, JOINS, MEMBERS_FOLDER
from ds_hydra.ray import train
from ds_hydra.ray.actor import Rank
from ds_hydra.ray.job import Place, _job, room
from ds_hydra.zero_hetero.errors import ConfigError


def test_a_missing_ray_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs Ray .*pip install 'ds-hydra\[ray\]'"):
        train("a.py", ranks=2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"work": 3}, "was given a int"),
        ({"work": "a.py", "arguments": "--x 1"}, "must be a list"),
        ({"work": "a.py", "arguments": ["--steps", 1]}, "1 is a int"),
        ({"work": "a.py", "ranks": 0}, "ranks=0 must be a whole number of at least 1"),
        ({"work": "a.py", "ranks": 2.0}, "ranks=2.0"),
        ({"work": "a.py", "ranks": 4, "most": 2}, "most=2 must be a whole number of at least 4"),
        ({"work": "a.py", "respawn": -1}, "respawn=-1"),
        ({"work": "a.py", "strategy": "tp2"}, "strategy='tp2' is none of Ray's"),
        ({"work": "a.py", "resources": {"GPU": 0}}, "each above 0"),
    ],
)
def test_what_ray_need_not_be_asked_for(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], words: str) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    with pytest.raises(ConfigError, match=words):
        train(**{"ranks": 2, **given})


def test_room_is_counted_by_nodes() -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 16.0, "GPU": 3.0}}, {"Alive": True, "Resources": {"CPU": 9.0}},
             {"Alive": False, "Resources": {"CPU": 99.0}}]  # fmt: skip
    assert room(nodes, {"CPU": 2.0}) == [8, 4]
    assert room(nodes, {"CPU": 4.0, "GPU": 1.0}) == [3, 0]


def test_ranks_of_a_node_see_all_of_its_gpus_in_order() -> None:
    fellows: list[Place] = []
    for number, gpu in ((4, "3"), (5, "1")):
        fellows.append(Place(number, None, number))
        fellows[-1].where = SimpleNamespace(gpus=(gpu,))  # type: ignore[assignment]
    told = _job(fellows, 4, 6, MASTER_ADDR="a", MASTER_PORT="1").of_rank(1)
    expected = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CUDA_VISIBLE_DEVICES": "3,1"}
    assert expected.items() <= told.items()


def invited(folder: Path, pid: int, host: str) -> None:
    (folder / INVITATION).write_text(json.dumps({"members": [{"pid": pid, "host": host}]}))


def test_who_was_never_let_in_is_not_lost(tmp_path: Path) -> None:
    here = f"{socket.gethostname()}/boot"
    assert not is_member(tmp_path, 7)
    invited(tmp_path, 7, here)
    assert is_member(tmp_path, 7)
    assert not is_member(tmp_path, 8)
    job = Job((), 0, 2, 2, {MEMBERS_FOLDER: str(tmp_path)}, None, None)
    node = Node(job, 0, came={1})
    for pid, code in ((5, 0), (8, 75)):  # the job is over, and the one that asked to join finds nobody
        node._ended(int(pid == 8), pid, code)
    assert node.ended == [0]
    invited(tmp_path, 7, "elsewhere/boot")
    assert not is_member(tmp_path, 7)


def test_an_actor_starts_a_script_and_tells_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray calls it, one method after the other."""
    from ds_hydra.ray.actor import Work

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1]); sys.exit(3)")
    actor = Rank("test")
    try:
        with pytest.raises(ConfigError, match=r"none\.py is not on node"):
            actor.begin(Work(("none.py",), b"", str(tmp_path), ()), Job((), 0, 1, 1, {}, None, None), 0)
        actor.begin(Work(("script.py", "word"), b"", str(tmp_path), ()), Job((), 1, 2, 4, {}, None, None), 1)
        while (end := actor.wait(1.0)) is None:
            pass
        assert (end.code, end.lines, end.member, end.result) == (3, "2 4 word\n", True, None)
        assert actor.invitation() is None
        script.write_text(f"import os; print(os.environ['{JOINS}'], os.environ['WORLD_SIZE']); os.kill(os.getpid(), 9)")
        actor.join(Work(("script.py",), b"", str(tmp_path), ()), '{"members": []}', Job((), 0, 1, 1, {}, None, None))
        while (end := actor.wait(1.0)) is None:
            pass
        assert (end.code, end.lines, end.member) == (-9, "1 1\n", False)
        assert actor.invitation() == '{"members": []}'
        assert oct((tmp_path / "ds_hydra-test" / INVITATION).stat().st_mode)[-3:] == "600"
    finally:
        actor.close()
    assert os.listdir(tmp_path) == ["script.py"]
