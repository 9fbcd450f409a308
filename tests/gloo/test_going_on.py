"""Training goes on when ranks die in any phase: masters and moments equal a stop and a restart, to the bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_hydra.host.environment import MEMBERS_FOLDER
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.elastic_job import Loss, restarted, run_elastic
from tests.support.small_job import small_engine

OF_4, OF_3, OF_2 = ["tp2 + 2*tp1", "pp2 + 2*tp1", "4*tp1"], ["3*tp1", "tp2 + tp1"], ["tp2", "2*tp1"]
ELASTIC = {"strategies": {"3": OF_3, "2": OF_2}, "compare_every": 1}
STEPS = 5


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Checkpoints of an undisturbed run after two and three steps, and its losses."""
    folder = tmp_path_factory.mktemp("stopped")

    def train(rank: int) -> list[float]:
        engine, losses = small_engine(rank, strategies=OF_4), []
        for _ in range(3):
            losses.append(float(engine.train_batch()))
            engine.save_checkpoint(folder)
        engine.destroy()
        return losses

    return folder, run_ranks(train, 4)[0]


@pytest.fixture(scope="module")
def of_3(stopped: tuple[Path, list[float]]) -> dict[int, tuple[list[str], list[float]]]:
    """Digests by rank, and all losses, of a restart on three ranks after that many steps."""
    folder, losses = stopped
    found = {}
    for step in (2, 3):
        ends = run_ranks(restarted, 3, folder, f"global_step{step}", STEPS, OF_3)
        found[step] = [digest for digest, _ in ends], [*losses[:step], *ends[0][1]]
    return found


@pytest.mark.parametrize(
    ("phase", "member", "kind", "first"),
    [
        ("planning", 3, "SIGKILL", 2),
        ("pull", 0, "SIGSEGV", 2),
        ("forward", 1, "exception", 2),
        ("push", 0, "SIGKILL", 2),
        ("buddy", 2, "SIGKILL", 2),
        ("update", 0, "SIGKILL", 3),  # all have voted: the others complete the step
        ("after the update", 1, "SIGKILL", 3),
    ],
)
def test_the_others_go_on(
    phase: str, member: int, kind: str, first: int, of_3: dict[int, tuple[list[str], list[float]]], tmp_path: Path
) -> None:
    result = run_elastic(tmp_path / "job", 4, STEPS, [Loss(phase, member, 2, kind)], elastic=ELASTIC, strategies=OF_4)
    assert [code for rank, code in enumerate(result.codes) if rank != member] == [0, 0, 0], result.told
    assert result.codes[member] != 0
    digests, losses = of_3[first]
    assert result.digests == digests
    for own in result.losses:
        assert own == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("phase", ["re-sharding", "copying"])
def test_a_second_loss_while_the_first_is_dealt_with(
    phase: str, stopped: tuple[Path, list[float]], tmp_path: Path
) -> None:
    """Members 1 and 3 of 4, of which neither keeps the other's copy."""
    folder, _ = stopped
    ends = run_ranks(restarted, 2, folder, "global_step2", STEPS, OF_2)
    lost = [Loss("forward", 1, 2), Loss(phase, 3, 2)]
    result = run_elastic(tmp_path / "job", 4, STEPS, lost, elastic=ELASTIC, strategies=OF_4)
    assert result.codes == [0, -9, 0, -9], result.told
    assert result.digests == [digest for digest, _ in ends]


def test_a_share_that_is_lost_with_its_copy_ends_the_job(tmp_path: Path) -> None:
    lost = [Loss("forward", 1, 1), Loss("re-sharding", 2, 1)]
    result = run_elastic(tmp_path / "job", 4, 3, lost, elastic=ELASTIC, strategies=OF_4)
    assert result.codes == [75, -9, -9, 75]
    assert "members 1 and 2 are gone" in result.told[0]


def test_a_process_joins_at_the_end_of_a_step_and_one_of_another_job_is_refused(tmp_path: Path) -> None:
    def stopped_at_3(rank: int) -> list[float]:
        engine = small_engine(rank, strategies=OF_3)
        losses = [float(engine.train_batch()) for _ in range(3)]
        engine.save_checkpoint(tmp_path / "stopped")
        engine.destroy()
        return losses

    losses = run_ranks(stopped_at_3, 3)[0]
    ends = run_ranks(restarted, 4, tmp_path / "stopped", "global_step3", STEPS, OF_4)
    elastic = {"strategies": {"4": OF_4}, "compare_every": 1}
    result = run_elastic(tmp_path / "job", 3, STEPS, [], joins_in=2, elastic=elastic, strategies=OF_3)
    assert result.codes == [0, 0, 0, 0, 78], result.told
    assert "its model" in result.told[4]
    assert "which goes on without it" in result.told[4]
    assert result.digests == [digest for digest, _ in ends]
    assert result.losses[0] == pytest.approx([*losses, *ends[0][1]], rel=1e-6)
    assert result.losses[3] == pytest.approx(ends[0][1], rel=1e-6)


@pytest.mark.parametrize(
    ("num", "launched", "said"),
    [(2, False, "'ds-hydra launch' in place of 'deepspeed'"), (1, True, "at least 2 ranks")],
)
def test_a_job_that_could_not_go_on_is_refused_before_step_0(
    num: int, launched: bool, said: str, tmp_path: Path
) -> None:
    def refused(rank: int) -> str:
        if launched:
            os.environ[MEMBERS_FOLDER] = str(tmp_path)
        with pytest.raises(ConfigError) as caught:
            small_engine(rank, strategies=[f"{num}*tp1"], elastic=ELASTIC)
        return str(caught.value)

    assert all(said in text for text in run_ranks(refused, num))
