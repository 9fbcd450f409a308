"""Sums lie where nobody needs the bytes any more, and take little beside the gradients."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.pipe.transfers import gradient_places, twins_of
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.sum_places import Place, check_places, places_of_sums
from tests.pure.test_connections import large_strategies
from tests.support.fused_llama import llama_plan

UNIT = 256
PUSHES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30)


def units(*places: tuple[int, int]) -> tuple[Place, ...]:
    return tuple(Place(UNIT * start, UNIT * stop) for start, stop in places)


def test_places_by_example() -> None:
    """The example of [Note: where sums lie]: buckets 2, 1 and 0 are pushed in this order."""
    gradients = units((12, 20), (4, 12), (0, 4))
    assert places_of_sums(gradients, (4 * UNIT, 4 * UNIT, 2 * UNIT)) == units((20, 24), (16, 20), (14, 16))
    # Gradients need not end aligned.
    odd = (Place(100, 1000), Place(0, 100))
    assert places_of_sums(odd, (256, 256)) == (Place(1024, 1280), Place(512, 768))


@given(PUSHES, st.randoms())
def test_no_sum_lies_where_bytes_may_be_in_use(pushes: list[tuple[int, int]], random: object) -> None:
    sizes = [UNIT * held for held, _ in pushes]
    of_buckets = [Place(start, stop) for start, stop in pairwise([0, *accumulate(sizes)])]
    random.shuffle(of_buckets)  # type: ignore[attr-defined]
    places = places_of_sums(tuple(of_buckets), tuple(UNIT * owned for _, owned in pushes))
    # Byte by byte: gradients are in use until their push is over, a sum from then on.
    for number, place in enumerate(places):
        used = {at for other in of_buckets[number:] for at in range(other.start, other.stop, UNIT)}
        used |= {at for other in places[:number] for at in range(other.start, other.stop, UNIT)}
        assert not used & set(range(place.start, place.stop, UNIT))


@pytest.mark.parametrize(
    ("sums", "what"),
    [
        (units((0, 1), (2, 3)), "sum of push 0 .* gradients of push 1"),
        (units((8, 9), (1, 2)), "sum of push 1 .* gradients of push 1"),  # its own are still to be sent
        (units((8, 10), (9, 10)), "sum of push 1 .* sum of push 0"),
    ],
)
def test_what_would_be_written_while_it_is_in_use_is_refused(sums: tuple[Place, ...], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        check_places(units((4, 8), (0, 4)), sums)


@given(large_strategies(), st.sampled_from([2, 4]))
def test_little_is_needed_behind_the_gradients_of_real_plans(strategy: object, grad_bytes: int) -> None:
    """At most what the sums of one bucket for each stage take, or what gradients are less than sums."""
    plan = llama_plan(8, hidden=32, vocab=64)
    for twins in twins_of(strategy, 8):  # type: ignore[arg-type]
        found = gradient_places(plan, strategy, twins, grad_bytes=grad_bytes, master_bytes=4)  # type: ignore[arg-type]
        sums = sum(place.stop - place.start for place in found.sums)
        assert found.pushed_bytes <= found.num_bytes <= found.pushed_bytes + sums
