"""The hosts of all ranks in; how many ranks a node has, or a refusal, out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ds_hydra.zero_hetero.errors import ConfigError


def ranks_of_a_node(hosts: Sequence[str]) -> int:
    """Ranks of a node, of which the last one may have fewer, by the name of each rank's host.

    ConfigError where the ranks of a host are not consecutive, or hosts have different numbers of ranks: what lies
    within a node and what between nodes could not be told from a rank's number.
    """
    runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    size, remedy = runs[0][1], "start equally many ranks on each host, one host after the other, or set hydra.node_size"
    if len({host for host, _ in runs}) < len(runs):
        seen = ", ".join(f"rank {rank} on {host.partition('/')[0]}" for rank, host in enumerate(hosts[:4]))
        raise ConfigError(
            f"the launcher does not say how many ranks a node has, and hosts alternate ({seen}): {remedy}"
        )
    if any(count != size for _, count in runs[:-1]) or runs[-1][1] > size:
        counts = ", ".join(f"{count} on {host.partition('/')[0]}" for host, count in runs[:8])
        raise ConfigError(
            f"the launcher does not say how many ranks a node has, and hosts have different numbers of "
            f"them ({counts}): {remedy}"
        )
    return size
