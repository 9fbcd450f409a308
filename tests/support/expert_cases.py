"""Training cases whose stages spread whole experts over their ranks [Note: whole experts]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.support.case import BFLOAT16, FLOAT32, Case

SPREAD = ("tp2ep2pp2", "sp2ep2 + 2*tp1", "tp4ep4", "pp3 + tp1", "tp2sp2ep4", "sp4ep4", "tp2sp2ep2")
SPREAD_8 = ("tp4ep4 + 2*pp2", "sp4ep4 + tp2sp2ep4", "8*tp1", "tp2sp2ep4pp2", "pp4 + tp4ep4")


def spread() -> Iterator[Case]:
    """Experts over tensor parallel ranks, over sequence parallel ones, over both, and on one rank, in turn."""
    for family in ("mixtral", "qwen3_moe", "gpt_oss"):
        yield Case(f"spread {family}", family, SPREAD, steps=7, quick=family == "qwen3_moe")
    base = Case("", "qwen3_moe", SPREAD, steps=7)
    yield replace(base, name="spread, all tokens", token_sharding=False)
    yield replace(base, name="spread gpt_oss, all tokens", family="gpt_oss", token_sharding=False)
    yield replace(base, name="spread fp32", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="spread mixtral fp32", family="mixtral", dtype=FLOAT32)
    yield replace(base, name="spread bf16", family="mixtral", dtype=BFLOAT16)
    yield replace(base, name="spread, checkpointed", activation_checkpointing=True)
    for strategy in ("tp2ep2", "tp4ep4", "sp2ep2", "sp4ep4", "tp2sp2ep4", "tp2ep2pp2"):
        yield replace(base, name=f"spread {strategy}", strategies=(strategy,), steps=3)
    yield replace(
        base, name="spread over six experts", family="qwen3_moe, balanced", steps=4,
        strategies=("sp3ep3 + tp1", "tp2ep2 + pp2", "sp2ep2 + tp2ep2"),
    )  # fmt: skip
    yield replace(base, name="spread on 8 ranks", strategies=SPREAD_8, steps=5)
    yield replace(base, name="spread, nodes of 2 ranks", node_size=2)
    yield replace(
        base, name="spread, split", strategies=("tp2ep2pp2/zb-h1", "sp2ep2 + pp2/zb-h1", "sp2ep2pp2/zb-h1"), steps=3
    )
    turns = ("tp2ep2pp2/v", "sp2ep2 + pp2/list", "tp2sp2ep4/list")
    yield replace(base, name="spread, slices", strategies=turns, steps=3, slices=True, recompute=True, quick=True)
    yield replace(base, name="spread gpt_oss, slices", family="gpt_oss", strategies=turns, steps=3, slices=True)
    yield replace(base, name="spread mixtral, slices", family="mixtral", strategies=turns, steps=3, slices=True)
    phases = ("4*tp1 then 2*tp2ep2 then tp4ep4", "2*sp2ep2 then tp2sp2ep4")
    yield replace(base, name="spread, phases", strategies=phases, steps=4)
    yield replace(base, name="spread, (tp2ep2 > sp2ep2)", strategies=("(tp2ep2[0:1] > sp2ep2[1:4])",), steps=2)
    yield replace(base, name="spread, frozen experts", frozen=("embed_tokens", "experts"), steps=4)
    yield replace(base, name="spread, mean of sequences", loss_norm="sequence", masked_labels=True, steps=4)
    yield replace(base, name="spread, own loss", own_loss="smoothed", family="mixtral", steps=4)
    yield replace(base, name="spread, balanced", family="mixtral, balanced", steps=4)
    yield replace(
        base, name="spread, balanced in slices", family="mixtral, balanced", strategies=turns, steps=3, slices=True
    )
    for family in ("noise on what is routed", "random routing"):
        yield replace(base, name=f"spread, {family}", family=family, draws=True, steps=4)
    yield replace(base, name="spread, lora", family="lora beside experts", steps=4)
    yield replace(base, name="spread, fewer tokens than ranks", strategies=("sp4ep4", "tp2sp2ep4"), lengths=(3,) * 20,
                  tokens_per_step=3, steps=3)  # fmt: skip
    hybrid = replace(base, family="qwen3_next", dtype=FLOAT32, optimizer="SGD", amplifies=True)
    yield replace(hybrid, name="spread, hybrid", strategies=("tp2ep2pp2", "sp2ep2 + 2*tp1", "tp2sp2ep4"), steps=3)
    yield replace(
        base, name="spread, hybrid in slices", family="qwen3_next", strategies=turns[:2], steps=2, slices=True
    )
