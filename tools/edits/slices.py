"""An engine's next plans with its long sequences in slices, as the planner would make them from measured costs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ds_hydra.planner import save_plans
from tests.support.planner_cases import in_slices, num_slices, replaying


def replay_in_slices(engine: Any, steps: int) -> None:
    """Plan the next steps of an engine, cut most long sequences of them, and let it replay these plans."""
    plans = engine.crew.plans
    made = [in_slices(plans.next(step).plan, plans.table) for step in range(steps)]
    assert any(map(num_slices, made)), "some sequences are long"
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "plans.jsonl"))
        save_plans(made, file)
        engine.crew.plans = replaying(engine, file)
