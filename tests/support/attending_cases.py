"""Training cases of kinds of attention: of keys and values that come from a latent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.support.attending_models import LATENT
from tests.support.case import CHANGING, CHANGING_8, FLOAT32, Case

IN_SLICES = ("tp2pp2/v", "sp2 + pp2/list", "tp4/list", "tp2sp2")


def latent() -> Iterator[Case]:
    """Multi-head latent attention, whose heads tensor parallel ranks share whether or not the model's plan says so."""
    for family in LATENT:
        yield Case(f"latent, {family}", family, CHANGING)
        yield Case(f"latent, {family}, slices", family, IN_SLICES, steps=4, slices=True, recompute=True,
                   quick=family == "deepseek_v3")  # fmt: skip
    base = Case("", "deepseek_v3", ("tp2pp2", "tp4", "tp2sp2", "sp2 + 2*tp1"), steps=4)
    yield replace(base, name="latent, all tokens", token_sharding=False)
    yield replace(base, name="latent, checkpointed", activation_checkpointing=True)
    yield replace(base, name="latent, split", strategies=("tp2pp2/zb-h1", "sp2 + pp2/zb-h1"), steps=2)
    yield replace(base, name="latent, spread", strategies=("tp2ep2pp2/v", "tp4ep4", "tp2sp2ep4"), steps=3, slices=True)
    yield replace(base, name="latent fp32", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="latent on 8 ranks", strategies=CHANGING_8)
