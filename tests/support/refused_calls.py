"""Calls that an engine must refuse: what each has told, and that training goes on from where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.small_job import same, whole_state


def refused_calls(
    engine: Any,
    calls: Iterable[Callable[[], Any]],
    trains: Callable[[], Any],
    errors: tuple[type[Exception], ...] = (ConfigError,),
) -> tuple[list[str], bool]:
    """The text of each call's error, or "done"; and whether nothing was changed by them and is by what `trains`, with
    a step of the optimizer after it. Every rank must call it."""
    before, told = whole_state(engine), list[str]()
    for call in calls:
        try:
            call()
            told.append("done")
        except errors as error:
            told.append(str(error))
    unchanged = same(before, whole_state(engine)) and not engine.gradients_wait()
    trains()
    engine.optimizer_step()
    return told, unchanged and not same(before, whole_state(engine))
