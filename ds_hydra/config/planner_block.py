"""The block "hydra.planner" of a job's config: how steps are planned. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ds_hydra.config.checks import choice, flag, integer, number, setting, text

_RENAMED = {
    "fast": 'is called "search" now, the default',
    "exact": 'is called "highs" now',
    "paper": 'is a rival to compare with, which no job trains by any more: use "search", the default',
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
    seconds: float | None = setting(number(exclusive=True, maximum=86400.0, optional=True), None)
    """Wall-clock limit of a solution, which then depends on the machine's load; None limits by `node_limit`."""
    node_limit: int = setting(integer(1), 2000)
    """Branch-and-bound nodes of one solution; equal inputs then give equal plans."""
    tolerance: float = setting(number(0.0, 1.0), 0.001)
    """A strategy is not tried when its bound is within this share of the best plan found."""
    effort: int = setting(integer(0, 1000), 2)
    """Restarts of the search for each strategy that is tried."""
    seed: int | None = setting(integer(optional=True), None)
    """Seed of the search; None takes the seed of the block "hydra"."""
    replay_file: str | None = setting(text(optional=True), None)
    """Plans to run again with choose: "replay", as a run with `plans_file` wrote them."""
