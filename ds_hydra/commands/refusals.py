"""A translated config in; all that the job would refuse of it, in one message, out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ds_hydra.config.hydra_block import BLOCK
from ds_hydra.entry import accept
from ds_hydra.zero_hetero.errors import ConfigError


def refuse_all(config: Mapping[str, Any], host: str, ranks: int) -> None:
    """ConfigError with a line for each key that the job refuses; the job itself would stop at the first."""
    try:
        accept(config, ranks, host)
    except ConfigError as error:
        found = list(dict.fromkeys(_each(config, host, ranks))) or [str(error)]
        lines = [one.removeprefix("config: ") for one in found]
        raise ConfigError(
            lines[0] if len(lines) == 1 else f"{len(lines)} settings cannot be had here:\n  " + "\n  ".join(lines)
        ) from error


def _each(config: Mapping[str, Any], host: str, ranks: int) -> Iterator[str]:
    """What is refused of each key by itself, and of each setting of the block."""
    alone = [{key: value, BLOCK: {}} for key, value in config.items() if key != BLOCK]
    block = config.get(BLOCK)
    alone += [{BLOCK: {key: value}} for key, value in block.items()] if isinstance(block, Mapping) else []
    for one in alone:
        try:
            accept(one, ranks, host)
        except ConfigError as error:
            yield str(error)
