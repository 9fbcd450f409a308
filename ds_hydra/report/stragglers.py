"""What ranks computed and were expected to, step by step, in; those that are slow, and by how much, out. Pure.

[Note: slow ranks]
A cost table may be wrong for a shape, and its error is that of every stage of this kind. So a stage is compared with
the others of its kind in the same step, each by its measured over its predicted time: of 4*tp1 with the ratios 1.1,
1.1, 1.3 and 1.0 the third takes 1.18 times as long as the usual one, the lower median, 1.1. A stage that is alone of
its kind tells nothing. A rank is slow that has been so in three quarters of its last steps: one long step, such as a
save in the background, makes nobody slow. Ranks of one stage wait for each other in it, so all of them are named.

By default nothing follows from it but a line. With `cost_correction: "apply"` later plans count with the pace of each
rank that was told, the median over its last steps, and with a new one when that has changed by 5 %: a rank that has
recovered is planned for as any other about as soon as it is told. Predicted times are those of the table as it was
measured, so that a pace that plans count with already changes no ratio. Costs that nobody measured tell nobody slow:
they may be wrong by more for short sequences than for long ones, and one pipeline may always have the long ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ds_hydra.costs.slow_ranks import MOST, pace_of

WINDOW, LEAST = 12, 8  # steps that are looked at, and the fewest that tell
SLOW = 1.1  # times as long as others
PACE_CHANGE = 0.05  # of a pace, which plans follow; measured times scatter by less
_RECOVERED = 0.5  # of what is told as slow: a rank that is told at 1.1 has recovered below 1.05


class StageTime(NamedTuple):
    """A stage in a step."""

    kind: Hashable  # equal for stages that cost the same
    ranks: tuple[int, ...]
    predicted_ms: float
    computed_ms: float  # by its slowest rank


class Stragglers:
    """Watches the ranks of a job; `slow` is how many times as long as others a rank computes that is to be told, and
    `remedy` what its line ends with. With a `state` it goes on where another one was: ValueError, TypeError or KeyError
    for what is none. The same calls give the same on every rank."""

    def __init__(self, slow: float = SLOW, state: Mapping[str, Any] | None = None, remedy: str = "") -> None:
        self._slow, self._recovered, self._remedy = slow, 1.0 + _RECOVERED * (slow - 1.0), remedy
        self._ratios: dict[int, deque[float]] = {}  # of each rank, those of its last steps
        self._paces: dict[int, float] = {}  # of those that were told
        if state is not None:
            self._ratios = {int(rank): deque(map(float, seen), maxlen=WINDOW) for rank, seen in state["ratios"]}
            self._paces = {int(rank): pace_of(pace) for rank, pace in state["paces"]}

    def state(self) -> dict[str, Any]:
        """All that it has seen, as JSON holds it."""
        return {
            "ratios": [[rank, list(seen)] for rank, seen in sorted(self._ratios.items())],
            "paces": [[rank, pace] for rank, pace in sorted(self._paces.items())],
        }

    @property
    def paces(self) -> tuple[tuple[int, float], ...]:
        """The ranks that are slow, each with how many times as long as others it takes, in rank order."""
        return tuple((rank, pace) for rank, pace in sorted(self._paces.items()) if pace > 1.0)

    def observe(self, stages: Iterable[StageTime]) -> list[str]:
        """A step's stages in; what is to be said now out: of ranks that have become slow, or have recovered."""
        kinds: dict[Hashable, list[StageTime]] = {}
        for stage in stages:
            if stage.predicted_ms > 0 and stage.computed_ms > 0:
                kinds.setdefault(stage.kind, []).append(stage)
        lines: list[str] = []
        for alike in (found for found in kinds.values() if len(found) > 1):
            ratios = [stage.computed_ms / stage.predicted_ms for stage in alike]
            usual = sorted(ratios)[(len(ratios) - 1) // 2]
            for stage, ratio in zip(alike, ratios, strict=True):
                lines += self._note(stage.ranks, ratio / usual)
        return lines

    def _note(self, ranks: Sequence[int], ratio: float) -> list[str]:
        slow, recovered = list[int](), list[int]()
        for rank in ranks:
            last = self._ratios.setdefault(rank, deque(maxlen=WINDOW))
            last.append(ratio)
            if len(last) < LEAST:
                continue
            low, high = sorted(last)[len(last) // 4], sorted(last)[3 * len(last) // 4]
            # The upper median: with as many old times as new ones a mean of both would be neither.
            pace = round(min(MOST, max(1.0, sorted(last)[len(last) // 2])), 3)
            if rank not in self._paces and low >= self._slow:
                slow.append(rank)
                self._paces[rank] = pace
            elif rank in self._paces and high < self._recovered:
                recovered.append(rank)
                del self._paces[rank]
            elif rank in self._paces and abs(pace / self._paces[rank] - 1.0) > PACE_CHANGE:
                self._paces[rank] = pace
        lines = []
        if slow:
            last = self._ratios[slow[0]]
            lines.append(
                f"{_named(slow)} {sorted(last)[len(last) // 2]:.2f} times as long as others for the same work, in the "
                f"median of {len(last)} steps, and every step waits: look at the clocks and the heat of "
                f"{'its device' if len(slow) == 1 else 'their devices, of which one may hold up the others,'} and at "
                f"what else runs there{self._remedy}"
            )
        if recovered:
            lines.append(f"{_named(recovered)} as fast as others again")
        return lines


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} computes" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} compute"
