"""Does an emulated cluster take as long as a real one? The same job on 2 real ranks of this machine and emulated."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ds_hydra.commands import profile
from ds_hydra.costs.cost_table import read_table_file
from ds_hydra.emulate.cluster import EmulatedJob, EmulatedStep, emulate
from ds_hydra.profiling.stage_timer import hollow_source
from ds_hydra.report.plots import summarise
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.links import LinkModel
from tools import aims
from tools.bench_prediction import CONTEXT, MODEL, STRATEGIES, TOKENS, WARM_UP, job_config, plans_of, run, web_lengths
from tools.simulated.part import Part

RANKS = 2


def against_real(steps: int, table: Path | None, *, quick: bool) -> Part:
    """Measure a table, unless one is given, train `steps` steps by all strategies in turn, emulate the same plans."""
    torch.set_num_threads(1)
    lengths = web_lengths(2000, CONTEXT)
    with tempfile.TemporaryDirectory(prefix="real-") as scratch:
        table = table or _measured(Path(scratch), quick=quick)
        real = run(steps, "cycle", lengths, Path(scratch), "real", cost_table=str(table))
        found = read_table_file(table)
        assert found.job is not None
        source = hollow_source(MODEL, found.job.stages)
        links, size = LinkModel.of_table(found.links, RANKS), torch.float32.itemsize
        cluster = SimulatedJob(source.plan, source.width(1), found, links, RANKS, size)
        plans = str(plans_of(Path(scratch) / "real.jsonl"))
        job = EmulatedJob(cluster, tuple(STRATEGIES), tuple(lengths), TOKENS, replay=plans)
        emulated = emulate(job, steps + WARM_UP)[0][WARM_UP:]
    steps_of = list(zip(real, emulated, strict=True))
    assert all(record["strategy"] == step.plan.strategy for record, step in steps_of), "both run the recorded plans"
    rows, errors = [], []
    for name in [*STRATEGIES, "all"]:
        pairs = [both for both in steps_of if name in (both[0]["strategy"], "all")]
        errors = [_error(*both) for both in pairs]
        middle, p90 = summarise(errors)
        rows.append((name, len(pairs), f"{median(record['step_ms'] for record, _ in pairs):.0f}",
                     f"{1e3 * median(step.step_s for _, step in pairs):.0f}", f"{median(errors):+.1%}",
                     f"{middle:.1%}", f"{p90:.1%}"))  # fmt: skip
    summary = f"{middle:.1%} from {len(real)} real steps on {RANKS} ranks"
    missed = (
        []
        if middle <= aims.EMULATED_TO_REAL
        else [f"emulated steps are {middle:.1%} from real ones in the median, above {aims.EMULATED_TO_REAL:.0%}"]
    )
    headers = ("strategy", "steps", "real ms", "emulated ms", "bias", "median", "p90")
    return Part("Emulated against real", headers, rows, summary, {"real_errors": errors}, missed)


def _measured(folder: Path, *, quick: bool) -> Path:
    config, table = folder / "ds_hydra.json", folder / "cost_table.json"
    config.write_text(json.dumps(job_config()))
    command = ["--model", str(MODEL), "--deepspeed_config", str(config), "--ranks", str(RANKS), "--out", str(table),
               "--schemes", "tp1", "tp2", "pp2", "sp2"]  # fmt: skip
    assert profile.main([*command, "--quick"] if quick else command) <= 1, "the profile has said why it failed"
    return table


def _error(record: dict[str, Any], step: EmulatedStep) -> float:
    return 1e3 * step.step_s / record["step_ms"] - 1.0
