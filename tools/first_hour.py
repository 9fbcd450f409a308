"""The first hour on GPUs, row by row, each with what it should show; it stops at the first row that fails.

  python -m tools.first_hour [--quick] [--from ROW] [--json FILE]

Later rows mean nothing after one that failed: begin again with it, by `--from`, once it is mended. Rows that need more
GPUs than there are do not run, and are named. With NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL 2.30 or later, rows of tiny
models run with four ranks on one GPU. Without a GPU every row that can runs in tiny shapes on the CPU, which
shows that it runs and measures nothing; `--quick` runs the shortest of these alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ds_hydra.commands.figures import figures_parser, finish, guarded

ROOT = Path(__file__).resolve().parents[1]
_TAIL = 4000  # characters of what a row printed that are shown where it fails


@dataclass(frozen=True)
class Row:
    """One row: a command that exits with 0 when it shows what it should."""

    name: str
    minute: int
    command: tuple[str, ...]  # after the interpreter
    shows: str
    if_not: str  # where to look
    gpus: int = 1  # that it needs
    tiny: bool = False  # whether ranks may share one
    environment: Mapping[str, str] = field(default_factory=dict)
    on_cpu: tuple[str, ...] = ()  # what runs where there is no GPU; () nothing
    limit_s: float = 600.0
    short: bool = False  # runs with --quick


BENCH, HOUR = ("-m", "tools.bench_gpu"), ("-m", "tools.gpu.hour")
LOST = ("push", "vote", "a joiner")  # of the courses of `tools.gpu.lost`
ONE_BY_ONE = {"NCCL_DEBUG": "WARN", "TORCH_NCCL_TRACE_BUFFER_SIZE": "20000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
ROWS = (
    Row("device", 0, (*HOUR, "device"), "links between all devices; nothing else on them",
        "end other jobs; look for a device without NVLink in the matrix", on_cpu=(*HOUR, "device"), short=True),
    Row("tests", 2, ("-m", "pytest", "tests/gpu", "-m", "gpu", "-q"), "attention, times, BF16 against FP32: all pass",
        "a failure here is worth more than all below", on_cpu=("-m", "pytest", "tests/test_on_gpus.py", "-q")),
    Row("kernels", 8, (*BENCH, "attention", "launches", "syncs"),
        "errors below 2e-2, launches at most 0.6 of plain, no wait while computing", "the part's table names the place",
        on_cpu=(*BENCH, "attention", "launches", "syncs", "--quick")),
    Row("training", 13, (*BENCH, "training"), "at least the plain loop's tokens a second, the same first loss",
        "what a layer launches, and waits", on_cpu=(*BENCH, "training", "--quick")),
    Row("prediction", 17, (*BENCH, "costs", "prediction"), "step time and peak within 8 %",
        "a higher peak: memory that is not counted", on_cpu=(*BENCH, "costs", "prediction", "--quick")),
    Row("two devices", 25, (*BENCH, "several"), "strategies by turns, no hang",
        "compare the last entries of the flight recorders by group", gpus=2,
        environment={**ONE_BY_ONE, "CUDA_VISIBLE_DEVICES": "0,1"}, on_cpu=(*BENCH, "several", "--quick")),
    Row("all devices", 32, (*BENCH, "several"), "the same on all", "as above", gpus=4, environment=ONE_BY_ONE),
    Row("blocking launches", 36, (*HOUR, "turns"), "the same while each launch waits for its kernel",
        "the order of a rank's operations depends on more than its program", gpus=2, tiny=True,
        environment={**ONE_BY_ONE, "CUDA_LAUNCH_BLOCKING": "1"}),
    Row("one queue", 39, (*HOUR, "turns", "--one-queue"), "the same with one queue for all streams", "as above", gpus=2,
        tiny=True, environment=ONE_BY_ONE),
    Row("equal losses", 42, (*HOUR, "equal"), "in FP32 the losses of tp1 on one device, to 1e-6 in each step",
        "the strategy whose loss differs", gpus=2, tiny=True, on_cpu=(*HOUR, "equal")),
    Row("a dead rank", 48, (*HOUR, "killed"), "all others end within 3 s, with 75",
        "134: torch's watchdog was faster; see ds_hydra/host/devices.py", gpus=2, tiny=True, on_cpu=(*HOUR, "killed")),
    Row("lost ranks", 50, ("-m", "tools.gpu.lost", *LOST), "the others go on, to the bits of a stop and a restart",
        "what the ranks that ended otherwise have printed", gpus=4, tiny=True, on_cpu=("-m", "tools.gpu.lost", "push")),
    Row("traces", 52, (*HOUR, "traces"), "where devices idle: launches, gathers, pushes at the end, between steps",
        "open the traces that it names at https://ui.perfetto.dev", gpus=2),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows; 0 when all that ran have shown what they should."""
    parser = figures_parser(__doc__)
    parser.add_argument("--from", dest="first", choices=[row.name for row in ROWS], default=ROWS[0].name,
                        metavar="ROW", help="the row to begin with")  # fmt: skip
    args = parser.parse_args(arguments)
    return guarded("first_hour", lambda: run(ROWS, args.first, args.quick, args.json))


def run(rows: Sequence[Row], first: str, quick: bool, json_file: Path | None) -> int:
    """The rows from `first` on, until one fails."""
    from tools.gpu.bench import ranks_a_device

    gpus = num_gpus()
    if gpus == 0:
        print("there is no GPU: NO GPU IS MEASURED HERE. Rows run in tiny shapes on the CPU, where they can.")
    done: list[dict[str, object]] = []
    missed: list[str] = []
    for row in rows[[row.name for row in rows].index(first) :]:
        enough = gpus * (ranks_a_device() if row.tiny else 1) >= row.gpus
        command = row.command if gpus and enough else row.on_cpu if gpus == 0 else ()
        if not command or (quick and not row.short):
            needs = f"{row.gpus} GPU{'s' * (row.gpus > 1)}"
            print(f"{row.minute:3d} min  {row.name}: left out, {'--quick' if command else f'it needs {needs}'}")
            done.append({"row": row.name, "ran": False})
            continue
        print(f"{row.minute:3d} min  {row.name}: should show {row.shows}", flush=True)
        began = time.monotonic()
        code, printed = _ran(command, row)
        seconds = time.monotonic() - began
        done.append({"row": row.name, "ran": True, "code": code, "seconds": seconds})
        if code:
            print(printed[-_TAIL:])
            print(f"         FAILED with {code} after {seconds:.0f} s. If not: {row.if_not}")
            missed.append(f"{row.name} failed; what comes after it was not tried (--from {row.name!r} begins there)")
            break
        print(f"         {(printed.strip().splitlines() or [''])[-1][:160]} ({seconds:.0f} s)")
    ran = sum(bool(row["ran"]) for row in done)
    where = f"{gpus} GPUs" if gpus else "no GPU, nothing measured"
    return finish("first_hour", f"{ran} of {len(rows)} rows ran on {where}", {"gpus": gpus, "rows": done}, missed,
                  json_file)  # fmt: skip


def num_gpus() -> int:
    """GPUs that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _ran(command: Sequence[str], row: Row) -> tuple[int, str]:
    """A row's exit code and what it printed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        ended = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env={**os.environ, "PYTHONPATH": path, **row.environment}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=row.limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return 124, f"{printed}\nit stood still, or took longer than {row.limit_s:.0f} s"
    return ended.returncode, ended.stdout


if __name__ == "__main__":
    sys.exit(main())
