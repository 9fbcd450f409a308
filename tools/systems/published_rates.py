"""Public training runs of one kind of device beside what the tables say of them, with what each adds. Pure: no torch.

[Note: what runs add]
A table says what forwards and backwards take. A run adds what its row names: layers computed again (all products of a
layer a third more, its attention 2/7, as the forward has two of seven products, or none where its outputs are kept),
every second product computed again (a sixth more), states on the host (Adam of 10^9 parameters of a rank a second), and
messages of TP: as in the table, or half of them where products hide them (async).
Rows 3 to 6 are met where attention is not run again; if it is, attention at these lengths reaches 565 to 595 TFLOP/s in
place of 447, and long sequences are cheaper still. Which of both was run is not published.
"""

from __future__ import annotations

import statistics
from functools import lru_cache
from typing import NamedTuple

from ds_hydra.pipe.shape import ParallelScheme
from tools.systems.devices import DEVICES, Device, alone_of, found_of, split

_NONE, _ALL, _BUT_ATTENTION, _SECOND = "nothing", "all layers again", "all but attention again", "every second product"
_AGAIN = {_NONE: (0.0, 0.0), _ALL: (1 / 3, 2 / 7), _BUT_ATTENTION: (1 / 3, 0.0), _SECOND: (1 / 6, 0.0)}
_NORMS = "norms and activations again"
_AGAIN[_NORMS] = (0.04, 0.0)
_ADAM_S = 1e-9  # of a parameter of a rank on the host


class Run(NamedTuple):
    """A public run: tokens a second of each GPU (or TFLOP/s of the model, below 1,000 where `in_tflops`)."""

    number: str
    model: str
    length: int
    seen: float
    what: str
    source: str
    again: str = _NONE
    tp: int = 1
    hidden_messages: float = 0.0
    on_host: float = 0.0  # parameters of a rank whose states are there
    in_tflops: bool = False
    layers: float = 1.0  # times the model's


_ARCTIC, _TITAN = "stas00/ml-engineering, 8 H200s", "torchtitan's performance pages"
_HOST = "ZeRO-3, Adam on the host"
RUNS = (
    Run("1", "8b H200", 8192, 461, "ZeRO-2", _ARCTIC, in_tflops=True),
    *(Run(number, "8b H200", 1024 * length, seen, _HOST, _ARCTIC, _BUT_ATTENTION, on_host=1e9, in_tflops=True)
      for number, length, seen in
      (("2", 32, 324), ("3", 64, 391), ("4", 128, 420), ("5", 192, 422), ("6", 256, 419))),
    Run("7", "7b H100", 4096, 9600, "FSDP, 128 GPUs", "foundation-model-stack/fms-fsdp, issue 89"),
    Run("16", "70b H100", 8192, 389, "FSDP 32, CP 2, 64 GPUs", "NeMo Automodel", _NORMS, in_tflops=True),
    Run("19", "70b H100", 8192, 597, "TP 8, 256 GPUs", _TITAN, _ALL, tp=8),
    Run("19", "70b H100", 8192, 652, "TP 8 async, 256 GPUs", _TITAN, _ALL, tp=8, hidden_messages=0.5),
    Run("20", "8b H100", 8192, 6514, "FSDP, compile, 128 GPUs", _TITAN, _SECOND),
    Run("20", "8b H100", 8192, 4378, "FSDP 8 and TP 8, compile, 64 GPUs", _TITAN, _SECOND, tp=8),
    Run("20", "8b H100", 8192, 4809, "the same, TP async", _TITAN, _SECOND, tp=8, hidden_messages=0.5),
    Run("21", "8b H100", 1_048_576, 345, "ring of 8, activations on the host, 36 layers", "TRL, PR 6846", _ALL,
        layers=36 / 32),
    Run("8", "7b A800", 4096, 3760, "FSDP, 128 A100s", "fms-fsdp"),
    Run("9", "7b A800", 2048, 4078, "ZeRO-1, 8 A100s", "InternEvo"),
)  # fmt: skip
FITTED = ("1", "7")
NOT_COMPARABLE = {
    "11 to 15": "FP8", "17, 18": "LoRA: no gradients of weights", "22": "models without a table", "25": "TPU",
    "23, 24, 26": "a whole node, or reinforcement learning end to end", "10": "a length without its layout",
}  # fmt: skip


def flops_of(run: Run) -> float:
    """Of a token, as `Model.flops`."""
    return run.layers * split(run.model)[0].flops(run.length)


def seen(run: Run) -> float:
    """Tokens a second of each GPU."""
    return run.seen * 1e12 / flops_of(run) if run.in_tflops else run.seen


def predicted(run: Run) -> float:
    """Tokens a second of each GPU by the table, with what the run adds [Note: what runs add]."""
    table = found_of(run.model).table
    a, b = alone_of(table)
    of_rest, of_attention = _AGAIN[run.again]
    ms = run.layers * (b * (1 + of_rest) + a * run.length * (1 + of_attention))
    if run.tp > 1:
        messages = table[ParallelScheme(run.tp)].b * run.tp - b
        ms += (1 - run.hidden_messages) * messages * (1.5 if run.again == _ALL else 1.0)
    return 1e3 / (ms + 1e3 * _ADAM_S * run.on_host / run.length)


def rate_rows() -> list[dict[str, object]]:
    """A line for each run: seen, by the table, and the difference."""
    rows: list[dict[str, object]] = []
    for run in RUNS:
        rows.append({
            "row": run.number, "model": run.model, "length": run.length, "run": run.what, "computed again": run.again,
            "seen tokens/s": round(seen(run)), "by the table": round(predicted(run)),
            "off": f"{predicted(run) / seen(run) - 1:+.1%}", "TFLOP/s seen": round(seen(run) * flops_of(run) / 1e12),
            "fitted": run.number in FITTED, "source": run.source,
        })  # fmt: skip
    return rows


def median_off() -> float:
    """Of the runs on H100s and H200s that no number was fitted to."""
    held_out = [run for run in RUNS if "A800" not in run.model and run.number not in FITTED]
    return statistics.median(abs(predicted(run) / seen(run) - 1) for run in held_out)


def device_rows() -> list[dict[str, object]]:
    """What each device's tables are derived from."""
    return [
        {"device": one.name, "attention": _rate(one, one.attention), "the rest": _rate(one, one.rest),
         "as jobs reach it": f"{reached(one.name):.2f}", "kernel": one.kernel, "from": one.software, "date": one.date}
        for one in DEVICES.values()
    ]  # fmt: skip


def _rate(device: Device, rate: float) -> str:
    return f"{rate:.0f} TFLOP/s ({rate / device.peak:.0%})" if rate else "as published"


@lru_cache(maxsize=8)
def reached(device: str) -> float:
    """What jobs have of a table's speed, in the median of the device's runs: for ours and rivals alike."""
    return statistics.median(seen(run) / predicted(run) for run in RUNS if run.model.endswith(device))
