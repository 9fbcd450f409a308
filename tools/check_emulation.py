"""Is the emulated cluster right, and does it last? Against the simulator, for many steps, and against real steps.

  python -m tools.check_emulation [--only simulator soak chunked real] [--table cost_table.json] [--quick] [--json FILE]

simulator   random plans on 8 to 32 emulated ranks, links from fast to slow, a third of the plans of two phases, beside
            the simulator's times: within 1 % in the median and 3 % at p90
soak        300 steps on 16 emulated ranks, another strategy in each: no deadlock; memory, files and threads stay
            (--quick: 20 on 8)
chunked     300 plans with slices and split backwards on 16 emulated ranks, lists and V's in turn: what was predicted is
            within 3 % of what they take, in the median
real        60 real steps on 2 ranks of this machine, and the same steps emulated by a table that was measured here (or
            --table): within 6 % in the median. Nothing else may run meanwhile, so it is left out unless it is named

Exits non-zero when an aim is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ds_hydra.commands.figures import figures_parser, finish, guarded, print_table
from tools.simulated.against_real import against_real
from tools.simulated.against_simulator import against_simulator
from tools.simulated.chunked import chunked
from tools.simulated.part import Part
from tools.simulated.soak import soak

PARTS = ("simulator", "soak", "chunked")  # all that may run beside other work


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print their tables."""
    parser = figures_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=(*PARTS, "real"), default=PARTS)
    parser.add_argument("--plans", type=int, help="random plans (default 100, with --quick 6)")
    parser.add_argument("--steps", type=int, help="of the soak and of chunked plans (default 300)")
    parser.add_argument("--table", type=Path, help="for the real steps, instead of measuring one now")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="real seconds for one cluster")
    args = parser.parse_args(arguments)
    quick = args.quick
    parts: dict[str, Callable[[], Part]] = {
        "simulator": lambda: against_simulator(args.plans or (6 if quick else 100), timeout_s=args.timeout),
        "soak": lambda: soak(args.steps or (20 if quick else 300), quick=quick, timeout_s=args.timeout),
        "chunked": lambda: chunked(args.steps or (6 if quick else 300), timeout_s=args.timeout),
        "real": lambda: against_real(12 if quick else 60, args.table, quick=quick),
    }

    def run() -> int:
        missed: list[str] = []
        figures: dict[str, Any] = {}
        summaries: list[str] = []
        for name in args.only:
            part = parts[name]()
            print(f"\n{part.title}")
            print_table(part.headers, part.rows)
            missed += part.missed
            figures |= part.figures
            summaries.append(part.summary)
        return finish("check_emulation", "; ".join(summaries), figures, missed, args.json)

    return guarded("check_emulation", run)


if __name__ == "__main__":
    sys.exit(main())
