"""What ds-hydra is for, in two minutes on two CPU cores: a preview, an emulated cluster, and equal losses.

  ds-hydra demo [--quick] [--picture FILE.png] [--json FILE]      (in a checkout: make demo)

1. A step of a 32B model on 64 GPUs by measured costs: a fixed layout, the same layout with our assignment, ds-hydra.
2. The engine on 16 emulated GPUs: a fixed layout and ds-hydra on the same sequences, and a picture of both.
3. Real training on one rank and on eight ranks in four layouts: equal losses.

Exits non-zero if ds-hydra is not faster, or a loss differs in the digits that are printed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ds_hydra.commands.figures import figures_parser, finish, guarded
from ds_hydra.commands.on_cpus import on_cpus
from ds_hydra.commands.preview import OURS


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra demo") -> int:
    """Show the three parts; 1 when something does not hold."""
    parser = figures_parser(__doc__, name)
    parser.add_argument("--picture", type=Path, default=Path("runs/demo.png"), help="of one step")
    args = parser.parse_args(arguments)

    def run() -> int:
        on_cpus()
        from ds_hydra.commands.demo_cluster import STEPS, cluster  # imports torch, which has to know the device first
        from ds_hydra.commands.demo_preview import preview
        from ds_hydra.commands.tiny import equal

        began = time.perf_counter()
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        times = preview()
        rates = cluster(args.picture, 4 if args.quick else STEPS)
        losses = equal()
        fixed, *_ = times.values()
        slow, fast = rates.values()
        missed = []
        if fixed <= times[OURS] or slow >= fast:
            missed.append("the fixed layout is as fast as ds-hydra")
        one, other = ([f"{loss:.4f}" for loss in run] for run in (losses["one_rank"], losses["eight_ranks"]))
        if one != other:
            missed.append(f"losses on one rank {one} and on eight ranks {other} differ")
        summary = (
            f"{fixed / times[OURS]:.2f} times as fast in the preview, {fast / slow:.2f} times on the emulated cluster, "
            f"equal losses: {'yes' if one == other else 'no'}; {time.perf_counter() - began:.0f} s"
        )
        print()
        return finish(name, summary, {"preview_ms": times, "tokens_per_second": rates, **losses}, missed, args.json)

    return guarded(name, run)


if __name__ == "__main__":
    sys.exit(main())
