"""An optimizer, the size of a shard and links in; what a step costs besides its pipelines out."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from ds_hydra.profiling.links import Links
from ds_hydra.profiling.within_memory import free_unused
from ds_hydra.zero_hetero.clock import Clock, clock_of
from ds_hydra.zero_hetero.grad_norm import clip_, global_grad_norm

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]
"""Parameter groups in, the job's optimizer over them out."""

# Of a larger shard so much is timed. With gradient and two moments that is 2 GiB, far beyond any cache and far above
# what a launch costs, so more elements take as long each.
MOST_ELEMENTS = 1 << 27
_REPEATS, _WARM_UP = 5, 2  # the first ones make the optimizer's state


def step_costs(
    device: torch.device,
    links: Links,
    *,
    elements: int,
    make_optimizer: MakeOptimizer,
    clock: Clock | None = None,
) -> dict[str, float]:
    """Milliseconds per master element of a rank, per byte moved in pull and push, and for a step's small messages.

    `elements` are those of a rank's shard: what training does to it after its pushes is run on so many, or on as many
    as there is memory for. "update_elements" tells how many that were.
    """
    timed = max(1, min(elements, MOST_ELEMENTS))
    milliseconds = _update_ms(device, timed, make_optimizer, clock or clock_of(device))
    while milliseconds is None:
        timed //= 2
        milliseconds = _update_ms(device, timed, make_optimizer, clock or clock_of(device))
    message = [f for f in links.figures if f.operation == "p2p" and not f.inter_node]
    small = [f for f in links.figures if f.operation == "all_gather"]
    return {
        "update_ms_per_element": milliseconds / timed,
        "update_elements": timed,
        "move_ms_per_byte": 1e3 / message[0].bytes_per_second if message else 0.0,
        "fixed_ms": 4 * small[0].latency_us / 1e3 if small else 0.0,
    }


def _update_ms(device: torch.device, elements: int, make_optimizer: MakeOptimizer, clock: Clock) -> float | None:
    """Median milliseconds of norm, clipping and update; None if the device has no memory for so many elements."""
    try:
        parameter = torch.nn.Parameter(torch.zeros(elements, device=device))
        parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer = make_optimizer([{"params": [parameter]}])
        samples = [_once(parameter.grad, optimizer, clock) for _ in range(_WARM_UP + _REPEATS)]
        return statistics.median(samples[_WARM_UP:])
    except torch.OutOfMemoryError:
        if elements == 1:
            raise
    free_unused()
    return None


def _once(grad: torch.Tensor, optimizer: Optimizer, clock: Clock) -> float:
    """Milliseconds of what `step.update` does, the wait of the host in its middle included."""
    began = clock.now()
    norm = global_grad_norm([grad], None)
    float(norm)
    clip_([grad], norm, 1.0)
    optimizer.step()
    ended = clock.now()
    clock.wait()
    return 1e3 * clock.seconds(began, ended)
