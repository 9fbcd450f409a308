"""The planner's own process: `python -m ds_hydra.planner.producer`. JSON lines in on stdin, JSON lines out on stdout.

The first line that it reads is {"table", "strategies", "options", "exposed_ms", "job"}. Each further line is a request
{"generation", "step", "ids", "lengths"}, which it answers by {"generation", "step", "plan", "planning_ms"}, all of the
plan checked, by {"generation", "step", "error"}, or by {"generation", "step", "invalid"} when the plan fails that
check; or it is {"table"}, the costs for the requests that follow.

While numba's cache is cold it plans with plain Python, and a child of its own compiles the kernels. It ends at the end
of its input, or when its parent is gone. With `--compile PID` it only fills the cache, for the process PID.

The planner does not know what a "job" is. `simulate.producer` is the same program with a simulation for it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import IO, Any

import ds_hydra.planner.kernels as kernels
import ds_hydra.planner.selection as selection
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.table_file import read_table
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.selection import Planner
from ds_hydra.zero_hetero.errors import PlanError

StepMs = Callable[[StepPlan], float]
"""What a plan's step takes, in ms."""
Simulation = Callable[[Mapping[str, Any], CostTable], StepMs]
"""A job's record and costs in."""


def serve(requests: IO[str], answers: IO[str], simulation: Simulation | None = None) -> None:
    """Answer requests one by one until they end."""
    setup = json.loads(requests.readline())
    table = read_table(setup["table"], "the cost table given to the producer")
    make = partial(make_planner, setup, simulation)
    options = PlannerOptions(**setup["options"])
    compiler: subprocess.Popen[bytes] | None = None
    if options.kernels != "pure" and not kernels.is_warm():
        compiler = subprocess.Popen(
            [sys.executable, "-m", "ds_hydra.planner.producer", "--compile", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=2,
        )
    compiled = compiler is None
    planner = make(table, compiled=compiled)
    for line in requests:
        # The compiler is looked after between two requests only: a plan that is late stops training, and one that is
        # made by slower kernels does not.
        if compiler is not None and compiler.poll() is not None:
            compiled, compiler = compiler.returncode == 0, None
            planner = make(table, compiled=compiled)
        request = json.loads(line)
        if "table" in request:
            table = read_table(request["table"], "the cost table given to the producer")
            planner = make(table, compiled=compiled)
            continue
        answers.write(json.dumps(answer(planner, request)) + "\n")
        answers.flush()


def make_planner(
    setup: Mapping[str, Any], simulation: Simulation | None, table: CostTable, *, compiled: bool
) -> Planner:
    """The planner that the first line asks for; it runs plain Python kernels unless the cache has compiled ones."""
    strategies = [StrategyShape.parse(text) for text in setup["strategies"]]
    options, step_ms = PlannerOptions(**setup["options"]), None
    compiled = compiled and options.kernels != "pure"
    if compiled:
        selection.warm_up()
        if simulation is not None and setup["job"] is not None:
            step_ms = simulation(setup["job"], table)
    options = replace(options, kernels="compiled" if compiled else "pure")
    return Planner(table, strategies, options, exposed_ms=setup["exposed_ms"], step_ms=step_ms)


def answer(planner: Planner, request: dict) -> dict[str, object]:
    """The answer to one request: its plan, or the error that planning raised."""
    started = time.perf_counter()
    of = {"generation": request["generation"], "step": request["step"]}
    try:
        plan = planner.plan(request["step"], request["ids"], request["lengths"])
    except ValueError as error:  # PlanError is one; anything else is a fault of ours and ends this process
        return {**of, "error": str(error)}
    planning_ms = (time.perf_counter() - started) * 1e3
    try:
        validate_plan(plan, planner.cost_table, planner.num_ranks, planner.options.objective)
    except PlanError as error:
        return {**of, "invalid": str(error)}
    return {**of, "plan": plan.to_json(), "planning_ms": planning_ms}


def end_with_parent(parent: int) -> None:
    """Leave when the process `parent` is gone.

    The end of the input does not always tell: a data loader's worker that was forked from the trainer holds the pipe's
    other end too, and can outlive it.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def main(simulation: Simulation | None = None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the training process's to handle
    compile_only = sys.argv[1:2] == ["--compile"]
    end_with_parent(int(sys.argv[2]) if compile_only else os.getppid())
    if compile_only:
        os.nice(19)  # it takes half a minute of a core that training may want
        selection.warm_up()
        return
    # Answers go over a copy of stdout, and stdout itself now leads to stderr: what numba or HiGHS print from C, past
    # Python, can never get between two answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers, simulation)


if __name__ == "__main__":
    main()
