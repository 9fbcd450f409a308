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
        yield replace(base, name=f"split, {family}", family=family)
    for family in CHANGED_LINEARS:
        strategies = ("pp4/zb-h1", "2*pp2/zb-h1", "sp2 + pp2/zb-h1")
        yield replace(base, name=f"split, {family}", family=family, strategies=strategies)
    yield replace(base, name="split fp32", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="split bf16", dtype=BFLOAT16)
    yield replace(base, name="split bf16, gradients too", dtype=BFLOAT16, grad_accum="bf16")
    yield replace(base, name="split, checkpointed", activation_checkpointing=True)
    yield replace(base, name="split, checkpointed mixtral", family="mixtral", activation_checkpointing=True)
    yield replace(base, name="split, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."))
    yield replace(base, name="split, frozen tied", family="llama_tied", frozen=("embed_tokens",))
    yield replace(base, name="split, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    yield replace(base, name="split, no clipping", clip=0.0)
    yield replace(base, name="split, few micro-batches", lengths=(30, 70) * 10, tokens_per_step=90)
    yield replace(
        base, name="split, stages of different size", quick=True,
        strategies=("(sp2[0:1] > tp2[1:4])/zb-h1", "(tp1[0:1] > tp2[1:3] > tp1[3:4])/zb-h1"),
    )  # fmt: skip
    yield replace(
        base, name="split, phases", family="qwen3", quick=True,
        strategies=("2*pp2/zb-h1 then tp2pp2/zb-h1", "4*tp1 then pp4/zb-h1 then 2*pp2"),
    )  # fmt: skip
    yield replace(base, name="split, nodes of 2 ranks", node_size=2, family="llama_tied")
    yield replace(base, name="split on 8 ranks", strategies=SPLIT_8)
    yield replace(base, name="split on 8 ranks, bf16", strategies=SPLIT_8, dtype=BFLOAT16)


_SLICED = Case("", "llama", IN_SLICES, steps=3, slices=True)


def _sliced() -> Iterator[Case]:
    """Long sequences in slices, which run in turns, with short ones beside and between them."""
    base = _SLICED
    for strategy in ("tp1", "tp2", "pp2", "sp2", "pp4", "tp2pp2sp2", "sp4 + tp2pp2", "2*pp4"):
        yield replace(base, name=f"slices {strategy}", family="qwen3", strategies=(strategy,))
    for family in (
        "llama_tied", "mistral", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe", "cohere", "gpt_neox", "gpt2",
        "gpt_oss", "longrope", "positions from the padding id", "embeddings of each layer",
    ):  # fmt: skip
        frozen = NO_GRADIENT if family in UNUSUAL else ()
        yield replace(
            base, name=f"slices, {family}", family=family, frozen=frozen,
            amplifies=family in AMPLIFYING,
        )  # fmt: skip
    yield replace(base, name="slices fp32", family="qwen3", dtype=FLOAT32)
    yield replace(base, name="slices fp32 sgd", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="slices bf16", dtype=BFLOAT16)
    yield replace(base, name="slices, checkpointed", family="mistral", activation_checkpointing=True, quick=True)
    yield replace(base, name="slices, checkpointed fp32 mixtral", family="mixtral", dtype=FLOAT32,
                  activation_checkpointing=True)  # fmt: skip
    yield replace(base, name="slices, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."),
                  activation_checkpointing=True, quick=True)  # fmt: skip
    yield replace(base, name="slices, frozen queries and keys", frozen=("embed_tokens", "q_proj", "k_proj", "v_proj"),
                  activation_checkpointing=True)  # fmt: skip
    yield replace(base, name="slices, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    yield replace(base, name="slices, random routing", family="random routing", draws=True, frozen=NO_GRADIENT)
    yield replace(base, name="slices, masked labels", masked_labels=True)
    yield replace(
        base, name="slices, mean of sequences", loss_norm="sequence", masked_labels=True,
    )  # fmt: skip
    yield replace(base, name="slices, mean of micro-batches", loss_norm="micro_batch", masked_labels=True, quick=True)
    yield replace(base, name="slices, fewer tokens than sp", strategies=("sp4", "tp2sp2"), lengths=(31, 31, 60) * 7,
                  tokens_per_step=31)  # fmt: skip
    yield replace(base, name="slices, stages of different tp and sp", strategies=("(sp2[0:1] > tp2[1:4])",))
    yield replace(base, name="slices in phases", strategies=("4*tp1 then 2*pp2 then tp2sp2", "pp2 + sp2 then pp4"),
                  quick=True)  # fmt: skip
    yield replace(base, name="slices on 8 ranks", strategies=CHANGING_8)
    yield replace(base, name="slices on 8 ranks of 2 nodes", strategies=CHANGING_8, node_size=4)
    yield replace(base, name="slices, long ones only", lengths=(300, 200, 450) * 8, strategies=("2*pp2", "tp2pp2"))


def _listed() -> Iterator[Case]:
    """Orders made from costs, with whole sequences and with slices, mixed with 1F1B."""
    base = Case("", "llama", LIST)
    yield replace(base, name="list", family="llama_tied")
    for family in ("qwen3", "gemma2", "mixtral", "gpt2", "gpt_oss", "layer_list"):
        yield replace(base, name=f"list, {family}", family=family)
    yield replace(base, name="list fp32", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="list bf16", dtype=BFLOAT16)
    yield replace(base, name="list, checkpointed", activation_checkpointing=True)
    yield replace(base, name="list, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."))
    yield replace(base, name="list, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    yield replace(base, name="list, phases", strategies=("2*pp2/list then tp2pp2/list", "4*tp1 then pp4/list"))
    yield replace(base, name="list on 8 ranks", strategies=LIST_8)
    yield replace(base, name="list on 8 ranks of 2 nodes", strategies=LIST_8, node_size=4)
    slices = replace(base, steps=3, slices=True, strategies=LIST[:3])
    yield replace(slices, name="list, slices", family="gemma2", steps=2, quick=True)
    for family in ("llama_tied", "gemma3_text", "mixtral", "qwen3", "gpt_oss"):
        yield replace(slices, name=f"list, slices, {family}", family=family)
    yield replace(slices, name="list, slices, checkpointed", family="mistral", activation_checkpointing=True)
    yield replace(slices, name="list, slices, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."),
                  activation_checkpointing=True)  # fmt: skip
    yield replace(slices, name="list, slices, long ones only", lengths=(300, 200, 450) * 8)
    yield replace(slices, name="list, slices, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    yield replace(slices, name="list, slices on 8 ranks", strategies=LIST_8)


def _v() -> Iterator[Case]:
    """Two ranges of layers on each rank, mixed with one."""
    base = Case("", "llama", V)
    deep = "llama_8_layers"  # tied
    yield replace(base, name="V", family="llama_tied", steps=3, quick=True)
    yield replace(base, name="V of four stages", family=deep, strategies=("pp4/v", "pp3/v + tp1"), steps=2)
    yield replace(base, name="V of four stages, more", family=deep,
                  strategies=("pp4/v", "2*pp2/v", "pp3/v + tp1", "pp4"))  # fmt: skip
    for family in ("qwen3", "gemma2", "gemma3_text", "mixtral", "phi3", "gpt2", "gpt_oss", "layer_list", "longrope",
                   "positions from the padding id", "hooks of parameters", "layers that share weights"):  # fmt: skip
        frozen = NO_GRADIENT if family in UNUSUAL else ()
        yield replace(base, name=f"V, {family}", family=family, frozen=frozen)
    yield replace(base, name="V fp32", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="V bf16", dtype=BFLOAT16)
    yield replace(base, name="V bf16, gradients too", dtype=BFLOAT16, grad_accum="bf16")
    yield replace(base, name="V, checkpointed", family=deep, activation_checkpointing=True)
    yield replace(base, name="V, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."))
    yield replace(base, name="V, frozen upper layers", frozen=("layers.2.", "layers.3.", "lm_head"))
    yield replace(base, name="V, frozen tied", family="llama_tied", frozen=("embed_tokens",))
    yield replace(base, name="V, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    yield replace(base, name="V, masked labels", masked_labels=True, loss_norm="sequence")
    yield replace(base, name="V, idle pipelines", strategies=("2*pp2/v", "pp2/v + 2*tp1"), lengths=(30,) * 20,
                  tokens_per_step=30)  # fmt: skip
    yield replace(
        base, name="V, stages of different tp and sp",
        strategies=("(sp2[0:1,3:4] > tp2[1:2,2:3])/list", "(tp2 > sp2)/v", "(tp1 > tp2)/v + tp1"),
    )  # fmt: skip
    yield replace(base, name="V, phases", strategies=("2*pp2/v then tp2pp2/v", "4*tp1 then pp2/v + pp2"))
    yield replace(base, name="V, nodes of 2 ranks", family="llama_tied", node_size=2)
    yield replace(base, name="V on 8 ranks", strategies=V_8)
    yield replace(base, name="V of four stages on 8 ranks", family=deep, strategies=("tp2pp4/v", "2*pp4/v", "sp2pp4/v"))
    slices = replace(base, steps=3, slices=True, strategies=V[:3])
    yield replace(slices, name="V, slices", family="gemma2", steps=2, quick=True)
    for family in ("llama_tied", "gemma3_text", "mixtral", "qwen3_moe"):
        yield replace(slices, name=f"V, slices, {family}", family=family)
    yield replace(slices, name="V of four stages, slices", family=deep, strategies=("pp4/v", "2*pp2/v", "pp3/v + tp1"))
    yield replace(slices, name="V, slices, checkpointed", family="mistral", activation_checkpointing=True)
    yield replace(slices, name="V, slices, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."),
                  activation_checkpointing=True)  # fmt: skip
    yield replace(slices, name="V, slices, frozen upper layers", frozen=("layers.2.", "layers.3."),
                  activation_checkpointing=True)  # fmt: skip
    yield replace(slices, name="V, slices, long ones only", lengths=(300, 200, 450) * 8)
    yield replace(slices, name="V, slices on 8 ranks", strategies=V_8)


def in_groups() -> Iterator[Case]:
    """Sequence parallel ranks exchange heads in groups; every other row with such ranks does so too, where it can."""
    base = Case("", "llama", ("sp2pp2", "tp2sp2", "sp4", "sp2 + 2*tp1"), steps=4)
    yield replace(base, name="groups of heads")
    yield replace(base, name="groups of heads, few steps", strategies=("sp2pp2", "sp4"), steps=2)
    yield replace(base, name="all heads at once", sp_overlap=False)
    yield replace(base, name="groups of heads, one key head", family="llama_1_key_head", strategies=("sp4", "sp2pp2"),
                  steps=2, quick=True)  # fmt: skip
    yield replace(base, name="groups of heads, split", family="mistral", strategies=("sp2pp2/zb-h1", "tp2sp2/list"))
    yield replace(base, name="groups of heads, sinks", family="gpt_oss", activation_checkpointing=True)
    yield replace(base, name="groups of heads, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    sliced = replace(base, strategies=("sp2pp2/v", "sp4/list"), steps=2, slices=True, recompute=True)
    yield replace(sliced, name="groups of heads, slices", family="mistral")
    yield replace(sliced, name="groups of heads, slices, one key head", family="llama_1_key_head")
    yield replace(sliced, name="groups of heads, slices, dropout", family="dropout (Phi)", draws=True,
                  frozen=NO_GRADIENT, quick=True)  # fmt: skip
    yield replace(sliced, name="groups of heads, slices, over nodes of 1 rank", family="llama_tied", node_size=1,
                  quick=True)  # fmt: skip
    yield replace(sliced, name="groups of heads, slices, over two nodes, dropout", family="dropout (Phi)", draws=True,
                  frozen=NO_GRADIENT, node_size=2, strategies=("sp4/list", "sp4", "sp2pp2/v"))  # fmt: skip
    yield replace(sliced, name="groups of heads, slices, over two nodes of 8 ranks", node_size=2,
                  strategies=("sp4pp2/v", "tp2sp2pp2/v", "tp2sp4"))  # fmt: skip
    # Four heads of a rank in three groups: 1, 2 and 1 of them.
    uneven = replace(base, family="llama_8_key_heads", strategies=("sp2pp2", "2*sp2", "sp2 + 2*tp1"), sp_groups=3)
    yield replace(uneven, name="groups of unequally many heads", steps=2, quick=True)
    yield replace(uneven, name="groups of unequally many heads, again", activation_checkpointing=True)
    yield replace(sliced, name="groups of unequally many heads, slices", family="llama_8_key_heads", sp_groups=3,
                  strategies=("sp2pp2/v", "2*sp2/list"))  # fmt: skip
    yield replace(sliced, name="groups of unequally many heads, slices, dropout", family="dropout (Phi)", draws=True,
                  frozen=NO_GRADIENT, sp_groups=3, strategies=("sp2pp2/v", "2*sp2/list"))  # fmt: skip
    yield replace(base, name="groups of heads fp32", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="groups of heads bf16", dtype=BFLOAT16)
    yield replace(base, name="groups of heads on 8 ranks", strategies=("sp8", "tp2sp4", "sp4pp2/v"))


def over_nodes() -> Iterator[Case]:
    """Stages of pipelines whose sequence parallel ranks reach into a second node, with all that long contexts use."""
    strategies = ("sp4pp2/v", "tp2sp2pp2/list", "sp2pp2/list + sp4", "(sp4[0:1] > tp4[1:4])/list")
    base = Case("", "llama", strategies, steps=4, node_size=3, slices=True, recompute=True)
    yield replace(base, name="SP over nodes")
    for family in ("llama_tied", "mistral", "gemma2", "mixtral", "gpt_oss", "llama_1_key_head"):
        yield replace(base, name=f"SP over nodes, {family}", family=family)
    yield replace(base, name="SP over nodes, all tokens", token_sharding=False)
    yield replace(base, name="SP over nodes, all heads at once", sp_overlap=False)
    yield replace(base, name="SP over nodes, lora", family="lora")
    yield replace(base, name="SP over nodes, lora with dropout", family="lora with dropout", draws=True)
    yield replace(base, name="SP over nodes, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    yield replace(base, name="SP over nodes, states", family="bamba")
    yield replace(base, name="SP over nodes, balanced", family="mixtral, balanced")
    yield replace(base, name="SP over nodes, mean of sequences", loss_norm="sequence", weighted=True)
    yield replace(
        base, name="SP over nodes, phases", strategies=("2*sp2pp2/list then sp4pp2/v", "8*tp1 then sp8"), steps=2
    )
    yield replace(
        base, name="SP over nodes, split", strategies=("sp4pp2/zb-h1", "tp2sp2pp2/zb-h1"), slices=False, recompute=False
    )
    yield replace(base, name="SP over nodes fp32", dtype=FLOAT32, optimizer="SGD")


def _recomputed() -> Iterator[Case]:
    """Shares of layers computed again, which differ from micro-batch to micro-batch."""
    whole = Case("", "llama", CHANGING, steps=3, recompute=True)
    sliced = replace(whole, slices=True)
    deep = "llama_8_layers"  # tied
    yield replace(whole, name="recomputed")
    yield replace(whole, name="recomputed layer list", family=LAYER_LIST, quick=True)
    yield replace(whole, name="recomputed, split", family="mixtral", strategies=SPLIT[:3])
    yield replace(whole, name="recomputed, list", family=deep, strategies=LIST[:3])
    yield replace(whole, name="recomputed, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."))
    yield replace(whole, name="recomputed, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    yield replace(whole, name="recomputed on 8 ranks", strategies=CHANGING_8)
    yield replace(sliced, name="recomputed slices", family="gemma2")
    yield replace(sliced, name="recomputed slices, list", family="mixtral", strategies=LIST[:3])
    yield replace(sliced, name="recomputed slices, V", family=deep, strategies=("pp4/v", "tp2pp2/v"),
                  steps=2)  # fmt: skip
    yield replace(sliced, name="recomputed slices, V mixtral", family="mixtral", strategies=V[:3])
    yield replace(sliced, name="recomputed slices, V, dropout", family="dropout (Phi)", draws=True,
                  frozen=NO_GRADIENT, strategies=V[:2], steps=2, quick=True)  # fmt: skip
    yield replace(sliced, name="recomputed slices, V, frozen upper layers", frozen=("layers.2.", "layers.3."),
                  strategies=V[:3])  # fmt: skip
    yield replace(sliced, name="recomputed slices, V fp32", family="qwen3", dtype=FLOAT32, strategies=V[:3])
    yield replace(sliced, name="recomputed slices, V bf16", dtype=BFLOAT16, strategies=V[:3])
    yield replace(sliced, name="recomputed slices, V, all layers as well", family="mistral", strategies=V[:3],
                  activation_checkpointing=True)  # fmt: skip
    yield replace(sliced, name="recomputed slices in phases",
                  strategies=("2*pp2/v then tp2pp2/v", "4*tp1 then pp4/list"))  # fmt: skip
    yield replace(sliced, name="recomputed slices, V on 8 ranks", strategies=V_8)


def with_sinks() -> Iterator[Case]:
    """Attention with sinks, by the log-sum-exp of kernels that know none, in windows of 8 tokens and without."""
    base = Case("", "gpt_oss", ("tp2pp2", "sp2 + 2*tp1", "tp4", "tp2sp2"), steps=4)
    ones = (1, 30, 1, 1, 9, 8, 200) * 4  # also the only sequences of a rank
    yield replace(base, name="sinks, sequences of one token", lengths=ones, tokens_per_step=60, steps=2,
                  quick=True)  # fmt: skip
    sliced = replace(base, strategies=("tp2pp2/v", "sp2 + pp2/list", "tp2sp2/list", "sp4"), slices=True)
    yield replace(sliced, name="sinks, slices")
    yield replace(sliced, name="sinks, slices computed again", recompute=True)
    yield replace(sliced, name="sinks, slices, checkpointed", activation_checkpointing=True, node_size=2)
    yield replace(sliced, name="sinks, slices, split", strategies=("pp2/zb-h1 + tp2/list", "tp2pp2/zb-h1"))
    yield replace(base, name="sinks, frozen", frozen=("sinks",))
    yield replace(base, name="sinks, all tokens", token_sharding=False)
    yield replace(base, name="sinks, phases", strategies=("4*tp1 then 2*tp2 then tp4", "2*sp2 then sp4"))
    yield replace(base, name="sinks fp32", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="sinks on 8 ranks", strategies=("tp4sp2", "sp4 + tp2pp2", "sp2tp2pp2/v"), slices=True)


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
    yield replace(base, name="spread, all tokens", token_sharding=False)
    yield replace(base, name="spread gpt_oss, all tokens", family="gpt_oss", token_sharding=False)
    yield replace(base, name="spread fp32", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="spread mixtral fp32", family="mixtral", dtype=FLOAT32)
    sure = replace(base, family=SURE, dtype=BFLOAT16)
    yield replace(sure, name="spread bf16", quick=True)
    yield replace(sure, name="spread bf16, gradients too", grad_accum="bf16")
    yield replace(sure, name="spread bf16, slices", strategies=SPREAD_SLICES, steps=3, slices=True, recompute=True)
    yield replace(sure, name="bf16 experts by width", strategies=CHANGING)
    for strategy in ("tp2ep2", "tp4ep4", "sp2ep2", "sp4ep4", "tp2sp2ep4", "tp2ep2pp2"):
        yield replace(base, name=f"spread {strategy}", strategies=(strategy,), steps=3)
    yield from _otherwise(replace(base, steps=4))
    yield from _spread_in_slices(replace(base, strategies=SPREAD_SLICES, steps=3, slices=True))
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
    yield replace(base, name="spread, split", strategies=SPREAD_SPLIT, steps=3)
    yield replace(base, name="spread gpt_oss, split", family="gpt_oss", strategies=SPREAD_SPLIT, steps=3)
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


def _spread_in_slices(base: Case) -> Iterator[Case]:
    yield replace(base, name="spread, slices", recompute=True, quick=True)
    yield replace(base, name="spread gpt_oss, slices", family="gpt_oss")
    yield replace(base, name="spread mixtral, slices", family="mixtral")
    yield replace(base, name="spread, slices, all tokens", token_sharding=False)
    yield replace(base, name="spread, slices, split", strategies=SPREAD_SPLIT)
    yield replace(base, name="spread, slices, phases", strategies=PHASES)
    yield replace(base, name="spread, balanced in slices", family="mixtral, balanced")
    yield replace(base, name="spread, lora in slices", family="lora beside experts", recompute=True)
    yield replace(base, name="spread, dropout in slices", family="dropout beside experts", draws=True, recompute=True)


def _routed(base: Case) -> Iterator[Case]:
    """Routers with a loss, with noise, whose expert is drawn; adapters and dropout beside experts."""
    for family in ("mixtral, balanced", "olmoe, balanced"):
        yield replace(base, name=f"spread, {family}", family=family)
    balanced = replace(base, family="mixtral, balanced")
    yield replace(balanced, name="spread, balanced, split", strategies=SPREAD_SPLIT)
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
    yield replace(base, name="spread, lora, split", family="lora beside experts", strategies=SPREAD_SPLIT)


def _hybrids(base: Case) -> Iterator[Case]:
    """Recurrent layers beside experts."""
    strategies = ("tp2ep2pp2", "sp2ep2 + 2*tp1", "tp2sp2ep4")
    # Exponentials of sums over a sequence magnify FP32's rounding in the delta rule's gradients.
    for family in ("qwen3_next", "qwen3_5_moe", "granite, experts", "lfm2_moe", "jamba"):
        own = replace(base, family=family, strategies=strategies, amplifies=family.startswith("qwen"))
        yield replace(own, name=f"spread hybrid, {family}")
    base = replace(base, dtype=FLOAT64, optimizer="AdamW", steps=2, slices=True)
    for family in ("qwen3_next", "granite, experts"):
        yield replace(base, name=f"spread hybrid, {family}, slices", family=family, strategies=SPREAD_SLICES[:2])
    yield replace(base, name="spread hybrid, split", family="lfm2_moe", strategies=SPREAD_SPLIT)
    yield replace(
        base,
        name="spread hybrid, checkpointed",
        family="granite, experts",
        strategies=strategies,
        activation_checkpointing=True,
    )
