"""Rows of a sweep of which a test run takes some, and `tools.check_tests` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long_but(rows: Iterable[Any], *always: Any) -> list[Any]:
    """Rows for `pytest.mark.parametrize`, marked long but for those that run `always`; a tuple is a row's values."""
    given = list(rows)
    assert set(always) <= set(given), "rows that run always are among them"
    values = [row if isinstance(row, tuple) else (row,) for row in given]
    marks = [() if row in always else (pytest.mark.long,) for row in given]
    return [pytest.param(*one, marks=mark) for one, mark in zip(values, marks, strict=True)]
