"""Runs the self-check on a model as tests ask it."""

from __future__ import annotations

from typing import Any

from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.verdicts import CheckResult


def strategies(*texts: str) -> list[StrategyShape]:
    """Strategies by their texts."""
    return [StrategyShape.parse(text) for text in texts]


def check(model: Any, *texts: str, **settings: Any) -> CheckResult:
    """Verdicts on a model under strategies.

    One with code of a script is tried on sequences of 96 tokens, beyond all that its small copy has, unless they are
    said to be longer.
    """
    return check_strategies(model, strategies(*texts), **{"context_length": 96, **settings})
