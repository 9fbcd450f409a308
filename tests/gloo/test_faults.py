"""Faults end a job on all ranks within seconds, and a restart loses nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hydra.ranks.channel import Channel
from ds_hydra.step.strategy_runtime import StrategyRuntime
from ds_hydra.testing import run_ranks
from ds_hydra.watchdog import IDLE, Watchdog
from ds_hydra.zero_hetero.errors import NumericsError
from tests.support.ends import all_told, codes
from tests.support.fault_job import (
    ACTIVITIES,
    ASSEMBLY,
    FAULTS,
    KINDS,
    MODES,
    PHASES,
    REST_OF_ASSEMBLY,
    Case,
    Fault,
    drawn,
    orphans,
    run_job,
    wrong,
)
from tests.support.small_job import same, small_config, small_engine, whole_state
from tools import aims, machine


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each rank ends with where nothing goes wrong."""
    return run_job(tmp_path_factory.mktemp("straight"), 4, 3).digests


DRAWN = [("SIGKILL", "forward", 1), ("SIGSTOP", "push", 0), ("exception", "saving", 3)]
ALL = itertools.product(FAULTS, PHASES, (0, 1, 3))


@pytest.mark.parametrize(
    ("kind", "phase", "rank"),
    [pytest.param(*one, marks=pytest.mark.drawn if one in DRAWN else pytest.mark.long) for one in ALL],
)
def test_a_fault_ends_all_ranks_and_a_restart_goes_on(
    kind: str, phase: str, rank: int, undisturbed: list[str], tmp_path: Path
) -> None:
    outcome = run_job(tmp_path / "faulty", 4, 3, fault=Fault(kind, phase, rank, 1))
    assert outcome.fired
    assert not orphans(outcome.ends)
    if kind == "SIGTERM":
        assert codes(outcome.ends) == [0] * 4
    else:
        most = machine.limit(aims.FROZEN_S if kind == "SIGSTOP" else aims.DEAD_S, waits=True)
        assert max(end.seconds for end in outcome.ends) < most.here, most
        assert all(codes(outcome.ends))
        assert f"rank {rank}" in all_told(outcome.ends)
    again = run_job(tmp_path / "faulty", 4, 3)
    assert codes(again.ends) == [0] * 4
    assert again.digests == undisturbed


CASES = drawn(200)
CHOSEN = [
    Case("SIGKILL", "backward", "V", 0),
    Case("memory", "planning", "ahead", 1),
    Case("bug", "planning", "ahead", 0),
    *(Case("memory", "assembly", "plain", 1, part) for part in (*ASSEMBLY, *REST_OF_ASSEMBLY)),
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.drawn, id=str(case)) for case in (*CASES[2:4], *CHOSEN)]
    + [pytest.param(case, marks=pytest.mark.long, id=f"{n} {case}") for n, case in enumerate(CASES) if n not in (2, 3)],
)
def test_a_drawn_fault_ends_as_promised(case: Case) -> None:
    """In time, with the promised codes, and with one cause."""
    assert wrong(case) == []


def test_cases_are_of_every_kind() -> None:
    assert {case.kind for case in CASES} == set(KINDS)
    assert {case.activity for case in CASES} == set(ACTIVITIES)
    assert {case.mode for case in CASES} == set(MODES)
    assert drawn(200) == CASES


@pytest.mark.long
def test_ranks_that_are_slow_are_neither_dead_nor_frozen(tmp_path: Path) -> None:
    """Slowed five times, by pulses of SIGSTOP on all of them: training ends."""

    def slow(pids: Sequence[int]) -> None:
        def pulse() -> None:
            deadline = time.monotonic() + 60.0
            with contextlib.suppress(ProcessLookupError):
                while time.monotonic() < deadline:
                    for on, pause in ((signal.SIGSTOP, 0.8), (signal.SIGCONT, 0.2)):
                        for pid in pids:
                            os.kill(pid, on)
                        time.sleep(pause)

        threading.Thread(target=pulse, daemon=True).start()

    outcome = run_job(tmp_path, 4, 200, every=50, during=slow, limit_s=400)
    assert codes(outcome.ends) == [0] * 4, all_told(outcome.ends)


@pytest.mark.long
def test_what_a_rank_holds_stays_over_many_steps(tmp_path: Path) -> None:
    """Another strategy in each step, saved in the background: memory in MiB, descriptors and threads."""

    def held() -> tuple[int, int, int]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        descriptors, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
        return pages * os.sysconf("SC_PAGE_SIZE") // 2**20, descriptors, threads

    def run(rank: int) -> list[tuple[int, int, int]]:
        block = {"dir": str(tmp_path), "every": 10, "keep_last": 2, "asynchronous": True}
        engine, found = small_engine(rank, checkpoint=block, faults={"frozen_seconds": 9.0}), []
        for _ in range(2):
            for _ in range(1000):
                engine.train_batch()
            engine.wait_for_checkpoint()
            found.append(held())
        engine.destroy()
        return found

    for before, after in run_ranks(run, 4, timeout=3600):
        assert after[0] <= before[0] + max(10, before[0] // 20)
        assert after[1] <= before[1]
        assert after[2] <= before[2] + 1


def test_signals_save_and_leave_or_go_on(tmp_path: Path) -> None:
    """SIGUSR1 on one rank saves on all and goes on; SIGTERM on another saves and exits with 0."""

    def run(rank: int) -> tuple[list[str], int, object]:
        engine = small_engine(rank, checkpoint={"dir": str(tmp_path)})
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        engine.train_batch()
        found = sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".")
        engine.train_batch()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        code: object = None
        try:
            engine.train_batch()
        except SystemExit as leave:
            code = leave.code
        return found, engine.global_steps, code

    assert run_ranks(run, 2) == [(["global_step1", "latest"], 3, 0)] * 2
    assert (tmp_path / "latest").read_text() == "global_step3"


@pytest.mark.drawn
def test_a_loss_that_is_not_finite_skips_the_step_everywhere() -> None:
    """NaN in one micro-batch of one pipeline: no rank updates, the sequences are named, and too many end the job."""
    from ds_hydra.pipe.runtime import StageRuntime

    def run(rank: int) -> tuple[bool, int, bool, list[str], str]:
        import logging

        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ds_hydra").addHandler(handler)
        engine = small_engine(rank, faults={"frozen_seconds": 0, "skipped_steps": 2})
        engine.train_batch()
        before = whole_state(engine)
        forward = StageRuntime._forward

        def poisoned(self: Any, run: Any, at: Any) -> None:
            forward(self, run, at)
            if self.parts[0].place.is_last and rank == 3:
                run.outputs[at] = run.outputs[at] * float("nan")
                run.loss = run.loss * float("nan")
                self.losses[at[0]] = run.loss

        StageRuntime._forward = poisoned  # type: ignore[method-assign]
        engine.train_batch()
        unchanged = same(before, whole_state(engine))
        message = ""
        try:
            engine.train_batch()
        except NumericsError as error:
            message = str(error)
        StageRuntime._forward = forward  # type: ignore[method-assign]
        engine.train_batch()
        moved = not same(before, whole_state(engine))
        return unchanged, engine.skipped_steps, moved, [line for line in lines if "skipped, not" in line], message

    results = run_ranks(run, 4)
    for unchanged, skipped, moved, _, message in results:
        assert unchanged
        assert skipped == 2
        assert moved
        assert "2 steps in a row" in message
    assert "step 2" in results[0][3][0]
    assert "rank 3" in results[0][3][0]
    assert "sequences" in results[0][3][0]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("bucket", "bf16", "node_size"),
    [(0, False, 4), (2, True, 4), (-1, False, 4), (1, False, 2), (2, True, 3)],
)  # fmt: skip
def test_a_changed_bit_in_a_parameter_is_noticed_before_the_update(bucket: int, bf16: bool, node_size: int) -> None:
    """Strategies change; in step 3 one bit flips on rank 2 after its pull. Without a flip nothing is found."""

    def run(rank: int) -> tuple[int, str, bool]:
        faults = {"frozen_seconds": 0, "compare_every": 1}
        config = small_config(4, faults=faults, node_size=node_size)
        engine = small_engine(rank, config=config | {"bf16": {"enabled": bf16}})
        for _ in range(2):
            engine.train_batch()
        before, message = whole_state(engine), ""
        train = StrategyRuntime.train

        def flipped(self: StrategyRuntime, *args: Any, **how: Any) -> Any:
            loss = train(self, *args, **how)
            buffer = self.pulls.buffers[bucket] if rank == 2 else torch.empty(0)
            if buffer.numel():
                buffer.view(torch.uint8)[buffer.numel() // 2] ^= 4
            return loss

        StrategyRuntime.train = flipped  # type: ignore[method-assign]
        try:
            engine.train_batch()
        except NumericsError as error:
            message = str(error)
        return engine.global_steps, message, same(before, whole_state(engine))

    for steps, message, unchanged in run_ranks(run, 4):
        assert steps == 2
        assert "rank 2 from rank" in message
        assert unchanged


def test_who_leaves_between_two_steps_ends_nothing() -> None:
    def run(rank: int) -> list[str]:
        ended: list[str] = []
        where = {"now": (7, "forward")}
        dog = Watchdog(Channel(None, rank, 3), lambda: where["now"], heartbeat_s=0.2, frozen_s=2.0, end=ended.append)
        time.sleep(0.5)
        where["now"] = (8, IDLE)
        if rank == 2:
            time.sleep(0.3)
            dog.close()
        time.sleep(1.5)
        return ended

    assert run_ranks(run, 3) == [[], [], []]


def test_strangers_are_refused() -> None:
    """Whoever does not know the job's secret is not heard, and cannot end the job."""

    def run(rank: int) -> tuple[list[str], tuple[str, int] | None]:
        ended: list[str] = []
        meeting = Channel(None, rank, 2)
        dog = Watchdog(meeting, lambda: (1, "push"), heartbeat_s=0.2, frozen_s=5.0, end=ended.append)
        address = dog.address
        if rank == 1 and address is not None:
            for data in (
                b"GET / HTTP/1.1\r\n\r\n",
                os.urandom(4096),
                b"\0" * 16 + b'\0\0\0\x30{"rank": 1}' + b"\0" * 40,
            ):
                with socket.create_connection(address, timeout=5) as client:
                    client.sendall(data)
        time.sleep(0.8)
        meeting.texts("")
        dog.close()
        return ended, address

    for ended, address in run_ranks(run, 2):
        assert ended == []
        assert address is not None
        assert address[0] == "127.0.0.1"


def half_config(num_ranks: int, **fp16: Any) -> dict[str, Any]:
    return {**small_config(num_ranks), "fp16": {"enabled": True, **fp16}}


@pytest.mark.drawn
def test_fp16_finds_its_scale_as_deepspeed_does(tmp_path: Path) -> None:
    """A scale that overflows comes down by DeepSpeed's rules, is saved, and training then follows FP32."""

    def run(rank: int) -> tuple[list[float], list[bool], list[float], bool]:
        engine = small_engine(rank, config=half_config(2, initial_scale_power=40, hysteresis=1, loss_scale_window=2))
        scales, skipped, losses = list[float](), list[bool](), list[float]()
        while len(losses) < 5:
            scales.append(engine.crew.loss_scale.value)
            loss = float(engine.train_batch())
            skipped.append(engine.last_step.skipped)
            if not skipped[-1]:
                losses.append(loss)
        engine.save_checkpoint(tmp_path)
        other = small_engine(rank, config=half_config(2, initial_scale_power=8))
        other.load_checkpoint(tmp_path)
        engine.train_batch()
        other.train_batch()
        equal = same(whole_state(engine), whole_state(other))
        return scales, skipped, losses, equal and engine.crew.loss_scale.value == other.crew.loss_scale.value

    scales, skipped, losses, equal = run_ranks(run, 2)[0]
    assert scales[0] == 2.0**40
    assert skipped[0]
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(2.0**40, 2, 1, 1, False)
    for scale, overflow in zip(scales, skipped, strict=True):
        assert scale == scaler.cur_scale
        scaler.cur_scale = scaler.cur_scale / 2 if overflow else scaler.cur_scale
        if overflow:
            scaler.last_overflow_iter = scaler.cur_iter
        else:
            good = scaler.cur_iter - scaler.last_overflow_iter - 1
            scaler.cur_scale *= 2 if good > 0 and good % 2 == 0 else 1
        scaler.cur_iter += 1
    assert equal
    assert losses[-1] < losses[0]


def test_fp16_follows_fp32() -> None:
    """With a fixed scale and the same sequences, losses and norms agree to FP16's precision."""

    def run(rank: int, half: bool) -> list[tuple[float, float]]:
        config = half_config(2, loss_scale=1024.0) if half else small_config(2)
        engine = small_engine(rank, config=config)
        return [(float(engine.train_batch()), float(engine.get_global_grad_norm())) for _ in range(3)]

    for (loss, norm), (expected, expected_norm) in zip(
        run_ranks(run, 2, True)[0], run_ranks(run, 2, False)[0], strict=True
    ):
        assert loss == pytest.approx(expected, rel=2e-3)
        assert norm == pytest.approx(expected_norm, rel=2e-2)


def test_a_rank_may_leave_at_once() -> None:
    def run(rank: int) -> list[str]:
        ended: list[str] = []
        meeting = Channel(None, rank, 3)
        if rank == 2:
            time.sleep(0.2)  # whoever comes last finds rank 0 still there
        Watchdog(meeting, lambda: (1, IDLE), heartbeat_s=0.2, frozen_s=5.0, end=ended.append).close()
        return ended

    for _ in range(3):
        assert run_ranks(run, 3) == [[], [], []]
