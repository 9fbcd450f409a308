"""What plans take whose costs are wrong between shapes, as a job begins and once it has corrected them.

  python -m tools.bench_wrong_costs [--quick] [--json FILE]

The published tables of LLaMA 7B and 32B on A800s are what machines take. A job has a table of its own, in which each
shape is off by a log-normal factor, its own or four fifths of it shared by all shapes of one TP; it proposes its
candidates and plans by that, learns from what its pipelines take, measured with the scatter of real ones, and corrects
its costs as jobs do. Its steps stand over those of a planner that has the same candidates and knows the true costs, and
over the best layout of one shape by trial on the true machine, its sequences balanced. Told apart are what candidates
take that were proposed by wrong costs, and what the preference for simple plans takes. Steps are of whole sequences,
without pulls and pushes, and HiGHS composes none.

Exits non-zero if an aim is missed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ds_hydra.commands.figures import figures_parser, finish, print_table
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.simulate import simulate_plan
from ds_hydra.planner import Planner, PlannerOptions, StepPlan
from ds_hydra.planner.fixed_layout import layouts_that_hold
from ds_hydra.planner.propose import QUICK, propose_strategies
from ds_hydra.report.record import StepWatch
from ds_hydra.rivals.costs import averaged
from tools import aims
from tools.systems.cells import SEEN_BEFORE, Cell
from tools.systems.measure import NOISE, all_schemes

SIMPLEST = 0.01  # as jobs have it
# Steps before any correction, those in which most is learnt, and those from 60 on. Of the others a few are run, those
# in which shapes are tried among them: they bring fewer observations than a job has.
FIRST, LEARNING, LATER = range(5), range(5, 20), range(60, 70)
STEPS = (*FIRST, *LEARNING, *range(30, 37), *range(46, 53), *LATER)
_SHARED = 0.8  # of the variance, where errors are shared


@dataclass(frozen=True)
class Case:
    """A machine, and how a table errs there."""

    cell: Cell
    sp: bool  # with Ulysses
    shared: bool

    def __str__(self) -> str:
        return f"{self.cell}, {'with SP, errors shared' if self.shared else 'errors of each shape'}"

    @cached_property
    def true(self) -> CostTable:
        """What steps take; what messages of SP leave exposed is in b, as in the tables that jobs measure."""
        rows = (averaged(cost, self.cell.lengths(SEEN_BEFORE)) for cost in all_schemes(self.cell).costs)
        return CostTable(tuple(cost for cost in rows if self.sp or cost.uniform.sp == 1), "true")

    @cached_property
    def batches(self) -> list[list[int]]:
        """That no proposal has seen."""
        return self.cell.batches(len(STEPS))

    def wrong(self, error: float, draw: int) -> CostTable:
        """A job's table: each shape off by a factor."""
        drawn = np.random.default_rng(draw)
        common = {tp: drawn.standard_normal() for tp in sorted({cost.uniform.tp for cost in self.true.costs})}

        def off(cost: SchemeCost) -> SchemeCost:
            own, share = drawn.standard_normal(), _SHARED if self.shared else 0.0
            z = math.sqrt(share) * common[cost.uniform.tp] + math.sqrt(1.0 - share) * own
            factor = math.exp(error * z)
            return replace(cost, a=cost.a * factor, b=cost.b * factor, c=cost.c * factor, floor=cost.floor * factor)

        return replace(self.true, costs=tuple(map(off, self.true.costs)))

    def candidates(self, table: CostTable) -> tuple[StrategyShape, ...]:
        """What a job with this table proposes."""
        cell = self.cell
        return propose_strategies(
            table, cell.gpus, cell.lengths(1), cell.tokens, cell.context, tp_across_nodes=True, effort=QUICK
        )

    def ms(self, plan: StepPlan) -> float:
        """What a plan takes on the machine."""
        return plan.total_ms(simulate_plan(plan, self.true))

    def knowing(self, simplest: float, strategies: Sequence[StrategyShape] = ()) -> list[float]:
        """Steps of the planner that knows the true costs, with these candidates, or those that it proposes by them."""
        planner = Planner(self.true, strategies or self.candidates(self.true),
                          PlannerOptions(kernels="compiled", simplest=simplest))  # fmt: skip
        return [self.ms(planner.plan(step, range(len(b)), b)) for step, b in zip(STEPS, self.batches, strict=True)]

    @cached_property
    def by_trial(self) -> list[float]:
        """The LATER steps of the best layout of one shape."""
        later, steps = self.batches[-len(LATER) :], list[list[float]]()
        for one in layouts_that_hold(self.true, self.cell.gpus, max(map(max, self.batches))):
            planner = Planner(self.true, [one], PlannerOptions(kernels="compiled"))
            steps.append([self.ms(planner.plan(0, range(len(b)), b)) for b in later])
        return min(steps, key=fmean)

    def job(self, table: CostTable, strategies: Sequence[StrategyShape], draw: int) -> list[float]:
        """Steps of a job that has this table and these candidates, and corrects its costs."""
        watch, drawn = StepWatch("apply", TableFile(table), 32, 0, measured=True), np.random.default_rng(draw)
        tables, found = [(0, table)], list[float]()
        options, known = PlannerOptions(kernels="compiled", simplest=SIMPLEST), dict[int, Planner]()
        for step, batch in zip(STEPS, self.batches, strict=True):
            number = max(n for n, (first, _) in enumerate(tables) if first <= step)
            if number not in known:
                known[number] = Planner(tables[number][1], strategies, options)
            plan = known[number].plan(step, range(len(batch)), batch)
            pipeline_ms = simulate_plan(plan, self.true)
            found.append(plan.total_ms(pipeline_ms))
            seen = [ms * max(0.5, 1.0 + NOISE * drawn.standard_normal()) for ms in pipeline_ms]
            watch.fields(plan, pipeline_ms=seen, stage_ms=(), step_ms=plan.total_ms(seen), moved_bytes=0)
            tables += [(one.first, watch.apply(one)) for one in watch.corrections(step + 1)]
        return found


CASES = (
    Case(Cell("32b", 64, 32768, 200_000, "CommonCrawl"), sp=False, shared=False),
    Case(Cell("32b", 64, 32768, 200_000, "pretraining"), sp=True, shared=True),
    Case(Cell("7b", 32, 32768, 200_000, "pretraining"), sp=True, shared=True),
    Case(Cell("7b", 32, 32768, 200_000, "pretraining"), sp=False, shared=False),
)


def over_a_hundred(job: Sequence[float], knowing: Sequence[float]) -> float:
    """A job's first hundred steps over those of the planner that knows: steps that were not run are like later ones."""
    run, later = len(STEPS) - len(LATER), 100 - len(STEPS) + len(LATER)
    hundred = (sum(ms[:run]) + later * fmean(ms[run:]) for ms in (job, knowing))
    return next(hundred) / next(hundred)


class Found(NamedTuple):
    """Of one case and one error: means over draws, of times over those of the planner that knows."""

    first: float
    learning: float
    later: float
    worst: float  # draw, later
    trial: float  # later, over the best layout by trial, the worst draw
    proposed: float  # of the planner that knows, with the job's candidates over its own


def measured(case: Case, error: float, draws: int, best: Sequence[float]) -> Found:
    """Jobs of so many draws of the error; `best` are steps of the planner that knows, by its own candidates."""
    found = list[tuple[float, ...]]()
    for draw in range(draws):
        table = case.wrong(error, draw)
        strategies = case.candidates(table)
        job, knowing = case.job(table, strategies, draw), case.knowing(SIMPLEST, strategies)
        parts = [slice(STEPS.index(steps[0]), STEPS.index(steps[-1]) + 1) for steps in (FIRST, LEARNING, LATER)]
        over = [fmean(job[at]) / fmean(knowing[at]) for at in parts]
        found.append((*over, fmean(job[parts[-1]]) / fmean(case.by_trial), sum(knowing) / sum(best)))
    first, learning, later, trial, proposed = zip(*found, strict=True)
    return Found(fmean(first), fmean(learning), fmean(later), max(later), max(trial), fmean(proposed))


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 where an aim is missed."""
    args = figures_parser(__doc__, "python -m tools.bench_wrong_costs").parse_args(arguments)
    cases, draws = (CASES[3:], 2) if args.quick else (CASES, 8)
    rows, missed = list[tuple[str, ...]](), list[str]()

    def judge(what: str, value: float, most: float) -> str:
        if value > most:
            missed.append(f"{what}: {value:.4f}, not <= {most}")
        return f"{value:.3f}"

    for case in cases:
        knowing, without = case.knowing(SIMPLEST), case.knowing(0.0)
        rule = sum(knowing) / sum(without)
        true = over_a_hundred(case.job(case.true, case.candidates(case.true), 0), knowing)
        rows.append((
            str(case), "0 %", judge(f"{case}, true costs", true, aims.CORRECTION_COSTS), "-", "-", "-", "-", "-",
            judge(f"{case}, simple plans", rule, 1.0 + SIMPLEST),
        ))  # fmt: skip
        print(*rows[-1], sep=" | ", flush=True)
        for error in (0.1, 0.2):
            found = measured(case, error, draws, knowing)
            what = f"{case}, {error:.0%}"
            first = f"{found.first:.3f}" if error > 0.1 else judge(f"{what}, first", found.first, aims.FIRST_STEPS)
            rows.append((
                str(case), f"{error:.0%}", first, f"{found.learning:.3f}",
                judge(f"{what}, later", found.later, aims.LATER_STEPS[error]), f"{found.worst:.3f}",
                judge(f"{what}, over the best layout by trial", found.trial, aims.OVER_TRIAL),
                f"{found.proposed:.3f}", "-",
            ))  # fmt: skip
            print(*rows[-1], sep=" | ", flush=True)
    headers = ("machine", "error", "first steps", "learning", "from step 60 on", "worst draw", "over best by trial",
               "candidates", "simple plans")  # fmt: skip
    print_table(headers, rows)
    return finish("bench_wrong_costs", f"{len(cases)} machines, {draws} draws", {"rows": rows}, missed, args.json)


if __name__ == "__main__":
    sys.exit(main())
