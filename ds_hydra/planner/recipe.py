"""All that plans follow from in; its digest, and the planner that makes them, out. Pure: no torch.

[Note: the same plans]
A plan is one function of a recipe, a step, and the ids and lengths of its sequences. The recipe has a digest, which
covers the versions of what computes, too. Who computes a plan, when, and on how busy a machine decides nothing: not
the planner's process, which may have been started again, and not this one, where that cannot live. So a job that is
run again, or goes on from a checkpoint, has the plans that it would have had.

Hence the kernels are compiled before the first plan is made, however long that takes: plain Python would search less.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import inspect
import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.table_file import read_table, table_record
from ds_hydra.pipe.schedules.registry import Schedule, modules_of, register
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner.arena_room import ArenaRoom
from ds_hydra.planner.budget import PlanBudget
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.selection import Planner, warm_up

logger = logging.getLogger(__name__)
_CODE = ("planner", "plan", "costs", "simulate", "pipe/schedules")

StepMs = Callable[[StepPlan], float]
"""What a plan's step takes, in ms."""
Simulation = Callable[[Mapping[str, Any], CostTable], StepMs]
"""A job's record and costs in."""


@dataclass(frozen=True)
class PlanRecipe:
    """What plans follow from [Note: the same plans]; `job` is the record that steps are simulated by, if they are.

    `budget` None: one that does not look at the steps' time.
    """

    table: CostTable
    strategies: tuple[StrategyShape, ...]
    options: PlannerOptions = field(default_factory=PlannerOptions)
    exposed_ms: tuple[float, ...] = ()
    job: Mapping[str, Any] | None = None
    room: Mapping[str, Any] | None = None  # `ArenaRoom.to_record`; None: composed strategies may need what they like
    budget: PlanBudget | None = None

    @functools.cached_property
    def text(self) -> str:
        """One line of JSON; `of_text` is the inverse."""
        record = {
            "table": table_record(self.table),
            "strategies": [str(strategy) for strategy in self.strategies],
            "options": asdict(self.options),
            "exposed_ms": self.exposed_ms,
            "job": self.job,
            "room": self.room,
            "budget": self.budget,
            "modules": {module: sys.modules[module].__file__ for module in self._modules},
        }
        return json.dumps(record, sort_keys=True)

    @classmethod
    def of_text(cls, text: str) -> PlanRecipe:
        record = json.loads(text)
        for module, file in record["modules"].items():
            _import(module, file)
        return cls(
            read_table(record["table"], "the cost table of a recipe"),
            tuple(StrategyShape.parse(strategy) for strategy in record["strategies"]),
            PlannerOptions(**record["options"]),
            tuple(record["exposed_ms"]),
            record["job"],
            record["room"],
            None if record["budget"] is None else PlanBudget(*record["budget"]),
        )

    @functools.cached_property
    def digest(self) -> str:
        """16 hex digits of the recipe and of the versions of what computes."""
        own = (inspect.getsource(sys.modules[module]) for module in self._modules)
        return hashlib.sha256("\n".join([self.text, *_versions(), *own]).encode()).hexdigest()[:16]

    @property
    def _modules(self) -> tuple[str, ...]:
        """Those that register schedules of the strategies."""
        return modules_of(pipeline.schedule for strategy in self.strategies for pipeline in strategy.pipelines)

    def settled(self) -> PlanRecipe:
        """The recipe with its kernels decided, and compiled if these are."""
        # Plans that are replayed are not searched for.
        which = "pure" if self.options.choose == "replay" else settled_kernels(self.options.kernels)
        return replace(self, options=replace(self.options, kernels=which))

    def joined_by(self, strategy: StrategyShape, exposed_ms: float) -> PlanRecipe:
        """The recipe with one more candidate, whose messages add so much to a step."""
        exposed = (*self.exposed_ms, exposed_ms) if self.exposed_ms else ()
        return replace(self, strategies=(*self.strategies, strategy), exposed_ms=exposed)

    def planner(self, simulation: Simulation | None = None, cpu_s: Callable[[], float] = lambda: 0.0) -> Planner:
        """The planner of a settled recipe. It is made from the recipe's text wherever it is made; `cpu_s` reads a clock
        for the record alone."""
        same = PlanRecipe.of_text(self.text)
        step_ms = None
        if same.job is not None:
            assert simulation is not None, "a recipe with a job's record needs a simulation"
            step_ms = simulation(same.job, same.table)
        room = (lambda _: "") if same.room is None else ArenaRoom.of_record(same.room).refusal_of_composed
        return Planner(
            same.table, same.strategies, same.options,
            exposed_ms=same.exposed_ms, step_ms=step_ms, room=room, budget=same.budget, cpu_s=cpu_s,
        )  # fmt: skip


def _import(module: str, file: str) -> None:
    """By its name, or from its file, since the folder of a job's script is on that script's path alone; and register
    its schedules."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        loader = importlib.machinery.SourceFileLoader(module, file)
        spec = importlib.util.spec_from_loader(module, loader)
        assert spec is not None, "it has a loader"
        found = sys.modules[module] = importlib.util.module_from_spec(spec)
        loader.exec_module(found)
    for value in vars(found).values():
        if isinstance(value, Schedule):
            register(value)


@functools.cache
def settled_kernels(which: str) -> str:
    """ "compiled" or "pure" for what `PlannerOptions.kernels` asks for; compiled ones are compiled then.

    For "auto" they are plain Python only where numba cannot compile, never because it has not yet.
    """
    if which == "pure":
        return which
    try:
        warm_up()
    except Exception as error:
        if which == "compiled":
            raise
        logger.warning(
            "planner: numba cannot compile the kernels (%s: %s); plans are searched for in plain Python, with less "
            "effort. If its cache cannot be written, set NUMBA_CACHE_DIR to a folder that can",
            type(error).__name__,
            error,
        )
        return "pure"
    return "compiled"


@functools.cache
def _versions() -> tuple[str, ...]:
    """Of the code that plans, as it was when it was first asked for, and of the packages that it computes with."""
    own = hashlib.sha256()
    for folder in _CODE:
        for file in sorted((Path(__file__).parents[1] / folder).rglob("*.py")):
            own.update(file.read_bytes())
    return own.hexdigest(), *(f"{name} {metadata.version(name)}" for name in ("numba", "numpy", "highspy"))
