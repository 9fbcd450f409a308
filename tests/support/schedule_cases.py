"""Micro-batches for schedules: drawn, random, or read from text; what holds for them, and ways to break one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from ds_hydra.pipe.schedules.actions import Action, Order, Slot, slots_from_text
from ds_hydra.pipe.schedules.batches import Batches, Work
from ds_hydra.pipe.schedules.check import check_slots
from ds_hydra.zero_hetero.errors import PlanError

# --- Random micro-batches with times and memory, what holds for their schedules, and ways to break one.
Slots = tuple[tuple[Slot, ...], ...]


def random_chains(rng: random.Random, count: int) -> tuple[int, ...]:
    """Whole sequences and chains of slices; other micro-batches may stand between the slices of a chain."""
    before: list[int] = []
    for microbatch in range(count):
        open_ends = sorted(set(range(microbatch)) - set(before))
        before.append(rng.choice([-1, -1, *open_ends[-2:]]))
    return tuple(before)


def random_works(rng: random.Random, most: int, parts: int) -> Batches:
    """Up to `most` micro-batches with any times; room for the largest run, up to four times of it."""
    before = random_chains(rng, rng.randint(0, most))
    works = []
    for _ in before:
        kept = rng.randint(0, 50)
        weight = rng.choice((0, rng.randint(1, 20)))
        works.append(Work(rng.randint(1, 20), rng.randint(1, 30), weight, kept, rng.randint(0, kept)))
    runs = Batches(before).runs
    largest = max((parts * sum(works[m].kept for m in run) for run in runs), default=0)
    return Batches(before, parts, tuple(works), int(largest * rng.uniform(1.0, 4.0)))


def bound(batches: Batches, num_stages: int) -> int:
    """No schedule is done sooner: the last stage begins after the forwards before it, and has all the work to do."""
    if not batches.works:
        return 0
    works = batches.works
    return batches.parts * sum(w.forward + w.backward + w.weight for w in works) + (num_stages - 1) * works[0].forward


def refused(stages: Slots, batches: Batches) -> bool:
    """Whether the check of schedules finds a fault."""
    try:
        check_slots(stages, batches)
    except PlanError:
        return True
    return False


def mutants(stages: Slots, batches: Batches, rng: random.Random) -> Iterator[tuple[str, Slots]]:
    """Slots with one fault each, every one of which breaks a dependency; fewer kinds where there is little to break."""
    stage = rng.randrange(len(stages))
    flat = [(number, action) for number, slot in enumerate(stages[stage]) for action in slot]
    computed = [at for at, (_, action) in enumerate(flat) if action.computes]
    messages = [at for at, (_, action) in enumerate(flat) if not action.computes]
    if computed:
        at = rng.choice(computed)
        # One micro-batch without its only backward is a correct evaluation.
        if len(batches) * len(stages) * batches.parts > 1:
            yield f"leave out {flat[at][1]}", _with(stages, stage, [x for i, x in enumerate(flat) if i != at])
        yield f"{flat[at][1]} twice", _with(stages, stage, [*flat, (len(stages[stage]), flat[at][1])])
    pairs = [(a, b) for a in computed for b in computed if _needs(flat[b][1], flat[a][1], stage, len(stages), batches)]
    if pairs:
        first, second = rng.choice(pairs)
        yield f"{flat[second][1]} before {flat[first][1]}", _with(stages, stage, _exchanged(flat, first, second))
    if messages:
        at = rng.choice(messages)
        yield f"leave out {flat[at][1]}", _with(stages, stage, [x for i, x in enumerate(flat) if i != at])
    same_way = [(a, b) for a in messages for b in messages if a < b and _way(flat[a][1]) == _way(flat[b][1])]
    if same_way:
        first, second = rng.choice(same_way)
        yield f"{flat[second][1]} before {flat[first][1]}", _with(stages, stage, _exchanged(flat, first, second))


def _way(message: Action) -> tuple[int, bool]:
    return message.side, message.sends


def _needs(later: Action, earlier: Action, stage: int, num_stages: int, batches: Batches) -> bool:
    """Whether an action needs what another one of its own stage computes."""
    backward = ("backward", "input_gradient")
    if later.part != earlier.part:
        turn = later.microbatch == earlier.microbatch and stage == num_stages - 1
        forward = later.kind == earlier.kind == "forward" and later.part == 1
        return turn and (forward or (later.kind in backward and earlier.kind in backward and later.part == 0))
    if later.microbatch == earlier.microbatch:
        return earlier.kind == "forward" != later.kind or (later.kind == "weight_gradient" and earlier.kind in backward)
    if later.kind == earlier.kind == "forward":
        return batches.before[later.microbatch] == earlier.microbatch
    return later.kind in backward and earlier.kind in backward and (
        batches.after[later.microbatch] == earlier.microbatch
    )  # fmt: skip


def _exchanged(flat: Sequence[tuple[int, Action]], first: int, second: int) -> list[tuple[int, Action]]:
    """The two actions in each other's slot."""
    found = list(flat)
    found[first], found[second] = (flat[first][0], flat[second][1]), (flat[second][0], flat[first][1])
    return found


def _with(stages: Slots, stage: int, flat: Sequence[tuple[int, Action]]) -> Slots:
    slots: dict[int, list[Action]] = {}
    for number, action in flat:
        slots.setdefault(number, []).append(action)
    changed = tuple(tuple(slots[number]) for number in sorted(slots))
    return (*stages[:stage], changed, *stages[stage + 1 :])


# --- Micro-batches and orders for tests of schedules: drawn, or read from text.
STAGES = st.integers(1, 7)


WHOLE = st.integers(0, 12).map(Batches.whole)


def any_batches(most: int = 12) -> st.SearchStrategy[Batches]:
    """Whole sequences and chains of slices, as `random_chains` has them."""
    made = st.builds(random_chains, st.randoms(use_true_random=False), st.integers(0, most))
    return made.map(Batches)


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
