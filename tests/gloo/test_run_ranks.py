"""What `run_ranks` says of a rank that gives no result: where it hangs, and how it left."""

from __future__ import annotations

import os
import time

import pytest

from ds_hydra.testing import RankError, run_ranks


def test_a_rank_that_hangs_tells_where(capfd: pytest.CaptureFixture[str]) -> None:
    def sleeps_on_rank_1(rank: int) -> None:
        time.sleep(60 * rank)

    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2"):
        run_ranks(sleeps_on_rank_1, 2, timeout=2)
    assert capfd.readouterr().err.count("in sleeps_on_rank_1") == 1


def test_a_rank_that_leaves_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankError, match="rank 0 left without a result, exit code 3"):
        run_ranks(lambda rank: os._exit(3), 1)
