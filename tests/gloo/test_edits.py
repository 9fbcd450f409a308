"""What users do to their model, data and loss: trained as one process of plain torch does it, or refused.

Each trial takes an edit, made before `initialize` or between two steps, and trains the edited job by the whole engine
on two ranks, under two strategies in turn, whole or in slices. Losses and parameters after three steps must be those of
one process that runs the same script with plain transformers, one sequence at a time, or the engine must have refused
on all ranks, before it made a wrong update. It must not train otherwise without a word, end in an error of its own,
stand still, or end differently on two ranks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_hydra.engine.real_sequences import RealSequences
from tests.support.edits.added import added
from tests.support.edits.edits import KINDS, SAME
from tests.support.edits.job import EDITED, Outcome
from tests.support.edits.trial import ROUNDING, STRATEGIES, Trial, distance, draw_trials, effects, try_edit
from tools import aims

TRIALS = list(draw_trials())
USUAL = ("forward hook before", "look back 2 tokens before", "padding before a label before")


def test_every_edit_is_tried_under_every_strategy() -> None:
    assert {trial.edit for trial in TRIALS} == set(KINDS)
    assert {name for trial in TRIALS for name in trial.strategies} == set(STRATEGIES)
    assert {(trial.late, trial.slices) for trial in TRIALS} == {(a, b) for a in (False, True) for b in (False, True)}


def test_outcomes_are_as_far_apart_as_their_losses_or_parameters() -> None:
    one = Outcome("ran", (2.0, 1.0), (), {"a": torch.tensor([4.0, 2.0])})
    assert distance(one, one) == 0
    assert distance(one, replace(one, losses=(2.0, 1.5))) == 0.5
    assert distance(one, replace(one, parameters={"a": torch.tensor([4.0, 3.0])})) == 0.25


@pytest.mark.drawn
@pytest.mark.parametrize(
    "trial",
    [pytest.param(one, id=str(one), marks=[] if str(one).startswith(USUAL) else pytest.mark.long) for one in TRIALS],
)
def test_an_edit_is_trained_as_it_is_or_refused(trial: Trial) -> None:
    found = try_edit(trial)
    assert found.state in ("equal", "refused"), found
    acts_later = trial.late or "move" in trial.edit
    assert found.steps <= acts_later * EDITED, found


@pytest.mark.long
def test_every_edit_has_an_effect() -> None:
    """One without would prove nothing."""
    assert {name for name, apart in effects(sorted(KINDS)).items() if apart <= ROUNDING} == SAME


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("edit", "state"),
    [
        pytest.param("look back 50 tokens", "refused", marks=pytest.mark.long),
        ("a convolution of another model", "equal"),
        ("count token 3", "refused"),
        ("wrapped forward", "equal"),
    ],
)
def test_packs_are_tried_with_the_self_check_off(edit: str, state: str) -> None:
    found = try_edit(Trial(edit, late=False, strategies=("tp2", "2*tp1"), slices=False), check="off")
    assert found.state == state, found
    assert state == "equal" or "the model is not trained as by its own forward" in found.words


def test_what_trains_otherwise_is_told_from_what_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is tried the engine trains a model that counts tokens over a pack."""
    monkeypatch.setattr(RealSequences, "_try", lambda *_: None)
    found = try_edit(Trial("count token 3", late=False, strategies=("2*tp1",), slices=False), check="off")
    assert found.state == "silent"
    assert found.apart > 1e-3


@pytest.mark.long
def test_what_looks_at_a_job_takes_little_beside_the_self_check_and_a_step() -> None:
    of_start, of_step = added(steps=8).shares
    assert of_start <= aims.EDITS_AT_START
    assert of_step <= aims.EDITS_IN_STEP
