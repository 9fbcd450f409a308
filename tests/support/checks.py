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
    """Verdicts on a model under strategies."""
    return check_strategies(model, strategies(*texts), **settings)
