"""One edit under strategies: both sides in processes of their own, and what is to be said of them."""

from __future__ import annotations

import math
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import torch

import ds_hydra.engine.engine  # noqa: F401  (the same)
from ds_hydra.testing import run_ranks
from tests.support.edits.edits import KINDS
from tests.support.edits.job import LENGTHS, STEPS, Edit, Outcome, on_ranks, one_process

RANKS = 2
STRATEGIES = ("tp2", "sp2", "pp2", "2*tp1", "pp2/v", "pp2/list")
# FP64, but for norms and rotary embeddings that transformers computes in FP32: another order of sums gives 1e-7.
ROUNDING = 1e-5
LIMIT_S = 300.0  # for a trial that stands still, on a busy machine


@dataclass(frozen=True)
class Trial:
    """What is tried: an edit before `initialize` or (late) between two steps, strategies in turn, slices or not."""

    edit: str
    late: bool
    strategies: tuple[str, ...]
    slices: bool

    def __str__(self) -> str:
        when, cut = "after" if self.late else "before", " in slices" * self.slices
        return f"{self.edit} {when} [{', '.join(self.strategies)}{cut}]"


@dataclass(frozen=True)
class Verdict:
    """How a trial ended: equal, refused, silent (other results without a word), crashed, standing or uneven (not all
    ranks said the same). `apart` is the largest relative difference of losses and parameters; `steps` were trained
    before the engine refused."""

    trial: Trial
    state: str
    apart: float
    words: str = ""
    steps: int = 0


def draw_trials() -> Iterator[Trial]:
    """Each edit wherever it can be made, strategies and slices by chance."""
    draw = random.Random(1)
    for name, kind in KINDS.items():
        for when in kind.when:
            yield Trial(name, when == "after", tuple(draw.sample(STRATEGIES, 2)), draw.random() < 0.3)


def try_edit(trial: Trial, check: str = "on") -> Verdict:
    """Train the edited job on ranks and in one process. `check` is hydra.self_check."""
    kind = KINDS[trial.edit]
    with tempfile.TemporaryDirectory() as cache:
        before = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = cache  # no verdict of an earlier trial
        try:
            found: list[Outcome] = run_ranks(
                on_ranks, RANKS, kind.family, kind.edit, trial.late, trial.strategies, trial.slices, check,
                timeout=LIMIT_S,
            )  # fmt: skip
        except TimeoutError as error:
            return Verdict(trial, "standing", float("nan"), str(error))
        except Exception as error:
            return Verdict(trial, "crashed", float("nan"), f"{type(error).__name__}: {error}")
        finally:
            os.environ.pop("XDG_CACHE_HOME")
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before
    words = next((one.words for one in found if one.words), "")
    if len({one.state for one in found}) > 1:
        return Verdict(trial, "uneven", float("nan"), words)
    if found[0].state == "refused":
        return Verdict(trial, "refused", float("nan"), words, len(found[0].losses))
    plain = _alone(kind.family, kind.edit, trial.late, found[0].steps)
    apart = distance(plain, found[0])
    return Verdict(trial, "equal" if apart <= ROUNDING else "silent", apart)


def distance(one: Outcome, other: Outcome) -> float:
    """The largest difference of losses, and of parameters by their largest entry; infinite if these differ in name."""
    if one.parameters.keys() != other.parameters.keys():
        return math.inf
    losses = [abs(a - b) / abs(a) for a, b in zip(one.losses, other.losses, strict=True)]
    return max(*losses, *_apart(one.parameters, other.parameters))


def _apart(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[float]:
    return [
        float((value - other[name].to(value)).abs().max() / value.abs().max().clamp(min=1e-30))
        for name, value in one.items()
    ]


def effects(names: Sequence[str]) -> dict[str, float]:
    """How far each edit takes the plain job from the one without it; an edit without effect would show nothing."""
    steps = [tuple(range(step * len(LENGTHS), (step + 1) * len(LENGTHS))) for step in range(STEPS)]
    found: dict[str, float] = {}
    plain: dict[str, Outcome] = {}
    for name in names:
        kind = KINDS[name]
        late = kind.when == ("after",)
        if kind.family not in plain:
            plain[kind.family] = _alone(kind.family, None, False, steps)
        found[name] = distance(_alone(kind.family, kind.edit, late, steps), plain[kind.family])
    return found


def _alone(family: str, edit: Edit | None, late: bool, steps: Sequence[Sequence[int]]) -> Outcome:
    """What one process makes of a job."""
    outcome: Outcome = run_ranks(one_process, 1, family, edit, late, steps, timeout=LIMIT_S)[0]
    return outcome
