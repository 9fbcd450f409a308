"""Pages that show a run and a preview: whole in one file, with a drawing or a reason for everything they promise."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ds_hydra.commands.__main__ import main
from ds_hydra.commands.report_page import waits_of
from ds_hydra.commands.shipped import shipped
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.plan_file import save_plans
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.fixed_layout import layouts_by_length, layouts_that_hold
from ds_hydra.rivals.preview import BALANCED

TABLE = CostTable.load(shipped("a800-7b"))
LENGTHS = [30_000, *[700 + 13 * n for n in range(50)]]


def whole(page: str) -> list[str]:
    """The titles of a page that needs nothing from elsewhere, whose drawings can be read and names stand once."""
    assert not re.findall(r"<(?:script|link|img|iframe)\b|url\(http|@import", page)
    assert "prefers-color-scheme:dark" in page
    assert "#010203" not in page
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    for drawing in drawings:
        assert ElementTree.fromstring(drawing).get("aria-label")
        assert "currentColor" in drawing
    names = Counter(name for drawing in drawings for name in set(re.findall(r' id="([^"]+)"', drawing)))
    shared = {name for name, count in names.items() if count > 1}
    texts: dict[str, set[str]] = {}
    for drawing in drawings:
        for element in ElementTree.fromstring(drawing).iter():
            if element.get("id") in shared:
                texts.setdefault(str(element.get("id")), set()).add(ElementTree.tostring(element).decode())
    assert {name for name, of in texts.items() if len(of) > 1} == set(), "one name, two meanings"
    return re.findall(r"<h2>(.*?)</h2>", page)


def record(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step, "strategy": "tp8 + 4*tp2", "step_ms": 2000.0 + step, "predicted_ms": 1900.0, "num_tokens": 90_000,
        "expected_ms": 1990.0, "num_sequences": 51, "planning_ms": 2.0, "planning_hidden": True, "loss": 9.0 - step,
        "learning_rate": 1e-3, "slowest_wait_ms": 5.0, "balance": 1.1, "changed": False,
        "pipeline_ms": [1900.0, 1000.0, 950.0, 950.0, 950.0], "predicted_pipeline_ms": [1900.0] + [950.0] * 4,
        **changes,
    }  # fmt: skip


@pytest.mark.drawn
def test_a_run_is_one_page_with_what_the_fixed_layout_would_have_taken(tmp_path: Path) -> None:
    planner = Planner(TABLE, [StrategyShape.parse("tp8 + 4*tp2")], PlannerOptions())
    plans = [planner.plan(step, range(51), LENGTHS) for step in range(3)]
    save_plans(plans, tmp_path / "plans.jsonl")
    steps = tmp_path / "steps.jsonl"
    steps.write_text("".join(json.dumps(record(step)) + "\n" for step in (1, 2, 3)))
    page = tmp_path / "run.html"
    command = ["report", str(steps), "--html", str(page)]
    assert main(command) == 0
    assert "Give --plans" in page.read_text()
    assert main([*command, "--plans", str(tmp_path / "plans.jsonl"), "--cost-table", "a800-7b"]) == 0
    titles = whole(page.read_text())
    assert titles[:4] == [
        "With a fixed layout these steps would have taken", "Beside other systems, on these lengths", "Lengths",
        "Who waited",
    ]  # fmt: skip
    assert "Predicted against measured step time" in titles
    told = page.read_text()
    assert "51 sequences" not in told
    assert "153 sequences" in told
    of_table = min(
        Planner(TABLE, [shape], PlannerOptions()).plan(0, range(51), LENGTHS).predicted_ms
        for shape in layouts_that_hold(TABLE, 16, 30_000)
    )
    over = 2002.0 / plans[0].predicted_ms  # the median of what was measured over its estimate
    ((layout, shown),) = re.findall(rf"{BALANCED}: ([^<]+)</td><td>([\d,]+) ms", told)
    assert 0.5 * over * of_table < float(shown.replace(",", "")) < over * of_table, "a ring suits these lengths"
    assert "ring" in layout


def test_who_waited_is_told_phase_by_phase() -> None:
    waits = waits_of([record(1)])
    assert waits == {"tp8": [0.0], "tp2": pytest.approx([900 / 2001, 950 / 2001, 950 / 2001, 950 / 2001])}
    phased = record(1, strategy="2*tp8 then 8*tp2", num_pipelines=[2, 8], pipeline_ms=[500.0, 400.0] + [600.0] * 8)
    assert waits_of([phased]) == {"tp8": pytest.approx([0.0, 100 / 2001]), "tp2": [0.0] * 8}
    assert waits_of([record(1, strategy="tp16", pipeline_ms=[5.0])]) == {}


def test_layouts_by_length_end_with_one_that_holds_the_longest() -> None:
    assert list(map(str, layouts_by_length(TABLE, 16, 65_536))) == ["8*tp2", "4*tp4", "2*tp8"]
    assert layouts_by_length(TABLE, 16, 2_000) == []
    assert layouts_by_length(TABLE, 16, 200_000) == []


def test_a_preview_is_one_page(tmp_path: Path) -> None:
    page = tmp_path / "preview.html"
    command = ["preview", "--cost-table", "a800-7b", "--lengths", "lognormal:6.22,1.233", "--gpus", "16", "--tokens",
               "60000", "--context", "65536", "--steps", "2", "--strategies", "8*tp2", "tp8 + 4*tp2"]  # fmt: skip
    assert main([*command, "--html", str(page)]) == 0
    told = page.read_text()
    assert whole(told) == [
        "Lengths", "Beside other systems, on these lengths", "With a fixed layout these steps would take",
        "The plan of one step", "Who waits", "Strategies that were chosen",
    ]  # fmt: skip
    assert "8*tp2 then 4*tp4 then 2*tp8" in told
    assert "ds-hydra" in told
