"""Config files are read here, and their values checked and given types, as JSON has them. Pure: no torch."""

from __future__ import annotations

import base64
import binascii
import copy
import difflib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

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


Check = Callable[[Any, str], Any]  # (value, place such as "hydra.planner.ahead") -> checked value
Block = TypeVar("Block")

MAX_INT = 2**48  # beyond any count of tokens, steps or solver nodes; a larger number is a typing error

AUTO = "auto"
AUTO_REMEDY = "only transformers' Trainer fills that in; write the value"


def close_to(name: str, known: Collection[str], likeness: float) -> str | None:
    """The known name closest to `name`, if its likeness is at least `likeness`; None otherwise.

    A likeness of 1 means equal apart from case, 0 means without a common letter.
    """
    lowered = {key.lower(): key for key in known}
    close = difflib.get_close_matches(str(name).lower(), lowered, n=1, cutoff=likeness)
    return lowered[close[0]] if close else None


def nearest(name: str, known: Collection[str]) -> str:
    """A hint naming the known name closest to `name`, or all if none is close and they are few."""
    close = close_to(name, known, 0.55)
    if close is not None:
        return f"did you mean {close!r}?"
    return "known: " + ", ".join(sorted(known)) if len(known) <= 24 else "no known name is near"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _wrong(place: str, wanted: str, value: Any) -> ConfigError:
    hint = f"; {AUTO_REMEDY}" if value == AUTO else ""
    return ConfigError(f"config: {place} must be {wanted}, but is {_shown(value)} ({type(value).__name__}){hint}")


def integer(minimum: int = 0, maximum: int = MAX_INT, *, optional: bool = False) -> Check:
    """An int in [minimum, maximum]. A bool is refused, and so is 1e6, which JSON reads as a float."""

    def check(value: Any, place: str) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            hint = f"; write {int(value)}" if isinstance(value, float) and value.is_integer() else ""
            raise ConfigError(f"{_wrong(place, 'a whole number', value)}{hint}")
        if not minimum <= value <= maximum:
            raise _wrong(place, f"from {minimum} to {maximum}", value)
        return value

    return check


def whole_numbers(minimum: int) -> Check:
    """A list of different whole numbers of at least `minimum`, as a tuple."""
    each = integer(minimum)

    def check(value: Any, place: str) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)):
            raise _wrong(place, "a list of whole numbers", value)
        numbers = tuple(each(item, f"{place}[{index}]") for index, item in enumerate(value))
        if len(set(numbers)) < len(numbers):
            raise ConfigError(f"config: {place} names a number twice: {_shown(value)}")
        return numbers

    return check


def number(minimum: float = 0.0, maximum: float = 1e15, *, exclusive: bool = False, optional: bool = False) -> Check:
    """A finite float in [minimum, maximum]; with `exclusive`, larger than `minimum`."""

    def check(value: Any, place: str) -> float | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _wrong(place, "a number", value)
        above = value > minimum if exclusive else value >= minimum
        if not (above and value <= maximum):  # so that NaN is neither
            least = "above" if exclusive else "at least"
            raise _wrong(place, f"{least} {minimum:g} and at most {maximum:g}", value)
        return float(value)

    return check


def as_number(value: Any) -> Any:
    """The number that a text is, such as "1e-5", which YAML reads as a text; anything else as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def flag(value: Any, place: str) -> bool:
    """true or false; 0, 1 and "true" are refused."""
    if not isinstance(value, bool):
        raise _wrong(place, "true or false", value)
    return value


def text(*, optional: bool = False) -> Check:
    """A non-empty string."""

    def check(value: Any, place: str) -> str | None:
        if value is None and optional:
            return None
        if not isinstance(value, str) or not value.strip():
            raise _wrong(place, "a non-empty string", value)
        return value

    return check


def choice(*known: str, renamed: Mapping[str, str] = MappingProxyType({})) -> Check:
    """One of the strings `known`; `renamed` says of earlier ones what has become of them."""

    def check(value: Any, place: str) -> str:
        if not isinstance(value, str):
            raise _wrong(place, "one of " + ", ".join(map(repr, known)), value)
        if value in renamed:
            raise ConfigError(f"config: {place} {value!r} {renamed[value]}")
        if value not in known:
            raise ConfigError(
                f"config: {place} is {_shown(value)}; it must be one of "
                f"{', '.join(map(repr, known))}. {nearest(value, known).capitalize()}"
            )
        return value

    return check


def setting(check: Check, default: Any = MISSING) -> Any:
    """A dataclass field that `parse_block` reads through `check`; without a default it must be given."""
    return field(default=default, metadata={"check": check})


def parse_block(
    block_type: type[Block], raw: Any, place: str, *, gone: Mapping[str, str] = MappingProxyType({})
) -> Block:
    """Build the dataclass `block_type`, whose fields are `setting`s, from a mapping read from JSON.

    Raises ConfigError for anything but a mapping, for an unknown key (naming the nearest known one), for a
    missing key and for each value that its check refuses; `gone` says of earlier keys what has become of them.
    """
    if not isinstance(raw, Mapping):
        raise _wrong(place, "a block { ... }", raw)
    checks: dict[str, Any] = {f.name: f for f in fields(block_type)}  # type: ignore[arg-type]
    for key in raw:
        if key in gone:
            raise ConfigError(f"config: {place}.{key} {gone[key]}")
        if key not in checks:
            raise ConfigError(f"config: unknown key {key!r} in block {place!r}; {nearest(key, checks)}")
    values = {name: f.metadata["check"](raw[name], f"{place}.{name}") for name, f in checks.items() if name in raw}
    missing = [name for name, f in checks.items() if f.default is MISSING and name not in raw]
    if missing:
        raise ConfigError(f"config: block {place!r} lacks {', '.join(map(repr, missing))}: add it, it has no default")
    return block_type(**values)


def block(block_type: type[Any], *, gone: Mapping[str, str] = MappingProxyType({}), optional: bool = False) -> Check:
    """A block within another, as `parse_block` reads it."""

    def check(value: Any, place: str) -> Any:
        return None if value is None and optional else parse_block(block_type, value, place, gone=gone)

    return check
