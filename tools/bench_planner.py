"""The planner's figures: CPU time, certified gaps, proposals, predictions, each against its aim.

Measured cost tables of LLaMA 7B and 32B on A800 and three length distributions (CommonCrawl-like, Wikipedia, a
pretraining histogram), 64 GPUs with 200K tokens a step and 1024 GPUs with 3.2M, 32K context, 20 candidate
strategies. Times are CPU times of one thread.

  python -m tools.bench_planner [--quick] [--json FILE] [--only PART ...]

The quick form leaves out, among others, the cold compilation, and of what HiGHS is worth the second size of 7B and
chunked candidates of 32B.

Exits non-zero if an aim is missed.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import ds_hydra.planner.kernels as kernels
from benchmarks.rivals.proposal import propose_by_program
from ds_hydra.commands.figures import run_parts, shipped
from ds_hydra.config.hydra_block import HydraConfig, PlannerConfig
from ds_hydra.costs.analytic import analytic_cost_table
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.data.lengths import WEB_PAGES, read_lengths, sample_batches
from ds_hydra.data.sampler import SortedPairs, TokenBudgetSampler
from ds_hydra.engine.plans import PlanSource
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.plan.simulate import simulate_plan
from ds_hydra.planner import Planner, PlannerOptions, PlanRecipe, StepPlan, validate_plan
from ds_hydra.planner.chunked import ChunkedSearch
from ds_hydra.planner.composing import budget_of, typical_batch
from ds_hydra.planner.cutting import Effort, cut_best, pipe_of
from ds_hydra.planner.exact import continuous_ms
from ds_hydra.planner.kernels.problem import Batch, PipelineKinds, scheme_arrays
from ds_hydra.planner.propose import (
    QUICK,
    THOROUGH,
    ProposalEffort,
    Wider,
    propose_strategies,
    usable_schemes,
    wider_shapes,
)
from ds_hydra.planner.recipe import warm_up
from ds_hydra.ranks.channel import Channel
from ds_hydra.simulate.job import SHIPPED, shipped_job
from ds_hydra.simulate.links import LinkModel
from ds_hydra.simulate.step import Simulator
from ds_hydra.watchdog import Activity
from tools import aims, machine
from tools.machine import busy
from tools.systems.cells import SEEN_BEFORE, Cell
from tools.systems.measure import Simulators, all_schemes, exposed_of, layers_of, proposed

Strategies = tuple[StrategyShape, ...]
TABLES = Path(__file__).resolve().parents[1] / "examples" / "cost_tables"
CONTEXT = 32768
DATA = {
    "CommonCrawl-like": WEB_PAGES,
    "Wikipedia": str(TABLES / "wikipedia_lengths.txt"),
    "pretraining": str(TABLES / "pretraining_length_histogram.csv"),
}


@dataclass
class Figures:
    """What was measured: rows of the table, and the aims that were missed."""

    missed: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def note(self, what: str, value: str, aim: str, met: bool) -> None:
        self.rows.append({"figure": what, "measured": value, "aim": aim, "met": "yes" if met else "NO"})
        if not met:
            self.missed.append(f"{what}: {value} (aim {aim})")
        print(f"  {what}: {value} (aim {aim})", flush=True)

    def limited(self, what: str, value: float, aim: float) -> None:
        """A time of CPU, in seconds or milliseconds, against its aim on this machine."""
        most = machine.limit(aim)
        self.note(what, f"{value:.3g}", f"<= {most}", value <= most.here)


@dataclass(frozen=True)
class Workload:
    """One cost table, one kind of data, one size."""

    model: str
    data: str
    num_gpus: int
    table: CostTable

    @classmethod
    def of(cls, model: str, data: str, num_gpus: int) -> Workload:
        return cls(model, data, num_gpus, CostTable.load(TABLES / f"llama_{model}_a800.json"))

    @property
    def tokens(self) -> int:
        return 3125 * self.num_gpus

    def sample(self, seed: int) -> list[int]:
        return [int(x) for x in read_lengths(DATA[self.data], CONTEXT, 60_000, seed).lengths]

    def batches(self, count: int, seed: int = 77) -> list[np.ndarray]:
        """Batches that no proposal has seen."""
        return sample_batches(self.sample(seed), self.tokens, count, seed, CONTEXT)

    def propose(self, thorough: bool, *, wider: bool = False) -> tuple[Strategies, float]:
        """Our strategies from another sample of the data, 20 of whole sequences and as many chunked ones if `wider`,
        and the CPU seconds that took."""
        sample, started = self.sample(1), time.thread_time()
        effort, more = THOROUGH if thorough else QUICK, Wider(wider_shapes(self.table)) if wider else None
        found = propose_strategies(
            self.table, self.num_gpus, sample, self.tokens, CONTEXT, tp_across_nodes=True, effort=effort, wider=more
        )
        return found, time.thread_time() - started

    def planner(self, strategies: Strategies, **options: Any) -> Planner:
        """A planner that reads its own CPU time."""
        return Planner(self.table, strategies, PlannerOptions(kernels="compiled", **options), cpu_s=time.thread_time)

    def plan(self, strategies: Strategies, batches: list[np.ndarray]) -> Iterator[tuple[StepPlan, float]]:
        """Plans of the batches, each with its CPU ms."""
        planner = self.planner(strategies)
        for step, batch in enumerate(batches):
            lengths = batch.tolist()
            started = time.thread_time()
            plan = planner.plan(step, range(len(lengths)), lengths)
            yield plan, (time.thread_time() - started) * 1e3

    def __str__(self) -> str:
        return f"{self.model} {self.data} {self.num_gpus}"


_FIRST_PLAN = """
import time; began = time.process_time()
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import StrategyShape
import sys, hashlib, random
table = CostTable.load(sys.argv[1])
texts = ("4*tp16", "tp16 + 2*tp8 + 8*tp4", "8*tp4pp2", "2*tp8 + 12*tp4")
planner = Planner(table, [StrategyShape.parse(text) for text in texts],
                  PlannerOptions(kernels="compiled"))
draw, digest = random.Random(7), hashlib.sha256()
for step in range(8):
    lengths = [min(32768, int(draw.lognormvariate(6.22, 1.233)) + 1) for _ in range(190)]
    plan = planner.plan(step, range(190), lengths)
    if step == 0:
        first = time.process_time() - began
    digest.update(plan.to_json().encode())
print(first, digest.hexdigest())
"""


def first_plan(cache: str | None = None, hash_seed: int = 0) -> tuple[float, str]:
    """CPU seconds from a fresh interpreter to the first plan, and a digest of eight plans."""
    env = {**os.environ, "PYTHONHASHSEED": str(hash_seed), **({"NUMBA_CACHE_DIR": cache} if cache else {})}
    command = [sys.executable, "-c", _FIRST_PLAN, str(TABLES / "llama_32b_a800.json")]
    root = Path(__file__).resolve().parents[1]
    out = subprocess.run(command, env=env, cwd=root, check=True, capture_output=True, text=True).stdout.split()
    return float(out[0]), out[1]


def bench_start(figures: Figures, quick: bool) -> None:
    """Start-up with a warm cache, cold compilation, and the same plans in several runs, some of them under load."""
    warm = [first_plan(hash_seed=run) for run in range(3)]
    with busy(os.cpu_count() or 1):
        loaded = [first_plan(hash_seed=run) for run in range(3, 4 if quick else 5)]
    seconds = statistics.median(s for s, _ in warm)
    figures.limited("import and first plan, warm cache, CPU s", seconds, aims.FIRST_PLAN_S)
    same = len({digest for _, digest in warm + loaded}) == 1
    figures.note(f"same plans in {len(warm + loaded)} runs, {len(loaded)} under load", str(same), "True", same)
    if not quick:
        with tempfile.TemporaryDirectory() as cache:
            print(f"  cold compile: {first_plan(cache)[0]:.0f} s of CPU time")


# Model, GPUs, what strategies were proposed for, what lengths come then, and the share of a step that is to be saved.
SHIFT = "CommonCrawl-like"
WHOLE = (
    ("7b", 16, "pretraining", "pretraining", aims.COMPOSED_GAIN),
    ("7b", 64, "pretraining", "pretraining", aims.COMPOSED_GAIN),
    ("32b", 64, SHIFT, "pretraining", aims.COMPOSED_SHIFT_GAIN),
)
CHUNKED_HIGHS = (("32b", 64, SHIFT, SHIFT), ("7b", 16, "pretraining", "pretraining"), ("32b", 64, SHIFT, "pretraining"))
_STEPS = 10  # in which a few have a use for composed strategies: of three, one decides
_PLANS = "from tools.bench_planner import digest_of_plans; print(digest_of_plans())"


def bench_highs(figures: Figures, quick: bool) -> None:
    """Steps, HiGHS's CPU time, and equal plans on a busy machine."""
    for model, gpus, before, come, aim in WHOLE[::2] if quick else WHOLE:
        _whole(figures, Workload.of(model, before, gpus), Workload.of(model, come, gpus), aim)
    for model, gpus, before, come in CHUNKED_HIGHS[1:2] if quick else CHUNKED_HIGHS:
        _chunked(figures, Workload.of(model, before, gpus), Workload.of(model, come, gpus))
    _busy(figures, (1 if quick else 2) * (os.cpu_count() or 1))


def _whole(figures: Figures, proposed: Workload, come: Workload, aim: float) -> None:
    """Candidates of whole sequences: 60 batches, since few of them gain much and most nothing."""
    strategies, batches = proposed.propose(False)[0], come.batches(60)
    alone, composing = come.planner(strategies), come.planner(strategies, highs="composes")
    before = [alone.plan(step, range(len(b)), b.tolist()).predicted_ms for step, b in enumerate(batches)]
    made = [composing.made(step, range(len(b)), b.tolist()) for step, b in enumerate(batches)]
    after = [one.plan.predicted_ms for one in made]
    shares = [one.highs for one in made if one.highs is not None]
    what = str(come) if proposed.data == come.data else f"{come}, proposed for {proposed.data}"
    gain, worst = 1.0 - fmean(after) / fmean(before), max(a / b for a, b in zip(after, before, strict=True))
    print(f"{what}: step {fmean(before):.0f} -> {fmean(after):.0f} ms, {sum(s.new_strategy for s in shares)} of "
          f"{len(batches)} steps under a new strategy")  # fmt: skip
    figures.note(f"step below the same pool's, {what}", f"{gain:.2%}", f">= {aim:.1%}", gain >= aim)
    figures.note(f"step over the same pool's, worst, {what}", f"{worst:.3f}", "<= 1", worst <= 1.0)
    least = min(share.programs for share in shares) if len(shares) == len(batches) else 0
    figures.note(f"programs in a step, least, {what}", str(least), ">= 1", least >= 1)
    cpu = np.array([share.cpu_ms for share in shares])
    p90, of_step = float(np.percentile(cpu, 90)), float(cpu.mean()) / fmean(after)
    name = f"HiGHS, CPU ms in a step, p90 (worst {cpu.max():.0f}), {what}"
    figures.limited(name, p90, aims.HIGHS_MS)
    figures.limited(f"HiGHS, CPU over the step's predicted time, {what}", of_step, aims.HIGHS_SHARE)


def _chunked(figures: Figures, proposed: Workload, come: Workload) -> None:
    """Default candidates. Where composed strategies were searched, the candidates alone get as many tries."""
    strategies, batches = proposed.propose(False, wider=True)[0], come.batches(_STEPS)
    composing, alone = come.planner(strategies, highs="composes"), come.planner(strategies)
    budget = budget_of(come.table, strategies, composing.options.effort)
    more = Planner(come.table, strategies, alone.options, budget=budget._replace(tries=budget.tries * 3 // 2))
    before, after, searched = [], [], 0
    promising = ChunkedSearch.promising
    for step, batch in enumerate(batches):
        found: list[PipelineKinds] = []

        def noted(search: ChunkedSearch, *arguments: Any, into: list[PipelineKinds] = found) -> list[PipelineKinds]:
            into += promising(search, *arguments)
            return into

        with mock.patch.object(ChunkedSearch, "promising", noted):
            after.append(composing.plan(step, range(len(batch)), batch.tolist()).predicted_ms)
        searched += bool(found)
        control = more if found else alone
        before.append(control.plan(step, range(len(batch)), batch.tolist()).predicted_ms)
    what = str(come) if proposed.data == come.data else f"{come}, proposed for {proposed.data}"
    ratio = fmean(after) / fmean(before)
    print(f"{what}: step {fmean(before):.0f} -> {fmean(after):.0f} ms, composed ones searched in {searched} steps")
    figures.note(
        f"step over default pool's, same tries, {what}",
        f"{ratio:.4f}",
        f"<= {aims.COMPOSED_CHUNKED:.3f}",
        ratio < aims.COMPOSED_CHUNKED + 5e-5,
    )


def digest_of_plans() -> str:
    """Of eight plans with composed strategies."""
    come = Workload.of("7b", "pretraining", 64)
    planner = come.planner(come.propose(False)[0], highs="composes")
    made = [planner.made(step, range(len(b)), b.tolist()) for step, b in enumerate(come.batches(8))]
    assert any(one.highs is not None and one.highs.new_strategy for one in made), "no step had a use for one"
    return hashlib.sha256(b"".join(one.plan.digest() for one in made)).hexdigest()


def _busy(figures: Figures, others: int) -> None:
    """Plans of another process, beside so many busy ones, with other hashes."""
    with busy(others):
        command = [sys.executable, "-c", _PLANS]
        env, root = {**os.environ, "PYTHONHASHSEED": "7"}, Path(__file__).resolve().parents[1]
        loaded = subprocess.run(command, env=env, cwd=root, check=True, capture_output=True, text=True).stdout.strip()
    same = loaded == digest_of_plans()
    figures.note("composed plans are the same beside busy processes", str(same), "True", same)


class Variant(NamedTuple):
    """A row of the table; `parts` 0: 1F1B."""

    name: str
    parts: int
    slices: bool


VARIANTS = (
    Variant("1F1B, whole", 0, False),
    Variant("list, whole", 1, False),
    Variant("list, slices", 1, True),
    Variant("V, whole", 2, False),
    Variant("V, slices", 2, True),
)
SCHEMES = ("tp2pp4", "pp4", "tp4pp2", "tp4pp4", "tp2pp6", "tp2pp2")
_CUTTING = Effort(40, 200)


def dealt(lengths: list[int], cost: SchemeCost) -> Iterator[list[int]]:
    """The sequences that a scheme holds, longest first to the least loaded of its pipelines."""
    held = sorted((length for length in lengths if length <= cost.max_length), reverse=True)
    share = 3125 * cost.scheme.num_ranks
    pipelines: list[list[int]] = [[] for _ in range(max(1, round(sum(held) / share)))]
    loads = [0.0] * len(pipelines)
    for length, ms in zip(held, cost.sequence_ms(held).tolist(), strict=True):
        least = loads.index(min(loads))
        loads[least] += ms
        pipelines[least].append(length)
    return iter(pipelines)


def bench_overheads(figures: Figures, quick: bool) -> None:
    """Time of a pipeline over its pure work, the sum of a*l^2 + b*l, by schedule and scheme. A pipeline gets as many
    tokens as its share of the GPUs is of a step, in sequences that its scheme holds as a whole, so that all schedules
    run the same ones; each finds its own best micro-batches."""
    for data in list(DATA)[: 1 if quick else 3]:
        work = Workload.of("32b", data, 64)
        batches = [batch.tolist() for batch in work.batches(10)]
        for variant, name in ((variant, name) for variant in VARIANTS for name in SCHEMES[: 1 if quick else None]):
            over, aim = _overhead(work.table, name, variant, batches), aims.CHUNKED_WORK.get((variant.name, name))
            met, most = aim is None or over <= aim, "-" if aim is None else f"<= {aim}"
            figures.note(f"time over pure work, {variant.name} on {name}, {data}", f"{over:.3f}", most, met)


def _overhead(table: CostTable, name: str, variant: Variant, batches: list[list[int]]) -> float:
    scheme = ParallelScheme.parse(name)
    cost = table[scheme]
    found = []
    for batch in batches:
        for lengths in dealt(batch, cost):
            ms = _whole_ms(table, scheme, lengths) if not variant.parts else _list_ms(table, scheme, variant, lengths)
            found.append(ms / float(cost.sequence_ms(lengths).sum()))
    return statistics.fmean(found)


def _whole_ms(table: CostTable, scheme: ParallelScheme, lengths: list[int]) -> float:
    planner = Planner(table, [StrategyShape.of([scheme])], PlannerOptions(kernels="compiled"))
    return planner.plan(0, range(len(lengths)), lengths).predicted_ms


def _list_ms(table: CostTable, scheme: ParallelScheme, variant: Variant, lengths: list[int]) -> float:
    cost, tokens = table[scheme], np.array(lengths, dtype=np.int64)
    pipe = pipe_of(cost, table.shares(scheme), parts=variant.parts, slices=variant.slices)
    best = cut_best(kernels.compiled(), pipe, cost.sequence_ms(tokens), tokens, effort=_CUTTING)
    assert best is not None, f"{scheme} holds each of {lengths}"
    return best.us / 1e3


def bench_contexts(figures: Figures, quick: bool) -> None:
    """Contexts that no scheme holds whole: 32B on 64 GPUs with 200K tokens a step, of which one sequence is as long as
    the context."""
    table, tokens = CostTable.load(shipped("a800-32b")), 200_000
    effort, count = (ProposalEffort(4, 2, 10, 1, 30), 2) if quick else (QUICK, 6)
    for context in (65_536, 131_072):
        sample = read_lengths("lognormal:6.22,1.233", context, 60_000, 1).lengths.tolist()
        began, wider = time.thread_time(), Wider(wider_shapes(table, num_layers=60), layers=60)
        strategies = propose_strategies(
            table, 64, sample, tokens, context, tp_across_nodes=True, effort=effort, wider=wider
        )
        seconds = time.thread_time() - began
        planner, plans = Planner(table, strategies, PlannerOptions(kernels="compiled", layers=60)), []
        for step, batch in enumerate(sample_batches(sample, tokens - context, count, 77, context)):
            plans.append(planner.plan(step, range(len(batch) + 1), [context, *batch.tolist()]))
            validate_plan(plans[-1], table, 64)
        step_ms, again, gap = (fmean(getattr(plan, name) for plan in plans) for name in
                               ("predicted_ms", "recomputed", "gap"))  # fmt: skip
        print(f"  a context of {context}, where {table.max_length} fit whole: {len(strategies)} strategies, steps of "
              f"{step_ms:.0f} ms, {again:.1%} computed again, gap {gap:.1%}")  # fmt: skip
        figures.limited(f"proposal for a context of {context}, CPU s", seconds, aims.PROPOSAL_CHUNKED_S)


class Overheard(Channel):
    """The channel of one of 64 ranks that are not there: `texts` takes what rank 0 tells, for the other to read."""

    def __init__(self, rank: int, texts: list[str]):
        super().__init__(None, rank, 64)
        self._texts = texts

    def tell(self, text: str | None) -> str:
        """Rank 0's text."""
        if text:
            self._texts.append(text)
        return self._texts[-1]


def bench_waits(figures: Figures, quick: bool) -> None:
    """What `train_batch(sequences)` waits for between lengths and plan on 64 ranks: on rank 0 to have it, then on
    another to read and check it. Of five tries of a batch the shortest counts: others may use the processor."""
    table = CostTable.load(shipped("a800-32b"))
    strategies = tuple(
        map(StrategyShape.parse, ("4*tp16", "8*tp8", "2*tp16 + 8*tp4", "tp16 + 4*tp8 + 4*tp4", "16*tp4"))
    )
    lengths = read_lengths("lognormal:6.22,1.233", 32768).lengths.tolist()
    batches, told = sample_batches(lengths, 200_000, 10 if quick else 42, 0, 32768), list[str]()
    recipe = PlanRecipe(table, strategies)
    first, other = (
        PlanSource(
            recipe, HydraConfig(200_000, planner=PlannerConfig(ahead=ahead)), None, Overheard(rank, told), Activity()
        )
        for rank, ahead in ((0, 2), (1, 0))
    )

    def once(step: int, batch: tuple[int, ...]) -> float:
        began = time.perf_counter()
        first.given(step, batch)
        other.given(step, batch)
        return 1e3 * (time.perf_counter() - began)

    waited = [min(once(5 * number + again, tuple(batch.tolist())) for again in range(5))
              for number, batch in enumerate(batches)][2:]  # fmt: skip
    first.close()
    value, most = statistics.median(waited), machine.limit(aims.WAIT_FOR_PLAN_MS, waits=True)
    name = "a step of 64 ranks waits for its plan, ms by the clock, median"
    figures.note(name, f"{value:.1f}", f"<= {most}", value <= most.here)


def bench_simulator(figures: Figures, quick: bool) -> None:
    """CPU time of a simulated step of 3.2 million tokens on 1024 ranks, in a process where nothing is known of an
    earlier one. The least of some: what else the machine does adds up to a third."""
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for text, aim in aims.SIMULATOR_S.items():
            tries = pool.map(_simulated, [text] * (1 if quick else 3), chunksize=1)
            figures.limited(f"a simulated step of {text}, CPU s", min(map(max, tries)), aim)


def _simulated(text: str) -> list[float]:
    """CPU seconds of a step whose transfers are planned anew, and of one where they are known; by published costs of
    32B, and estimated ones for what has none."""
    strategy = StrategyShape.parse(text)
    schemes = {pipeline.scheme for pipeline in strategy.pipelines if pipeline.scheme}
    found = TableFile(analytic_cost_table(SHIPPED["a800-32b"].shape, schemes, 32768))
    lengths = read_lengths(shipped("pretraining"), 32768, seed=1).lengths.tolist()
    (batch,) = sample_batches(lengths, 3_200_000, 1, 1, 32768)
    plan = Planner(found.table, [strategy], PlannerOptions(kernels="pure")).plan(0, range(len(batch)), batch.tolist())
    job = shipped_job("a800-32b", found, LinkModel(8), strategy.num_ranks, [strategy])
    simulator, seconds = Simulator(job), []
    for _ in range(2):
        began = time.process_time()
        step = simulator.step(plan)
        assert step.peak_bytes is not None, "what is lazy is asked for"
        assert step.bubble_share + step.gap + step.exposed_s >= 0.0
        seconds.append(time.process_time() - began)
    return seconds


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


def measured_by(bench: Callable[[Figures, bool], None]) -> Callable[[bool, list[str]], list[dict[str, Any]]]:
    """A part of the benchmark, as the command runs it."""

    def part(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
        warm_up()
        figures = Figures(missed)
        bench(figures, quick)
        return figures.rows

    return part


def main() -> int:
    parts = {
        "plans": bench_plans,
        "chunked": bench_chunked,
        "overheads": bench_overheads,
        "contexts": bench_contexts,
        "growth": bench_growth,
        "beside": bench_beside,
        "reorder": bench_reordered,
        "program": bench_against_program,
        "start": bench_start,
        "highs": bench_highs,
        "waits": bench_waits,
        "simulator": bench_simulator,
    }
    return run_parts("bench_planner", __doc__, {name: measured_by(bench) for name, bench in parts.items()})


if __name__ == "__main__":
    sys.exit(main())
