"""The producer's process dies with its parent."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_producer_dies_with_its_parent_while_it_imports(tmp_path: Path) -> None:
    """And it tells that it is alive meanwhile, on a machine that needs long for that."""
    (tmp_path / "slow_module.py").write_text("import time; time.sleep(600)")
    script = (
        "import time; from ds_hydra.planner.producer_process import ProducerProcess, producer_command\n"
        "p = ProducerProcess(producer_command('slow_module', 0.1))\n"
        "while p.heard < 3: time.sleep(0.05)\n"
        "print(p.process.pid, flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    assert_gone_with_its_parent(script, environment)


def assert_gone_with_its_parent(script: str, environment: dict[str, str]) -> None:
    """A script that tells the producer's process is killed: that is gone within some seconds; whoever inherits it may
    not have waited for it yet."""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(child, 0)
            time.sleep(0.05)
        pytest.fail(f"producer {child} outlived its parent by 20 s")


def test_the_producer_dies_with_its_parent() -> None:
    script = (
        "import os, sys, time; from tests.pure.test_planner_service import service\n"
        "s = service(); s.submit(0, range(5), [5, 6, 7, 8, 9]); s.get(0); print(s.producer_pid, flush=True)\n"
        "time.sleep(600)"
    )
    assert_gone_with_its_parent(script, {**os.environ, "PYTHONPATH": str(ROOT)})
