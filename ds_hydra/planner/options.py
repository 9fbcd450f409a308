"""Settings of the planner, validated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_hydra.zero_hetero.errors import ConfigError

_CHOICES = {
    "method": ("search", "highs"),
    "choose": ("best", "cycle", "replay"),
    "highs": ("off", "advises", "composes"),
    "kernels": ("auto", "compiled", "pure"),
}


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """Settings of the planner; every limit counts work, never time, unless `seconds` is given."""

    method: str = "search"
    """"search": bounds, priced placement, local search; "highs": Eq. 3 by HiGHS besides."""
    highs: str = "off"
    """"composes": strategies that suit a batch better than all candidates do [Note: composed strategies]; "advises":
    the same, but only candidates are run; "off": it does not."""
    choose: str = "best"
    """"best": least predicted time; "cycle": strategy step % n; "replay": the plans of `replay_file`."""
    replay_file: str | None = None
    """A file of plans, one JSON object a line, as `save_plans` writes it."""
    seed: int = 0
    """Seed of the random restarts."""
    seconds: float | None = None
    """Time for HiGHS in a step; None: a fixed number of branch-and-bound nodes, the same on every machine."""
    tolerance: float = 0.001
    """A strategy is not tried when its bound is within this share of the best plan found."""
    simplest: float = 0.0
    """A plan of fewer different shapes wins that takes no more than this share longer than the best one."""
    effort: int = 2
    """Restarts of the dispatch search for each strategy that is tried."""
    node_limit: int = 2000
    """Branch-and-bound nodes of each HiGHS solution when `seconds` is None."""
    kernels: str = "auto"
    """"compiled": numba; "pure": plain Python with less search; "auto": compiled wherever numba is."""
    no_slices: str = ""
    """Why no sequence may be cut into slices; empty if they may, in plans that are replayed too."""

    layers: int = 32
    """Layers of the model: chunked pipelines may compute some of them again, where a run needs the room; 0: none."""

    def __post_init__(self) -> None:
        for key, known in _CHOICES.items():
            value = getattr(self, key)
            if value not in known:
                raise ConfigError(f"planner: {key} must be one of {', '.join(known)} but is {value!r}")
        for key in ("seed", "effort", "node_limit", "layers"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"planner: {key} must be a whole number of at least 0 but is {value!r}")
        for key, value in (("tolerance", self.tolerance), ("simplest", self.simplest), ("seconds", self.seconds)):
            if value is None and key == "seconds":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"planner: {key} must be a finite number of at least 0 but is {value!r}")
        if (self.choose == "replay") != (self.replay_file is not None):
            raise ConfigError(
                f"planner: choose={self.choose!r} with replay_file={self.replay_file!r}: 'replay' needs a file, "
                "and a file is only read with choose='replay'"
            )
