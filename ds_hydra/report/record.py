"""The record of a step: its fields, its line in the log, its monitor events, and a run's summary. Pure: no torch.

The engine hands every step to it. `calibration` decides what is learnt from a step, and when a corrected table is due.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import FileIO
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ds_hydra.costs.cost_table import CostTable, TableFile
from ds_hydra.costs.memory import EXPERT_IMBALANCE
from ds_hydra.plan.step_plan import THEN, StepPlan
from ds_hydra.report.calibration import TRIED_FOR, Calibration, Correction, StageTime, Stragglers, read_corrections
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.nodes import Cluster

_REMEDY = {
    "apply": "; the plans of the steps after the next one give it less",
    "report": '; with hydra.cost_correction "apply" later plans give it less',
}
_MODES = ("off", *_REMEDY)  # any other is a run's steps file
_WORSE = 1.25  # of what was told of uneven experts, before it is told again


class StepWatch:
    """Holds the calibration of one job; `mode` is the config's `cost_correction`, "auto" settled. All ranks give the
    same figures."""

    def __init__(
        self,
        mode: str,
        found: TableFile,
        num_layers: int,
        num_elements: int,
        *,
        measured: bool,
        cluster: Cluster | None = None,
        expert_imbalance: float = EXPERT_IMBALANCE,
    ) -> None:
        """`num_elements` are the master elements of one rank; memory is planned for an `expert_imbalance`. Of costs
        that nobody `measured` nothing is expected until steps have corrected them."""
        self.mode = mode
        self._num_elements, self._measured = num_elements, measured
        self._found, self._num_layers = found, num_layers
        self._imbalance = expert_imbalance
        self._cluster = cluster if cluster is not None and cluster.mixed else None
        self.table = found.table  # that plans are made by
        self._replayed = None if mode in _MODES else read_corrections(mode, found.table)
        self.calibration, self.stragglers = self.fresh(), self.fresh_stragglers()

    def fresh_stragglers(self, state: Mapping[str, Any] | None = None) -> Stragglers:
        """A watch of slow ranks that has seen nothing, or what `Stragglers.state` told."""
        return Stragglers(state=state, remedy=_REMEDY.get(self.mode, ""))

    def slow_ranks(self, stages: Iterable[StageTime]) -> list[str]:
        """A step's stages in, lines on ranks that have become slow out; none where nobody measured the costs."""
        return self.stragglers.observe(stages) if self._measured else []

    def uneven_experts(self, imbalances: Sequence[float]) -> list[str]:
        """A step's imbalance of each layer whose experts are spread in, a line out where memory is planned for less."""
        found = fmean(imbalances or [0.0])  # each layer of a rank keeps its own rows
        if found <= self._imbalance:
            return []
        planned, self._imbalance = self._imbalance, _WORSE * found
        return [
            f"the busiest of ranks that share experts computes {found:.1f} times the rows of even routing, and memory "
            f"is planned for {planned:.1f} times: set hydra.expert_imbalance to what lasts, or plans may not fit"
        ]

    @property
    def applies(self) -> bool:
        """Whether plans are made by corrected costs."""
        return self.mode == "apply" or self._replayed is not None

    def fresh(self, state: Mapping[str, Any] | None = None) -> Calibration:
        """A calibration that has learnt nothing, or what `Calibration.state` told."""
        return Calibration(self._found.table, self._num_layers, self._found, state)

    def fields(
        self,
        plan: StepPlan,
        *,
        pipeline_ms: Sequence[float],
        stage_ms: Sequence[Sequence[float]],
        step_ms: float,
        moved_bytes: int,
    ) -> Mapping[str, Any]:
        """Fields of the step's record; it learns from the step afterwards, but for mode "off"."""
        if self.mode == "off":
            return {"predicted_step_ms": plan.step_ms, "expected_ms": plan.step_ms if self._measured else None}
        prediction = self.calibration.predict(plan, self._num_elements, moved_bytes)
        expected = self.calibration.correct(plan, prediction)
        factors, known = self.calibration.factors, self._measured or self.calibration.has_learnt
        # Only now: a prediction that had already learnt from its own step would always be right.
        self.calibration.observe(plan, prediction, pipeline_ms, step_ms)
        return {
            "predicted_step_ms": prediction.step_ms,
            "expected_ms": expected if known else None,
            "predicted_pipeline_ms": prediction.pipeline_ms,
            "predicted_stage_ms": prediction.stage_ms,
            "stage_ms": tuple(tuple(row) for row in stage_ms),
            "corrections": {str(scheme): factors[scheme] for scheme in sorted(factors, key=str)},
        }

    def corrections(self, step: int) -> tuple[Correction, ...]:
        """What plans are to be made by that come after `step`: with mode "apply" corrected costs, after steps 4, 8 and
        every 16, and other slow ranks when there are; before them those of some steps in which shapes are tried
        [Note: early runs]. With a steps file, what that has."""
        if self._replayed is not None:
            return self._replayed.get(step, ())
        if not self.applies:
            return ()
        corrected, tried, slow = self.calibration.corrected(step), self.calibration.tried(step), self.stragglers.paces
        if corrected is None and tried is None and slow == self.table.slow.paces:
            return ()
        first = step + 1  # [Note: corrections at fixed steps]
        before = () if tried is None else (Correction(first, tried, slow),)
        return *before, Correction(first + TRIED_FOR * len(before), corrected or self.calibration.in_force, slow)

    def apply(self, correction: Correction) -> CostTable:
        """The costs that plans are made by from now on."""
        self.table = correction.of(self._found.table, self._cluster)
        return self.table


Event = tuple[str, float, int]  # name, value, x-axis (sequences so far), as DeepSpeed's monitors take them


@dataclass(frozen=True, slots=True)
class HighsFigures:
    """HiGHS's share in a step's plan, `planner.highs` in the record [Note: composed strategies]."""

    programs: int
    nodes: int
    cpu_ms: float
    gain: float  # share of the step that `strategy` saves, or would where only candidates are run; 0: none does
    new_strategy: bool  # whether the step ran it
    strategy: str = ""  # that was composed, and is faster than all candidates


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The figures of one step. Times are in milliseconds; `step` counts from 1, as `global_steps` does after it."""

    step: int
    loss: float
    grad_norm: float | None
    learning_rate: float  #: of the first parameter group, as used by this step
    num_tokens: int  #: of the sequences, padding not counted
    num_targets: int  #: tokens that were predicted
    num_sequences: int
    strategy: str
    changed: bool  #: the strategy differs from the step before
    step_ms: float  #: measured, from the plan to the start of the masters' update
    predicted_ms: float  #: of the slowest pipeline, each phase's, before messages
    router_loss: float = 0.0  #: the part of the loss that a mixture of experts' routers have
    expert_imbalance: float = 0.0  #: largest rank's rows over even ones, in the mean of layers; 0: none are spread
    worst_expert_imbalance: float = 0.0  #: the same of the layer where it is the largest
    recomputed: float = 0.0  #: share of all layers of all tokens that backwards computed again
    beside: float = 0.0  #: share of the pipelines' predicted time that first stages take besides layers: images
    counts: str = ""  #: what a target counts: as hydra.loss_norm says, or "script": as a script's own loss has it
    run_twice: int = 0  #: batches that ran when their losses were read, and again with the step
    num_padding: int = 0  #: padding tokens, computed in addition to num_tokens
    total_steps: int | None = None  #: hydra.total_steps
    pipeline_ms: tuple[float, ...] = ()  #: measured time of each pipeline, in rank order, phase after phase
    num_pipelines: tuple[int, ...] = ()  #: of each phase; () stands for one phase
    searched_ms: float = 0.0  #: the plan's time by the formula that the search works with
    lower_bound_ms: float = 0.0  #: by that formula no plan of this step is faster; 0 when not known
    planning_ms: float = 0.0
    planning_hidden: bool = True  #: the plan was ready when the step began
    plan_source: str = "search"
    planning_waited_ms: float = 0.0  #: that rank 0 waited for the plan, in the step or in the thread that made it ready
    planning_by: str = "producer"  #: "restarted": one that took another's place meanwhile; "here": the training process
    highs: HighsFigures | None = None  #: what HiGHS did for the plan; None: it had nothing to do
    mix_saved: float | None = None  #: share of the step by the best plan of fewer shapes, at least; None: none is known
    planning_recipe: str = ""  #: hex, digest of all that plans follow from besides the sequences
    plan_digest: str = ""  #: hex
    ids_digest: str = ""  #: hex, of the sequence ids
    num_micro_batches: tuple[int, ...] = ()  #: of each pipeline
    pull_ms: float = 0.0  #: waited for, while nothing else ran
    push_ms: float = 0.0  #: the same; waiting for the slowest pipeline is not in it
    slowest_wait_ms: float = 0.0  #: waited for the slowest pipeline, each phase's, in the mean of the ranks
    optimizer_ms: float = 0.0  #: gradient norm; clipping and update of the step before, since this one's still run
    pull_bytes: int = 0
    push_bytes: int = 0
    peak_memory_bytes: int = 0  #: largest of the ranks, in this step; 0 when not known
    tflops: float = 0.0  #: 10^12 of the model's operations in a second, on each rank; 0 where not known or not on a GPU
    skipped: bool = False  #: the gradient was not finite, so parameters stayed as they were
    skipped_steps: int = 0  #: so far
    plan: str = ""  #: StepPlan.to_json(), for `plans_file`
    predicted_step_ms: float | None = None  #: with messages and the step's overhead
    expected_ms: float | None = (
        None  #: the same, corrected by what earlier steps have shown; None: nothing is known yet
    )
    predicted_pipeline_ms: tuple[float, ...] = ()
    predicted_stage_ms: tuple[tuple[float, ...], ...] = ()  #: of each pipeline's stages
    stage_ms: tuple[tuple[float, ...], ...] = ()  #: computing, of each stage's slowest rank
    corrections: Mapping[str, float] = field(default_factory=dict)  #: measured / predicted time, by scheme
    new_costs: Sequence[Any] = ()  #: that later plans are made by, as `Correction.record`

    @property
    def balance(self) -> float:
        """Largest over mean pipeline time, each summed over the phases; 1 is perfect."""
        mean = sum(sum(times) / len(times) for times in self._phases())
        return sum(self.phase_ms) / mean if mean > 0 else 1.0

    @property
    def phase_ms(self) -> tuple[float, ...]:
        """Measured time of each phase: of its slowest pipeline."""
        return tuple(max(times) for times in self._phases())

    def _phases(self) -> Iterator[tuple[float, ...]]:
        """The pipelines' times of each phase that has any."""
        times = iter(self.pipeline_ms)
        for count in self.num_pipelines or (len(self.pipeline_ms),):
            of_phase = tuple(islice(times, count))
            if of_phase:
                yield of_phase

    @property
    def padding_share(self) -> float:
        computed = self.num_tokens + self.num_padding
        return self.num_padding / computed if computed else 0.0

    @property
    def tokens_per_second(self) -> float:
        return 1000.0 * self.num_tokens / self.step_ms if self.step_ms > 0 else 0.0

    @property
    def prediction_error(self) -> float | None:
        """(expected - measured) / measured; None where nothing was expected."""
        return self.expected_ms / self.step_ms - 1.0 if self.expected_ms is not None and self.step_ms > 0 else None

    @property
    def gap(self) -> float | None:
        """How much slower this plan is predicted to be than the lower bound, 0.02 for 2 %; None without a bound."""
        return self.searched_ms / self.lower_bound_ms - 1.0 if self.lower_bound_ms > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived figures, fit for JSON (a number that is not finite becomes null)."""
        record = asdict(self)
        del record["plan"]  # large; it has a file of its own
        record["planner"] = {"highs": record.pop("highs")}
        for name in ("balance", "phase_ms", "padding_share", "tokens_per_second", "prediction_error", "gap"):
            record[name] = getattr(self, name)
        return {key: _finite(value) for key, value in record.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


SETTLED = 10  # first steps of a run, which predictions are learnt from and not judged by
MOST_CHARACTERS = 140  # of a line, so that it fits a terminal beside the time and the rank


def format_line(record: StepRecord, seconds_left: float | None = None) -> str:
    """The line that a step prints, of at most MOST_CHARACTERS; what is usual is left out.

    `wait` is the share of the step for which ranks waited for the slowest pipeline, in their mean. A strategy that is
    too long for the line is cut, and where that is not enough, other figures give way: all stand in the record.
    """
    parts = _parts(record)
    if seconds_left is not None:
        parts["left"] = f"{_clock(seconds_left)} left"
    strategy, give_way = parts["strategy"], list(_GIVE_WAY)
    while True:
        parts["strategy"] = ""
        room = MOST_CHARACTERS - len(" | ".join(parts.values()))
        if room >= min(_LEAST_STRATEGY, len(strategy)) or not give_way:
            break
        parts.pop(give_way.pop(0), None)
    room = max(room, _LEAST_STRATEGY)
    parts["strategy"] = strategy if len(strategy) <= room else strategy[: room - 3] + "..."
    return " | ".join(parts.values())


def _parts(record: StepRecord) -> dict[str, str]:
    """What a line may say, in its order."""
    total = f"/{record.total_steps}" if record.total_steps else ""
    ms, memory, error = max(record.step_ms, 1e-9), record.peak_memory_bytes / 2**30, record.prediction_error
    parts = {
        "step": f"step {record.step}{total}",
        "loss": f"loss {record.loss:.4f}",
        "norm": "norm -" if record.grad_norm is None else f"norm {record.grad_norm:.3g}",
        "rate": f"lr {record.learning_rate:.1e}",
        "strategy": record.strategy,
        "again": f"again {record.recomputed:.0%}" if record.recomputed else "",
        "beside": f"images {record.beside:.0%}" if record.beside else "",
        "time": f"{record.step_ms:,.0f} ms" + ("" if error is None else f" (pred {error:+.0%})"),
        "experts": f"experts {record.expert_imbalance:.1f}x" if record.expert_imbalance else "",
        "wait": f"wait {record.slowest_wait_ms / ms:.0%}",
        "speed": f"{_thousands(record.tokens_per_second)} tok/s",
        "flops": f"{record.tflops:.0f} TFLOP/s" if record.tflops else "",
        "padding": f"pad {record.padding_share:.0%}" if record.padding_share >= _MUCH_PADDING else "",
        "memory": f"{memory:.1f} GiB" if memory else "",
        "plan": "" if record.planning_hidden else f"plan late {record.planning_ms:,.0f} ms",
        "skipped": "SKIPPED: not finite" if record.skipped else "",
    }
    return {name: text for name, text in parts.items() if text}


_GIVE_WAY = ("rate", "norm", "padding", "memory", "flops", "again", "beside", "experts", "plan")  # least missed first
_MUCH_PADDING = 0.01  # share of the computed tokens
_LEAST_STRATEGY = 12  # characters of a strategy that are shown whatever else the line has to say


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds: 2:03:09, or 3:09 below an hour."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def _thousands(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def monitor_events(record: StepRecord, num_sequences_so_far: int) -> list[Event]:
    """The record as scalars under the names DeepSpeed uses where it has one."""
    values: dict[str, float | None] = {
        "Train/Samples/train_loss": record.loss,
        "Train/Samples/router_loss": record.router_loss or None,
        "Train/Hydra/expert_imbalance": record.expert_imbalance or None,
        "Train/Hydra/worst_expert_imbalance": record.worst_expert_imbalance or None,
        "Train/Samples/lr": record.learning_rate,
        "Train/Samples/grad_norm": record.grad_norm,
        "Train/Samples/elapsed_time_ms_step": record.step_ms,
        "Train/Hydra/expected_ms": record.expected_ms,
        "Train/Hydra/prediction_error": record.prediction_error,
        "Train/Hydra/balance": record.balance,
        "Train/Hydra/tokens": record.num_tokens,
        "Train/Hydra/padding_share": record.padding_share,
        "Train/Hydra/tokens_per_second": record.tokens_per_second,
        "Train/Hydra/planning_ms": record.planning_ms,
        "Train/Hydra/planning_hidden": record.planning_hidden,
        "Train/Hydra/planning_waited_ms": record.planning_waited_ms,
        "Train/Hydra/gap": record.gap,
        "Train/Hydra/highs_ms": None if record.highs is None else record.highs.cpu_ms,
        "Train/Hydra/highs_gain": None if record.highs is None else record.highs.gain,
        "Train/Hydra/pull_ms": record.pull_ms,
        "Train/Hydra/push_ms": record.push_ms,
        "Train/Hydra/slowest_wait_ms": record.slowest_wait_ms,
        "Train/Hydra/peak_memory_bytes": record.peak_memory_bytes or None,
        "Train/Hydra/tflops": record.tflops or None,
        "Train/Hydra/optimizer_ms": record.optimizer_ms,
        "Train/Hydra/strategy_changed": record.changed,
        "Train/Hydra/num_pipelines": len(record.pipeline_ms),
        "Train/Hydra/num_phases": len(record.num_pipelines) or 1,
        "Train/Hydra/skipped_steps": record.skipped_steps,
    }
    return [(name, float(v), num_sequences_so_far) for name, v in values.items() if v is not None]


def is_heterogeneous(strategy: str) -> bool:
    """Whether a strategy in canonical form mixes parallel schemes; of several phases, whether one of them does."""
    return any(
        len({term.split("*")[-1] for term in phase.replace(" ", "").split("+")}) > 1 for phase in strategy.split(THEN)
    )


logger = logging.getLogger(__name__)

_LATEST = 20  # steps that tell how long the rest will take


class RunTotals:
    """Figures of all steps of a run, for its summary; it keeps a few numbers of each step and not its record."""

    def __init__(self) -> None:
        self.strategies: Counter[str] = Counter()
        self.restarted = self.num_highs = 0
        self.saved = array("d")  # by mixes of shapes
        self.composed: set[str] = set()
        self.highs_ms = self.highs_step_ms = 0.0
        self.num_tokens = self.num_changes = self.num_hidden = self.num_skipped = 0
        self.losses, self.step_ms, self.balances, self.errors = (array("d") for _ in range(4))

    def add(self, record: StepRecord) -> None:
        """Count one more step."""
        self.strategies[record.strategy] += 1
        self.num_tokens += record.num_tokens
        self.num_changes += record.changed
        self.num_hidden += record.planning_hidden
        self.restarted += record.planning_by == "restarted"
        self.num_skipped += record.skipped
        if record.highs is not None:
            self.num_highs += 1
            self.highs_ms += record.highs.cpu_ms
            self.highs_step_ms += record.step_ms
            if record.highs.new_strategy:
                self.composed.add(record.strategy)
        if record.mix_saved is not None:
            self.saved.append(record.mix_saved)
        self.losses.append(record.loss)
        self.step_ms.append(record.step_ms)
        self.balances.append(record.balance)
        self.errors.append(math.nan if record.prediction_error is None else abs(record.prediction_error))

    def seconds_left(self, record: StepRecord) -> float | None:
        """Until the last step, by the median of the latest ones; None when the job has no last step."""
        if record.total_steps is None or not self.step_ms:
            return None
        return max(0, record.total_steps - record.step) * median(self.step_ms[-_LATEST:]) / 1000.0

    def _predicted(self) -> str:
        """How far predictions were off, in the steps after those that they were learnt from if there were any."""
        known, later = ([e for e in errors if not math.isnan(e)] for errors in (self.errors, self.errors[SETTLED:]))
        if not known:
            return "no prediction"
        of = f" after {SETTLED} steps" if later else ""
        return f"prediction error{of}: median {median(later or known):.1%}, worst {max(later or known):.1%}"

    def _of_highs(self) -> list[str]:
        if not self.num_highs:
            return []
        share = self.highs_ms / self.highs_step_ms if self.highs_step_ms else 0.0
        return [f"HiGHS composed {len(self.composed)} strategies in {self.num_highs} steps, {share:.1%} of step time"]

    def _of_mixes(self) -> list[str]:
        """What several shapes saved by the costs, over the best plans of fewer."""
        if not self.saved:
            return []
        return [f"mixes of shapes saved {fmean(self.saved):.1%} at least by the costs, in {len(self.saved)} steps"]

    def summary(self) -> str:
        """Strategies used and how often, times and prediction errors; "" when there was no step."""
        if not self.step_ms:
            return ""
        steps, seconds = len(self.step_ms), sum(self.step_ms) / 1000.0
        mixed = sum(is_heterogeneous(strategy) for strategy in self.strategies)
        lines = [
            f"{steps} steps, {self.num_tokens:,} tokens in {seconds:.1f} s, "
            f"{self.num_tokens / seconds if seconds else 0:,.0f} tok/s; loss {self.losses[0]:.4f} -> "
            f"{self.losses[-1]:.4f}; {self.num_skipped} skipped",
            f"step time: median {median(self.step_ms):,.0f} ms; balance: median {median(self.balances):.2f}; "
            f"{self._predicted()}; "
            f"planning hidden in {self.num_hidden} steps"
            + (f", {self.restarted} planned by a producer that was started again" if self.restarted else ""),
            *self._of_highs(),
            *self._of_mixes(),
            f"{len(self.strategies)} strategies, {mixed} heterogeneous, {self.num_changes} changes:",
        ]
        lines += [f"  {count:5d} x  {strategy}" for strategy, count in self.strategies.most_common()]
        return "\n".join(lines)


def _writable(name: str | None) -> _Lines | None:
    """A file that can be appended to, its folder made if need be."""
    if name is None:
        return None
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            return _Lines(path)
    except OSError as error:
        raise ConfigError(
            f"the file {name!r} cannot be written: {error.strerror}; change hydra.steps_file or hydra.plans_file"
        ) from error


class _Lines:
    """A file of lines, which may miss some where the disk is full: training is worth more than its log."""

    def __init__(self, path: Path):
        self.path, self._warned = path, False

    def add(self, line: str, *, anew: bool = False) -> None:
        """Append a line, whole or not at all; the first that cannot be written is warned of."""
        try:
            with self.path.open("wb" if anew else "ab", buffering=0) as file:
                before, data = file.tell(), f"{line}\n".encode()
                if _written(file, data) < len(data):
                    with contextlib.suppress(OSError):  # of what is no file
                        file.truncate(before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._warned:
                logger.warning(
                    "%s: a line cannot be written (%s): training goes on, and lines are missing there until it can",
                    self.path,
                    error.strerror or error,
                )
            self._warned = True


def _written(file: FileIO, data: bytes) -> int:
    """Write as much as the disk takes; how many bytes that is."""
    done = 0
    with contextlib.suppress(OSError):
        while done < len(data):
            done += file.write(data[done:]) or 0
    return done


class StepLog:
    """Logs each step, appends it to `steps_file` and hands its scalars to `write_events`, on rank 0.

    Every rank may have a StepLog and add to it; only rank 0's writes. `plans_file` receives the plans, one a line, from
    the first step on. Raises ConfigError for a file that cannot be written.
    """

    def __init__(
        self,
        rank: int = 0,
        *,
        steps_file: str | None = None,
        plans_file: str | None = None,
        steps_per_print: int = 1,
        write_events: Callable[[Sequence[Event]], None] | None = None,
    ) -> None:
        self._rank = rank
        self._steps_file = _writable(steps_file) if rank == 0 else None
        self._plans_file = _writable(plans_file) if rank == 0 else None
        self._steps_per_print = steps_per_print
        self._write_events = write_events
        self._run = time.strftime("%Y-%m-%dT%H:%M:%S")
        self.totals = RunTotals()
        self.num_sequences = 0

    def add(self, record: StepRecord) -> None:
        """Report a step."""
        self.num_sequences += record.num_sequences
        if self._rank != 0:
            return
        self.totals.add(record)
        if record.step % self._steps_per_print == 0 or record.skipped:
            logger.info("%s", format_line(record, self.totals.seconds_left(record)))
        if self._steps_file is not None:
            self._steps_file.add(json.dumps({"run": self._run, **record.to_dict()}, allow_nan=False))
        if self._plans_file is not None and record.plan:
            self._plans_file.add(record.plan, anew=record.step == 1)
        if self._write_events is not None:
            try:
                self._write_events(monitor_events(record, self.num_sequences))
            except OSError as error:
                logger.warning("step %d: the monitors cannot write: %s", record.step, error)

    def rewind(self, step: int) -> None:
        """Training continues after `step` steps: remove from `plans_file` the plans of later steps, made again now."""
        # Written beside the file and moved over it, so that a crash in between leaves one of the two whole. A last line
        # without its end was cut off by the crash before, and goes too.
        path = None if self._plans_file is None else self._plans_file.path
        if path is not None and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < step]
            fresh = path.with_name(path.name + ".tmp")
            fresh.write_text("".join(kept), encoding="utf-8")
            fresh.replace(path)

    def summary(self) -> str:
        """The run as a whole in a few lines; "" when there was no step, or on ranks other than 0."""
        return self.totals.summary()

    def close(self) -> None:
        """Print the summary, once; not behind an error that ends the script, whose text is to be the last."""
        summary, self.totals = self.totals.summary(), RunTotals()
        if summary and getattr(sys, "last_value", None) is None:  # set by Python for an error that nobody has caught
            logger.info("%s", summary)


def show_log(rank: int) -> None:
    """Make the package's INFO lines visible: under DeepSpeed's launcher only warnings would be. A process that joins a
    job has the rank -1.

    A logger that the application has already configured is left as it is, apart from an unset level.
    """
    package = logging.getLogger("ds_hydra")
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    if not package.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        who = f"rank {rank}" if rank >= 0 else "joins"
        handler.setFormatter(logging.Formatter(f"[%(asctime)s] [{who}] %(message)s", datefmt="%H:%M:%S"))
        package.addHandler(handler)
