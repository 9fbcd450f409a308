"""Checks that the scripts of all ranks are in the same call of the engine, and raises on all where not. No torch.

[Note: one call on all ranks]
A step, an evaluation or a save is one call that all ranks make. Where rank 0 saves and rank 1 makes a step, each waits
for messages that the other will never send; or the messages fit, and each takes the other's for its own. So the first
message of all ranks to all in a call carries its name, and names that differ are an error on all ranks before anything
has changed. Some calls have other messages before that one, in which nobody can be asked: heartbeats carry the name
too, and the number of calls whose names were compared, which is equal on all ranks that have come equally far. Two
ranks of one number and different names are told by the watchdog.

A rank without a name, which is in a call that was begun again after a loss, agrees with all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.told import Told, mark_told

READS = "a read of a loss"  # the name of what is no call: a rank that waits for the next call of the others
ROUND = "engine(batch)"  # the name of the call that a round is [Note: losses read early]
NAME_BYTES = 64  # of a call, in the message that compares them
_MOST_RANKS = 4  # that are named one by one


class LossIsRead(Exception):
    """Ends the first message of a call, on all ranks: one of them reads a loss before its step, and needs the others
    first [Note: losses read early]. Nothing has changed, and the call is made again."""


class Calling:
    """The call of one rank; written by the thread that trains, and read by that of the heartbeats."""

    def __init__(self) -> None:
        self.number = 0  # of calls whose names were compared
        self.waiting = ""  # the name of the present one, until its name was compared
        self.failed = ""  # the name of the last one in which this rank waited in vain
        self.exits = ""  # the name of the last one, if sys.exit() has left it
        self.broken = ""  # what has left a step, so that nothing of the engine can be gone on with
        self._inside = False

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """In a call of all ranks; one within another has its name."""
        if self._inside:
            yield
            return
        if self.broken:
            raise RuntimeError(
                f"{self.broken}: masters, gradients and messages may be half made, so {name} cannot go on. Call "
                "destroy() and make a new engine, or end the script and start it again from a checkpoint"
            )
        self._inside, self.waiting = True, name
        try:
            yield
        except BaseException as error:
            self.failed = self.waiting
            self.exits = name if isinstance(error, SystemExit) else ""
            raise
        finally:
            self._inside, self.waiting = False, ""

    def passed(self) -> None:
        """All ranks have come to the present call, if this rank is in one."""
        if self.waiting:
            self.number, self.waiting = self.number + 1, ""


def check_calls(names: Sequence[str]) -> None:
    """ConfigError, known to all ranks, unless the calls of all ranks have one name; "" agrees with all. LossIsRead
    where a rank only reads a loss."""
    if READS in names:
        raise LossIsRead(READS)
    if len(set(names) - {""}) > 1:
        named = {rank: name for rank, name in enumerate(names) if name}
        error = ConfigError(different(named))
        raise mark_told(error, Told(min(named), f"ConfigError: {error}", here=True))


def who_calls(calls: Mapping[int, str]) -> str:
    """Calls of ranks in words: "rank 0 calls step(), ranks 1, 2 call destroy()"."""
    by_name: dict[str, list[int]] = {}
    for rank, name in sorted(calls.items()):
        by_name.setdefault(name, []).append(rank)
    return ", ".join(f"{_ranks(ranks)} {name}" for name, ranks in by_name.items())


def different(calls: Mapping[int, str]) -> str:
    """What is wrong where ranks make different calls, and the remedy."""
    return (
        f"{who_calls(calls)}: every rank must make the same calls, as often: take them out of what only some ranks "
        "come to, such as `if rank == 0:` (files are written once all the same), and give all ranks as many batches"
    )


def _ranks(ranks: Iterable[int]) -> str:
    named = [str(rank) for rank in ranks]
    if len(named) == 1:
        return f"rank {named[0]} calls"
    more = f" and {len(named) - _MOST_RANKS} more" if len(named) > _MOST_RANKS else ""
    return f"ranks {', '.join(named[:_MOST_RANKS])}{more} call"
