"""What a GPU shows in 18 minutes: attention, training, costs, predictions, launches, hidden waits, several devices.

  python -m tools.bench_gpu [PART ...] [--quick] [--json FILE]

Writes benchmarks/gpu.json and, beside it, the page gpu.md. On a GPU each part runs in a process of its own and within
a budget of seconds; one that fails is reported with its trace, the others still run. Without a GPU the command says
what it would measure and runs every part in tiny shapes on the CPU, as `--quick` does anywhere: that shows that the
parts run, measures nothing, and writes a file only where `--json` names one. Exits non-zero when an aim is missed or
a part fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ds_hydra.commands.figures import figures_parser, guarded, print_table

DEFAULT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu.json"
LIMIT_SECONDS = 1080.0  # of all parts on a GPU together
QUICK_SECONDS = 120.0  # of a part in tiny shapes, which needs a few: only one that hangs takes so long


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line; `--answer` and `--seconds` are for a part's own process."""
    from tools.gpu.parts import PARTS

    parser = figures_parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"only these: {', '.join(PARTS)}")
    parser.add_argument("--apart", action="store_true", help="a process for each part, also in tiny shapes")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    unknown = [name for name in args.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    args.parts = [name for name in PARTS if name in (args.parts or PARTS)]
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 0 when every part has run and met its aims."""
    args = parse_args(arguments)
    if args.answer is not None:
        return answer(args)
    return guarded("bench_gpu", lambda: run(args))


def answer(args: argparse.Namespace) -> int:
    """One part for the process that has started this one."""
    from tools.gpu.bench import Bench
    from tools.gpu.parts import device, run_here

    here = device()
    bench = Bench(here, here.type == "cuda" and not args.quick, args.seconds, args.answer.parent)
    args.answer.write_text(json.dumps(run_here(args.parts[0], bench)))
    return 0


def run(args: argparse.Namespace) -> int:
    """All chosen parts, one after the other."""
    from tools.gpu.bench import Bench, device_name
    from tools.gpu.parts import PARTS, START_SECONDS, device, run_apart, run_here

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    here, began = device(), time.monotonic()
    full = here.type == "cuda" and not args.quick
    if not full:
        _announce(here.type == "cuda", args.parts)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        for name in args.parts:
            part = PARTS[name]
            left = LIMIT_SECONDS - (time.monotonic() - began)
            if full and left < START_SECONDS + part.seconds / 2:
                found[name] = {"status": "left out", "seconds": 0.0, "error": f"{left:.0f} s were left"}
            else:
                seconds = min(part.seconds, left - START_SECONDS) if full else QUICK_SECONDS
                bench = Bench(here, full, seconds, Path(folder))
                # Half as long again: a part looks at its budget between its measurements, not within one.
                limit = min(left, START_SECONDS + 1.5 * seconds)
                found[name] = run_apart(name, bench, limit) if full or args.apart else run_here(name, bench)
            found[name]["what"] = part.what
            _show(name, found[name])
    record = {
        "name": "bench_gpu",
        "gpu": here.type == "cuda",
        "full": full,
        "device": device_name(here),
        "versions": {name: version(name) for name in ("torch", "transformers", "deepspeed")},
        "seconds": time.monotonic() - began,
        "missed": _missed(found),
        "parts": found,
    }
    return _finish(record, args.json or (DEFAULT if full and len(args.parts) == len(PARTS) else None))


def _announce(on_gpu: bool, names: Sequence[str]) -> None:
    from tools.gpu.parts import PARTS

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


def _missed(found: dict[str, dict[str, Any]]) -> list[str]:
    broken = [f"part {name}: {part['status']}" for name, part in found.items() if part["status"] != "measured"]
    return [aim for part in found.values() for aim in part.get("missed", ())] + broken


def _finish(record: dict[str, Any], json_file: Path | None) -> int:
    """Print the missed aims and the summary, write record and page; the exit code."""
    from tools.gpu.bench import page

    missed = record["missed"]
    for aim in missed:
        print(f"missed: {aim}")
    where = record["device"] if record["full"] else f"{record['device']}, tiny shapes, nothing measured"
    ended = f"{len(missed)} aims missed" if missed else "all aims met" if record["full"] else "all parts ran"
    print(f"bench_gpu: {len(record['parts'])} parts in {record['seconds']:.0f} s on {where}; {ended}")
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1) + "\n")
        json_file.with_suffix(".md").write_text(page(record))
        print(f"written: {json_file} and {json_file.with_suffix('.md').name}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
