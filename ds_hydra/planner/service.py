"""Plans made some steps ahead, by a child process that is started again where it fails. Pure: no torch.

[Note: a process spoken to in lines]
The producer starts as a program of its own, not as a fork. A fork copies one thread of a process that has many (NCCL's,
the watchdog's, autograd's) and every lock in the state that it had at that moment: a lock which another thread held
stays locked in the child for ever. A program of its own shares nothing. It also holds no part of the device's memory,
and it can be killed at any time.

Messages are JSON lines, not pickles. A line that is cut off or damaged is an error that can be told from a plan, no
code of a message is ever run, and a person can read what was said:

  in    {"generation": 0, "step": 7, "ids": [4, 9], "lengths": [512, 96]}
  out   {"generation": 0, "step": 7, "plan": "...", "planning_ms": 3.1}

[Note: training waits for its plan]
The producer is a child process (`ProducerProcess`). Whatever happens to it, the plans stay those of the recipe [Note:
the same plans]; it is only asked when they come. With 2 steps planned ahead and frozen_s 9:

  it is slow       get(12) waits, as long as the process uses processor time or waits for a core or a disk
  it dies          get(12) starts another, which is asked for steps 12, 13 and 14, and waits for that
  it is frozen     the same, after 9 s in which its planning thread has stood still (20 s while it starts)
  it talks rot     the same
  again and again  the sixth time in a row the plan is made in this process by the same recipe, and so are all others;
                   at once where no process can be started

One service per job decides the plans, and the ranks share what it says: only one process has to compile and search.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.loads import Lengths, loads_of
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner.recipe import (
    Generations,
    InvalidAnswerError,
    MadeBy,
    PlannedStep,
    PlanRecipe,
    PlanRequest,
    Simulation,
    read_answer,
)
from ds_hydra.planner.selection import Planner
from ds_hydra.ranks.moving import work_of
from ds_hydra.zero_hetero.errors import ConfigError, PlanError

BEAT_S = 1.0
MODULE = "ds_hydra.planner.producer"


def producer_command(module: str = MODULE, beat_s: float = BEAT_S) -> tuple[str, ...]:
    """How a producer is started that runs a module, and looks every `beat_s` seconds whether its parent lives."""
    start = Path(__file__).with_name("producer_start.py")
    return sys.executable, str(start), module, str(os.getpid()), str(beat_s)


class ProducerProcess:
    """One child process [Note: a process spoken to in lines].

    Wait on `changed` for a new entry of `answers` or `ready`, or until `broken` says why none will come.
    """

    def __init__(self, command: Sequence[str]) -> None:
        # One thread: the producer works beside training and must not take a core for every thread that numpy likes.
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        # An empty entry is the working directory, from which nothing is to be imported.
        places = filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **single, "PYTHONPATH": os.pathsep.join(places)},
        )
        self.answers: dict[tuple[int, int], str] = {}  # by (generation of the recipe, step)
        self.ready: dict[int, Mapping[str, Any]] = {}  # by generation: its digest and kernels
        self.broken: str | None = None  # why nothing more will come
        self.changed = threading.Condition()
        self._outbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # A pipe holds 64 KiB and a cost table may have more. If the training thread wrote it itself, a producer that
        # has stopped reading would stop training too; so each direction has a thread that may wait.
        for target in (self._write, self._read):
            threading.Thread(target=target, daemon=True, name=f"planner{target.__name__}").start()

    @property
    def work(self) -> tuple[int, bool]:
        """What its planning thread has done so far, and whether it does something now (`ranks.moving`)."""
        return work_of(self.process.pid, self.process.pid)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; this never waits."""
        self._outbox.put(json.dumps(message))

    def _write(self) -> None:
        assert self.process.stdin is not None
        try:
            while (line := self._outbox.get()) is not None:
                self.process.stdin.write(line.encode() + b"\n")
                self.process.stdin.flush()
            self.process.stdin.close()
        except (OSError, ValueError):
            self._break("died")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self._take(line.decode())
            except (ValueError, TypeError, KeyError, RecursionError):
                self._break("garbage")
                return
        self._break("died")

    def _take(self, line: str) -> None:
        message = json.loads(line)
        with self.changed:
            if "ready" in message:
                self.ready[int(message["generation"])] = {key: str(message[key]) for key in ("ready", "kernels")}
            else:
                self.answers[int(message["generation"]), int(message["step"])] = line
            self.changed.notify_all()

    def _break(self, reason: str) -> None:
        with self.changed:
            self.broken = self.broken or reason  # the first reason is the cause, later ones follow from it
            self.changed.notify_all()

    def stop(self) -> None:
        """End the child at once; its threads end with its pipes."""
        self._outbox.put(None)
        self.process.kill()
        self.process.wait()


logger = logging.getLogger(__name__)
_RESTARTS_IN_A_ROW = 5
_START_S = 20.0  # for which a producer that is not ready yet stands still at least before it counts as frozen
_TOLD_AFTER_S, _TOLD_EVERY_S = 5.0, 60.0
_SAID = {"died": "died", "frozen": "is frozen", "garbage": "talks nonsense", "invalid": "gave no valid answer"}

Waiting = Callable[[float], None]
"""Is called again and again while a plan is waited for, with the seconds so far."""


class _Patience:
    """Waits for the plan of a step: tells the log now and then, and who else waits in each turn."""

    def __init__(self, step: int, waiting: Waiting | None) -> None:
        self._step, self._waiting = step, waiting
        self._began, self._told_s = time.monotonic(), _TOLD_AFTER_S

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began

    def turn(self, doing: str) -> None:
        """One more turn has passed, in which the planner was `doing` this."""
        waited = self.waited_s
        if waited >= self._told_s:
            self._told_s = waited + _TOLD_EVERY_S
            logger.info("planner: waiting for the plan of step %d for %.0f s: %s", self._step + 1, waited, doing)
        if self._waiting is not None:
            self._waiting(waited)


class PlannerService:
    """Plans steps ahead of their use: `submit` the coming batches, `get` each step's plan.

    At most `ahead` steps are with the producer at a time; more may be submitted and wait here. With `ahead` 0, or where
    plans are replayed, there is none, and plans are made in this process. `simulation` is for recipes with a job's
    record, and `command` starts a producer with the same one; `producer` is one that has been started. `restarts`
    counts by reason: "died", "frozen", "garbage" or "invalid".
    """

    def __init__(
        self,
        recipe: PlanRecipe,
        ahead: int = 2,
        *,
        simulation: Simulation | None = None,
        frozen_s: float = 9.0,
        command: Sequence[str] | None = None,
        producer: ProducerProcess | None = None,
    ) -> None:
        if ahead < 0 or frozen_s <= 0:
            raise ConfigError(f"planner service: needs ahead >= 0 and frozen_s > 0 but has {ahead} and {frozen_s}")
        self._ahead, self._simulation, self._frozen_s = ahead, simulation, frozen_s
        self._turn_s = min(BEAT_S, frozen_s / 4)
        self._command = command or producer_command(beat_s=self._turn_s)
        self._here: dict[int, Planner] = {}
        replays = recipe.options.choose == "replay"
        if replays:  # plans that are there already need no producer; their file is read now, and once
            recipe = recipe.settled()
            self._here[0] = recipe.planner(simulation)
        self._generations = Generations(recipe)
        self.restarts: Counter[str] = Counter()
        self._failures_in_a_row = 0
        self._requests: OrderedDict[int, PlanRequest] = OrderedDict()
        self._sent: set[int] = set()
        self._told: set[int] = set()  # generations whose recipe the producer has been sent
        self._producer: ProducerProcess | None = None
        if ahead > 0 and not replays:
            self._start(producer)

    def use_table(self, cost_table: CostTable, first: int = 0) -> None:
        """Plan by other costs from step `first` on; later steps that were planned already are planned again."""
        self._generations.use_table(cost_table, first)
        self._changed(first)

    def join(self, strategy: StrategyShape, exposed_ms: float, first: int) -> None:
        """Plan with one more candidate from step `first` on, as `use_table`; its messages add so much to a step."""
        self._generations.join(strategy, exposed_ms, first)
        self._changed(first)

    def _changed(self, first: int) -> None:
        self._sent = {step for step in self._sent if step < first}
        self._send_waiting()

    def submit(self, step: int, sequence_ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Hand over the batch of a coming step, with lengths in tokens. A step is submitted once."""
        if step in self._requests:
            raise PlanError(f"step {step} was submitted to the planner twice")
        known = Lengths.of(map(int, lengths), loads_of(lengths))
        self._requests[step] = PlanRequest(step, tuple(map(int, sequence_ids)), known)
        self._send_waiting()

    def waits(self, step: int) -> bool:
        """Whether a step was submitted and its plan not yet taken."""
        return step in self._requests

    def get(self, step: int, waiting: Waiting | None = None) -> PlannedStep:
        """The plan of a submitted step, however long it takes. PlanError only where no plan can be made."""
        request = self._requests.get(step)
        if request is None:
            raise PlanError(f"step {step} was never submitted to the planner; submit it before asking for its plan")
        patience = _Patience(step, waiting)
        made_by: MadeBy = "producer"
        try:
            while (producer := self._producer) is not None:
                found = self._from_producer(producer, request, patience)
                if isinstance(found, PlannedStep):
                    self._failures_in_a_row = 0
                    return replace(found, made_by=made_by)
                self._restart(found)
                made_by = "restarted"
            return self._from_here(request, patience)
        finally:
            del self._requests[step]
            self._sent.discard(step)
            self._send_waiting()

    def close(self) -> None:
        """End the producer. `get` still works, in this process."""
        if self._producer is not None:
            self._producer.stop()
            self._producer = None

    def __enter__(self) -> PlannerService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def kernels(self) -> str:
        """What all plans are made by; "auto" until that is decided."""
        return self._generations.kernels

    @property
    def producer_pid(self) -> int | None:
        """Process id of the producer; None when there is none."""
        return self._producer.process.pid if self._producer else None

    def _start(self, producer: ProducerProcess | None = None) -> None:
        try:
            self._producer, self._told = producer or ProducerProcess(self._command), set()
        except OSError as error:  # no more processes, or no memory for one
            logger.warning("planner: no process can be started (%s); plans are made in this one from now on", error)
            return
        # Now, before there is any request: kernels are compiled and loaded meanwhile.
        self._tell_recipe(self._producer, self._generations.of(min(self._requests, default=0)))
        self._send_waiting()

    def _tell_recipe(self, producer: ProducerProcess, generation: int) -> None:
        if generation not in self._told:
            self._told.add(generation)
            oldest = min([generation, *map(self._generations.of, self._requests)])
            self._generations.forget(oldest)
            self._here = {number: planner for number, planner in self._here.items() if number >= oldest}
            recipe = self._generations[generation].text
            producer.send({"recipe": recipe, "generation": generation, "oldest": oldest})

    def _send_waiting(self) -> None:
        if self._producer is None:
            return
        for step, request in self._requests.items():
            if len(self._sent) >= self._ahead:
                break
            if step not in self._sent:
                self._send(self._producer, request)

    def _send(self, producer: ProducerProcess, request: PlanRequest) -> None:
        self._sent.add(request.step)
        generation = self._generations.of(request.step)
        self._tell_recipe(producer, generation)
        told: dict[str, object] = {"step": request.step, "ids": request.ids, "lengths": request.lengths}
        if loads := loads_of(request.lengths):
            told["loads"] = loads
        producer.send({"generation": generation, **told})

    def _from_producer(self, producer: ProducerProcess, request: PlanRequest, patience: _Patience) -> PlannedStep | str:
        """The producer's plan, or the reason why there is none."""
        if request.step not in self._sent:
            self._send(producer, request)
        generation = self._generations.of(request.step)
        key = generation, request.step
        hidden, work, still_s = key in producer.answers, producer.work, 0.0
        while True:
            with producer.changed:
                producer.changed.wait_for(lambda: key in producer.answers or producer.broken, self._turn_s)
                line, ready = producer.answers.pop(key, None), producer.ready.get(generation)
            # Turns that were waited, not the clock: this process may have been stopped itself.
            now = producer.work
            still_s, work = (0.0, now) if now != work or now[1] else (still_s + self._turn_s, work)
            if line is not None:
                break
            if producer.broken is not None:
                return producer.broken
            if still_s >= (self._frozen_s if ready else max(self._frozen_s, _START_S)):
                return "frozen"
            patience.turn("the producer plans" if ready else "the producer starts, and compiles or loads its kernels")
        try:
            recipe = self._generations.agree(generation, ready)
            found = read_answer(line, request, recipe)
        except InvalidAnswerError as error:
            logger.warning("planner: step %d: the producer's answer is not valid: %s", request.step + 1, error)
            return "invalid"
        waited_ms = 1e3 * patience.waited_s
        return replace(found, hidden=hidden, waited_ms=waited_ms, made_by="producer", recipe=recipe.digest)

    def _from_here(self, request: PlanRequest, patience: _Patience) -> PlannedStep:
        """The plan, made in this process by the same recipe: in a thread, so that others hear that it is waited for."""
        generations, number = self._generations, self._generations.of(request.step)

        def made() -> PlannedStep:
            if number not in self._here:
                settled = generations.settle(number, generations[number].settled().options.kernels)
                self._here[number] = settled.planner(self._simulation, time.thread_time)
            recipe, planner, began = generations[number], self._here[number], time.perf_counter()
            plan, highs, simpler_ms = planner.made(request.step, request.ids, request.lengths)
            planning_ms = (time.perf_counter() - began) * 1e3
            validate_plan(plan, planner.cost_table, planner.num_ranks)
            waited_ms = 1e3 * patience.waited_s
            return PlannedStep(plan, planning_ms, False, waited_ms, "here", recipe.digest, highs, simpler_ms)

        with ThreadPoolExecutor(1, "planner-here") as pool:
            number_of, future = pool.submit(threading.get_native_id), pool.submit(made)
            work, still_s = (0, True), 0.0
            while not wait([future], self._turn_s).done:
                now = work_of(os.getpid(), number_of.result())
                still_s, work = (0.0, now) if now != work or now[1] else (still_s + self._turn_s, work)
                if still_s >= self._frozen_s:
                    break  # those that wait for it are to find that nothing moves
                patience.turn("this process compiles or loads the kernels, or plans")
            return future.result()

    def _restart(self, reason: str) -> None:
        """End the producer and start another, unless too many have failed."""
        self.close()
        self._sent.clear()
        self._failures_in_a_row += 1
        # A machine on which no child process can live (no memory left, for one) must not start one in every step.
        if self._failures_in_a_row > _RESTARTS_IN_A_ROW:
            logger.warning("planner: the producer %s again; plans are made in this process from now on", _SAID[reason])
            return
        self.restarts[reason] += 1
        logger.warning("planner: the producer %s; another one is started and asked the same", _SAID[reason])
        self._start()
