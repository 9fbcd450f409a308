"""The loop of the planner's own process, which answers requests (`producer_start` starts it). Pure: no torch.

A message is a line of JSON. In:

  {"kernels": "auto"}                           compile them, or load them from numba's cache, for what will come
  {"recipe": "...", "generation": 1,            answered by {"ready": digest, "kernels": "compiled", "generation": 1};
   "oldest": 0}                                 generations below the oldest are asked for no more
  {"generation": 1, "step", "ids", "lengths",
   "loads" (where there are some)}              answered by {"generation": 1, "step", "plan", "planning_ms", "highs"},
                                                all of the plan checked, by {..., "error"}, or by {..., "invalid"} when
                                                the plan fails that check

`PlanRecipe` says why the kernels are compiled before anything is ready. The planner does not know what a recipe's "job"
is. `simulate.producer` is the same program with a simulation for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ds_hydra.costs.loads import Lengths
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner.recipe import PlanRecipe, Simulation, settled_kernels
from ds_hydra.planner.selection import Planner
from ds_hydra.zero_hetero.errors import PlanError

Tell = Callable[[Mapping[str, object]], None]


def main(requests: Iterable[str], tell: Tell, simulation: Simulation | None = None) -> None:
    """Answer requests one by one until they end."""
    planners: dict[int, Planner] = {}
    for line in requests:
        request = json.loads(line)
        if "recipe" in request:
            recipe, generation = PlanRecipe.of_text(request["recipe"]).settled(), request["generation"]
            planners = {number: planner for number, planner in planners.items() if number >= request["oldest"]}
            planners[generation] = recipe.planner(simulation, time.thread_time)
            tell({"ready": recipe.digest, "kernels": recipe.options.kernels, "generation": generation})
        elif "kernels" in request:
            settled_kernels(request["kernels"])
        else:
            tell(answer(planners[request["generation"]], request))


def answer(planner: Planner, request: Mapping[str, Any]) -> dict[str, object]:
    """The answer to one request: its plan, or the error that planning raised."""
    started = time.perf_counter()
    of = {"generation": request["generation"], "step": request["step"]}
    try:
        lengths = Lengths.of(request["lengths"], request.get("loads", ()))
        plan, highs, simpler_ms = planner.made(request["step"], request["ids"], lengths)
    except ValueError as error:  # PlanError is one; anything else is a fault of ours and ends this process
        return {**of, "error": str(error)}
    planning_ms = (time.perf_counter() - started) * 1e3
    try:
        validate_plan(plan, planner.cost_table, planner.num_ranks)
    except PlanError as error:
        return {**of, "invalid": str(error)}
    return {**of, "plan": plan.to_json(), "planning_ms": planning_ms, "highs": highs, "simpler_ms": simpler_ms}
