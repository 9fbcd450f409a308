"""Process groups in, link figures out: latency and bandwidth of the collectives that schemes use."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from ds_hydra.profiling.links import LinkFigure
from ds_hydra.zero_hetero.transport import TorchTransport

SIZES = (4096, 65536, 1 << 19, 1 << 21, 1 << 23)  # bytes


def time_links(
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 15,
    inter_node: bool = False,
) -> list[LinkFigure]:
    """Figures of one group's size, the same on every rank of it. Every rank of the group must call it.

    A line of latency and bandwidth is fitted to the medians over some sizes, relative errors counting alike.
    """
    size = len(ranks)
    me = ranks.index(dist.get_rank())
    figures: list[LinkFigure] = []
    for operation, call in _calls(ranks, me, group, device).items():
        medians = [_median_ms(call, num_bytes // 4, repeats, group, device) for num_bytes in sizes]
        figures.append(_figure(operation, size, sizes, medians, inter_node))
    return figures


def _calls(
    ranks: Sequence[int], me: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, Callable[[int], None]]:
    """Each operation on a tensor of that many FP32 elements on this rank."""
    size = len(ranks)
    transport = TorchTransport(group)

    def all_reduce(numel: int) -> None:
        dist.all_reduce(torch.ones(numel, device=device), group=group)

    def all_gather(numel: int) -> None:
        share = torch.ones(max(1, numel // size), device=device)
        dist.all_gather([torch.empty_like(share) for _ in ranks], share, group=group)

    def all_to_all(numel: int) -> None:
        whole = torch.ones(max(1, numel // size) * size, device=device)
        dist.all_to_all_single(torch.empty_like(whole), whole, group=group)

    def p2p(numel: int) -> None:
        whole = torch.ones(numel, device=device)
        if me == 0:
            transport.exchange([(1, whole)], []).wait()
        elif me == 1:
            transport.exchange([], [(0, whole)]).wait()

    return {"all_reduce": all_reduce, "all_gather": all_gather, "all_to_all": all_to_all, "p2p": p2p}


def _median_ms(
    call: Callable[[int], None], numel: int, repeats: int, group: dist.ProcessGroup, device: torch.device
) -> float:
    """Median milliseconds of a call on the slowest rank."""
    samples: list[float] = []
    for repeat in range(repeats + 2):  # the first two open connections and warm up
        dist.barrier(group)
        began = time.perf_counter()
        call(numel)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat >= 2:
            samples.append(1e3 * (time.perf_counter() - began))
    slowest = torch.tensor([statistics.median(samples)], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return float(slowest)


def _figure(operation: str, size: int, sizes: Sequence[int], ms: Sequence[float], inter_node: bool) -> LinkFigure:
    """Latency and bandwidth of a line through (bytes, ms)."""
    from ds_hydra.profiling.fit import nonnegative_least_squares

    # Divided by the times, so that relative errors count alike: 10 % off is as bad at 4 KB as at 8 MB.
    times = np.array(ms)
    terms = np.column_stack((np.ones(len(sizes)), np.array(sizes, dtype=np.float64))) / times[:, None]
    latency, per_byte = nonnegative_least_squares(terms, np.ones(len(sizes)))
    # Noise can make the line fall; then all of the longest message's time counts as bandwidth.
    slope = per_byte if per_byte > 0 else float(times.max()) / max(sizes)
    return LinkFigure(operation, size, round(1e3 * float(latency), 3), 1e3 / float(slope), inter_node)
