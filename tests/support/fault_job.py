"""Jobs that are made to fail: what goes wrong, in which activity, in what kind of job; what was promised of their ends.

A fault is set off when a rank comes to a function, by whose call it enters an activity. Small jobs that save in each
step go on after a restart (`run_job`); drawn ones are of every kind, and judged by exit codes, time and what is told.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.shares import Shares
from ds_hydra.data.sampler import TokenBudgetSampler
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.planner import PhasedPlanner, parse_phases, save_plans
from tests.support.ends import TRACEBACK, End, all_told, codes, ends, mark_fault
from tests.support.small_job import Stateful, sequences, small_engine, small_source
from tools import aims, machine

FAULTS = ("SIGKILL", "SIGSTOP", "SIGTERM", "exception", "exit", "failed collective")
PHASES = ("planning", "pull", "forward", "backward", "push", "optimizer", "saving")


def before(owner: Any, name: str, action: Callable[[], object]) -> None:
    """Let a function of a class or module begin with an action."""
    original = getattr(owner, name)

    def first(*args: Any, **kwargs: Any) -> Any:
        action()
        return original(*args, **kwargs)

    setattr(owner, name, first)


def entry_of(phase: str) -> tuple[Any, str]:
    """The class or module, and the name of its function, by whose call a rank enters a phase."""
    from ds_hydra.checkpoint import write
    from ds_hydra.engine.plans import PlanSource
    from ds_hydra.pipe.runtime import StageRuntime
    from ds_hydra.step.update import Update
    from ds_hydra.zero_hetero.pushes import Pulls, Pushes

    owners: dict[str, tuple[Any, str]] = {
        "planning": (PlanSource, "next"),
        "pull": (Pulls, "start"),
        "forward": (StageRuntime, "_forward"),
        "backward": (StageRuntime, "_backward"),
        "push": (Pushes, "finish"),
        "optimizer": (Update, "apply"),
        "saving": (write, "write_shard"),
    }
    return owners[phase]


def set_off(kind: str) -> None:
    """Let this process fail."""
    if kind.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, kind))
    elif kind in ("exit", "os._exit"):
        os._exit(3)
    else:
        raise _ERRORS[kind]()


_ERRORS: dict[str, Callable[[], BaseException]] = {
    "exception": lambda: RuntimeError("a fault that was set off"),
    "sys.exit": lambda: SystemExit(7),
    "bug": lambda: ValueError("a bug of the script"),
    "storage": lambda: OSError(5, "Input/output error", "/data/tokens.bin"),
    "memory": lambda: torch.OutOfMemoryError("tried to allocate 20 GiB"),
    "full disk": lambda: OSError(28, "No space left on device"),
}


def digest(engine: Any) -> str:
    """Of this rank's masters and moments."""
    masters = engine.crew.masters.trained
    parts = [masters.flat]
    for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        parts += masters.optimizer_state(engine.optimizer, key)
    return hashlib.sha256(b"".join(part.cpu().numpy().tobytes() for part in parts)).hexdigest()


# --- A job of which one rank fails, and which is started again.
@dataclass(frozen=True)
class Fault:
    """What goes wrong, in which phase of which rank, from which step (counted from 0) on."""

    kind: str
    phase: str
    rank: int
    step: int


@dataclass(frozen=True)
class Outcome:
    """How a job's ranks ended."""

    ends: list[End]
    fired: bool
    digests: list[str]  # of each rank's masters and moments, of ranks that finished


def run_job(
    folder: Path,
    num_ranks: int,
    steps: int,
    *,
    fault: Fault | None = None,
    limit_s: float = 60.0,
    every: int = 1,
    during: Callable[[Sequence[int]], None] | None = None,
    **hydra: Any,
) -> Outcome:
    """Train a small job to `steps` steps with checkpoints in `folder`, resuming from what is there.

    `during` is called once with the ranks' process ids when all of them train.
    """
    import ds_hydra.engine.engine  # noqa: F401  so that forked ranks need not import it

    with tempfile.TemporaryDirectory(prefix="job-") as scratch:
        told = Path(scratch)
        train = partial(_train, folder=folder, told=told, steps=steps, fault=fault, every=every, hydra=hydra)
        found = ends(train, num_ranks, limit_s=limit_s, during=during)
        finished = [path for rank in range(num_ranks) if (path := told / f"digest{rank}").exists()]
        return Outcome(found, (told / "fired").exists(), [path.read_text() for path in finished])


def orphans(found: Sequence[End]) -> list[int]:
    """Process groups of ranks in which something still lives after three seconds."""
    deadline = time.monotonic() + 3.0
    left = [end.pid for end in found]
    while left and time.monotonic() < deadline:
        for group in list(left):
            try:
                os.killpg(group, 0)
            except OSError:
                left.remove(group)
        time.sleep(0.02 if left else 0)
    for group in left:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    return left


def _train(
    rank: int, place: Path, *, folder: Path, told: Path, steps: int, fault: Fault | None, every: int, hydra: dict
) -> None:
    hydra = {"faults": {"frozen_seconds": 9.0}, "timeout_seconds": 30, **hydra}
    engine = small_engine(rank, checkpoint={"dir": str(folder), "every": every, "keep_last": 3}, **hydra)
    if fault is not None and fault.rank == rank:
        _arm(engine, fault, place, told / "fired")
    (place / f"ready{rank}").touch()
    while engine.global_steps < steps:
        engine.train_batch()
    engine.wait_for_checkpoint()
    (told / f"digest{rank}").write_text(digest(engine))
    engine.destroy()


def _arm(engine: Any, fault: Fault, place: Path, fired: Path) -> None:
    """Set the fault off on entry to its phase, once, in the step it is meant for or the next one to reach it."""
    owner, name = entry_of(fault.phase)
    original = getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if engine.global_steps >= fault.step + (fault.phase == "saving") and not fired.exists():
            fired.touch()
            mark_fault(place)
            if fault.phase == "saving":
                original(*args, **kwargs)
            if fault.kind == "failed collective":
                _cut_connections(engine)
            else:
                set_off(fault.kind)
        return original(*args, **kwargs)

    setattr(owner, name, faulty)


def _cut_connections(engine: Any) -> None:
    """Shut down every TCP connection of this process but the heartbeat's: collectives fail here and at the peers."""
    kept = {p.connection.socket.fileno() for p in engine.crew.watchdog.peers.values() if p.connection is not None}
    for name in os.listdir("/proc/self/fd"):
        handle = int(name)
        with contextlib.suppress(OSError):
            if handle not in kept and stat.S_ISSOCK(os.fstat(handle).st_mode):
                with socket.socket(fileno=os.dup(handle)) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.getpeername()
                        connection.shutdown(socket.SHUT_RDWR)


# --- Faults that are drawn.
NUM_RANKS, STEPS, FAULT_STEP = 3, 5, 2
HEARTBEAT_S, FROZEN_S = 0.5, 3.0

KINDS = ("SIGKILL", "SIGSTOP", "exit", "sys.exit", "bug", "storage", "memory", "full disk")
ASSEMBLY = ("prepare", "build_stages", "ModelMasters", "give_masters", "Stepper", "PlanSource", "Checkpointer")
REST_OF_ASSEMBLY = ("install_optimizer", "LossScale", "Update", "for_strategies", "connect", "Tracing", "NextStep")
ACTIVITIES = (
    "assembly", "between", "planning", "reading", "pull", "forward", "backward", "push", "optimizer", "saving",
)  # fmt: skip
MODES = ("plain", "ahead", "slices", "V", "phases", "stream", "three calls", "handed in")


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


def wrong(case: Case) -> list[str]:
    """What of the promises was not kept."""
    small_source()  # found once, before ranks are forked
    with tempfile.TemporaryDirectory() as scratch:
        table = Path(scratch) / "table.json"
        if case.mode == "slices":
            costs = [SchemeCost(ParallelScheme(pp=p), 2e-3 / p, 0.2 / p, 1 / p, 250, 8, Shares.usual()) for p in (1, 2)]
            TableFile(CostTable(tuple(costs), "made up")).save(table)
        elif case.mode == "phases":
            _phases(table)
        found = ends(lambda rank, place: _job(case, rank, place, Path(scratch)), NUM_RANKS, limit_s=120.0)
    return list(_objections(case, found, max(end.seconds for end in found)))


def _phases(table: Path) -> None:
    """Plans of two phases for the first steps, beside the table that they are made by."""
    costs = CostTable(tuple(SchemeCost(ParallelScheme(pp=p), 0.0, 1.0, 2.0, 400, 10) for p in (1, 2)))
    TableFile(costs).save(table)
    planner = PhasedPlanner(costs, parse_phases("3*tp1 then pp2 + tp1"), longest=(60, 400))
    sampler = TokenBudgetSampler([len(sequence) for sequence in sequences()], 250, 0)
    plans = [planner.plan(step, sampler.batch(step), sampler.batch_lengths(step)) for step in range(STEPS)]
    save_plans(plans, table.with_name("plans.jsonl"))


def _objections(case: Case, found: Sequence[End], took: float) -> Iterator[str]:
    told = all_told(found)
    if "the fault was not reached" in told:
        yield "the fault was not reached"
        return
    if codes(found) != case.codes:
        yield f"exit codes {codes(found)}, not {case.codes}"
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
            set_off(case.kind)

    if case.activity not in ("between", "reading"):
        before(*_entry(case), due)
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


def _entry(case: Case) -> tuple[Any, str]:
    """The function before which the fault is due."""
    from ds_hydra.engine import crew
    from ds_hydra.host.host_engine import HostEngine
    from ds_hydra.ranks.world import World
    from ds_hydra.step import stepper

    if case.activity == "assembly":
        others = {"install_optimizer": HostEngine, "for_strategies": stepper.Arena, "connect": World}
        return others.get(case.part, crew), case.part
    owner, name = entry_of(case.activity)
    return owner, "given" if case.activity == "planning" and case.mode in ("three calls", "handed in") else name
