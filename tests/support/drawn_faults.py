"""Faults drawn at random: what goes wrong, in which activity, in what kind of job; and what was promised of its end."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.shares import Shares
from ds_hydra.data.sampler import TokenBudgetSampler
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.planner import PhasedPlanner, parse_phases, save_plans
from tests.support.ends import TRACEBACK, End, ends, mark_fault
from tests.support.small_job import Stateful, sequences, small_engine, small_source
from tools import aims, machine

NUM_RANKS, STEPS, FAULT_STEP = 3, 5, 2
HEARTBEAT_S, FROZEN_S = 0.5, 3.0

KINDS = ("SIGKILL", "SIGSTOP", "exit", "sys.exit", "bug", "storage", "memory", "full disk")
ASSEMBLY = ("prepare", "build_stages", "ModelMasters", "give_masters", "Stepper", "PlanSource", "Checkpointer")
ACTIVITIES = (
    "assembly", "between", "planning", "reading", "pull", "forward", "backward", "push", "optimizer", "saving",
)  # fmt: skip
MODES = ("plain", "ahead", "slices", "V", "phases", "stream", "three calls", "handed in")

_ERRORS: dict[str, Callable[[], BaseException]] = {
    "sys.exit": lambda: SystemExit(7),
    "bug": lambda: ValueError("a bug of the script"),
    "storage": lambda: OSError(5, "Input/output error", "/data/tokens.bin"),
    "memory": lambda: torch.OutOfMemoryError("tried to allocate 20 GiB"),
    "full disk": lambda: OSError(28, "No space left on device"),
}


@dataclass(frozen=True)
class Case:
    """One fault."""

    kind: str
    activity: str
    mode: str
    rank: int
    part: str = ""  # of the assembly

    def __str__(self) -> str:
        where = f"{self.activity} ({self.part})" if self.part else self.activity
        return f"{self.kind} in {where} of rank {self.rank}, {self.mode}"

    @property
    def codes(self) -> list[int | None]:
        """Exit codes that were promised, by rank."""
        if self.activity == "saving" and self.kind in ("bug", "storage", "memory", "full disk"):
            return [74] * NUM_RANKS
        own = {"SIGKILL": -9, "SIGSTOP": -9, "exit": 3, "sys.exit": 7}.get(self.kind, 1)
        return [own if rank == self.rank else 75 for rank in range(NUM_RANKS)]


def drawn(count: int, seed: int = 0) -> list[Case]:
    """So many cases, each kind of each about equally often."""
    draw, cases = random.Random(seed), list[Case]()
    while len(cases) < count:
        number = len(cases)
        kind = KINDS[number % len(KINDS)]
        activity = "saving" if kind == "full disk" else draw.choice(ACTIVITIES)
        mode, rank = draw.choice(MODES), draw.randrange(NUM_RANKS)
        if activity == "reading" and mode == "stream":
            rank = 0  # which reads for all
        part = draw.choice(ASSEMBLY) if activity == "assembly" else ""
        cases.append(Case(kind, activity, mode, rank, part))
    return cases


def wrong(case: Case) -> tuple[list[str], float]:
    """What of the promises was not kept, and seconds from the fault until the last rank had ended."""
    small_source()  # found once, before ranks are forked
    with tempfile.TemporaryDirectory() as scratch:
        table = Path(scratch) / "table.json"
        if case.mode == "slices":
            costs = [SchemeCost(ParallelScheme(pp=p), 2e-3 / p, 0.2 / p, 1 / p, 250, 8, Shares.usual()) for p in (1, 2)]
            TableFile(CostTable(tuple(costs), "made up")).save(table)
        elif case.mode == "phases":
            _phases(table)
        found = ends(lambda rank, place: _job(case, rank, place, Path(scratch)), NUM_RANKS, limit_s=120.0)
    took = max(end.seconds for end in found)
    return list(_objections(case, found, took)), took


def _phases(table: Path) -> None:
    """Plans of two phases for the first steps, beside the table that they are made by."""
    costs = CostTable(tuple(SchemeCost(ParallelScheme(pp=p), 0.0, 1.0, 2.0, 400, 10) for p in (1, 2)))
    TableFile(costs).save(table)
    planner = PhasedPlanner(costs, parse_phases("3*tp1 then pp2 + tp1"), longest=(60, 400))
    sampler = TokenBudgetSampler([len(sequence) for sequence in sequences()], 250, 0)
    plans = [planner.plan(step, sampler.batch(step), sampler.batch_lengths(step)) for step in range(STEPS)]
    save_plans(plans, table.with_name("plans.jsonl"))


def _objections(case: Case, found: Sequence[End], took: float) -> Iterator[str]:
    codes, told = [end.code for end in found], "".join(end.told for end in found)
    if "the fault was not reached" in told:
        yield "the fault was not reached"
        return
    if codes != case.codes:
        yield f"exit codes {codes}, not {case.codes}"
    limit_s = machine.limit(aims.DEAD_S, waits=True).here + (FROZEN_S if case.kind == "SIGSTOP" else 0.0)
    if took > limit_s:
        yield f"the last rank ended after {took:.1f} s"
    lines = [line for line in told.splitlines() if line.startswith(("[ds_hydra] ", "ds_hydra."))]
    traced = [rank for rank, end in enumerate(found) if TRACEBACK in end.told]
    if len(lines) + len(traced) != 1:
        yield f"{len(lines) + len(traced)} causes: {[line[:160] for line in lines]}, tracebacks of ranks {traced}"
    elif lines and f"rank {case.rank}" not in lines[0]:
        yield f"the cause does not name the rank: {lines[0]}"
    elif traced and (traced != [case.rank] or str(_ERRORS[case.kind]()) not in told.splitlines()[-1]):
        yield f"the traceback is of rank {traced[0]} and ends in {told.splitlines()[-1]}"


def _job(case: Case, rank: int, place: Path, scratch: Path) -> None:
    """A rank's script."""
    engines: list[Any] = []

    def due() -> None:
        """Set the fault off, if its time has come."""
        early = case.activity != "assembly" and (not engines or engines[0].global_steps < FAULT_STEP)
        if rank == case.rank and not early and not (place / "fault").exists():
            mark_fault(place)
            if case.kind.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, case.kind))
            elif case.kind == "exit":
                os._exit(3)
            else:
                raise _ERRORS[case.kind]()

    _arm(case, due)
    hydra: dict[str, Any] = {
        "faults": {"frozen_seconds": FROZEN_S},
        "checkpoint": {"dir": str(scratch / "checkpoint"), "every": 1},
        "timeout_seconds": 40,
        "planner": {"ahead": 1 if case.mode == "ahead" else 0},
    }
    modes: dict[str, dict[str, Any]] = {
        "slices": {"strategies": ["pp2/list + tp1"], "cost_table": str(scratch / "table.json"), "choose": "best"},
        "V": {"strategies": ["pp2/v + tp1", "tp2 + tp1"]},
        "phases": {
            "strategies": ["3*tp1", "pp2 + tp1"],
            "cost_table": str(scratch / "table.json"),
            "planner": {"ahead": 0},
            "replay": str(scratch / "plans.jsonl"),
        },
        "stream": {"context_length": 200},
    }
    hydra |= modes.get(case.mode, {})
    reads = due if case.activity == "reading" else lambda: None
    engine = small_engine(rank, data=_data(case.mode, reads), **hydra)
    engines.append(engine)
    batches = _batches(reads)
    while engine.global_steps < STEPS:
        if case.activity == "between":
            due()
        if case.mode == "three calls":
            loss = engine(_collated(next(batches)))
            engine.backward(loss)
            engine.step()
        elif case.mode == "handed in":
            engine.train_batch(batches)
        else:
            engine.train_batch()
    sys.stderr.write("the fault was not reached\n")
    engine.destroy()


def _collated(items: list[list[int]]) -> dict[str, torch.Tensor]:
    tokens = torch.tensor(items)
    return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": torch.ones_like(tokens)}


def _batches(reads: Callable[[], None]) -> Iterator[list[list[int]]]:
    while True:
        reads()
        yield [[3, 4, 5, 6, 7, 8]] * 3


class _Reading(list[Any]):
    reads: Callable[[], None]

    def __getitem__(self, index: Any) -> Any:
        self.reads()
        return super().__getitem__(index)


def _data(mode: str, reads: Callable[[], None]) -> Any:
    if mode in ("three calls", "handed in"):
        return None
    items = _Reading(sequences())
    items.reads = reads
    return Stateful(items) if mode == "stream" else items


def _arm(case: Case, due: Callable[[], None]) -> None:
    """Let the activity's function ask first whether the fault is due."""
    from ds_hydra.checkpoint import write
    from ds_hydra.engine import crew
    from ds_hydra.engine.plans import PlanSource
    from ds_hydra.pipe.runtime import StageRuntime
    from ds_hydra.step.update import Update
    from ds_hydra.zero_hetero.pushes import Pulls, Pushes

    given = case.mode in ("three calls", "handed in")
    owners: dict[str, tuple[Any, str]] = {
        "assembly": (crew, case.part),
        "planning": (PlanSource, "given" if given else "next"),
        "pull": (Pulls, "start"),
        "forward": (StageRuntime, "_forward"),
        "backward": (StageRuntime, "_backward"),
        "push": (Pushes, "finish"),
        "optimizer": (Update, "apply"),
        "saving": (write, "write_shard"),
    }
    if case.activity in owners:
        owner, name = owners[case.activity]
        original = getattr(owner, name)

        def asking(*args: Any, **kwargs: Any) -> Any:
            due()
            return original(*args, **kwargs)

        setattr(owner, name, asking)
