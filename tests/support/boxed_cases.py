"""Training cases of modules in which tokens meet: boxes, recurrent layers that carry states through slices, and whose
heads ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.support.adapted_models import ADAPTED_BY_HEADS
from tests.support.case import (
    BFLOAT16,
    CHANGING,
    CHANGING_8,
    CHANGING_WITHOUT_TP,
    FLOAT32,
    FLOAT64,
    IN_SLICES,
    Case,
)


def boxed() -> Iterator[Case]:
    """Modules in which tokens meet, run once for each sequence: in all layers or in some."""
    base = Case("", "bloom", CHANGING, steps=3, optimizer="SGD", dtype=FLOAT32)
    yield replace(
        base, name="boxes", strategies=("tp2pp2", "sp2 + 2*tp1"), dtype=FLOAT64, optimizer="AdamW", quick=True
    )
    yield replace(base, name="boxes, V", strategies=("pp2/v + sp2", "tp2pp2/zb-h1"), recompute=True)
    yield replace(base, name="boxes, checkpointed", activation_checkpointing=True)
    yield replace(base, name="boxes, phases", strategies=("4*tp1 then 2*tp2 then tp4",))
    yield replace(base, name="boxes, dropout", family="gptj, dropout", draws=True, dtype=FLOAT64, optimizer="AdamW")
    for family in ("lfm2", "qwen3_next", "falcon_h1"):
        # Exponentials of sums over a sequence magnify FP32's rounding in the delta rule's gradients.
        own = replace(base, family=family, amplifies=family == "qwen3_next")
        yield replace(own, name=f"hybrid, {family}")
        yield replace(own, name=f"hybrid, {family}, V", strategies=("pp2/v + sp2", "pp4/zb-h1"))
    hybrid = replace(base, family="lfm2")
    yield replace(hybrid, name="hybrid", strategies=("tp2pp2/v", "sp2 + pp2"), recompute=True, steps=2, quick=True)
    yield replace(hybrid, name="hybrid on 8 ranks", strategies=CHANGING_8)
    yield replace(hybrid, name="hybrid, checkpointed", activation_checkpointing=True)


def states() -> Iterator[Case]:
    """Recurrent layers that carry their states from slice to slice: delta rules, Mamba-2, short convolutions."""
    base = Case("", "qwen3_next", IN_SLICES, steps=3, slices=True)
    for family in ("qwen3_next", "bamba", "lfm2"):
        own = replace(base, family=family)
        yield replace(own, name=f"states, {family}")
        yield replace(own, name=f"states, {family}, one strategy", strategies=("pp2",))
        yield replace(own, name=f"states, {family}, V", strategies=("tp2pp2/v", "pp2/v + sp2", "pp4/list"),
                      recompute=True)  # fmt: skip
    hybrid = replace(
        base, name="states", strategies=("tp2pp2/v", "sp2 + pp2/list"), steps=2, recompute=True, quick=True
    )
    yield hybrid
    yield replace(hybrid, name="states, sp", family="bamba", strategies=("sp4", "tp2sp2"))
    yield replace(base, name="states, split", strategies=("tp2pp2/zb-h1", "sp2 + pp2/zb-h1", "pp4/zb-h1"))
    yield replace(base, name="states, checkpointed", family="bamba", activation_checkpointing=True)
    yield replace(base, name="states in phases", family="bamba",
                  strategies=("4*tp1 then 2*pp2 then tp2sp2", "pp2 + sp2 then pp4"))  # fmt: skip
    dropped = replace(base, family="lora in boxes with dropout", draws=True, steps=2)
    yield replace(dropped, name="states, lora with dropout", strategies=("pp2/v + sp2", "pp4/list"), recompute=True,
                  quick=True)  # fmt: skip
    yield replace(base, name="states, lora", family="lora in boxes", strategies=CHANGING_WITHOUT_TP)
    yield replace(base, name="states, frozen lower layers", family="bamba",
                  frozen=("embed_tokens", "layers.0.", "layers.1."))  # fmt: skip
    yield replace(base, name="states fp32", family="lfm2", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="states on 8 ranks", family="lfm2", strategies=CHANGING_8)
    yield replace(base, name="states, long ones only", lengths=(300, 200, 450) * 8, strategies=("2*pp2", "tp2pp2"))


_WITH_HEADS = ("qwen3_next", "qwen3_5", "olmo_hybrid", "bamba", "granite_4", "nemotron_h", "granite, experts")
_BY_TP = ("tp2 + 2*tp1", "tp2pp2", "tp4", "tp2sp2")


def _otherwise(case: Case) -> Iterator[Case]:
    """The same, of other types, computed again, and with frozen layers."""
    yield replace(case, name=f"{case.name}, checkpointed", activation_checkpointing=True)
    yield replace(case, name=f"{case.name}, frozen lower layers", frozen=("embeddings", "layers.0.", "layers.1."))
    yield replace(case, name=f"{case.name}, fp32", dtype=FLOAT32, optimizer="SGD")
    yield replace(case, name=f"{case.name}, bf16", dtype=BFLOAT16)


def by_heads() -> Iterator[Case]:
    """Recurrent layers of which each tensor parallel rank computes its own heads."""
    base = Case("", "qwen3_next", _BY_TP, steps=4)
    for family in _WITH_HEADS:
        own = replace(base, family=family)
        yield replace(own, name=f"by heads, {family}")
        yield replace(own, name=f"by heads, {family}, slices", strategies=("tp2 + 2*tp1", "tp2pp2/v", "tp4"), steps=3,
                      slices=True, recompute=True)  # fmt: skip
    few = replace(base, family="nemotron_h", steps=2)
    yield replace(few, name="by heads", strategies=("tp4", "tp2pp2/zb-h1"), slices=True, recompute=True, quick=True)
    yield replace(few, name="by heads on 8 ranks", strategies=("tp8", "tp4sp2", "tp4 + tp2pp2"))
    yield replace(few, name="by heads, split", strategies=("tp2pp2/zb-h1", "sp2 + tp2/zb-h1"), slices=True)
    yield replace(few, name="by heads, phases", strategies=("4*tp1 then 2*tp2 then tp4",))
    yield from _otherwise(replace(few, name="by heads"))
    for family in ADAPTED_BY_HEADS:
        own = replace(base, family=family, draws="dropout" in family)
        yield replace(own, name=f"by heads, {family}")
        yield replace(own, name=f"by heads, {family}, slices", strategies=("tp4", "tp2pp2/v"), steps=2, slices=True)


def by_heads_over_tokens() -> Iterator[Case]:
    """Recurrent layers of which each sequence parallel rank computes its own heads, for all tokens."""
    base = Case("", "qwen3_next", ("sp2 + 2*tp1", "sp4", "tp2sp2", "pp2sp2"), steps=4)
    for family in _WITH_HEADS:
        own = replace(base, family=family)
        yield replace(own, name=f"heads over sp, {family}")
        yield replace(own, name=f"heads over sp, {family}, slices", strategies=("sp4", "pp2sp2/v", "tp2sp2"), steps=3,
                      slices=True, recompute=True)  # fmt: skip
    few = replace(base, family="nemotron_h", steps=2)
    yield replace(few, name="heads over sp", strategies=("sp4", "pp2sp2/zb-h1"), slices=True, recompute=True,
                  quick=True)  # fmt: skip
    yield replace(few, name="heads over sp on 8 ranks", strategies=("sp8", "tp2sp4", "tp4sp2"))
    # Four ranks share two key heads, two by two.
    yield replace(few, name="heads over sp, fewer heads", family="qwen3_next", strategies=("sp4", "pp2sp2"),
                  slices=True)  # fmt: skip
    yield replace(few, name="heads over sp, split", strategies=("pp2sp2/zb-h1", "sp2/zb-h1 + tp2"), slices=True)
    yield replace(few, name="heads over sp, phases", strategies=("4*tp1 then 2*sp2 then sp4",))
    yield from _otherwise(replace(few, name="heads over sp"))
    for family in ADAPTED_BY_HEADS:
        own = replace(base, family=family, draws="dropout" in family, steps=2)
        yield replace(own, name=f"heads over sp, {family}", strategies=("sp4", "tp2sp2"))
        yield replace(own, name=f"heads over sp, {family}, slices", strategies=("sp2 + pp2", "pp2sp2/v"), slices=True)
