"""Whether a script has changed its data since sequences of the coming step were read, one step ahead.

A curriculum sets `dataset.stage = n` before step n, whose sequences were read while the step before it ran: they would
be those of the stage before. So one of them, the shortest, is read again when the step begins, and all of this rank's
where the dataset has another plain attribute by then; what reads otherwise is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ds_hydra.data.tokens import TokenSequence
from ds_hydra.zero_hetero.errors import ConfigError

_PLAIN = (bool, int, float, str, type(None))


class Unchanged:
    """What was read of a dataset, and how the dataset stood then."""

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self._read: dict[int, TokenSequence] = {}
        self._settings: dict[str, Any] | None = None

    def begin(self) -> None:
        """A step begins to be read."""
        self._read, self._settings = {}, None

    def saw(self, sequence_id: int, sequence: TokenSequence) -> None:
        """This one was read."""
        self._read[sequence_id] = sequence

    def keep(self) -> None:
        """All is read, and the script runs from here on."""
        self._settings = self._plain()

    def check(self, step: int, read: Callable[[int], TokenSequence]) -> None:
        """ConfigError if `read` gives another sequence than was seen; `step`, counted from 0, is about to begin."""
        seen, before, now = self._read, self._settings, self._plain()
        self.begin()
        if before is None or not seen:
            return
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        shortest = min(seen, key=lambda one: len(seen[one].input_ids))
        for sequence_id in seen if changed else (shortest,):
            if not _same(seen[sequence_id], read(sequence_id)):
                how = f"its attribute {changed[0]} is {now.get(changed[0])!r} now, and " if changed else ""
                raise ConfigError(
                    f"the training data were changed before step {step + 1}, whose sequences are read while the step "
                    f"before it runs: {how}sequence {sequence_id} reads otherwise than then. Set "
                    '"planner": {"ahead": 0} in the block "hydra", with which each step reads its sequences when it '
                    "begins; or hand them in, by train_batch(sequences)"
                )
        self.begin()

    def _plain(self) -> dict[str, Any]:
        return {key: value for key, value in getattr(self._dataset, "__dict__", {}).items() if type(value) in _PLAIN}


def _same(one: TokenSequence, other: TokenSequence) -> bool:
    return (
        np.array_equal(one.input_ids, other.input_ids)
        and np.array_equal(one.labels, other.labels)
        and one.weight == other.weight
        and (one.fields is None or other.fields is None or np.array_equal(one.fields, other.fields))
    )
