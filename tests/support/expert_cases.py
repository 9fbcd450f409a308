"""Training cases whose stages spread whole experts over their ranks [Note: whole experts]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.support.case import FLOAT32, Case

SPREAD = ("tp2ep2pp2", "sp2ep2 + 2*tp1", "tp4ep4", "pp3 + tp1", "tp2sp2ep4", "sp4ep4", "tp2sp2ep2")


def spread() -> Iterator[Case]:
    """Experts over tensor parallel ranks, over sequence parallel ones, over both, and on one rank, in turn."""
    for family in ("mixtral", "qwen3_moe", "gpt_oss"):
        yield Case(f"spread {family}", family, SPREAD, steps=7, quick=family == "qwen3_moe")
    base = Case("", "qwen3_moe", SPREAD, steps=7)
    yield replace(base, name="spread, all tokens", token_sharding=False)
    yield replace(base, name="spread gpt_oss, all tokens", family="gpt_oss", token_sharding=False)
    yield replace(base, name="spread fp32", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="spread mixtral fp32", family="mixtral", dtype=FLOAT32)
    for strategy in ("tp2ep2", "tp4ep4", "sp2ep2", "sp4ep4", "tp2sp2ep4", "tp2ep2pp2"):
        yield replace(base, name=f"spread {strategy}", strategies=(strategy,), steps=3)
    turns = ("tp2ep2pp2/v", "sp2ep2 + pp2/list", "tp2sp2ep4/list")
    yield replace(base, name="spread, slices", strategies=turns, steps=3, slices=True, recompute=True, quick=True)
