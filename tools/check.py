"""All that is judged, at once: the tests that `make test` draws a share of or leaves out, every benchmark; the aims.

  python -m tools.check [--quick] [--only NAME ...] [--json FILE]

A drawn test is one of many: a row of a sweep, or one that trains whole jobs. A long one costs more than it finds, since
other tests reach its subject more cheaply. `--quick` draws a few of them by the commit, and runs benchmarks in their
quick forms; without it all run, for hours, one after the other. What a run prints is shown where it fails. At last
stands each aim of `tools/aims.py` with who judges by it, and whether that held in this run.

Exits non-zero if a test or a benchmark fails, or stands still.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile

from ds_hydra.commands.figures import figures_parser, finish, print_table
from tools import aims

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests"
_PRINTS_FIGURES = re.compile(r"(figures_parser|run_parts)\(")
_MARK = re.compile(r"pytest\.mark\.(long|drawn)")
_DONE = re.compile(r"^(PASSED|FAILED|ERROR) (tests/[\w/]+\.py)(.*)", re.MULTILINE)
QUICK_SHARE = 0.015
QUICK_LIMIT_S, LIMIT_S = 900.0, 24 * 3600.0  # for what stands still


@dataclass(frozen=True)
class Ran:
    """A run: its name, its exit code, what its last line said, what it took in seconds."""

    name: str
    code: int
    summary: str
    wall_s: float
    cpu_s: float
    output: str


def tool_names(root: Path = ROOT) -> list[str]:
    """Tools that print figures: modules of the folder that take the options of `figures_parser`."""
    paths = (path for path in (root / "tools").glob("*.py") if path.name != Path(__file__).name)
    return sorted(path.stem for path in paths if _PRINTS_FIGURES.search(path.read_text("utf-8")))


def marked_files(root: Path = ROOT) -> list[str]:
    """Files of tests some of which are marked, by path from the root on."""
    found = sorted((root / "tests").rglob("test_*.py"))
    return [str(path.relative_to(root)) for path in found if _MARK.search(path.read_text("utf-8"))]


def command_of(name: str, *, quick: bool) -> list[str]:
    """What runs a tool, or all marked tests."""
    if name != TESTS:
        return [sys.executable, "-m", f"tools.{name}", *(["--quick"] if quick else [])]
    share = str(QUICK_SHARE if quick else 1.0)
    return [sys.executable, "-m", "pytest", "-rA", "-m", "long or drawn", "--share", share, *marked_files(ROOT)]


def run(name: str, *, quick: bool, limit_s: float) -> Ran:
    """Run one as a person would, from the checkout's root."""
    began = time.monotonic()
    # A file, not a pipe: ranks that outlive their tool would hold a pipe open, and waiting for its end would not end.
    with TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command_of(name, quick=quick), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        code, cpu_s = _ended(process, limit_s)
        output.seek(0)
        text = output.read().rstrip()
    lines = text.splitlines() or [""]
    summary = next((line for line in reversed(lines) if line.startswith(name)), f"{name}: no summary line")
    if name == TESTS:
        verdicts = [verdict for verdict, _, _ in _DONE.findall(text)]
        summary = f"{TESTS}: {verdicts.count('PASSED')} passed, {len(verdicts) - verdicts.count('PASSED')} failed"
    if code == -signal.SIGKILL:
        summary = f"{name}: stopped after {limit_s:.0f} s"
    if code != 0:
        print("\n".join(["", f"---- {name} ended with {code}:", *lines[-60:], "----"]), flush=True)
    return Ran(name, code, summary, time.monotonic() - began, cpu_s, text)


def _ended(process: subprocess.Popen[str], limit_s: float) -> tuple[int, float]:
    """Exit code and CPU seconds of a process and of those it waited for; its session is killed at the limit."""
    began = time.monotonic()
    while True:
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, used.ru_utime + used.ru_stime
        if time.monotonic() - began > limit_s:
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.1)


def aims_of(ran: Sequence[Ran]) -> Iterator[tuple[str, str, str, str]]:
    """Each aim, its bound, who judges by it, and whether it held: "-" where nobody who does was run."""
    held = {one.name: one.code == 0 for one in ran if one.name != TESTS}
    for verdict, path, _ in (row for one in ran if one.name == TESTS for row in _DONE.findall(one.output)):
        held[path] = held.get(path, True) and verdict == "PASSED"
    texts = {path: path.read_text("utf-8") for folder in ("tools", "tests") for path in (ROOT / folder).rglob("*.py")}
    for name in (name for name in vars(aims) if name.isupper()):
        judges = [path.relative_to(ROOT) for path, text in texts.items() if re.search(rf"\baims\.{name}\b", text)]
        keys = [key for path in judges for key in (str(path), path.stem)]
        for folder in {path.parts[1] for path in judges if path.parts[0] == "tools" and len(path.parts) > 2}:
            keys += [tool for tool in tool_names() if f"tools.{folder}" in texts[ROOT / "tools" / f"{tool}.py"]]
        known = {held[key] for key in keys if key in held}
        told = "-" if not known else "yes" if all(known) else "NO"
        yield name, str(getattr(aims, name))[:40], ", ".join(map(str, judges))[:90], told


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 1 if something failed."""
    parser = figures_parser(__doc__, "python -m tools.check")
    every = [TESTS, *tool_names()]
    parser.add_argument("--only", nargs="+", choices=every, default=every, metavar="NAME", help="some of these")
    options = parser.parse_args(arguments)
    began, ran = time.monotonic(), list[Ran]()
    for name in options.only:
        ran.append(run(name, quick=options.quick, limit_s=QUICK_LIMIT_S if options.quick else LIMIT_S))
        print(f"[{ran[-1].wall_s:4.0f} s, {ran[-1].cpu_s:4.0f} s of CPU] {ran[-1].summary}", flush=True)
    print_table(("aim", "bound", "judged in", "held"), list(aims_of(ran)))
    missed = [f"{one.name} ended with {one.code}: {one.summary}" for one in ran if one.code != 0]
    summary = f"{len(ran)} runs in {time.monotonic() - began:.0f} s"
    figures = {"runs": [asdict(one) | {"output": ""} for one in ran]}
    return finish("check", summary, figures, missed, options.json)


if __name__ == "__main__":
    sys.exit(main())
