"""Micro-batches and a number of stages in, 1F1B with split backwards (ZB-H1) out. Pure: no torch."""

from __future__ import annotations

from ds_hydra.pipe.schedules.actions import Action, Order
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.one_f_one_b import one_f_one_b
from ds_hydra.zero_hetero.errors import PlanError


def zb_h1(batches: Batches, num_stages: int) -> tuple[Order, ...]:
    """1F1B with backwards split: input gradients at the places of the backwards, weight gradients some places later.

    ZB-H1 of Qi et al. (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.2). Stage s begins the weight
    gradient of a micro-batch when it has s more input gradients. So a gradient reaches the stages before it sooner, and
    the weight gradients that a later stage has saved up fill the time in which it would wait. The last of 3 stages,
    4 micro-batches: F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3. Every stage keeps what the first one keeps under 1F1B: PP - s
    micro-batches before their input gradient, and s before their weight gradient. It is made of numbers alone; "list"
    is made of times. PlanError for a V.
    """
    if batches.parts != 1:
        raise PlanError("schedule zb-h1: it is for stages of one range of layers; a V runs by the schedule list")
    # With F, I and W of 1 ms each, 3 stages and 4 micro-batches take 12 + 2 * 3 = 18 ms by 1F1B and 12 + 2 = 14 here:
    # the first forward still has to come down the pipeline, but the last gradient comes up beside weight gradients.
    return tuple(_delayed(order, stage) for stage, order in enumerate(one_f_one_b(batches, num_stages)))


def _delayed(order: Order, delay: int) -> Order:
    """An order whose backwards are split, each weight gradient `delay` backwards behind its input gradient."""
    delayed: list[Action] = []
    backwards = [action.microbatch for action in order if action.kind == "backward"]
    done = 0
    for action in order:
        if action.kind != "backward":
            delayed.append(action)
            continue
        delayed.append(Action("input_gradient", action.microbatch))
        if done >= delay:
            delayed.append(Action("weight_gradient", backwards[done - delay]))
        done += 1
    left = backwards[max(0, done - delay) :]
    return (*delayed, *(Action("weight_gradient", microbatch) for microbatch in left))
