"""What the self-check found: a verdict for each scheme, and what it means for strategies. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.self_check.schemes import stand_in
from ds_hydra.zero_hetero.errors import ConfigError

State = Literal["equal", "refused", "unchecked"]


@dataclass(frozen=True)
class Verdict:
    """What came of running one scheme on a small copy of the model."""

    state: State
    reason: str = ""  # of a refusal, or why it was not checked: a clause, and what to do
    difference: float = 0.0  # largest of a loss or gradient, relative to its largest entry
    no_slices: str = ""  # of one rank alone, if equal: why no sequence may be cut into slices; empty: it may
    seconds: float = 0.0  # of CPU time of the run; 0 where the verdict was known
    boxed: str = ""  # of one rank alone, if equal: what ran once for each sequence

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Verdict:
        """Raises ValueError for anything that `to_json` did not write."""
        state, reason, difference = raw.get("state"), raw.get("reason"), raw.get("difference")
        if state not in ("equal", "refused", "unchecked") or not isinstance(reason, str):
            raise ValueError(f"not a verdict: {raw}")
        no_slices, boxed = raw.get("no_slices"), raw.get("boxed")
        if not isinstance(difference, int | float) or not isinstance(no_slices, str) or not isinstance(boxed, str):
            raise ValueError(f"not a verdict: {raw}")
        return Verdict(state, reason, float(difference), no_slices, float(raw.get("seconds", 0.0)), boxed)


@dataclass(frozen=True)
class CheckResult:
    """Verdicts of all schemes of the candidate strategies; none where the check is off."""

    verdicts: Mapping[PipelineShape, Verdict]
    seconds: float = 0.0
    from_cache: int = 0  # schemes whose verdict was known
    no_slices: str = ""  # why no sequence of the model may be cut into slices; empty: it may
    boxed: str = ""  # what ran once for each sequence, by its paths in layers

    def __str__(self) -> str:
        equal = [str(shape) for shape, verdict in self.verdicts.items() if verdict.state == "equal"]
        told = f"{len(equal)} of {len(self.verdicts)} kinds of pipelines train as one process does"
        whole = f"; its sequences are not cut into slices: {self.no_slices}" if self.no_slices else ""
        return f"{told}; {self.seconds:.1f} s, {self.from_cache} runs known from earlier jobs{whole}"

    def allows(self, shape: ParallelScheme | PipelineShape) -> bool:
        """Whether a pipeline may be used, as far as those that were checked tell: equal kinds of stages fail alike."""
        refused = {stand_in(known) for known, verdict in self.verdicts.items() if verdict.state != "equal"}
        return stand_in(PipelineShape.of(shape) if isinstance(shape, ParallelScheme) else shape) not in refused

    def knows(self, strategies: Sequence[StrategyShape]) -> bool:
        """Whether there is a verdict on each of their pipelines."""
        return all(pipeline in self.verdicts for strategy in strategies for pipeline in strategy.pipelines)

    def objections(self) -> list[str]:
        """A line for each scheme that must not be used."""
        return [text for scheme in self.verdicts if (text := self.objection(StrategyShape((scheme,)))) is not None]

    def objection(self, strategy: StrategyShape) -> str | None:
        """Why a strategy must not be used; None if it may."""
        for scheme in dict.fromkeys(strategy.pipelines):
            verdict = self.verdicts.get(scheme)
            if verdict is not None and verdict.state != "equal":
                what = "trains otherwise than one process" if verdict.state == "refused" else "could not be checked"
                return f"{scheme} {what}: {verdict.reason}"
        return None

    def usable(self, strategies: Sequence[StrategyShape]) -> tuple[StrategyShape, ...]:
        """The strategies to which there is no objection."""
        return tuple(strategy for strategy in strategies if self.objection(strategy) is None)

    def require(self, strategies: Sequence[StrategyShape]) -> None:
        """Raise ConfigError that names each strategy that must not be used, with the reason and the remedy."""
        lines = [
            f"hydra.strategies[{index}] {str(strategy)!r}: {objection}"
            for index, strategy in enumerate(strategies)
            if (objection := self.objection(strategy)) is not None
        ]
        if lines:
            unchecked = any(verdict.state == "unchecked" for verdict in self.verdicts.values())
            raise ConfigError(
                "the self-check of a small copy of the model refuses these strategies:\n  "
                + "\n  ".join(lines)
                + "\nTake them out of hydra.strategies, or what differs out of the model"
                + '; hydra.self_check "off" trains what could not be checked' * unchecked
            )
