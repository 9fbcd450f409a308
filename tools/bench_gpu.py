"""What a GPU shows: attention, training, costs, predictions, launches, hidden waits, several devices.

  python -m tools.bench_gpu [PART ...] [--quick] [--json FILE]

Runs the named parts, or all, one after the other in this process; one that fails is reported with its trace, the
others still run. `python -m tools.first_hour` gives each a process of its own, and a limit. `--json` writes the figures
and, beside them, a page. Without a GPU every part runs in tiny shapes on the CPU, as with `--quick` anywhere: that
shows that the parts run and measures nothing. Exits non-zero when an aim is missed or a part fails.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ds_hydra.commands.figures import figures_parser, guarded, print_table


@dataclass(frozen=True)
class Part:
    """A row of the table."""

    what: str  # it measures, for a reader
    module: str
    seconds: float  # on a device

    def run(self, name: str, folder: Path, full: bool) -> dict[str, Any]:
        """What was found: `status` is "measured" or "failed", then with the trace in `error`."""
        from tools.gpu.bench import Bench, device

        bench = Bench(device(), full, self.seconds, folder)
        try:
            # Imported here, so that a part that cannot even be imported does not take the others with it.
            measure: Callable[[Bench], Any] = getattr(import_module(f"tools.gpu.{self.module}"), f"measure_{name}")
            found = measure(bench)
        except Exception:
            error = traceback.format_exc()
            return {"what": self.what, "status": "failed", "seconds": bench.spent, "error": error}
        return {
            "what": self.what,
            "status": "measured",
            "seconds": bench.spent,
            "summary": found.summary,
            "missed": list(found.missed),
            "tables": [table._asdict() for table in found.tables],
            "figures": found.figures,
        }


# In this order: `prediction` uses the table that `costs` leaves.
PARTS = {
    "attention": Part("attention backends against SDPA in FP32: errors and times on several mixes of lengths",
                      "kernels", 45),
    "training": Part("a 1B Llama on one rank in BF16 against four baselines in turns: tokens/s, MFU, peak memory",
                     "training", 300),
    "costs": Part("a cost table by local shapes, and its error on held-out lengths", "training", 110),
    "prediction": Part("step time and peak memory as predicted, against what steps take", "training", 45),
    "launches": Part("kernels that a layer launches", "kernels", 25),
    "syncs": Part("hidden synchronisations of a step, each with its place", "kernels", 25),
    "budget": Part("where a step's time goes, by class of kernel, summed to 100 %", "budget", 40),
    "lengths": Part("peak memory and tokens/s of sequences up to the longest that one device holds", "budget", 120),
    "several": Part("ranks on several devices, the strategy changing every step: exposed pull and push", "several", 75),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 0 when every part has run and met its aims."""
    parser = figures_parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"only these: {', '.join(PARTS)}")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    chosen = [name for name in PARTS if name in (args.parts or PARTS)]
    return guarded("bench_gpu", lambda: run(chosen, args.quick, args.json))


def run(names: Sequence[str], quick: bool, json_file: Path | None) -> int:
    """The chosen parts, one after the other."""
    from tools.gpu.bench import device, device_name, finish

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    on_gpu, began = device().type == "cuda", time.monotonic()
    full = on_gpu and not quick
    if not full:
        _announce(on_gpu, names)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        for name in names:
            found[name] = PARTS[name].run(name, Path(folder), full)
            _show(name, found[name])
    missed = [aim for part in found.values() for aim in part.get("missed", ())]
    missed += [f"part {name}: {part['status']}" for name, part in found.items() if part["status"] != "measured"]
    record = {
        "name": "bench_gpu",
        "gpu": on_gpu,
        "full": full,
        "device": device_name(device()),
        "versions": {name: version(name) for name in ("torch", "transformers", "deepspeed")},
        "seconds": time.monotonic() - began,
        "missed": missed,
        "parts": found,
    }
    return finish(record, json_file)


def _announce(on_gpu: bool, names: Sequence[str]) -> None:
    print("tiny shapes on a GPU (--quick)" if on_gpu else "there is no GPU: NO GPU IS MEASURED HERE. One would show:")
    for name in names:
        print(f"  {name:<10}  {PARTS[name].what}")
    print("Each part now runs in tiny shapes, to show that it runs. The times below mean nothing.\n")


def _show(name: str, part: dict[str, Any]) -> None:
    print(f"== {name}: {part.get('summary', part['status'])} ({part['seconds']:.1f} s)")
    for table in part.get("tables", ()):
        print(table["title"])
        print_table(table["headers"], table["rows"])
    if "error" in part:
        print(part["error"].rstrip())
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
