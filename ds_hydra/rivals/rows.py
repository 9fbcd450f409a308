"""A simulator of plans whose ranks share sequences: each micro-batch waits as its own row does. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.report.calibration import StageLoad
from ds_hydra.rivals.waits import WaitingCost
from ds_hydra.simulate.step import Simulator


@dataclass(frozen=True)
class _RowLoad(StageLoad):
    """Coefficients of a stage whose ranks share sequences: each micro-batch waits as its row does."""

    cost: WaitingCost | None = None

    def load_ms(self, lengths: Sequence[int], starts: Sequence[int] | None = None) -> float:
        """See `StageLoad`."""
        assert self.cost is not None, "made below, of one"
        waits = self.cost.in_rows.load_ms(lengths) - self.cost.without_waits.load_ms(lengths)
        return StageLoad.load_ms(self, lengths, starts) + waits


class RowSimulator(Simulator):
    """A simulator that knows what messages of shared sequences leave exposed: pulls go on meanwhile."""

    def _stage_loads(self, shape: PipelineShape) -> tuple[StageLoad, ...]:
        loads, cost = super()._stage_loads(shape), self.job.table[shape]
        return tuple(_RowLoad(**vars(one), cost=cost) for one in loads) if isinstance(cost, WaitingCost) else loads
