"""Steps of the overlap table on emulated clusters: the engine's own pulls and pushes on virtual time; and simulated.

The emulated engine issues its messages as a device's does, in hooks and in a lane, and its pushes wait for memory as
those of the 32B model do, which the small model stands for.
"""

from __future__ import annotations

from dataclasses import replace

from ds_hydra.data.sampler import TokenBudgetSampler
from ds_hydra.emulate.cluster import emulate_plans
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.simulate.links import INSIDE, LinkModel, Speed
from ds_hydra.simulate.step import Simulator
from tools.devices.overlap import MODEL, NODE_SIZE, TOKENS, job_of, plan_of
from tools.devices.table import Table

STRATEGIES = ("2*tp8", "2*tp4pp2", "4*tp8", "4*tp4pp2")  # on 16 ranks, then on 32
AIM, RATE = 0.01, 25e9  # bytes/s between nodes, for each GPU
_TIMEOUT_S = 1800.0


def emulated(quick: bool) -> Table:
    """Emulated beside simulated steps; quick: of 16 ranks."""
    table = Table(
        f"steps of {MODEL} with {RATE / 1e9:.0f} GB/s between nodes: emulated cluster and simulator",
        ["strategy", "ranks", "emulated s", "simulated s", "apart", "aim"],
    )
    for text in STRATEGIES[: 2 if quick else None]:
        shape = StrategyShape.parse(text)
        job, plan = job_of(shape, LinkModel(NODE_SIZE, INSIDE, Speed(20e-6, RATE))), plan_of(shape)
        tokens = TOKENS * len(plan.lengths)
        plan = replace(plan, sequence_ids=TokenBudgetSampler(plan.lengths, tokens).batch(0))
        (step,) = emulate_plans(job, [plan], plan.lengths, tokens, timeout_s=_TIMEOUT_S)
        simulated_s = Simulator(job).step(plan).step_s
        apart = abs(simulated_s / step.step_s - 1.0)
        table.rows.append(
            [text, shape.num_ranks, round(step.step_s, 3), round(simulated_s, 3), f"{apart:.2%}", f"{AIM:.0%}"]
        )
        if apart > AIM:
            table.missed.append(f"{text}: emulated and simulated step are {apart:.2%} apart (aim {AIM:.0%})")
    return table
