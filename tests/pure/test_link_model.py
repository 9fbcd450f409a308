"""The link model: transfers inside and between nodes, ports, collectives as the cost table prices them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds_hydra.profiling.links import Collective, Counted, LinkFigure, Links, exposed_ms
from ds_hydra.simulate.links import BETWEEN, LinkModel, Port, Speed
from ds_hydra.zero_hetero.errors import ConfigError

MODEL = LinkModel(4, inside=Speed(1e-6, 1e9), between=Speed(5e-6, 1e8))


def test_a_transfer_takes_latency_and_bytes_over_bandwidth_of_its_link() -> None:
    assert MODEL.transfer_s(0, 3, 1000) == pytest.approx(1e-6 + 1e-6)
    assert MODEL.transfer_s(3, 4, 1000) == pytest.approx(5e-6 + 1e-5)
    assert MODEL.transfer_s(5, 5, 1000) == 0.0


def test_a_port_serves_one_transfer_at_a_time() -> None:
    """Two senders with a latency of 1 and wire times of 4, as the note tells it."""
    senders, receiver = [Port(), Port()], Port()
    heads = [port.serve(0.0, 4.0) + 1.0 for port in senders]
    assert [receiver.serve(head, 4.0) + 4.0 for head in heads] == [5.0, 9.0]
    assert [port.free_s for port in senders] == [4.0, 4.0]
    assert receiver.serve(20.0, 1.0) == 20.0


def test_collectives_are_those_of_the_table_or_else_rings() -> None:
    figures = Links((LinkFigure("all_gather", 2, 7.0, 1e9), LinkFigure("p2p", 2, 3.0, 2e9)))
    model = LinkModel.of_table(figures.to_record(), 8)
    assert model.inside == Speed(3e-6, 2e9)
    assert model.between == BETWEEN
    call = Collective("all_gather", 4, 1 << 20)
    assert model.collective_s("all_gather", range(4), 1 << 20) == pytest.approx(figures.ms(call) / 1e3)
    # Nothing is known of all-reduces, nor of anything between nodes: rings of 4 and of 9 ranks.
    assert model.collective_s("all_reduce", range(4), 4000) == pytest.approx(6 * (3e-6 + 1000 / 2e9))
    assert model.collective_s("all_gather", range(9), 9000) == pytest.approx(8 * (20e-6 + 1000 / 2.5e10))
    assert model.collective_s("all_gather", [3], 9000) == 0.0
    # What a user gives wins over what was measured.
    assert LinkModel.of_table(figures.to_record(), 8, inside=Speed(0.0, 5.0)).inside == Speed(0.0, 5.0)


def test_two_classes_send_to_each_other_as_the_slower_one() -> None:
    def record(us: float, rate: float, between: float) -> dict[str, Any]:
        return Links((LinkFigure("p2p", 2, us, rate), LinkFigure("p2p", 2, us, between, inter_node=True))).to_record()

    links = {"classes": {"h20": record(3.0, 7e11, 4e10), "h800": record(5.0, 3e11, 5e10)}}
    model = LinkModel.of_table(links, 2, devices=("h20", "h20", "h800", "h800", "h20", "h800"))
    pairs = {(0, 1): (3.0, 7e11), (2, 3): (5.0, 3e11), (0, 2): (5.0, 4e10), (0, 4): (3.0, 4e10), (4, 5): (5.0, 3e11),
             (3, 5): (5.0, 5e10)}  # fmt: skip
    for (src, dst), (us, rate) in pairs.items():
        assert model.speed(src, dst) == model.speed(dst, src) == Speed(us / 1e6, rate)
    assert model.slowest((0, 2, 3)) == Speed(5e-6, 4e10)
    latency, rates, crosses = model.of_pairs(*np.array(list(pairs)).T)
    assert (latency * 1e6).tolist() == pytest.approx([us for us, _ in pairs.values()])
    assert rates.tolist() == [rate for _, rate in pairs.values()]
    assert crosses.tolist() == [False, False, True, True, False, True]
    # A class whose table has no links has the others'.
    half = LinkModel.of_table({"classes": {"h20": record(3.0, 7e11, 4e10)}}, 2, devices=("h20", "l40", "l40", "l40"))
    assert half.speed(2, 3) == half.inside == Speed(3e-6, 7e11)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LinkModel(0), "a node of 0 ranks"),
        (lambda: LinkModel(8, inside=Speed(-1.0, 1.0)), "inside a node"),
        (lambda: LinkModel(8, between=Speed(0.0, 0.0)), "between nodes"),
        (lambda: LinkModel.of_table({"links": []}, 8, place="a.json"), "a.json"),
        (lambda: MODEL.collective_s("gossip", range(4), 1), "gossip"),
    ],
)
def test_bad_links_are_refused(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("moments", "ms", "added"),
    [
        ([("all_gather", 0.0, 0.0)], [3.0], 3.0),
        ([("all_gather", 0.0, 0.002)], [3.0], 1.0),
        ([("all_gather", 0.0, 0.004), ("all_reduce", 0.0, 0.004)], [3.0, 3.0], 2.0),  # one after the other
        ([("all_gather", 0.0, 0.004), ("all_to_all", 0.0, 0.004)], [3.0, 3.0], 0.0),  # over two communicators
        ([("all_gather", 0.0, 0.0), ("all_gather", 0.001, 0.002)], [3.0, 2.0], 4.0),  # the first holds up the second
    ],
)
def test_computing_between_start_and_wait_hides_a_collective(
    moments: list[tuple[str, float, float]], ms: list[float], added: float
) -> None:
    counted = [Counted(Collective(operation, 4, 8), begun, waited) for operation, begun, waited in moments]
    assert exposed_ms(counted, ms) == pytest.approx(added)
