"""Pulls and pushes that nothing overlaps, by the event simulation with the engine's own plans and order of steps.

A 32B model on 64 GPUs in 8 nodes, a step of 4 s of computing in equal micro-batches. What is exposed is what the step
takes beyond one whose links take no time. Beside it: all of the pull before the first forward, and all of the push
after the last backward. Pushes wait for memory as on devices, beside computing; on a host those that find none begin
when computing is over. On one cable both communicators of pulls and pushes share a rank's link: the simulator counts
that coarsely, up to 3 % of a step above emulated clusters, so it is shown and not judged.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, StepPlan
from ds_hydra.simulate.job import SHIPPED, SimulatedJob, llama_plan
from ds_hydra.simulate.links import INSIDE, LinkModel, Speed
from ds_hydra.simulate.pipeline import StrategyTransfers
from ds_hydra.simulate.step import Networks, Simulator, pull_in_order, push_in_order
from tools import aims
from tools.devices.table import Table

NUM_RANKS, NODE_SIZE, MODEL = 64, 8, "a800-32b"
STEP_S, MICROBATCHES, TOKENS = 4.0, 8, 4096
STRATEGIES = ("8*tp8", "8*tp4pp2")
FREE = LinkModel(NODE_SIZE, Speed(0.0, 1e18), Speed(0.0, 1e18))


def overlap(quick: bool) -> Table:
    """What is exposed of pull and push; quick: the same."""
    table = Table(
        f"exposed pull and push of a step of {STEP_S:.0f} s: 32B, {NUM_RANKS} ranks on nodes of {NODE_SIZE}",
        [
            "strategy",
            "GB/s between",
            "pull s",
            "push s",
            "of the step",
            "aim",
            "on one cable",
            "on a host",
            "without overlap s",
            "of the step ",
        ],
    )
    for text in STRATEGIES:
        shape = StrategyShape.parse(text)
        free_s, _ = _step(shape, FREE)
        for rate, aim in aims.EXPOSED.items():
            links = LinkModel(NODE_SIZE, INSIDE, Speed(20e-6, rate))
            cable_s, _ = _step(shape, replace(links, one_cable=True))
            step_s, pull_s = _step(shape, links)
            host_s, _ = _step(shape, links, lanes=False)
            alone_s = _alone(shape, links)
            share, on_cable, on_host = ((seconds - free_s) / seconds for seconds in (step_s, cable_s, host_s))
            table.rows.append(
                [text, round(rate / 1e9), round(pull_s, 3), round(step_s - free_s - pull_s, 3), f"{share:.1%}",
                 f"{aim:.0%}", f"{on_cable:.1%}", f"{on_host:.1%}", round(alone_s, 3),
                 f"{alone_s / (free_s + alone_s):.1%}"]
            )  # fmt: skip
            if share > aim:
                table.missed.append(f"{text} with {rate / 1e9:.0f} GB/s: {share:.1%} is exposed (aim {aim:.0%})")
    return table


def job_of(shape: StrategyShape, links: LinkModel, *, lanes: bool = True) -> SimulatedJob:
    """A job in which the pipelines of a strategy compute for STEP_S."""
    scheme = shape.pipelines[0].cost_key
    slots = MICROBATCHES + shape.pipelines[0].pp - 1
    cost = SchemeCost(scheme, 0.0, 1e3 * STEP_S / (slots * TOKENS), 0.0, TOKENS)
    model, found = SHIPPED[MODEL].shape, TableFile(CostTable((cost,)))
    return SimulatedJob(llama_plan(model), model.hidden, found, links, shape.num_ranks, lanes=lanes)


def plan_of(shape: StrategyShape) -> StepPlan:
    """A step of equal micro-batches."""
    count = MICROBATCHES * len(shape.pipelines)
    lengths = (TOKENS,) * count
    held = [MicroBatchPlan.of_whole([position], lengths) for position in range(count)]
    pipelines = tuple(
        PipelinePlan(pipeline, tuple(held[index :: len(shape.pipelines)]), 1e3 * STEP_S)
        for index, pipeline in enumerate(shape.pipelines)
    )
    return StepPlan(0, tuple(range(count)), lengths, (Phase(pipelines),), 1e3 * STEP_S)


def _step(shape: StrategyShape, links: LinkModel, *, lanes: bool = True) -> tuple[float, float]:
    """Seconds of a step, and the most that a rank waits for its pull."""
    found = Simulator(job_of(shape, links, lanes=lanes)).step(plan_of(shape))
    return found.step_s, float(found.ranks.pull.max())


def _alone(shape: StrategyShape, links: LinkModel) -> float:
    """Seconds of a pull and a push during which nobody computes."""
    job = job_of(shape, links)
    strategy = place_strategy(shape, NUM_RANKS, job.plan.num_layers)
    transfers = StrategyTransfers.of(job.plan, strategy, links, job.elements)
    begin = np.zeros(NUM_RANKS)
    pulled = pull_in_order(transfers, begin, Networks.of(NUM_RANKS, links), lanes=True)
    pull_s = max(float(np.maximum(hop.came, hop.left).max()) for hops in pulled for hop in hops)
    ready = np.zeros((len(transfers.pushes), NUM_RANKS))
    pushed, _ = push_in_order(transfers, ready, begin, Networks.of(NUM_RANKS, links), lanes=True)
    return pull_s + max(float(np.maximum(hop.came, hop.left).max()) for hops in pushed.values() for hop in hops)
