"""Every check and benchmark of this folder, one after the other, a summary line each.

  python -m tools.check [--quick] [--only NAME ...] [--json FILE]

With `--quick` each runs in its quick form, which a person waits for and which must therefore end within a minute on two
idle cores of the reference machine; without it, in its whole form, for hours. What a tool prints is shown where it
fails. Tools that measure times run by themselves, the others two at a time.

Exits non-zero if a tool does, stands still or, in its quick form, computes for longer than a minute on both cores would
take, or if all quick forms together take longer than 20 (`tools/machine.py` says what that is on this machine).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock

from ds_hydra.commands.figures import figures_parser, finish
from tools import aims, machine

FOLDER = Path(__file__).parent
# Tools whose aims are ratios of times: anything that runs beside them would be measured too.
TIMED = (
    "bench_",
    "check_devices",
    "check_edits",
    "check_elastic",
    "check_hybrids",
    "check_simulator",
    "check_swap",
)
# Tools with more than one set of tables, and the options of each; and those of their runs that no clock's times are in.
_NETWORKS, _MEMORY = ("order", "overlap", "emulated", "sockets", "two_hosts"), ("count", "states", "peak", "layouts")
_SAME, _SECOND_HALF = ("classes", "slices", "sizes"), ("memory", "trl", "live", "refusals", "rollouts")
SETS: dict[str, tuple[tuple[str, ...], ...]] = {
    "check_devices": (("--without", *_MEMORY), ("--fast", "--without", *_NETWORKS), ("--only", *_NETWORKS[-1:])),
    "check_hybrids": (("--only", "costs"), ("--without", "costs", *_SAME)),
    "check_swap": (("--only", "plan"),),
}
UNTIMED: dict[str, tuple[tuple[str, ...], ...]] = {
    "check_devices": tuple(("--only", *names) for names in (_NETWORKS[:1], _NETWORKS[1:-1], _MEMORY)),
    "check_hybrids": (("--only", *_SAME),),
    "check_post_training": (("--only", *_SECOND_HALF), ("--without", *_SECOND_HALF)),
    "check_swap": (("--without", "plan"),),
}
_PRINTS_FIGURES = re.compile(r"(figures_parser|chosen_parts|run_parts)\(")
QUICK_LIMIT_S, LIMIT_S = 600.0, 6 * 3600.0  # for a tool that stands still
_MEASURING = Lock()  # how fast the machine is, which two threads would slow down for each other


@dataclass(frozen=True)
class Ran:
    """One tool's run: its command, what its last line said, what it took in seconds, and what it may take."""

    name: str
    code: int
    summary: str
    wall_s: float
    cpu_s: float
    most_cpu_s: float | None  # what its quick form may take on this machine, as fast as it was then


def tool_names(folder: Path = FOLDER) -> list[str]:
    """Tools that print figures: modules of the folder that take the options of `figures_parser`, by itself or not."""
    return sorted(
        path.stem
        for path in folder.glob("*.py")
        if path.stem != Path(__file__).stem and _PRINTS_FIGURES.search(path.read_text("utf-8"))
    )


def commands(names: Sequence[str], quick: bool) -> Iterator[list[str]]:
    """What to run for each tool: its name, then its options."""
    for name in names:
        for options in (*SETS.get(name, ()), *UNTIMED.get(name, ())) or ((),):
            yield [name, *options, *(["--quick"] if quick else [])]


def alone(command: Sequence[str]) -> bool:
    """Whether a run measures times: not the seconds of a simulation, nor on a GPU that is not there."""
    name, *options = command
    simulated = ("bench_spaces", "bench_systems", "bench_tail", *(() if shutil.which("nvidia-smi") else ("bench_gpu",)))
    of_clocks = name.startswith(TIMED) and name not in simulated
    return of_clocks and not any(tuple(options[: len(one)]) == one for one in UNTIMED.get(name, ()))


def run_tool(command: Sequence[str], limit_s: float) -> Ran:
    """Run one tool as a person would, from the checkout's root, and keep its last line."""
    with _MEASURING:
        machine.loop_s()
    began, name = time.monotonic(), " ".join(command)
    # A file, not a pipe: ranks that outlive their tool would hold a pipe open, and waiting for its end would not end.
    with TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", f"tools.{command[0]}", *command[1:]],
            cwd=FOLDER.parent, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        code, cpu_s = _ended(process, limit_s)
        output.seek(0)
        lines = output.read().rstrip().splitlines()
    summary = next((line for line in reversed(lines) if line.startswith(command[0])), f"{command[0]}: no summary line")
    if code == -signal.SIGKILL:
        summary = f"{command[0]}: stopped after {limit_s:.0f} s"
    if code != 0:
        print("\n".join(["", f"---- {name} ended with {code}:", *lines[-60:], "----"]), flush=True)
    wall_s = time.monotonic() - began
    with _MEASURING:
        most_s = machine.limit(aims.QUICK_CPU_S).here if "--quick" in command else None
    return Ran(name, code, summary, wall_s, cpu_s, most_s)


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


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 1 if a tool failed."""
    parser = figures_parser(__doc__, "python -m tools.check")
    parser.add_argument("--only", nargs="+", choices=tool_names(), metavar="NAME", help="these tools")
    options = parser.parse_args(arguments)
    limit_s = QUICK_LIMIT_S if options.quick else LIMIT_S
    began = time.monotonic()

    def run(command: list[str]) -> Ran:
        ran = run_tool(command, limit_s)
        most = "" if ran.most_cpu_s is None else f" of {ran.most_cpu_s:.0f}"
        print(f"[{ran.wall_s:4.0f} s, {ran.cpu_s:4.0f}{most} s of CPU] {ran.summary}", flush=True)
        return ran

    chosen = list(commands(options.only or tool_names(), options.quick))
    with ThreadPoolExecutor(2) as pool:
        ran = list(pool.map(run, [command for command in chosen if not alone(command)]))
    ran += [run(command) for command in chosen if alone(command)]
    missed = [f"{one.name} ended with {one.code}: {one.summary}" for one in ran if one.code != 0]
    missed += [
        f"{one.name}: {one.cpu_s:.0f} s of CPU, not <= {one.most_cpu_s:.0f}, as {aims.QUICK_CPU_S:g} on the reference "
        "machine" for one in ran if one.most_cpu_s is not None and one.cpu_s > one.most_cpu_s
    ]  # fmt: skip
    took_s = time.monotonic() - began
    summary = f"{len(ran)} runs of {len(tool_names())} tools in {took_s:.0f} s"
    if options.quick and not options.only:
        slow = sum(one.wall_s * (one.most_cpu_s or 0.0) for one in ran) / sum(one.wall_s for one in ran)
        most_s = aims.QUICK_ALL_S * max(1.0, slow / aims.QUICK_CPU_S)
        summary += f" (aim {most_s:.0f}, as {aims.QUICK_ALL_S:g} on the reference machine)"
        if took_s > most_s:
            missed.append(f"all of them took {took_s:.0f} s, not <= {most_s:.0f}")
    return finish("check", summary, {"tools": [asdict(one) for one in ran]}, missed, options.json)


if __name__ == "__main__":
    sys.exit(main())
