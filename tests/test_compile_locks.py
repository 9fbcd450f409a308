"""Locks of operators that are compiled: a live compilation is waited for, one that was interrupted is named."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from ds_hydra.host import compile_locks
from ds_hydra.zero_hetero.errors import ConfigError

LONG_AGO_S = 7200


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that was left two hours ago."""
    monkeypatch.setattr(FileBaton, "wait", FileBaton.wait)  # to be put back
    monkeypatch.setattr(compile_locks, "_QUIET_S", 0.2)
    monkeypatch.setattr(compile_locks, "_LOOK_S", 0.1)
    compile_locks.tell_locks()
    folder = tmp_path / "deepspeed_shm_comm"
    folder.mkdir()
    path = folder / "lock"
    path.touch()
    for one in (path, folder):
        os.utime(one, (time.time() - LONG_AGO_S,) * 2)
    return path


def wait_for(lock: Path) -> None:
    FileBaton(str(lock), wait_seconds=0.05).wait()


def test_a_lock_that_was_left_behind_is_named_with_the_remedy(lock: Path) -> None:
    with pytest.raises(ConfigError, match=r"deepspeed_shm_comm is locked by .*no process of this host") as raised:
        wait_for(lock)
    assert str(raised.value).endswith(f"delete it: rm {lock}")
    assert "for 7200 s" in str(raised.value)
    assert lock.exists(), "whose it is, nobody can know"


def test_a_process_that_compiles_is_waited_for(lock: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = f"import os, time; handle = os.open({str(lock)!r}, os.O_RDONLY); time.sleep(2); os.remove({str(lock)!r})"
    with subprocess.Popen([sys.executable, "-c", program]) as compiler:
        time.sleep(0.5)
        wait_for(lock)
        assert f"while process {compiler.pid} of this host compiles it" in capfd.readouterr().err


def test_a_young_lock_that_nobody_here_holds_is_told_and_waited_for(
    lock: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process of another host may compile in a folder that both see."""
    (lock.parent / "build.ninja").touch()
    threading.Timer(1.0, lock.unlink).start()
    wait_for(lock)
    told = capfd.readouterr().err
    assert told.count(f"delete it: rm {lock}") == 1
    assert told.startswith("[ds_hydra] waiting: ")


def test_a_wait_that_is_short_says_nothing(lock: Path, capfd: pytest.CaptureFixture[str]) -> None:
    threading.Timer(0.1, lock.unlink).start()
    wait_for(lock)
    assert capfd.readouterr().err == ""
