"""Cells of the matrix of losses: how a member fails, in which phase, which one, in what kind of job; and the judgement.

What a job comes to must equal, to the bit, the same steps by jobs that are stopped where it says that it lost or gained
ranks, and restarted with those that were left, under the same plans.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.shares import Shares
from ds_hydra.engine.job import model_source
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.planner import PhasedPlanner, StepPlan, parse_phases
from ds_hydra.testing import run_ranks
from tests.support.elastic_job import Job, Loss, Result, leg, run_elastic
from tests.support.small_job import USUAL, find_before_forks, in_place_of_looking

KINDS = {"SIGKILL": -9, "exception": 1, "os._exit": 3, "SIGSEGV": -11, "SIGSTOP": -9}
"""How a member fails, and the exit code that it leaves: one that stands still is killed by another one."""
PHASES = (
    "planning", "pull", "forward", "backward", "push", "buddy", "vote", "update", "saving", "rebuilding", "re-sharding",
    "joining",
)  # fmt: skip
PLACES = {"coordinator": 0, "middle": 1, "last": 3}
MODES = ("plain", "slices", "V", "phases", "token sharding", "LoRA", "dropout", "ahead")
STEPS, FAULT_STEP, FROZEN_S = 4, 2, 3.0
LOSS = 1e-5  # by which losses may differ: a step that the vote alone completes has them added in another order
_AGAIN = ("rebuilding", "re-sharding")  # phases that only another loss, which comes first, brings about


@dataclass(frozen=True)
class Course:
    """What befalls a job."""

    name: str
    losses: tuple[Loss, ...]
    ranks: int = 4  # of the start
    steps: int = STEPS
    joins_in: tuple[int, ...] = ()
    per_host: int | None = None
    mode: str = "plain"
    ends_all: int | None = None  # the exit code of all that are left, where none goes on
    redundancy: str = "device"  # where copies are kept

    @property
    def codes(self) -> list[int]:
        """Exit codes, as they must be, those of processes that join behind the others."""
        found = {loss.member: KINDS[loss.kind] for loss in self.losses}
        return [found.get(member, self.ends_all or 0) for member in range(self.ranks + len(self.joins_in))]

    @property
    def frozen_s(self) -> float:
        """After which a silent member counts as frozen."""
        return FROZEN_S if any(loss.kind == "SIGSTOP" for loss in self.losses) else 0.0


def _both(phase: str) -> tuple[Loss, Loss]:
    """A loss, and one in a state that it brings about; neither keeps the other's copy."""
    return Loss("forward", 1, FAULT_STEP), Loss(phase, 3, FAULT_STEP)


COURSES = (
    Course("two at once", (Loss("forward", 1, FAULT_STEP), Loss("forward", 3, FAULT_STEP))),
    *(
        Course(f"a second one while {phase}", _both(phase))
        for phase in ("leaving", "voted", "connecting", "rebuilding", "re-sharding", "copying", "taking")
    ),
    Course("a share and its copy", (Loss("forward", 1, 1), Loss("re-sharding", 2, 1)), steps=3, ends_all=75),
    Course("a node of two of eight", tuple(Loss("backward", one, 1) for one in (2, 3)), 8, 3, per_host=2),
    Course(
        "8, 7, 6, 4, 6 and 8 ranks",
        (Loss("push", 7, 1), Loss("pull", 0, 2), Loss("forward", 2, 3), Loss("forward", 5, 3)),
        8, 9, joins_in=(5, 5, 6, 6),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One fault."""

    kind: str
    phase: str
    place: str
    mode: str

    def __str__(self) -> str:
        return f"{self.kind} in {self.phase} of the {self.place} member, {self.mode}"

    @property
    def course(self) -> Course:
        """Where that takes a loss before, it is of one that keeps no copy of the member's; where a process joins, there
        were three ranks."""
        joins = self.phase == "joining"
        member = min(PLACES[self.place], 2) if joins else PLACES[self.place]
        own = Loss(self.phase, member, FAULT_STEP, self.kind)
        losses = (Loss("forward", (member + 2) % 4, FAULT_STEP), own) if self.phase in _AGAIN else (own,)
        # One that cannot write its part of a checkpoint says so, and all have that error.
        ends_all = 74 if (self.kind, self.phase) == ("exception", "saving") else None
        return Course(str(self), losses, 3 if joins else 4, STEPS, (FAULT_STEP - 1,) if joins else (), None, self.mode,
                      ends_all)  # fmt: skip


def drawn(count: int, seed: int = 0) -> list[Cell]:
    """So many cells, each value of each about equally often."""
    draw = random.Random(seed)
    decks = [_deck(draw, values) for values in (tuple(KINDS), PHASES, tuple(PLACES), MODES)]
    return [Cell(*(next(deck) for deck in decks)) for _ in range(count)]


def _deck(draw: random.Random, values: Sequence[str]) -> Iterator[str]:
    """The values over and over, each time in another order."""
    while True:
        yield from draw.sample(values, len(values))


class Judge:
    """Runs cells, and keeps what restarts come to, by mode and legs."""

    def __init__(self, folder: Path):
        find_before_forks()
        self._folder = folder
        self._known: dict[tuple[str, tuple[tuple[int, int], ...]], tuple[list[str], list[float]]] = {}
        self._jobs: dict[str, Job] = {}
        self._sources: dict[str, Any] = {}

    def wrong(self, course: Course) -> list[str]:
        """What was not as it must be."""
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch, self._source(course.mode):
            result = run_elastic(
                Path(scratch) / "job", course.ranks, course.steps, course.losses, job=self._job(course.mode),
                joins_in=course.joins_in, per_host=course.per_host, faults={"frozen_seconds": course.frozen_s},
                elastic={"redundancy": course.redundancy},
                checkpoint={"dir": f"{scratch}/checkpoints", "every": 1, "resume": False},
            )  # fmt: skip
        return list(self._objections(result, course))

    def _objections(self, result: Result, course: Course) -> Iterator[str]:
        codes = course.codes
        if course.ends_all is not None:  # that of whose fault it is, too
            codes = [course.ends_all if code == KINDS["exception"] else code for code in codes]
        if result.codes != codes:
            yield f"exit codes {result.codes}, not {codes}: {_last_lines(result)}"
            return
        if course.ends_all is not None:
            return
        legs = result.legs(course.ranks, course.steps)
        digests, losses = self.of_legs(course.mode, legs)
        if len(legs) < 2:
            yield "nothing was lost"
        if result.digests != digests:
            yield f"not what a stop and a restart come to, as {legs} says (ranks, until which step)"
        longest = max(result.losses, key=len)
        off = max(abs(one - two) for one, two in zip(longest, losses[-len(longest) :], strict=True))
        if off > LOSS:
            yield f"losses differ by {off}"

    def of_legs(self, mode: str, legs: Sequence[tuple[int, int]]) -> tuple[list[str], list[float]]:
        """Digests by rank, and all losses, of stops and restarts: so many ranks until a step, and so on."""
        key = mode, tuple(legs)
        if key not in self._known:
            before = self.of_legs(mode, legs[:-1])[1] if len(legs) > 1 else []
            ranks, until = legs[-1]
            place = self._place(mode, legs)
            if len(legs) > 1:
                earlier, tag = self._place(mode, legs[:-1]), f"until{legs[-2][1]}"
                place.mkdir()
                (place / tag).symlink_to(earlier / tag)
            else:
                tag = None
            program = partial(leg, job=self._job(mode), num_ranks=ranks, folder=place, tag=tag, until=until)
            with self._source(mode):
                found = run_ranks(program, ranks, timeout=120)
            self._known[key] = [digest for digest, _ in found], [*before, *found[0][1]]
        return self._known[key]

    def _place(self, mode: str, legs: Sequence[tuple[int, int]]) -> Path:
        return self._folder / (mode.replace(" ", "-") + "-" + "-".join(f"{ranks}x{until}" for ranks, until in legs))

    @contextmanager
    def _source(self, mode: str) -> Iterator[None]:
        """Where a mode's stages come from is found once, before ranks are forked."""
        make = self._job(mode).model
        if make is None:
            yield
            return
        if mode not in self._sources:
            self._sources[mode] = model_source(make(), USUAL)
        with in_place_of_looking(self._sources[mode]):
            yield

    def _job(self, mode: str) -> Job:
        if mode not in self._jobs:
            self._jobs[mode] = job_of(mode, self._folder)
        return self._jobs[mode]


def _last_lines(result: Result) -> str:
    return " | ".join(text.strip().splitlines()[-1][:300] for text in result.told if text.strip())


PLAIN = Job({
    8: ["tp2pp2 + 2*sp2", "8*tp1"], 7: ["tp2 + pp2 + 3*tp1", "7*tp1"], 6: ["tp2 + pp2 + 2*tp1", "6*tp1"],
    5: ["tp2 + 3*tp1", "5*tp1"], 4: ["tp2 + 2*tp1", "pp2 + 2*tp1", "4*tp1"], 3: ["3*tp1", "tp2 + tp1"],
    2: ["tp2", "2*tp1"], 1: ["tp1"],
})  # fmt: skip


def job_of(mode: str, folder: Path) -> Job:
    """The job of a mode, whose files are kept in a folder."""
    if mode == "ahead":
        return replace(PLAIN, hydra={"planner": {"ahead": 2}})
    if mode == "slices":
        costs = [SchemeCost(ParallelScheme(pp=p), 2e-3 / p, 0.2 / p, 1 / p, 250, 8, Shares.usual()) for p in (1, 2)]
        TableFile(CostTable(tuple(costs), "made up")).save(folder / "slices.json")
        sliced = {4: ["pp2/list + 2*tp1"], 3: ["pp2/list + tp1"], 2: ["pp2/list"]}
        return Job(sliced, hydra={"cost_table": str(folder / "slices.json"), "choose": "best"})
    if mode == "V":
        return Job({4: ["pp2/v + tp2", "2*pp2/v"], 3: ["pp2/v + tp1"], 2: ["pp2/v"]})
    if mode == "token sharding":
        return Job({4: ["2*tp2", "tp4"], 3: ["tp2 + tp1"], 2: ["tp2"]})
    if mode == "phases":
        TableFile(_TABLE).save(folder / "phases.json")
        each = {ranks: list(map(str, parse_phases(text))) for ranks, text in _PHASES.items()}
        return Job(each, hydra={"cost_table": str(folder / "phases.json"), "choose": "best"}, pre_step=_in_phases)
    models: dict[str, Callable[[], Any]] = {"LoRA": _adapted, "dropout": _dropping}
    return replace(PLAIN, model=models.get(mode))


_TABLE = CostTable(
    tuple(SchemeCost(ParallelScheme(tp, pp), 0.0, 1.0, 2.0, 400, 10) for tp, pp in ((1, 1), (2, 1), (1, 2)))
)
_PHASES = {4: "4*tp1 then tp2 + pp2", 3: "3*tp1 then pp2 + tp1", 2: "2*tp1 then tp2"}


def _in_phases(step: int, ids: tuple[int, ...], lengths: tuple[int, ...]) -> StepPlan:
    """Plans every step of the present ranks in two phases."""
    import torch.distributed as dist

    planner = PhasedPlanner(_TABLE, parse_phases(_PHASES[dist.get_world_size()]), longest=(60, 400))
    return planner.plan(step, ids, lengths)


def _adapted() -> Any:
    """Adapters with random weights over a frozen model."""
    import torch
    from peft import LoraConfig, get_peft_model

    from tests.support.small_job import small_model

    model = small_model()
    torch.manual_seed(1)
    adapted = LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", target_modules="all-linear")
    return get_peft_model(model, adapted)


def _dropping() -> Any:
    """A model with dropout in its MLPs and in attention."""
    from torch import nn

    from tests.support.small_job import small_model

    model = small_model()
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, nn.Dropout(0.1))
        layer.self_attn.attention_dropout = 0.1
    return model
