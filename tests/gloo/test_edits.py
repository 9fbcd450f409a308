"""The trial of users' edits: it tells what trains as one process does from what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_hydra.engine import checked
from tools.check_edits import TRIALS
from tools.edits.job import Outcome
from tools.edits.kind import KINDS
from tools.edits.trial import STRATEGIES, Trial, distance, draw_trials, try_edit


def test_every_edit_is_drawn_before_or_after_under_every_strategy() -> None:
    drawn = list(draw_trials(TRIALS, seed=1))
    assert {trial.edit for trial in drawn} == set(KINDS)
    assert {name for trial in drawn for name in trial.strategies} == set(STRATEGIES)
    assert {(trial.late, trial.slices) for trial in drawn} == {(a, b) for a in (False, True) for b in (False, True)}


def test_outcomes_are_as_far_apart_as_their_losses_or_parameters() -> None:
    one = Outcome("ran", (2.0, 1.0), (), {"a": torch.tensor([4.0, 2.0])})
    assert distance(one, one) == 0
    assert distance(one, replace(one, losses=(2.0, 1.5))) == 0.5
    assert distance(one, replace(one, parameters={"a": torch.tensor([4.0, 3.0])})) == 0.25


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("edit", "late", "strategies", "state"),
    [
        ("forward hook", False, ("tp2", "pp2/v"), "equal"),
        ("look back 2 tokens", False, ("2*tp1",), "equal"),
        pytest.param("items of a stage", False, ("2*tp1",), "equal", marks=pytest.mark.long),
        ("padding before a label", False, ("2*tp1",), "refused"),
    ],
)
def test_an_edit_is_trained_as_it_is_or_refused(edit: str, late: bool, strategies: tuple[str, ...], state: str) -> None:
    found = try_edit(Trial(edit, late, strategies, slices=False))
    assert found.state == state, found


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
    assert state == "equal" or "trains otherwise than one process" in found.words


def test_what_trains_otherwise_is_told_from_what_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is tried the engine trains a model that counts tokens over a pack."""
    monkeypatch.setattr(checked, "unproven", lambda model: ())
    found = try_edit(Trial("count token 3", late=False, strategies=("2*tp1",), slices=False), check="off")
    assert found.state == "silent"
    assert found.apart > 1e-3
