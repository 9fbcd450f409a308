"""The list "hydra.cluster" of a config in, the nodes that it names in turn out; and cost tables by class. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_hydra.config.checks import integer, parse_block, setting, text
from ds_hydra.pipe.schedules.registry import NAME
from ds_hydra.zero_hetero.errors import ConfigError

_EXAMPLE = '"cluster": [{"nodes": 2, "ranks": 8, "device": "h800"}, {"ranks": 7, "device": "h20"}]'


def _device(value: Any, place: str) -> str | None:
    name = text(optional=True)(value, place)
    if name is not None and not re.fullmatch(NAME, name):
        raise ConfigError(
            f"config: {place} is {name!r}: use lower-case letters, digits, '_', '.' and '-', as strategies name it"
        )
    return name


@dataclass(frozen=True, slots=True)
class NodesConfig:
    """A block of the list "hydra.cluster", which holds the nodes in the order of their ranks, those alike in one block.
    null: what the launcher, the hosts and the drivers say."""

    ranks: int = setting(integer(1))
    """Ranks of each of these nodes."""
    nodes: int = setting(integer(1), 1)
    """How many such nodes follow each other."""
    device: str | None = setting(_device, None)
    """The class of their devices, words of the name by which the driver calls them, such as "h800". Devices of one
    class count as equal. None: the driver's own name."""


def read_cluster(value: Any, place: str) -> tuple[NodesConfig, ...]:
    """The list, () for null; ConfigError for anything else."""
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(f"config: {place} must be a list of nodes, such as {_EXAMPLE}, but is {value!r}")
    return tuple(parse_block(NodesConfig, block, f"{place}[{index}]") for index, block in enumerate(value))


def read_tables(value: Any, place: str) -> str | Mapping[str, str] | None:
    """A cost table's file; or one of each class of devices."""
    if not isinstance(value, Mapping):
        return text(optional=True)(value, place)  # type: ignore[no-any-return]
    if not value:
        raise ConfigError(f"config: {place} must be a file, or name one of each class of devices, but is {value!r}")
    return {str(name): text()(path, f"{place}.{name}") for name, path in value.items()}
