"""Coming batches in, their plans out, made by a producer process some steps ahead. Pure: no torch.

[Note: planning never stops training]
The producer is a child process (`ProducerProcess`). Whatever happens to it (it is killed, it freezes, it answers
nonsense), the step is planned in this process by the same planner, the event is counted by its reason, and a new
producer starts. With 2 steps planned ahead, patience 5 s and a producer that freezes while it plans step 12:

  get(12)   waits 5 s, kills the producer, starts another, plans step 12 here, sends steps 13 and 14 to the new one
  get(13)   takes the new producer's plan, or waits for it

So a frozen producer costs training 5 s once, and a dead one, whose pipe closes, costs only the planning of one step.
Kernels are never compiled here, since that takes half a minute: until the cache on disk is warm, the planner of this
process runs them as plain Python.

One service per job decides the plans and the ranks share what it says, because a plan made here may differ from the
one that the producer would have made.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.table_file import table_record
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import check_safe, validate_plan
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.producer_process import ProducerProcess
from ds_hydra.planner.selection import Planner, warm_up
from ds_hydra.zero_hetero.errors import ConfigError, PlanError

logger = logging.getLogger(__name__)
_RESTARTS_IN_A_ROW = 5


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan and how it came about.

    `planning_ms` is the planner's wall time. `hidden` says whether the plan was ready when it was asked for.
    `fallback` says why it was made in this process; it is None when the producer made it.
    """

    plan: StepPlan
    planning_ms: float
    hidden: bool
    fallback: str | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    step: int
    ids: tuple[int, ...]
    lengths: tuple[int, ...]


class PlannerService:
    """Plans steps ahead of their use: `submit` the coming batches, `get` each step's plan.

    At most `ahead` steps are with the producer at a time; more may be submitted and wait here. `get` waits up to
    `patience` seconds for an answer; then the producer counts as frozen. `fallbacks` and `restarts` count events by
    reason: "died", "frozen", "garbage", "invalid", "refused" or "stopped". `job` is the record that the producer's
    `command` simulates steps by, if it does.
    """

    def __init__(
        self,
        cost_table: CostTable,
        strategies: Sequence[StrategyShape],
        options: PlannerOptions | None = None,
        ahead: int = 2,
        *,
        exposed_ms: Sequence[float] = (),
        job: Mapping[str, Any] | None = None,
        patience: float = 5.0,
        command: Sequence[str] = (sys.executable, "-m", "ds_hydra.planner.producer"),
    ) -> None:
        if ahead < 1 or patience <= 0:
            raise ConfigError(f"planner service: needs ahead >= 1 and patience > 0 but has {ahead} and {patience}")
        options = options or PlannerOptions()
        self._options, self._ahead, self._patience, self._command = options, ahead, patience, command
        self._exposed_ms, self._job = tuple(exposed_ms), job
        # Counts the cost tables. Requests and answers carry it, so an answer by an older table is never mistaken for
        # one by the present table: with steps 7 and 8 at the producer, `use_table` makes generation 1 of 0 and sends
        # both again; the answers (0, 7) and (0, 8) that are still on their way are kept under keys nobody asks for.
        self._generation = 0
        self._set_table(cost_table, strategies)
        self.fallbacks: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()
        self._failures_in_a_row = 0
        self._requests: OrderedDict[int, _Request] = OrderedDict()
        self._sent: set[int] = set()
        self._loading = False
        self._compiled_here = threading.Event()
        self._producer: ProducerProcess | None = ProducerProcess(command, self._setup)

    def _set_table(self, cost_table: CostTable, strategies: Sequence[StrategyShape]) -> None:
        exposed, compiled = self._exposed_ms, replace(self._options, kernels="compiled", effort=0)
        self._pure = Planner(cost_table, strategies, replace(self._options, kernels="pure"), exposed_ms=exposed)
        self._compiled = Planner(cost_table, strategies, compiled, exposed_ms=exposed)  # training waits: no effort
        setup = {
            "table": table_record(cost_table),
            "strategies": [str(strategy) for strategy in self._pure.strategies],
            "options": asdict(self._options),
            "exposed_ms": self._exposed_ms,
            "job": self._job,
        }
        self._setup = json.dumps(setup)

    def use_table(self, cost_table: CostTable) -> None:
        """Plan by other costs from the next `get` on; steps that were planned ahead are planned again."""
        self._set_table(cost_table, self._pure.strategies)
        self._generation += 1
        self._sent.clear()
        if self._producer is not None:
            with self._producer.changed:
                self._producer.answers.clear()
            self._producer.send({"table": table_record(cost_table)})
        self._send_waiting()

    def submit(self, step: int, sequence_ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Hand over the batch of a coming step, with lengths in tokens. A step is submitted once."""
        if step in self._requests:
            raise PlanError(f"step {step} was submitted to the planner twice")
        self._requests[step] = _Request(step, tuple(map(int, sequence_ids)), tuple(lengths))
        self._send_waiting()

    def waits(self, step: int) -> bool:
        """Whether a step was submitted and its plan not yet taken."""
        return step in self._requests

    def get(self, step: int) -> PlannedStep:
        """The plan of a submitted step. PlanError only if no planner could plan it."""
        request = self._requests.get(step)
        if request is None:
            raise PlanError(f"step {step} was never submitted to the planner; submit it before asking for its plan")
        try:
            planned = self._from_producer(request)
            return self._fall_back(request, planned) if isinstance(planned, str) else planned
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
    def producer_pid(self) -> int | None:
        """Process id of the producer; None when there is none."""
        return self._producer.process.pid if self._producer else None

    def _send_waiting(self) -> None:
        if self._producer is None:
            return
        for step, request in self._requests.items():
            if len(self._sent) >= self._ahead:
                break
            if step not in self._sent:
                self._send(self._producer, request)

    def _send(self, producer: ProducerProcess, request: _Request) -> None:
        self._sent.add(request.step)
        producer.send({"generation": self._generation, **asdict(request)})

    def _from_producer(self, request: _Request) -> PlannedStep | str:
        """The producer's plan, or the reason why there is none."""
        producer = self._producer
        if producer is None:
            return "stopped"
        if request.step not in self._sent:
            self._send(producer, request)
        key = (self._generation, request.step)
        deadline = time.monotonic() + self._patience
        with producer.changed:
            hidden = key in producer.answers
            while key not in producer.answers and producer.broken is None:
                if not producer.changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    return "frozen"
            line = producer.answers.pop(key, None)
        if line is None:
            return producer.broken or "died"
        return self._read_answer(request, json.loads(line), hidden)

    def _read_answer(self, request: _Request, answer: dict[str, Any], hidden: bool) -> PlannedStep | str:
        if "error" in answer:
            return "refused"
        try:
            if "invalid" in answer:
                raise PlanError(answer["invalid"])
            plan = StepPlan.from_json(answer["plan"], "the producer's answer")
            planning_ms = float(answer["planning_ms"])
            # The producer has run the plan's schedules to check its times and its memory. What costs little is checked
            # again: a producer whose memory went bad may answer in valid JSON and still lose a sequence.
            if (plan.step, plan.sequence_ids, plan.lengths) != (request.step, request.ids, request.lengths):
                raise PlanError(f"the producer answered for other sequences than those of step {request.step}")
            check_safe(plan, self._pure.cost_table, self._pure.num_ranks)
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("planner: step %d: the producer's plan is not valid: %s", request.step, error)
            return "invalid"
        self._failures_in_a_row = 0
        if kernels.is_warm():
            self._load_kernels()
        return PlannedStep(plan, planning_ms, hidden)

    def _fall_back(self, request: _Request, reason: str) -> PlannedStep:
        """Plan here, count it, and start a new producer unless the old one is well."""
        # "refused" is an error that planning raised in the producer, which is well: planning here raises it again,
        # in this process, where the user sees it.
        if reason not in ("refused", "stopped"):
            self._restart(reason)
        started = time.perf_counter()
        planner = self._compiled if self._compiled_here.is_set() else self._pure
        plan = replace(planner.plan(request.step, request.ids, request.lengths), source="fast")
        planning_ms = (time.perf_counter() - started) * 1e3
        validate_plan(plan, planner.cost_table, planner.num_ranks, self._options.objective)
        self.fallbacks[reason] += 1
        return PlannedStep(plan, planning_ms, False, reason)

    def _restart(self, reason: str) -> None:
        if self._producer is not None:
            self._producer.stop()
            self._producer = None
        self._sent.clear()
        self._failures_in_a_row += 1
        # A machine on which no child process can live (no memory left, for one) must not start one in every step.
        if self._failures_in_a_row > _RESTARTS_IN_A_ROW:
            logger.warning("planner: the producer failed %d times in a row; planning in process", _RESTARTS_IN_A_ROW)
            return
        self.restarts[reason] += 1
        logger.warning("planner: the producer %s; planning this step in process and starting a new one", reason)
        self._producer = ProducerProcess(self._command, self._setup)

    def _load_kernels(self) -> None:
        """Load the compiled kernels from the warm cache, once, in a thread beside training."""
        if self._options.kernels == "pure" or self._loading:
            return
        self._loading = True

        def load() -> None:
            warm_up()
            self._compiled_here.set()

        threading.Thread(target=load, daemon=True, name="planner-kernels").start()
