"""Micro-batches and orders for tests of schedules: drawn, or read from text."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st

from ds_hydra.pipe.schedules.actions import Action, Order, Slot, slots_from_text
from ds_hydra.pipe.schedules.batches import Batches

STAGES = st.integers(1, 7)


WHOLE = st.integers(0, 12).map(Batches.whole)


@st.composite
def any_batches(draw: st.DrawFn, most: int = 12) -> Batches:
    """Whole sequences and chains of slices; other micro-batches may stand between the slices of a chain."""
    before: list[int] = []
    for microbatch in range(draw(st.integers(0, most))):
        open_ends = sorted(set(range(microbatch)) - set(before))
        before.append(draw(st.sampled_from([-1, -1, *open_ends[-2:]])))
    return Batches(tuple(before))


def order(text: str) -> Order:
    """One stage's order, such as "F0 F1 B0 B1"."""
    return tuple(action for slot in slots_from_text(text) for action in slot)


def of_kind(slots: tuple[Slot, ...], kind: str) -> list[int]:
    return [action.microbatch for slot in slots for action in slot if action.kind == kind]


class Made(NamedTuple):
    """Orders of all stages and the micro-batches that they run."""

    orders: tuple[Order, ...]
    batches: Batches


@st.composite
def possible_orders(draw: st.DrawFn) -> Made:
    """Any orders that could run: again and again some stage runs something that could run now."""
    batches, num_stages = draw(any_batches(5)), draw(st.integers(1, 5))
    after = batches.after
    each = [(stage, microbatch) for stage in range(num_stages) for microbatch in range(len(batches))]
    waiting = {(stage, Action("forward", m)) for stage, m in each}
    for stage, m in each:
        kinds = ("input_gradient", "weight_gradient") if draw(st.booleans()) else ("backward",)
        waiting |= {(stage, Action(kind, m)) for kind in kinds}  # type: ignore[arg-type]
    made: list[list[Action]] = [[] for _ in range(num_stages)]

    def has(stage: int, m: int, *kinds: str) -> bool:
        return m < 0 or any(action.kind in kinds and action.microbatch == m for action in made[stage])

    def ready(stage: int, action: Action) -> bool:
        kind, m, _ = action
        if kind == "forward":
            return has(stage, batches.before[m], "forward") and (stage == 0 or has(stage - 1, m, "forward"))
        if kind == "weight_gradient":
            return has(stage, m, "input_gradient")
        gradient = ("backward", "input_gradient")
        if not has(stage, m, "forward") or not has(stage, after[m], *gradient):
            return False
        return stage == num_stages - 1 or has(stage + 1, m, *gradient)

    while waiting:
        stage, action = draw(st.sampled_from(sorted(entry for entry in waiting if ready(*entry))))
        waiting.remove((stage, action))
        made[stage].append(action)
    return Made(tuple(map(tuple, made)), batches)
