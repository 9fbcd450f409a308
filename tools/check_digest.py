"""Digests of what training and planning compute, to show that a change of the code changed no bit of it.

Two kinds of rows: the parameters after the last step of every FP64 case of the training table (trained on forked
ranks), and the plans of 200 batches (strategy, sequences of each micro-batch, `predicted_ms`), in a form that does not
depend on how the code lays them out. Digests hold for one machine and one set of versions: write them before a change
and compare after it.

  python -m tools.check_digest --json before.json      # on the code as it was
  python -m tools.check_digest --against before.json   # on the code as it is

Exits non-zero if a row differs from the file, is missing on either side, or cannot be computed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_hydra.commands.figures import figures_parser, finish, print_table
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.data.lengths import read_lengths
from ds_hydra.planner import Planner, PlannerOptions, StepPlan
from ds_hydra.planner.propose import propose_strategies
from ds_hydra.testing import float64_throughout, run_ranks
from tests.support.case import Case
from tests.support.cases import CASES
from tests.support.equivalence import make_engine, num_ranks, samples_of
from tests.support.families import reference_model

TABLES = Path(__file__).resolve().parents[1] / "examples" / "cost_tables"
CONTEXT = 32768
NUM_PLANS = 200
QUICK_PLANS = 40
QUICK_CASES = ("fixed tp4 + pp2 + tp1", "qwen3", "stages of different tp and sp", "nodes of 2 ranks")


def main(arguments: list[str] | None = None) -> int:
    parser = figures_parser(__doc__)
    parser.add_argument("--against", type=Path, metavar="FILE", help="digests to compare with, as --json wrote them")
    parser.add_argument("--only", choices=["cases", "plans"], help="one kind of rows")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    before = json.loads(options.against.read_text())["digests"] if options.against else None
    digests: dict[str, str] = {}
    missed: list[str] = []
    rows: list[list[object]] = []
    for kind, compute in (("plans", plan_digests), ("cases", case_digests)):
        if options.only in (None, kind):
            for name, digest, seconds in compute(options.quick):
                digests[name] = digest
                state = _state(name, digest, before)
                rows.append([kind, name, digest[:12], state, seconds])
                if state not in ("new", "equal"):
                    missed.append(f"{name}: {state}")
    if before is not None and not options.quick:
        wanted = {
            name for name in before if options.only is None or name.startswith("plans ") == (options.only == "plans")
        }
        missed += [f"{name}: not computed any more" for name in sorted(wanted - set(digests))]
    print_table(["kind", "row", "digest", "state", "s"], rows)
    return finish("check_digest", f"{len(rows)} rows", {"digests": digests}, missed, options.json)


def _state(name: str, digest: str, before: dict[str, str] | None) -> str:
    if digest.startswith("failed"):
        return digest
    if before is None:
        return "new"
    if name not in before:
        return "not in the file"
    return "equal" if before[name] == digest else "DIFFERS"


def case_digests(quick: bool) -> Iterator[tuple[str, str, float]]:
    """Name, digest of all parameters and seconds, for every FP64 case of the training table."""
    for case in CASES:
        if case.dtype == "float64" and (not quick or case.name in QUICK_CASES):
            began = time.perf_counter()
            try:
                digest = _trained(case)
            except Exception as error:
                traceback.print_exc()
                digest = f"failed: {type(error).__name__}"
            yield case.name, digest, time.perf_counter() - began


def _trained(case: Case) -> str:
    data = samples_of(case)
    with float64_throughout(reference_model(case.family, torch.float64)):
        return str(run_ranks(_train, num_ranks(case), case, data, timeout=300)[0])


def _train(rank: int, case: Case, data: Any) -> str:
    # With warm kernels the planner searches longer than with plain Python, so plans would depend on the cache.
    os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp(prefix="cold-")
    engine = make_engine(case, data)
    for _ in range(case.steps):
        engine.train_batch()
    digest = hashlib.sha256()
    for name, value in sorted(engine.fp32_state_dict().items()):
        digest.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def plan_digests(quick: bool) -> Iterator[tuple[str, str, float]]:
    """Name, digest of a plan and seconds, over batches of three kinds of lengths and two models."""
    count = (QUICK_PLANS if quick else NUM_PLANS) // 4
    wikipedia, histogram = str(TABLES / "wikipedia_lengths.txt"), str(TABLES / "pretraining_length_histogram.csv")
    for model, num_gpus, data, choose in (
        ("32b", 64, "lognormal:6.22,1.233", "best"),
        ("32b", 64, wikipedia, "best"),
        ("7b", 32, histogram, "best"),
        ("7b", 32, wikipedia, "cycle"),
    ):
        table = CostTable.load(TABLES / f"llama_{model}_a800.json")
        sample = [int(length) for length in read_lengths(data, CONTEXT, 20_000, 5).lengths]
        tokens = 3125 * num_gpus
        strategies = propose_strategies(table, num_gpus, sample, tokens, CONTEXT, tp_across_nodes=True)
        planner = Planner(table, strategies, PlannerOptions(choose=choose, kernels="compiled"))
        random = np.random.default_rng(11)
        for step in range(count):
            began = time.perf_counter()
            drawn = random.permutation(np.asarray(sample))
            lengths = drawn[: int(np.searchsorted(np.cumsum(drawn), tokens)) + 1].tolist()
            plan = planner.plan(step, range(len(lengths)), lengths)
            digest = hashlib.sha256(json.dumps(projection(plan)).encode()).hexdigest()
            name = f"plans {model} {Path(data).name} {choose} {step}"
            yield name, digest, time.perf_counter() - began


def projection(plan: StepPlan) -> object:
    """What a plan says, however it is laid out: strategy, sequences of each micro-batch, times."""
    (phase,) = plan.phases
    pipelines = [
        {
            "microbatches": [[span.sequence for span in batch.spans] for batch in pipeline.microbatches],
            "predicted_ms": float(pipeline.predicted_ms).hex(),
        }
        for pipeline in phase.pipelines
    ]
    times = [float(plan.searched_ms).hex(), float(plan.lower_bound_ms).hex()]  # by the formula of the search
    return [str(plan.strategy), list(plan.lengths), pipelines, times]


if __name__ == "__main__":
    sys.exit(main())
