"""Training cases whose stages spread whole experts over their ranks [Note: whole experts]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.support.case import BFLOAT16, CHANGING, FLOAT32, FLOAT64, Case
from tests.support.routed_models import SURE

SPREAD = ("tp2ep2pp2", "sp2ep2 + 2*tp1", "tp4ep4", "pp3 + tp1", "tp2sp2ep4", "sp4ep4", "tp2sp2ep2")
SPREAD_8 = ("tp4ep4 + 2*pp2", "sp4ep4 + tp2sp2ep4", "8*tp1", "tp2sp2ep4pp2", "pp4 + tp4ep4")
IN_SLICES = ("tp2ep2pp2/v", "sp2ep2 + pp2/list", "tp2sp2ep4/list")
SPLIT = ("tp2ep2pp2/zb-h1", "sp2ep2 + pp2/zb-h1", "sp2ep2pp2/zb-h1")
PHASES = ("4*tp1 then 2*tp2ep2 then tp4ep4", "2*sp2ep2 then tp2sp2ep4")


def spread() -> Iterator[Case]:
    """Experts over tensor parallel ranks, over sequence parallel ones, over both, and on one rank, in turn."""
    for family in ("mixtral", "qwen3_moe", "gpt_oss"):
        yield Case(f"spread {family}", family, SPREAD, steps=7, quick=family == "qwen3_moe")
    base = Case("", "qwen3_moe", SPREAD, steps=7)
    yield replace(base, name="spread, all tokens", token_sharding=False)
    yield replace(base, name="spread gpt_oss, all tokens", family="gpt_oss", token_sharding=False)
    yield replace(base, name="spread fp32", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="spread mixtral fp32", family="mixtral", dtype=FLOAT32)
    sure = replace(base, family=SURE, dtype=BFLOAT16)
    yield replace(sure, name="spread bf16", quick=True)
    yield replace(sure, name="spread bf16, gradients too", grad_accum="bf16")
    yield replace(sure, name="spread bf16, slices", strategies=IN_SLICES, steps=3, slices=True, recompute=True)
    yield replace(sure, name="bf16 experts by width", strategies=CHANGING)
    for strategy in ("tp2ep2", "tp4ep4", "sp2ep2", "sp4ep4", "tp2sp2ep4", "tp2ep2pp2"):
        yield replace(base, name=f"spread {strategy}", strategies=(strategy,), steps=3)
    yield from _otherwise(replace(base, steps=4))
    yield from _sliced(replace(base, strategies=IN_SLICES, steps=3, slices=True))
    yield from _routed(replace(base, steps=4))
    yield from _hybrids(replace(base, dtype=FLOAT32, optimizer="SGD", steps=3))


def _otherwise(base: Case) -> Iterator[Case]:
    """Other numbers of ranks, nodes and phases; backwards in two parts, layers computed again, what is trained."""
    six = replace(base, family="experts for six")
    yield replace(six, name="spread over six experts", strategies=("sp3ep3 + tp1", "tp3ep3 + tp1", "sp2ep2 + tp2ep2"))
    yield replace(
        six, name="spread over 3 and 6", strategies=("sp3ep3 + tp3ep3", "tp2sp3ep6", "sp3ep3pp2", "tp2sp3ep2")
    )
    yield replace(six, name="spread over 3, slices", strategies=("sp3ep3pp2/v", "tp2sp3ep6/list"), slices=True, steps=2)
    yield replace(base, name="spread on 8 ranks", strategies=SPREAD_8, steps=5)
    yield replace(
        base,
        name="spread over 8 ranks",
        family="experts for eight",
        strategies=("tp2sp4ep8", "sp8ep8", "2*tp2sp2ep4", "tp2sp4ep2"),
    )
    yield replace(base, name="spread, nodes of 2 ranks", node_size=2, steps=7)
    yield replace(base, name="spread, nodes of 3 and 1 ranks", node_size=3, steps=7)
    yield replace(
        base,
        name="spread on 8 ranks of nodes of 3",
        family="experts for eight",
        strategies=("tp2sp4ep8", "sp4ep4 + tp4ep4", "4*tp2ep2"),
        node_size=3,
    )
    yield replace(base, name="spread, checkpointed", activation_checkpointing=True, steps=7)
    yield replace(base, name="spread, computed again", recompute=True, strategies=SPREAD[:3])
    yield replace(base, name="spread, split", strategies=SPLIT, steps=3)
    yield replace(base, name="spread gpt_oss, split", family="gpt_oss", strategies=SPLIT, steps=3)
    yield replace(base, name="spread, V", strategies=("tp2ep2pp2/v", "sp2ep2pp2/v", "pp2/v + sp2ep2"), steps=3)
    yield replace(base, name="spread, phases", strategies=PHASES)
    yield replace(base, name="spread gpt_oss, phases", family="gpt_oss", strategies=PHASES)
    yield replace(base, name="spread, phases on nodes", strategies=PHASES, node_size=2, activation_checkpointing=True)
    yield replace(base, name="spread, (tp2ep2 > sp2ep2)", strategies=("(tp2ep2[0:1] > sp2ep2[1:4])",), steps=2)
    yield replace(six, name="spread, (tp2ep2 > tp1 > sp3ep3)",
                  strategies=("(tp2ep2[0:1] > tp1[1:2] > sp3ep3[2:4])",), steps=2)  # fmt: skip
    yield replace(base, name="spread, frozen experts", frozen=("embed_tokens", "experts"))
    yield replace(base, name="spread, frozen routers", frozen=("gate.",))
    yield replace(base, name="spread, mean of sequences", loss_norm="sequence", masked_labels=True)
    yield replace(base, name="spread, own loss", own_loss="smoothed", family="mixtral")
    yield replace(base, name="spread, functions", functions="recompute", family="mixtral")
    yield replace(base, name="spread, fewer tokens than ranks", strategies=("sp4ep4", "tp2sp2ep4"),
                  lengths=(3,) * 20, tokens_per_step=3, steps=3)  # fmt: skip


def _sliced(base: Case) -> Iterator[Case]:
    yield replace(base, name="spread, slices", recompute=True, quick=True)
    yield replace(base, name="spread gpt_oss, slices", family="gpt_oss")
    yield replace(base, name="spread mixtral, slices", family="mixtral")
    yield replace(base, name="spread, slices, all tokens", token_sharding=False)
    yield replace(base, name="spread, slices, split", strategies=SPLIT)
    yield replace(base, name="spread, slices, phases", strategies=PHASES)
    yield replace(base, name="spread, balanced in slices", family="mixtral, balanced")
    yield replace(base, name="spread, lora in slices", family="lora beside experts", recompute=True)
    yield replace(base, name="spread, dropout in slices", family="dropout beside experts", draws=True, recompute=True)


def _routed(base: Case) -> Iterator[Case]:
    """Routers with a loss, with noise, whose expert is drawn; adapters and dropout beside experts."""
    for family in ("mixtral, balanced", "olmoe, balanced"):
        yield replace(base, name=f"spread, {family}", family=family)
    balanced = replace(base, family="mixtral, balanced")
    yield replace(balanced, name="spread, balanced, split", strategies=SPLIT)
    yield replace(balanced, name="spread, balanced, phases", strategies=PHASES)
    yield replace(balanced, name="spread, balanced, checkpointed", activation_checkpointing=True)
    yield replace(balanced, name="spread, balanced, V", strategies=("tp2ep2pp2/v", "sp2ep2pp2/v"), recompute=True)
    for family in ("noise on what is routed", "random routing", "dropout beside experts"):
        yield replace(base, name=f"spread, {family}", family=family, draws=True)
        yield replace(
            base, name=f"spread, {family}, checkpointed", family=family, draws=True, activation_checkpointing=True
        )
    yield replace(base, name="spread, shared experts", family="norms of queries and keys (GLM-4.5)")
    yield replace(base, name="spread, lora", family="lora beside experts")
    yield replace(base, name="spread, lora, split", family="lora beside experts", strategies=SPLIT)


def _hybrids(base: Case) -> Iterator[Case]:
    """Recurrent layers beside experts."""
    strategies = ("tp2ep2pp2", "sp2ep2 + 2*tp1", "tp2sp2ep4")
    # Exponentials of sums over a sequence magnify FP32's rounding in the delta rule's gradients.
    for family in ("qwen3_next", "qwen3_5_moe", "granite, experts", "lfm2_moe", "jamba"):
        own = replace(base, family=family, strategies=strategies, amplifies=family.startswith("qwen"))
        yield replace(own, name=f"spread hybrid, {family}")
    base = replace(base, dtype=FLOAT64, optimizer="AdamW", steps=2, slices=True)
    for family in ("qwen3_next", "granite, experts"):
        yield replace(base, name=f"spread hybrid, {family}, slices", family=family, strategies=IN_SLICES[:2])
    yield replace(base, name="spread hybrid, split", family="lfm2_moe", strategies=SPLIT)
    yield replace(
        base,
        name="spread hybrid, checkpointed",
        family="granite, experts",
        strategies=strategies,
        activation_checkpointing=True,
    )
