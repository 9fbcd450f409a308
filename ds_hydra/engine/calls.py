"""A script's calls of all ranks, counted; a rank that a loss has reached in an earlier call than others is told of it.

[Note: calls]
All ranks make the same calls: a step, an evaluation, a save. When one is lost, a rank may still wait in a call for the
last message, while others have left it and are in the next one. A call that some rank has left is complete: what it
comes to is equal on all ranks, so those behind are told it by one that is ahead, and do not begin it again. No rank is
more than one call ahead, since each of these calls has a message of all ranks to all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from ds_hydra.watchdog.host import EXIT_CODE, end_process, say
from ds_hydra.zero_hetero.told import told_of

if TYPE_CHECKING:
    from ds_hydra.ranks.channel import Texts

Result = TypeVar("Result")
_LOST_IN = "ranks were lost in {}(), which cannot be begun again"


def end_lost(why: str) -> NoReturn:
    """End this process, whose job has lost what it needs to go on."""
    say(f"{why}. Restart the job: it resumes from the newest checkpoint")
    end_process(EXIT_CODE)
    raise AssertionError("it has ended")


def end_stuck(where: str) -> NoReturn:
    """End this process, which stands still at `where` after another rank was lost."""
    say(
        "this rank did not come out of its step after another one was lost (hydra.elastic.stuck_seconds): it ends. It "
        f"stands here:\n{where}"
    )
    end_process(EXIT_CODE)
    raise AssertionError("it has ended")


def _same(found: Any) -> Any:
    return found


@dataclass
class EngineCall(Generic[Result]):
    """One that a script makes on all ranks."""

    part: Callable[[], Result]
    close: Callable[[Any], Any] = _same  # makes JSON of what it returns
    read: Callable[[Any], Any] = _same  # reads that
    once: str = ""  # the name of one that cannot be begun again: then the process ends
    _began: bool = False

    def begin(self, calls: Calls, meet: Callable[[], None]) -> Result:
        """What it returns, on this rank or one that is ahead. All `meet` when they have it."""
        if self._began and self.once:
            end_lost(_LOST_IN.format(self.once))
        self._began = True
        if calls.behind:
            found: Result = self.read(calls.result)
            return found
        found = self.part()
        meet()
        return found


def gathered(part: Callable[[], Result], meet: Callable[[], object]) -> EngineCall[Result]:
    """One whose result is no JSON, and is found by each rank. All `meet` when they have it: a rank that others have
    left behind has it, too."""
    found: list[Result] = []

    def whole() -> Result:
        found[:] = [part()]
        meet()
        return found[0]

    return EngineCall(whole, close=lambda _: None, read=lambda _: found[0])


def taken_once(
    items: Callable[[], Iterator[Result]], once: str, by_fault: Callable[[Exception], bool]
) -> Iterator[Result]:
    """Items that all ranks take one after the other, of a call that cannot be begun again: then the process ends."""

    def guarded(next_one: Callable[[], Any]) -> Any:
        try:
            return next_one()
        except Exception as error:
            if told_of(error) is None and by_fault(error):
                end_lost(_LOST_IN.format(once))
            raise

    made: Iterator[Result] = guarded(items)
    end = object()
    return iter(lambda: guarded(lambda: next(made, end)), end)  # type: ignore[arg-type]  # the end is no item


class Calls:
    """Those of this rank."""

    def __init__(self) -> None:
        self.made = 0  # calls that this rank has left
        self.behind = False  # whether another rank has left the call in which this one is
        self.result: Any = None  # of the last call that was made, or that others have made; as JSON holds it
        self.request = 0  # what a signal has asked for in the step that was open
        self.save_again = False  # whether a save in the background was lost with the ranks
        self._begun = self._whole = -1  # steps of the last save in the background: that was begun, that is durable

    def left(self, result: Any = None) -> None:
        """This rank is about to leave a call."""
        self.made, self.behind, self.result, self.request = self.made + 1, False, result, 0

    def saved(self, step: int, *, whole: bool) -> None:
        """A save in the background of a crew that is gone was of this step, and is durable if it is `whole`."""
        self._begun = step
        if whole:
            self._whole = step

    def agree(self, channel: Texts, *, joins: bool) -> None:
        """Find out with the others of a new view who is behind. A process that `joins` comes at the end of a step."""
        own = [-1, 0, -1, -1] if joins else [self.made, self.request, self._begun, self._whole]
        told = [json.loads(text) for text in channel.texts(json.dumps(own))]
        newest = max(made for made, *_ in told)
        if any(0 <= made < newest for made, *_ in told):
            results = channel.texts(json.dumps(self.result))
            self.result = json.loads(results[[made for made, *_ in told].index(newest)])
        if joins:
            self.made = newest + 1
            return
        assert newest - self.made <= 1, f"{self.made} calls, others {newest}: more than one apart"
        self.behind = self.made < newest
        self.request = max(request for made, request, *_ in told if made == self.made)
        self._begun, self._whole = (max(one[at] for one in told) for at in (2, 3))
        self.save_again = self._begun > self._whole
