"""The example trains while its ranks are killed and come back; a loss curve without a missing step.

  python -m tools.demo_elastic [--quick] [--json FILE] [--out FOLDER] [--ranks N] [--kills N]

`ds-hydra launch --respawn` starts examples/train.py with the block `hydra.elastic`, on the CPU. Ranks are killed one at
a time, the one with the number 0 first; each time a process comes back and joins before the next one is killed. Exits
non-zero where a step is missing, or was made twice, or a process has not come back.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ds_hydra.commands.figures import figures_parser, finish, guarded, print_table
from ds_hydra.config.read import read_config
from ds_hydra.report.curves import changes_of_ranks
from ds_hydra.report.plots import draw_report

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = {4: ["2*tp2", "tp2 + 2*tp1"], 3: ["tp2 + tp1", "3*tp1"], 2: ["tp2", "2*tp1"]}
TOKENS = {True: 2048, False: 8192}  # of a step, in the quick form and else
BETWEEN = 4  # steps from one that joins to the next kill
LIMIT_S, LEAVES_S = 900.0, 60.0  # until the job is given up; for the ranks to leave


def config(ranks: int, quick: bool, steps_file: Path) -> dict[str, Any]:
    """The example's, for so many ranks, with the block `elastic`."""
    block = read_config(config=str(ROOT / "examples" / "ds_hydra.json"))
    others = {str(few): names for few, names in STRATEGIES.items() if few < ranks}
    block["hydra"] |= {
        "strategies": STRATEGIES[ranks], "choose": "cycle", "cost_table": None, "tokens_per_step": TOKENS[quick],
        "steps_file": str(steps_file), "elastic": {"strategies": others, "compare_every": 1},
        "checkpoint": {"dir": str(steps_file.with_name("checkpoints")), "every": 0},  # so that SIGTERM ends it in order
    }  # fmt: skip
    return block


def ranks_of(launcher: int) -> Iterator[int]:
    """Processes that train, of those that a launcher has started."""
    parents: dict[int, int] = {}
    scripts: set[int] = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            words = (place / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError, IndexError):
            continue
        if any(word.endswith(b"examples/train.py") for word in words) and b"-u" in words:
            scripts.add(int(place.name))
    for process in sorted(scripts):
        above = process
        while above > 1 and above != launcher:
            above = parents.get(above, 0)
        if above == launcher and parents[process] not in scripts and process != launcher:
            yield process


def steps_of(file: Path) -> list[dict[str, Any]]:
    """What stands there by now, each line a step."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def run(ranks: int, kills: int, quick: bool, folder: Path) -> tuple[int, str]:
    """Train, and kill; the launcher's exit code, and all that was printed."""
    steps_file, log = folder / "steps.jsonl", folder / "log"
    (folder / "config.json").write_text(json.dumps(config(ranks, quick, steps_file)))
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [
        sys.executable, "-m", "ds_hydra.commands", "launch", "--num_gpus", str(ranks), "--respawn", str(kills),
        "--master_port", str(port), "examples/train.py", "--deepspeed_config", str(folder / "config.json"),
        "--max_files", "40", "--steps", str(10**6),
    ]  # fmt: skip
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as out:
        launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            _kill_in_turn(launcher, steps_file, ranks, kills)
        finally:
            for _ in range(2):  # the first one lets the ranks save and leave
                if launcher.poll() is None:
                    launcher.send_signal(signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        launcher.wait(LEAVES_S)
            code = launcher.wait()
    return code, log.read_text()


def _kill_in_turn(launcher: subprocess.Popen[bytes], steps_file: Path, ranks: int, kills: int) -> None:
    """Return when so many ranks were killed and are back, and some steps were made since."""
    deadline, killed = time.monotonic() + LIMIT_S, 0
    while launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
        found = steps_of(steps_file)
        changes = changes_of_ranks(found)
        if not changes or came_back(changes) < killed:
            continue
        since, now = changes[-1]
        if now == ranks and found[-1]["step"] >= since + BETWEEN - 1:
            if killed == kills:
                return
            living = list(ranks_of(launcher.pid))
            os.kill(living[killed % len(living)], signal.SIGKILL)
            killed += 1


def came_back(changes: Sequence[tuple[int, int]]) -> int:
    """How often ranks joined."""
    return sum(after > before for (_, before), (_, after) in pairwise(changes))


def main() -> int:
    """The exit code."""
    parser = figures_parser(__doc__, "python -m tools.demo_elastic")
    parser.add_argument("--out", type=Path, default=Path("runs/elastic"), help="folder of the records and drawings")
    parser.add_argument("--ranks", type=int, choices=STRATEGIES, default=4, help="that train")
    parser.add_argument("--kills", type=int, help="of ranks, one after the other (default: 3, quick 1)")
    options = parser.parse_args()
    kills = options.kills if options.kills is not None else 1 if options.quick else 3
    ranks = min(options.ranks, 3) if options.quick else options.ranks
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        code, printed = run(ranks, kills, options.quick, Path(scratch))
        lines = re.findall(r"epoch \d+: (.*)", printed)
        records = steps_of(Path(scratch) / "steps.jsonl")
        if code or not records:
            print(printed[-3000:])
            missed.append(f"the job has ended with code {code}")
        if [record["step"] for record in records] != list(range(1, len(records) + 1)):
            missed.append("a step is missing, or was made twice")
        changes = changes_of_ranks(records)
        if came_back(changes) < kills:
            missed.append(f"{came_back(changes)} processes have come back, of {kills} that were killed")
        options.out.mkdir(parents=True, exist_ok=True)
        if records:
            shutil.copy(Path(scratch) / "steps.jsonl", options.out)
            print(f"{draw_report(records, options.out)[0].path}: the loss curve")
    for line in lines:
        print(f"  {line}")
    print_table(("from step", "ranks"), changes or [(0, 0)])
    losses = [round(float(record["loss"]), 4) for record in records]
    summary = f"{kills} ranks killed, {came_back(changes)} came back, {len(records)} steps in a row"
    return finish("demo_elastic", summary, {"changes": changes, "lines": lines, "losses": losses}, missed, options.json)


if __name__ == "__main__":
    sys.exit(guarded("demo_elastic", main))
