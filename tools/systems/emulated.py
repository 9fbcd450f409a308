"""Cells on the emulated cluster: the engine itself runs the plans of a static layout and of ours, on virtual time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

from ds_hydra.commands.figures import shipped
from ds_hydra.costs.cost_table import read_table_file
from ds_hydra.data.sampler import TokenBudgetSampler
from ds_hydra.emulate.cluster import emulate_plans
from ds_hydra.rivals.costs import NODE, Way, measured
from ds_hydra.rivals.systems import hindsight, megatron
from ds_hydra.simulate.job import shipped_job
from ds_hydra.simulate.links import LinkModel
from ds_hydra.simulate.step import Simulator
from tools.systems.cells import EVALUATED, SHORT_MIXES, Cell, tflops
from tools.systems.measure import OURS, STATIC, Simulators, settings

CELLS = tuple(Cell("7b", 16, context, 100_000, mix) for context in (16384, 32768) for mix in SHORT_MIXES)
_SEQUENCES = 20_000


def emulated(cell: Cell, steps: int, *, timeout_s: float) -> Iterator[dict[str, object]]:
    """A row for the best static layout of measured schemes, and one for ours on the same schemes.

    AssertionError for a gradient that is wrong.
    """
    # The engine leaves out a sequence of one token, which has no target, and would draw other steps then.
    lengths = [length for length in cell.lengths(EVALUATED)[:_SEQUENCES] if length > 1]
    sampler = TokenBudgetSampler(lengths, cell.tokens)
    batches = [sampler.batch_lengths(step) for step in range(steps)]
    static = hindsight(megatron(cell, (Way(),)), batches, lambda plan, _: plan.predicted_ms)
    ours = next(settings(cell, measured(cell), Simulators(cell).ms)).configuration
    ms: dict[str, float] = {}
    for name, configuration in ((OURS, ours), (STATIC, static.configuration)):
        plans = [replace(configuration.plan(step, batches[step]), sequence_ids=tuple(sampler.batch(step)))
                 for step in range(steps)]  # fmt: skip
        used = list(dict.fromkeys(phase.shape for plan in plans for phase in plan.phases))
        found = replace(read_table_file(shipped(f"a800-{cell.model}")), table=measured(cell))
        job = shipped_job(f"a800-{cell.model}", found, LinkModel(NODE), cell.gpus, used)
        done = emulate_plans(job, plans, lengths, cell.tokens, timeout_s=timeout_s)
        simulator = Simulator(job)
        ms[name] = 1e3 * statistics.fmean(step.step_s for step in done)
        simulated = 1e3 * statistics.fmean(simulator.step(plan).step_s for plan in plans)
        yield {
            "cell": str(cell), "system": name, "emulated ms": round(ms[name]), "simulated ms": round(simulated),
            "emulated over ours": f"{ms[name] / ms[OURS]:.2f}", "TFLOP/s": round(tflops(cell, batches, ms[name])),
        }  # fmt: skip
