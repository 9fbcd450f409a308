"""Jobs in which one rank takes a lock twice, or is slow, at a place of the user's code; what was promised of them."""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from ds_hydra.host.environment import MEMBERS_FOLDER
from tests.support.ends import TRACEBACK, End, all_told, codes, ends, mark_fault
from tests.support.fault_job import before
from tests.support.small_job import Stateful, find_before_forks, sequences, small_engine

PLACES = ("script", "data", "stream", "collate", "layer", "loss", "callback", "evaluation", "scheduler", "planner",
          "saving thread", "atexit")  # fmt: skip
MODES = ("plain", "elastic", "Trainer")
REFUSED = {("stream", "elastic"), ("collate", "elastic")}  # which need map-style data
STEPS, LIMIT_S, NUM_RANKS = 5, 5.0, 3


@dataclass(frozen=True)
class Case:
    """One rank does this at a place, in its third step."""

    place: str
    mode: str
    how: str = "a lock"

    def __str__(self) -> str:
        return f"{self.how} in {self.place}, {self.mode}"

    @property
    def rank(self) -> int:
        """Which one: the first where only that one comes to the place."""
        return int(self.place not in ("stream", "planner", *(("callback",) if self.mode != "Trainer" else ())))


class Place:
    """Where it happens; called by what a script hands in."""

    def __init__(self, case: Case, rank: int, folder: Path):
        self.case, self.rank, self.folder = case, rank, folder
        self.steps: Callable[[], int] = lambda: -1
        self._lock, self._came = threading.Lock(), False

    def __call__(self, name: str) -> None:
        """It happens here, if this is the place."""
        if name != self.case.place or self.rank != self.case.rank or self.steps() < 2 or self._came:
            return
        self._came = True
        mark_fault(self.folder)
        if self.case.how == "a lock":
            with self._lock:
                self._lock.acquire()
        until = time.monotonic() + float(self.case.how.removeprefix("slow "))
        while time.monotonic() < until:
            sum(range(1000))


class Items(list[Any]):
    """A dataset."""

    def __init__(self, items: Any, name: str, at: Place):
        super().__init__(items)
        self.name, self.at = name, at

    def __getitem__(self, index: Any) -> Any:
        self.at(self.name)
        return super().__getitem__(index)


def arm(at: Place) -> None:
    """What all modes have at the same functions."""
    from ds_hydra.checkpoint import write
    from ds_hydra.pipe.loss import HeadLoss
    from ds_hydra.pipe.runtime import StageRuntime
    from ds_hydra.planner.selection import Planner

    before(StageRuntime, "_forward", partial(at, "layer"))
    before(HeadLoss, "__call__", partial(at, "loss"))
    before(Planner, "made", partial(at, "planner"))
    before(write, "write_shard", partial(at, "saving thread"))


def run(case: Case, folder: Path, limit_s: float = LIMIT_S) -> list[End]:
    """How the ranks of such a job end."""
    import tests.support.trainers  # noqa: F401

    find_before_forks()
    job = {"plain": _plain, "elastic": _plain, "Trainer": _trainer}[case.mode]

    def program(rank: int, place: Path) -> None:
        logging.getLogger().handlers.clear()
        at = Place(case, rank, place)
        arm(at)
        job(case, at, folder, limit_s)

    return ends(program, NUM_RANKS - (case.mode == "Trainer"), limit_s=180.0)


def _plain(case: Case, at: Place, folder: Path, limit_s: float) -> None:
    elastic = case.mode == "elastic"
    saved = {"dir": str(folder / "saved"), "every": 1, "asynchronous": True}
    hydra: dict[str, Any] = {"faults": {"frozen_seconds": 9.0}, "timeout_seconds": limit_s}
    hydra |= {"steps_file": str(folder / "steps.jsonl"), "checkpoint": saved if case.place == "saving thread" else None}
    if elastic:
        os.environ[MEMBERS_FOLDER] = str(folder)
        hydra["elastic"] = {"strategies": {"2": ["2*tp1"]}}
    data: Any = Items(sequences(), "data", at)
    if case.place == "stream":
        data, hydra["context_length"] = Stateful(Items(sequences(), "stream", at)), 200
    callback = None
    if case.place == "callback":

        def callback(step: int, *batch: Any) -> Any:
            at("callback")
            return engine.crew.plans._pure.plan(step, *batch)

    engine = small_engine(at.rank, data=None if case.place == "collate" else data, pre_step_callback=callback, **hydra)
    at.steps = lambda: engine.global_steps
    before(engine.lr_scheduler, "step", partial(at, "scheduler"))
    if at.case.place == "atexit":
        atexit.register(at, "atexit")
    handed: Any = [[3, 4, 5, 6, 7, 8]] * 99
    loader = iter(DataLoader(handed, 3, collate_fn=_collate(at)))
    while engine.global_steps < STEPS:
        at("script")
        engine.train_batch(loader if case.place == "collate" else None)
        if case.place == "evaluation":
            engine.evaluate(Items(sequences()[:6], "evaluation", at))
    if case.place != "atexit":
        engine.destroy()


def _collate(at: Place) -> Callable[[list[Any]], Any]:
    def collate(items: list[Any]) -> Any:
        at("collate")
        return items

    return collate


def _trainer(case: Case, at: Place, folder: Path, limit_s: float) -> None:
    from transformers import TrainerCallback

    from ds_hydra.hugging_face import HydraTrainer
    from ds_hydra.testing import rank_environment
    from tests.support import trainers

    rank_environment(at.rank)

    class Callback(TrainerCallback):
        def on_train_begin(self, *_: Any, lr_scheduler: Any = None, **__: Any) -> None:
            before(lr_scheduler, "step", partial(at, "scheduler"))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            at("callback")
            at("script")

    def collate(items: list[Any]) -> Any:
        at("collate")
        return trainers.collate(items)

    hydra: dict[str, Any] = {"faults": {"frozen_seconds": 9.0}, "timeout_seconds": limit_s}
    hydra["steps_file"], hydra["strategies"] = str(folder / "steps.jsonl"), ["2*tp1", "pp2"]
    if case.place == "saving thread":
        hydra["checkpoint"] = {"dir": str(folder / "saved"), "every": 1, "asynchronous": True}
    data: Any = Items(sequences()[:28], "data", at)
    if case.place == "stream":
        data = Stateful(Items(sequences()[:28], "stream", at))
    own = {"max_steps": STEPS, "save_strategy": "no", "accelerator_config": {"dispatch_batches": False}}
    settings = trainers.settings(folder, 2, trainers.config(**hydra), **own)
    trainer = HydraTrainer(
        trainers.small_model(), settings, data_collator=collate, callbacks=[Callback()],
        train_dataset=data, eval_dataset=Items(sequences()[:8], "evaluation", at),
    )  # fmt: skip
    at.steps = lambda: trainer.state.global_step
    if case.place == "atexit":
        atexit.register(at, "atexit")
    trainer.train()


def objections(case: Case, found: list[End], folder: Path) -> Iterator[str]:
    """What of the promises was not kept."""
    told, left = all_told(found), list(folder.glob("stacks-*.txt"))
    others_go_on = case.place == "atexit" or case.mode == "elastic"
    expected = [75 if rank == case.rank or not others_go_on else 0 for rank in range(len(found))]
    if codes(found) != expected:
        yield f"codes {codes(found)}, not {expected}"
    if f"rank {case.rank} " not in told or "stuck_jobs.py:" not in told:
        yield "it is not named with its frame"
    stacks = "".join(path.read_text() for path in left)
    wrote = {int(rank) for rank in re.findall(r"=== rank (\d+),", stacks)}
    if "stuck_jobs.py" not in stacks or (case.place != "atexit" and len(wrote) < len(found)):
        yield f"stacks of {wrote}"
    if str(folder) not in told:
        yield "it is not told where stacks are"
    if TRACEBACK in told:
        yield "a traceback"
