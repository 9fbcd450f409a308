"""What runs by itself, on each push and before each commit, is what the Makefile runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
# target -> its recipe's lines, and the targets that it names on its own line
TARGETS = {
    target: recipe.replace("$(BIN)", ".venv/bin").splitlines()
    for target, recipe in re.findall(r"^([a-z-]+):[^\n]*\n((?:\t.*\n)*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
}


def jobs() -> dict[str, Any]:
    """The workflow's jobs, by name."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    found: dict[str, Any] = workflow["jobs"]
    return found


def commands(job: dict[str, Any]) -> Iterator[str]:
    """What a job runs, once for each entry of its matrix."""
    groups = job.get("strategy", {}).get("matrix", {}).get("group", [""])
    for step in job["steps"]:
        if "run" in step:
            yield from dict.fromkeys(step["run"].replace("${{ matrix.group }}", group) for group in groups)


@pytest.mark.parametrize("name", jobs())
def test_what_a_push_runs_are_targets_of_the_makefile(name: str) -> None:
    for command in commands(jobs()[name]):
        make, *targets = command.split()
        assert make == "make", command
        assert targets
        assert set(targets) <= TARGETS.keys(), command


def test_a_push_runs_all_that_make_test_runs() -> None:
    asked = {target for line in TARGETS["test"] for target in line.split() if target in TARGETS}
    assert {"lint", "test-training", "test-pure"} <= asked
    on_push = [job for job in jobs().values() if "if" not in job]
    assert asked == {target for job in on_push for command in commands(job) for target in command.split()[1:]}


def test_hooks_are_the_linters() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"] for hook in local["hooks"]] == [line.strip() for line in TARGETS["lint"]]
