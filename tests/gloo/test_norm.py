"""The gradient's norm takes one message between all ranks, and that comes when a rank has all its sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.masters import MasterShards
from tests.support.small_job import STRATEGIES, small_config, small_engine


class Watched:
    """torch.distributed as `grad_norm` sees it; keeps what it is asked for, and the rank's gradients at that moment."""

    def __init__(self, gradients: Callable[[], Tensor]) -> None:
        self.gradients = gradients
        self.seen: list[tuple[str, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(dist, name)
        if name == "get_world_size":
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen.append((name, self.gradients()))
            return found(*args, **kwargs)

        return call


def norms(rank: int) -> list[tuple[list[str], bool, float, float]]:
    """Of each step: the calls for the norm, whether gradients were final by then, the norm, and one made of them."""
    config = {**small_config(2), "gradient_clipping": 0.0}
    engine = small_engine(rank, config=config)
    masters = engine.crew.masters.trained
    steps = []

    def gradients() -> Tensor:
        return torch.cat(masters.grads)

    def put(grads: Sequence[Tensor] | None) -> None:
        MasterShards.put_grads(masters, grads)
        for grad in masters.grads:
            grad.fill_(7.0)  # what a push has not overwritten is seen

    masters.put_grads = put  # type: ignore[method-assign]
    for _ in STRATEGIES[2]:
        watched = Watched(gradients)
        masters.dist = watched  # type: ignore[assignment]
        engine.train_batch()
        masters.dist = dist
        squares = torch.zeros(1, dtype=torch.float64) + gradients().double().square().sum()
        dist.all_reduce(squares)
        final = all(torch.equal(seen, gradients()) and not (seen == 7.0).any() for _, seen in watched.seen)
        steps.append(([name for name, _ in watched.seen], final, engine.last_step.grad_norm, float(squares.sqrt())))
    engine.destroy()
    return steps


def test_one_message_makes_the_norm_and_comes_after_all_sums() -> None:
    for steps in run_ranks(norms, 2, timeout=120):
        for calls, final, norm, expected in steps:
            assert calls == ["all_gather"]
            assert final
            assert abs(norm - expected) < 1e-9 * expected
