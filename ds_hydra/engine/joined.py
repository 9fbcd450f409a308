"""Composed strategies that were used in; which join the candidates, and from which step on, out. Pure: no torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner.arena_room import ArenaRoom
from ds_hydra.planner.composing import COMPOSED, JOINS_AFTER, MOST_JOINED

logger = logging.getLogger(__name__)


class Joined(NamedTuple):
    """A composed strategy that joins the candidates [Note: composed strategies]."""

    first: int  # step from which on it is one
    strategy: StrategyShape


def joins_by(plan: StepPlan, candidates: Sequence[StrategyShape], joined: Sequence[Joined]) -> Joined | None:
    """What the plan of a step that was trained adds to those that have joined, if anything."""
    if plan.source != COMPOSED or len(joined) >= MOST_JOINED:
        return None
    (phase,) = plan.phases
    known = {*candidates, *(one.strategy for one in joined)}
    return None if phase.shape in known else Joined(plan.step + JOINS_AFTER, phase.shape)


def able_to_join(
    joined: Sequence[Joined], candidates: Sequence[StrategyShape], room: ArenaRoom | None
) -> tuple[Joined, ...]:
    """Those of another start of the job that this one can run; no `room`: it composes none."""
    able = tuple(
        one for one in joined if room is not None and one.strategy not in candidates and not room.refusal(one.strategy)
    )
    if len(able) < len(joined):
        logger.info("%d strategies that were composed before are none of this job's", len(joined) - len(able))
    return able
