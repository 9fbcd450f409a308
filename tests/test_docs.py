"""The documentation: it builds, each code block and command runs or is claimed, and a newcomer's first figure."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from io import StringIO
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest import mock

import hjson
import pytest
import torch
from sphinx.cmd.build import main as sphinx

import ds_hydra
from ds_hydra.commands import moving
from ds_hydra.commands.__main__ import COMMANDS, main
from ds_hydra.commands.demo import CLUSTERS, MIXES, OURS, ROWS, options, shipped_gains, span
from ds_hydra.commands.launch import read_options
from ds_hydra.config.checks import read_config
from ds_hydra.config.describe import page, schema, settings
from ds_hydra.config.hydra_block import HydraConfig, parse_config
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import load_plans, save_plans
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.rivals.preview import BALANCED, FIXED, INFINIPIPE, ONE, SCHEDULED, ZERO_3
from ds_hydra.testing import run_ranks
from tests.support.pages import PAGES, ROOT, Block, blocks
from tests.support.small_job import LENGTHS, small_config, small_engine, small_model, small_source
from tools import aims, machine

# --- The documentation: it builds without a warning, and its page of settings is what the code reads.


@pytest.mark.drawn
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    assert sphinx(["-W", "--keep-going", "-q", "-b", "html", str(ROOT / "docs"), str(tmp_path)]) == 0
    assert "post-training" in (tmp_path / "losses.html").read_text().lower()
    listed = (tmp_path / "llms.txt").read_text()
    pages = {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").glob("**/*.md")}
    assert {line.split("](_sources/")[1].split(".md")[0] for line in listed.splitlines()[4:]} == pages
    assert all((tmp_path / "_sources" / f"{page}.md.txt").is_file() for page in pages)
    assert "HydraSFTTrainer" in (tmp_path / "api.html").read_text()
    drawn = {path.name for path in (ROOT / "docs" / "pictures").glob("*.png")}
    assert {path.name for path in (tmp_path / "_images").glob("*.png")} == drawn, "each picture is on a page"
    assert len(drawn) == (ROOT / "docs" / "how.md").read_text().count("](pictures/")


def test_a_newcomer_reads_no_more_than_a_few_screens() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 9 * 1024


def test_the_page_of_settings_is_what_the_code_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == page(), "make docs writes it"
    assert main(["settings", "--schema"]) == 0
    assert capsys.readouterr().out == schema()


def test_every_setting_has_a_sentence_and_a_place_in_the_schema() -> None:
    def places(block: type, place: str) -> list[str]:
        found = []
        for one in fields(block):  # type: ignore[arg-type]
            kind = get_type_hints(block)[one.name]
            inner = [each for each in (get_args(kind) or (kind,)) if is_dataclass(each) and isinstance(each, type)]
            each = f"{place}.{one.name}" + ("[]" if inner and Ellipsis in get_args(kind) else "")
            found += places(inner[0], each) if inner else [each]
        return found

    described = list(settings())
    assert sorted(one.place for one in described) == sorted(places(HydraConfig, "hydra"))
    assert [one.place for one in described if not one.sentence] == []
    root: Any = json.loads(schema())
    for one in described:
        node = root
        for name in one.place.split("."):
            node = node["properties"][name.removesuffix("[]")]
            node = node["items"] if name.endswith("[]") else node
        assert node["description"] == one.sentence
    block = root["properties"]["hydra"]
    assert "required" not in block
    assert block["properties"]["cluster"]["items"]["required"] == ["ranks"]
    assert block["properties"]["too_long"]["enum"] == ["error", "truncate", "skip"]
    assert block["properties"]["planner"]["properties"]["ahead"]["default"] == 2
    example = read_config(config=str(ROOT / "examples" / "ds_hydra.json"))["hydra"]
    assert set(example) <= set(block["properties"])


# --- Every code block and command on a page: run or read by its own parser here, or told which test runs it, or
# why none. A block that nothing here can judge has a comment above it: `<!-- run by: tests/FILE.py -->` or
# `<!-- not run: why -->`.
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
LAUNCHERS = {"deepspeed": "tests/test_examples.py", "torchrun": "tests/gloo/test_launchers.py"}  # who starts by them
PLACEHOLDERS = ("COMMAND",)
SHELL = ("bash", "")  # a block without a language is one of commands if its first word is one


BLOCKS = list(blocks())


def command_lines(text: str) -> list[str]:
    """Lines of a shell block, continued ones joined, without comments."""
    return [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip() and not line.startswith("#")]


def parsed(line: str) -> bool:
    """Whether this is a command of ours; its parser refuses what it does not know. Nothing is run."""
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        assert {word for word in words[1:] if "=" not in word} <= TARGETS, line
    elif words[:2] == ["ds-hydra", "launch"]:  # reads DeepSpeed's options and runs at once
        read_options(words[2:])
    elif words[0] == "ds-hydra":
        assert words[1] in COMMANDS, line
        _parse(f"ds_hydra.commands.{words[1].replace('-', '_')}", lambda: main(words[1:]), line)
    elif words[:2] == ["python", "-m"] and words[2].startswith("tools."):
        assert importlib.util.find_spec(words[2]), line
        source = importlib.util.find_spec(words[2]).origin or ""  # type: ignore[union-attr]
        known = Path(source).read_text() + "--quick --json --only"
        assert not [word for word in words[3:] if word.startswith("--") and word not in known], line
    elif words[0] in LAUNCHERS:
        assert (ROOT / LAUNCHERS[words[0]]).is_file()
    else:
        return words[0] == "pip"
    return True


def _parse(module: str, call: Any, line: str) -> None:
    told = StringIO()
    with (
        mock.patch.object(importlib.import_module(module), "guarded", return_value=0, create=True),
        redirect_stderr(told),
        redirect_stdout(told),
    ):
        try:
            code: Any = call()
        except SystemExit as left:
            code = left.code
    assert code == 0, f"{line}: {told.getvalue()}"


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_judged_or_says_why_not(block: Block) -> None:
    if block.comment.startswith("not run: "):
        assert len(block.comment) > len("not run: ") + 10, f"{block}: say why"
    elif block.comment.startswith("run by: "):
        for file in re.findall(r"[\w/.-]+\.py", block.comment):
            assert (ROOT / file).is_file(), f"{block}: there is no {file}"
    elif block.language == "python":
        assert str(block) in RUN, f"{block}: no test runs it: add it to RUN, or say why not"
    elif block.language in ("json", "jsonc"):
        assert accepted(block.text), block
    elif block.language == "diff":
        added = [line[1:] for line in block.text.splitlines() if line.startswith("+")]
        for line in added:
            compile(line, str(block), "exec")
            exec(line, {})
    else:
        assert block.language in SHELL, f"{block}: nothing judges this language"
        for line in command_lines(block.text):
            for part in line.split(" && ") if block.language else [line]:
                assert parsed(part), f"{block}: what runs {part!r}?"


def accepted(text: str) -> bool:
    """Whether a config with this block, or with this setting of it, is read."""
    block = hjson.loads("{" + text + "}")
    block = block.get("hydra", block)
    return parse_config({"hydra": {"tokens_per_step": 1000, **block}}) is not None


@pytest.mark.parametrize("page", PAGES)
def test_commands_within_sentences_are_known(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text("utf-8"), flags=re.M | re.S)
    for line in re.findall(r"`((?:ds-hydra|make|python -m tools\.)[^`\n]*)`", text):
        words = shlex.split(line.split(" >")[0])
        assert words[0] != "make" or {w for w in words[1:2] if "=" not in w} <= TARGETS, line
        if words[0] == "ds-hydra" and len(words) > 1:
            assert words[1] in (*COMMANDS, *PLACEHOLDERS), line
            help_text = _help(words[1]) if words[1] in COMMANDS else "--help"
            assert not [w for w in words if w.startswith("--") and w not in help_text], line
        if words[0] == "python":
            found = importlib.util.find_spec(words[2])
            assert found, line
            assert found.origin, line
            named = words[words.index("--only") + 1 :] if "--only" in words else []
            parts = [part for word in named for part in word.split(",") if part.islower()]  # others stand for a name
            assert all(f'"{part}"' in Path(found.origin).read_text() for part in parts), line


def _help(command: str) -> str:
    told = StringIO()
    with redirect_stdout(told), pytest.raises(SystemExit):
        main([command, "--help"])
    return told.getvalue()


def phased(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the block about phases finds: a table and the plans of a run."""
    file = ROOT / "examples" / "cost_tables" / "example_cpu.json"
    shutil.copy(file, folder / "cost_table.json")
    table = CostTable.load(file)
    planner = Planner(table, [StrategyShape.parse("4*tp1")], PlannerOptions())
    save_plans([planner.plan(0, range(4), [200, 900, 2000, 6000])], folder / "plans.jsonl")
    monkeypatch.chdir(folder)
    return {}


def on_one_rank(rank: int, text: str, make: Any) -> list[float]:
    """Run a block on a rank with the names that it takes as given; the losses of the steps that it made."""
    given = make(rank)
    exec(text, given)
    engine = given["engine"]
    return [float(engine.last_step.loss)]


def in_a_script(rank: int) -> dict[str, Any]:
    config = small_config(1)
    initialize = mock.Mock(side_effect=lambda **given: ds_hydra.initialize(config=config, **given))
    return {"ds_hydra": mock.Mock(initialize=initialize), "args": None, "model": small_model(), "total_steps": 2,
            "dataset": [torch.arange(3, 3 + n % 90) for n in LENGTHS]}  # fmt: skip


def items() -> list[dict[str, Any]]:
    tokens = torch.arange(3, 43)
    return [{"input_ids": tokens, "labels": tokens} for _ in range(4)]


def in_pairs(rank: int) -> dict[str, Any]:
    return {"torch": torch, "beta": 0.1, "reference_losses": torch.zeros(4), "pairs": items(),
            "engine": small_engine(rank, data=None)}  # fmt: skip


def of_rollouts(rank: int) -> dict[str, Any]:
    ones = torch.ones(40)
    more = {"completion_mask": ones.long(), "advantages": ones, "reference_log_probs": -ones}
    return {"engine": small_engine(rank, data=None), "mini_batches": lambda items: [items],
            "items": [{"input_ids": one["input_ids"], **more} for one in items()]}  # fmt: skip


RUN: dict[str, Any] = {
    "docs/notes/strategies.md: from ds_hydra.costs.cost_table import CostTable": phased,
    "docs/deepspeed-loop.md: engine, optimizer, loader, lr_scheduler = ds_hydra.initializ": in_a_script,
    "docs/losses.md: def preference(losses):  # of chosen and rejected in turn": in_pairs,
    "docs/reinforcement-learning.md: from ds_hydra.losses import grpo": of_rollouts,
    'docs/deepspeed-loop.md: with torch.device("meta"):': None,
}
"""Python blocks that run here: what makes the names that they take as given, on one rank where they have an engine."""


def test_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {str(block): block.text for block in BLOCKS if block.language == "python" and not block.comment}
    assert set(RUN) == set(texts), "a block is gone or new"
    small_source()  # found once, for all ranks that are forked
    for name, make in RUN.items():
        if make is phased:
            exec(texts[name], phased(tmp_path, monkeypatch))
            (plan,) = load_plans(tmp_path / "phases.jsonl").values()
            assert str(plan.strategy) == "4*tp1 then 2*tp2 then tp4"
        elif make is None:
            from transformers import AutoConfig, AutoModelForCausalLM

            small_model().config.save_pretrained(tmp_path / "my_model")
            monkeypatch.chdir(tmp_path)
            classes = {"AutoConfig": AutoConfig, "AutoModelForCausalLM": AutoModelForCausalLM}
            given: dict[str, Any] = {"torch": torch, **classes}
            exec(texts[name], given)
            assert {one.device.type for one in given["model"].parameters()} == {"meta"}
        else:
            ((loss,),) = run_ranks(on_one_rank, 1, texts[name], make)
            assert loss == loss, name


# --- What a newcomer sees first: the demo's first figure at once, lines that move, and one figure wherever it
# is shown.
def test_the_first_figure_needs_neither_torch_nor_a_planner() -> None:
    code = (
        "import sys; from ds_hydra.commands.demo import _first_part; _first_part(False); "
        "assert not {'torch', 'numba', 'highspy'} & set(sys.modules), 'heavy import'"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert spent_s < machine.limit(aims.FIRST_FIGURE_CPU_S).here
    assert "shipped figures (--recompute computes them)" in told
    assert f"{shipped_gains()[0].mean_ms[OURS] / 1e3:.2f} s  ds-hydra" in told


README_ROWS = {
    FIXED: "best fixed layout of TP, PP, CP (ring or Ulysses), batches packed",
    BALANCED: "such a layout, each sequence placed by its cost",
    SCHEDULED: "Megatron-Core's dynamic context parallelism, as it schedules",
    ZERO_3: "DeepSpeed ZeRO-3 with Ulysses, batches packed",
    INFINIPIPE: "InfiniPipe, as published",
    ONE: "ds-hydra with one layout in every step",
}


def test_readme_and_its_pages_show_the_shipped_figures() -> None:
    readme, comparison = (ROOT / "README.md").read_text(), (ROOT / "docs" / "notes" / "comparison.md").read_text()
    gains = shipped_gains()
    assert [(gain.model, gain.lengths) for gain in gains] == list(ROWS)
    of_models = [[gain for gain in gains if gain.model == model] for model in CLUSTERS]
    for name, words in README_ROWS.items():
        cells = " | ".join(span(gain.times(name) for gain in some) for some in of_models)
        assert f"| {words} | {cells} |" in readme
    for gain in gains:
        seconds = " | ".join(f"{gain.mean_ms[name] / 1e3:.2f}" for name in (*README_ROWS, OURS))
        assert all(f"`{gain.layouts[name]}`" in comparison for name in (FIXED, BALANCED, ONE))
        assert f", {gain.lengths.partition(',')[0]} | {seconds} |" in comparison
        for at, rival in enumerate(("best fixed, balanced", "Megatron-Core's schedule") if gain.over_links else ()):
            cells = " | ".join(f"{row[at]:.2f}" for row in gain.over_links.values())
            assert f"{rival} | {cells} |" in comparison
    assert all(word in readme for word in options(*ROWS[0]) if word != MIXES[ROWS[0][1]]), (
        "the command gives the figures"
    )


def test_silence_ends_within_ten_seconds() -> None:
    assert max(moving.EVERY_S, moving.EVERY_LINE_S) <= aims.SILENT_S


def test_a_line_moves_while_the_lock_is_held_and_ranks_are_forked() -> None:
    """The writer is told that it may end, as forked ranks hold its pipe open too."""
    code = (
        "import os, time; from ds_hydra.commands.moving import moving\n"
        "with moving('computing', 9.0):\n"
        "    child = os.fork()\n"
        "    time.sleep(0.6 if child else 30)\n"
        "    if not child: os._exit(0)\n"
        "print('ended', flush=True); os.kill(child, 9)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines() == ["   computing: 0 s of about 9", "ended"]
    assert time.monotonic() - began < 20


def test_the_demo_is_installed_without_what_developers_need() -> None:
    shown = subprocess.run(
        ["make", "-n", "demo", "VENV=/nowhere/venv"], cwd=ROOT, check=True, capture_output=True, text=True,
        env={**os.environ, "MAKEFLAGS": ""},
    ).stdout  # fmt: skip
    assert "ds-hydra demo" in shown
    assert "--editable ." in shown
    assert "[dev]" not in shown
    loud = [line for line in shown.splitlines() if "pip" in line and "setuptools" not in line]
    assert loud
    assert not [line for line in loud if "--quiet" in line], "minutes without a line"
