"""Where sequences come from: ranks hand them in, a stream, data that change; lengths that are scanned."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import numpy as np
import pytest
import torch
from torch import Tensor

import ds_hydra
import ds_hydra.engine.engine
from ds_hydra.data.lengths import ItemLengths, keep, kept, read_part
from ds_hydra.data.sequences import SequenceData
from ds_hydra.engine import prepare
from ds_hydra.engine.data import read_twice, scan_together
from ds_hydra.engine.plans import STEPS as STEPS_SEEN
from ds_hydra.entry import accept
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, StepPlan
from ds_hydra.ranks.channel import first_channel
from ds_hydra.step.delivery import runners
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.small_job import (
    LENGTHS,
    REAL_STREAMS,
    STREAMS,
    Plain,
    Stateful,
    find_before_forks,
    lines_of,
    of_datasets,
    padded,
    same,
    sequences,
    small_config,
    small_engine,
    small_source,
    told,
    whole_state,
)
from tests.support.strict import Rules, strict_world

# --- Steps from sequences that ranks hand in: the update of map-style data, whoever has them, and errors on all
# ranks.
STEPS = 3


def quarter(rank: int, batch: list[Tensor]) -> Any:
    """A fourth for each rank, each in another form."""
    part = batch[rank * len(batch) // 4 : (rank + 1) * len(batch) // 4]
    forms: list[Callable[[], Any]] = [
        lambda: [one.tolist() for one in part],
        lambda: padded(part),
        lambda: [{"input_ids": np.asarray(one)} for one in part],
        lambda: iter([part, "never taken"]),
    ]
    return forms[rank]() if part else []


def all_on(owner: int) -> Callable[[int, list[Tensor]], Any]:
    return lambda rank, batch: batch if rank == owner else []


def halves(rank: int, batch: list[Tensor]) -> Any:
    """Two ranks have something, the others have iterators that have ended."""
    half = len(batch) // 2
    return {0: batch[:half], 2: batch[half:]}.get(rank, iter(()))


def of_map_style(rank: int) -> tuple[list[tuple[int, ...]], list[dict[str, Tensor]], list[float]]:
    engine = small_engine(rank)
    losses = [float(engine.train_batch()) for _ in range(STEPS)]
    return [engine.sampler.batch(step) for step in range(STEPS)], [whole_state(engine)], losses


def handed_in(
    rank: int, share: Callable[[int, list[Tensor]], Any], drawn: list[tuple[int, ...]], strict: Rules | None
) -> tuple[dict[str, Tensor], list[float], list[int]]:
    with contextlib.nullcontext() if strict is None else strict_world(strict):
        engine, data = small_engine(rank, data=None), sequences()
        losses = [float(engine.train_batch(share(rank, [data[i] for i in ids]))) for ids in drawn]
        return whole_state(engine), losses, [engine.global_samples, engine.last_step.num_tokens]


@pytest.fixture(scope="module")
def expected() -> Any:
    return run_ranks(of_map_style, 4)[0]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("share", "strict"),
    [
        pytest.param(quarter, None, marks=pytest.mark.long),
        (all_on(0), None),
        (all_on(3), Rules(connect=True)),
        (halves, Rules(blocking=True)),
    ],
)
def test_the_update_is_that_of_map_style_data(expected: Any, share: Any, strict: Rules | None) -> None:
    drawn, (state,), losses = expected
    data = sequences()
    for found, own_losses, (samples, tokens) in run_ranks(handed_in, 4, share, drawn, strict):
        assert own_losses == losses
        assert same(found, state)
        assert samples == sum(map(len, drawn))
        assert tokens == sum(len(data[i]) for i in drawn[-1])


def errors(rank: int) -> list[str]:
    engine = small_engine(rank, data=None, strategies=["2*tp1"], context_length=200)
    good = [[5, 6, 7, 8]] * 3
    texts = []

    def broken() -> Any:
        raise OSError("the disk is gone")
        yield

    for bad in ([[5, 6], [5, 6, 99]], [{"text": "x"}], broken(), [[5] * 201], [], iter(()), 17):
        texts.append(told(partial(engine.train_batch, bad if rank == 1 or not bad else good)))
    texts.append(told(partial(engine.train_batch, iter(()))))
    texts.append(f"{float(engine.train_batch(good)):.6f} {engine.global_steps}")
    return texts


def test_errors_reach_all_ranks_with_rank_and_item_and_training_goes_on() -> None:
    first, second = run_ranks(errors, 2)
    assert first[:2] + first[3:] == second[:2] + second[3:]
    assert second[2] == "OSError: the disk is gone", "the rank that read keeps its own error"
    assert "failed on rank 1: item 1 of the data holds the token id 99" in first[0]
    assert "failed on rank 1: item 0 of the data has the columns ['text']" in first[1]
    assert "failed on rank 1: OSError: the disk is gone" in first[2]
    assert "item 0 of the data has 201 tokens" in first[3]
    assert "no rank handed in a sequence" in first[4]
    assert first[5] == "no error", "a rank whose iterator has ended has none"
    assert "failed on rank 1: item 0 of the data" in first[6]
    assert first[7] == "StopIteration: the iterators of all ranks have ended"
    assert first[8].endswith(" 2")


def too_long(rank: int, ahead: int) -> list[str]:
    engine = small_engine(rank, data=None, strategies=["2*tp1"], planner={"ahead": ahead})
    table = engine.crew.plans.table
    costs = tuple(replace(cost, max_length=50, util_length=50) for cost in table.costs)
    engine.crew.plans.use_table(replace(table, costs=costs))
    texts = [told(partial(engine.train_batch, [[5] * length] if rank == 1 else [])) for length in (51, 50)]
    engine.destroy()
    return texts


@pytest.mark.parametrize("ahead", [0, 2])
def test_what_no_strategy_holds_is_refused_on_all_ranks(ahead: int) -> None:
    first, second = run_ranks(too_long, 2, ahead)
    assert first[0].startswith("PlanError")
    assert "51" in first[0]
    assert second[0] == f"PlanError: planning step 1 failed on rank 0: {first[0].removeprefix('PlanError: ')}"
    assert first[1] == second[1] == "no error"


def test_training_data_and_handed_in_sequences_exclude_each_other() -> None:
    def job(rank: int) -> str:
        return told(partial(small_engine(rank).train_batch, [[1, 2, 3]]))

    assert "beside training_data" in run_ranks(job, 1)[0]


def test_only_the_ranks_that_run_a_sequence_get_it() -> None:
    shape = StrategyShape.parse("tp2 + 2*tp1")
    lengths = (9, 5, 4)
    pipelines = tuple(
        PipelinePlan(piece, tuple(MicroBatchPlan.of_whole([one], lengths) for one in of), 1.0)
        for piece, of in zip(shape.pipelines, ((0, 2), (1,), ()), strict=True)
    )
    plan = StepPlan(0, (7, 8, 9), lengths, (Phase(pipelines),), 1.0)
    assert runners(plan, [place_strategy(shape, 4, 4)]) == [{0, 1}, {2}, {0, 1}]


def test_what_a_step_has_need_not_be_known_before() -> None:
    """The first job that a user writes: a context, and nothing else; candidates are proposed all the same."""

    def run(rank: int) -> tuple[int, list[str], float]:
        block = {"context_length": 128, "self_check": "off", "steps_file": None}
        engine = small_engine(rank, data=None, config={"optimizer": {"type": "AdamW"}, "hydra": block})
        loss = float(engine.train_batch([one.tolist() for one in sequences()[rank::2]]))
        return engine.hydra_config.tokens_per_step, list(map(str, engine.crew.prepared.strategies)), loss

    (tokens, candidates, loss), other = run_ranks(run, 2)
    assert (tokens, candidates, loss) == other
    assert tokens == 2 * 128
    assert candidates
    assert 3.0 < loss < 6.0


@pytest.mark.parametrize(
    ("data", "missing"), [([[1, 2, 3]] * 9, "hydra.tokens_per_step"), (None, "hydra.context_length")]
)
def test_sizes_that_nothing_tells_are_asked_for(data: Any, missing: str) -> None:
    def run(rank: int) -> str:
        config = {"optimizer": {"type": "AdamW"}, "hydra": {"strategies": ["2*tp1"]}}
        return told(lambda: small_engine(rank, data=data, config=config))

    for text in run_ranks(run, 2):
        assert f"{missing} is missing" in text


@pytest.mark.parametrize(("longest", "count"), [(8, 1), (9, 0)])
def test_steps_that_are_all_short_are_told_once(longest: int, count: int) -> None:
    """An eighth of the context, in the first steps; what comes later is not waited for."""

    def run(rank: int) -> list[str]:
        lines = lines_of()
        engine = small_engine(rank, data=None, strategies=["2*tp1"], context_length=64, planner={"ahead": 0})
        for step in range(STEPS_SEEN + 2):
            engine.train_batch([[5] * (longest if step == 3 else 7)])
        return [line for line in lines if "context_length" in line]

    first, second = run_ranks(run, 2)
    assert (len(first), len(second)) == (count, 0)
    for line in first:
        assert (
            "the longest of the 100 sequences of the first 50 steps has 8 tokens, and hydra.context_length is 64"
            in line
        )


# --- Training on a stream: rank 0 reads it, every number of ranks trains the same, and a restart goes on
# exactly.
STREAMED = 5


def streaming(rank: int, stream: Any, ahead: int = 0, **hydra: Any) -> Any:
    return small_engine(rank, data=stream, context_length=128, planner={"ahead": ahead}, **hydra)


def undisturbed(rank: int, kind: Any) -> tuple[list[dict[str, Tensor]], list[float], int]:
    stream = kind(sequences())
    engine = streaming(rank, stream)
    states, losses = [], []
    for _ in range(STREAMED):
        losses.append(float(engine.train_batch()))
        states.append(whole_state(engine))
    engine.destroy()
    return states, losses, getattr(stream, "reads", -1)


def interrupted(rank: int, kind: Any, ahead: int, folder: Path, states: list[dict[str, Tensor]]) -> list[int]:
    """Stop after two steps and go on in a new engine, twice: the steps whose states differ."""
    differ = []
    engine = streaming(rank, kind(sequences()), ahead)
    for again in (2, 2, 1):
        for _ in range(again):
            engine.train_batch()
            if not same(whole_state(engine), states[engine.global_steps - 1]):
                differ.append(engine.global_steps)
        if engine.global_steps < STREAMED:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = streaming(rank, kind(sequences()), ahead)
            engine.load_checkpoint(folder)
    engine.destroy()
    return differ


@pytest.mark.parametrize(
    ("kind", "ahead", "num_ranks"),
    [
        pytest.param(Stateful, 2, 2, marks=pytest.mark.drawn),
        *(
            pytest.param(kind, 2 * (kind in (Stateful, of_datasets)), num_ranks, marks=pytest.mark.long)
            for kind in (*STREAMS, *REAL_STREAMS)
            for num_ranks in (2, 4)
        ),
    ],
)
def test_stopped_in_the_middle_is_the_undisturbed_run(kind: Any, ahead: int, num_ranks: int, tmp_path: Path) -> None:
    found = run_ranks(undisturbed, num_ranks, kind)
    states, losses, reads = found[0]
    assert not same(states[0], states[1])
    assert losses == found[1][1]
    assert reads != 0
    assert found[1][2] <= 0, "rank 0 alone reads"
    assert run_ranks(interrupted, num_ranks, kind, ahead, tmp_path, states, timeout=200) == [[]] * num_ranks


def given(rank: int) -> dict[str, Tensor]:
    """The same steps, handed in."""
    engine = small_engine(rank, data=None)
    data = sequences()
    at = 0
    for _ in range(3):
        step: list[Tensor] = []
        while sum(map(len, step)) < 250:
            step.append(data[at % len(data)])
            at += 1
        engine.train_batch(step if rank == 1 else [])
    return whole_state(engine)


@pytest.mark.drawn
def test_a_stream_trains_as_its_items_do() -> None:
    states = run_ranks(undisturbed, 2, Plain)[0][0]
    assert same(run_ranks(given, 2)[0], states[2])


class Broken:
    """Gives a few good items and then one that cannot be trained on."""

    def __iter__(self) -> Any:
        yield from sequences()[:8]
        yield {"text": "x"}


def failing(rank: int) -> str:
    engine = streaming(rank, Broken())
    text = told(lambda: [engine.train_batch() for _ in range(4)])
    return f"{engine.global_steps} {text}"


def test_a_bad_item_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_hydra.watchdog import watchdog

    monkeypatch.setattr(watchdog, "end_process", lambda text: None)
    first, second = run_ranks(failing, 2)
    assert first.startswith("1 ConfigError: item 8 of the data has the columns ['text']")
    assert second.startswith("1 ConfigError: planning step 2 failed on rank 0: item 8 of the data")


def hidden(rank: int) -> list[bool]:
    engine = streaming(rank, Plain(sequences()), ahead=2, choose="best")
    found = []
    for _ in range(4):
        engine.train_batch()
        found.append(engine.last_step.planning_hidden)
        time.sleep(1.0)  # a step as long as those that planning hides behind
    engine.destroy()
    return found


def test_planning_hides_behind_training() -> None:
    assert all(run_ranks(hidden, 1)[0][2:])


def test_the_loader_makes_the_steps_that_are_left() -> None:
    def job(rank: int) -> list[int]:
        rows: Any = [[5] * 40] * 9
        engine = streaming(rank, torch.utils.data.DataLoader(rows, collate_fn=lambda x: x), total_steps=3)
        engine.train_batch()
        steps = [number for number in engine.training_dataloader if engine.train_batch() is not None]
        engine.destroy()
        return [*steps, engine.global_steps, len(engine.training_dataloader)]

    assert run_ranks(job, 1)[0] == [1, 2, 3, 3]


# --- Data that a script changes between steps: read when a step begins, or refused where they were read ahead.
class Staged:
    """Tokens that follow from a stage, which may be the script's or an attribute of the data."""

    def __init__(self, held: dict[str, int] | None) -> None:
        self.items, self.lengths, self.stage, self.noted, self._held = sequences(), LENGTHS, 0, 0, held

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        stage = self.stage if self._held is None else self._held["stage"]
        return torch.as_tensor(self.items[index]) // (1 + stage)


def trained(rank: int, ahead: int, outside: bool, stages: tuple[int, ...]) -> Any:
    held: dict[str, int] | None = {"stage": 0} if outside else None
    data = Staged(held)
    engine = small_engine(rank, data=data, planner={"ahead": ahead})
    for stage in stages:
        data.noted += 1  # which changes no sequence
        if held is None:
            data.stage = stage
        else:
            held["stage"] = stage
        if ahead and stage:
            return told(engine.train_batch)
        engine.train_batch()
    return whole_state(engine)


@pytest.mark.parametrize("outside", [False, True])
def test_a_stage_that_comes_too_late_is_refused(outside: bool) -> None:
    (text,) = run_ranks(trained, 1, 1, outside, (0, 0, 1))
    assert "were changed before step 3, whose sequences are read while the step before it runs" in text
    assert '"planner": {"ahead": 0}' in text
    assert outside or "noted is 3 now" in text or "stage is 1 now" in text


@pytest.mark.drawn
def test_without_reading_ahead_a_stage_begins_with_its_step() -> None:
    one, other = (run_ranks(trained, 2, 0, outside, (0, 1, 2)) for outside in (False, True))
    still = run_ranks(trained, 2, 1, False, (0, 0, 0))
    assert all(map(same, one, other))
    assert not any(map(same, one, still))


# --- Lengths of data that do not tell them: read by all ranks together, kept for the next start, refused on all
# alike.
class Counted:
    """Items whose reads are counted; with a fingerprint, as `datasets` has one."""

    def __init__(self, items: list[Any], fingerprint: str | None = None):
        self.items, self.reads, self._fingerprint = items, 0, fingerprint

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.items[index]


ITEMS = [
    [1] * 5,
    {"input_ids": [2] * 9, "seq_lengths": [4, 5]},
    [3] * 7,
    {"input_ids": [4] * 3},
    {"input_ids": [5] * 6, "seq_lengths": [1, 2, 3]},
    [6] * 8,
    [7] * 2,
]
FOUND, COUNTS = [5, 4, 5, 7, 3, 1, 2, 3, 8, 2], [1, 2, 1, 1, 3, 1, 1]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ds_hydra" / "lengths"


def test_parts_are_joined_in_order() -> None:
    for num_parts in (1, 2, 3, 7, 9):
        found = ItemLengths.joined(read_part(ITEMS, part, num_parts) for part in range(num_parts))
        assert (found.lengths.tolist(), found.counts.tolist()) == (FOUND, COUNTS)


def together(rank: int, items: list[Any], fingerprint: str | None) -> list[Any]:
    data = Counted(items, fingerprint)
    try:
        with first_channel() as channel:
            found = scan_together(data, channel)
    except ConfigError as error:
        return [str(error)]
    assert found is not None
    lengths = SequenceData(data, scanned=found)._full_lengths
    return [lengths.tolist(), data.reads]


@pytest.mark.parametrize("fingerprint", [None, "a1b2"])
def test_each_rank_reads_its_part_once_and_none_the_second_time(cache: Path, fingerprint: str | None) -> None:
    looks = 1 + len(ITEMS)  # at the first item, and at all to compare them
    found = run_ranks(together, 3, ITEMS, fingerprint)
    assert [lengths for lengths, _ in found] == [FOUND] * 3
    assert [reads - looks for _, reads in found] == [2, 2, 3]
    again = run_ranks(together, 2, ITEMS, fingerprint)
    assert [lengths for lengths, _ in again] == [FOUND] * 2
    assert [reads - looks for _, reads in again] == ([3, 4] if fingerprint is None else [-7, -7])
    assert cache.exists() == (fingerprint is not None)


def test_a_bad_item_stops_all_that_scan() -> None:
    first, second = run_ranks(together, 2, [*ITEMS, {"text": "x"}], "a1b2")
    assert "failed on rank 1: item 7 of the data has the columns ['text']" in first[0]
    assert "item 7 of the data has the columns ['text']" in second[0]


def test_what_is_kept_belongs_to_one_fingerprint_and_is_whole(cache: Path) -> None:
    data = Counted(ITEMS, "a1b2")
    assert kept(data) is None
    keep(data, read_part(data))
    again = kept(data)
    assert again is not None
    assert np.array_equal(again.lengths, FOUND)
    assert kept(Counted(ITEMS, "other")) is None
    assert kept(Counted(ITEMS[:-1], "a1b2")) is None
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:40])
    assert kept(data) is None
    for lengths, counts in (
        ([-1, *FOUND[1:]], COUNTS), ([2**61, *FOUND[1:]], COUNTS), ([FOUND], COUNTS), (np.ones(10), COUNTS),
        (FOUND, [2, 0, 1, 1, 3, 2**63 - 1, -(2**63)]), (["x"] * 10, COUNTS),
    ):  # fmt: skip
        np.savez(file, lengths=lengths, counts=counts)
        assert kept(data) is None
    keep(ITEMS, read_part(ITEMS))
    assert len(list(cache.iterdir())) == 1, "a list has no fingerprint"


class Drawn(Counted):
    """Items of which one token is drawn anew each time, or by the rank."""

    def __init__(self, rank: int | None):
        super().__init__([])
        self.items, self._rank = [[9] * 5] * 20, rank

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return [*super().__getitem__(index)[1:], self.reads if self._rank is None else self._rank]


@pytest.mark.parametrize(("by_rank", "words"), [(False, "when it is read again"), (True, "on rank 1 than on rank 0")])
def test_items_that_are_not_the_same_each_time_and_everywhere_are_refused(by_rank: bool, words: str) -> None:
    def run(rank: int) -> str:
        with first_channel() as channel:
            read_twice(SequenceData([[1, 2], [3, 4, 5]]), channel)
            return told(lambda: read_twice(SequenceData(Drawn(rank if by_rank else None)), channel))

    assert all(words in text for text in run_ranks(run, 2))


# --- hydra.lengths: "auto" proposes strategies for the lengths of a file where those of the job are not known
# ahead.
LONGEST = 120


def proposed_for(rank: int, data: Any, **hydra: Any) -> list[int]:
    """The lengths that strategies are proposed for on this rank, once a step has been trained."""
    seen: list[int] = []
    plain = prepare.propose

    def noted(job: Any, found: Any, memory: Any, lengths: Any, world: Any) -> Any:
        seen[:] = lengths
        return plain(job, found, memory, lengths, world)

    prepare.propose = noted
    settings = {"choose": "best", "context_length": LONGEST, "strategies": "auto"}
    config = small_config(2, **settings | hydra)
    config["hydra"]["strategies"] = "auto"
    engine = small_engine(rank, config=config, data=data)
    engine.train_batch(sequences()[rank : rank + 1]) if data is None else engine.train_batch()
    engine.destroy()
    return seen


def stream() -> Iterator[Any]:
    while True:
        yield from sequences()


@pytest.mark.parametrize(
    ("kind", "too_long", "expected"),
    [
        ("handed in", "error", [9, 30, LONGEST]),
        ("handed in", "truncate", [9, 30, LONGEST, LONGEST]),
        ("stream", "skip", [9, 30, LONGEST]),
        ("indexed", "error", list(LENGTHS)),
    ],
)
def test_strategies_are_proposed_for_the_lengths_of_a_file(
    kind: str, too_long: str, expected: list[int], tmp_path: Path
) -> None:
    find_before_forks()
    small_source()
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps([9, 30, 500]))

    def run(rank: int) -> list[int]:
        data = {"handed in": None, "indexed": sequences(), "stream": stream()}[kind]
        return proposed_for(rank, data, lengths=str(file), too_long=too_long)

    first, _ = run_ranks(run, 2)
    assert first == expected


def test_what_is_wrong_with_the_file_is_told_at_start(tmp_path: Path) -> None:
    def wrong(lengths: Any, **hydra: Any) -> str:
        return told(lambda: ds_hydra.check_config({"hydra": {"lengths": lengths, **hydra}}))

    file = tmp_path / "lengths.txt"
    file.write_text("500\n30x\n")
    assert "nowhere.txt" in wrong(str(tmp_path / "nowhere.txt"))
    assert "lengths.txt, line 2" in wrong(str(file))
    file.write_text("500\n300\n")
    assert "none of its 2 sequences fits context_length=200" in wrong(str(file), context_length=200)
    assert "must name a file, but is a list of 2" in wrong([500, 300])
    listed = accept({"hydra": {"lengths": "nowhere.txt", "strategies": ["tp1"]}}, ranks=1)
    assert listed is not None
    assert "hydra.lengths has no effect" in listed.notes[0]
