"""Stages measured by local shapes and on ranks, memory against the process's peak, and the profiling tool's life."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hydra.costs.memory import JobMemory
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.profiling.fit import Point, Rung, entry_from_record, make_ladder
from ds_hydra.profiling.links import Collective, Counted, LinkFigure, Links
from ds_hydra.profiling.stage_memory import (
    kept_bytes,
    kept_for_slices,
    kept_until_weight,
    kept_when_recomputed,
    measure_activations,
    step_peak,
)
from ds_hydra.profiling.stage_timer import StageTimer, Timing, hollow_source
from ds_hydra.profiling.survey import RepeatBudget, Survey, distinct_stages
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.clock import HostClock
from tests.support.profiled import LINKS, SMALL, write_model

CPU = torch.device("cpu")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path)


@pytest.fixture
def source(model: Path) -> CausalLM:
    return hollow_source(model)


def wider(tmp_path: Path) -> CausalLM:
    """Large enough that the process's peak is the tensors' peak."""
    path = tmp_path / "wide.json"
    path.write_text(json.dumps({**SMALL, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 2048}))
    return hollow_source(path)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func._schema.name in ("aten::mm", "aten::addmm_")
        return func(*args, **(kwargs or {}))


def test_collectives_are_counted_with_the_bytes_of_the_real_ones(source: CausalLM) -> None:
    timing = StageTimer(source, ParallelScheme(tp=2), 0, CPU, torch.float32).time((40, 24))
    hidden = 64 * 32 * 4
    sizes = sorted(one.call.num_bytes for one in timing.calls)
    assert {one.call.operation for one in timing.calls} == {"all_reduce"}
    assert sizes.count(hidden) == 4 * 4 + 1 + 1  # layers forward and backward, embeddings, head's backward
    timing = StageTimer(source, ParallelScheme(sp=2), 0, CPU, torch.float32).time((40, 24))
    assert [one.call.operation for one in timing.calls] == [
        "all_to_all"
    ] * 4 * 4  # q, k, v there and back, output likewise


def test_messages_of_ranks_on_two_nodes_are_counted_as_what_stays_in_a_node_and_what_leaves_it(
    source: CausalLM,
) -> None:
    """Of 64 tokens the first two of four ranks compute 45, and hold 32, whose keys and values the others need."""
    timing = StageTimer(source, ParallelScheme(sp=4), 0, CPU, torch.float32, near=2).time((64,))
    layers, half = 4, source.text_config.hidden_size // 2 * 4  # bytes of a token's two query heads of a rank
    assert Counter(one.call[:2] for one in timing.calls) == {("all_to_all", 2): 4 * layers, ("p2p", 2): 4 * layers}
    assert {one.call.num_bytes for one in timing.calls if one.call.operation == "p2p"} == {32 * half, 13 * half}


def test_of_shared_tokens_the_messages_beside_products_are_hidden(model: Path) -> None:
    """By a clock that counts matrix products: of the ten collectives of a layer those of its blocks' backward, the rows
    that travel while their gradient is computed, and its sum, while the weights' gradients are."""
    products = Products()
    source = hollow_source(model, StageOptions(token_sharding=True))
    clock = HostClock(lambda: float(products.number))
    timer = StageTimer(source, ParallelScheme(tp=2, pp=4), 1, CPU, torch.float32, clock=clock)
    with products:
        calls = timer.time((40, 24)).calls
    assert len(calls) == 10
    assert [one.waited_s - one.started_s for one in calls] == [0] * 5 + [2, 2, 0, 3, 3], calls


@pytest.mark.parametrize("scheme", [ParallelScheme(sp=2), ParallelScheme(tp=2)])
def test_standing_in_for_ranks_is_timed_by_the_same_clock(source: CausalLM, scheme: ParallelScheme) -> None:
    """CPU time hardly moves while others have the machine, wall time does: their difference would be below 0."""
    timer = StageTimer(source, scheme, 0, CPU, torch.float32, clock=HostClock(lambda: 7.0))
    assert timer.time((40, 24)).ms == 0.0


def test_parts_make_the_whole_and_ask_for_the_same_collectives(source: CausalLM) -> None:
    timer = StageTimer(source, ParallelScheme(tp=2, pp=2), 1, CPU, torch.float32)
    parameters = timer.module.parameters

    def gradients() -> dict[str, torch.Tensor]:
        """What has added up since it was last called."""
        sums = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        assert sums.keys() == parameters.keys()
        found = {name: total.clone() for name, total in sums.items()}
        for total in sums.values():
            total.zero_()
        return found

    torch.manual_seed(7)
    calls, whole = timer.time((40, 24), warm_up=0).calls, gradients()
    torch.manual_seed(7)
    parts, split = timer.time_parts((40, 24)), gradients()
    assert sorted(one.call for part in parts for one in part.calls) == sorted(one.call for one in calls)
    assert not parts[2].calls, "no weight's gradient waits for a message"
    assert all(part.ms > 0 for part in parts)
    assert not timer.queue.unfinished
    torch.testing.assert_close(split, whole)
    assert all(part.ms > 0 for part in timer.time_parts((8,), 24))


def test_what_is_kept_for_weights_and_slices_is_what_a_layer_counts(model: Path, source: CausalLM) -> None:
    timer = StageTimer(source, ParallelScheme(pp=4), 1, CPU, torch.float32)
    kept = kept_bytes(timer, (16,)) / 16
    keys_and_values = 2 * 16 * 4  # features of 2 heads, in FP32
    masks = (8 * 8 + 8 * 16) * (4 + 1) / 16  # a CPU's attention keeps those of slices, a device's has none
    masks += 8 * 4 * 32 / 16  # and makes its output in another order, of which the next layer keeps a copy
    assert keys_and_values <= kept * kept_for_slices(timer, 16) <= keys_and_values + masks
    inputs, gradients = 32 + 32 + 32 + 64, 32 + 16 + 16 + 32 + 64 + 64 + 32
    assert kept * kept_until_weight(timer, 16) == pytest.approx(4 * (inputs + gradients), rel=0.05)
    random_state = 2 * torch.get_rng_state().nbytes / 16  # as it was when each slice's layer ran first
    inputs_only = kept * kept_when_recomputed(timer, 16) - keys_and_values - random_state
    assert 4 * 32 <= inputs_only <= 1.25 * 4 * 32 + 2 * 4 * 32, "the input and output of the stage's one layer at most"
    checkpointed = hollow_source(model, StageOptions(activation_checkpointing=True))
    again = StageTimer(checkpointed, ParallelScheme(pp=4), 1, CPU, torch.float32)
    assert kept_until_weight(again, 16) < 0.05
    assert kept_when_recomputed(again, 16) == 1.0


def test_only_stages_that_can_be_slowest_are_measured() -> None:
    assert distinct_stages(4, ParallelScheme()) == (0,)
    assert distinct_stages(4, ParallelScheme(pp=2)) == (0, 1)
    assert distinct_stages(12, ParallelScheme(pp=4)) == (0, 1, 3)


def survey_two_schemes(rank: int, source: CausalLM) -> list[dict[str, object]]:
    rungs = make_ladder(16, 128, 3)
    survey = Survey(source, CPU, torch.float32, LINKS, rungs, budget=RepeatBudget(0.01, 2, 2))
    measured = [
        survey.measure(scheme) for scheme in (ParallelScheme(tp=2), ParallelScheme(sp=2), ParallelScheme(2, 1, 2))
    ]
    return [entry.record() for entry in measured if entry is not None]


@pytest.mark.drawn
def test_schemes_that_fit_the_ranks_run_there_and_wider_ones_by_local_shapes(source: CausalLM) -> None:
    first, second = run_ranks(survey_two_schemes, 2, source)
    assert first == second  # every rank knows the same
    assert [entry["how"] for entry in first] == ["ranks", "ranks", "local shapes"]
    assert [entry["scaled_links"] for entry in first] == [False, False, False]
    again = entry_from_record(ParallelScheme(tp=2), json.loads(json.dumps(first[0])))
    assert again.record() == first[0]
    assert again.cost(1000).load_ms([100]) > 0


def test_where_a_host_launches_packs_grow_until_the_device_is_the_slower_one(
    source: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def point(_: StageTimer, rung: Rung) -> Point:
        return Point(rung.lengths, max(40.0, 0.1 * sum(rung.lengths)), held_out=rung.held_out)

    survey = Survey(source, CPU, torch.float32, LINKS, make_ladder(16, 128, 3), most_tokens=4096)
    monkeypatch.setattr(survey, "_launched", True)
    monkeypatch.setattr(survey, "_split_points", lambda *_: ())
    monkeypatch.setattr(survey, "_point", point)
    entry = survey.measure(ParallelScheme())
    assert entry is not None
    assert (entry.slowest.fit.floor, entry.slowest.fit.b) == pytest.approx((40.0, 0.1))
    assert entry.cost(4096).floor == pytest.approx(40.0)
    most = max(sum(point.lengths) for point in entry.slowest.points)
    assert 3.0 * 40.0 < 0.1 * most < 8.0 * 40.0, "far enough above the floor, and then no further"


def _timing(times: Iterator[float]) -> tuple[Timing, ...]:
    return (Timing(next(times), ()),)


def test_repeats_go_on_while_a_host_is_disturbed(source: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    survey = Survey(source, CPU, torch.float32, LINKS, make_ladder(16, 128, 3), budget=RepeatBudget(1e-9, 3, 12))
    monkeypatch.setattr(survey, "_launched", True)
    timer = StageTimer(source, ParallelScheme(), 0, CPU, torch.float32)
    for disturbed, repeats in ((0, 3), (2, 6), (5, 12)):
        found = survey._samples(timer, partial(_timing, iter([10.0] + [15.0] * disturbed + [10.0] * 12)), 1)
        assert found is not None
        assert len(found[0].ms) == repeats
        assert sorted(found[0].ms)[repeats // 2] == 10.0


def test_message_and_collective_times_come_from_the_links(source: CausalLM) -> None:
    rungs = make_ladder(16, 128, 3)
    slow = Links(tuple(LinkFigure(f.operation, 2, 50_000.0, 1e9) for f in LINKS.figures))
    survey = Survey(source, CPU, torch.float32, slow, rungs, budget=RepeatBudget(0.01, 2, 2))
    entry = survey.measure(ParallelScheme(tp=2, pp=2))
    assert entry is not None
    assert all(point.comm_ms > 8 * 50 for stage in entry.stages for point in stage.points)


def test_predicted_peak_is_that_of_a_step(tmp_path: Path) -> None:
    source = wider(tmp_path)
    figures = {(1, 1): measure_activations(source, 1, 1, CPU, torch.float32, 512)}
    memory = JobMemory(source.plan, 1, figures, 4, vocab=2048)
    needs = memory.needs(ParallelScheme(), 0)
    peak = step_peak(StageTimer(source, ParallelScheme(), 0, CPU, torch.float32), (1024,))
    assert (needs.total(1024) - needs.states) / peak == pytest.approx(1.0, abs=0.05)


def test_activations_shrink_with_tp_and_sp(source: CausalLM) -> None:
    whole, tp, sp = (
        measure_activations(source, *degrees, CPU, torch.float32, 64) for degrees in ((1, 1), (2, 1), (1, 2))
    )
    exchanged = 4 * 32 / 2  # what attention makes is kept before and after the heads are exchanged
    assert sp.layer == pytest.approx(whole.layer / 2 + exchanged, rel=0.02)
    assert whole.layer / 2 < tp.layer < whole.layer


@pytest.mark.gpu
def test_predicted_peak_is_the_allocators(tmp_path: Path) -> None:
    source, device = wider(tmp_path), torch.device("cuda")
    figures = {(1, 1): measure_activations(source, 1, 1, device, torch.bfloat16, 2048)}
    needs = JobMemory(source.plan, 1, figures, 2, vocab=2048).needs(ParallelScheme(), 0)
    peak = step_peak(StageTimer(source, ParallelScheme(), 0, device, torch.bfloat16), (8192,))
    assert (needs.total(8192) - needs.states) / peak == pytest.approx(1.0, abs=0.08)


def test_no_group_is_needed_to_measure() -> None:
    assert not dist.is_initialized()


def test_all_to_alls_over_two_nodes_are_priced_at_the_links_between_them() -> None:
    names, speeds = ("all_to_all", "all_reduce"), {False: 1e9, True: 1e8}
    links = Links(tuple(LinkFigure(name, 2, 0.0, speeds[across], across) for name in names for across in speeds))
    survey = object.__new__(Survey)
    survey._links, survey._node_size = links, 4
    calls = [Counted(Collective(name, 2, 10**6), 0.0, 0.0) for name in names]
    # What goes to one rank of another node, and what stays in one.
    links = Links((*links.figures, *(LinkFigure("p2p", 2, 0.0, speeds[across], across) for across in speeds)))
    survey._links = links
    wide: Any = SimpleNamespace(scheme=ParallelScheme(2, 1, 4))
    assert survey._collectives_ms(wide, [calls[0], Counted(Collective("p2p", 2, 10**6), 0.0, 0.0)]) == 1.0 + 10.0
    for scheme, ms in ((ParallelScheme(2, 1, 2), 2.0), (ParallelScheme(4, 1, 2), 11.0), (ParallelScheme(8), 20.0)):
        timer = SimpleNamespace(scheme=scheme)
        assert survey._collectives_ms(timer, calls) == pytest.approx(ms)  # type: ignore[arg-type]
