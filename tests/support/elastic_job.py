"""Jobs that lose ranks and go on: forked ranks, told that whoever started them lets survivors live.

What they come to is compared with `legs`: the same steps by jobs that are stopped, and restarted with other ranks.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

import torch.distributed as dist

from ds_hydra.host.environment import JOINS, MEMBERS_FOLDER
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.ends import End, ends, live
from tests.support.fault_job import digest, entry_of, set_off


@dataclass(frozen=True)
class Loss:
    """Member `member` fails in a phase of the first step from `step` on (counted from 0); a process that joins is the
    member after the ranks of the start."""

    phase: str
    member: int
    step: int
    kind: str = "SIGKILL"


@dataclass(frozen=True)
class Job:
    """What is trained, by any number of ranks: the strategies of each, and what else the block "hydra" has."""

    strategies: Mapping[int, Sequence[str]]
    model: Callable[[], Any] | None = None  # None: the usual one
    hydra: Mapping[str, Any] = field(default_factory=dict)
    pre_step: Callable[..., Any] | None = None
    after_step: Callable[[Any], Any] | None = None  # what the script does with its engine, and what it notes, as JSON

    def engine(self, rank: int, num_ranks: int, *, elastic: Mapping[str, Any] | None = None, **hydra: Any) -> Any:
        """This rank's; with `elastic` one that goes on."""
        from tests.support.small_job import small_engine

        if elastic is not None:
            others = {str(ranks): list(some) for ranks, some in self.strategies.items() if ranks != num_ranks}
            hydra["elastic"] = {"strategies": others, "compare_every": 1, **elastic}
        model = None if self.model is None else self.model()
        given = {**self.hydra, "strategies": list(self.strategies[num_ranks]), **hydra}
        return small_engine(rank, model, pre_step_callback=self.pre_step, **given)


@dataclass
class Result:
    """Exit codes, and what each rank wrote; of those that finished, digests of masters and moments, and losses."""

    codes: list[int | None]
    told: list[str]
    digests: list[str]
    losses: list[list[float]]
    noted: list[list[Any]]  # after each step, by `Job.after_step`

    def legs(self, num_ranks: int, steps: int) -> list[tuple[int, int]]:
        """As its lines tell it: how many ranks trained, and until which step."""
        lines = re.findall(r"epoch (\d+): lost .*; (\d+) ranks go on with step (\d+) ", "".join(self.told))
        views = [(num_ranks, 1), *((ranks, step) for _, ranks, step in sorted(tuple(map(int, one)) for one in lines))]
        ends = [step - 1 for _, step in views[1:]] + [steps]
        return [(ranks, end) for (ranks, _), end in zip(views, ends, strict=True)]


def run_elastic(
    folder: Path, num_ranks: int, steps: int, losses: Sequence[Loss], *, job: Job, joins_in: Sequence[int] = (),
    refuses: bool = False, per_host: int | None = None, limit_s: float = 90.0, elastic: Mapping[str, Any] | None = None,
    **hydra: Any,
) -> Result:  # fmt: skip
    """Train a small elastic job to `steps` steps, while ranks die.

    For each of `joins_in` a process joins at the end of that step (counted from 0); they stand behind the ranks in what
    is returned. If the job `refuses`, a process with another model is refused before, and stands last. Ranks take
    themselves for those of hosts with `per_host` ranks each.
    """
    import ds_hydra.engine.engine  # noqa: F401  so that forked ranks need not import it
    import tests.support.small_job  # noqa: F401

    folder.mkdir(parents=True, exist_ok=True)
    block = {"elastic": elastic or {}, **hydra}
    how = Life(folder, num_ranks, steps, tuple(losses), job, tuple(joins_in), refuses, per_host, block)
    apart = range(len(joins_in) + refuses)
    others = [_forked(partial(how.join, number), folder / f"apart{number}") for number in apart]
    left = ends(lambda rank, _: how.train(rank), num_ranks, limit_s=limit_s)
    deadline = time.monotonic() + 10.0
    for pid, place in others:
        while not (done := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.02)
        if not done[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(done[1]) if done[0] else None
        left.append(End(code, 0.0, (place / "stderr0").read_text()))
    return result_of(folder, [one.code for one in left], [one.told for one in left])


def result_of(folder: Path, codes: list[int | None], told: list[str]) -> Result:
    """What the processes of a job in this folder came to, as many as there are exit codes."""
    written = [folder / f"end{number}" for number in range(len(codes))]
    ended = sorted((json.loads(path.read_text()) for path in written if path.exists()), key=lambda one: one["rank"])
    digests, found, noted = ([one[key] for one in ended] for key in ("digest", "losses", "noted"))
    return Result(codes, told, digests, found, noted)


def _forked(program: Callable[[], None], place: Path) -> tuple[int, Path]:
    """A process that is a job of one rank; its id, and the folder in which it writes."""
    place.mkdir()
    pid = os.fork()
    if pid == 0:
        live(program, 0, 1, place)
    return pid, place


@dataclass
class Life:
    """One elastic job, as each of its processes knows it."""

    folder: Path
    num_ranks: int
    steps: int
    losses: tuple[Loss, ...]
    job: Job
    joins_in: tuple[int, ...]
    refuses: bool
    per_host: int | None
    hydra: dict[str, Any]

    def train(self, rank: int) -> None:
        """The life of a rank of the start."""
        logging.getLogger().handlers.clear()  # pytest's, which keep the lines from what is told
        os.environ[MEMBERS_FOLDER] = str(self.folder)
        if self.per_host is not None:
            _stand_on(f"host{rank // self.per_host}")
        engine = self.job.engine(rank, self.num_ranks, **self.hydra)
        for loss in self.losses:
            if loss.member == rank:
                arm(lambda: engine, loss)
        self._to_the_end(engine, rank)

    def join(self, number: int) -> None:
        """The life of a process that joins, or is refused where there are none left to join."""
        from dataclasses import replace

        from tests.support.small_job import small_model

        logging.getLogger().handlers.clear()
        os.environ |= {MEMBERS_FOLDER: str(self.folder), JOINS: "1"}
        job, refused = self.job, self.folder / "refused"
        _wait_for(self.folder / "invitation.json")
        if number == len(self.joins_in):
            job = replace(job, model=partial(small_model, hidden=64))
        else:
            if self.refuses:
                _wait_for(refused)
            _wait_for(self.folder / f"due{number}")
            for loss in self.losses:
                if loss.member == self.num_ranks + number and loss.phase == "joining":
                    arm(lambda: None, loss)
        try:
            engine = job.engine(0, self.num_ranks, **self.hydra)
        except ConfigError:
            refused.touch()
            raise
        for loss in self.losses:
            if loss.member == self.num_ranks + number and loss.phase != "joining":
                arm(lambda: engine, loss)
        self._to_the_end(engine, self.num_ranks + number)

    def _to_the_end(self, engine: Any, name: int) -> None:
        found, noted = [], []
        while engine.global_steps < self.steps:
            if engine.global_rank == 0:  # all others wait for this rank within the step
                for number, step in enumerate(self.joins_in):
                    due = self.folder / f"due{number}"
                    if step == engine.global_steps and not due.exists():
                        due.touch()
                        while not engine.going_on.agent.wanted:
                            time.sleep(0.02)
            found.append(float(engine.train_batch()))
            if self.job.after_step is not None:
                noted.append(self.job.after_step(engine))
        engine.wait_for_checkpoint()
        record = {"digest": digest(engine), "losses": found, "noted": noted, "rank": engine.global_rank}
        (self.folder / f"end{name}").write_text(json.dumps(record))
        engine.destroy()


def _stand_on(host: str) -> None:
    """Let this process take itself for one of that host."""
    from ds_hydra.elastic import going_on
    from ds_hydra.engine import engine
    from ds_hydra.watchdog import host as of_process

    for module in (of_process, engine, going_on):
        module.host = lambda: host  # type: ignore[attr-defined]


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def _entries() -> dict[str, tuple[Any, str]]:
    """By phase what is called as it begins, and where it stands."""
    from ds_hydra.elastic import going_on
    from ds_hydra.elastic.agent import MemberAgent
    from ds_hydra.elastic.copies import Copy, Held, SurvivingState
    from ds_hydra.elastic.going_on import CarriedState, GoingOn
    from ds_hydra.engine import saving, scoring
    from ds_hydra.engine.engine import HydraEngine
    from ds_hydra.step import stepper, strategy_runtime, update

    return {
        "buddy": (Copy, "leave"),
        "vote": (update, "norm_table"),
        "update": (update.Update, "_make"),
        "after the update": (stepper, "gather_stats"),
        "rebuilding": (strategy_runtime.Runtimes, "connect"),
        "re-sharding": (Held, "cut_anew"),
        "joining": (CarriedState, "give_to"),
        "copying": (Copy, "refresh"),
        "saved": (saving.EngineCheckpoints, "_save"),  # those of the config and of the script alike
        "gathering": (saving.EngineCheckpoints, "fp32_state_dict"),
        "gathered": (HydraEngine, "meet"),
        "evaluating": (stepper.Forwards, "sequence_losses"),
        "evaluated": (scoring.Scoring, "evaluate"),
        "leaving": (GoingOn, "_leave"),
        "connecting": (going_on, "make_default_group"),
        "voted": (MemberAgent, "park"),
        "taking": (SurvivingState, "take_aside"),
    }


def arm(engine_of: Callable[[], Any], loss: Loss) -> None:
    """Let this process fail as the loss says."""
    own = _entries()
    owner, name = own[loss.phase] if loss.phase in own else entry_of(loss.phase)
    original = getattr(owner, name)

    if loss.kind == "behind":
        setattr(owner, name, _behind(original, engine_of(), loss.step))
        return

    def fails(*args: Any, **kwargs: Any) -> Any:
        if loss.phase in _AT_THE_END:
            found = original(*args, **kwargs)
            if engine_of().global_steps >= loss.step:
                set_off(loss.kind)
            return found
        engine = engine_of()
        if engine is None or engine.global_steps >= loss.step:
            _failed(Path(os.environ[MEMBERS_FOLDER]), loss.member).write_text(repr(time.perf_counter()))
            if loss.phase == "voted":  # a moment after this thread has told what it holds
                Timer(0.05, set_off, [loss.kind]).start()
            elif loss.phase == "connecting":  # the others wait for its call
                view, rank = args[:2]
                store = dist.TCPStore(view.store[0], view.store[1], is_master=False)
                tell_and_go(dist.PrefixStore(f"epoch{view.epoch}", store), rank, 1 if rank == 0 else 0)
                set_off(loss.kind)
            else:
                set_off(loss.kind)
        return original(*args, **kwargs)

    setattr(owner, name, fails)


_AT_THE_END = ("saved", "evaluated", "gathered")  # phases in whose last moment a member fails


def _behind(original: Callable[..., Any], engine: Any, step: int) -> Callable[..., Any]:
    """The function, of which this rank misses the last message, once: a member dies that has sent it to others only."""
    missed = False

    def misses(*args: Any, **kwargs: Any) -> Any:
        nonlocal missed
        found = original(*args, **kwargs)
        if engine.global_steps >= step and not missed:
            missed = True
            raise RuntimeError("Connection closed by peer")
        return found

    return misses


def failed_at(folder: Path, member: int) -> float:
    """When a member of a job in this folder has failed, by `time.perf_counter`, which all processes share."""
    return float(_failed(folder, member).read_text())


def _failed(folder: Path, member: int) -> Path:
    return folder / f"failed{member}"


def leg(rank: int, job: Job, num_ranks: int, folder: Path, tag: str | None, until: int) -> tuple[str, list[float]]:
    """Train from a checkpoint, or the start, until a step, and save there: digest and losses."""
    engine, losses = job.engine(rank, num_ranks), list[float]()
    if tag is not None:
        engine.load_checkpoint(folder, tag)
    while engine.global_steps < until:
        losses.append(float(engine.train_batch()))
    engine.save_checkpoint(folder, f"until{until}")
    found = digest(engine), losses
    engine.destroy()
    return found


LATEST = 65535  # a port that no rank has: of two ranks the one with the higher address calls the other one


def tell_and_go(store: dist.Store, rank: int, other: int, port: int = LATEST) -> None:
    """Tell in the store of a view that this rank listens at a port of the `other` one's host."""
    keys = [f"0//cpu//0/{one}" for one in (rank, other)]
    while not store.check(keys[1:]):
        time.sleep(0.02)
    told = store.get(keys[1])
    at = port_at(told)
    store.set(keys[0], told[:at] + port.to_bytes(2, "big") + told[at + 2 :])  # type: ignore[arg-type]  # as it may


def port_at(told: bytes) -> int:
    """Where the port stands in what gloo tells of a rank: a name, and an address of the system."""
    of_name, of_length, of_family = 8 + int.from_bytes(told[:8], "little"), 8, 2
    return of_name + of_length + of_family
