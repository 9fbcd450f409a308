"""Changes of what plans are made by in; the recipe of each step, by number, out. Pure: no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner.composing import MOST_JOINED
from ds_hydra.planner.planned import InvalidAnswerError
from ds_hydra.planner.recipe import PlanRecipe


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
