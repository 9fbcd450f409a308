"""The steps of an order two by two, each pair sorted by length and cut again in the middle. Pure: no torch.

[Note: two steps sorted]
A step is over when its longest sequence is. Where steps are small, that sequence leaves most ranks idle; long ones in
one step share their wait. Steps of (6 1 2 3) and (1 5 2 4) tokens are sorted 6 5 4 3 2 2 1 1, 24 tokens, and cut where
it is nearest to 12 of them, after 11: the steps are (6 5) and (4 3 2 2 1 1).

Steps 0 and 1 make a pair, 2 and 3 the next, whatever step a run begins with: so a sequence moves by one step at most,
and a run that goes on within a pair draws the pair again from its beginning and runs its second half. Pairs that hold a
sequence twice, since an epoch ends within them, stay as they are: no sequence may be in a step twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_hydra.data.order import RESUME_WEIGHTS
from ds_hydra.data.sampler import TokenBudgetSampler
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError

_PAIR = 2
_KEPT = 8  # pairs


class SortedPairs:
    """An order of steps with those of each pair dealt out anew [Note: two steps sorted]."""

    known_to_all = True

    def __init__(self, sampler: TokenBudgetSampler) -> None:
        self._sampler = sampler
        self._pairs: dict[int, tuple[dict[int, int], dict[int, int]]] = {}  # by first step: tokens by id, of each step

    @property
    def steps_per_epoch(self) -> int:
        """As of the order itself."""
        return self._sampler.steps_per_epoch

    def batch(self, step: int) -> tuple[int, ...]:
        """Ids of the sequences of `step`, the longest first; in the order drawn where the pair is left as it is."""
        return tuple(self._of(step))

    def batch_lengths(self, step: int) -> tuple[int, ...]:
        """Tokens of each sequence of `batch(step)`."""
        return tuple(self._of(step).values())

    def ready(self, step: int) -> bool:
        """Whether `batch(step)` takes no time: any step can be drawn at any time."""
        return self._sampler.ready(_first(step))

    def saved(self, step: int) -> dict[str, Any]:
        """Where the pair of `step` begins, as JSON."""
        return {**self._sampler.saved(_first(step)), "step": step, "reorder_steps": _PAIR}

    def check_saved(self, record: Mapping[str, Any]) -> None:
        """ConfigError unless this is a place in these data that was saved with pairs, CheckpointError for damage."""
        if "data_digest" in record and "reorder_steps" not in record:
            raise ConfigError(
                "the checkpoint was saved without hydra.reorder_steps, with which sequences would repeat or be left "
                f"out: remove the setting, or {RESUME_WEIGHTS}"
            )
        if record.get("reorder_steps", _PAIR) != _PAIR or type(record.get("step")) is not int:
            raise CheckpointError(f"the saved place in the data is damaged: {str(record)[:300]}; use another tag")
        self._sampler.check_saved(_of_pair(record))

    def restore(self, record: Mapping[str, Any]) -> None:
        """Go on from a saved place."""
        self._pairs.clear()
        self._sampler.restore(_of_pair(record))

    def begin_at(self, step: int) -> None:
        """Go on with `step` from no saved place: with its pair where as many tokens were drawn as the steps before ask
        for."""
        self._pairs.clear()
        self._sampler.begin_at(_first(step))

    def close(self) -> None:
        """Nothing is open."""

    def _of(self, step: int) -> dict[int, int]:
        first = _first(step)
        if first not in self._pairs:
            for old in sorted(self._pairs)[:-_KEPT]:
                del self._pairs[old]
            one, other = (
                dict(zip(self._sampler.batch(at), self._sampler.batch_lengths(at), strict=True))
                for at in (first, first + 1)
            )
            self._pairs[first] = (one, other) if one.keys() & other.keys() else cut_in_two({**one, **other})
        return self._pairs[first][step - first]


def cut_in_two(tokens: Mapping[int, int]) -> tuple[dict[int, int], dict[int, int]]:
    """At least two sequences, tokens by id, the longest first and cut nearest to the middle of all tokens. Equal ones
    stay in the order given."""
    ranked = sorted(tokens.items(), key=lambda one: -one[1])
    total, before, first = sum(tokens.values()), 0, 0
    while 2 * before + ranked[first][1] <= total:
        before += ranked[first][1]
        first += 1
    return dict(ranked[:first]), dict(ranked[first:])


def _first(step: int) -> int:
    return step - step % _PAIR


def _of_pair(record: Mapping[str, Any]) -> dict[str, Any]:
    """The place where the pair of a saved step begins, as the order itself saves it."""
    return {**{key: value for key, value in record.items() if key != "reorder_steps"}, "step": _first(record["step"])}
