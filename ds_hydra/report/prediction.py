"""A step's plan and measured times in, its fields of the step record out: predicted against measured. Pure.

The engine hands every step to it. `calibration` decides what is learnt from a step, and when a corrected table is due.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from ds_hydra.costs.activations import EXPERT_IMBALANCE
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.slow_ranks import NONE, SlowRanks
from ds_hydra.costs.table_file import TableFile
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.report.calibration import Calibration
from ds_hydra.report.stragglers import StageTime, Stragglers
from ds_hydra.zero_hetero.nodes import Cluster

_REMEDY = {
    "apply": "; the plans of the steps after the next one give it less",
    "report": '; with hydra.cost_correction "apply" later plans give it less',
}


_WORSE = 1.25  # of what was told of uneven experts, before it is told again


class StepWatch:
    """Holds the calibration of one job; `mode` is the config's `cost_correction`. All ranks give the same figures."""

    def __init__(
        self,
        mode: str,
        found: TableFile,
        num_layers: int,
        num_elements: int,
        *,
        measured: bool,
        cluster: Cluster | None = None,
        expert_imbalance: float = EXPERT_IMBALANCE,
    ) -> None:
        """`num_elements` are the master elements of one rank; memory is planned for an `expert_imbalance`. Of costs
        that nobody `measured` nothing is expected until steps have corrected them."""
        self.mode = mode
        self._num_elements, self._measured = num_elements, measured
        self._found, self._num_layers = found, num_layers
        self._imbalance = expert_imbalance
        self._cluster = cluster if cluster is not None and cluster.mixed else None
        self.table = found.table  # that plans are made by
        self.calibration, self.stragglers = self.fresh(), self.fresh_stragglers()

    def fresh_stragglers(self, state: Mapping[str, Any] | None = None) -> Stragglers:
        """A watch of slow ranks that has seen nothing, or what `Stragglers.state` told."""
        return Stragglers(state=state, remedy=_REMEDY.get(self.mode, ""))

    def slow_ranks(self, stages: Iterable[StageTime]) -> list[str]:
        """A step's stages in, lines on ranks that have become slow out; none where nobody measured the costs."""
        return self.stragglers.observe(stages) if self._measured else []

    def uneven_experts(self, imbalances: Sequence[float]) -> list[str]:
        """A step's imbalance of each layer whose experts are spread in, a line out where memory is planned for less."""
        found = fmean(imbalances or [0.0])  # each layer of a rank keeps its own rows
        if found <= self._imbalance:
            return []
        planned, self._imbalance = self._imbalance, _WORSE * found
        return [
            f"the busiest of ranks that share experts computes {found:.1f} times the rows of even routing, and memory "
            f"is planned for {planned:.1f} times: set hydra.expert_imbalance to what lasts, or plans may not fit"
        ]

    @property
    def applies(self) -> bool:
        """Whether plans are made by corrected costs."""
        return self.mode == "apply"

    def fresh(self, state: Mapping[str, Any] | None = None) -> Calibration:
        """A calibration that has learnt nothing, or what `Calibration.state` told."""
        return Calibration(self._found.table, self._num_layers, self._found, state)

    def fields(
        self,
        plan: StepPlan,
        *,
        pipeline_ms: Sequence[float],
        stage_ms: Sequence[Sequence[float]],
        step_ms: float,
        moved_bytes: int,
    ) -> Mapping[str, Any]:
        """Fields of the step's record; it learns from the step afterwards, but for mode "off"."""
        if self.mode == "off":
            return {"predicted_step_ms": plan.step_ms, "expected_ms": plan.step_ms if self._measured else None}
        prediction = self.calibration.predict(plan, self._num_elements, moved_bytes)
        expected = self.calibration.correct(plan, prediction)
        factors, known = self.calibration.factors, self._measured or self.calibration.has_learnt
        # Only now: a prediction that had already learnt from its own step would always be right.
        self.calibration.observe(plan, prediction, pipeline_ms, step_ms)
        return {
            "predicted_step_ms": prediction.step_ms,
            "expected_ms": expected if known else None,
            "predicted_pipeline_ms": prediction.pipeline_ms,
            "predicted_stage_ms": prediction.stage_ms,
            "stage_ms": tuple(tuple(row) for row in stage_ms),
            "corrections": {str(scheme): factors[scheme] for scheme in sorted(factors, key=str)},
        }

    def new_table(self, step: int) -> CostTable | None:
        """With mode "apply" a cost table to plan with from then on: every 16 steps a corrected one, and one with other
        slow ranks when there are. Otherwise None."""
        if not self.applies:
            return None
        corrected = self.calibration.corrected_table(step)
        slow = SlowRanks(paces, self._cluster) if (paces := self.stragglers.paces) else NONE
        if corrected is None and slow == self.table.slow:
            return None
        self.table = replace(corrected or self.table, slow=slow)
        return self.table
