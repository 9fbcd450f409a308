"""What a rank leaves that is lost when it has told the others where it listens, and before it has come to them."""

from __future__ import annotations

import time

import torch.distributed as dist

LATEST = 65535  # a port that no rank has: of two ranks the one with the higher address calls the other one


def tell_and_go(store: dist.Store, rank: int, other: int, port: int = LATEST) -> None:
    """Tell in the store of a view that this rank listens at a port of the `other` one's host."""
    keys = [f"0//cpu//0/{one}" for one in (rank, other)]
    while not store.check(keys[1:]):
        time.sleep(0.02)
    told = store.get(keys[1])
    at = port_at(told)
    store.set(keys[0], told[:at] + port.to_bytes(2, "big") + told[at + 2 :])  # type: ignore[arg-type]  # as it may


def port_at(told: bytes) -> int:
    """Where the port stands in what gloo tells of a rank: a name, and an address of the system."""
    of_name, of_length, of_family = 8 + int.from_bytes(told[:8], "little"), 8, 2
    return of_name + of_length + of_family
