"""The planner's figures: CPU time, certified gaps, proposals, predictions, each against its aim.

Measured cost tables of LLaMA 7B and 32B on A800 and three length distributions (CommonCrawl-like, Wikipedia, a
pretraining histogram), 64 GPUs with 200K tokens a step and 1024 GPUs with 3.2M, 32K context, 20 candidate
strategies. Times are CPU times of one thread.

  python -m tools.bench_planner [--quick] [--json FILE] [--highs-seconds S] [--only PART ...]

The quick form leaves out, among others, the cold compilation, and of what HiGHS is worth the second size of 7B and
chunked candidates of 32B.

Exits non-zero if an aim is missed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

import ds_hydra.planner.kernels as kernels
from benchmarks.rivals import kernels as rivals
from benchmarks.rivals.dispatch import ComparedDispatch
from benchmarks.rivals.proposal import propose_by_program
from ds_hydra.commands.figures import figures_parser, finish, print_table
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.data.lengths import sample_batches
from ds_hydra.data.sampler import SortedPairs, TokenBudgetSampler
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.simulate import simulate_plan
from ds_hydra.planner import Planner, PlannerOptions, StepPlan
from ds_hydra.planner.composing import budget_of, typical_batch
from ds_hydra.planner.exact import continuous_ms
from ds_hydra.planner.kernels.problem import Batch, scheme_arrays, scheme_row
from ds_hydra.planner.propose import QUICK, Wider, propose_strategies, usable_schemes, wider_shapes
from ds_hydra.planner.recipe import warm_up
from tools import aims
from tools.planner_parts import (
    CONTEXT,
    DATA,
    Figures,
    Strategies,
    Workload,
    bench_contexts,
    bench_highs,
    bench_overheads,
    bench_simulator,
    bench_start,
    bench_waits,
)  # fmt: skip
from tools.systems.cells import SEEN_BEFORE, Cell
from tools.systems.measure import Simulators, all_schemes, exposed_of, layers_of, proposed

# Strategies with pipelines, where packing and prediction are hard; and pools for dispatch against HiGHS.
PIPELINED = ("8*tp4pp2", "tp16 + 2*tp8pp3", "tp8pp3 + 10*tp4", "2*tp8pp2 + 8*tp4", "tp16 + tp8 + 8*tp4 + tp2pp4")
DISPATCHED = (
    "tp8 + 14*tp4", "2*tp8 + 12*tp4", "3*tp8 + 10*tp4", "tp16 + tp8 + tp4pp2 + 8*tp4", "tp16 + 2*tp8 + 8*tp4",
    "tp16 + tp8 + 8*tp4 + tp2pp4", "2*tp16 + tp8 + tp4pp2 + 2*tp4 + tp2pp4", *PIPELINED[:3],
)  # fmt: skip

_SMALL_STEP = 50_000  # tokens
# What growth is measured with: pinned, so that steps can be compared with those of earlier planners.
GROWN = (
    "tp16 + 2*tp8 + 8*tp4", "3*tp8 + 10*tp4", "2*tp8 + 12*tp4", "8*tp4pp2", "2*tp16 + 8*tp4",
    "2*tp8 + tp4pp2 + 10*tp4", "4*tp8 + 8*tp4", "8*tp8",
)  # fmt: skip


def bench_plans(figures: Figures, quick: bool) -> None:
    """Planning time, gap, proposal time, prediction and simulated step times."""
    models = ("32b",) if quick else ("7b", "32b")
    proposal: dict[tuple[int, bool], list[float]] = {}
    for gpus, aim_ms in aims.PLAN_MS.items():
        aim_gap = aims.PLAN_GAP[gpus]
        cpu: list[float] = []
        gaps: list[float] = []
        errors: list[float] = []
        for model in models:
            for data in DATA if gpus == 64 or not quick else list(DATA)[:1]:
                work = Workload.of(model, data, gpus)
                thorough = not (quick and gpus == 1024)
                for kind in {False, thorough}:
                    strategies, seconds = work.propose(kind)
                    proposal.setdefault((gpus, kind), []).append(seconds)
                batches = work.batches((9 if quick else 60) if gpus == 64 else (4 if quick else 12))
                plans = list(work.plan(strategies, batches))
                simulated = [plan.total_ms(simulate_plan(plan, work.table)) for plan, _ in plans]
                cpu += [ms for _, ms in plans]
                gaps += [plan.gap for plan, _ in plans]
                errors += [abs(plan.searched_ms / s - 1) for (plan, _), s in zip(plans, simulated, strict=True)]
                report_workload(figures, work, strategies, plans, simulated)
        p50, p90 = np.percentile(gaps, [50, 90])
        figures.limited(f"plan, CPU ms per step, {gpus} GPUs, median", statistics.median(cpu), aim_ms)
        figures.note(f"certified gap, {gpus} GPUs, median", f"{p50:.2%}", f"<= {aim_gap:.1%}", p50 <= aim_gap)
        if gpus == 64:
            figures.note("certified gap, 64 GPUs, p90", f"{p90:.2%}", "<= 5%", p90 <= 0.05)
        e50, e90 = np.percentile(errors, [50, 90])
        met = bool(e50 <= 0.01 and e90 <= 0.04)
        figures.note(f"formula vs simulated step, {gpus} GPUs", f"{e50:.2%} / {e90:.2%}", "<= 1% / 4%", met)
    for (gpus, thorough), aim in aims.PROPOSAL_S.items():
        if (gpus, thorough) in proposal:
            worst = max(proposal[gpus, thorough])
            figures.limited(f"proposal, {'thorough' if thorough else 'quick'}, {gpus} GPUs, CPU s, worst", worst, aim)


def report_workload(
    figures: Figures,
    work: Workload,
    strategies: Strategies,
    plans: list[tuple[StepPlan, float]],
    simulated: list[float],
) -> None:
    """One workload's line; for 32B on 64 GPUs the simulated step time is an aim."""
    mean, gap = statistics.fmean(simulated), statistics.median(plan.gap for plan, _ in plans)
    cpu = statistics.median(ms for _, ms in plans)
    used = len({plan.strategy for plan, _ in plans})
    print(f"{work}: {len(strategies)} strategies, {used} used; CPU {cpu:.1f} ms, gap {gap:.2%}, step {mean:.0f} ms")
    if work.model == "32b" and work.num_gpus == 64:
        aim = aims.SIMULATED_MS[work.data]
        figures.note(f"simulated step ms, 32B, 64 GPUs, {work.data}", f"{mean:.0f}", f"<= {aim:.0f}", mean <= aim)
        schemes = scheme_arrays(work.table)
        sizes = np.array([scheme.num_ranks for scheme in work.table.schemes])
        floors = [continuous_ms(Batch.of(p.lengths, work.table), schemes, sizes, 64) for p, _ in plans]
        print(f"  bound over all strategies, fractions allowed: {statistics.fmean(floors):.0f} ms")


def bench_chunked(figures: Figures, quick: bool) -> None:
    """Steps with slices, split backwards and V's, against those of whole sequences on the same batches."""
    sizes = [("32b", 64, 60), ("7b", 32, 60), ("32b", 1024, 3)]
    for model, gpus, count in sizes[:1] if quick else sizes:
        cpu: list[float] = []
        for data in list(DATA)[: 1 if quick else 3]:
            work = Workload.of(model, data, gpus)
            thorough = not quick and gpus < 1024
            batches = work.batches(6 if quick else count)
            before = [plan.predicted_ms for plan, _ in work.plan(work.propose(thorough)[0], batches)]
            strategies, seconds = work.propose(thorough, wider=True)
            plans = list(work.plan(strategies, batches))
            after = [plan.predicted_ms for plan, _ in plans]
            cpu += [ms for _, ms in plans]
            mean, gain = statistics.fmean(after), 1.0 - statistics.fmean(after) / statistics.fmean(before)
            gap = statistics.median(plan.gap for plan, _ in plans)
            print(f"{work}: proposed in {seconds:.1f} s, step {statistics.fmean(before):.0f} -> {mean:.0f} ms, "
                  f"gap {gap:.1%}, CPU {statistics.median(cpu):.0f} ms")  # fmt: skip
            worst = max(a / b for a, b in zip(after, before, strict=True))
            figures.note(f"chunked step over whole one, worst of {work}", f"{worst:.3f}", "<= 1", worst <= 1.0)
            if (model, gpus) == ("32b", 64):
                name, aim = f"chunked step ms, 32B, 64 GPUs, {data}", aims.CHUNKED_MS[data]
                figures.note(name, f"{mean:.0f}", f"<= {aim:.0f}", mean <= aim)
            else:
                least = aims.CHUNKED_GAIN[data] if gpus < 1024 else 0.08
                figures.note(f"chunked step below whole one, {work}", f"{gain:.1%}", f">= {least:.0%}", gain >= least)
        name = f"chunked plan, CPU ms, {model} {gpus} GPUs, median"
        figures.limited(name, statistics.median(cpu), aims.CHUNKED_PLAN_MS[gpus])


def bench_growth(figures: Figures, quick: bool) -> None:
    """Planning of few and of many sequences on 64 ranks, and on 8,192; strategies are pinned, so that steps compare."""
    work, pinned = Workload.of("32b", "CommonCrawl-like", 64), [StrategyShape.parse(text) for text in GROWN]
    for tokens, aim_ms in aims.GROWTH_MS.items():
        many = tokens > max(aims.GROWTH_STEP_MS)
        if many and quick:
            continue
        mean, cpu, sequences = _planned(work, pinned, tokens, 2 if many else 4 if tokens > 200_000 else 12)
        name = f"{sequences} sequences, 64 ranks"
        figures.limited(f"plan, CPU ms per step, {name}, median", cpu, aim_ms)
        if tokens in aims.GROWTH_STEP_MS:
            share = mean / aims.GROWTH_STEP_MS[tokens]
            figures.note(
                f"step over that with long repairs, {name}", f"{share:.5f}", f"<= {aims.GROWTH_STEP}",
                share <= aims.GROWTH_STEP,
            )  # fmt: skip
    (_, few, _), (_, whole, sequences) = (_planned(work, pinned, tokens, 2) for tokens in (10_000_000, 100_000_000))
    name = f"plan, CPU of {sequences} sequences over that of a tenth"
    figures.note(name, f"{whole / few:.1f}", f"<= {aims.GROWTH_RATIO}", whole / few <= aims.GROWTH_RATIO)
    wide = [StrategyShape(128 * StrategyShape.parse(text).pipelines) for text in GROWN]
    _, cpu, sequences = _planned(work, wide, 128 * 200_000, 2)
    figures.limited(f"plan, CPU ms per step, {sequences} sequences, 8,192 ranks, median", cpu, aims.MANY_RANKS_MS)


_FAST = (
    Cell("7b", 32, CONTEXT, 50_000, "pretraining"),
    Cell("8b H100", 64, CONTEXT, 51_200, "rollouts", 1 / 4, 100.0),
    Cell("8b H200", 64, CONTEXT, 200_000, "CommonCrawl", 1 / 4, 50.0),
    Cell("a3b H200", 64, CONTEXT, 400_000, "pretraining", 1 / 8, 50.0),
)


def bench_beside(figures: Figures, quick: bool) -> None:
    """CPU time of plans over the steps that they are of, where steps are short: what takes longer training waits for.
    Slices, and strategies that HiGHS composes, as a job has them."""
    for cell in _FAST[1:2] if quick else _FAST:
        table, layers, simulators = all_schemes(cell), layers_of(cell), Simulators(cell)
        strategies = proposed(cell, table, wider=Wider(wider_shapes(table, num_layers=layers), layers=layers))
        options = PlannerOptions(kernels="compiled", layers=layers, highs="composes", simplest=0.01)
        typical = typical_batch(cell.lengths(SEEN_BEFORE), cell.tokens)
        planner = Planner(
            table, strategies, options, exposed_ms=[exposed_of(cell, one) for one in strategies],
            step_ms=partial(simulators.ms, table=table), budget=budget_of(table, strategies, options.effort, typical),
        )  # fmt: skip
        shares = []
        for step, batch in enumerate(cell.batches(9)):
            began = time.thread_time()
            plan = planner.plan(step, range(len(batch)), batch)
            shares.append(1e3 * (time.thread_time() - began) / simulators.ms(plan, table))
        # By this machine's CPU, since jobs have their own.
        share, most = statistics.median(shares[1:]), aims.PLAN_OVER_STEP
        figures.note(f"plan over step, {cell}, median", f"{share:.2f}", f"<= {most}", share <= most)


def _planned(work: Workload, strategies: Sequence[StrategyShape], tokens: int, count: int) -> tuple[float, float, int]:
    """Mean step (ms, as searched), median CPU ms, and sequences of so many batches of so many tokens."""
    batches = sample_batches(work.sample(77), tokens, count, 77, CONTEXT)
    plans = list(work.plan(tuple(strategies), [batches[0], *batches]))[1:]  # the first one warms up
    mean = statistics.fmean(plan.searched_ms for plan, _ in plans)
    return mean, statistics.median(ms for _, ms in plans), round(statistics.fmean(map(len, batches)))


def bench_reordered(figures: Figures, quick: bool) -> None:
    """Small steps as they are drawn, and sorted two by two (`hydra.reorder_steps`), of the same sequences."""
    for model, gpus in (("7b", 32), ("32b", 64)):
        work = Workload.of(model, "pretraining", gpus)
        wider = None if quick else Wider(wider_shapes(work.table))
        strategies = propose_strategies(
            work.table, gpus, work.sample(1), _SMALL_STEP, CONTEXT, tp_across_nodes=True, effort=QUICK, wider=wider
        )
        drawn, paired = (TokenBudgetSampler(work.sample(77), _SMALL_STEP, 77) for _ in range(2))
        means = []
        for order in (drawn, SortedPairs(paired)):
            batches = [np.array(order.batch_lengths(step)) for step in range(32)]
            means.append(statistics.fmean(plan.predicted_ms for plan, _ in work.plan(strategies, batches)))
        gain, least = means[0] / means[1], aims.REORDERED_GAIN
        name = f"steps of 50K tokens, drawn over sorted two by two, {work}"
        print(f"  {len(strategies)} strategies, step {means[0]:.0f} -> {means[1]:.0f} ms")
        figures.note(name, f"{gain:.3f}", f">= {least}", gain >= least)


def bench_against_program(figures: Figures, quick: bool) -> None:
    """Our proposal against the paper's dynamic program, on batches that neither has seen."""
    for data in list(DATA)[: 1 if quick else 3]:
        work = Workload.of("32b", data, 64)
        batches = work.batches(12 if quick else 60)
        ours = statistics.fmean(p.predicted_ms for p, _ in work.plan(work.propose(True)[0], batches))
        schemes = usable_schemes(work.table, 64, tp_across_nodes=True)
        theirs = []
        for with_overhead in (True, False):  # both readings of T(l); the better one counts
            started = time.thread_time()
            found = propose_by_program(work.table, 64, work.sample(1), CONTEXT, schemes, with_overhead=with_overhead)
            seconds = time.thread_time() - started
            theirs.append(statistics.fmean(p.predicted_ms for p, _ in work.plan(found, batches)))
            print(f"  dynamic program: {len(found)} strategies, {seconds:.1f} s, step {theirs[-1]:.0f} ms")
        gain = 1.0 - ours / min(theirs)
        figures.note(f"step below the paper's proposal, {data}", f"{gain:.1%}", ">= 10%", gain >= 0.10)


def bench_dispatch(figures: Figures, quick: bool, seconds: float) -> None:
    """Eq. 3: our search against HiGHS with a time limit, started from Algorithm 1's solution."""
    data, ratios, ours_ms = list(DATA), [], []
    for index in range(6 if quick else 20):
        work = Workload.of("32b", data[index % 3], 64)
        strategy = StrategyShape.parse(DISPATCHED[index % len(DISPATCHED)])
        longest = min(CONTEXT, max(work.table[pipeline].max_length for pipeline in strategy.pipelines))
        batch = sample_batches(work.sample(5 + index), work.tokens, 1, index, longest)[0]
        problem = ComparedDispatch.of(batch.tolist(), strategy, work.table)
        started = time.thread_time()
        found = problem.by_search()
        ours_ms.append((time.thread_time() - started) * 1e3)
        greedy = problem.by_algorithm_1()
        assert found is not None, "every sequence fits"
        assert greedy is not None, "every sequence fits"
        owner, bound = found
        exact = problem.by_highs(greedy, bound, seconds=seconds)
        assert exact is not None, "HiGHS starts from a solution"
        ratios.append(problem.ms(owner) / exact.ms - 1.0)
        print(
            f"  {DISPATCHED[index % len(DISPATCHED)]}: ours {problem.ms(owner):.0f} ms (bound {bound:.0f}), Alg. 1 "
            f"{problem.ms(greedy):.0f}, HiGHS {exact.ms:.0f} (bound {exact.bound_ms:.0f}): {ratios[-1]:+.2%}",
            flush=True,
        )
    worst, better = max(ratios), sum(r <= 1e-9 for r in ratios) / len(ratios)
    name = f"dispatch vs {seconds:g} s of HiGHS on Eq. 3"
    figures.note(f"{name}, worst", f"{worst:+.2%}", "<= +1%", worst <= 0.01)
    figures.note(f"{name}, as good or better", f"{better:.0%}", ">= 50%", better >= 0.5)
    print(f"  our dispatch takes {statistics.median(ours_ms):.2f} ms of CPU time")


def bench_packing(figures: Figures, quick: bool) -> None:
    """Share of pipelines whose packing is certified within 1%, by our times and by those of Hydraulis."""
    by: dict[str, tuple[kernels.Kernels, float]] = {
        "flow shop": (kernels.compiled(), 0.97), "Eq. 1": (rivals.compiled(), 0.80),
    }  # fmt: skip
    for formula, (kernel, aim) in by.items():
        close: list[bool] = []
        for data in DATA:
            work = Workload.of("32b", data, 64)
            for text in PIPELINED:
                strategy = StrategyShape.parse(text)
                longest = min(CONTEXT, max(work.table[p].max_length for p in strategy.pipelines))
                batches = sample_batches(work.sample(3), work.tokens, 2 if quick else 12, 3, longest)
                for plan, _ in work.plan((strategy,), batches):
                    close += [gap <= 0.01 for gap in packing_gaps(kernel, work.table, plan)]
        share = sum(close) / len(close)
        name = f"packing certified within 1%, {formula}, {len(close)} pipelines"
        figures.note(name, f"{share:.1%}", f">= {aim:.0%}", share >= aim)


def bench_prediction(figures: Figures, quick: bool) -> None:
    """Predicted against simulated times of single pipelines with PP > 1, where the flow shop is an estimate."""
    errors: list[float] = []
    for data in DATA:
        work = Workload.of("32b", data, 64)
        for text in PIPELINED:
            strategy = StrategyShape.parse(text)
            longest = min(CONTEXT, max(work.table[p].max_length for p in strategy.pipelines))
            batches = sample_batches(work.sample(3), work.tokens, 4 if quick else 12, 3, longest)
            for plan, _ in work.plan((strategy,), batches):
                simulated = simulate_plan(plan, work.table)
                for pipeline, ms in zip(plan.pipelines, simulated, strict=True):
                    if pipeline.shape.pp > 1 and ms > 0:
                        errors.append(pipeline.predicted_ms / ms - 1.0)
    p50, p90 = np.percentile(np.abs(errors), [50, 90])
    name = f"predicted vs simulated, {len(errors)} pipelines with PP > 1, of fixed strategies"
    figures.rows.append((name, f"{p50:.2%} / {p90:.2%}", "-", "-"))
    print(f"  {name}: {p50:.2%} / {p90:.2%}, {min(errors):+.2%} .. {max(errors):+.2%}: never predicted too short")


def packing_gaps(kernel: kernels.Kernels, table: CostTable, plan: StepPlan) -> Iterator[float]:
    """Certified gap of the packing of each pipeline that runs something."""
    schemes = scheme_arrays(table)
    for pipeline in plan.pipelines:
        lengths = sorted((tokens for batch in pipeline.microbatches for tokens in batch.lengths), reverse=True)
        if not lengths:
            continue
        k = table.costs.index(table[pipeline.shape])
        tokens = np.array(lengths, dtype=np.int64)
        work = table.costs[k].sequence_ms(tokens)
        bins = np.empty(len(lengths), dtype=np.int64)
        v, ms, bound, _ = kernel.pack(scheme_row(schemes, k), work, tokens, 40, bins)
        if ms > bound * 1.01:
            bound = max(bound, kernel.packing_bound(scheme_row(schemes, k), work, tokens, v, ms))
        yield ms / bound - 1.0


def main() -> int:
    parser = figures_parser(__doc__)
    parser.add_argument("--highs-seconds", type=float, help="limit of each HiGHS solution of Eq. 3 (60; quick: 1)")
    parts: dict[str, Callable[[Figures, bool], None]] = {
        "plans": bench_plans,
        "chunked": bench_chunked,
        "overheads": bench_overheads,
        "contexts": bench_contexts,
        "growth": bench_growth,
        "beside": bench_beside,
        "reorder": bench_reordered,
        "program": bench_against_program,
        "packing": bench_packing,
        "prediction": bench_prediction,
        "start": bench_start,
        "highs": bench_highs,
        "waits": bench_waits,
        "simulator": bench_simulator,
        "dispatch": lambda f, q: bench_dispatch(f, q, args.highs_seconds or (1.0 if q else 60.0)),
    }
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), help="run these parts only")
    args = parser.parse_args()
    warm_up()
    began, figures = time.perf_counter(), Figures()
    for name in args.only:
        print(f"{name}:")
        parts[name](figures, args.quick)
    print()
    print_table(("figure", "measured", "aim", "met"), figures.rows)
    record = {"rows": [dict(zip(("figure", "measured", "aim", "met"), row, strict=True)) for row in figures.rows]}
    summary = f"{len(figures.rows)} figures in {time.perf_counter() - began:.0f} s"
    return finish("bench_planner", summary, record, figures.missed, args.json)


if __name__ == "__main__":
    sys.exit(main())
