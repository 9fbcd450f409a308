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
from tools import aims
from tools.devices.overlap import MODEL, NODE_SIZE, STEP_S, TOKENS, job_of, plan_of
from tools.devices.table import Table

# On 16 ranks, then on 32; bytes/s between nodes, for each GPU. At 5 GB/s a third of the step is exposed; issued as on a
# host, pushes would take 3 to 5 % of a step more.
STEPS = [(f"{count}*{shape}", rate) for count in (2, 4)
         for shape, rate in (("tp8", 25e9), ("tp4pp2", 25e9), ("tp4pp2", 5e9))]  # fmt: skip
QUICK = STEPS[2:3]
_TIMEOUT_S = 1800.0


def emulated(quick: bool) -> Table:
    """Emulated beside simulated steps; quick: one of them."""
    table = Table(
        f"steps of {MODEL}, computing for {STEP_S:.0f} s: emulated cluster and simulator",
        ["strategy", "ranks", "GB/s between", "emulated s", "simulated s", "apart", "aim"],
    )
    for text, rate in QUICK if quick else STEPS:
        shape = StrategyShape.parse(text)
        job, plan = job_of(shape, LinkModel(NODE_SIZE, INSIDE, Speed(20e-6, rate))), plan_of(shape)
        tokens = TOKENS * len(plan.lengths)
        plan = replace(plan, sequence_ids=TokenBudgetSampler(plan.lengths, tokens).batch(0))
        (step,) = emulate_plans(job, [plan], plan.lengths, tokens, timeout_s=_TIMEOUT_S)
        simulated_s = Simulator(job).step(plan).step_s
        apart, aim = abs(simulated_s / step.step_s - 1.0), aims.EMULATED_MEDIAN
        table.rows.append([text, shape.num_ranks, rate / 1e9, step.step_s, simulated_s, f"{apart:.2%}", f"{aim:.0%}"])
        if apart > aim:
            table.missed.append(
                f"{text}, {rate / 1e9:.0f} GB/s: emulated and simulated step are {apart:.2%} apart (aim {aim:.0%})"
            )
    return table
