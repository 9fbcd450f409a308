"""All that plans follow from, its digest, and the planner that is made of it. Pure: no torch.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from ds_hydra.costs.cost_table import CostTable, SchemeCost, read_table, table_record
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.schedules.registry import Schedule, modules_of, register
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.plan.step_plan import StepPlan, joined
from ds_hydra.plan.validate import check_safe
from ds_hydra.planner.composing import MOST_JOINED, ArenaRoom, HighsShare, PlanBudget
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.selection import Planner
from ds_hydra.zero_hetero.errors import PlanError


def warm_up() -> None:
    """Compile every kernel that plans need, or load it from numba's cache, by planning a few made-up steps."""
    costs = tuple(
        SchemeCost(ParallelScheme(tp, pp), 1e-6, 0.1, 10.0, 400, 8, Shares.usual())
        for tp, pp in ((1, 1), (2, 1), (1, 2))
    )
    table, options = CostTable(costs, "made up to warm the cache"), PlannerOptions(kernels="compiled")
    # Few sequences and many go different ways, and so do strategies with chunked pipelines where others may win too.
    for texts in (("tp2 + 2*tp1", "2*pp2", "2*pp2/list"), ("tp2 + pp2/list",)):
        planner = Planner(table, [StrategyShape.parse(text) for text in texts], options)
        for size in (3, 20):
            planner.plan(0, range(size), [(37 * i) % 300 + 1 for i in range(size)])


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


MadeBy = Literal["producer", "restarted", "here", "callback"]


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan, and how it came about, on which it does not depend.

    `planning_ms` is the planner's wall time, `waited_ms` that of who asked for the plan. `hidden` says whether it was
    ready then. `made_by`: "restarted" is a producer that took another's place meanwhile, "here" the training process,
    "callback" one of the user's. `recipe` is the digest of what it follows from; `highs` says what HiGHS did for it;
    `simpler_ms` as of `MadePlan`.
    """

    plan: StepPlan
    planning_ms: float
    hidden: bool
    waited_ms: float = 0.0
    made_by: MadeBy = "here"
    recipe: str = ""
    highs: HighsShare | None = None
    simpler_ms: float | None = None

    @property
    def mix_saved(self) -> float | None:
        """Share of the step by the best plan of fewer shapes that this one saves at least, if one is known."""
        return None if self.simpler_ms is None else 1.0 - self.plan.step_ms / self.simpler_ms

    def to_text(self) -> str:
        """For other ranks; `of_text` is the inverse."""
        told = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "plan"}
        return f"{json.dumps(told)}\n{self.plan.to_json()}"

    @classmethod
    def of_text(cls, text: str) -> PlannedStep:
        told, plan = text.split("\n", 1)
        fields_told = json.loads(told)
        highs = fields_told.pop("highs")
        return cls(
            StepPlan.from_json(plan, "rank 0's plan"),
            **fields_told,
            highs=None if highs is None else HighsShare(*highs),
        )


def joined_steps(parts: Sequence[PlannedStep]) -> PlannedStep:
    """The plan of a step in parts, and how it came about: its times are those of all, the rest is the last one's."""
    return replace(
        parts[-1],
        plan=joined([part.plan for part in parts]),
        planning_ms=sum(part.planning_ms for part in parts),
        waited_ms=sum(part.waited_ms for part in parts),
        hidden=all(part.hidden for part in parts),
    )


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A batch to plan, with lengths in tokens."""

    step: int
    ids: tuple[int, ...]
    lengths: tuple[int, ...]


class InvalidAnswerError(ValueError):
    """What a producer said cannot be used."""


def read_answer(line: str, request: PlanRequest, recipe: PlanRecipe) -> PlannedStep:
    """What a producer made of a request.

    Raises InvalidAnswerError for one that is wrong, and PlanError where the producer could not plan these sequences.
    """
    answer = json.loads(line)
    if "error" in answer:
        raise PlanError(str(answer["error"]))
    try:
        if "invalid" in answer:
            raise PlanError(answer["invalid"])
        plan, planning_ms = StepPlan.from_json(answer["plan"], "the producer's answer"), float(answer["planning_ms"])
        told, simpler_ms = answer.get("highs"), answer.get("simpler_ms")
        highs = None if told is None else HighsShare(*told)
        # The producer has run the plan's schedules to check its times and its memory. What costs little is checked
        # again: a producer whose memory went bad may answer in valid JSON and still lose a sequence.
        if (plan.step, plan.sequence_ids, plan.lengths) != (request.step, request.ids, request.lengths):
            raise PlanError(f"the producer answered for other sequences than those of step {request.step}")
        check_safe(plan, recipe.table, recipe.strategies[0].num_ranks)
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidAnswerError(str(error)) from error
    simpler_ms = None if simpler_ms is None else float(simpler_ms)
    return PlannedStep(plan, planning_ms, hidden=False, highs=highs, simpler_ms=simpler_ms)


class Generations:
    """The recipes of a job. Other costs, and composed strategies that join the candidates, each hold from a step on.

    A recipe gets a number when it is first asked for. Requests and answers carry it, so that an answer by an older
    recipe is never mistaken for one by the recipe of its step: with a strategy that joins from step 74 on, and costs
    that change at step 18, plans of step 80 that were on their way before either have another number than what is asked
    for then.
    """

    def __init__(self, recipe: PlanRecipe) -> None:
        self._base = recipe
        self._tables: list[tuple[int, CostTable]] = [(0, recipe.table)]
        self._joined: list[tuple[int, StrategyShape, float]] = []
        self._numbers: dict[tuple[int, int], int] = {(1, 0): 0}  # by how many tables and strategies hold
        self._recipes: dict[int, PlanRecipe] = {0: recipe}

    def __getitem__(self, number: int) -> PlanRecipe:
        return self._recipes[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._recipes)

    @property
    def kernels(self) -> str:
        """Those of all recipes: "auto" until they are settled."""
        return self._base.options.kernels

    def use_table(self, table: CostTable, first: int) -> None:
        """Plan by another table from step `first` on, which comes after all others."""
        self._tables.append((first, table))

    def join(self, strategy: StrategyShape, exposed_ms: float, first: int) -> None:
        """One more candidate from step `first` on, which comes after those of all others; its messages add so much."""
        self._joined.append((first, strategy, exposed_ms))

    def of(self, step: int) -> int:
        """The number of the recipe that a step is planned by."""
        tables = max(1, sum(first <= step for first, _ in self._tables))
        joined = sum(first <= step for first, _, _ in self._joined)
        number = self._numbers.setdefault((tables, joined), len(self._numbers))
        if number not in self._recipes:
            recipe = replace(self._base, table=self._tables[tables - 1][1])
            for _, strategy, exposed_ms in self._joined[:joined]:
                recipe = recipe.joined_by(strategy, exposed_ms)
            if joined >= MOST_JOINED and recipe.options.highs == "composes":
                recipe = replace(recipe, options=replace(recipe.options, highs="advises"))
            self._recipes[number] = recipe
        return number

    def forget(self, oldest: int) -> None:
        """Recipes below this number are no longer asked for."""
        for number in [number for number in self._recipes if number < oldest]:
            del self._recipes[number]

    def settle(self, number: int, kernels: str) -> PlanRecipe:
        """Decide the kernels, for all recipes and whoever plans by them; the recipe of this number."""
        self._base = _with(self._base, kernels)
        self._recipes = {other: _with(recipe, kernels) for other, recipe in self._recipes.items()}
        return self._recipes[number]

    def agree(self, number: int, ready: Mapping[str, str] | None) -> PlanRecipe:
        """The recipe as a producer has it that said {"ready": digest, "kernels": ...}.

        Raises InvalidAnswerError where it said nothing, or plans by another recipe.
        """
        if ready is None:
            raise InvalidAnswerError("it answered before it was ready")
        if (
            ready["kernels"] not in ("compiled", "pure")
            or _with(self[number], ready["kernels"]).digest != ready["ready"]
        ):
            raise InvalidAnswerError(
                f"it plans by the recipe {ready['ready']} with {ready['kernels']} kernels, which is not this job's: "
                "installed packages have changed since the job began"
            )
        return self.settle(number, ready["kernels"])


def _with(recipe: PlanRecipe, kernels: str) -> PlanRecipe:
    """The recipe with these kernels, unless it has decided on some."""
    if recipe.options.kernels != "auto":
        return recipe
    return replace(recipe, options=replace(recipe.options, kernels=kernels))
