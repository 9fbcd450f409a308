"""The sequences of each step: one global order, cut by a token budget. Pure: no torch.

[Note: two steps sorted]
A step is over when its longest sequence is. Where steps are small, that sequence leaves most ranks idle; long ones in
one step share their wait. Steps of (6 1 2 3) and (1 5 2 4) tokens are sorted 6 5 4 3 2 2 1 1, 24 tokens, and cut where
it is nearest to 12 of them, after 11: the steps are (6 5) and (4 3 2 2 1 1).

Steps 0 and 1 make a pair, 2 and 3 the next, whatever step a run begins with: so a sequence moves by one step at most,
and a run that goes on within a pair draws the pair again from its beginning and runs its second half. Pairs that hold a
sequence twice, since an epoch ends within them, stay as they are: no sequence may be in a step twice.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, Protocol

import numpy as np

from ds_hydra.data.sequences import Int64Array
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError

RESUME_WEIGHTS = (
    'begin anew with its weights alone: "hydra": {"checkpoint": {"resume": "weights"}}, or '
    "load_checkpoint(load_module_only=True)"
)
"""What to do where a checkpoint's place, schedule or optimizer is of another job: the end of an error's sentence."""


class Order(Protocol):
    """The sequences of each step, counted from 0, and places to go on from."""

    @property
    def known_to_all(self) -> bool:
        """Whether every rank knows each step's sequences; else rank 0 alone does, and only it may ask for them."""
        ...

    def batch(self, step: int) -> tuple[int, ...]:
        """Ids of the sequences of `step`."""
        ...

    def batch_lengths(self, step: int) -> tuple[int, ...]:
        """Tokens of each of them."""
        ...

    def ready(self, step: int) -> bool:
        """Whether `batch(step)` returns at once."""
        ...

    def saved(self, step: int) -> dict[str, Any]:
        """Where `step` begins, as JSON."""
        ...

    def check_saved(self, record: Mapping[str, Any]) -> None:
        """Raise unless `restore` can go on from this: ConfigError for a place in other data,
        CheckpointError for damage."""
        ...

    def restore(self, record: Mapping[str, Any]) -> None:
        """Go on from a saved place."""
        ...

    def begin_at(self, step: int) -> None:
        """Go on with `step` from no saved place, about where as many steps would have come to."""
        ...

    def close(self) -> None:
        """Stop what reads ahead."""
        ...


_MOST = 2**48  # of steps, epochs and ids


@dataclass(frozen=True, slots=True)
class DataCursor:
    """A place in the global order of sequences, from which a run continues on any number of ranks."""

    step: int  # the step that draws its first sequence here
    epoch: int
    position: int  # sequences of this epoch that were drawn before
    seed: int
    tokens_per_step: int
    data_digest: str  # of the lengths of all sequences, by which other data are noticed
    deferred: tuple[int, ...] = ()  # ids of this epoch that were passed over before `position`; they are drawn first

    def __post_init__(self) -> None:
        object.__setattr__(self, "deferred", tuple(self.deferred))  # a list when it was read from JSON

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Place(NamedTuple):
    """A place in the global order."""

    epoch: int
    position: int
    deferred: tuple[int, ...] = ()


class TokenBudgetSampler:
    """Draws a step's sequences from one global, seeded order, until they hold `tokens_per_step` tokens.

    The order is a shuffle of all sequences of non-zero length per epoch; it does not depend on the number
    of ranks. The sequence that reaches the budget is in the step, so a step may exceed it by one sequence,
    and one longer than the whole budget ends the step it is in. Any step can be asked for at any time: the
    planner looks ahead.

    A step may run into the next epoch, but no sequence is in a step twice. With a budget of three sequences
    of equal length, the epochs (a b c d) and (b d a c) give the steps

        a b c | d b a | d c ...

    The second step has d already, so it passes over the d of the new epoch; the third step draws it first.
    Raises ConfigError for a budget that is more than all tokens, which could only be reached by repeating.
    """

    known_to_all = True

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
            raise ConfigError(
                f"none of the {len(self._lengths)} sequences of the training data has a token: there is nothing to "
                "sample from; look at how the data were made"
            )
        if tokens_per_step < 1:
            raise ConfigError(f"tokens_per_step must be at least 1, but is {tokens_per_step}: raise it")
        num_tokens = int(self._lengths.sum())
        if tokens_per_step > num_tokens:
            raise ConfigError(
                f"hydra.tokens_per_step {tokens_per_step} is more than the {num_tokens} tokens of the training data "
                f"({len(self._ids)} sequences): each sequence would be in one step {tokens_per_step / num_tokens:.1f} "
                f"times. Set it to at most {num_tokens}, or give more data"
            )
        self._budget = tokens_per_step
        self._seed = seed
        self._digest = hashlib.sha256(np.ascontiguousarray(self._lengths).tobytes()).hexdigest()[:16]
        self._orders: dict[int, tuple[Int64Array, Int64Array]] = {}
        self.restart(cursor or DataCursor(0, 0, 0, seed, tokens_per_step, self._digest))

    def restart(self, cursor: DataCursor) -> None:
        """Continue from a saved place; ConfigError if it does not belong to these data."""
        self.check_cursor(cursor)
        self._first_step = cursor.step
        self._epochs = array("q", [cursor.epoch])  # where each step from first_step on begins
        self._positions = array("q", [cursor.position])
        self._deferred = {cursor.step: cursor.deferred} if cursor.deferred else {}

    def check_cursor(self, cursor: DataCursor) -> None:
        """Raise unless the place was saved with the same data, seed and budget, and its steps could have led there.

        ConfigError for another job's place, CheckpointError for one that no job has.
        """
        for what, saved, now in (
            ("seed", cursor.seed, self._seed),
            ("tokens_per_step", cursor.tokens_per_step, self._budget),
            ("data (digest of the lengths)", cursor.data_digest, self._digest),
        ):
            if saved != now:
                raise ConfigError(
                    f"the saved place in the data belongs to {what} {str(saved)[:80]}, but this job has {now}: "
                    f"sequences would repeat or be left out. Restore the setting, or {RESUME_WEIGHTS}"
                )
        counts = (cursor.step, cursor.epoch, cursor.position, *cursor.deferred)
        fits = (
            all(type(number) is int and 0 <= number <= _MOST for number in counts)
            and cursor.position < len(self._ids) + bool(cursor.deferred)
            and len(set(cursor.deferred)) == len(cursor.deferred)
            and np.isin(cursor.deferred, self._ids).all()
        )
        if not fits:
            raise CheckpointError(f"the saved place in the data is damaged: {str(cursor)[:300]}; use another tag")
        # Each step draws its budget and less than one sequence more.
        sums = self._shuffled(cursor.epoch)[1]
        drawn = cursor.epoch * int(sums[-1]) + (int(sums[cursor.position - 1]) if cursor.position else 0)
        drawn -= int(self._lengths[list(cursor.deferred)].sum())
        most = cursor.step * (self._budget + int(self._lengths.max()) - 1)
        if not cursor.step * self._budget <= drawn <= most:
            raise CheckpointError(
                f"the saved place in the data contradicts itself: epoch {cursor.epoch}, position {cursor.position} is "
                f"after {drawn} tokens, which {cursor.step} steps of hydra.tokens_per_step {self._budget} do not draw; "
                "use another tag"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Steps that together draw about as many tokens as there are, at least one."""
        return max(1, round(int(self._lengths.sum()) / self._budget))

    def batch(self, step: int) -> tuple[int, ...]:
        """Ids of the sequences of `step`, in the order drawn."""
        return self._draw(*self._begin(step))[0]

    def batch_lengths(self, step: int) -> tuple[int, ...]:
        """Tokens of each sequence of `batch(step)`."""
        return tuple(self._lengths[list(self.batch(step))].tolist())

    def cursor(self, step: int) -> DataCursor:
        """Where `step` begins, for saving."""
        epoch, position, deferred = self._begin(step)
        return DataCursor(step, epoch, position, self._seed, self._budget, self._digest, deferred)

    def ready(self, step: int) -> bool:
        """Whether `batch(step)` takes no time: any step can be drawn at any time."""
        return step >= self._first_step

    def saved(self, step: int) -> dict[str, Any]:
        """`cursor(step)` as JSON."""
        return self.cursor(step).to_dict()

    def check_saved(self, record: Mapping[str, Any]) -> None:
        """ConfigError unless this is a place in these data."""
        if "data_digest" not in record:
            raise ConfigError(
                "the checkpoint was saved with a stream of data, this job has map-style data: give the data that it "
                f"was saved with, or {RESUME_WEIGHTS}"
            )
        if "reorder_steps" in record:
            raise ConfigError(
                f"the checkpoint was saved with hydra.reorder_steps {str(record['reorder_steps'])[:20]}, without which "
                f"sequences would repeat or be left out: set it again, or {RESUME_WEIGHTS}"
            )
        if set(record) != {each.name for each in fields(DataCursor)} or not isinstance(
            record["deferred"], list | tuple
        ):
            raise CheckpointError(
                f"the saved place in the data is damaged: it holds {str(record)[:300]}; use another tag"
            )
        self.check_cursor(DataCursor(**record))

    def restore(self, record: Mapping[str, Any]) -> None:
        """`restart` from a saved place."""
        self.restart(DataCursor(**record))

    def begin_at(self, step: int) -> None:
        """Go on where as many tokens were drawn as `step` steps ask for: a checkpoint of other data knows no place."""
        epoch, rest = divmod(step * self._budget, int(self._lengths.sum()))
        position = int(np.searchsorted(self._order(epoch)[1], rest)) + 1 if rest else 0
        if position == len(self._ids):
            epoch, position = epoch + 1, 0
        self.restart(DataCursor(step, epoch, position, self._seed, self._budget, self._digest))

    def close(self) -> None:
        """Nothing is open."""

    def _begin(self, step: int) -> _Place:
        """Where `step` begins in the order."""
        if step < self._first_step:
            raise ConfigError(
                f"step {step} lies before the place this run's data began, step {self._first_step}: ask for that one "
                "or a later one, or load the checkpoint of an earlier step"
            )
        # A step begins where the one before ends, so places are found one after the other and kept: 16 bytes a step, or
        # 16 MB for a million steps. To ask for an earlier step again then costs nothing.
        while len(self._epochs) <= step - self._first_step:
            last = self._first_step + len(self._epochs) - 1
            place = _Place(self._epochs[-1], self._positions[-1], self._deferred.get(last, ()))
            _, then = self._draw(*place)
            self._epochs.append(then.epoch)
            self._positions.append(then.position)
            if then.deferred:
                self._deferred[last + 1] = then.deferred
        at = step - self._first_step
        return _Place(self._epochs[at], self._positions[at], self._deferred.get(step, ()))

    def _draw(self, epoch: int, position: int, deferred: tuple[int, ...]) -> tuple[tuple[int, ...], _Place]:
        """Ids from a place in the order until the budget is reached, and the place after them."""
        # Lengths 3 5 2 4 have the running sums 3 8 10 14. A budget of 6 from position 1 on is reached at the first sum
        # of at least 3 + 6: that is 10, so the sequences of lengths 5 and 2 are drawn, 7 tokens. It takes one binary
        # search, however many sequences a step has.
        order, sums = self._order(epoch)
        missing = self._budget - int(self._lengths[list(deferred)].sum())
        before = int(sums[position - 1]) if position else 0
        stop = int(np.searchsorted(sums, before + missing)) + 1  # one past the sequence that reaches it
        drawn = (*deferred, *order[position:stop].tolist())
        if stop < len(order):
            return drawn, _Place(epoch, stop)
        missing -= int(sums[-1]) - before
        if missing <= 0:
            return drawn, _Place(epoch + 1, 0)
        return self._run_over(drawn, epoch + 1, missing)

    def _run_over(self, drawn: tuple[int, ...], epoch: int, missing: int) -> tuple[tuple[int, ...], _Place]:
        """Fill a step that has `drawn` the rest of an epoch from the next one, without drawing any of it again."""
        order, sums = self._order(epoch)
        have = int(self._lengths[list(drawn)].sum())
        order = order[: int(np.searchsorted(sums, missing + have)) + 1]  # enough, were all of `drawn` among them
        again = np.isin(order, np.asarray(drawn))
        reached = np.cumsum(np.where(again, 0, self._lengths[order]))
        stop = int(np.searchsorted(reached, missing)) + 1
        order, again = order[:stop], again[:stop]
        deferred = tuple(order[again].tolist())
        place = _Place(epoch, stop, deferred) if deferred or stop < len(sums) else _Place(epoch + 1, 0)
        return (*drawn, *order[~again].tolist()), place

    def _order(self, epoch: int) -> tuple[Int64Array, Int64Array]:
        """An epoch's order of ids and the running sum of their lengths."""
        if epoch not in self._orders:
            for old in sorted(self._orders)[:-1]:  # look-ahead needs the current epoch and the next
                del self._orders[old]
            self._orders[epoch] = self._shuffled(epoch)
        return self._orders[epoch]

    def _shuffled(self, epoch: int) -> tuple[Int64Array, Int64Array]:
        order = np.random.default_rng((self._seed, epoch)).permutation(self._ids)
        return order, np.cumsum(self._lengths[order])


class Draws(Protocol):
    """What draws the sequences of each step from data that are known."""

    @property
    def steps_per_epoch(self) -> int: ...

    def batch(self, step: int) -> tuple[int, ...]: ...


class StepIds(tuple[int, ...]):
    """The ids of a step's sequences; a script that takes it for a batch is told what to do."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # what libraries look for
        raise AttributeError(f"{name!r}: {_NO_BATCH}")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            raise TypeError(f"{key!r}: {_NO_BATCH}")
        return super().__getitem__(key)


_NO_BATCH = (
    "the loader of ds_hydra.initialize(training_data=...) yields ids of sequences, no batches, since the engine draws "
    "each step itself. Call engine.train_batch() in the loop; or leave training_data out, and hand batches of a "
    "DataLoader of your own to engine(batch)"
)


class StepLoader:
    """The steps that a job still has to make, each as its sequence ids: `for _ in loader: engine.train_batch()`.

    They end with `total_steps`, counted from the job's first start: after a restart at step 900 of 1,000 there are 100.
    Without `total_steps` they end with the current epoch. The engine draws each step's sequences itself; the ids that
    the iteration yields are only for scripts that count or look at them.
    """

    def __init__(self, sampler: Draws, next_step: Callable[[], int], total_steps: int | None = None) -> None:
        self._sampler = sampler
        self._next_step = next_step
        self._total_steps = total_steps

    def __len__(self) -> int:
        """Steps of the whole job, or of a whole epoch: those that it takes to draw about as many tokens as there are.

        What was done before a restart counts too, so that a learning rate schedule made from it stays the same.
        """
        return self._total_steps or self._sampler.steps_per_epoch

    @property
    def epoch(self) -> int:
        """Epochs that are over: `for _ in range(loader.epoch, 3)` makes those of three that are left."""
        return self._next_step() // self._sampler.steps_per_epoch

    def __iter__(self) -> Iterator[StepIds]:
        first = self._next_step()
        stop = self._total_steps or (self.epoch + 1) * self._sampler.steps_per_epoch
        for step in range(first, stop):
            yield StepIds(self._sampler.batch(step))


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
