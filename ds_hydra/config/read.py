"""A dict, a file or base64 text in, as `deepspeed.initialize` takes them; a new dict out. Pure: no torch."""

from __future__ import annotations

import base64
import binascii
import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson

from ds_hydra.zero_hetero.errors import ConfigError

_MAX_CONFIG_BYTES = 16 * 2**20


def read_config(args: Any = None, config: Any = None, config_params: Any = None) -> dict[str, Any]:
    """The job's config as a new dict, from the same places as `deepspeed.initialize`.

    `config` (or `config_params`, its old name) or `args.deepspeed_config` is a dict, a path to an hjson file
    or base64 text. Raises ConfigError when there is none, more than one, or one that cannot be read.
    """
    config = config if config is not None else config_params
    from_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if config is not None and from_args is not None:
        raise ConfigError(
            f"two configs were given: --deepspeed_config {from_args!r} and initialize(config=...); give one"
        )
    config = from_args if config is None else config
    if config is None:
        raise ConfigError("no config was given: pass --deepspeed_config FILE or initialize(config=...)")
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"the config must be a dict, a path or base64 text, but is a {type(config).__name__}")
    name = os.fspath(config)
    return _parse_hjson(_read_text(name), name)


def _read_text(name: str) -> str:
    """Content of the file `name`, or `name` itself decoded from base64."""
    # DeepSpeed's launcher may hand a config on as base64 text. A text of 256 characters or more is longer than a file
    # name may be: looking for such a file is an error of the system's, which says nothing about the config.
    try:
        path = Path(name)
        if path.is_file():
            if path.stat().st_size > _MAX_CONFIG_BYTES:
                raise ConfigError(
                    f"config file {name!r} has {path.stat().st_size} bytes, more than {_MAX_CONFIG_BYTES}"
                )
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if len(name) < 256:
            raise ConfigError(f"config file {name!r} cannot be read: {error}") from None
    try:
        return base64.b64decode(name, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        shown = name if len(name) <= 200 else name[:200] + "..."
        raise ConfigError(
            f"config file {shown!r} does not exist (in directory {os.getcwd()!r}), nor is it base64 text"
        ) from None


def _parse_hjson(content: str, name: str) -> dict[str, Any]:
    shown = repr(name if len(name) <= 200 else name[:200] + "...")

    # A parser keeps the last of two equal keys: of two "hydra" blocks, merged by hand, half the settings would be lost.
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        block: dict[str, Any] = {}
        for key, value in pairs:
            if key in block:
                raise ConfigError(f"config {shown}: the key {key!r} stands twice in one block; remove one")
            block[key] = value
        return block

    try:
        parsed = hjson.loads(content, object_pairs_hook=refuse_duplicates)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"config {shown}: its blocks are nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"config {shown} is not valid (h)json: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"config {shown} must be one block {{ ... }}, but is a {type(parsed).__name__}")
    return parsed
