"""The shape that the code keeps: imports point downwards, what says Pure is, notes exist, nothing grows too long."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.structure import BESIDE, Source, circles, folder_imports, missed_aims, read_sources
from tools import aims

ROOT = Path(__file__).resolve().parents[2]
SOURCES, TOOLS_AND_TESTS = read_sources(ROOT), read_sources(ROOT, BESIDE)
SOME = [source for source in SOURCES if source.folder == "zero_hetero"]  # which meet all aims by themselves

# From the ground up: a folder may import folders of lower rows, and none of its own row.
LAYERS = (
    ("zero_hetero",),
    ("pipe/schedules",),
    ("pipe",),
    ("pipe/attention",),
    ("pipe/models",),
    ("ds_hydra/ranks", "ds_hydra/data", "ds_hydra/costs", "ds_hydra/losses"),
    ("ds_hydra/watchdog", "ds_hydra/plan", "ds_hydra/planner/kernels"),
    ("ds_hydra/step", "ds_hydra/report"),
    ("ds_hydra/planner",),
    ("ds_hydra/config",),
    ("ds_hydra/matrices",),
    ("ds_hydra/host", "ds_hydra/profiling"),
    ("ds_hydra/checkpoint", "ds_hydra/self_check", "ds_hydra/simulate"),
    ("ds_hydra/rivals",),
    ("ds_hydra/engine",),
    ("ds_hydra/elastic", "ds_hydra/emulate", "ds_hydra/images", "ds_hydra/mixed"),
    ("ds_hydra",),
    ("ds_hydra/commands", "ds_hydra/hosts", "ds_hydra/hugging_face", "ds_hydra/testing"),
    ("ds_hydra/ray",),
    ("benchmarks/rivals",),
    ("benchmarks",),
)
LEVEL = {folder: level for level, row in enumerate(LAYERS) for folder in row}
HEAVY = ("torch", "deepspeed", "transformers")


def test_every_folder_has_a_place_in_the_layers() -> None:
    assert {source.folder for source in SOURCES} == set(LEVEL)


def test_no_folder_imports_one_above_it() -> None:
    upward = [
        f"{', '.join(sorted(modules))} (in {importer}) imports {imported}"
        for (importer, imported), modules in folder_imports(SOURCES).items()
        if LEVEL[imported] >= LEVEL[importer]
    ]
    assert not upward, "\n".join(upward)


def test_imports_are_read_wherever_they_stand() -> None:
    above = Source(
        "pipe/a.py", "def f():\n    from ds_hydra.data import b\nif TYPE_CHECKING:\n    import ds_hydra.data.c\n"
    )
    below = [Source("ds_hydra/data/b.py", "import ds_hydra.pipe.a\n"), Source("ds_hydra/data/c.py", "")]
    edges = folder_imports([above, *below])
    assert edges == {("pipe", "ds_hydra/data"): {"ds_hydra.pipe.a"}, ("ds_hydra/data", "pipe"): {"ds_hydra.data.b"}}
    assert circles(edges) == [["ds_hydra/data", "pipe"]]
    assert circles({("a", "b"): 1, ("b", "c"): 1, ("a", "c"): 1}) == []
    assert circles({("a", "b"): 1, ("b", "c"): 1, ("c", "a"): 1, ("c", "d"): 1}) == [["a", "b", "c"]]


def says_pure(source: Source) -> bool:
    """Whether a module's docstring has the word Pure."""
    return re.search(r"\bPure\b", ast.get_docstring(source.tree) or "") is not None


def pure_modules() -> list[str]:
    """Modules that say Pure, and all modules of a package that says so."""
    packages = {source.folder for source in SOURCES if source.path.endswith("__init__.py") and says_pure(source)}
    return [source.name for source in SOURCES if source.folder in packages or says_pure(source)]


def test_pure_modules_import_no_torch() -> None:
    modules = ["ds_hydra", *pure_modules()]
    assert len(modules) > 50
    code = (
        "import sys\nfrom importlib import import_module\n"
        f"for name in {modules!r}:\n"
        "    import_module(name)\n"
        f"    heavy = [package for package in {HEAVY!r} if package in sys.modules]\n"
        "    if heavy: sys.exit(f'{name} says Pure but imports {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_itself_imports_nothing_but_its_errors_and_names() -> None:
    code = (
        "import __future__, importlib.abc, importlib.machinery, importlib.util, sys, typing\n"
        "before = set(sys.modules)\nimport ds_hydra\n"
        "sys.exit(' '.join(sorted(set(sys.modules) - before - {'ds_hydra', 'ds_hydra.zero_hetero', "
        "'ds_hydra.zero_hetero.errors', 'ds_hydra.zero_hetero.deepspeed_names'})))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == "\n"


@pytest.mark.parametrize(
    "module",
    ["zero_hetero.twin_plan", "zero_hetero.layout", "pipe.placement", "pipe.model_plan", "planner.producer",
     "planner.propose", "costs.analytic", "config.hydra_block", "data.sampler", "report.record",
     "simulate.links", "simulate.step", "report.trace"],
)  # fmt: skip
def test_what_must_plan_without_a_device_says_pure(module: str) -> None:
    assert f"ds_hydra.{module}" in pure_modules()


def test_every_note_that_is_referred_to_is_written_once() -> None:
    written: Counter[str] = Counter()
    mentioned: set[str] = set()
    for source in SOURCES:
        mentioned |= set(re.findall(r"\[Note: ([^\]]+)\]", source.text))
        # A note is written where its name begins a paragraph; everywhere else it is referred to.
        written.update(re.findall(r"^[ #]*\[Note: ([^\]]+)\](?!\.)", source.text, re.MULTILINE))
    assert {name: written[name] for name in mentioned} == dict.fromkeys(mentioned, 1)


def test_the_shape_is_what_the_tool_aims_at() -> None:
    assert missed_aims(SOURCES, TOOLS_AND_TESTS) == []


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (Source("pipe/long.py", "x = 1  # y\n" * (aims.MAX_FILE + 1)), "the longest file, pipe/long.py"),
        (
            Source("pipe/long.py", "def f():\n" + "    x = 1  # y\n" * aims.MAX_FUNCTION),
            "the longest function, pipe/long.py:f",
        ),
    ],
)
def test_what_grows_too_long_is_told(changed: Source, told: str) -> None:
    (missed,) = missed_aims([*SOME, changed])
    assert missed.startswith(told)


def test_tools_and_tests_grow_no_longer_either() -> None:
    (missed,) = missed_aims(SOME, [Source("tests/long.py", "x = 1\n" * (aims.MAX_FILE + 1))])
    assert missed.startswith("the longest file, tests/long.py")


def test_no_communication_depends_on_whether_something_is_over_by_now() -> None:
    """Ranks that ask a device or a queue get different answers, and then start their messages in different orders."""
    asked = {"is_completed", "is_done", "is_success", "query"}
    found = [
        f"{source.path}:{node.lineno} asks {node.attr}"
        for source in SOURCES
        if source.path.startswith(("zero_hetero/", "pipe/", "ds_hydra/step/", "ds_hydra/ranks/"))
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr in asked
    ]
    assert not found, "\n".join(found)
