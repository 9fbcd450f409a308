"""Lengths in, the sequences of each step out: one global order, cut by a token budget. Pure: no torch."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ds_hydra.data.sequences import Int64Array
from ds_hydra.zero_hetero.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DataCursor:
    """A place in the global order of sequences: a run goes on from it, on any number of ranks."""

    step: int  # the step that draws its first sequence here
    epoch: int
    position: int  # sequences of this epoch that were drawn before
    seed: int
    tokens_per_step: int
    data_digest: str  # of the lengths, so that other data are noticed

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class TokenBudgetSampler:
    """Draws a step's sequences from one global, seeded order, until they hold `tokens_per_step` tokens.

    The order is a shuffle of all sequences of non-zero length per epoch; it does not depend on the number
    of ranks. The sequence that reaches the budget is in the step, so a step may exceed it by one sequence,
    and one longer than the whole budget ends the step it is in. A step may run into the next epoch. Any
    step can be asked for at any time: the planner looks ahead.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Int64Array,
        tokens_per_step: int,
        seed: int = 0,
        cursor: DataCursor | None = None,
    ) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._ids = np.flatnonzero(self._lengths)
        if not len(self._ids):
            raise ConfigError(f"none of {len(self._lengths)} sequences has a token: nothing to sample from")
        if tokens_per_step < 1:
            raise ConfigError(f"tokens_per_step must be at least 1, but is {tokens_per_step}")
        self._budget = tokens_per_step
        self._seed = seed
        self._digest = hashlib.sha256(np.ascontiguousarray(self._lengths).tobytes()).hexdigest()[:16]
        self._orders: dict[int, tuple[Int64Array, Int64Array]] = {}
        self.restart(cursor or DataCursor(0, 0, 0, seed, tokens_per_step, self._digest))

    def restart(self, cursor: DataCursor) -> None:
        """Go on from a saved place; ConfigError if it is not one of these data."""
        self.check_cursor(cursor)
        self._first_step = cursor.step
        self._epochs = array("q", [cursor.epoch])  # where each step from first_step on begins
        self._positions = array("q", [cursor.position])

    def check_cursor(self, cursor: DataCursor) -> None:
        """ConfigError unless the place was saved with the same data, seed and budget."""
        for what, saved, now in (
            ("seed", cursor.seed, self._seed),
            ("tokens_per_step", cursor.tokens_per_step, self._budget),
            ("data (digest of the lengths)", cursor.data_digest, self._digest),
        ):
            if saved != now:
                raise ConfigError(
                    f"the saved place in the data belongs to {what} {saved}, but this job has {now}: "
                    "sequences would repeat or be left out. Restore the setting, or start the data anew"
                )
        if cursor.step < 0 or cursor.epoch < 0 or not 0 <= cursor.position < len(self._ids):
            raise ConfigError(f"the saved place in the data is damaged: {cursor}")

    @property
    def steps_per_epoch(self) -> int:
        """Steps that together draw about as many tokens as there are, at least one."""
        return max(1, round(int(self._lengths.sum()) / self._budget))

    def batch(self, step: int) -> tuple[int, ...]:
        """Ids of the sequences of `step`, in the order drawn."""
        epoch, position = self._begin(step)
        ids, _ = self._draw(epoch, position)
        return ids

    def batch_lengths(self, step: int) -> tuple[int, ...]:
        """Tokens of each sequence of `batch(step)`."""
        return tuple(self._lengths[list(self.batch(step))].tolist())

    def cursor(self, step: int) -> DataCursor:
        """Where `step` begins, for saving."""
        epoch, position = self._begin(step)
        return DataCursor(step, epoch, position, self._seed, self._budget, self._digest)

    def _begin(self, step: int) -> tuple[int, int]:
        """(epoch, position) of the first sequence of `step`."""
        if step < self._first_step:
            raise ConfigError(f"step {step} lies before the place this run's data began, step {self._first_step}")
        while len(self._epochs) <= step - self._first_step:
            _, (epoch, position) = self._draw(self._epochs[-1], self._positions[-1])
            self._epochs.append(epoch)
            self._positions.append(position)
        return self._epochs[step - self._first_step], self._positions[step - self._first_step]

    def _draw(self, epoch: int, position: int) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Ids from a place in the order until the budget is reached, and the place after them."""
        drawn: list[int] = []
        missing = self._budget
        while missing > 0:
            order, sums = self._order(epoch)
            before = int(sums[position - 1]) if position else 0
            stop = int(np.searchsorted(sums, before + missing)) + 1  # one past the sequence that reaches it
            stop = min(stop, len(order))
            drawn += order[position:stop].tolist()
            missing -= int(sums[stop - 1]) - before
            epoch, position = (epoch, stop) if stop < len(order) else (epoch + 1, 0)
        return tuple(drawn), (epoch, position)

    def _order(self, epoch: int) -> tuple[Int64Array, Int64Array]:
        """An epoch's order of ids and the running sum of their lengths."""
        if epoch not in self._orders:
            order = np.random.default_rng((self._seed, epoch)).permutation(self._ids)
            for old in sorted(self._orders)[:-1]:  # look-ahead needs the current epoch and the next
                del self._orders[old]
            self._orders[epoch] = (order, np.cumsum(self._lengths[order]))
        return self._orders[epoch]


class StepLoader:
    """The steps of an epoch, each as its sequence ids: `for _ in loader: engine.train_batch()` is one pass.

    The engine draws each step's sequences itself, so what is iterated here is for counting and looking.
    """

    def __init__(self, sampler: TokenBudgetSampler, next_step: Callable[[], int]) -> None:
        self._sampler = sampler
        self._next_step = next_step

    def __len__(self) -> int:
        """Steps that it takes to draw about as many tokens as the data hold."""
        return self._sampler.steps_per_epoch

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        first = self._next_step()
        for step in range(first, first + len(self)):
            yield self._sampler.batch(step)
