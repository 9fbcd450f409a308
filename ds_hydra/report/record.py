"""A step's figures in; its record, its line in the log and its monitor events out. Pure: no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from ds_hydra.plan.phase import THEN

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
    learning_rate: float  # of the first parameter group, as used by this step
    num_tokens: int  # of the sequences, padding not counted
    num_targets: int  # tokens that were predicted
    num_sequences: int
    strategy: str
    changed: bool  # the strategy differs from the step before
    step_ms: float  # measured, from the plan to the start of the masters' update
    predicted_ms: float  # of the slowest pipeline, each phase's, before messages
    router_loss: float = 0.0  # the part of the loss that a mixture of experts' routers have
    expert_imbalance: float = 0.0  # largest rank's rows over even ones, in the mean of layers; 0: none are spread
    worst_expert_imbalance: float = 0.0  # the same of the layer where it is the largest
    recomputed: float = 0.0  # share of all layers of all tokens that backwards computed again
    num_padding: int = 0  # padding tokens, computed in addition to num_tokens
    total_steps: int | None = None  # hydra.total_steps
    pipeline_ms: tuple[float, ...] = ()  # measured time of each pipeline, in rank order, phase after phase
    num_pipelines: tuple[int, ...] = ()  # of each phase; () stands for one phase
    searched_ms: float = 0.0  # the plan's time by the formula that the search works with
    lower_bound_ms: float = 0.0  # by that formula no plan of this step is faster; 0 when not known
    planning_ms: float = 0.0
    planning_hidden: bool = True  # the plan was ready when the step began
    plan_source: str = "search"
    planning_waited_ms: float = 0.0  # that rank 0 waited for the plan, in the step or in the thread that made it ready
    planning_by: str = "producer"  # "restarted": one that took another's place meanwhile; "here": the training process
    highs: HighsFigures | None = None  # what HiGHS did for the plan; None: it had nothing to do
    planning_recipe: str = ""  # hex, digest of all that plans follow from besides the sequences
    plan_digest: str = ""  # hex
    ids_digest: str = ""  # hex, of the sequence ids
    num_micro_batches: tuple[int, ...] = ()  # of each pipeline
    pull_ms: float = 0.0  # waited for, while nothing else ran
    push_ms: float = 0.0  # the same; waiting for the slowest pipeline is not in it
    slowest_wait_ms: float = 0.0  # waited for the slowest pipeline, each phase's, in the mean of the ranks
    optimizer_ms: float = 0.0  # gradient norm; clipping and update of the step before, since this one's still run
    pull_bytes: int = 0
    push_bytes: int = 0
    peak_memory_bytes: int = 0  # largest of the ranks, in this step; 0 when not known
    tflops: float = 0.0  # 10^12 of the model's operations in a second, on each rank; 0 where not known or not on a GPU
    skipped: bool = False  # the gradient was not finite, so parameters stayed as they were
    skipped_steps: int = 0  # so far
    plan: str = ""  # StepPlan.to_json(), for `plans_file`
    predicted_step_ms: float | None = None  # with messages and the step's overhead
    expected_ms: float | None = None  # the same, corrected by what earlier steps have shown; None: nothing is known yet
    predicted_pipeline_ms: tuple[float, ...] = ()
    predicted_stage_ms: tuple[tuple[float, ...], ...] = ()  # of each pipeline's stages
    stage_ms: tuple[tuple[float, ...], ...] = ()  # computing, of each stage's slowest rank
    corrections: Mapping[str, float] = field(default_factory=dict)  # measured / predicted time, by scheme

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


_GIVE_WAY = ("rate", "norm", "padding", "memory", "flops", "again", "experts", "plan")  # first what is missed least
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
