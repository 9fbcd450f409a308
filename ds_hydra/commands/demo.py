"""What ds-hydra is for, in two minutes on two CPU cores: a preview, an emulated cluster, and equal losses.

  ds-hydra demo [--quick] [--recompute] [--picture FILE.png] [--json FILE]      (in a checkout: make demo)

1. Steps of a 32B model on 64 GPUs by published costs: the best fixed layouts, other systems, ds-hydra. These figures
   come with the package, at once; `--recompute` computes them here, in minutes.
2. The engine on 16 emulated GPUs: a balanced fixed layout and ds-hydra on the same sequences, and a picture of both.
3. Real training on one rank and on eight ranks in four layouts: equal losses.

Exits non-zero if ds-hydra is not faster, or a loss differs in the digits that are printed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_hydra.commands.demo_preview import computed, print_gain, shipped_gains
from ds_hydra.commands.figures import figures_parser, finish, guarded
from ds_hydra.commands.moving import moving
from ds_hydra.commands.on_cpus import on_cpus


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra demo") -> int:
    """Show the three parts; 1 when something does not hold."""
    parser = figures_parser(__doc__, name)
    parser.add_argument("--picture", type=Path, default=Path("runs/demo.png"), help="of one step")
    parser.add_argument("--recompute", action="store_true", help="compute the figures of part 1 too, in minutes")
    args = parser.parse_args(arguments)

    def run() -> int:
        on_cpus()
        began = time.perf_counter()
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        times = _first_part(args.recompute)
        with moving("loading torch and DeepSpeed"):  # which have to know the device first
            from ds_hydra.commands.demo_cluster import STEPS, cluster
            from ds_hydra.commands.tiny import equal
        rates = cluster(args.picture, 4 if args.quick else STEPS)
        losses = equal()
        fixed, ours = rates.values()
        missed = []
        if times["gain"] <= 1 or fixed >= ours:
            missed.append("another system is as fast as ds-hydra")
        one, other = ([f"{loss:.4f}" for loss in run] for run in (losses["one_rank"], losses["eight_ranks"]))
        if one != other:
            missed.append(f"losses on one rank {one} and on eight ranks {other} differ")
        summary = (
            f"{times['gain']:.2f} times as fast as the best of the others in the preview, {ours / fixed:.2f} as the "
            f"balanced fixed layout of TP on the emulated cluster; equal losses: {'yes' if one == other else 'no'}; "
            f"{time.perf_counter() - began:.0f} s"
        )
        print()
        return finish(name, summary, {"preview_ms": times, "tokens_per_second": rates, **losses}, missed, args.json)

    return guarded(name, run)


def _first_part(recompute: bool) -> dict[str, Any]:
    """Print the preview as shipped, or computed anew."""
    gain = shipped_gains()[0]
    if not recompute:
        return print_gain(gain, "shipped figures (--recompute computes them)")
    with moving("planning 60 steps, ours and those of others; the first time also compiling the planner", 300.0):
        gain = computed(gain.model, gain.lengths)
    return print_gain(gain, "computed now")


if __name__ == "__main__":
    sys.exit(main())
