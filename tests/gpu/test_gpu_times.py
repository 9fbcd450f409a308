"""Times on a GPU: kernels are charged to the lap that launched them, and nothing waits for them but the reader."""

from __future__ import annotations

from time import perf_counter

import pytest
import torch

from ds_hydra.zero_hetero.clock import Stopwatch, clock_of

pytestmark = pytest.mark.gpu


def test_kernels_are_charged_to_the_lap_that_launched_them() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    clock = clock_of(device)
    watch = Stopwatch(clock)
    matrix = torch.zeros(8192, 8192, device=device)
    for _ in range(2):  # the first round loads the kernels
        watch.take()
        clock.wait()
        began = perf_counter()
        with watch.lap("backward"):
            for _ in range(20):
                matrix = matrix @ matrix
        launched = perf_counter() - began
        with watch.lap("optimizer"):
            pass
        clock.wait()
        whole = perf_counter() - began
    spent = watch.take().spent()
    assert launched < 0.5 * whole
    assert spent["backward"].own_s == pytest.approx(whole, rel=0.1)
    assert spent["optimizer"].own_s < 0.05 * whole
