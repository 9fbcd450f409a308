"""The first hour on GPUs, row by row, each with what it should show and a folder that keeps all that it printed.

  python -m tools.first_hour [--list one|eight] [--only ROW ...] [--from ROW] [--minutes N] [--out DIR] [--quick]

Two lists of rows: 45 minutes of one GPU in runs of ten (`--minutes 10`, again and again), and an hour of eight; without
`--list` the number of GPUs chooses. A row that must hold (tests, hangs, equal losses) ends the run where it fails;
aims of speed are noted and the run goes on. No row is started that does not fit into the minutes that are left.

Each row leaves its tables, ROW.json, and all that it printed, ROW.txt, in DIR, and page.md has them all. A run with the
same DIR adds to it: rows that have passed there are passed over, unless `--only` names them. Rows that need more GPUs
than there are do not run, and are named. With NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL 2.30 or later, rows of tiny models
run with four ranks on one GPU. Without a GPU every row that can runs in tiny shapes on the CPU, which shows that it
runs and measures nothing; `--quick` runs the shortest of these alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_hydra.commands.figures import figures_parser, finish, guarded

ROOT = Path(__file__).resolve().parents[1]
_TAIL = 4000  # characters of what a row printed that are shown where it fails
_LAST_LINES = 40  # of what a row without tables printed, for the page


@dataclass(frozen=True)
class Row:
    """One row: a command that exits with 0 when it shows what it should."""

    name: str
    minute: int  # at which it begins, where all before it have run
    command: tuple[str, ...]  # after the interpreter; OUT stands for a path of the row's own, without a suffix
    shows: str
    if_not: str  # where to look
    gpus: int = 1  # that it needs
    tiny: bool = False  # whether ranks may share one
    environment: Mapping[str, str] = field(default_factory=dict)
    on_cpu: tuple[str, ...] = ()  # what runs where there is no GPU; () nothing
    limit_s: float = 600.0
    short: bool = False  # runs with --quick
    must: bool = False  # where it fails, later rows mean nothing
    needs_s: float = 120.0  # it is not started with less time than this


OUT = "{out}"
BENCH, HOUR = ("-m", "tools.bench_gpu"), ("-m", "tools.gpu.hour")
LOST = ("push", "vote", "a joiner")  # of the courses of `tools.gpu.lost`
ONE_BY_ONE = {"NCCL_DEBUG": "WARN", "TORCH_FR_BUFFER_SIZE": "20000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def _bench(*parts: str) -> tuple[str, ...]:
    return (*BENCH, *parts, "--json", f"{OUT}.json")


def _measured(name: str, minute: int, parts: Sequence[str], shows: str, if_not: str, **more: Any) -> Row:
    """A row of parts of the benchmark."""
    return Row(name, minute, _bench(*parts), shows, if_not, on_cpu=_bench(*parts, "--quick"), **more)


DEVICE = Row("device", 0, (*HOUR, "device"), "links, versions, FlashAttention 3, Triton's kernels; none else runs",
             "end other jobs; look for a device without NVLink in the matrix", on_cpu=(*HOUR, "device"), short=True,
             must=True, needs_s=20)  # fmt: skip
TESTS = Row("tests", 1, ("-m", "pytest", "tests/gpu", "tests/test_kernels.py", "-m", "gpu", "-q"),
            "attention, kernels, times, BF16 against FP32 pass",
            "a failure here is worth more than all below", must=True, needs_s=180,
            on_cpu=("-m", "pytest", "tests/test_on_gpus.py", "-q"))  # fmt: skip
TURNS = (
    Row("blocking launches", 36, (*HOUR, "turns"), "strategies by turns while each launch waits for its kernel",
        "the order of a rank's operations depends on more than its program", gpus=2, tiny=True, must=True,
        environment={**ONE_BY_ONE, "CUDA_LAUNCH_BLOCKING": "1"}),
    Row("one queue", 38, (*HOUR, "turns", "--one-queue"), "the same with one queue for all streams", "as above", gpus=2,
        tiny=True, environment=ONE_BY_ONE, must=True),
    Row("equal losses", 40, (*HOUR, "equal"), "in FP32 the losses of tp1 on one device, to 1e-6 in each step",
        "the strategy whose loss differs", gpus=2, tiny=True, on_cpu=(*HOUR, "equal"), must=True),
    Row("a dead rank", 42, (*HOUR, "killed"), "all others end within 3 s, with 75", "134: torch's watchdog was faster; "
        "see ds_hydra/host/devices.py", gpus=2, tiny=True, on_cpu=(*HOUR, "killed"), must=True, needs_s=60),
    Row("lost ranks", 43, ("-m", "tools.gpu.lost", *LOST), "the others go on, to the bits of a stop and a restart",
        "what the ranks that ended otherwise have printed", gpus=4, tiny=True, on_cpu=("-m", "tools.gpu.lost", "push"),
        must=True),
)  # fmt: skip
ONE: tuple[Row, ...] = (
    DEVICE,
    TESTS,
    _measured("kernels", 5, ("launches", "syncs", "attention"), "errors below 2e-2, launches at most 0.6 of plain, no "
              "wait while computing", "the part's table names the place"),
    _measured("training", 8, ("training",), "at least each baseline's tokens a second, the same first loss",
              "what a layer launches, and waits", needs_s=420),
    _measured("budget", 17, ("budget",), "where a step's time goes, summed to 100 %", "what no class explains"),
    _measured("lengths", 19, ("lengths",), "peak memory by length as the memory model has it", "memory that is not "
              "counted", needs_s=300),
    _measured("prediction", 27, ("costs", "prediction"), "step time and peak within 8 %, of 20 steps",
              "a higher peak: memory that is not counted", needs_s=300),
    *TURNS,
)  # fmt: skip
EIGHT: tuple[Row, ...] = (
    DEVICE,
    TESTS,
    _measured("two devices", 5, ("several",), "strategies by turns, no hang", "compare the last entries of the flight "
              "recorders by group", gpus=2, environment={**ONE_BY_ONE, "CUDA_VISIBLE_DEVICES": "0,1"}, must=True),
    _measured("all devices", 9, ("several",), "the same on all, and the memory of communicators in the log", "as above",
              gpus=4, environment=ONE_BY_ONE, must=True),
    _measured("training", 14, ("training",), "at least each baseline's tokens a second on one of them", "what a layer "
              "launches, and waits", needs_s=420),
    Row("traces", 24, (*HOUR, "traces", OUT), "kernel time by class and where devices idle, at 1B and at layers of 8B",
        "open the traces that it names at https://ui.perfetto.dev", gpus=2, needs_s=300),
    *TURNS,
    _measured("lengths", 48, ("lengths",), "peak memory by length on one of them", "memory that is not counted",
              needs_s=300),
)  # fmt: skip
LISTS: Mapping[str, tuple[Row, ...]] = {"one": ONE, "eight": EIGHT}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows; 0 when all that ran have shown what they should."""
    names = list(dict.fromkeys(row.name for rows in LISTS.values() for row in rows))
    parser = figures_parser(__doc__)
    parser.add_argument("--list", choices=LISTS, help="which rows; without it the number of GPUs chooses")
    parser.add_argument("--only", nargs="+", choices=names, metavar="ROW", default=(), help="these rows alone")
    parser.add_argument("--from", dest="first", choices=names, metavar="ROW", help="the row to begin with")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no row that does not fit into these")
    parser.add_argument("--out", type=Path, default=Path("first-hour"), help="the folder that keeps what rows printed")
    args = parser.parse_args(arguments)
    rows = LISTS[args.list or ("eight" if num_gpus() > 1 else "one")]
    if absent := set(args.only).union((args.first,) if args.first else ()).difference(row.name for row in rows):
        parser.error(f"this list has no row {', '.join(sorted(absent))}; it has {', '.join(row.name for row in rows)}")
    if args.first:
        rows = rows[[row.name for row in rows].index(args.first) :]
    hour = Hour(args.out, 60 * args.minutes, args.only, again=bool(args.first))
    return guarded("first_hour", lambda: run(rows, hour, args.quick, args.json))


class Hour:
    """The folder of a run, what rows have left in it, and the time that is left."""

    def __init__(self, out: Path, seconds: float = float("inf"), only: Sequence[str] = (), *, again: bool = False):
        """`again`: rows that have passed run once more."""
        self.out, self.only, self._again, self._ends = out, only, again, time.monotonic() + seconds
        self._file = out / "rows.json"
        self.found: dict[str, dict[str, Any]] = json.loads(self._file.read_text()) if self._file.exists() else {}

    @property
    def left_s(self) -> float:
        """Seconds that are left of the minutes."""
        return self._ends - time.monotonic()

    def passes_over(self, row: Row) -> str:
        """Why a row does not run; "": it does."""
        if self.only:
            return "" if row.name in self.only else "not asked for"
        if not self._again and self.found.get(row.name, {}).get("code") == 0:
            return f"it has passed, {self.out}/{_stem(row.name)}.txt"
        return (
            "" if self.left_s >= row.needs_s else f"it needs {row.needs_s:.0f} s, {max(0.0, self.left_s):.0f} are left"
        )

    def keep(self, row: Row, code: int, seconds: float, printed: str) -> None:
        """Write what a row has shown, and the page of all rows anew."""
        (self.out / f"{_stem(row.name)}.txt").write_text(printed)
        self.found[row.name] = {"code": code, "seconds": seconds, "shows": row.shows, "must": row.must}
        self._file.write_text(json.dumps(self.found, indent=1) + "\n")
        (self.out / "page.md").write_text(self.page())

    def page(self) -> str:
        """All rows with their tables, or what they printed last."""
        from tools.gpu.bench import page

        lines = ["# The first hour", "", "| row | should show | exit code | s |", "| --- | --- | --- | --- |"]
        lines += [f"| {name} | {row['shows']} | {row['code']} | {row['seconds']:.0f} |"
                  for name, row in self.found.items()]  # fmt: skip
        for name in self.found:
            record, text = self.out / f"{_stem(name)}.json", self.out / f"{_stem(name)}.txt"
            lines += ["", f"## Row: {name}", ""]
            if record.exists():
                lines.append(page(json.loads(record.read_text())).replace("\n#", "\n##").removeprefix("# "))
            else:
                lines += ["```", *text.read_text().rstrip().splitlines()[-_LAST_LINES:], "```"]
        return "\n".join(lines) + "\n"


def _stem(name: str) -> str:
    return name.replace(" ", "-")


def run(rows: Sequence[Row], hour: Hour, quick: bool, json_file: Path | None) -> int:
    """The rows in their order, until one fails that must not."""
    from tools.gpu.bench import ranks_a_device

    gpus = num_gpus()
    hour.out.mkdir(parents=True, exist_ok=True)
    if gpus == 0:
        print("there is no GPU: NO GPU IS MEASURED HERE. Rows run in tiny shapes on the CPU, where they can.")
    done: list[dict[str, object]] = []
    missed: list[str] = []
    for row in rows:
        enough = gpus * (ranks_a_device() if row.tiny else 1) >= row.gpus
        command = row.command if gpus and enough else row.on_cpu if gpus == 0 else ()
        why = hour.passes_over(row) if command else f"it needs {row.gpus} GPU{'s' * (row.gpus > 1)}"
        why = "--quick" if command and quick and not row.short else why
        if why:
            print(f"{row.minute:3d} min  {row.name}: left out, {why}")
            done.append({"row": row.name, "ran": False, "why": why})
            continue
        print(f"{row.minute:3d} min  {row.name}: should show {row.shows}", flush=True)
        code, seconds, printed = _row(row, command, hour)
        done.append({"row": row.name, "ran": True, "code": code, "seconds": seconds})
        if not code:
            print(f"         {(printed.strip().splitlines() or [''])[-1][:160]} ({seconds:.0f} s)")
            continue
        print(printed[-_TAIL:])
        print(f"         FAILED with {code} after {seconds:.0f} s. If not: {row.if_not}")
        missed.append(f"{row.name} failed" if not row.must else f"{row.name} failed; what comes after it was not tried "
                      f"(--from {row.name!r} begins there)")  # fmt: skip
        if row.must:
            break
    ran = sum(bool(row["ran"]) for row in done)
    where = f"{gpus} GPUs" if gpus else "no GPU, nothing measured"
    return finish("first_hour", f"{ran} of {len(rows)} rows ran on {where}; {hour.out}/page.md has their tables",
                  {"gpus": gpus, "rows": done}, missed, json_file)  # fmt: skip


def _row(row: Row, command: Sequence[str], hour: Hour) -> tuple[int, float, str]:
    """A row's exit code, its seconds and what it printed, which its folder keeps."""
    own = str((hour.out / _stem(row.name)).resolve())
    began = time.monotonic()
    code, printed = _ran([word.replace(OUT, own) for word in command], row, min(row.limit_s, hour.left_s))
    seconds = time.monotonic() - began
    hour.keep(row, code, seconds, printed)
    return code, seconds, printed


def num_gpus() -> int:
    """GPUs that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _ran(command: Sequence[str], row: Row, limit_s: float) -> tuple[int, str]:
    """A row's exit code and what it printed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        ended = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env={**os.environ, "PYTHONPATH": path, **row.environment}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return 124, f"{printed}\nit stood still, or took longer than {limit_s:.0f} s"
    return ended.returncode, ended.stdout


if __name__ == "__main__":
    sys.exit(main())
