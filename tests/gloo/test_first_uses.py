"""Nothing connects inside a step or a gather: every group, kind of collective and pair was used while the engine began.

NCCL connects ranks when an algorithm needs it, in the host, with memory of the device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
import torch.distributed as dist

from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.ranks.world import World
from ds_hydra.testing import run_ranks
from tests.support.small_job import small_config, small_engine, whole_state
from tests.support.strict import StrictCollectives, StrictTransport, strict_world

PIPELINES = ("tp1", "tp1", "tp2", "sp2", "pp2", "pp2/v", "tp4", "sp4", "pp4", "tp2sp2", "tp2pp2", "sp2pp2")
Use = tuple[str, tuple[int, ...]]


@contextmanager
def uses_noted() -> Iterator[set[Use]]:
    """Which collectives of which groups, and which pairs of which transport, this rank has used in a strict world."""
    seen: set[Use] = set()
    call, exchange = StrictCollectives.call, StrictTransport.exchange

    def called(self: StrictCollectives, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        group = arguments["group"] or dist.group.WORLD
        if type(group) is dist.ProcessGroup and self._line_of(group) is not None:  # and not those of hosts
            seen.add((f"{original.__name__} in {group.group_name}", tuple(dist.get_process_group_ranks(group))))
        return call(self, original, arguments)

    def exchanged(self: StrictTransport, sends: Any, recvs: Any, tag: int = 0) -> Any:
        seen.update((self.name, (self.rank, peer)) for peer, _ in sends)
        seen.update((self.name, (peer, self.rank)) for peer, _ in recvs)
        return exchange(self, sends, recvs, tag)

    with strict_world(), mock.patch.object(StrictCollectives, "call", called), \
            mock.patch.object(StrictTransport, "exchange", exchanged):  # fmt: skip
        yield seen


def drawn(number: int, num_ranks: int, count: int) -> list[str]:
    """Different strategies that fill the ranks."""
    draw, found = random.Random(number), dict[str, None]()
    while len(found) < count:
        parts, left = list[str](), num_ranks
        while left:
            text = draw.choice(PIPELINES)
            if StrategyShape.parse(text).num_ranks <= left:
                parts.append(text)
                left -= StrategyShape.parse(text).num_ranks
        found[str(StrategyShape.parse(" + ".join(parts)))] = None
    return list(found)


def late_uses(rank: int, strategies: Sequence[str]) -> list[Use]:
    """First uses after the engine has begun: in a step under each strategy, and in gathers to one rank and to all."""
    config = small_config(dist.get_world_size(), node_size=2, strategies=list(strategies))
    with uses_noted() as seen:
        engine = small_engine(rank, config=config)
        at_start = set(seen)
        for _ in strategies:
            engine.train_batch()
        engine.fp32_state_dict()
        assert bool(engine.crew.masters.gather(engine.crew.world.group, None, [0])) == (rank == 0)
        assert all(value.isfinite().all() for value in whole_state(engine).values())
        late = sorted(seen - at_start)
        engine.destroy()
    return late


@pytest.mark.drawn
@pytest.mark.parametrize(("number", "num_ranks", "count"), [(0, 4, 8), (1, 6, 6), (2, 5, 6)])
def test_no_group_and_no_pair_is_first_used_inside_a_step_or_a_gather(number: int, num_ranks: int, count: int) -> None:
    found = run_ranks(lambda rank: late_uses(rank, drawn(number, num_ranks, count)), num_ranks, timeout=300)
    assert found == [[]] * num_ranks


def test_what_is_not_connected_at_start_is_seen() -> None:
    def without(rank: int) -> list[Use]:
        reduce = lambda self, group, **_: dist.all_reduce(torch.zeros(1), group=group)  # noqa: E731
        with mock.patch.object(World, "_greet_group", reduce):
            return late_uses(rank, ["sp2", "tp2"])

    names = {name.partition(" ")[0] for name, _ in run_ranks(without, 2, timeout=120)[0]}
    assert {"all_to_all_single", "all_gather_single", "reduce_scatter_single"} <= names
