"""Process groups in, link figures out: latency and bandwidth of the collectives that schemes use."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from ds_hydra.profiling.links import LinkFigure
from ds_hydra.profiling.local_group import free_unused
from ds_hydra.zero_hetero.clock import Clock, clock_of
from ds_hydra.zero_hetero.transport import TorchTransport

SIZES = (4096, 65536, 1 << 19, 1 << 21, 1 << 23)  # bytes
_WARM_UP = 2  # calls that open connections
_LARGE_REPEATS = 5  # of a message beyond SIZES: its time scatters little

Call = Callable[[], object]
Prepare = Callable[[int], Call]
"""Allocates tensors of that many FP32 elements on this rank; the call that it returns is what is timed."""


def message_sizes(largest: int) -> tuple[int, ...]:
    """Bytes of the messages to time, up to `largest`, the largest of the job, and up to 8 MiB in any case.

    Libraries send long messages in another way than short ones, so what was seen at 8 MiB says little of 300.
    """
    sizes = list(SIZES)
    while 4 * sizes[-1] < largest:
        sizes.append(4 * sizes[-1])
    return (*sizes, largest) if largest > sizes[-1] else tuple(sizes)


def time_links(
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 15,
    inter_node: bool = False,
    clock: Clock | None = None,
) -> list[LinkFigure]:
    """Figures of one group's size, the same on every rank of it. Every rank of the group must call it.

    A line of latency and bandwidth is fitted to the medians over some sizes, relative errors counting alike. Sizes from
    the first on that some rank has no memory for are left out; `largest_bytes` tells how far a figure goes.
    """
    me = ranks.index(dist.get_rank())
    dated = clock or clock_of(device)
    figures: list[LinkFigure] = []
    for operation, prepare in _calls(ranks, me, group, device).items():
        medians: list[float] = []
        for num_bytes in sizes:
            call = _prepared(prepare, num_bytes // 4, group, device)
            if call is None:
                break
            few = min(repeats, _LARGE_REPEATS) if num_bytes > SIZES[-1] else repeats
            medians.append(_median_ms(call, few, group, device, dated))
        figures.append(_figure(operation, len(ranks), sizes[: len(medians)], medians, inter_node))
    return figures


def _calls(ranks: Sequence[int], me: int, group: dist.ProcessGroup, device: torch.device) -> dict[str, Prepare]:
    """Each operation, by its name."""
    size = len(ranks)
    transport = TorchTransport(group)

    def all_reduce(numel: int) -> Call:
        whole = torch.zeros(numel, device=device)  # summed in place again and again, so not ones
        return lambda: dist.all_reduce(whole, group=group)

    def all_gather(numel: int) -> Call:
        share = torch.ones(max(1, numel // size), device=device)
        parts = [torch.empty_like(share) for _ in ranks]
        return lambda: dist.all_gather(parts, share, group=group)

    def all_to_all(numel: int) -> Call:
        whole = torch.ones(max(1, numel // size) * size, device=device)
        received = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(received, whole, group=group)

    def p2p(numel: int) -> Call:
        whole = torch.ones(numel, device=device)
        sends = [(1, whole)] if me == 0 else []
        receives = [(0, whole)] if me == 1 else []
        return lambda: transport.exchange(sends, receives).wait()

    return {"all_reduce": all_reduce, "all_gather": all_gather, "all_to_all": all_to_all, "p2p": p2p}


def _prepared(prepare: Prepare, numel: int, group: dist.ProcessGroup, device: torch.device) -> Call | None:
    """The call of one size, or None on all ranks of the group where one of them has no memory for it."""
    call: Call | None = None
    try:
        call = prepare(numel)
    except torch.OutOfMemoryError:
        free_unused()
    ready = torch.tensor([float(call is not None)], device=device)
    dist.all_reduce(ready, op=dist.ReduceOp.MIN, group=group)
    return call if float(ready) else None


def _median_ms(call: Call, repeats: int, group: dist.ProcessGroup, device: torch.device, clock: Clock) -> float:
    """Median milliseconds of a call on the slowest rank."""
    samples: list[float] = []
    for _ in range(repeats + _WARM_UP):
        dist.barrier(group)
        began = clock.now()
        call()
        ended = clock.now()
        clock.wait()
        samples.append(1e3 * clock.seconds(began, ended))
    slowest = torch.tensor([statistics.median(samples[_WARM_UP:])], device=device)
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
    return LinkFigure(
        operation, size, round(1e3 * float(latency), 3), 1e3 / float(slope), inter_node, largest_bytes=max(sizes)
    )
