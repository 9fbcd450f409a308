"""A rank is lost anywhere in an update of whole parameters, and the others go on; where jobs go on at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from ds_hydra.matrices.exchange import Exchange
from ds_hydra.matrices.sums import Sums
from tests.support.muon_cases import block

cells, jobs = (pytest.importorskip(f"tests.support.elastic_{name}") for name in ("cells", "job"))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = cells.Judge(tmp_path_factory.mktemp("stopped"))
    made._jobs["Muon"] = replace(cells.PLAIN, hydra={"optimizer": block(ns_method="standard")})
    for kind in ("Lamb", "Adafactor"):
        made._jobs[kind] = replace(cells.PLAIN, hydra={"optimizer": {"type": kind, "params": {"lr": 1e-2}}})
    return made


@pytest.mark.drawn
@pytest.mark.parametrize("redundancy", ["device", "host"])
@pytest.mark.parametrize("phase", ["push", "owners' turn", "coming back", "update", "after the update"])
def test_a_rank_is_lost_anywhere_in_an_update_and_the_others_go_on(phase: str, redundancy: str, judge: Any) -> None:
    """To the bit what a stop and a restart come to; copies are compared in each step."""
    own = {"owners' turn": (Exchange, "owners_turn"), "coming back": (Exchange, "finish"), **jobs._entries()}
    lost = (jobs.Loss(phase, 1, cells.FAULT_STEP),)
    course = cells.Course(f"{phase}, {redundancy}", lost, mode="Muon", redundancy=redundancy)
    with mock.patch.object(jobs, "_entries", return_value=own):
        assert judge.wrong(course) == []


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("kind", "phase", "redundancy"),
    [("Lamb", "sums", "device"), ("Lamb", "totals", "host"), ("Lamb", "update", "device"),
     ("Adafactor", "sums", "host"), ("Adafactor", "totals", "device"), ("Adafactor", "update", "host")],
)  # fmt: skip
def test_a_rank_is_lost_while_sums_are_made(kind: str, phase: str, redundancy: str, judge: Any) -> None:
    """To the bit, too."""
    own = {"sums": (Sums, "add"), "totals": (Sums, "give"), **jobs._entries()}
    lost = (jobs.Loss(phase, 1, cells.FAULT_STEP),)
    course = cells.Course(f"{kind}, {phase}, {redundancy}", lost, mode=kind, redundancy=redundancy)
    with mock.patch.object(jobs, "_entries", return_value=own):
        assert judge.wrong(course) == []
