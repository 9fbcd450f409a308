"""Schedules by name, and what the planner, the memory model and the runtime ask of them. Pure: no torch.

A new schedule is a `Schedule`, made from a function in a file of its own, and a row of `SCHEDULES`, or `register` from
elsewhere. Nothing else changes: whoever needs to know more of a schedule than its name asks it here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ds_hydra.pipe.schedules.actions import Action, Order, Slot, turns
from ds_hydra.pipe.schedules.batches import Batches, Work
from ds_hydra.pipe.schedules.check import Placed, lower, place
from ds_hydra.pipe.schedules.list_walk import TakeWalk, list_walk
from ds_hydra.pipe.schedules.orders import forward_only, list_order, one_f_one_b, zb_h1
from ds_hydra.pipe.schedules.simulate import KEPT_FOR_WEIGHTS, peak_alive
from ds_hydra.zero_hetero.errors import PlanError

NAME = "[a-z0-9][a-z0-9_.-]*"

Make = Callable[[Batches, int], tuple[Order, ...]]
"""(micro-batches, number of stages) in, what each stage computes out."""


@dataclass(frozen=True)
class Schedule:
    """The order in which the stages of a pipeline compute, by one of two functions.

    `make` knows how many micro-batches there are and which follow each other. `walk` weighs their times and their
    memory: a schedule that has one splits the backward, keeps within the room of a stage and takes slices of sequences
    and layers that are computed again, and the planner's search times micro-batches by it. It is plain Python that
    numba can compile, and calls functions of its own module and those of `list_walk`'s.
    """

    name: str
    make: Make | None = None
    walk: TakeWalk | None = None
    ranges: int = 1  # of layers in a stage that does not say how many: 1, or 2 that make a V [Note: virtual stages]
    proposed: bool = False  # for `strategies: "auto"`

    def __post_init__(self) -> None:
        """PlanError for what is no schedule."""
        if not re.fullmatch(NAME, self.name) or (self.make is None) == (self.walk is None):
            raise PlanError(f"schedule {self.name!r}: give a lower-case name, and either `make` or `walk`")
        if self.ranges not in (1, 2) or (self.ranges == 2 and self.walk is None):
            raise PlanError(f"schedule {self.name!r}: a stage holds 1 range of layers, or 2 under a `walk`")

    @property
    def module(self) -> str:
        """Where its function is defined."""
        return (self.walk or self.make).__module__  # type: ignore[union-attr]

    @property
    def weighs(self) -> bool:
        """Whether it is made from the micro-batches' works, and so keeps within the room of a stage."""
        return self.walk is not None

    def orders(self, batches: Batches, num_stages: int) -> tuple[Order, ...]:
        """What each stage computes. PlanError for micro-batches that cannot be ordered."""
        if self.walk is not None:
            return list_order(batches, num_stages, self.walk)
        assert self.make is not None, "a schedule has one of the two"
        return self.make(batches, num_stages)


SCHEDULES: dict[str, Schedule] = {
    one.name: one
    for one in (
        Schedule("1f1b", one_f_one_b, proposed=True),
        Schedule("list", walk=list_walk, proposed=True),
        Schedule("v", walk=list_walk, ranges=2, proposed=True),
        Schedule("zb-h1", zb_h1),
    )
}
"""The schedules that a pipeline can train by."""


def register(schedule: Schedule) -> None:
    """From now on pipelines can train by it. PlanError if another one has its name.

    Call it on every rank before `initialize`. The process that plans imports the module of the schedule's function and
    registers all schedules that it finds there.
    """
    if schedule.module == "__main__":
        raise PlanError(
            f"schedule {schedule.name!r}: its function is defined in the script itself, which the process that plans "
            "cannot import; move both to a module"
        )
    if SCHEDULES.setdefault(schedule.name, schedule) != schedule:
        raise PlanError(f"schedule {schedule.name!r}: there is another one of this name; choose a new one")


def proposed_schedules() -> tuple[str, ...]:
    """Those that `strategies: "auto"` may propose."""
    return tuple(name for name, one in SCHEDULES.items() if one.proposed)


def weighs(name: str) -> bool:
    """Whether a schedule is made from the micro-batches' works; False for one that is not known."""
    return name in SCHEDULES and SCHEDULES[name].weighs


def modules_of(names: Iterable[str]) -> tuple[str, ...]:
    """Modules beside this package's own that register some of the schedules."""
    found = {SCHEDULES[name].module for name in names if name in SCHEDULES}
    return tuple(sorted(module for module in found if not module.startswith(f"{__package__}.")))


def ranges_of(name: str) -> int:
    """Ranges of layers in a stage that does not say how many; 1 under a schedule that is not known."""
    return SCHEDULES[name].ranges if name in SCHEDULES else 1


# Under schedules that weigh times no two steps have the same micro-batches: as many as one step of a large job needs.
_REMEMBERED = 128


def schedule_named(name: str) -> Schedule:
    """A schedule to train by. PlanError names the known ones."""
    if name not in SCHEDULES:
        raise PlanError(f"schedule {name!r} is not known; choose from {', '.join(sorted(SCHEDULES))}")
    return SCHEDULES[name]


def orders(name: str, batches: Batches, num_stages: int) -> tuple[Order, ...]:
    """Each stage's actions in training, in order. PlanError if the name is not known."""
    return _orders(schedule_named(name), batches, num_stages)


def splits_backward(name: str) -> bool:
    """Whether a schedule computes gradients of inputs and of weights apart. PlanError if the name is not known."""
    if weighs(name):
        return True
    return any(action.kind == "weight_gradient" for order in orders(name, Batches.whole(2), 2) for action in order)


@lru_cache(maxsize=_REMEMBERED)
def placed(name: str, batches: Batches, num_stages: int) -> tuple[Placed, ...]:
    """All stages' actions in training, each after what it needs. PlanError if the name is not known."""
    return place(orders(name, batches, num_stages), batches)


@lru_cache(maxsize=_REMEMBERED)
def training_slots(name: str, batches: Batches, num_stages: int, stage: int) -> tuple[Slot, ...]:
    """One stage's slots of a step, messages included. PlanError if the name is not known."""
    return lower(orders(name, batches, num_stages), batches)[stage]


@lru_cache(maxsize=_REMEMBERED)
def evaluation_slots(batches: Batches, num_stages: int, stage: int) -> tuple[Slot, ...]:
    """One stage's slots to evaluate micro-batches: forwards and their messages only."""
    return lower(forward_only(batches, num_stages), batches)[stage]


@lru_cache(maxsize=1024)
def most_alive(
    name: str, num_stages: int, slices: int = 1, until_weight: float = KEPT_FOR_WEIGHTS
) -> tuple[float, ...]:
    """Micro-batches that each stage keeps at once at most, however many there are in a step.

    A schedule that keeps within a stage's room may fill it on every stage; the room is what 1F1B keeps on the first one
    [Note: shares of a micro-batch]. `slices`: the most that a sequence is cut into; `until_weight`: what is kept of a
    micro-batch after its input's gradient. PlanError if a schedule keeps ever more the more micro-batches there are:
    then no length of micro-batches is always safe.
    """
    if weighs(name):
        return (float(num_stages),) * num_stages
    # 1F1B on 3 stages keeps (3, 2, 1) both with 6 and with 12 micro-batches. All forwards before all backwards would
    # keep 6 and 12: a step of more micro-batches than were measured would run out of memory in the middle of training.
    few, many = (
        peak_alive(orders(name, Batches.in_slices([slices] * (count * num_stages)), num_stages), until_weight)
        for count in (2, 4)
    )
    if few != many:
        raise PlanError(
            f"schedule {name!r} keeps {few} micro-batches on its stages with {2 * num_stages} in a step, and {many} "
            f"with {4 * num_stages}; a schedule to train by must keep no more when there are more"
        )
    return few


def open_sends(num_stages: int) -> int:
    """Sends without a receive beside them that a stage may leave open [Note: what is sent]."""
    return 2 * num_stages


@lru_cache(maxsize=1024)
def most_sent(name: str, num_stages: int, parts: int, *, serial: bool) -> tuple[int, ...]:
    """Tensors of micro-batches that each stage holds at once at most only because they are sent [Note: what is sent].

    `serial`: exchanges end in the order of their start. An activation counts from its backward on; before it is kept
    anyway.
    """
    # With equal micro-batches, as many as make a steady state.
    count = 4 * num_stages
    works = (Work(forward=10, backward=12, weight=8, kept=2, until_weight=1),) * count if weighs(name) else ()
    batches = Batches((-1,) * count, parts, works, room=2 * num_stages * parts if works else 0)
    bound = open_sends(num_stages)
    return tuple(
        _most_sent(training_slots(name, batches, num_stages, stage), bound, serial=serial)
        for stage in range(num_stages)
    )


def _most_sent(slots: Sequence[Slot], bound: int, *, serial: bool) -> int:
    """The same of one stage, which leaves so many sends open."""
    sends: list[tuple[Action, ...]] = []
    done: set[tuple[int, int]] = set()
    most = 0
    for messages, actions in turns(slots):
        if all(message.sends for message in messages):
            sends = [*sends, messages][-bound:] if messages else sends
        elif serial:
            sends = []  # they are over, since a later exchange is
        done |= {(one.microbatch, one.part) for one in actions if one.kind in ("backward", "input_gradient")}
        held = [one for each in sends for one in each]
        most = max(most, sum(one.kind == "send_gradient" or (one.microbatch, one.part) in done for one in held))
    return most


@lru_cache(maxsize=_REMEMBERED)
def _orders(schedule: Schedule, batches: Batches, num_stages: int) -> tuple[Order, ...]:
    return schedule.orders(batches, num_stages)
