"""Text that anybody may have written in, plain values out: JSON with limits on depth, numbers and keys. Pure."""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_DEPTH = 64
_MOST_DIGITS = 300  # a whole number of more is none that a float, or any counter, could hold
_TOO_MANY_DIGITS = re.compile(rf"\d{{{_MOST_DIGITS + 1}}}", re.ASCII)


class JsonError(ValueError):
    """What is wrong with a text, without its place, which the reader knows."""


def parse_json(text: str | bytes | bytearray) -> Any:
    """The value of a JSON text, UTF-8 where it is bytes.

    JsonError for what is no JSON, and for keys that stand twice, NaN, infinite numbers, whole numbers of more than 300
    digits and nesting of more than 64 levels.
    """
    try:
        plain = text if isinstance(text, str) else text.decode("utf-8")
        # Of a plan's many numbers each would cost a call. Digits in a string may be as many as they like.
        parse_int = _whole if _TOO_MANY_DIGITS.search(plain) else None
        value = json.loads(
            plain, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite, parse_int=parse_int
        )
    except RecursionError:
        raise JsonError("nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError is one, too
        raise JsonError(str(error)) from None
    if too_deep(value):
        raise JsonError(f"nested deeper than {MAX_DEPTH} levels")
    return value


def too_deep(value: Any, most: int = MAX_DEPTH) -> bool:
    """Whether lists and dictionaries are nested in more than `most` levels."""
    # Level by level and not by recursion, which deep nesting could break before it is noticed.
    level = [value]
    for _ in range(most):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    block = dict(pairs)
    if len(block) < len(pairs):
        raise ValueError("a key stands twice in one block")
    return block


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]}")
    return value


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _no_constant(name: str) -> Any:
    raise ValueError(f"the number {name}")
