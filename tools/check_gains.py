"""Whether README's gains, which `ds-hydra demo` shows, are what is computed.

  python -m tools.check_gains [--quick] [--write] [--json FILE]

The whole form proposes strategies and plans 60 steps for each row, in minutes, as `ds-hydra preview` does it; `--write`
keeps them. The quick form plans the first two steps of each row by the strategies that are shipped with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from ds_hydra.commands.demo_preview import FIGURES, Gain, computed, shipped_gains
from ds_hydra.commands.figures import figures_parser, finish, print_table
from tools import aims


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 where a figure is another."""
    parser = figures_parser(__doc__, "python -m tools.check_gains")
    parser.add_argument("--write", action="store_true", help="ship what is computed")
    args = parser.parse_args(arguments)
    rows, missed, found = [], [], list[Gain]()
    for gain in shipped_gains():
        found.append(new := _computed(gain, args.quick))
        off = _off(gain, new, args.quick)
        rows.append((gain.lengths, f"{gain.ours_ms:.0f}", f"{gain.gain:.2f}", f"{off:.1e}"))
        if off > aims.SHIPPED_OFF:
            missed.append(f"{gain.lengths}: shipped figures are {off:.1%} off, not <= {aims.SHIPPED_OFF:.1%}")
    print_table(("lengths", "shipped ms", "gain", "off what is computed"), rows)
    if args.write and not args.quick:
        FIGURES.write_text(json.dumps([one._asdict() for one in found], indent=1) + "\n")
    return finish("check_gains", f"{len(rows)} rows", {"rows": rows}, missed, args.json)


def _computed(gain: Gain, quick: bool) -> Gain:
    if quick:
        return computed(gain.lengths, gain.source, gain.strategies, steps=len(gain.first_ms))
    return computed(gain.lengths, gain.source)


def _off(shipped: Gain, new: Gain, quick: bool) -> float:
    """The largest relative difference of their times."""
    pairs = list(zip(shipped.first_ms, new.first_ms, strict=True))
    if not quick:
        pairs += [(getattr(shipped, name), getattr(new, name)) for name in ("full_ms", "balanced_ms", "ours_ms")]
    return max(abs(a / b - 1.0) for a, b in pairs)


if __name__ == "__main__":
    sys.exit(main())
