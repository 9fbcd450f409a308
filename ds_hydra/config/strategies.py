"""Strategies as a config lists them, checked and in canonical form. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.phase import THEN
from ds_hydra.plan.runnable import check_shape
from ds_hydra.zero_hetero.errors import ConfigError, PlanError

_MAX_DEGREE_DIGITS = 6


def strategies_of(value: Any, place: str) -> tuple[str, ...]:
    """ "auto" as (); else each string in its canonical form. A string alone is a list of one. All must use the same
    number of ranks."""
    if value in ("auto", ["auto"], ("auto",)):
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(
            f'config: {place} must be "auto" or a non-empty list of strings such as "tp4 + 2*tp1pp2 + sp2", '
            f"but is {value!r}"
        )
    shapes = [_shape(item, f"{place}[{index}]") for index, item in enumerate(value)]
    ranks = [shape.num_ranks for shape in shapes]
    for index, used in enumerate(ranks):
        if used != ranks[0]:
            raise ConfigError(
                f"config: {place}[0] {value[0]!r} uses {ranks[0]} ranks but {place}[{index}] "
                f"{value[index]!r} uses {used}: all strategies of a job share the same ranks"
            )
    return tuple(str(shape) for shape in shapes)


def strategies_by_ranks(value: Any, place: str) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Lists of strategies by the number of ranks that each of them uses."""
    if not isinstance(value, Mapping):
        raise ConfigError(f'config: {place} must be a block such as {{"3": ["3*tp1"]}}, but is {value!r}')
    found: dict[int, tuple[str, ...]] = {}
    for key, listed in value.items():
        if not (isinstance(key, str) and key.isdecimal() and int(key) > 0):
            raise ConfigError(f"config: {place} has the key {key!r}, which is no number of ranks")
        found[int(key)] = strategies = strategies_of(listed, f"{place}.{key}")
        used = StrategyShape.parse(strategies[0]).num_ranks if strategies else int(key)
        if used != int(key):
            raise ConfigError(f"config: {place}.{key} lists {strategies[0]!r}, which uses {used} ranks and not {key}")
    return tuple(sorted(found.items()))


def _shape(value: Any, place: str) -> StrategyShape:
    if not isinstance(value, str):
        raise ConfigError(f'config: {place} must be a string such as "tp4 + 2*tp1pp2", but is {value!r}')
    if any(len(digits) > _MAX_DEGREE_DIGITS for digits in re.findall(r"\d+", value)):
        raise ConfigError(f"config: {place} {value[:80]!r} holds a number of more than {_MAX_DEGREE_DIGITS} digits")
    if THEN in value:
        raise ConfigError(
            f"config: {place} {value!r} names several phases, which only a replayed plan can have: list each phase's "
            "strategy on its own, and name the file of plans in hydra.replay"
        )
    try:
        shape = StrategyShape.parse(value)
        check_shape(shape)
        return shape
    except PlanError as error:
        raise ConfigError(f"config: {place}: {error}") from None
