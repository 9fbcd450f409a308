"""Changes of the costs that plans are made by in; the recipe of each step, by number, out. Pure: no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.planner.planned import InvalidAnswerError
from ds_hydra.planner.recipe import PlanRecipe


class Generations:
    """The recipes of a job, numbered. Each holds from a step on; the last two are kept.

    Requests and answers carry the number, so that an answer by an older recipe is never mistaken for one by the recipe
    of its step: with other costs from step 8 on, plans of steps 8 and 9 that are still on their way have another number
    than what is asked for.
    """

    def __init__(self, recipe: PlanRecipe) -> None:
        self._recipes: dict[int, PlanRecipe] = {0: recipe}
        self._first = {0: 0}

    def __getitem__(self, number: int) -> PlanRecipe:
        return self._recipes[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._recipes)

    @property
    def kernels(self) -> str:
        """Those of all recipes: "auto" until they are settled."""
        return self._recipes[max(self._recipes)].options.kernels

    def add(self, table: CostTable, first: int) -> int:
        """Plan by another table from step `first` on; the number of its recipe."""
        last = max(self._recipes)
        number = last + 1
        self._recipes = {last: self._recipes[last], number: replace(self._recipes[last], table=table)}
        self._first = {last: self._first[last], number: first}
        return number

    def of(self, step: int) -> int:
        """The number of the recipe that a step is planned by."""
        return max((number for number, first in self._first.items() if first <= step), default=min(self._first))

    def settle(self, number: int, kernels: str) -> PlanRecipe:
        """Decide the kernels, for all recipes and whoever plans by them; the recipe of this number."""
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
