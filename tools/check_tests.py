"""Tests that cost more than they find: those marked long, which `make test` leaves out.

  python -m tools.check_tests [--part N ...] [--quick] [--json FILE]

Of a sweep the suite takes the rows that nothing else covers; these are the others, and tests whose subject other tests
reach more cheaply. They stand beside those that run every time, so that one table holds both. `--part` takes a part of
their files, of which `make check` runs one after the other; `--quick` is each part as it is.

Exits non-zero if a test fails, or if there is none.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ds_hydra.commands.figures import figures_parser, finish

ROOT = Path(__file__).resolve().parents[1]
_MARK = re.compile(r"pytest\.mark\.long|long_but\(")
PARTS = 6  # each within what a quick form may take


def files(root: Path = ROOT) -> list[str]:
    """Files of tests some of which are marked long, by path from the root on."""
    found = sorted((root / "tests").rglob("test_*.py"))
    return [str(path.relative_to(root)) for path in found if _MARK.search(path.read_text("utf-8"))]


def part(number: int, paths: Sequence[str]) -> list[str]:
    """The files of a part, from 1 on: every sixth one, as files that lie beside each other cost alike."""
    return list(paths[number - 1 :: PARTS])


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 if a test failed."""
    parser = figures_parser(__doc__)
    parser.add_argument("--part", type=int, nargs="+", choices=range(1, PARTS + 1), help="these parts of the files")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    chosen = sorted(path for number in options.part or range(1, PARTS + 1) for path in part(number, files()))
    passed, missed = run(chosen)
    summary = f"{passed} tests of {len(chosen)} files passed in {time.perf_counter() - began:.0f} s"
    return finish("check_tests", summary, {"files": chosen, "passed": passed}, missed, options.json)


def run(paths: Sequence[str]) -> tuple[int, list[str]]:
    """How many tests of these files that are marked long passed, and a line for each that did not."""
    command = [sys.executable, "-m", "pytest", "-m", "long", *paths]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    passed = sum(map(int, re.findall(r"\b(\d+) passed", done.stdout)))
    missed = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE)
    return passed, missed or [f"pytest ended with {done.returncode}"] if done.returncode else []


if __name__ == "__main__":
    sys.exit(main())
