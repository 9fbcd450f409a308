"""Tests of which `make test` takes a share, marked drawn, and those that it leaves out, marked long.

  python -m tools.check_tests [--quick] [--json FILE]

A drawn test is one of many: a row of a sweep, or one that trains whole jobs. A long one costs more than it finds, since
other tests reach its subject more cheaply. They stand beside those that run every time, so that one table holds all.
`--quick` draws a few of them by the commit.

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
_MARK = re.compile(r"pytest\.mark\.(long|drawn)")
QUICK_SHARE = 0.015


def files(root: Path = ROOT) -> list[str]:
    """Files of tests some of which are marked, by path from the root on."""
    found = sorted((root / "tests").rglob("test_*.py"))
    return [str(path.relative_to(root)) for path in found if _MARK.search(path.read_text("utf-8"))]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 if a test failed."""
    options = figures_parser(__doc__).parse_args(arguments)
    began = time.perf_counter()
    passed, missed = run(files(), QUICK_SHARE if options.quick else 1.0)
    summary = f"{passed} tests passed in {time.perf_counter() - began:.0f} s"
    return finish("check_tests", summary, {"passed": passed}, missed, options.json)


def run(paths: Sequence[str], share: float) -> tuple[int, list[str]]:
    """How many tests of these files that are marked passed, and a line for each that did not."""
    command = [sys.executable, "-m", "pytest", "-m", "long or drawn", "--share", str(share), *paths]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    passed = sum(map(int, re.findall(r"\b(\d+) passed", done.stdout)))
    missed = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE)
    return passed, missed or [f"pytest ended with {done.returncode}"] if done.returncode else []


if __name__ == "__main__":
    sys.exit(main())
