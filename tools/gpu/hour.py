"""Rows of the first hour on GPUs that no part of the benchmark has: `python -m tools.gpu.hour WHAT`.

`device` shows the devices and that they are free; `turns` trains a small model by all strategies in turn; `equal`
compares losses in FP32 with those of one device; `killed` ends a rank; `traces` records some steps.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from ds_hydra.pipe import kernels
from ds_hydra.pipe.attention.backends import use_flash_3
from ds_hydra.report.plots import read_steps
from tools.gpu.bench import ranks_at_hand
from tools.gpu.budget import Interval, shares
from tools.gpu.several import STRATEGIES, launch

FREE = 0.97  # of a device's memory, before anything runs on it
EQUAL = 1e-6  # relative, of each step's loss
MORE = {4: ("pp4", "2*pp2", "tp2sp2", "sp2pp2", "tp2pp2/v", "sp2pp2/v", "2*sp2", "sp2 + tp2")}  # in tiny shapes
ENDED_S = 3.0  # the others, after a rank's death
DEAD, OTHERS_FAULT = -9, 75


def devices() -> list[str]:
    """What is wrong with the devices."""
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__}, no CUDA device")
        return []
    if shutil.which("nvidia-smi"):
        print(subprocess.run(["nvidia-smi", "topo", "-m"], stdout=subprocess.PIPE, text=True).stdout)
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    print(f"FlashAttention 3: {'runs' if use_flash_3(torch.device('cuda', 0)) else 'does not run'}")
    runs = kernels.work(torch.device("cuda", 0))
    wrong = [] if runs else ["Triton's kernels do not run here: every step is slower by their share"]
    if shutil.which("nvidia-smi"):
        asked = "index,driver_version,power.limit,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu"
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv"]
        for moment in ("before work", "after work"):
            print(f"{moment}:\n{subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout}")
            _work()
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        print(
            f"device {index}: {torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
        if free < FREE * total:
            wrong.append(f"device {index} has {free / total:.0%} of its memory free: something else runs there")
    return wrong


def _work() -> None:
    """Products for a second, so that clocks are those of work."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    began = time.monotonic()
    while time.monotonic() - began < 1.0:
        torch.mm(x, x)
        torch.cuda.synchronize()


def num_ranks() -> int:
    """As many as NCCL can connect, of those that have strategies; two on a CPU."""
    return max((number for number in STRATEGIES if number <= ranks_at_hand()), default=2)


def turns(one_queue: bool) -> list[str]:
    """All strategies in turn, without a hang."""
    with tempfile.TemporaryDirectory() as folder:
        codes, _ = launch(num_ranks(), folder, every_kind(), steps=2 * len(every_kind()), one_queue=one_queue)
    return [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]


def equal() -> list[str]:
    """Losses in FP32 of steps by all strategies in turn, beside those of one rank."""
    strategies, losses, wrong = every_kind(), [], []
    for ranks, mine in ((1, ["tp1"]), (num_ranks(), strategies)):
        with tempfile.TemporaryDirectory() as folder:
            codes, _ = launch(ranks, folder, mine, steps=len(strategies))
            if any(codes):
                return [f"{', '.join(mine)}: the ranks ended with {codes}"]
            losses.append([record["loss"] for record in read_steps(str(Path(folder, "steps.jsonl")))[0]])
    for step, (strategy, one, several) in enumerate(zip(strategies, *losses, strict=True), start=1):
        off = abs(several / one - 1)
        print(f"{strategy}: {several:.8f}, {off:.1e} from one rank")
        if not off <= EQUAL:
            wrong.append(f"step {step}, {strategy}: the loss is {off:.1e} from that of one rank (aim {EQUAL:.0e})")
    return wrong


def every_kind() -> list[str]:
    """Strategies of each kind that these ranks can run."""
    return [*STRATEGIES[num_ranks()], *MORE.get(num_ranks(), ())]


def killed() -> list[str]:
    """How the others end when the last rank is killed."""
    ranks = num_ranks()
    with tempfile.TemporaryDirectory() as folder:
        codes, seconds = launch(ranks, folder, STRATEGIES[ranks], steps=1000, killed=True)
    print(f"exit codes {codes}, after {seconds:.1f} s")
    wrong = [f"rank {rank} ended with {code}, not {OTHERS_FAULT}" for rank, code in enumerate(codes[:-1])
             if code != OTHERS_FAULT]  # fmt: skip
    if codes[-1] != DEAD:
        wrong.append(f"rank {ranks - 1} was to be killed, and ended with {codes[-1]}")
    late = torch.cuda.is_available() and seconds > ENDED_S  # ranks that share cores may be late for that alone
    return wrong + ([f"the others took {seconds:.1f} s (aim {ENDED_S:g})"] if late else [])


def traces(out: str | None) -> list[str]:
    """Steps at real shapes with the profiler's traces of the first and the last rank, and what is in them by class."""
    wrong: list[str] = []
    for layers in (16, 8) if torch.cuda.is_available() else (4,):  # Llama 1B, and eight layers of 8B's width
        folder = Path(f"{out}-{layers}-layers") if out else Path(tempfile.mkdtemp(prefix="first-hour-"))
        folder.mkdir(parents=True, exist_ok=True)
        codes, _ = launch(num_ranks(), str(folder), STRATEGIES[num_ranks()][:1], steps=8, traced=True, layers=layers,
                          full=torch.cuda.is_available())  # fmt: skip
        found = sorted(folder.glob("profile_step*.json"))
        for path in (found[0], found[-1]) if found else ():
            print(f"{path}, {layers} layers:")
            tell_trace(path)
        wrong += [f"{layers} layers: the ranks ended with {codes}"] if any(codes) or not found else []
    return wrong


def tell_trace(path: Path) -> None:
    """Print the time of each class of kernels in a trace of torch's profiler, and that of none."""
    events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if torch.cuda.is_available() else ("cpu_op",)
    found = [Interval(one["ts"], one["ts"] + one["dur"], one["name"]) for one in events
             if one.get("cat") in kinds and "dur" in one]  # fmt: skip
    if not found:
        print("  no kernels")
        return
    parts = shares(found, min(one.start for one in found), max(one.stop for one in found))
    for name, us in sorted(parts.items(), key=lambda part: -part[1]):
        print(f"  {name:<12} {us / 1e3:10.2f} ms {us / sum(parts.values()):7.1%}")


def main() -> int:
    """One row; 0 when it shows what it should."""
    what = sys.argv[1]
    rows = {"device": devices, "turns": lambda: turns("--one-queue" in sys.argv), "equal": equal, "killed": killed,
            "traces": lambda: traces(sys.argv[2] if len(sys.argv) > 2 else None)}  # fmt: skip
    wrong = rows[what]()
    for line in wrong:
        print(f"wrong: {line}")
    print(f"{what}: {f'{len(wrong)} wrong' if wrong else 'as it should be'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
