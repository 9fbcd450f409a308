"""What training has taught the planner in; its part of a checkpoint out, and back: plans go on as they were.

A strategy that HiGHS composed for step 10 is a candidate from step 74 on, however far ahead steps are planned, and a
checkpoint of step 11 says so [Note: composed strategies].

[Note: corrections at fixed steps]
With `cost_correction: "apply"` plans follow from the times of earlier steps. A correction that is found after step 16
holds from step 18 on: where steps are made ready step 17 is planned by then, and where they are not its plan is to be
the same. A checkpoint of step 16 or 17 has both tables, with the step that each holds from, and the times that the next
correction will be made of. So until it measures times of its own, a restart plans what the job would have planned.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from ds_hydra.costs.cost_table import CostTable, read_table, table_record
from ds_hydra.engine.joined import Joined
from ds_hydra.engine.plan_source import PlanSource
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner.composing import PlanBudget
from ds_hydra.report.calibration import Calibration, Stragglers
from ds_hydra.report.record import StepWatch
from ds_hydra.zero_hetero.errors import CheckpointError

logger = logging.getLogger(__name__)


class Restored(NamedTuple):
    """What `Learned.read` made of a checkpoint, and `restore` assigns."""

    recipe: str  # digest, without corrections; empty where it was not known
    tables: tuple[tuple[int, CostTable], ...]  # with the step that each holds from, counted from 0
    joined: tuple[Joined, ...]
    budget: PlanBudget | None
    calibration: Calibration
    stragglers: Stragglers


class Learned:
    """Adds to the candidates, corrects the costs that plans are made by, and keeps both in checkpoints.

    Every rank makes the same calls.
    """

    def __init__(self, watch: StepWatch, plans: PlanSource):
        self._watch, self._plans = watch, plans

    def learn(self, step: int, plan: StepPlan) -> None:
        """After `step`, counted from 1: its strategy may join the candidates, and plans are made by corrected costs, if
        the config asks for that and there are new ones."""
        self._plans.trained(plan)
        table = self._watch.new_table(step)
        if table is not None:
            self._plans.use_table(table, step + 1)  # [Note: corrections at fixed steps]

    def saved(self) -> dict[str, Any]:
        """For a checkpoint, as JSON holds it."""
        record: dict[str, Any] = {
            "recipe": self._plans.first_digest,
            "joined": [[first, str(strategy)] for first, strategy in self._plans.joined],
            "budget": self._plans.budget,
        }
        if self._watch.applies:
            record["tables"] = [[first, table_record(table)] for first, table in self._plans.tables]
            record["first_table"] = table_record(self._plans.first_table)
            record["calibration"] = self._watch.calibration.state()
            record["slow"] = {"ranks": self._plans.num_ranks, **self._watch.stragglers.state()}
        return record

    def read(self, saved: Mapping[str, Any] | None) -> Restored:
        """What to go on with. Nothing is changed; CheckpointError for what `saved` has not written."""
        plans = self._plans
        watch = self._watch
        fresh = Restored("", ((0, plans.first_table),), (), plans.budget, watch.fresh(), watch.fresh_stragglers())
        if saved is None:
            return fresh
        try:
            fresh = fresh._replace(recipe=str(saved["recipe"]))
            if saved.get("budget") is not None:  # checkpoints of earlier releases have none
                fresh = fresh._replace(budget=PlanBudget(*map(int, saved["budget"])))
            joined = [Joined(int(first), StrategyShape.parse(text)) for first, text in saved.get("joined", ())]
            fresh = fresh._replace(joined=plans.able_to_join(joined))
            if not watch.applies or "tables" not in saved:
                return fresh
            slow = saved.get("slow")  # checkpoints of earlier releases have none
            others = slow is not None and int(slow["ranks"]) != plans.num_ranks
            if others or read_table(saved["first_table"], "the cost table") != plans.first_table:
                logger.info(
                    "corrections of costs begin anew: the checkpoint's are of another cost table or other ranks"
                )
                return fresh
            tables = tuple((int(first), read_table(table, "the cost table")) for first, table in saved["tables"])
            if not tables or any(table.schemes != plans.first_table.schemes for _, table in tables):
                raise ValueError("its tables have other schemes than the job's")
            return fresh._replace(tables=tables, calibration=watch.fresh(saved["calibration"]),
                                  stragglers=watch.fresh_stragglers(slow))  # fmt: skip
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"what its job has learnt for plans cannot be read ({type(error).__name__}: {error})"
            ) from None

    def restore(self, restored: Restored) -> None:
        """Go on with what was read, at another step: what was planned ahead is forgotten."""
        self._watch.calibration, self._watch.stragglers = restored.calibration, restored.stragglers
        self._watch.table = restored.tables[-1][1]
        self._plans.restart(restored.tables, restored.joined, restored.budget, restored.recipe)
