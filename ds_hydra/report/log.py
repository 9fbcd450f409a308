"""Records of steps in; log lines, JSON lines, monitor scalars and a run's summary out. Pure."""

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
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from statistics import median

from ds_hydra.report.record import SETTLED, Event, StepRecord, format_line, is_heterogeneous, monitor_events
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

_LATEST = 20  # steps that tell how long the rest will take


class RunTotals:
    """Figures of all steps of a run, for its summary; it keeps a few numbers of each step and not its record."""

    def __init__(self) -> None:
        self.strategies: Counter[str] = Counter()
        self.restarted = self.num_highs = 0
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
