"""Training goes on when ranks die in any phase: masters and moments equal a stop and a restart, to the bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.elastic import copies, going_on
from ds_hydra.engine.checked import listed_for_others
from ds_hydra.host.environment import MEMBERS_FOLDER
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.elastic_cells import COURSES, MODES, PHASES, PLACES, PLAIN, STEPS, Cell, Course, Judge, drawn
from tests.support.elastic_job import Loss, run_elastic
from tests.support.small_job import sequences, small_engine


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(tmp_path_factory.mktemp("stopped"))


@pytest.mark.drawn
@pytest.mark.parametrize(
    "cell",
    [
        Cell("SIGSEGV", "pull", "coordinator", "plain"),
        pytest.param(Cell("exception", "forward", "middle", "plain"), marks=pytest.mark.long),
        Cell("SIGKILL", "update", "coordinator", "plain"),  # all have voted: the others complete the step
        Cell("os._exit", "saving", "middle", "slices"),
        Cell("SIGSTOP", "push", "coordinator", "plain"),
        pytest.param(Cell("SIGKILL", "joining", "middle", "plain"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_others_go_on(cell: Cell, judge: Judge) -> None:
    assert judge.wrong(cell.course) == []


@pytest.mark.long
@pytest.mark.parametrize("number", range(240))
def test_the_others_go_on_in_drawn_cells(number: int, judge: Judge) -> None:
    """Of the matrix of kinds, phases, places and modes; copies are kept on devices and on hosts in turns."""
    course = drawn(number + 1)[number].course
    assert judge.wrong(replace(course, redundancy="host" if number % 2 else "device")) == [], course.name


_DRAWN = ("a second one while voted", "a second one while rebuilding", "a second one while taking",
               "a share and its copy")  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize(
    "course",
    [pytest.param(one, marks=() if one.name in _DRAWN else pytest.mark.long) for one in COURSES],
    ids=lambda course: course.name,
)
def test_what_befalls_a_job(course: Course, judge: Judge) -> None:
    assert judge.wrong(course) == []


@pytest.mark.drawn
@pytest.mark.parametrize(
    "course",
    [
        Cell("SIGKILL", "update", "coordinator", "LoRA").course,
        Cell("os._exit", "push", "middle", "phases").course,
        Cell("SIGKILL", "joining", "middle", "ahead").course,
        next(one for one in COURSES if one.name == "a second one while re-sharding"),
    ],
    ids=lambda course: course.name,
)
def test_copies_on_the_host_equal_their_owners(course: Course, judge: Judge) -> None:
    """They are compared in each step, too."""
    assert judge.wrong(replace(course, redundancy="host")) == []


def test_copies_for_which_the_host_has_no_memory_are_refused_before_step_0(tmp_path: Path) -> None:
    def refused(rank: int) -> str:
        os.environ[MEMBERS_FOLDER] = str(tmp_path)
        little = mock.patch.object(copies, "available_bytes", return_value=1 << 10)
        with little, pytest.raises(ConfigError) as said:
            small_engine(rank, strategies=["2*tp1"], elastic={"redundancy": "host"})
        return str(said.value)

    assert all("the copies of the 2 ranks" in text and '"device" or "off"' in text for text in run_ranks(refused, 2))


@pytest.mark.drawn
def test_the_judgement_can_fail(judge: Judge) -> None:
    """Of a job that lost nobody; and steps of other ranks come to other bits."""
    course = Course("nothing", ())
    assert judge.wrong(course) == ["nothing was lost"]
    assert judge.of_legs("plain", [(4, 2), (3, STEPS)])[0] != judge.of_legs("plain", [(4, 3), (3, STEPS)])[0]


def test_drawn_cells_are_of_every_kind() -> None:
    cells = drawn(60)
    assert {cell.phase for cell in cells} == set(PHASES)
    assert {cell.place for cell in cells} == set(PLACES)
    assert {cell.mode for cell in cells} == set(MODES)
    assert cells == drawn(60)


@pytest.mark.drawn
def test_a_rank_that_has_left_a_save_goes_on_with_those_that_have_not(tmp_path: Path) -> None:
    """Member 3 dies when it has sent the last message of a save to members 0 and 1, and not to 2."""
    job = replace(PLAIN, hydra={"checkpoint": {"dir": str(tmp_path / "checkpoints"), "every": 1, "resume": False}})
    lost = [Loss("saved", 3, 2), Loss("saved", 2, 2, "behind")]
    result = run_elastic(tmp_path / "job", 4, STEPS, lost, job=job)
    assert result.codes == [0, 0, 0, -9], result.told
    assert result.legs(4, STEPS) == [(4, 2), (3, STEPS)]


@pytest.mark.drawn
def test_ranks_that_have_had_notice_leave_and_the_others_go_on(tmp_path: Path, judge: Judge) -> None:
    """Ranks 0 and 1 of four: rank 1 keeps the copy of rank 0, so one of them leaves a step later."""
    job = replace(PLAIN, hydra={"checkpoint": {"dir": str(tmp_path / "checkpoints"), "every": 1, "resume": False}})
    told = [Loss("forward", member, 0, "SIGTERM") for member in (0, 1)]
    result = run_elastic(tmp_path / "job", 4, 6, told, job=job)
    assert result.codes == [0, 0, 0, 0], result.told
    legs = [(4, 2), (3, 4), (2, 6)]
    assert result.legs(4, 6) == legs
    assert result.digests == judge.of_legs("plain", legs)[0]


@pytest.mark.drawn
def test_a_signal_to_all_ranks_saves_and_ends_though_one_hears_it_late(tmp_path: Path) -> None:
    job = replace(PLAIN, hydra={"checkpoint": {"dir": str(tmp_path / "checkpoints"), "every": 1000}})
    told = [Loss("forward", member, 1 if member else 2, "SIGTERM") for member in range(3)]
    result = run_elastic(tmp_path / "job", 3, 6, told, job=job)
    assert result.codes == [0, 0, 0], result.told
    assert not result.digests, "it has not come to its end"
    assert result.legs(3, 6) == [(3, 6)], "no other ranks have trained"
    assert (tmp_path / "checkpoints" / "global_step3").exists()


def _evaluated(engine: Any) -> Any:
    return engine.evaluate(sequences()[:6]).to_json()


def _gathered(engine: Any) -> Any:
    return {name: float(value.double().sum()) for name, value in engine.fp32_state_dict().items()}


def noted_by_others(lost: list[Loss], folder: Path, after_step: Callable[[Any], Any]) -> list[Any]:
    """What each of the ranks that are left of four has noted after its steps, all alike. The first step, whose rate is
    0, changes no weights."""
    result = run_elastic(folder, 4, STEPS, lost, job=replace(PLAIN, after_step=after_step))
    died = sum(one.kind != "behind" for one in lost)
    assert sorted(result.codes, key=str) == [-9] * died + [0] * (4 - died), result.told
    assert result.noted == [result.noted[0]] * (4 - died)
    assert len(result.noted[0]) == STEPS
    return result.noted[0]


@pytest.mark.drawn
def test_what_a_loss_cuts_short_is_made_again(tmp_path: Path) -> None:
    """An evaluation, then whole weights."""
    lost = [Loss("evaluating", 1, 1), Loss("gathering", 2, 3)]
    noted = noted_by_others(lost, tmp_path / "job", lambda engine: (_evaluated(engine), _gathered(engine)))
    assert [len(set(map(str, of))) for of in zip(*noted, strict=True)] == [STEPS - 1] * 2


@pytest.mark.drawn
@pytest.mark.parametrize(("at_end", "after_step"), [("evaluated", _evaluated), ("gathered", _gathered)])
def test_what_a_loss_interrupts_at_its_end_is_there_or_told(at_end: str, after_step: Any, tmp_path: Path) -> None:
    noted = noted_by_others([Loss(at_end, 3, 2), Loss(at_end, 2, 2, "behind")], tmp_path / "job", after_step)
    assert len(set(map(str, noted))) == STEPS - 1


def test_a_loss_while_weights_are_taken_one_by_one_ends_the_job(tmp_path: Path) -> None:
    result = run_elastic(tmp_path / "job", 3, STEPS, [], job=replace(PLAIN, after_step=_exported))
    assert result.codes == [75, -9, 75], result.told
    assert "full_parameters(), which cannot be begun again" in result.told[0]


def _exported(engine: Any) -> None:
    """Member 1 dies at the tenth weight of the second step."""
    for number, _ in enumerate(engine.full_parameters()):
        if (number, engine.global_steps, engine.global_rank) == (10, 2, 1):
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.drawn
def test_where_no_strategy_fits_those_that_are_left_all_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unfit(config: HydraConfig, num_ranks: int) -> HydraConfig:
        return replace(config, strategies=(f"tp{num_ranks}",))  # 3, of 4 heads of keys and values

    monkeypatch.setattr(going_on, "config_for", unfit)
    result = run_elastic(tmp_path / "job", 4, STEPS, [Loss("forward", 1, 2)], job=PLAIN)
    assert result.codes == [75, -9, 75, 75], result.told
    assert "the ranks that are left cannot go on" in result.told[0]


@pytest.mark.drawn
def test_where_no_strategy_fits_those_that_would_be_they_go_on_without_who_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = going_on.config_for

    def unfit(config: HydraConfig, num_ranks: int) -> HydraConfig:
        return replace(config, strategies=("tp3 + tp1",)) if num_ranks == 4 else usual(config, num_ranks)

    monkeypatch.setattr(going_on, "config_for", unfit)
    job = replace(PLAIN, after_step=lambda engine: sorted(engine.going_on.agent._machine.unfit))
    result = run_elastic(tmp_path / "job", 3, STEPS, [], job=job, joins_in=[1])
    assert result.noted == [[[], *([[4]] * (STEPS - 1))]] * 3
    assert result.codes[:3] == [0, 0, 0], result.told
    assert result.codes[3] not in (0, None), result.told
    assert result.legs(3, STEPS) == [(3, 2), (3, STEPS)], result.told
    assert "4 ranks cannot train together" in result.told[0]
    assert "tp=3" in result.told[3]


@pytest.mark.drawn
def test_strategies_to_go_on_with_are_checked_before_step_0_and_not_again(tmp_path: Path) -> None:
    """Nor where a process joins, which is told."""
    checked = replace(PLAIN, strategies={3: ["3*tp1"], 2: ["tp2"]}, hydra={"self_check": "on"})
    result = run_elastic(tmp_path / "job", 3, 5, [Loss("forward", 1, 1)], job=checked, joins_in=[2])
    assert result.codes == [0, -9, 0, 0], result.told
    assert "".join(result.told).count("kinds of pipelines train as one process does") == 1
    assert result.legs(3, 5) == [(3, 1), (2, 3), (3, 5)]


@pytest.mark.drawn
def test_a_process_joins_at_the_end_of_a_step_and_one_of_another_job_is_refused(tmp_path: Path, judge: Judge) -> None:
    result = run_elastic(tmp_path / "job", 3, STEPS, [], job=PLAIN, joins_in=[2], refuses=True)
    assert result.codes == [0, 0, 0, 0, 78], result.told
    assert "its model" in result.told[4]
    assert "which goes on without it" in result.told[4]
    assert result.legs(3, STEPS) == [(3, 3), (4, STEPS)]
    digests, losses = judge.of_legs("plain", [(3, 3), (4, STEPS)])
    assert result.digests == digests
    assert result.losses[0] == pytest.approx(losses, rel=1e-6)
    assert result.losses[3] == pytest.approx(losses[3:], rel=1e-6)


@pytest.mark.drawn
def test_without_copies_processes_join_and_a_loss_ends_the_job(tmp_path: Path, judge: Judge) -> None:
    without = {"redundancy": "off"}
    result = run_elastic(tmp_path / "grown", 2, STEPS, [], job=PLAIN, joins_in=[1], elastic=without)
    assert result.codes == [0, 0, 0], result.told
    legs = [(2, 2), (3, STEPS)]
    assert result.legs(2, STEPS) == legs
    assert result.digests == judge.of_legs("plain", legs)[0]
    result = run_elastic(tmp_path / "lost", 3, STEPS, [Loss("forward", 1, 2)], job=PLAIN, elastic=without)
    assert result.codes == [75, -9, 75], result.told
    assert all('redundancy is "off"' in result.told[rank] for rank in (0, 2))


@pytest.mark.long
def test_a_rank_that_was_alone_for_some_steps_has_others_again_and_loses_one(tmp_path: Path, judge: Judge) -> None:
    lost = [Loss("forward", 1, 1), Loss("forward", 2, 5)]
    result = run_elastic(tmp_path / "job", 2, 7, lost, job=PLAIN, joins_in=[3, 4])
    assert result.codes == [0, -9, -9, 0], result.told
    legs = [(2, 1), (1, 4), (2, 5), (3, 5), (2, 7)]
    assert result.legs(2, 7) == legs
    assert result.digests == judge.of_legs("plain", legs)[0]


@pytest.mark.parametrize(
    ("num", "launched", "said"),
    [
        (2, False, "'ds-hydra launch' in place of 'deepspeed'"),
        (1, True, "at least 2 ranks"),
        (2, True, "tp=3"),  # of 4 heads of keys and values
    ],
)
def test_a_job_that_could_not_go_on_is_refused_before_step_0(
    num: int, launched: bool, said: str, tmp_path: Path
) -> None:
    def listed_late(job: Any) -> Any:
        time.sleep(1.0)
        return listed_for_others(job)

    def refused(rank: int) -> str:
        if launched:
            os.environ[MEMBERS_FOLDER] = str(tmp_path)
        # Each rank finds by itself what is refused; the last one when the others have left the job.
        late = mock.patch("ds_hydra.engine.prepare.listed_for_others", side_effect=listed_late)
        with late if rank == 1 else nullcontext(), pytest.raises((ConfigError, PlanError)) as caught:
            small_engine(rank, strategies=[f"{num}*tp1"], elastic={"strategies": {"3": ["tp3"]}})
        return str(caught.value)

    assert all(said in text for text in run_ranks(refused, num))
