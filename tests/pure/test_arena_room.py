"""Room for composed strategies: none costs a candidate a token, and what does not fit is refused with its numbers."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.memory import JobMemory
from ds_hydra.costs.rank_bytes import held_elements
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.planner.arena_room import ArenaRoom, room_beside
from ds_hydra.planner.exact.counts import counts_to_strategy
from tests.support.llama_memory import GIB, job

POOL = ("tp4 + 4*tp1", "4*tp2")
SCHEMES = tuple(map(ParallelScheme, (1, 2, 4)))


def beside(device: float, *, composing: bool = True, tokens: int = 1 << 20) -> tuple[ArenaRoom, JobMemory, CostTable]:
    """A table whose MaxLen is `tokens`, or less where there is no memory for that."""
    shapes = [StrategyShape.parse(text) for text in POOL]
    memory = job(8, device).together({shape: place_strategy(shape, 8, 8) for shape in shapes})
    limits = [max(1, min(tokens, memory.max_length(scheme))) for scheme in SCHEMES]
    table = CostTable(
        tuple(SchemeCost(scheme, 0.0, 1.0, 0.0, limit, 1) for scheme, limit in zip(SCHEMES, limits, strict=True))
    )
    return room_beside(memory, table, composing=composing), memory, table


def recombined() -> list[StrategyShape]:
    """All strategies of the pool's pipelines on 8 ranks."""
    counts = itertools.product(range(9), range(5), range(3))
    return [counts_to_strategy(c, SCHEMES) for c in counts if c[0] + 2 * c[1] + 4 * c[2] == 8]


def test_where_memory_is_plenty_every_recombination_fits() -> None:
    room, _, _ = beside(GIB, tokens=256)
    assert len(recombined()) > 5
    assert [room.refusal(strategy) for strategy in recombined()] == [""] * len(recombined())


@pytest.mark.parametrize("device", [9e6, 1e7, 1.2e7, 2e7, float(GIB)])
def test_room_costs_no_candidate_a_token_and_what_is_let_in_fits(device: float) -> None:
    room, memory, table = beside(device)
    shapes = [PipelineShape.of(scheme) for scheme in SCHEMES]
    with_room = replace(memory, arena=room.arena, _cache={})
    for shape in shapes:
        assert min(table[shape].max_length, with_room.max_length(shape)) == min(
            table[shape].max_length, memory.max_length(shape)
        )
    for strategy in recombined():
        placed = place_strategy(strategy, 8, 8)
        if room.refusal(strategy):
            continue
        needed = held_elements(memory.plan, placed, memory.element, node_size=8)
        assert all(p <= has_p and g <= has_g for (p, g), (has_p, has_g) in zip(needed, room.arena, strict=True))
        beside_it = with_room.together({**memory.strategies, strategy: placed})
        for shape in set(strategy.pipelines):
            assert beside_it.max_length(shape) >= min(table[shape].max_length, memory.max_length(shape))


def test_what_does_not_fit_is_refused_with_its_numbers() -> None:
    room, memory, _ = beside(GIB, composing=False, tokens=256)
    whole = max(p for p, _ in room.arena)
    assert min(p for p, _ in room.arena) < whole
    refusal = room.refusal(StrategyShape.parse("8*tp1"))
    assert refusal.startswith("rank 0 has room for ")
    assert "elements of parameters but would hold" in refusal
    # Composed strategies keep tensor parallel groups inside nodes; what a user lists may lay them across.
    assert room.refusal_of_composed(StrategyShape.parse("2*tp4")) == room.refusal(StrategyShape.parse("2*tp4")) == ""
    odd = replace(room, node_size=7)
    assert odd.refusal_of_composed(StrategyShape.parse("2*tp4")).startswith("the ranks 4..7 of a tensor parallel group")
    assert "no candidate has the pipeline pp2" in room.refusal(StrategyShape.parse("tp4 + 2*tp1 + pp2"))
    at_its_limit, _, _ = beside(GIB)  # MaxLen takes all memory there is
    assert "activations" in at_its_limit.refusal(StrategyShape.parse("2*tp4"))
    assert "uses 4 ranks" in room.refusal(StrategyShape.parse("tp4"))
    assert memory.arena == ()


def test_a_record_holds_all_of_it() -> None:
    room, _, _ = beside(GIB)
    assert ArenaRoom.of_record(json.loads(json.dumps(room.to_record()))) == room
