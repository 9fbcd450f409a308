"""Training cases whose backwards are split, whose sequences run in slices, or whose experts are spread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.support.case import (
    AMPLIFYING,
    BFLOAT16,
    CHANGING,
    CHANGING_8,
    FLOAT32,
    FLOAT64,
    IN_SLICES,
    NO_GRADIENT,
    UNUSUAL,
    Case,
)
from tests.support.changed_models import CHANGED_LINEARS
from tests.support.families import FAMILIES, LAYER_LIST, OTHER_SIZES, SURE

# --- Rows of the table of training cases whose backwards are split, whose sequences run in slices, or both.
SPLIT = ("tp2pp2/zb-h1", "sp2 + pp2/zb-h1", "pp4/zb-h1", "pp3/zb-h1 + tp1", "2*pp2")
SPLIT_8 = ("2*tp2pp2/zb-h1", "pp4/zb-h1 + sp2pp2/zb-h1", "tp2pp2sp2/zb-h1", "tp4pp2/zb-h1")
LIST = ("pp4/list", "sp2 + pp2/list", "tp2pp2/list", "pp3/list + tp1", "2*pp2")
LIST_8 = ("2*tp2pp2/list", "pp4/list + sp2pp2/list", "tp2pp2sp2/list", "tp4 + pp4/list")
V = ("tp2pp2/v", "sp2 + pp2/v", "2*pp2", "pp2/list + pp2/v", "tp4/v")
V_8 = ("2*tp2pp2/v", "pp4/list + sp2pp2/v", "tp2pp2sp2/v", "tp4pp2/v")


def scheduled() -> Iterator[Case]:
    """All of these rows."""
    yield from _split()
    yield from _sliced()
    yield from _listed()
    yield from _v()
    yield from _recomputed()


def _split() -> Iterator[Case]:
    """Backwards split into gradients of inputs and of weights, mixed with others that are not."""
    for family in (*FAMILIES, LAYER_LIST):
        if family not in OTHER_SIZES:
            yield Case(f"split {family}", family, SPLIT, quick=family == "mixtral")
    base = Case("", "llama", SPLIT)
    for family in ("hooks of parameters", "layers that share weights", "parameters beside linear layers"):
        yield base.row(f"split, {family}", family=family)
    for family in CHANGED_LINEARS:
        strategies = ("pp4/zb-h1", "2*pp2/zb-h1", "sp2 + pp2/zb-h1")
        yield base.row(f"split, {family}", *strategies, family=family)
    yield base.row("split fp32", dtype=FLOAT32, optimizer="SGD")
    yield base.row("split bf16", dtype=BFLOAT16)
    yield base.row("split bf16, gradients too", dtype=BFLOAT16, grad_accum="bf16")
    yield base.row("split, checkpointed", activation_checkpointing=True)
    yield base.row("split, checkpointed mixtral", family="mixtral", activation_checkpointing=True)
    yield base.row("split, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."))
    yield base.row("split, frozen tied", family="llama_tied", frozen=("embed_tokens",))
    yield base.row("split, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    yield base.row("split, no clipping", clip=0.0)
    yield base.row("split, few micro-batches", lengths=(30, 70) * 10, tokens_per_step=90)
    yield base.row("split, stages of different size", "(sp2[0:1] > tp2[1:4])/zb-h1",
                   "(tp1[0:1] > tp2[1:3] > tp1[3:4])/zb-h1", quick=True)  # fmt: skip
    yield base.row(
        "split, phases", "2*pp2/zb-h1 then tp2pp2/zb-h1", "4*tp1 then pp4/zb-h1 then 2*pp2", family="qwen3", quick=True
    )
    yield base.row("split, nodes of 2 ranks", node_size=2, family="llama_tied")
    yield base.row("split on 8 ranks", *SPLIT_8)
    yield base.row("split on 8 ranks, bf16", *SPLIT_8, dtype=BFLOAT16)


_SLICED = Case("", "llama", IN_SLICES, steps=3, slices=True)


def _sliced() -> Iterator[Case]:
    """Long sequences in slices, which run in turns, with short ones beside and between them."""
    base = _SLICED
    for strategy in ("tp1", "tp2", "pp2", "sp2", "pp4", "tp2pp2sp2", "sp4 + tp2pp2", "2*pp4"):
        yield base.row(f"slices {strategy}", strategy, family="qwen3")
    for family in (
        "llama_tied", "mistral", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe", "cohere", "gpt_neox", "gpt2",
        "gpt_oss", "longrope", "positions from the padding id", "embeddings of each layer",
    ):  # fmt: skip
        frozen = NO_GRADIENT if family in UNUSUAL else ()
        yield base.row(f"slices, {family}", family=family, frozen=frozen, amplifies=family in AMPLIFYING)
    yield base.row("slices fp32", family="qwen3", dtype=FLOAT32)
    yield base.row("slices fp32 sgd", dtype=FLOAT32, optimizer="SGD")
    yield base.row("slices bf16", dtype=BFLOAT16)
    yield base.row("slices, checkpointed", family="mistral", activation_checkpointing=True, quick=True)
    yield base.row("slices, checkpointed fp32 mixtral", family="mixtral", dtype=FLOAT32, activation_checkpointing=True)
    yield base.row("slices, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."),
                   activation_checkpointing=True, quick=True)  # fmt: skip
    yield base.row("slices, frozen queries and keys", frozen=("embed_tokens", "q_proj", "k_proj", "v_proj"),
                   activation_checkpointing=True)  # fmt: skip
    yield base.row("slices, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    yield base.row("slices, random routing", family="random routing", draws=True, frozen=NO_GRADIENT)
    yield base.row("slices, masked labels", masked_labels=True)
    yield base.row("slices, mean of sequences", loss_norm="sequence", masked_labels=True)
    yield base.row("slices, mean of micro-batches", loss_norm="micro_batch", masked_labels=True, quick=True)
    yield base.row("slices, fewer tokens than sp", "sp4", "tp2sp2", lengths=(31, 31, 60) * 7, tokens_per_step=31)
    yield base.row("slices, stages of different tp and sp", "(sp2[0:1] > tp2[1:4])")
    yield base.row("slices in phases", "4*tp1 then 2*pp2 then tp2sp2", "pp2 + sp2 then pp4", quick=True)
    yield base.row("slices on 8 ranks", *CHANGING_8)
    yield base.row("slices on 8 ranks of 2 nodes", *CHANGING_8, node_size=4)
    yield base.row("slices, long ones only", "2*pp2", "tp2pp2", lengths=(300, 200, 450) * 8)


def _listed() -> Iterator[Case]:
    """Orders made from costs, with whole sequences and with slices, mixed with 1F1B."""
    base = Case("", "llama", LIST)
    yield base.row("list", family="llama_tied")
    for family in ("qwen3", "gemma2", "mixtral", "gpt2", "gpt_oss", "layer_list"):
        yield base.row(f"list, {family}", family=family)
    yield base.row("list fp32", dtype=FLOAT32, optimizer="SGD")
    yield base.row("list bf16", dtype=BFLOAT16)
    yield base.row("list, checkpointed", activation_checkpointing=True)
    yield base.row("list, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."))
    yield base.row("list, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    yield base.row("list, phases", "2*pp2/list then tp2pp2/list", "4*tp1 then pp4/list")
    yield base.row("list on 8 ranks", *LIST_8)
    yield base.row("list on 8 ranks of 2 nodes", *LIST_8, node_size=4)
    slices = replace(base, steps=3, slices=True, strategies=LIST[:3])
    yield slices.row("list, slices", family="gemma2", steps=2, quick=True)
    for family in ("llama_tied", "gemma3_text", "mixtral", "qwen3", "gpt_oss"):
        yield slices.row(f"list, slices, {family}", family=family)
    yield slices.row("list, slices, checkpointed", family="mistral", activation_checkpointing=True)
    yield slices.row("list, slices, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."),
                     activation_checkpointing=True)  # fmt: skip
    yield slices.row("list, slices, long ones only", lengths=(300, 200, 450) * 8)
    yield slices.row("list, slices, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    yield slices.row("list, slices on 8 ranks", *LIST_8)


def _v() -> Iterator[Case]:
    """Two ranges of layers on each rank, mixed with one."""
    base = Case("", "llama", V)
    deep = "llama_8_layers"  # tied
    yield base.row("V", family="llama_tied", steps=3, quick=True)
    yield base.row("V of four stages", "pp4/v", "pp3/v + tp1", family=deep, steps=2)
    yield base.row("V of four stages, more", "pp4/v", "2*pp2/v", "pp3/v + tp1", "pp4", family=deep)
    for family in ("qwen3", "gemma2", "gemma3_text", "mixtral", "phi3", "gpt2", "gpt_oss", "layer_list", "longrope",
                   "positions from the padding id", "hooks of parameters", "layers that share weights"):  # fmt: skip
        frozen = NO_GRADIENT if family in UNUSUAL else ()
        yield base.row(f"V, {family}", family=family, frozen=frozen)
    yield base.row("V fp32", dtype=FLOAT32, optimizer="SGD")
    yield base.row("V bf16", dtype=BFLOAT16)
    yield base.row("V bf16, gradients too", dtype=BFLOAT16, grad_accum="bf16")
    yield base.row("V, checkpointed", family=deep, activation_checkpointing=True)
    yield base.row("V, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."))
    yield base.row("V, frozen upper layers", frozen=("layers.2.", "layers.3.", "lm_head"))
    yield base.row("V, frozen tied", family="llama_tied", frozen=("embed_tokens",))
    yield base.row("V, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    yield base.row("V, masked labels", masked_labels=True, loss_norm="sequence")
    yield base.row("V, idle pipelines", "2*pp2/v", "pp2/v + 2*tp1", lengths=(30,) * 20, tokens_per_step=30)
    yield base.row(
        "V, stages of different tp and sp", "(sp2[0:1,3:4] > tp2[1:2,2:3])/list", "(tp2 > sp2)/v", "(tp1 > tp2)/v + tp1"
    )
    yield base.row("V, phases", "2*pp2/v then tp2pp2/v", "4*tp1 then pp2/v + pp2")
    yield base.row("V, nodes of 2 ranks", family="llama_tied", node_size=2)
    yield base.row("V on 8 ranks", *V_8)
    yield base.row("V of four stages on 8 ranks", "tp2pp4/v", "2*pp4/v", "sp2pp4/v", family=deep)
    slices = replace(base, steps=3, slices=True, strategies=V[:3])
    yield slices.row("V, slices", family="gemma2", steps=2, quick=True)
    for family in ("llama_tied", "gemma3_text", "mixtral", "qwen3_moe"):
        yield slices.row(f"V, slices, {family}", family=family)
    yield slices.row("V of four stages, slices", "pp4/v", "2*pp2/v", "pp3/v + tp1", family=deep)
    yield slices.row("V, slices, checkpointed", family="mistral", activation_checkpointing=True)
    yield slices.row("V, slices, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."),
                     activation_checkpointing=True)  # fmt: skip
    yield slices.row("V, slices, frozen upper layers", frozen=("layers.2.", "layers.3."), activation_checkpointing=True)
    yield slices.row("V, slices, long ones only", lengths=(300, 200, 450) * 8)
    yield slices.row("V, slices on 8 ranks", *V_8)


def in_groups() -> Iterator[Case]:
    """Sequence parallel ranks exchange heads in groups; every other row with such ranks does so too, where it can."""
    base = Case("", "llama", ("sp2pp2", "tp2sp2", "sp4", "sp2 + 2*tp1"), steps=4)
    yield base.row("groups of heads")
    yield base.row("groups of heads, few steps", "sp2pp2", "sp4", steps=2)
    yield base.row("all heads at once", sp_overlap=False)
    yield base.row("groups of heads, one key head", "sp4", "sp2pp2", family="llama_1_key_head", steps=2, quick=True)
    yield base.row("groups of heads, split", "sp2pp2/zb-h1", "tp2sp2/list", family="mistral")
    yield base.row("groups of heads, sinks", family="gpt_oss", activation_checkpointing=True)
    yield base.row("groups of heads, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    sliced = replace(base, strategies=("sp2pp2/v", "sp4/list"), steps=2, slices=True, recompute=True)
    yield sliced.row("groups of heads, slices", family="mistral")
    yield sliced.row("groups of heads, slices, one key head", family="llama_1_key_head")
    yield sliced.row(
        "groups of heads, slices, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT, quick=True
    )
    yield sliced.row("groups of heads, slices, over nodes of 1 rank", family="llama_tied", node_size=1, quick=True)
    yield sliced.row("groups of heads, slices, over two nodes, dropout", "sp4/list", "sp4", "sp2pp2/v",
                     family="dropout (Phi)", draws=True, frozen=NO_GRADIENT, node_size=2)  # fmt: skip
    yield sliced.row(
        "groups of heads, slices, over two nodes of 8 ranks", "sp4pp2/v", "tp2sp2pp2/v", "tp2sp4", node_size=2
    )
    # Four heads of a rank in three groups: 1, 2 and 1 of them.
    uneven = replace(base, family="llama_8_key_heads", strategies=("sp2pp2", "2*sp2", "sp2 + 2*tp1"), sp_groups=3)
    yield uneven.row("groups of unequally many heads", steps=2, quick=True)
    yield uneven.row("groups of unequally many heads, again", activation_checkpointing=True)
    yield sliced.row(
        "groups of unequally many heads, slices", "sp2pp2/v", "2*sp2/list", family="llama_8_key_heads", sp_groups=3
    )
    yield sliced.row("groups of unequally many heads, slices, dropout", "sp2pp2/v", "2*sp2/list",
                     family="dropout (Phi)", draws=True, frozen=NO_GRADIENT, sp_groups=3)  # fmt: skip
    yield base.row("groups of heads fp32", dtype=FLOAT32, optimizer="SGD")
    yield base.row("groups of heads bf16", dtype=BFLOAT16)
    yield base.row("groups of heads on 8 ranks", "sp8", "tp2sp4", "sp4pp2/v")


def over_nodes() -> Iterator[Case]:
    """Stages of pipelines whose sequence parallel ranks reach into a second node, with all that long contexts use."""
    strategies = ("sp4pp2/v", "tp2sp2pp2/list", "sp2pp2/list + sp4", "(sp4[0:1] > tp4[1:4])/list")
    base = Case("", "llama", strategies, steps=4, node_size=3, slices=True, recompute=True)
    yield base.row("SP over nodes")
    for family in ("llama_tied", "mistral", "gemma2", "mixtral", "gpt_oss", "llama_1_key_head"):
        yield base.row(f"SP over nodes, {family}", family=family)
    yield base.row("SP over nodes, all tokens", token_sharding=False)
    yield base.row("SP over nodes, all heads at once", sp_overlap=False)
    yield base.row("SP over nodes, lora", family="lora")
    yield base.row("SP over nodes, lora with dropout", family="lora with dropout", draws=True)
    yield base.row("SP over nodes, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    yield base.row("SP over nodes, states", family="bamba")
    yield base.row("SP over nodes, balanced", family="mixtral, balanced")
    yield base.row("SP over nodes, mean of sequences", loss_norm="sequence", weighted=True)
    yield base.row("SP over nodes, phases", "2*sp2pp2/list then sp4pp2/v", "8*tp1 then sp8", steps=2)
    yield base.row("SP over nodes, split", "sp4pp2/zb-h1", "tp2sp2pp2/zb-h1", slices=False, recompute=False)
    yield base.row("SP over nodes fp32", dtype=FLOAT32, optimizer="SGD")


def owned() -> Iterator[Case]:
    """Masters of layers are owned by the ranks that compute them under one of the strategies [Note: owners]."""
    base = Case("", "llama", ("pp4", "tp2pp2/v", "sp2 + 2*tp1", "tp4"), steps=4, node_size=2, owned_by="pp4")
    yield base.row("owners, one stage a rank", quick=True)
    yield base.row("owners, V, slices", "sp2pp2/v", "sp2 + 2*tp1", "tp2sp2", "pp4/list", owned_by="sp2pp2/v",
                   slices=True, recompute=True, quick=True)  # fmt: skip
    yield base.row("owners, two pipelines", "2*pp2", "sp4", "pp4", owned_by="2*pp2", family="llama_tied")
    yield base.row("owners, mixtral", family="mixtral", owned_by="tp2pp2/v")
    yield base.row("owners, frozen layers", "2*pp2", "sp4", "pp4", owned_by="2*pp2", frozen=("layers.0.", "layers.3."))
    yield base.row("owners, phases", "4*tp1 then pp4", "tp2pp2 then 2*pp2", owned_by="2*pp2")
    yield base.row("owners, states on host", run=500)
    yield base.row("owners, lora", family="lora")
    yield base.row("owners fp32", dtype=FLOAT32, optimizer="SGD")
    yield base.row("owners bf16", dtype=BFLOAT16)


def _recomputed() -> Iterator[Case]:
    """Shares of layers computed again, which differ from micro-batch to micro-batch."""
    whole = Case("", "llama", CHANGING, steps=3, recompute=True)
    sliced = replace(whole, slices=True)
    deep = "llama_8_layers"  # tied
    yield whole.row("recomputed")
    yield whole.row("recomputed layer list", family=LAYER_LIST, quick=True)
    yield whole.row("recomputed, split", *SPLIT[:3], family="mixtral")
    yield whole.row("recomputed, list", *LIST[:3], family=deep)
    yield whole.row("recomputed, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."))
    yield whole.row("recomputed, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    yield whole.row("recomputed on 8 ranks", *CHANGING_8)
    yield sliced.row("recomputed slices", family="gemma2")
    yield sliced.row("recomputed slices, list", *LIST[:3], family="mixtral")
    yield sliced.row("recomputed slices, V", "pp4/v", "tp2pp2/v", family=deep, steps=2)
    yield sliced.row("recomputed slices, V mixtral", *V[:3], family="mixtral")
    yield sliced.row("recomputed slices, V, dropout", *V[:2], family="dropout (Phi)", draws=True, frozen=NO_GRADIENT,
                     steps=2, quick=True)  # fmt: skip
    yield sliced.row("recomputed slices, V, frozen upper layers", *V[:3], frozen=("layers.2.", "layers.3."))
    yield sliced.row("recomputed slices, V fp32", *V[:3], family="qwen3", dtype=FLOAT32)
    yield sliced.row("recomputed slices, V bf16", *V[:3], dtype=BFLOAT16)
    yield sliced.row(
        "recomputed slices, V, all layers as well", *V[:3], family="mistral", activation_checkpointing=True
    )
    yield sliced.row("recomputed slices in phases", "2*pp2/v then tp2pp2/v", "4*tp1 then pp4/list")
    yield sliced.row("recomputed slices, V on 8 ranks", *V_8)


def with_sinks() -> Iterator[Case]:
    """Attention with sinks, by the log-sum-exp of kernels that know none, in windows of 8 tokens and without."""
    base = Case("", "gpt_oss", ("tp2pp2", "sp2 + 2*tp1", "tp4", "tp2sp2"), steps=4)
    ones = (1, 30, 1, 1, 9, 8, 200) * 4  # also the only sequences of a rank
    yield base.row("sinks, sequences of one token", lengths=ones, tokens_per_step=60, steps=2, quick=True)
    sliced = replace(base, strategies=("tp2pp2/v", "sp2 + pp2/list", "tp2sp2/list", "sp4"), slices=True)
    yield sliced.row("sinks, slices")
    yield sliced.row("sinks, slices computed again", recompute=True)
    yield sliced.row("sinks, slices, checkpointed", activation_checkpointing=True, node_size=2)
    yield sliced.row("sinks, slices, split", "pp2/zb-h1 + tp2/list", "tp2pp2/zb-h1")
    yield base.row("sinks, frozen", frozen=("sinks",))
    yield base.row("sinks, all tokens", token_sharding=False)
    yield base.row("sinks, phases", "4*tp1 then 2*tp2 then tp4", "2*sp2 then sp4")
    yield base.row("sinks fp32", dtype=FLOAT32, optimizer="SGD")
    yield base.row("sinks on 8 ranks", "tp4sp2", "sp4 + tp2pp2", "sp2tp2pp2/v", slices=True)


# --- Training cases whose stages spread whole experts over their ranks [Note: whole experts].
SPREAD = ("tp2ep2pp2", "sp2ep2 + 2*tp1", "tp4ep4", "pp3 + tp1", "tp2sp2ep4", "sp4ep4", "tp2sp2ep2")
SPREAD_8 = ("tp4ep4 + 2*pp2", "sp4ep4 + tp2sp2ep4", "8*tp1", "tp2sp2ep4pp2", "pp4 + tp4ep4")
SPREAD_SLICES = ("tp2ep2pp2/v", "sp2ep2 + pp2/list", "tp2sp2ep4/list")
SPREAD_SPLIT = ("tp2ep2pp2/zb-h1", "sp2ep2 + pp2/zb-h1", "sp2ep2pp2/zb-h1")
PHASES = ("4*tp1 then 2*tp2ep2 then tp4ep4", "2*sp2ep2 then tp2sp2ep4")


def spread() -> Iterator[Case]:
    """Experts over tensor parallel ranks, over sequence parallel ones, over both, and on one rank, in turn."""
    for family in ("mixtral", "qwen3_moe", "gpt_oss"):
        yield Case(f"spread {family}", family, SPREAD, steps=7, quick=family == "qwen3_moe")
    base = Case("", "qwen3_moe", SPREAD, steps=7)
    yield base.row("spread, all tokens", token_sharding=False)
    yield base.row("spread gpt_oss, all tokens", family="gpt_oss", token_sharding=False)
    yield base.row("spread fp32", dtype=FLOAT32, optimizer="SGD")
    yield base.row("spread mixtral fp32", family="mixtral", dtype=FLOAT32)
    sure = replace(base, family=SURE, dtype=BFLOAT16)
    yield sure.row("spread bf16", quick=True)
    yield sure.row("spread bf16, gradients too", grad_accum="bf16")
    yield sure.row("spread bf16, slices", *SPREAD_SLICES, steps=3, slices=True, recompute=True)
    yield sure.row("bf16 experts by width", *CHANGING)
    yield sure.row("bf16 experts, split and checkpointed", *SPREAD_SPLIT, activation_checkpointing=True, steps=3)
    for strategy in ("tp2ep2", "tp4ep4", "sp2ep2", "sp4ep4", "tp2sp2ep4", "tp2ep2pp2"):
        yield base.row(f"spread {strategy}", strategy, steps=3)
    yield from _otherwise(replace(base, steps=4))
    yield from _spread_in_slices(replace(base, strategies=SPREAD_SLICES, steps=3, slices=True))
    yield from _routed(replace(base, steps=4))
    yield from _hybrids(replace(base, dtype=FLOAT32, optimizer="SGD", steps=3))


def _otherwise(base: Case) -> Iterator[Case]:
    """Other numbers of ranks, nodes and phases; backwards in two parts, layers computed again, what is trained."""
    six = replace(base, family="experts for six")
    yield six.row("spread over six experts", "sp3ep3 + tp1", "tp3ep3 + tp1", "sp2ep2 + tp2ep2")
    yield six.row("spread over 3 and 6", "sp3ep3 + tp3ep3", "tp2sp3ep6", "sp3ep3pp2", "tp2sp3ep2")
    yield six.row("spread over 3, slices", "sp3ep3pp2/v", "tp2sp3ep6/list", slices=True, steps=2)
    yield base.row("spread on 8 ranks", *SPREAD_8, steps=5)
    yield base.row("spread over 8 ranks", "tp2sp4ep8", "sp8ep8", "2*tp2sp2ep4", "tp2sp4ep2", family="experts for eight")
    yield base.row("spread, nodes of 2 ranks", node_size=2, steps=7)
    yield base.row("spread, nodes of 3 and 1 ranks", node_size=3, steps=7)
    yield base.row("spread on 8 ranks of nodes of 3", "tp2sp4ep8", "sp4ep4 + tp4ep4", "4*tp2ep2",
                   family="experts for eight", node_size=3)  # fmt: skip
    yield base.row("spread, checkpointed", activation_checkpointing=True, steps=7)
    yield base.row("spread, computed again", *SPREAD[:3], recompute=True)
    yield base.row("spread, split", *SPREAD_SPLIT, steps=3)
    yield base.row("spread gpt_oss, split", *SPREAD_SPLIT, family="gpt_oss", steps=3)
    yield base.row("spread, V", "tp2ep2pp2/v", "sp2ep2pp2/v", "pp2/v + sp2ep2", steps=3)
    yield base.row("spread, phases", *PHASES)
    yield base.row("spread gpt_oss, phases", *PHASES, family="gpt_oss")
    yield base.row("spread, phases on nodes", *PHASES, node_size=2, activation_checkpointing=True)
    yield base.row("spread, (tp2ep2 > sp2ep2)", "(tp2ep2[0:1] > sp2ep2[1:4])", steps=2)
    yield six.row("spread, (tp2ep2 > tp1 > sp3ep3)", "(tp2ep2[0:1] > tp1[1:2] > sp3ep3[2:4])", steps=2)
    yield base.row("spread, frozen experts", frozen=("embed_tokens", "experts"))
    yield base.row("spread, frozen routers", frozen=("gate.",))
    yield base.row("spread, mean of sequences", loss_norm="sequence", masked_labels=True)
    yield base.row("spread, own loss", own_loss="smoothed", family="mixtral")
    yield base.row("spread, functions", functions="recompute", family="mixtral")
    yield base.row(
        "spread, fewer tokens than ranks", "sp4ep4", "tp2sp2ep4", lengths=(3,) * 20, tokens_per_step=3, steps=3
    )


def _spread_in_slices(base: Case) -> Iterator[Case]:
    yield base.row("spread, slices", recompute=True, quick=True)
    yield base.row("spread gpt_oss, slices", family="gpt_oss")
    yield base.row("spread mixtral, slices", family="mixtral")
    yield base.row("spread, slices, all tokens", token_sharding=False)
    yield base.row("spread, slices, split", *SPREAD_SPLIT)
    yield base.row("spread, slices, phases", *PHASES)
    yield base.row("spread, balanced in slices", family="mixtral, balanced")
    yield base.row("spread, lora in slices", family="lora beside experts", recompute=True)
    yield base.row("spread, dropout in slices", family="dropout beside experts", draws=True, recompute=True)


def _routed(base: Case) -> Iterator[Case]:
    """Routers with a loss, with noise, whose expert is drawn; adapters and dropout beside experts."""
    for family in ("mixtral, balanced", "olmoe, balanced"):
        yield base.row(f"spread, {family}", family=family)
    balanced = replace(base, family="mixtral, balanced")
    yield balanced.row("spread, balanced, split", *SPREAD_SPLIT)
    yield balanced.row("spread, balanced, phases", *PHASES)
    yield balanced.row("spread, balanced, checkpointed", activation_checkpointing=True)
    yield balanced.row("spread, balanced, V", "tp2ep2pp2/v", "sp2ep2pp2/v", recompute=True)
    for family in ("noise on what is routed", "random routing", "dropout beside experts"):
        yield base.row(f"spread, {family}", family=family, draws=True)
        yield base.row(f"spread, {family}, checkpointed", family=family, draws=True, activation_checkpointing=True)
    yield base.row("spread, shared experts", family="norms of queries and keys (GLM-4.5)")
    yield base.row("spread, lora", family="lora beside experts")
    yield base.row("spread, lora, split", *SPREAD_SPLIT, family="lora beside experts")


def _hybrids(base: Case) -> Iterator[Case]:
    """Recurrent layers beside experts."""
    strategies = ("tp2ep2pp2", "sp2ep2 + 2*tp1", "tp2sp2ep4")
    # Exponentials of sums over a sequence magnify FP32's rounding in the delta rule's gradients.
    for family in ("qwen3_next", "qwen3_5_moe", "granite, experts", "lfm2_moe", "jamba"):
        own = replace(base, family=family, strategies=strategies, amplifies=family.startswith("qwen"))
        yield own.row(f"spread hybrid, {family}")
    base = replace(base, dtype=FLOAT64, optimizer="AdamW", steps=2, slices=True)
    for family in ("qwen3_next", "granite, experts"):
        yield base.row(f"spread hybrid, {family}, slices", *SPREAD_SLICES[:2], family=family)
    yield base.row("spread hybrid, split", *SPREAD_SPLIT, family="lfm2_moe")
    yield base.row("spread hybrid, checkpointed", *strategies, family="granite, experts", activation_checkpointing=True)
