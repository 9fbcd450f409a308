"""Measured latency and bandwidth of collectives, what one takes by them, and the links file. Pure.

A collective on a group of n ranks costs latency + bytes / bandwidth, where bytes are those of the whole tensor (for
a point-to-point message and an all-to-all: of what one rank holds). The bandwidth of an entry is what such a
call got as a whole, so rings, trees and copies are in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ds_hydra.config.checks import nearest
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.files import parse_json

OPERATIONS = ("all_reduce", "all_gather", "all_to_all", "p2p")
_KEYS = ("operation", "group_size", "inter_node", "latency_us", "bytes_per_second", "largest_bytes")
_OPTIONAL = ("inter_node", "largest_bytes")


class Collective(NamedTuple):
    """One call: what, over how many ranks, how many bytes."""

    operation: str
    group_size: int
    num_bytes: int


class Counted(NamedTuple):
    """A collective that was counted and not run; times in seconds of computing since its part of a stage began."""

    call: Collective
    started_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class LinkFigure:
    """One operation on groups of one size, inside a node or across."""

    operation: str
    group_size: int
    latency_us: float
    bytes_per_second: float
    inter_node: bool = False
    largest_bytes: int = 0  # of the messages that were timed; 0: not known

    def __post_init__(self) -> None:
        place = f"link figure {self.operation} of {self.group_size}"
        if self.operation not in OPERATIONS:
            raise ConfigError(f"{place}: unknown operation {self.operation!r}; {nearest(self.operation, OPERATIONS)}")
        if isinstance(self.group_size, bool) or not isinstance(self.group_size, int) or self.group_size < 2:
            raise ConfigError(f"{place}: group_size must be a whole number of at least 2 but is {self.group_size!r}")
        for key, least in (("latency_us", True), ("bytes_per_second", False), ("largest_bytes", True)):
            value = getattr(self, key)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and not least):
                raise ConfigError(f"{place}: {key} must be a number above 0 but is {value!r}")
        if not isinstance(self.inter_node, bool):
            raise ConfigError(f"{place}: inter_node must be true or false but is {self.inter_node!r}")

    def ms(self, num_bytes: int) -> float:
        """Milliseconds of one call."""
        return self.latency_us / 1e3 + num_bytes / self.bytes_per_second * 1e3


@dataclass(frozen=True)
class Links:
    """Figures by operation and group size; sizes between and beyond are taken from the nearest smaller one.

    From a figure of another size a ring's share is scaled as (n - 1) / n and its latency as n - 1.
    """

    figures: tuple[LinkFigure, ...]
    source: str = ""
    node_size: int | None = None

    def __post_init__(self) -> None:
        seen: set[tuple[str, int, bool]] = set()
        for figure in self.figures:
            key = (figure.operation, figure.group_size, figure.inter_node)
            if key in seen:
                raise ConfigError(
                    f"links: {figure.operation} of {figure.group_size} ranks "
                    f"({'across nodes' if figure.inter_node else 'in a node'}) is given twice; keep one"
                )
            seen.add(key)

    def ms(self, call: Collective, *, inter_node: bool = False) -> float:
        """Milliseconds of one collective; ConfigError when no figure speaks of its operation."""
        known = sorted(
            (f for f in self.figures if f.operation == call.operation and f.inter_node == inter_node),
            key=lambda f: f.group_size,
        )
        if not known:
            raise ConfigError(
                f"links: no figure for {call.operation} {'across nodes' if inter_node else 'inside a node'}; "
                "measure it (leave out --links) or add it to the file"
            )
        figure = next((f for f in reversed(known) if f.group_size <= call.group_size), known[0])
        have, want = figure.group_size, call.group_size
        if have == want or call.operation == "p2p":
            return figure.ms(call.num_bytes)
        # From 4 to 8 ranks a ring takes 7 hops in place of 3, and each rank moves 7/8 of the bytes in place of 3/4.
        steps, share = (want - 1) / (have - 1), ((want - 1) / want) / ((have - 1) / have)
        return figure.latency_us / 1e3 * steps + call.num_bytes / figure.bytes_per_second * 1e3 * share

    def is_scaled(self, operation: str, group_size: int) -> bool:
        """Whether a figure of another group size is used for this one."""
        return operation != "p2p" and not any(
            f.operation == operation and f.group_size == group_size for f in self.figures
        )

    def to_record(self) -> dict[str, Any]:
        """As the links file holds it."""
        return {"source": self.source, "node_size": self.node_size, "links": [asdict(f) for f in self.figures]}


def exposed_ms(counted: Sequence[Counted], ms: Sequence[float]) -> float:
    """What collectives that take so many milliseconds add to the computing around them.

    A group does one after the other. A gather of 3 ms that is waited for when 2 ms more have been computed adds 1 ms;
    one that is waited for at once adds all of it.
    """
    # Those of sequence parallel ranks, which alone make all-to-alls and send rank to rank, have one of their own.
    free, ends, added = {True: 0.0, False: 0.0}, [0.0] * len(ms), 0.0
    moments = [(begun, number, 0) for number, (_, begun, _) in enumerate(counted)]
    moments += [(waited, number, 1) for number, (_, _, waited) in enumerate(counted)]
    for moment, number, waits in sorted(moments):
        now = 1e3 * moment + added
        if waits:
            added += max(0.0, ends[number] - now)
            continue
        group = counted[number].call.operation in ("all_to_all", "p2p")
        ends[number] = free[group] = max(now, free[group]) + ms[number]
    return added


def read_links(path: str | Path) -> Links:
    """Read a links file: {"links": [{operation, group_size, latency_us, bytes_per_second, ...}, ...]}.

    An entry may also have inter_node and largest_bytes.
    Raises ConfigError that names the file, the entry and the key that is wrong.
    """
    try:
        record = parse_json(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the links file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the links file {path} is not JSON: {error}") from error
    return links_from_record(record, str(path))


def links_from_record(record: object, place: str) -> Links:
    """Strict reading of `Links.to_record`."""
    if not isinstance(record, Mapping) or not isinstance(record.get("links"), list) or not record["links"]:
        raise ConfigError(f'{place}: must be {{"links": [...]}} with at least one figure')
    unknown = sorted(set(record) - {"links", "source", "node_size"})
    if unknown:
        raise ConfigError(f"{place}: unknown keys {unknown}; known: links, source, node_size")
    figures = []
    for index, row in enumerate(record["links"]):
        where = f"{place}: links[{index}]"
        if not isinstance(row, Mapping):
            raise ConfigError(f"{where} must be an object with {', '.join(_KEYS)} but is {row!r}")
        for key in row:
            if key not in _KEYS:
                raise ConfigError(f"{where}: unknown key {key!r}; {nearest(str(key), _KEYS)}")
        missing = [key for key in _KEYS if key not in row and key not in _OPTIONAL]
        if missing:
            raise ConfigError(f"{where}: missing {', '.join(missing)}")
        try:
            figures.append(LinkFigure(**row))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    node_size = record.get("node_size")
    if node_size is not None and (isinstance(node_size, bool) or not isinstance(node_size, int) or node_size < 1):
        raise ConfigError(f"{place}: node_size must be a whole number of at least 1 but is {node_size!r}")
    return Links(tuple(figures), str(record.get("source", "")), node_size)
