"""Faults drawn at random, in jobs of every kind: each ends in time, with the promised codes and one cause."""

from __future__ import annotations

from collections import Counter

from ds_hydra.commands.figures import print_table
from tools.faults.tally import Tally

CASES, QUICK = 200, 6


def check_drawn(quick: bool, cases: int | None = None) -> Tally:
    """So many faults; figures are the counts by what went wrong, and the latest end of dead and of frozen ranks."""
    import ds_hydra.engine.engine  # noqa: F401  so that forked ranks need not import it
    from tests.support.drawn_faults import KINDS, drawn, wrong

    tally, latest = Tally("drawn faults"), dict.fromkeys(KINDS, 0.0)
    held: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    for case in drawn(cases or (QUICK if quick else CASES)):
        objections, seconds = wrong(case)
        tally.count(not objections, f"{case}: {'; '.join(objections)}")
        tried[case.kind] += 1
        held[case.kind] += not objections
        latest[case.kind] = max(latest[case.kind], seconds)
        if tally.tried % 20 == 0:
            print(f"  {tally.passed} of {tally.tried} drawn faults held", flush=True)
    print_table(("fault", "held", "of", "latest end, s"), [(k, held[k], tried[k], latest[k]) for k in KINDS])
    tally.figures = {kind: {"held": held[kind], "of": tried[kind], "latest_s": latest[kind]} for kind in KINDS}
    return tally
