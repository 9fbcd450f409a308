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
    told = channel.texts("" if mine is None else as_text(mine))
    if mine is not None:
        raise mine
    failed = [(rank, text) for rank, text in enumerate(told) if text]
    if failed:
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise error_from(failed[0][1], f"{what} failed on rank {failed[0][0]}{others}")


def as_text(error: Exception) -> str:
    """An error as one rank tells it to the others."""
    return f"{type(error).__name__}\n{error}"


def error_from(text: str, what: str) -> Exception:
    """What `as_text` told, as an error of another rank: one of ours by its type, a RuntimeError for any other."""
    kind, cause = text.split("\n", 1)
    known = next((ours for ours in _OURS if ours.__name__ == kind), None)
    return (known or RuntimeError)(f"{what}: {cause if known else f'{kind}: {cause}'}")


def first_channel() -> Channel:
    """A channel over torch's default process group, before there is a world. Every process must call it."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    return Channel(group, rank, num_ranks)
