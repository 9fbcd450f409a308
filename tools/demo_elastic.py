"""Train the example while its ranks are killed and come back, and draw the loss curve: no step is missing.

  make demo-elastic        python -m tools.demo_elastic [--quick] [--json FILE] [--out FOLDER]

`ds-hydra launch` starts the ranks. When a step has been recorded one of them is killed, without warning; the others go
on, and the process that is started in its place joins them. Then the rank with the number 0 is killed, which writes the
records. Exits non-zero if a step is missing or recorded twice, if the ranks were not as many as they should have been,
or if the job fails.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from ds_hydra.commands.figures import figures_parser, finish, guarded, print_table
from ds_hydra.report.plots import changes_of_ranks, draw_report, read_steps
from ds_hydra.testing import free_port

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 600.0  # for a job that stands still


@dataclass(frozen=True)
class Course:
    """What befalls the job: `kills` are local ranks, each killed when all are there and `apart` more steps are made."""

    strategies: dict[int, list[str]]  # by the number of ranks, that of the start first
    steps: int
    kills: tuple[int, ...]
    apart: int

    @property
    def ranks(self) -> int:
        return next(iter(self.strategies))

    @property
    def expected(self) -> list[int]:
        """How many ranks there are, from the start on."""
        return [self.ranks, *(count for _ in self.kills for count in (self.ranks - 1, self.ranks))]


WHOLE = Course({4: ["tp2 + 2*tp1", "2*tp2"], 3: ["tp2 + tp1", "3*tp1"]}, 120, (2, 0), 6)
QUICK = Course({2: ["2*tp1"], 1: ["tp1"]}, 30, (1,), 2)


@dataclass
class Job:
    """The running job: its launcher, what it prints, and its records."""

    launcher: subprocess.Popen[str]
    port: int
    steps_file: Path
    printed: list[str] = field(default_factory=list)

    def listen(self) -> None:
        """Keep all lines; show those about ranks that are gone or have come."""
        assert self.launcher.stdout is not None
        for line in self.launcher.stdout:
            self.printed.append(line.rstrip())
            if "epoch " in line or "joins in its place" in line:
                print(f"  {line.strip()[:200]}", flush=True)

    def records(self) -> list[dict[str, Any]]:
        """Those that are whole, as they were written."""
        lines = self.steps_file.read_text().splitlines(keepends=True) if self.steps_file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def pid(self, local_rank: int) -> int | None:
        """The process that has this place on the machine."""
        wanted = {f"LOCAL_RANK={local_rank}", f"MASTER_PORT={self.port}"}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                program = (folder / "cmdline").read_bytes().split(b"\0")
                found = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if wanted <= set(found) and any(part.endswith(b"train.py") for part in program):
                return int(folder.name)
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, kill, draw; 0 when no step is missing."""
    parser = figures_parser(__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "elastic", help="folder for the drawings")
    args = parser.parse_args(arguments)
    return guarded("demo_elastic", lambda: run(QUICK if args.quick else WHOLE, args.out, args.json))


def run(course: Course, out: Path, json_file: Path | None) -> int:
    """One job from its start to its end."""
    print(f"{course.ranks} ranks train {course.steps} steps; {len(course.kills)} of them will be killed")
    with tempfile.TemporaryDirectory(prefix="demo-elastic-") as folder:
        job = start(course, Path(folder))
        listener = Thread(target=job.listen, daemon=True)
        listener.start()
        try:
            disturb(job, course)
            code = job.launcher.wait(timeout=LIMIT_S)
        finally:
            job.launcher.send_signal(signal.SIGTERM)
        listener.join(timeout=10.0)
        if code:
            print("\n".join(job.printed[-40:]))
            return finish("demo_elastic", "the job failed", {}, [f"the job ended with {code}"], json_file)
        records, raw = read_steps(job.steps_file)[0], [record["step"] for record in job.records()]
    missed = wrong(course, records, raw)
    shown = draw_report(records, out)
    stretches = changes_of_ranks(records)
    ends = [step - 1 for step, _ in stretches[1:]] + [records[-1]["step"]]
    by_step = {record["step"]: record for record in records}
    print_table(
        ["steps", "ranks", "loss of the first", "of the last"],
        [(f"{first} to {last}", ranks, f"{by_step[first]['loss']:.3f}", f"{by_step[last]['loss']:.3f}")
         for (first, ranks), last in zip(stretches, ends, strict=True)],
    )  # fmt: skip
    waits = [float(found) for line in job.printed for found in re.findall(r"epoch .* after ([\d.]+) s", line)]
    print(f"drawn: {next(figure.path for figure in shown if figure.path.stem == 'learning')}, and others beside it")
    lost = len(set(range(1, course.steps + 1)) - set(by_step))
    figures = {"steps": len(records), "stretches": stretches, "waits_s": waits, "missing": lost}
    said = f"{len(records)} steps, {lost} of them missing, {len(course.kills)} ranks killed and back"
    return finish("demo_elastic", f"{said}; the others went on after {max(waits, default=0.0):.1f} s at most", figures,
                  missed, json_file)  # fmt: skip


def start(course: Course, folder: Path) -> Job:
    """The example under a launcher that lets survivors live."""
    first, *others = course.strategies
    config: dict[str, Any] = {
        "hydra": {
            "tokens_per_step": 2048, "context_length": 512, "too_long": "truncate", "choose": "cycle",
            "strategies": course.strategies[first], "steps_file": str(folder / "steps.jsonl"),
            "elastic": {"strategies": {str(ranks): course.strategies[ranks] for ranks in others}, "compare_every": 10},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "gradient_clipping": 1.0,
    }  # fmt: skip
    settings = folder / "ds.json"
    settings.write_text(json.dumps(config))
    port = free_port()
    command = [
        sys.executable, "-m", "ds_hydra.commands", "launch", "--respawn", str(len(course.kills)), "--num_gpus",
        str(course.ranks), "--master_port", str(port), str(ROOT / "examples" / "train.py"), "--deepspeed_config",
        str(settings), "--steps", str(course.steps), "--max_files", "100",
    ]  # fmt: skip
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }  # fmt: skip
    launcher = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return Job(launcher, port, folder / "steps.jsonl")


def disturb(job: Job, course: Course) -> None:
    """Kill the ranks of the course, each once the others have made steps with all."""
    for victim in course.kills:
        began = len(job.records())
        step = waited(job, lambda began=began: whole(job.records()[began:], course) >= course.apart)
        pid = job.pid(victim)
        if not step or pid is None:
            return  # the job has ended, and is judged by what it left
        print(f"step {step}, loss {job.records()[-1]['loss']:.3f}: process {pid}, the rank {victim} of its machine, "
              "is killed", flush=True)  # fmt: skip
        os.kill(pid, signal.SIGKILL)
        waited(job, lambda step=step: any(ranks < course.ranks for _, ranks in ranks_since(job, step)))


def whole(records: Sequence[dict[str, Any]], course: Course) -> int:
    """How many of the last steps all ranks have made."""
    count = 0
    for record in reversed(records):
        if ranks_of_step(record) < course.ranks:
            break
        count += 1
    return count


def ranks_of_step(record: dict[str, Any]) -> int:
    """How many ranks made a step."""
    return changes_of_ranks([record])[0][1]


def ranks_since(job: Job, step: int) -> list[tuple[int, int]]:
    """(step, ranks) of the changes after a step."""
    return changes_of_ranks([record for record in job.records() if record["step"] > step])


def waited(job: Job, there: Any) -> int:
    """Wait for something in the records: their last step then, or 0 when the job has ended or stands still."""
    deadline = time.monotonic() + LIMIT_S
    while not there():
        if job.launcher.poll() is not None or time.monotonic() > deadline:
            return 0
        time.sleep(0.05)
    return int(job.records()[-1]["step"]) if job.records() else 0


def wrong(course: Course, records: Sequence[dict[str, Any]], raw: Sequence[int]) -> list[str]:
    """What should not have happened."""
    found = []
    if missing := sorted(set(range(1, course.steps + 1)) - set(raw)):
        found.append(f"no records of the steps {missing}")
    if len(raw) > len(set(raw)):
        found.append(f"steps are recorded twice: {sorted(step for step in set(raw) if raw.count(step) > 1)}")
    if (counts := [ranks for _, ranks in changes_of_ranks(records)]) != course.expected:
        found.append(f"{counts} ranks trained, not {course.expected}")
    if not records[-1]["loss"] < records[0]["loss"]:
        found.append(f"the loss went from {records[0]['loss']:.3f} to {records[-1]['loss']:.3f}")
    return found


if __name__ == "__main__":
    sys.exit(main())
