"""Steps to trace in; a file of each, what was measured beside what was predicted, out.

[Note: measured trace]
Every rank times its activities anyway (`zero_hetero.clock`), and drops the laps when their sums are taken. In a step
that is traced they are kept, and after it gathered on rank 0, which simulates the same plan and writes both: under
"rank 3 predicted" stands "rank 3 measured". Both begin with the pull, which all ranks start after a message between
all of them. The clipping and the update itself are not in it: they still run when the step's laps are read.

In other steps nothing is kept, and all that it costs is to look the step's number up.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from ds_hydra.config.hydra_block import TraceConfig
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.ranks.world import World
from ds_hydra.report.trace import Kind, Span, write_trace
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.step import Simulator, step_spans
from ds_hydra.step.stepper import Stepper
from ds_hydra.zero_hetero.clock import Lap, Laps
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

_KINDS: dict[str, Kind] = {
    "forward": "forward", "backward": "backward", "input_gradient": "backward", "weight_gradient": "backward",
    "pull": "pull", "push": "push", "receive": "receive", "send": "send", "optimizer": "norm", "run": "control",
}  # fmt: skip
_SIGNS = {"forward": "F", "backward": "B", "input_gradient": "I", "weight_gradient": "W"}


class Tracing:
    """Traces the steps that the config names. All ranks of the world make the same calls."""

    def __init__(self, config: TraceConfig, folder: Path, world: World, stepper: Stepper, job: SimulatedJob | None):
        """Files go to `folder`; `job` is what predictions are made of, if there are steps to trace."""
        self._config, self._folder, self._world, self._stepper, self._job = config, folder, world, stepper, job
        self._kept: Laps | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Run the block, which trains `step`, and keep its laps if the config names the step."""
        if step not in self._config.steps:
            yield
            return
        self._stepper.keep_laps = self._keep
        try:
            with self._profiled(step, on=self._config.profiler):
                yield
        finally:
            self._stepper.keep_laps = None

    def _keep(self, step: int, laps: Laps) -> None:
        self._kept = laps

    def write(self, step: int, plan: StepPlan, table: CostTable) -> None:
        """Write the trace of the step that was just trained, if it is one to trace; predicted by these costs."""
        if self._kept is None:
            return
        spans, self._kept = measured_spans(self._kept, self._world.rank), None
        texts = self._world.channel.texts(json.dumps(spans))
        if self._world.rank == 0:
            self._write(step, plan, table, [Span(*span) for text in texts for span in json.loads(text)])

    def _write(self, step: int, plan: StepPlan, table: CostTable, measured: Sequence[Span]) -> None:
        assert self._job is not None, "the config names steps"
        predicted = Simulator(replace(self._job, found=replace(self._job.found, table=table))).step(plan)
        begin = predicted.agreed_s
        moved = [span._replace(start_s=span.start_s + begin, stop_s=span.stop_s + begin) for span in measured]
        path = self._folder / f"trace_step{step}.json"
        # Training is worth more than a trace that cannot be written.
        try:
            count = write_trace(path, {"predicted": step_spans(predicted), "measured": moved})
        except ConfigError as error:
            logger.warning("step %d: %s", step, error)
            return
        logger.info("step %d: trace with %d spans in %s; open it in https://ui.perfetto.dev", step, count, path)

    @contextmanager
    def _profiled(self, step: int, *, on: bool) -> Iterator[None]:
        """Run the block under torch's profiler, if asked to: one file of this rank."""
        if not on:
            yield
            return
        with torch.profiler.profile() as profile:
            yield
        profile.export_chrome_trace(str(self._folder / f"profile_step{step}_rank{self._world.rank}.json"))


def measured_spans(laps: Laps, rank: int) -> list[Span]:
    """A step's laps as spans, in seconds from its first pull on; what began before belongs to the step before."""
    zero = next(lap.begin for lap in laps.laps if lap.kind == "pull")
    spans = []
    for lap in laps.laps:
        start = laps.clock.seconds(zero, lap.begin)
        if start >= 0:
            spans.append(Span(rank, "compute", _KINDS[lap.kind], _name(lap), start, laps.clock.seconds(zero, lap.end)))
    return spans


def _name(lap: Lap) -> str:
    if lap.kind in _SIGNS:
        number = "" if lap.microbatch is None else str(lap.microbatch)  # W: of several together
        return _SIGNS[lap.kind] + number + "'" * lap.part
    return {"run": "schedule", "optimizer": "norm"}.get(lap.kind, lap.kind)
