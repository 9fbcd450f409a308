"""The plan that rank 0 makes in; the same plan, or rank 0's error, on every rank out."""

from __future__ import annotations

from collections.abc import Callable

from ds_hydra.planner import PlannedStep
from ds_hydra.planner.service import Waiting
from ds_hydra.ranks.channel import Channel
from ds_hydra.ranks.telling import Telling
from ds_hydra.ranks.together import as_text, error_from
from ds_hydra.zero_hetero.told import Told, mark_told

_FAILED = "failed\n"  # before rank 0's error, in place of a plan
_WAITING = "waiting\n"  # in place of a plan that rank 0 is still waiting for


def tell_plan(
    step: int, make: Callable[[Waiting], PlannedStep], telling: Telling | Channel, *, rank: int, timeout_s: float
) -> PlannedStep:
    """What `make` returns on rank 0, on all ranks; an error of rank 0's is raised on all of them.

    While it waits, the others are told to wait on, long before they would give up after `timeout_s`: a plan may take
    longer than a message.
    """
    planned, text, mine = None, "", None
    if rank == 0:
        try:
            planned = make(_keeps_waiting(telling, timeout_s / 4))
            text = planned.to_text()
        except Exception as error:
            mine, text = error, _FAILED + as_text(error)
    text = telling.tell(text)
    while text == _WAITING:
        text = telling.tell(None)
    if text.startswith(_FAILED):
        cause = text.removeprefix(_FAILED)
        failed = mine or error_from(cause, f"planning step {step + 1} failed on rank 0")
        raise mark_told(failed, Told(0, cause.replace("\n", ": ", 1), here=mine is not None))
    return planned or PlannedStep.of_text(text)


def _keeps_waiting(telling: Telling | Channel, every_s: float) -> Waiting:
    last_s = 0.0

    def waiting(waited_s: float) -> None:
        nonlocal last_s
        if waited_s - last_s >= every_s:
            last_s = waited_s
            telling.tell(_WAITING)

    return waiting
