"""What one rank could not do is told by all: a block of set-up without messages in, one error on every rank out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ds_hydra.ranks.channel import Channel
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, PlanError

_OURS: tuple[type[Exception], ...] = (ConfigError, PlanError, CheckpointError)


@contextmanager
def together(channel: Channel, what: str) -> Iterator[None]:
    """A block that every rank of the channel enters; where it fails on some, all others raise the first one's error.

    Without this they would wait for the failed rank in their next collective, and see no more than a connection that it
    closed. `what` says what was tried. The block must not use groups itself: a rank that fails would leave the others
    waiting in it. Raises, on ranks that did not fail, ConfigError, PlanError or CheckpointError if that is what
    happened, else RuntimeError.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    told = channel.texts("" if mine is None else f"{type(mine).__name__}\n{mine}")
    if mine is not None:
        raise mine
    failed = [(rank, *text.split("\n", 1)) for rank, text in enumerate(told) if text]
    if failed:
        rank, kind, text = failed[0]
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        known = next((ours for ours in _OURS if ours.__name__ == kind), None)
        cause = f"{kind}: {text}" if known is None else text
        raise (known or RuntimeError)(f"{what} failed on rank {rank}{others}: {cause}")


def first_channel() -> Channel:
    """A channel over torch's default process group, before there is a world. Every process must call it."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    return Channel(group, rank, num_ranks)
