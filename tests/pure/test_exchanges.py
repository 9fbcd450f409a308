"""Messages of an exchange over ports and cables, against a simulation of each by itself."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.simulate.links import LinkModel, Port, Speed
from ds_hydra.simulate.wires import Parcels, Routes, Wires
from ds_hydra.zero_hetero.layout import even_layout, layout_of_intervals
from ds_hydra.zero_hetero.transfer_plan import SliceColumns, TransferPlan, plan_transfer


def by_ports(plans: list[TransferPlan], ready: list[list[float]], links: LinkModel) -> list[tuple[list, list]]:
    """What `Wires` computes for all messages at once, message by message with `Port`."""
    size = plans[0].num_ranks
    out, into = [Port() for _ in range(size)], [Port() for _ in range(size)]
    results = []
    for plan, begin in zip(plans, ready, strict=True):
        heads, left, came = {}, list(begin), list(begin)
        for rank in range(size):
            for message in sorted(plan.sends(rank), key=lambda m: (m.dst - rank) % size):
                speed = links.speed(rank, message.dst)
                heads[rank, message.dst] = out[rank].serve(begin[rank], speed.wire_s(message.numel)) + speed.latency_s
                left[rank] = out[rank].free_s
        for rank in range(size):
            for message in sorted(plan.recvs(rank), key=lambda m: heads[m.src, rank]):
                into[rank].serve(heads[message.src, rank], links.speed(message.src, rank).wire_s(message.numel))
                came[rank] = into[rank].free_s
        results.append((left, came))
    return results


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_an_exchange_is_what_ports_make_of_its_messages(seed: int) -> None:
    rng = random.Random(seed)
    size, numel = rng.randint(1, 9), rng.randint(9, 60)
    links = LinkModel(
        rng.randint(1, size), Speed(rng.random(), rng.uniform(1, 9)), Speed(rng.random(), rng.uniform(1, 9))
    )
    plans, ready, known = [], [], list[Routes]()
    cuts: list[list[int]] = []
    for _ in range(3):
        if rng.random() < 0.3:  # a gather: all ranks have equal messages for each other
            each = np.arange(size)
            src, dst = np.repeat(each, size), np.tile(each, size)
            plans.append(TransferPlan(size, SliceColumns(src, dst, src, src, np.full(size * size, rng.randint(1, 9)))))
            ready.append([20 * rng.random() for _ in range(size)])
            continue
        if not cuts or rng.random() < 0.5:
            cuts = [sorted(rng.sample(range(numel + 1), 2)) for _ in range(size)]
        times = rng.randint(1, 3)  # as large messages, which may go the same ways
        layout = layout_of_intervals(times * numel, [(times * start, times * stop) for start, stop in cuts])
        plan = plan_transfer(even_layout(times * numel, size), layout)
        plans.append(plan if rng.random() < 0.5 else plan.transposed())
        ready.append([rng.choice([0.0, 20 * rng.random()]) for _ in range(size)])
    wires = Wires(size)
    for plan, begin, (left, came) in zip(plans, ready, by_ports(plans, ready, links), strict=True):
        found = wires.exchange(Parcels.of_plan(plan, links, 1, known), np.array(begin))
        assert found.left == pytest.approx(left)
        assert found.came == pytest.approx(came)
        assert (found.left_from <= found.left).all()
        assert (found.came_from <= found.came).all()


@pytest.mark.parametrize(("node_size", "then", "came"), [
    (1, 0.0, (10.0, 12.0, 17.0)),  # each has half of the cable until 12; what comes next waits for what was begun first
    (1, 6.0, (10.0, 16.0, 16.0)),
    (1, 20.0, (10.0, 26.0, 11.0)),
    (2, 0.0, (10.0, 6.0, 11.0)),  # inside a node nothing is shared
])  # fmt: skip
def test_two_communicators_share_the_cable_between_nodes(
    node_size: int, then: float, came: tuple[float, float, float]
) -> None:
    """Transfers of 10 seconds over one, of 6 over the other from `then` on, and of 1 over the first again."""
    links = LinkModel(node_size, Speed(0.0, 1.0), Speed(0.0, 1.0), one_cable=True)

    def parcels(size: int) -> Parcels:
        sent, received = (layout_of_intervals(size, own) for own in ([(0, size), (0, 0)], [(0, 0), (0, size)]))
        return Parcels.of_plan(plan_transfer(sent, received), links, 1)

    one, other = Wires.pair(2, links)
    turns = ((one, 10, 0.0), (other, 6, then), (one, 1, 0.0))
    found = [wires.exchange(parcels(size), np.full(2, ready)).came[1] for wires, size, ready in turns]
    assert found == pytest.approx(came)


def test_all_ranks_of_a_node_share_its_cable() -> None:
    """Of ranks 0 and 1, who send 4 and 10 bytes to ranks 2 and 3, the first is through when both have sent 4."""
    links = LinkModel(2, Speed(0.0, 1e9), Speed(0.0, 1.0), node_cable=True)

    def parcels(*sizes: int) -> Parcels:
        ends = np.cumsum([0, *sizes]).tolist()
        own = [(start, stop) for start, stop in pairwise(ends)]
        sent, received = (
            layout_of_intervals(ends[-1], [*own, (0, 0), (0, 0)]),
            layout_of_intervals(ends[-1], [(0, 0), (0, 0), *own]),
        )
        return Parcels.of_plan(plan_transfer(sent, received), links, 1)

    one, other = Wires.pair(4, links)
    first = one.exchange(parcels(4, 10), np.zeros(4))
    assert first.left[:2].tolist() == first.came[2:].tolist() == [8.0, 14.0]
    assert other.exchange(parcels(1, 1), np.zeros(4)).came[2:].tolist() == [16.0, 16.0], "when those before are through"


def test_what_stays_on_a_node_waits_for_nothing_on_its_cable() -> None:
    """Rank 1 sends 8 bytes to rank 2 on the other node, then 1 byte to rank 0 beside it."""
    links = LinkModel(2, Speed(0.0, 1.0), Speed(0.0, 1.0), node_cable=True)

    def parcels(numel: int, to: int) -> Parcels:
        sent, received = (
            layout_of_intervals(numel, [(0, numel if rank == holder else 0) for rank in range(4)]) for holder in (1, to)
        )
        return Parcels.of_plan(plan_transfer(sent, received), links, 1)

    wires, _ = Wires.pair(4, links)
    assert wires.exchange(parcels(8, 2), np.zeros(4)).came.tolist() == [0.0, 0.0, 8.0, 0.0]
    both = wires.exchange(parcels(1, 0), np.zeros(4))
    assert both.came.tolist() == both.left[[1, 0, 2, 3]].tolist() == [1.0, 0.0, 0.0, 0.0]
