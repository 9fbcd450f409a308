"""Drawn jobs under a transport that forgives as little as NCCL does: all of them end, with the reference's numbers.

Strategies, schedules, phases, slices, sequence parallel ranks, node sizes and model families are drawn together. All
exchanges and collectives of a rank run in one queue in the order of their start, pushes have room for one at a time,
and everybody is slowed at random; the other rules are drawn. A job that would wait for ever on a network with these
rules stands still, and each is compared with plain training in one process.

The last rows bring back what once decided where a push starts, the answer of a device, which each rank draws for
itself: the same rules must find that it stands still.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest import mock

from ds_hydra.plan.step_plan import THEN
from ds_hydra.zero_hetero import scratch_plan
from tests.support.case import Case
from tests.support.equivalence import compare, num_ranks
from tests.support.mutated_order import train_with_polls
from tests.support.random_cases import random_case
from tests.support.strict import Rules, StrictError, one_push_at_a_time
from tools.devices.table import Table

DRAWS, QUICK_DRAWS, FIRST_SEED = 24, 1, 1001  # jobs of two or three strategies; the first has every kind of them
POLLING = ("2*tp2", "2*sp2", "tp2pp2")
_STALL_S, _POLLS_STALL_S, _TIMEOUT_S = 120.0, 6.0, 400.0
_KINDS: dict[str, Callable[[Case], bool]] = {
    "strategies with tensor parallel ranks": lambda case: case.has_tp,
    "with sequence parallel ranks": lambda case: any("sp" in text.replace("sp1", "") for text in case.strategies),
    "in a list's order": lambda case: any("/list" in text for text in case.strategies),
    "as a V": lambda case: any("/v" in text for text in case.strategies),
    "with weight gradients apart": lambda case: any("/zb-h1" in text for text in case.strategies),
    "of several phases": lambda case: any(THEN in text for text in case.strategies),
    "in slices": lambda case: case.slices,
    "on several nodes": lambda case: (case.node_size or num_ranks(case)) < num_ranks(case),
    "all": lambda _: True,
}


@dataclass
class Found:
    """Of the draws of one kind."""

    draws: int = 0
    strategies: int = 0
    still: int = 0
    apart: int = 0


def drawn(number: int) -> tuple[Case, Rules]:
    """A job, and the rules that it runs under."""
    rng = random.Random(number)
    case = replace(random_case(number), name=f"draw {number}")
    if not any(THEN in text for text in case.strategies):  # the last strategy of several phases comes in step 3
        case = replace(case, steps=2)
    more = {name: rng.random() < 0.5 for name in ("connect", "lazy")}
    return case, Rules(one_queue=True, blocking=rng.random() < 0.2, sleeps=number, stall_s=_STALL_S, **more)


def run(case: Case, rules: Rules) -> tuple[bool, list[str]]:
    """Whether a job stands still, and in words what is wrong with it."""
    try:
        # Slices travel by themselves, as those of large models do.
        with one_push_at_a_time(), mock.patch.object(scratch_plan, "LARGE", 200):
            return False, compare(case, timeout=_TIMEOUT_S, strict=rules).missed(case.aims, case.name)
    except (StrictError, TimeoutError) as error:
        return True, [f"{case.name}, {' | '.join(case.strategies)}: {error}"]


def order(quick: bool) -> Table:
    """How many draws stand still, or are not equal to the reference; quick: a few of them."""
    count = QUICK_DRAWS if quick else DRAWS
    table = Table(
        "one order of operations: drawn jobs, all that a rank starts in one queue, room for one push",
        ["drawn jobs", "jobs", "strategies", "stand still", "aim", "not equal to the reference", "aim "],
    )
    found = {kind: Found() for kind in _KINDS}
    for number in range(FIRST_SEED, FIRST_SEED + count):
        case, rules = drawn(number)
        still, wrong = run(case, rules)
        print(f"{case.name}, {' | '.join(case.strategies)}: {wrong or 'ok'}", file=sys.stderr, flush=True)
        table.missed.extend(wrong)
        for kind, one in found.items():
            if _KINDS[kind](case):
                one.draws += 1
                one.strategies += len(case.strategies)
                one.still += still
                one.apart += bool(wrong) and not still
    table.rows.extend([kind, one.draws, one.strategies, one.still, 0, one.apart, 0] for kind, one in found.items())
    for strategy in POLLING[: 1 if quick else None]:
        try:
            train_with_polls(strategy, _POLLS_STALL_S)
            still = False
            table.missed.append(f"{strategy}: pushes that ask a device do not stand still")
        except StrictError:
            still = True
        table.rows.append([f"{strategy}, pushes that ask a device", 1, 1, int(still), 1, "-", "-"])
    return table
