"""The block "hydra.planner" of a job's config: how steps are planned. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ds_hydra.config.checks import choice, flag, integer, setting

_RENAMED = {
    "fast": 'is called "search" now, the default',
    "exact": 'is called "highs" now',
    "paper": 'is a rival to compare with, which no job trains by any more: use "search", the default',
}
_SEARCHED = "is no setting any more: remove it. A search is limited by counts, so that equal inputs give equal plans"
PLANNER_GONE = {
    "seconds": _SEARCHED,
    "node_limit": _SEARCHED,
    "tolerance": _SEARCHED,
    "seed": "is hydra.seed now, which the order of sequences and dropout follow too",
    "replay_file": "is called hydra.replay now, and hydra.choose is left out",
}


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """The block "hydra.planner": how, how far ahead and for how long steps are planned."""

    method: str = setting(choice("search", "highs", renamed=_RENAMED), "search")
    """"search": bounds, priced placement, local search; "highs": HiGHS then assigns sequences too, by Eq. 3."""
    highs: bool = setting(flag, True)
    """In each step HiGHS composes strategies of the candidates' pipelines that suit its lengths. One that is clearly
    faster than all candidates is run where `strategies` is "auto", and else told in the step's record; false: none."""
    ahead: int = setting(integer(0, 1024), 2)
    """Steps planned ahead in a process of its own, the next one read and packed in a thread; 0 does all in the step."""
    effort: int = setting(integer(0, 1000), 2)
    """Restarts of the search for each strategy that is tried."""
