"""Losses of log-probabilities under many strategies, against one process of plain torch: loss and every gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import torch
from torch import Tensor

import ds_hydra
from ds_hydra.pipe.models.adapted import NAMES_OF_PEFT
from ds_hydra.planner import PhasedPlanner, StepPlan, parse_phases
from ds_hydra.testing import float64_throughout, rank_environment, run_ranks, whole_gradients
from tests.support.families import VALUED, build_model, reference_model
from tests.support.planner_cases import in_slices, num_slices, recomputing
from tests.support.small_job import shared_source
from tests.support.strict import Rules, strict_world
from tools.post_training.plain import ALL_LOSSES, LOSSES, VALUE_LOSSES, Compared
from tools.post_training.rollouts import PER_RANK, rollouts, scores_of, share, values_of

RANKS = 4


class Layout(NamedTuple):
    """How a part of a step runs."""

    strategy: str
    slices: bool = False
    recompute: bool = False

    def __str__(self) -> str:
        return self.strategy + ", slices" * self.slices + ", recomputed" * self.recompute


LAYOUTS = (
    Layout("4*tp1"),
    Layout("tp2 + 2*tp1", recompute=True),
    Layout("tp4"),
    Layout("2*pp2/v"),
    Layout("sp2 + tp2"),
    Layout("tp2pp2/v", recompute=True),
    Layout("pp2/list + 2*tp1", slices=True),
    Layout("sp2pp2/list", slices=True),
    Layout("2*tp1pp2 then tp4"),
    Layout("pp4/zb-h1"),
)
QUICK = tuple(LAYOUTS[i] for i in (1, 3, 4, 6, 8))


class Expected(NamedTuple):
    """What one process finds."""

    loss: float
    gradients: dict[str, Tensor]


def expected(model: Any, compared: Compared, items: list[dict[str, Any]]) -> Expected:
    """The loss of all sequences by plain torch, and its gradients by name."""
    model.zero_grad()
    of = values_of if compared in VALUE_LOSSES.values() else scores_of
    loss = compared.plain(items, [of(model, item) for item in items])
    loss.backward()
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    return Expected(float(loss.detach()), {name: torch.zeros_like(one) if one.grad is None else one.grad.clone()
                                           for name, one in named.items()})  # fmt: skip


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest entry of the first."""
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-12))


class Planned:
    """The pre-step callback of a job that is told how its next part runs."""

    def __init__(self) -> None:
        self.layout, self.slices = LAYOUTS[0], 0
        self.table: Any = None  # the engine's cost table, once there is one

    def __call__(self, step: int, ids: tuple[int, ...], lengths: tuple[int, ...]) -> StepPlan:
        phases = parse_phases(self.layout.strategy)
        longest = (20, 10**6) if len(phases) > 1 else None
        plan = PhasedPlanner(self.table, phases, longest=longest).plan(step, ids, lengths)
        if self.layout.slices:
            plan = in_slices(plan, self.table)
            self.slices += num_slices(plan)
        return recomputing(plan, self.table) if self.layout.recompute else plan


def engine_of(
    rank: int,
    family: str,
    planned: Planned,
    optimizer: dict[str, Any] | None = None,
    layouts: Sequence[Layout] = LAYOUTS,
) -> Any:
    """An engine of this rank that trains on what is handed in, under any of the layouts."""
    rank_environment(rank)
    shapes = dict.fromkeys(str(shape) for one in layouts for shape in parse_phases(one.strategy))
    block = {
        "tokens_per_step": 400,
        "context_length": 128,
        "strategies": list(shapes),
        "self_check": "off",
        "steps_file": None,
        "planner": {"ahead": 0},
        "faults": {"frozen_seconds": 0},
    }
    config = {"optimizer": optimizer or {"type": "AdamW"}, "gradient_clipping": 1.0, "hydra": block}
    engine = ds_hydra.initialize(model=build_model(family, torch.float64), config=config, pre_step_callback=planned)[0]
    planned.table = engine.crew.plans.table
    return engine


def picked(items: list[dict[str, Any]], compared: Compared) -> list[dict[str, Any]]:
    """The columns that a loss is given."""
    tempered = () if compared in VALUE_LOSSES.values() else ("temperature",)
    names = ("input_ids", "labels", *tempered, *compared.fields)
    return [{name: item[name] for name in names} for item in items]


class Row(NamedTuple):
    """One loss under one layout: the largest relative differences."""

    family: str
    layout: str
    loss: str
    of_loss: float
    of_gradients: float


def compare(family: str, cases: Sequence[tuple[Layout, str]], strict: Rules | None = None) -> tuple[list[Row], int]:
    """A row for each layout and loss by its name, and how many spans were no whole sequences."""
    items = rollouts()
    model = reference_model(family, torch.float64)
    with float64_throughout(model), shared_source(build_model(family, torch.float64)):
        known = {name: expected(model, ALL_LOSSES[name], items) for name in dict.fromkeys(name for _, name in cases)}

        def on_ranks(rank: int) -> tuple[list[Row], int]:
            with strict_world(strict) if strict is not None else contextlib.nullcontext():
                planned = Planned()
                engine = engine_of(rank, family, planned)
                rows = [
                    _row(engine, planned, family, layout, name, known[name], share(rank, items))
                    for layout, name in cases
                ]
                return rows, planned.slices

        return run_ranks(on_ranks, RANKS, timeout=600)[0]  # type: ignore[no-any-return]


def _row(
    engine: Any, planned: Planned, family: str, layout: Layout, name: str, known: Expected, own: list[dict[str, Any]]
) -> Row:
    planned.layout, compared = layout, ALL_LOSSES[name]
    loss = float(engine.forward_backward(picked(own, compared), compared.loss, mixes_tokens=compared.mixes))
    told, gradients = engine.steps.parts.losses[0], whole_gradients(engine)
    assert abs(loss - told) <= 1e-6 * abs(told)
    engine.zero_grad()
    if not gradients:  # of another rank than the first
        return Row(family, str(layout), name, 0.0, 0.0)
    before = "" if next(iter(known.gradients)) in gradients else NAMES_OF_PEFT
    worst = max(apart(one, gradients[name.removeprefix(before)]) for name, one in known.gradients.items())
    return Row(family, str(layout), name, abs(told - known.loss) / abs(known.loss), worst)


def scores(layouts: Sequence[Layout], family: str = "llama") -> list[tuple[str, float, float]]:
    """For each layout how far `log_probs` are from plain torch's: log-probabilities, entropies; or how far `values`."""
    items, valued = rollouts(), family in VALUED
    model = reference_model(family, torch.float64)
    with float64_throughout(model), shared_source(build_model(family, torch.float64)):
        with torch.no_grad():
            known = [(values_of if valued else scores_of)(model, item)[:2] for item in items]

        def on_ranks(rank: int) -> list[tuple[str, float, float]]:
            planned, rows = Planned(), list[tuple[str, float, float]]()
            engine = engine_of(rank, family, planned)
            own = slice(sum(PER_RANK[:rank]), sum(PER_RANK[: rank + 1]))
            for planned.layout in layouts:
                with once_by(engine, planned):
                    found = [engine.values(items[own])] if valued else engine.log_probs(items[own], entropy=True)
                of_ranks = [tuple(column * (item["labels"] != -100) for column in one)
                            for one, item in zip(known[own], items[own], strict=True)]  # fmt: skip
                worst = [0.0, 0.0]
                for column, tensors in enumerate(found):
                    for right, one in zip(of_ranks, tensors, strict=True):
                        worst[column] = max(worst[column], float((one - right[column]).abs().max()))
                rows.append((str(planned.layout), worst[0], worst[1]))
            return rows

        by_rank = run_ranks(on_ranks, RANKS, timeout=600)
    return [(of[0][0], max(one[1] for one in of), max(one[2] for one in of)) for of in zip(*by_rank, strict=True)]


@contextlib.contextmanager
def once_by(engine: Any, planned: Planned) -> Iterator[None]:
    """Within it, plans outside of steps are made as those of steps."""
    plans = engine.crew.plans
    plans.plan_once = lambda ids, lengths: plans.given(0, lengths).plan
    try:
        yield
    finally:
        del plans.plan_once


def splits(
    layouts: Sequence[Layout], names: Sequence[str] = ("PPO", "GRPO", "DPO")
) -> list[tuple[str, str, float, float]]:
    """For each layout and some losses: gradients of one call against those of three, whose parts stand on other ranks,
    with an evaluation between them, and both against one process."""
    items = rollouts()
    model = reference_model("llama", torch.float64)
    with float64_throughout(model), shared_source(build_model("llama", torch.float64)):
        known = {name: expected(model, LOSSES[name], items) for name in names}

        def on_ranks(rank: int) -> list[tuple[str, str, float, float]]:
            planned, rows = Planned(), []
            engine = engine_of(rank, "llama", planned)
            for planned.layout in layouts:
                for name in names:
                    whole = _whole(engine, share(rank, items), name)
                    parts = _in_parts(engine, rank, items, name)
                    if rank == 0:
                        by_one = max(apart(one, parts[of]) for of, one in whole.items())
                        against = max(apart(one, parts[of]) for of, one in known[name].gradients.items())
                        rows.append((str(planned.layout), name, by_one, against))
            return rows

        return run_ranks(on_ranks, RANKS, timeout=600)[0]  # type: ignore[no-any-return]


def _whole(engine: Any, own: list[dict[str, Any]], name: str) -> dict[str, Tensor]:
    engine.forward_backward(picked(own, LOSSES[name]), LOSSES[name].loss)
    found = whole_gradients(engine)
    engine.zero_grad()
    return found


def _in_parts(engine: Any, rank: int, items: list[dict[str, Any]], name: str) -> dict[str, Tensor]:
    compared = LOSSES[name]
    known = {"tokens": sum(int((one["labels"][1:] != -100).sum()) for one in items), "sequences": len(items),
             "pairs": len(items) // 2}  # fmt: skip
    normaliser = known[getattr(compared.loss, "normaliser", "pairs")]
    for part, per_rank in ((items[:6], (0, 4, 2, 0)), (items[6:8], (2, 0, 0, 0)), (items[8:], (0, 0, 2, 4))):
        engine.forward_backward(picked(share(rank, part, per_rank), compared), compared.loss, normaliser=normaliser)
        engine.log_probs([[5, 6, 7, 8]])
    found = whole_gradients(engine)
    engine.zero_grad()
    return found
