"""Stages measured by local shapes and on ranks; the profiling tool's life; memory to the byte, and none left."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

import ds_hydra
import ds_hydra.engine.engine
from ds_hydra.commands.profile import Session
from ds_hydra.commands.profile import main as profile_main
from ds_hydra.config.hydra_block import parse_config
from ds_hydra.costs.analytic import model_shape
from ds_hydra.costs.cost_table import CostTable, read_table_file
from ds_hydra.costs.memory import ElementBytes, JobMemory, RankBytes, push_turns, rank_bytes
from ds_hydra.engine.costs import describe_job, job_cost_table
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.runtime import StageRuntime
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
from ds_hydra.step import strategy_runtime
from ds_hydra.step.strategy_runtime import PeakMemory
from ds_hydra.step.update import Update
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero import scratch_plan
from ds_hydra.zero_hetero.clock import HostClock
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.families import kept_in_fp32
from tests.support.planner_cases import room_for_pushes
from tests.support.profiled import LINKS, SMALL, write_model
from tests.support.small_job import LENGTHS, small_config, small_engine

# --- Stages measured by local shapes and on ranks, memory against the process's peak, and the profiling tool's
# life.
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


@pytest.mark.parametrize(
    ("device", "dtype", "tokens", "off"),
    [("cpu", torch.float32, 1024, 0.05), pytest.param("cuda", torch.bfloat16, 8192, 0.08, marks=pytest.mark.gpu)],
)
def test_predicted_peak_is_that_of_a_step(
    device: str, dtype: torch.dtype, tokens: int, off: float, tmp_path: Path
) -> None:
    source, on = wider(tmp_path), torch.device(device)
    figures = {(1, 1): measure_activations(source, 1, 1, on, dtype, 512 if device == "cpu" else 2048)}
    needs = JobMemory(source.plan, 1, figures, dtype.itemsize, vocab=2048).needs(ParallelScheme(), 0)
    peak = step_peak(StageTimer(source, ParallelScheme(), 0, on, dtype), (tokens,))
    assert (needs.total(tokens) - needs.states) / peak == pytest.approx(1.0, abs=off)


def test_activations_shrink_with_tp_and_sp(source: CausalLM) -> None:
    whole, tp, sp = (
        measure_activations(source, *degrees, CPU, torch.float32, 64) for degrees in ((1, 1), (2, 1), (1, 2))
    )
    exchanged = 4 * 32 / 2  # what attention makes is kept before and after the heads are exchanged
    assert sp.layer == pytest.approx(whole.layer / 2 + exchanged, rel=0.02)
    assert whole.layer / 2 < tp.layer < whole.layer


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


# --- The profiling tool's life: a table that a job takes, a run that goes on where it was interrupted, bad
# input.
def profile(model: Path, out: Path, *more: str) -> int:
    links = out.with_name("links.json")
    links.write_text(json.dumps(LINKS.to_record()))
    return profile_main(
        ["--model", str(model), "--gpus", "2", "--out", str(out), "--links", str(links), "--ranks", "1", "--rungs", "3",
         "--seconds", "0.005", "--clock", "cpu", "--quick", *more]
    )  # fmt: skip


@pytest.mark.drawn
def test_the_tool_writes_a_table_that_a_job_takes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.json"
    assert profile(model, out, "--schemes", "tp1", "sp2") in (0, 1)  # 1: noise above the aims
    assert "ds-hydra profile: 2 schemes in" in capsys.readouterr().out
    assert profile(model, out, "--schemes", "pp2", "--merge") in (0, 1)
    assert [str(s) for s in CostTable.load(out).schemes] == ["tp1", "sp2", "pp2"]
    found = read_table_file(out)
    assert found.job is not None
    assert found.measured is not None
    assert found.measured["sp2"]["how"] == "local shapes"
    for cost in found.table.costs:
        assert cost.shares is not None
        assert 0.1 < cost.shares.forward.b <= 0.6
        assert found.activations is not None
        assert cost.shares.context == found.activations[cost.uniform.tp, cost.uniform.sp].context
    assert not list(tmp_path.glob("*.partial"))

    parsed = parse_config({"hydra": {"tokens_per_step": 64, "strategies": ["2*tp1", "sp2"], "cost_table": str(out)}})
    assert parsed is not None
    source = hollow_source(model, parsed.hydra.stage_options)
    shape = model_shape(source.plan, 32, 96)
    job = describe_job(source, CPU, torch.float32, 2)
    assert job_cost_table(parsed.hydra, shape, (), 64, job).table == found.table
    with pytest.raises(ConfigError, match=r"(?s)not measured for this job.*dtype.*'bfloat16'"):
        job_cost_table(parsed.hydra, shape, (), 64, describe_job(source, CPU, torch.bfloat16, 2))


@pytest.mark.drawn
def test_an_interrupted_run_goes_on_where_it_was(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, measured = tmp_path / "table.json", []
    real = Session.save_partial

    def interrupt(self: Session) -> None:
        real(self)
        measured.append(len(self.done))
        if len(self.done) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Session, "save_partial", interrupt)
    assert profile(model, out, "--schemes", "tp1", "pp2") == 130
    assert not out.exists()
    assert "1 of 2 schemes" in capsys.readouterr().out
    assert profile(model, out, "--schemes", "tp1", "pp2") in (0, 1)
    assert "going on after 1 schemes" in capsys.readouterr().out
    assert measured == [0, 1, 2]


def longest_of(rank: int, model: Path, table: Path) -> int:
    """MaxLen of tp1 that a job of 2 ranks takes from a table, whose figure is of whole sequences."""
    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    rank_environment(rank)
    block = {"tokens_per_step": 64, "strategies": ["2*tp1"], "cost_table": str(table), "steps_file": None,
             "planner": {"ahead": 0}, "self_check": "off", "chunks": "off"}  # fmt: skip
    config = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "hydra": block}
    job = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    engine: Any = ds_hydra.initialize(model=job, training_data=[[3] * 20] * 4, config=config)[0]
    engine.destroy()
    return engine.crew.plans.table[ParallelScheme()].max_length


@pytest.mark.drawn
def test_maxlen_of_a_measured_table_follows_the_number_of_ranks(model: Path, tmp_path: Path) -> None:
    """Fewer ranks share the masters, so each has less room for tokens than in the job that the table was made for."""
    found = {}
    for gpus in ("2", "8"):
        out = tmp_path / f"table{gpus}.json"
        assert profile(model, out, "--schemes", "tp1", "--gpus", gpus) in (0, 1)
        limit = CostTable.load(out)[ParallelScheme()].max_length
        found[gpus] = (limit, *run_ranks(longest_of, 2, model, out))
    assert found["2"][0] == found["2"][1] == found["2"][2]
    assert found["8"][0] > found["8"][1] == found["8"][2]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schemes", "tp3"), "cannot be cut by tp3"),
        (("--schemes", "tp1", "--device_memory", "0.00001"), "no scheme fits"),
        (("--longest", "1"), "shortest < longest"),
        (("--schemes", "tq2"), "cannot read the term"),
        (("--model", "missing.json"), "does not exist"),
    ],
)
def test_bad_input_is_told(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert profile(model, tmp_path / "t.json", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()


# --- A rank that has no memory left says for which tokens, what was predicted, and which setting needs less.
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB"


def told(rank: int, where: tuple[type, str], peak: int) -> str:
    """What a rank says whose device is full when it comes to a method for the second time, in its second step."""
    engine, calls = small_engine(rank, tokens_per_step=130), 0
    engine.train_batch()
    method = getattr(*where)

    def full(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (2 if where[0] is StageRuntime else 1):
            raise torch.OutOfMemoryError(FULL)
        return method(*args, **options)

    allocated = mock.patch.object(PeakMemory, "read", return_value=peak)
    with mock.patch.object(*where, full), allocated, pytest.raises(torch.OutOfMemoryError) as found:
        engine.train_batch()
    return str(found.value)


@pytest.mark.parametrize(
    ("peak", "remedy"),
    [
        (1 << 20, "Others hold memory of this device, or it is in pieces"),
        (1 << 40, "The prediction is too low: measure this model with `ds-hydra profile`"),
    ],
)
def test_the_micro_batch_its_tokens_both_peaks_and_the_setting_are_named(peak: int, remedy: str) -> None:
    (text,) = run_ranks(told, 1, (StageRuntime, "_backward"), peak, timeout=120)
    # The second step has the sequences 3 to 6, of 33, 90, 64 and 9 tokens, in micro-batches as the table allows.
    found = text.partition("in the backward of micro-batch 1 (")[2]
    tokens, _, rest = found.partition(" tokens, sequences ")
    ids = [int(number) for number in rest.partition(")")[0].split(", ")]
    assert int(tokens) == sum(LENGTHS[number] for number in ids)
    assert "), in stage 0 of tp1 under tp1: " in text
    assert f"{'1.0 MiB' if peak == 1 << 20 else '1024.00 GiB'} were given out at the most" in text
    assert re.search(
        r"[\d.]+ MiB are predicted for its micro-batches of up to \d+ tokens, [\d.]+ MiB of them for", text
    )
    assert remedy in text
    assert "hydra.activation_checkpointing and a larger tp, sp or pp in hydra.strategies need less" in text
    assert text.endswith(FULL)


def test_what_does_not_depend_on_tokens_says_so() -> None:
    (text,) = run_ranks(told, 1, (Update, "apply"), 0, timeout=120)
    assert text.startswith("rank 0 has no memory left between the passes of a step")
    assert "Take the most demanding strategy out of hydra.strategies" in text


# --- What the memory model counts for a rank is what its runtimes hold, to the byte; gaps in it change no
# value; and which pushes wait for memory.
SIZES = {"fp32": 4, "bf16": 2}


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("grad_dtype", "wire", "node_size", "kept"),
    [
        ("fp32", "bf16", 4, ""), ("bf16", "bf16", 2, ""), ("bf16", "fp32", 4, ""), ("fp32", "bf16", 3, ""),
        ("fp32", "bf16", 4, "trained"), ("bf16", "fp32", 3, "frozen"),
    ],
)  # fmt: skip
def test_every_rank_holds_what_is_counted(grad_dtype: str, wire: str, node_size: int, kept: str) -> None:
    """Also where the model keeps some parameters in FP32."""
    model = kept_in_fp32(4)[0].float() if kept else None
    if model is not None and kept == "frozen":
        model.model.layers[2:].requires_grad_(False)

    def run(rank: int) -> list[tuple[RankBytes, RankBytes, int]]:
        room = 20_000  # bytes: for some pushes and not for all
        with (
            mock.patch.object(scratch_plan, "AT_ONCE", 300),
            mock.patch.object(strategy_runtime, "room_for_pushes", return_value=room),
            room_for_pushes(room),
        ):
            return steps(rank)

    def steps(rank: int) -> list[tuple[RankBytes, RankBytes, int]]:
        config = small_config(4, node_size=node_size)
        config["hydra"]["strategies"] = [*config["hydra"]["strategies"], "tp2pp2/v"]
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": grad_dtype}}
        config |= {"communication_data_type": wire}
        engine = small_engine(rank, model, config)
        assert engine.job.source.plan.frozen_wide == bool(kept)  # the biases of its routers are never trained
        found, waiting = [], 0
        for _ in config["hydra"]["strategies"]:
            engine.train_batch()
            stepper, world = engine.crew.stepper, engine.crew.world
            runtime = stepper.runtimes.built[engine.last_step.strategy]
            arena = stepper.arena
            held = RankBytes(
                sum(buffer.nbytes for buffer in runtime.pulls.buffers), runtime.gradient_bytes, arena.scratch.num_bytes
            )
            element = ElementBytes(2, SIZES[grad_dtype], wire=SIZES[wire])
            plan, strategy = engine.job.source.plan, runtime.strategy
            counted = rank_bytes(plan, strategy, element, node_size=world.node_size)[rank]
            turns = push_turns(plan, strategy, element, node_size=world.node_size)[:, rank]
            assert [window.after for window in runtime.pushes._windows] == turns.tolist()
            found.append((held, counted, arena.params.nbytes + arena.grads.nbytes))
            waiting += int(turns.any())
        assert waiting, "some pushes wait for memory"
        return found

    for rows in run_ranks(run, 4, timeout=120):
        assert [held for held, _, _ in rows] == [counted for _, counted, _ in rows]
        assert {room for _, _, room in rows} == {max(held.params + held.grads for held, _, _ in rows)}
        assert len({held for held, _, _ in rows}) > 1, "strategies differ in what they hold"
