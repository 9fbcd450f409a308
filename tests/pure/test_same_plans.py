"""Plans follow from what is planned alone: no clock, no disk, no other program decides any of them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import highspy
import numpy as np
import pytest

from ds_hydra.planner import PlannerOptions, PlanRecipe, recipe
from ds_hydra.planner.exact.highs import solve_milp
from ds_hydra.planner.generations import Generations
from ds_hydra.planner.planned import InvalidAnswerError
from tests.support.planner_cases import a800_planner

ROOT = Path(__file__).parents[2]
# What answers requests and what waits for answers; plans are made by none of them.
WITH_A_CLOCK = {"service.py", "producer.py"}


def knapsack(**limits: Any) -> float | None:
    """The best of x + y over x + 2 y <= 7, both whole and at most 5: 6."""
    found = solve_milp(np.array([-1.0, -1.0]), np.array([5.0, 5.0]), [[(0, 1.0), (1, 2.0)]], [0.0], [7.0],
                       integers=2, **limits)  # fmt: skip
    return None if found.point is None else -found.bound


def test_no_part_of_the_planner_looks_at_a_clock() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "ds_hydra" / "planner").rglob("*.py"))
        if path.name not in WITH_A_CLOCK
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Import) and any(one.name in ("time", "datetime") for one in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"))
    ]
    assert not found, "\n".join(found)


def test_programs_have_a_time_limit_only_where_seconds_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    set_option = highspy.Highs.setOptionValue

    def told(solver: highspy.Highs, name: str, value: Any) -> object:
        asked.append(name)
        return set_option(solver, name, value)

    monkeypatch.setattr(highspy.Highs, "setOptionValue", told)
    assert knapsack(node_limit=100) == 6.0
    assert "time_limit" not in asked
    assert {"threads", "random_seed", "mip_max_nodes"} < set(asked)
    knapsack(seconds=10.0)
    assert "time_limit" in asked


def test_a_users_own_program_with_more_threads_hides_no_solution() -> None:
    """HiGHS refuses to run with another number of threads than the process began with: not "nothing found"."""
    code = (
        "import highspy\n"
        "from tests.pure.test_same_plans import knapsack\n"
        "own = highspy.Highs()\n"
        "for name, value in (('threads', 4), ('parallel', 'on')): own.setOptionValue(name, value)\n"
        "x = own.addVariable(0.0, 1.0); own.minimize(x)\n"
        "assert knapsack(node_limit=100) == 6.0, 'nothing found'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_empty_cache_on_disk_does_not_change_the_kernels(tmp_path: Path) -> None:
    """Plain Python searches less: a job that begins before its kernels are compiled must not plan by it."""
    code = (
        "import ds_hydra.planner.kernels as kernels\n"
        "assert kernels.select('auto').is_compiled\n"
        "assert not kernels.select('pure').is_compiled\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


def test_where_numba_cannot_compile_the_whole_job_is_planned_in_plain_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is decided once, is part of the digest, and is what a producer that is started again is told."""
    generations = Generations(PlanRecipe(a800_planner().cost_table, a800_planner().strategies))
    recipes = {which: replace(generations[0], options=PlannerOptions(kernels=which)) for which in ("pure", "compiled")}
    assert recipes["pure"].digest != recipes["compiled"].digest
    generations.use_table(generations[0].table, 4)
    assert generations.of(4) == 1
    with pytest.raises(InvalidAnswerError, match="not this job's"):
        generations.agree(1, {"ready": recipes["compiled"].digest, "kernels": "pure"})
    assert generations.kernels == "auto"
    generations.agree(1, {"ready": recipes["pure"].digest, "kernels": "pure"})
    assert [generations[number].options.kernels for number in generations] == ["pure", "pure"]
    with pytest.raises(InvalidAnswerError, match="not this job's"):
        generations.agree(1, {"ready": recipes["compiled"].digest, "kernels": "compiled"})

    def fails() -> None:
        raise OSError("the cache cannot be written")

    monkeypatch.setattr(recipe, "warm_up", fails)
    assert recipe.settled_kernels.__wrapped__("auto") == "pure"
    with pytest.raises(OSError, match="cannot be written"):
        recipe.settled_kernels.__wrapped__("compiled")
