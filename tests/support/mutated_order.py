"""What once decided where a push starts, brought back: whether earlier ones are over was asked, with any answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.pushes import Pushes
from tests.support.small_job import small_engine
from tests.support.strict import Rules, one_push_at_a_time, strict_world


@contextmanager
def pushes_poll(rank: int) -> Iterator[None]:
    """Within it a push that is ready starts in its hook or in a later one, as the answers on this rank are drawn."""
    answers, issue_ready = random.Random(rank), Pushes._issue_ready

    def polled(self: Pushes, *, ending: bool = False) -> None:
        if ending or answers.random() < 0.1:  # a layer has about ten hooks
            issue_ready(self, ending=ending)

    with mock.patch.object(Pushes, "_issue_ready", polled):
        yield


def train_with_polls(strategy: str, stall_s: float) -> None:
    """Two steps on four ranks whose pushes poll, all that a rank starts in one queue. StrictError if they wait for more
    than `stall_s`."""

    def steps(rank: int) -> None:
        with strict_world(Rules(one_queue=True, stall_s=stall_s)), one_push_at_a_time(), pushes_poll(rank):
            engine = small_engine(rank, strategies=[strategy])
            for _ in range(2):
                engine.train_batch()

    run_ranks(steps, 4, timeout=240)
