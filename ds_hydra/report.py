"""Reports of a run: a record per step in; log line, JSON line, monitor scalars and summary out. Pure."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

Event = tuple[str, float, int]  # name, value, x-axis (sequences so far), as DeepSpeed's monitors take them


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did. Times are in milliseconds; `step` counts from 1, as `global_steps` does after it."""

    step: int
    loss: float
    grad_norm: float | None
    learning_rate: float  # of the first parameter group, as used by this step
    num_tokens: int  # of the sequences, padding not counted
    num_targets: int  # tokens that were predicted
    num_sequences: int
    strategy: str
    changed: bool  # the strategy differs from the step before
    step_ms: float  # measured, from the plan to the updated masters
    predicted_ms: float
    num_padding: int = 0  # padding tokens computed besides
    total_steps: int | None = None
    pipeline_ms: tuple[float, ...] = ()  # measured time of each pipeline, in rank order
    lower_bound_ms: float = 0.0  # no plan of this step can be predicted faster; 0 when not known
    planning_ms: float = 0.0
    planning_hidden: bool = True  # the plan was ready when the step began
    plan_source: str = "search"
    planning_fallback: str | None = None  # why the plan was made in the training process; None: it was not
    plan_digest: str = ""  # hex
    ids_digest: str = ""  # hex, of the sequence ids
    num_micro_batches: tuple[int, ...] = ()  # of each pipeline
    pull_ms: float = 0.0
    push_ms: float = 0.0
    optimizer_ms: float = 0.0
    pull_bytes: int = 0
    push_bytes: int = 0
    peak_memory_bytes: int = 0  # largest of the ranks; 0 when not known
    skipped: bool = False  # the gradient was not finite, so parameters stayed as they were
    skipped_steps: int = 0  # so far
    epoch: int = 0
    plan: str = ""  # StepPlan.to_json(), for `plans_file`
    predicted_step_ms: float | None = None  # stage by stage, with all that a step costs besides its pipelines
    corrected_step_ms: float | None = None  # the same, corrected by the steps before
    predicted_pipeline_ms: tuple[float, ...] = ()
    predicted_stage_ms: tuple[tuple[float, ...], ...] = ()  # of each pipeline's stages
    stage_ms: tuple[tuple[float, ...], ...] = ()  # computing, of each stage's slowest rank
    corrections: Mapping[str, float] = field(default_factory=dict)  # measured over predicted time, by scheme

    @property
    def balance(self) -> float:
        """Largest over mean pipeline time; 1 is perfect."""
        mean = sum(self.pipeline_ms) / len(self.pipeline_ms) if self.pipeline_ms else 0.0
        return max(self.pipeline_ms) / mean if mean > 0 else 1.0

    @property
    def padding_share(self) -> float:
        computed = self.num_tokens + self.num_padding
        return self.num_padding / computed if computed else 0.0

    @property
    def tokens_per_second(self) -> float:
        return 1000.0 * self.num_tokens / self.step_ms if self.step_ms > 0 else 0.0

    @property
    def prediction_error(self) -> float:
        """(predicted - measured) / measured, of the step's own prediction where there is one."""
        predicted = self.predicted_ms if self.predicted_step_ms is None else self.predicted_step_ms
        return predicted / self.step_ms - 1.0 if self.step_ms > 0 else 0.0

    @property
    def gap(self) -> float | None:
        """How much slower than the lower bound this plan is predicted to be; None when no bound is known."""
        return self.predicted_ms / self.lower_bound_ms - 1.0 if self.lower_bound_ms > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived figures, fit for JSON (a number that is not finite becomes null)."""
        record = asdict(self)
        del record["plan"]  # large; it has a file of its own
        for name in ("balance", "padding_share", "tokens_per_second", "prediction_error", "gap"):
            record[name] = getattr(self, name)
        return {key: _finite(value) for key, value in record.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_line(record: StepRecord) -> str:
    """The line that a step prints."""
    total = f"/{record.total_steps}" if record.total_steps else ""
    norm = "-" if record.grad_norm is None else f"{record.grad_norm:.3f}"
    hidden = "hidden" if record.planning_hidden else "waited for"
    parts = [
        f"step {record.step}{total}",
        f"loss {record.loss:.4f}",
        f"gnorm {norm}",
        f"lr {record.learning_rate:.2e}",
        f"tok {record.num_tokens:,} (pad {record.padding_share:.1%})",
        f"{record.strategy}{' (changed)' if record.changed else ''}",
        f"{record.step_ms:,.0f} ms (pred {_predicted(record):,.0f}, {record.prediction_error:+.1%})",
        f"balance {record.balance:.2f}",
        f"{_thousands(record.tokens_per_second)} tok/s",
        f"plan {record.planning_ms:,.0f} ms {hidden}",
        f"skip {record.skipped_steps}{' (gradient not finite: skipped)' if record.skipped else ''}",
    ]
    return " | ".join(parts)


def _predicted(record: StepRecord) -> float:
    return record.predicted_ms if record.predicted_step_ms is None else record.predicted_step_ms


def _thousands(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def monitor_events(record: StepRecord, num_sequences_so_far: int) -> list[Event]:
    """The record as scalars under the names DeepSpeed uses where it has one."""
    values: dict[str, float | None] = {
        "Train/Samples/train_loss": record.loss,
        "Train/Samples/lr": record.learning_rate,
        "Train/Samples/grad_norm": record.grad_norm,
        "Train/Samples/elapsed_time_ms_step": record.step_ms,
        "Train/Hydra/predicted_ms": record.predicted_ms,
        "Train/Hydra/prediction_error": record.prediction_error,
        "Train/Hydra/balance": record.balance,
        "Train/Hydra/tokens": record.num_tokens,
        "Train/Hydra/padding_share": record.padding_share,
        "Train/Hydra/tokens_per_second": record.tokens_per_second,
        "Train/Hydra/planning_ms": record.planning_ms,
        "Train/Hydra/planning_hidden": record.planning_hidden,
        "Train/Hydra/gap": record.gap,
        "Train/Hydra/pull_ms": record.pull_ms,
        "Train/Hydra/push_ms": record.push_ms,
        "Train/Hydra/optimizer_ms": record.optimizer_ms,
        "Train/Hydra/strategy_changed": record.changed,
        "Train/Hydra/num_pipelines": len(record.pipeline_ms),
        "Train/Hydra/skipped_steps": record.skipped_steps,
    }
    return [(name, float(v), num_sequences_so_far) for name, v in values.items() if v is not None]


class RunTotals:
    """Figures of all steps of a run, for its summary: a few numbers a step, however much a record holds."""

    def __init__(self) -> None:
        self.strategies: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.num_tokens = self.num_changes = self.num_hidden = self.num_skipped = 0
        self.losses, self.step_ms, self.balances, self.errors = (array("d") for _ in range(4))

    def add(self, record: StepRecord) -> None:
        """Count one more step."""
        self.strategies[record.strategy] += 1
        self.num_tokens += record.num_tokens
        self.num_changes += record.changed
        self.num_hidden += record.planning_hidden
        self.fallbacks.update([record.planning_fallback] if record.planning_fallback else [])
        self.num_skipped += record.skipped
        self.losses.append(record.loss)
        self.step_ms.append(record.step_ms)
        self.balances.append(record.balance)
        self.errors.append(abs(record.prediction_error))

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
            f"prediction error: median {median(self.errors):.1%}, worst {max(self.errors):.1%}; "
            f"planning hidden in {self.num_hidden} steps"
            + "".join(f", {n} planned in process (producer {why})" for why, n in self.fallbacks.items()),
            f"{len(self.strategies)} strategies, {mixed} heterogeneous, {self.num_changes} changes:",
        ]
        lines += [f"  {count:5d} x  {strategy}" for strategy, count in self.strategies.most_common()]
        return "\n".join(lines)


def is_heterogeneous(strategy: str) -> bool:
    """Whether a strategy in canonical form mixes parallel schemes."""
    return len({term.split("*")[-1] for term in strategy.replace(" ", "").split("+")}) > 1


def _writable(name: str | None) -> Path | None:
    """The path of a file that can be appended to, its folder made if need be."""
    if name is None:
        return None
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            return path
    except OSError as error:
        raise ConfigError(
            f"the file {name!r} cannot be written: {error.strerror}; change hydra.steps_file or hydra.plans_file"
        ) from error


def _append(path: Path, line: str, *, anew: bool = False) -> None:
    with path.open("w" if anew else "a", encoding="utf-8") as file:
        file.write(line + "\n")


class StepLog:
    """Rank 0's account of a run: prints, appends to `steps_file`, hands scalars to `write_events`.

    Every rank may hold one and add to it; only the one with `rank` 0 writes. `plans_file` receives the plans, one a
    line, from the first step on. Raises ConfigError for a file that cannot be written.
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
            logger.info("%s", format_line(record))
        if self._steps_file is not None:
            _append(self._steps_file, json.dumps({"run": self._run, **record.to_dict()}, allow_nan=False))
        if self._plans_file is not None and record.plan:
            _append(self._plans_file, record.plan, anew=record.step == 1)
        if self._write_events is not None:
            self._write_events(monitor_events(record, self.num_sequences))

    def rewind(self, step: int) -> None:
        """Training goes on after `step` steps: plans of later ones are made again, so `plans_file` forgets them."""
        if self._plans_file is not None and self._plans_file.exists():
            lines = self._plans_file.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < step]
            fresh = self._plans_file.with_name(self._plans_file.name + ".tmp")
            fresh.write_text("".join(kept), encoding="utf-8")
            fresh.replace(self._plans_file)

    def summary(self) -> str:
        """What the run did as a whole, a few lines; "" when there was no step, or on other ranks."""
        return self.totals.summary()

    def close(self) -> None:
        """Print the summary, once."""
        summary, self.totals = self.totals.summary(), RunTotals()
        if summary:
            logger.info("%s", summary)


def show_log(rank: int) -> None:
    """Make the package's INFO lines visible: under DeepSpeed's launcher only warnings would be.

    A logger that the application has already configured is left as it is, apart from an unset level.
    """
    package = logging.getLogger("ds_hydra")
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    if not package.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter(f"[%(asctime)s] [rank {rank}] %(message)s", datefmt="%H:%M:%S"))
        package.addHandler(handler)
