"""An engine's next plans with its long sequences in slices, as the planner would make them from measured costs."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_hydra.engine.plan_source import PlanSource
from ds_hydra.planner import save_plans
from tests.support.cut_plans import in_slices, num_slices


def replay_in_slices(engine: Any, steps: int) -> None:
    """Plan the next steps of an engine, cut most long sequences of them, and let it replay these plans."""
    plans, sampler = engine.crew.plans, engine.job.sampler
    made = [in_slices(plans.next(step).plan, plans.table) for step in range(steps)]
    assert any(map(num_slices, made)), "some sequences are long"
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "plans.jsonl"))
        save_plans(made, file)
        options = replace(engine.job.config.planner_options(), choose="replay", replay_file=file)
        channel = engine.crew.world.channel
        engine.crew.plans = PlanSource(plans.table, plans.strategies, options, sampler, ahead=0, channel=channel)
