"""Makes the next step ready, its plan and its micro-batches, in a thread while the present step runs.

[Note: between two steps]
Of map-style data all ranks know the coming sequences, so a step can be made ready while the one before it still runs:

  thread    plan of step 8, from rank 0 | read its sequences, pack them |
  training  pull 7, run 7, push 7, update ............................. | figures of 7, agreement on 8 | pull 8, ...

Two small messages a step are left: the plan, along a tree, which travels beside training, and one of all ranks to all,
after the update, with the figures of the step and, on the same row, what each rank says of the next one: the digest of
its plan and its loss weight, or that it has failed. So all ranks know whether step 8 can begin before step 7 returns.

An error of the thread, such as one of the user's dataset, is raised in the step that it belongs to, with its own
traceback. Nothing is consumed by being read ahead: places in the data are counted by the steps that were trained. After
the message nothing runs in the thread any more, so it is idle whenever the user's own code runs.

With hydra.planner.ahead = 0 nothing is made ready; nor are steps that are handed in, and of a stream only its items are
read ahead. Then a step makes its own batches, and the agreement takes a message more.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.data.tokens import Sequences
from ds_hydra.engine.plans import PlanSource
from ds_hydra.planner import PlannedStep
from ds_hydra.ranks.world import World
from ds_hydra.step.batching import FAILED, LATER, BuiltStep, row_of, row_without_plan, settled
from ds_hydra.step.stepper import Stepper
from ds_hydra.watchdog import Activity
from ds_hydra.zero_hetero.told import release, told_of


@dataclass
class _Making:
    """A step that is made ready. The thread writes what is below `costs`, and is at its end when it is read."""

    step: int  # counted from 0
    data: Sequences
    costs: CostTable
    thread: threading.Thread | None = None
    planned: PlannedStep | None = None
    built: BuiltStep | None = None
    row: Tensor = field(default_factory=row_without_plan)
    error: BaseException | None = None
    rows: Tensor | None = None  # of all ranks

    def wait(self) -> None:
        """Until the thread has ended."""
        assert self.thread is not None, "it was started"
        self.thread.join()


class NextStep:
    """Makes one step ready in a thread [Note: between two steps]. Every rank must make the same calls."""

    def __init__(self, plans: PlanSource, stepper: Stepper, world: World, activity: Activity):
        self._plans, self._stepper, self._world, self._activity = plans, stepper, world, activity
        self._making: _Making | None = None

    def begin(self, step: int, data: Sequences) -> None:
        """Make `step` ready, counted from 0, of sequences that are all known. The step before must be ready."""
        self.forget()
        self._making = making = _Making(step, data, self._plans.table_of(step))
        making.thread = threading.Thread(target=self._make, args=(making,), daemon=True, name="next-step")
        making.thread.start()

    def row(self) -> Tensor | None:
        """This rank's row of agreement on the step that is made ready, and whether it was waited for; None if there is
        no such step."""
        making = self._making
        if making is None:
            return None
        assert making.thread is not None, "it was started"
        late = making.thread.is_alive()
        if late and making.planned is None:
            with self._activity(f"waiting for plan {making.step + 1}"):
                making.wait()
        making.wait()
        if making.planned is None and making.error is not None and told_of(making.error) is None:
            raise making.error  # now: the others may wait for a plan that this rank never took, and say nothing
        return torch.cat((making.row, torch.tensor([late])))

    def heard(self, rows: Tensor | None) -> None:
        """Keep what all ranks said of the step."""
        if self._making is not None:
            self._making.rows = rows

    def take(self, step: int) -> tuple[PlannedStep | None, tuple[BuiltStep, int] | None]:
        """The step, if it was made ready: its plan, which all ranks hold alike, and its batches with the loss weight if
        these were made, too. Raises as `settled` where a rank could not make it."""
        making, self._making = self._making, None
        if making is None:
            return None, None
        making.wait()
        if making.step != step or making.rows is None:  # the step before was not trained to its end
            return None, None
        weight = settled(step, making.rows[:, :-1], making.error, self._world.channel)
        late = bool(making.rows[0, -1])
        assert making.planned is not None, "a thread without an error has a plan"
        planned = replace(making.planned, hidden=making.planned.hidden or not late)  # as on rank 0, which made it
        return planned, None if making.built is None or weight is None else (making.built, weight)

    def forget(self) -> None:
        """Drop what was made ready, if anything was, and what its error holds: training goes on elsewhere."""
        if self._making is not None:
            self._making.wait()
            release(self._making.error)
            self._making = None

    def ended(self, within: float) -> bool:
        """Whether nothing is made ready any more, which is waited for so many seconds."""
        thread = self._making and self._making.thread
        if thread:
            thread.join(within)
        return not (thread and thread.is_alive())

    def _make(self, making: _Making) -> None:
        """The life of the thread."""
        try:
            if self._world.device.type == "cuda":
                torch.cuda.set_device(self._world.device)  # a thread begins with device 0
            planned = making.planned = self._plans.next(making.step, self._world.ahead)
            making.row = row_of(planned.plan, making.costs, LATER)
            if self._stepper.runtimes.can_build(planned.plan):
                making.row[-1] = FAILED
                making.built = self._stepper.build(planned.plan, making.data, making.costs, making.step + 1)
                making.row[-1] = making.built.weight
        except BaseException as error:  # whatever the user's dataset raises: it belongs to the step
            making.error = error
