"""NCCL's rules for a whole engine: within `strict_world` its links, edges and collectives are strict ones.

A collective must be the same one on all ranks of its group, of the same sizes: gloo takes some that NCCL hangs at. The
world is laid out as on devices: small messages have a gloo group of their own, and so have the stages' edges.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.zero_hetero.collectives import MessageCollectives
from tests.support.strict import Rules, StrictError, StrictMemory, StrictTransport

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "broadcast",
)
_TEXT = 256  # bytes


@contextmanager
def strict_world(rules: Rules | None = None) -> Iterator[list[StrictTransport]]:
    """Worlds made within it are strict; the transports so far. At the end every exchange must have been waited for."""
    from ds_hydra.ranks import world

    made: list[StrictTransport] = []
    groups: list[dist.ProcessGroup] = []

    def transport(group: dist.ProcessGroup, **_: Any) -> StrictTransport:
        own = dist.new_group(list(range(group.size())))
        made.append(StrictTransport(own, ("links", "edges")[len(made) % 2], rules))
        groups.append(group)
        return made[-1]

    def by_messages(group_of: Any) -> MessageCollectives:
        """Twins' collectives among pulls and pushes: what ends in one order ends on communicators of their own."""
        links = next(strict for strict in reversed(made) if strict.name == "links")
        return MessageCollectives(links, links.rank)

    def before(group: dist.ProcessGroup) -> None:
        """What a collective waits for that shares its communicator with messages."""
        for other, strict in zip(groups, made, strict=True):
            if other is group:
                strict.collective()

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(world, "TorchTransport", transport))
        stack.enter_context(mock.patch.object(world, "GroupCollectives", by_messages))
        stack.enter_context(mock.patch.object(world, "dist", OnDevices()))
        stack.enter_context(strict_collectives(before))
        stack.enter_context(StrictMemory(made))
        yield made
    for strict in made:
        strict.close()


class OnDevices:
    """torch.distributed, but for a default group that is NCCL's."""

    def get_backend(self, group: dist.ProcessGroup) -> str:
        return "nccl"

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


@contextmanager
def strict_collectives(before: Callable[[dist.ProcessGroup], None] = lambda _: None) -> Iterator[None]:
    """Compare every collective with the other ranks' before it runs; `before` is called with its group."""
    with ExitStack() as stack:
        gather = dist.all_gather
        for name in COLLECTIVES:
            strict = _strict(getattr(dist, name), gather, before)
            stack.enter_context(mock.patch.object(dist, name, strict))
        yield


def _strict(
    original: Callable[..., Any], gather: Callable[..., Any], before: Callable[[dist.ProcessGroup], None]
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def collective(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        group = given.arguments["group"] or dist.group.WORLD
        before(group)
        texts = _gathered(_text(original.__name__, given.arguments), group, gather)
        if len(set(texts)) > 1:
            calls = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise StrictError(f"ranks of one group call different collectives: {calls}")
        return original(*args, **kwargs)

    return collective


def _text(name: str, arguments: dict[str, Any]) -> str:
    """What all ranks must have in common."""
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    if name == "all_to_all_single":  # its sizes may differ
        return f"{name} of {tensors[0].dtype}"
    others = [f"{key} {arguments[key]}" for key in ("op", "src", "group_src") if arguments.get(key) is not None]
    sizes = {part.numel() for part in arguments.get("tensor_list") or ()}
    return " ".join([f"{name} of {tensors[0].numel()} {tensors[0].dtype}", *others, *(f"into {n}" for n in sizes)])


def _gathered(text: str, group: dist.ProcessGroup, gather: Callable[..., Any]) -> list[str]:
    own = torch.frombuffer(bytearray(text.encode()[:_TEXT].ljust(_TEXT)), dtype=torch.uint8)
    table = torch.empty((group.size(), _TEXT), dtype=torch.uint8)
    gather(list(table.unbind()), own, group=group)
    return [bytes(row.tolist()).decode().strip() for row in table]
