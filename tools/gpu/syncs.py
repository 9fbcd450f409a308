"""Part "syncs": where a step of the engine makes the host wait for the device without being told to.

torch warns at each such operation; the stack at that moment says which line of this project asked for it. A wait
between the first forward and the last backward leaves the device without work, so it is an aim that there is none.
On a CPU nothing waits: there the operations stand in that would.
"""

from __future__ import annotations

import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tools.gpu.bench import Bench, Findings, Table
from tools.gpu.job import engine_alone, llama, new_model, sequences

ROOT = Path(__file__).resolve().parents[2]
WARNING = "called a synchronizing CUDA operation"  # torch's words
_WARM_UP, STEPS = 3, 2
_COMPUTES = ("pipe/runtime.py", "run")  # the file and the function between whose calls a stage computes
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero")


class Place(NamedTuple):
    """A line that made the host wait; `computing`: while a stage ran its micro-batches."""

    where: str  # file:line in function
    computing: bool


def measure_syncs(bench: Bench) -> Findings:
    """Waits of a step by place."""
    config, longest = llama(bench, 4), bench.pick(4096, 96)
    data = sequences(bench, longest, seed=4)
    with engine_alone(bench, new_model(config, bench), data, bench.pick(16384, 400)) as engine:
        for _ in range(_WARM_UP):
            engine.train_batch()
        batches = 0
        with caught(bench.device) as found:
            for _ in range(STEPS):
                engine.train_batch()
                batches += sum(engine.last_step.num_micro_batches)
    rows = tuple(
        (place.where, "yes" if place.computing else "", f"{count / STEPS:g}") for place, count in found.most_common()
    )
    hidden = sum(count for place, count in found.items() if place.computing)
    missed = []
    if hidden and bench.device.type == "cuda":
        missed.append(f"{hidden / STEPS:g} waits for the device while a stage computes, the aim is none")
    what = "waits" if bench.device.type == "cuda" else "reads of a number, which would wait on a GPU,"
    return Findings(
        f"{found.total() / STEPS:g} {what} a step of {batches / STEPS:g} micro-batches, {hidden / STEPS:g} of them "
        "while a stage computes",
        (Table("Hidden synchronisations", ("place", "while computing", "a step"), rows),),
        {
            "steps": STEPS,
            "micro_batches": batches,
            "places": [{**place._asdict(), "count": count} for place, count in found.most_common()],
        },
        tuple(missed),
    )


@contextmanager
def caught(device: torch.device) -> Iterator[Counter[Place]]:
    """Within it, every operation that waits for the device is counted by its place."""
    found: Counter[Place] = Counter()
    others = warnings.showwarning

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if WARNING in str(message):
            found[_place(f"{filename}:{lineno}")] += 1
        else:
            others(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=WARNING)
        warnings.showwarning = show
        with _warnings_of(device):
            yield found


@contextmanager
def _warnings_of(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        stand_in: AbstractContextManager[Any] = _Reads()
        with stand_in:
            yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _Reads(TorchDispatchMode):
    """Warns, in torch's words, at operations whose result the host must read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in _READS:
            warnings.warn(WARNING, stacklevel=2)
        return func(*args, **(kwargs or {}))


def _place(otherwise: str) -> Place:
    """The innermost line of this project on the stack, the benchmark's own left out; `otherwise` if there is none."""
    # On a GPU a backward runs in a thread of autograd, whose stack holds no more than hooks and what is recomputed.
    where, computing = "", threading.current_thread() is not threading.main_thread()
    for frame, line in traceback.walk_stack(None):
        path = Path(frame.f_code.co_filename).resolve()
        if not path.is_relative_to(ROOT) or {"tools", ".venv"} & set(path.relative_to(ROOT).parts):
            continue
        inside = str(path.relative_to(ROOT))
        where = where or f"{inside}:{line} in {frame.f_code.co_name}"
        computing |= (inside, frame.f_code.co_name) == _COMPUTES
    return Place(where or otherwise, computing)
