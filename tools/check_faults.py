"""Set off faults and count what survived: every figure that "nothing lost" promises, n of N.

python -m tools.check_faults            # all of it: about 50 minutes on two cores
python -m tools.check_faults --quick    # a sample, within a minute
python -m tools.check_faults --only faults,kills
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from ds_hydra.commands.figures import figures_parser, finish, print_table
from tools.faults.drawn import check_drawn
from tools.faults.running import check_false_alarms, check_faults, check_resharding, check_resume, check_soak
from tools.faults.saved import check_damage, check_drawn_damages, check_folders, check_forgeries, check_kills
from tools.faults.security import check_security
from tools.faults.tally import Tally

CHECKS: dict[str, Callable[..., Tally]] = {
    "security": check_security,
    "damage": check_damage,
    "damages": check_drawn_damages,
    "forgeries": check_forgeries,
    "kills": check_kills,
    "folders": check_folders,
    "resume": check_resume,
    "resharding": check_resharding,
    "faults": check_faults,
    "drawn": check_drawn,
    "alarms": check_false_alarms,
    "soak": check_soak,
}
_QUICK = ("security", "damage", "damages", "forgeries", "kills", "folders", "drawn")
_SAMPLED = (check_faults, check_drawn)


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 when everything held."""
    parser = figures_parser(__doc__)
    parser.add_argument("--cases", type=int, metavar="N", help="try a sample of N of the faults, not all")
    parser.add_argument("--only", help=f"some of: {', '.join(CHECKS)}")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = options.only.split(",") if options.only else list(_QUICK if options.quick else CHECKS)
    tallies, times = [], []
    for name in names:
        began = time.perf_counter()
        try:
            check = CHECKS[name]
            tally = check(options.quick, options.cases) if check in _SAMPLED else check(options.quick)
        except Exception as error:
            tally = Tally(name)
            tally.count(False, f"{type(error).__name__}: {error}")
        times.append(time.perf_counter() - began)
        tallies.append(tally)
        print(f"{tally.name}: {tally.passed} of {tally.tried} in {times[-1]:.0f} s {tally.figures or ''}", flush=True)
    print_table(
        ("check", "held", "of", "seconds"),
        [(t.name, t.passed, t.tried, float(s)) for t, s in zip(tallies, times, strict=True)],
    )
    missed = [f"{tally.name}: {failure}" for tally in tallies for failure in tally.failures]
    passed, tried = sum(t.passed for t in tallies), sum(t.tried for t in tallies)
    figures = {t.name: {"held": t.passed, "of": t.tried, **t.figures} for t in tallies}
    return finish("check_faults", f"{passed} of {tried}", figures, missed, options.json)


if __name__ == "__main__":
    sys.exit(main())
