"""Which ranks share a node, and the classes of devices: from what ranks, launcher and user say. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.nodes import Cluster, node_ranks


class Standing(NamedTuple):
    """Where a rank stands."""

    host: str  # a name that no other host has
    launched: int | None  # ranks of its node, as its launcher says
    device: str  # the driver's name of it; "" for a CPU, which no job is bought for

    def to_text(self) -> str:
        return json.dumps(self)

    @classmethod
    def of_text(cls, text: str) -> Standing:
        return cls(*json.loads(text))


class GivenNode(NamedTuple):
    """A node as the user describes it."""

    num_ranks: int
    device: str | None  # None: as the driver calls it


def cluster_of(ranks: Sequence[Standing], *, node_size: int | None = None, given: Sequence[GivenNode] = ()) -> Cluster:
    """The cluster of ranks that stand there, as the user gives it, or the launcher, or else the names of the hosts.

    ConfigError where what is given is not so, where the ranks of a node are not consecutive, and where the launcher
    contradicts itself.
    """
    if given:
        sizes = [node.num_ranks for node in given]
        _check_given(sizes, ranks)
    elif node_size is not None:
        sizes = list(map(len, node_ranks(len(ranks), node_size)))
    else:
        sizes = _launched(ranks) or _by_hosts(ranks)
    asked = [node.device for node in given for _ in range(node.num_ranks)] or [None] * len(ranks)
    devices = tuple(
        class_name(one.device) if name is None else _checked(name, rank, one.device)
        for rank, (name, one) in enumerate(zip(asked, ranks, strict=True))
    )
    named = len(set(devices)) > 1 or any(asked)
    return Cluster(tuple(sizes), devices if named else ())


def class_name(device: str) -> str:
    """The name of a device as a device class that texts of strategies may have: "NVIDIA H800 PCIe" is "h800-pcie"."""
    return "-".join(word for word in _words(device) if word != "nvidia") or "cpu"


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9.]+", name.lower())


def _checked(name: str, rank: int, device: str) -> str:
    # "h20" is no word of "NVIDIA H200". What a CPU is called tells nothing, so there any name will do.
    if device and not set(_words(name)) <= set(_words(device)):
        raise ConfigError(
            f"config: hydra.cluster gives rank {rank} a device of class {name!r}, but its device is {device!r}: name "
            f"it by words of that, such as {class_name(device)!r}, or start the ranks in the order of the cluster"
        )
    return name


def _check_given(sizes: Sequence[int], ranks: Sequence[Standing]) -> None:
    if sum(sizes) != len(ranks):
        raise ConfigError(
            f"config: hydra.cluster has nodes of {' + '.join(map(str, sizes))} = {sum(sizes)} ranks but the job has "
            f"{len(ranks)}: correct one of them"
        )
    # A given node may be a part of a host, as if there were several; it cannot be on two.
    ends, apart = set(accumulate(sizes)), set(accumulate(_launched(ranks)))
    for rank, (one, following) in enumerate(pairwise(ranks), start=1):
        if rank not in ends and (one.host != following.host or rank in apart):
            where = f"rank {rank - 1} is on {_short(one)} and rank {rank} on {_short(following)}"
            told = where if one.host != following.host else f"the launcher begins another node with rank {rank}"
            raise ConfigError(
                f"config: hydra.cluster puts ranks {rank - 1} and {rank} on one node, but {told}: list the nodes in "
                "the order of the ranks"
            )


def _launched(ranks: Sequence[Standing]) -> list[int]:
    """Ranks of each node as the launcher says, of which the last may have fewer; none where it does not say."""
    told = [one.launched for one in ranks]
    sizes: list[int] = []
    first = 0
    while first < len(told):
        size = told[first]
        if size is None or None in told:
            return []
        here = told[first : first + size]
        if any(other != size for other in here):
            odd = first + next(at for at, other in enumerate(here) if other != size)
            raise ConfigError(
                f"the launcher says that rank {first} is on a node of {size} ranks and rank {odd}, within it, on one "
                f"of {told[odd]}: start the ranks of each host one after the other, or set hydra.cluster"
            )
        sizes.append(len(here))
        first += size
    return sizes


def _by_hosts(ranks: Sequence[Standing]) -> list[int]:
    runs = [(host, len(list(group))) for host, group in groupby(ranks, key=lambda one: one.host)]
    if len({host for host, _ in runs}) < len(runs):
        seen = ", ".join(f"rank {rank} on {_short(one)}" for rank, one in enumerate(ranks[:4]))
        raise ConfigError(
            f"the launcher does not say how many ranks a node has, and hosts alternate ({seen}): start the ranks of "
            "each host one after the other, or set hydra.node_size"
        )
    return [count for _, count in runs]


def _short(one: Standing) -> str:
    return one.host.partition("/")[0]
