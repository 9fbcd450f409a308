"""Runs a block of set-up on all ranks; where it fails on one, every rank raises that error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist

from ds_hydra.ranks.channel import Channel
from ds_hydra.ranks.groups import pairs_connect_when_used
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, PlanError
from ds_hydra.zero_hetero.told import Told, mark_told, message_of, told_of


class Texts(Protocol):
    """Exchanges short texts between all ranks (`ranks.channel.Channel`)."""

    rank: int
    num_ranks: int

    def texts(self, text: str) -> list[str]: ...


_OURS: tuple[type[Exception], ...] = (ConfigError, PlanError, CheckpointError)


@contextmanager
def together(channel: Texts, what: str) -> Iterator[None]:
    """A block that every rank of the channel enters; where it fails on some, all others raise the first one's error.

    Without this they would wait for the failed rank in their next collective, and see no more than a connection that it
    closed. `what` says what was tried. The block must not use groups itself: a rank that fails would leave the others
    waiting in it. Raises as `agree`.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    agree(channel, mine, what)


def agree(channel: Texts, mine: BaseException | None, what: str, told: str = "", *, alike: bool = False) -> list[str]:
    """Every rank's `told`, by rank; or, where any rank brings an error `mine`, an error on all ranks.

    A rank that failed raises its own error, as it is. The others raise ConfigError, PlanError or CheckpointError if
    that is what happened, else RuntimeError. If `alike`, all ranks raise the same text of such a refusal. All errors
    are marked as known to all ranks.
    """
    texts = channel.texts(f"+{told}" if mine is None else f"-{as_text(mine)}")
    failed = [(rank, text[1:]) for rank, text in enumerate(texts) if text[0] == "-"]
    if not failed:
        return [text[1:] for text in texts]
    rank, cause = failed[0]
    others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    there = error_from(cause, f"{what} failed on rank {rank}{others}")
    kind, message = cause.split("\n", 1)
    where = "" if len(failed) == len(texts) else f" (on rank {rank}{others})"
    known = Told(rank, f"{kind}: {there if alike else message + where}", here=mine is not None)
    if mine is not None and not (alike and isinstance(mine, _OURS)):
        raise mine if told_of(mine) else mark_told(mine, known)
    raise mark_told(there, known) from mine


def as_text(error: BaseException) -> str:
    """An error as one rank tells it to the others."""
    kind = next((ours for ours in _OURS if isinstance(error, ours)), type(error))
    return f"{kind.__name__}\n{message_of(error)}"


def error_from(text: str, what: str) -> Exception:
    """What `as_text` told, as an error of another rank: one of ours by its type, a RuntimeError for any other."""
    kind, cause = text.split("\n", 1)
    known = next((ours for ours in _OURS if ours.__name__ == kind), None)
    return (known or RuntimeError)(f"{what}: {cause if known else f'{kind}: {cause}'}")


@contextmanager
def first_channel() -> Iterator[Channel]:
    """A channel between the processes of torch's default group, before there is a world; every one must enter it.

    On devices it has a group of its own, which ends with it unless there is an error: then the process is about to end.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if dist.get_backend() == "gloo":
        yield Channel(dist.group.WORLD, rank, num_ranks)
        return
    with pairs_connect_when_used():
        channel = Channel(dist.new_group(backend="gloo"), rank, num_ranks)
    yield channel
    channel.close()
