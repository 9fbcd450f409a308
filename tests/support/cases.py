"""The table of training cases: each row is trained on ranks and compared with the single-process reference.

To add a case, add a row; `tests/gloo/test_training.py` draws from the rows marked quick, but for those that
`tests/gloo/test_strict_training.py` runs, those marked long all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from tests.support.case import (
    AMPLIFYING,
    BFLOAT16,
    CHANGING,
    CHANGING_8,
    CHANGING_WITHOUT_TP,
    FLOAT32,
    FLOAT64,
    IN_SLICES,
    NO_GRADIENT,
    OWN,
    UNUSUAL,
    Case,
)
from tests.support.changed_models import CHANGED, CHANGED_LINEARS, MIXING, NOISY
from tests.support.families import (
    ADAPTED,
    ADAPTED_BY_HEADS,
    ADAPTED_STACKS,
    ADAPTED_WITHOUT_TP,
    BALANCED,
    DROPPING,
    FAMILIES,
    LATENT,
    LAYER_LIST,
    OTHER_SIZES,
)
from tests.support.long_cases import long_contexts
from tests.support.scheduled_cases import in_groups, over_nodes, owned, scheduled, spread, with_sinks

# --- Training cases of kinds of attention: keys and values that come from a latent, windows and chunks over
# slices of sequences.
SLICED = ("tp2pp2/v", "sp2 + pp2/list", "tp4/list", "tp2sp2")


def latent() -> Iterator[Case]:
    """Multi-head latent attention, whose heads tensor parallel ranks share whether or not the model's plan says so."""
    for family in LATENT:
        yield Case(f"latent, {family}", family, CHANGING)
        yield Case(f"latent, {family}, slices", family, SLICED, steps=4, slices=True, recompute=True,
                   quick=family == "deepseek_v3")  # fmt: skip
    base = Case("", "deepseek_v3", ("tp2pp2", "tp4", "tp2sp2", "sp2 + 2*tp1"), steps=4)
    yield base.row("latent, all tokens", token_sharding=False)
    yield base.row("latent, checkpointed", activation_checkpointing=True)
    yield base.row("latent, split", "tp2pp2/zb-h1", "sp2 + pp2/zb-h1", steps=2)
    yield base.row("latent, spread", "tp2ep2pp2/v", "tp4ep4", "tp2sp2ep4", steps=3, slices=True)
    yield base.row("latent fp32", dtype=FLOAT32, optimizer="SGD")
    yield base.row("latent on 8 ranks", *CHANGING_8)


def windows() -> Iterator[Case]:
    """Sliding windows over slices, of which only rows in reach stay: slices longer and shorter than they are, layers
    computed again and not, beside layers without a window."""
    base = Case("", "mistral", SLICED, steps=4, slices=True, recompute=True)
    yield base.row("windows, mistral")
    yield base.row("windows, gemma3", family="gemma3_text", quick=True)
    yield base.row("windows, gpt_oss", family="gpt_oss")
    yield base.row("windows, checkpointed", activation_checkpointing=True)
    yield base.row("windows, some checkpointed", family="gemma3_text", activation_checkpointing=True)
    yield base.row("windows, nothing again", recompute=False, lengths=(300, 200, 450) * 8)
    yield base.row("windows, split", "tp2pp2/zb-h1", "sp2 + pp2/zb-h1", steps=2)
    yield base.row("windows, phases", "4*tp1 then 2*pp2/v then tp4/list")
    yield base.row("windows fp32", dtype=FLOAT32, optimizer="SGD")


def chunks() -> Iterator[Case]:
    """Attention in chunks and queries that are scaled by their position, in packs and slices (Llama 4)."""
    base = Case("", "llama4", CHANGING, steps=4)
    yield base.row("chunks")
    sliced = replace(base, strategies=SLICED, slices=True, recompute=True)
    yield sliced.row("chunks, slices", quick=True)
    yield sliced.row("chunks, checkpointed", activation_checkpointing=True)
    yield sliced.row("chunks, nothing again", recompute=False, lengths=(300, 200, 450) * 8)
    yield sliced.row("chunks, split", "tp2pp2/zb-h1", "sp2 + pp2/zb-h1", steps=2)
    yield base.row("chunks, phases", "4*tp1 then 2*tp2 then tp4")
    yield base.row("chunks fp32", dtype=FLOAT32, optimizer="SGD")
    yield base.row("chunks on 8 ranks", *CHANGING_8)


def shared_queries() -> Iterator[Case]:
    """More sequence parallel ranks than the heads divide into: of eight heads those of `sp3` share none, and of those
    of `sp6` three have the same four."""
    base = Case("", "llama", ("sp3 + tp1", "tp2pp2", "sp3 + tp1"), steps=3)
    for family, draws in (("llama", False), ("gemma2", False), ("gemma3_text", False), ("gpt_oss", False),
                          ("llama4", False), ("deepseek_v3", False), ("dropout (Phi)", True)):  # fmt: skip
        own = replace(base, family=family, draws=draws)
        yield own.row(f"shared queries, {family}", quick=family == "gemma3_text")
        yield own.row(f"shared queries, {family}, slices", slices=True, recompute=not draws)
    dropping = replace(base, strategies=("sp3 + tp1", "tp2sp2"), draws=True, slices=True, steps=2)
    for family in DROPPING:
        yield dropping.row(f"shared queries, {family}", family=family)
    by_two = replace(base, strategies=("sp6 + 2*tp1", "tp2sp3 + tp2"), slices=True)
    yield by_two.row("shared queries, two by two")
    yield by_two.row("shared queries, two by two, sinks", family="gpt_oss", steps=2)
    yield by_two.row("shared queries, two by two, dropout", family="dropout (Phi)", draws=True, steps=2)
    yield base.row("shared queries, split", "sp3/zb-h1 + tp1", slices=True)
    yield base.row("shared queries, checkpointed", activation_checkpointing=True)
    yield base.row("shared queries, all heads at once", sp_overlap=False, slices=True)
    yield base.row("shared queries, fewer tokens", "sp6", lengths=(3,) * 20, tokens_per_step=6)
    yield base.row("shared queries, phases", "4*tp1 then sp3 + tp1")
    yield base.row("shared queries over nodes", "sp3 + tp1", "2*sp2", node_size=2, slices=True)
    yield base.row("shared queries fp32", dtype=FLOAT32, optimizer="SGD")
    yield from _inside_nodes()


def _inside_nodes() -> Iterator[Case]:
    """Heads that only the sequence parallel ranks of a node share, and queries that nodes do: two nodes of two ranks,
    of which `sp4` has two and `tp2sp2` one each."""
    base = Case("", "llama", ("sp4", "tp2sp2"), steps=2, node_size=2)
    sliced = replace(base, slices=True, recompute=True)
    yield base.row("heads inside nodes")
    yield sliced.row("heads inside nodes, slices", quick=True)
    for family in ("llama_1_key_head", "gemma2", "mistral", "gpt_oss", "llama4", "deepseek_v3"):
        yield sliced.row(f"heads inside nodes, {family}", family=family, quick=family == "llama_1_key_head")
    yield base.row("heads inside nodes, latent", family="deepseek_v3", activation_checkpointing=True)
    yield base.row("heads inside nodes, dropout", family="dropout (Phi)", draws=True)
    yield base.row("heads inside nodes, dropout, slices", family="dropout (Phi)", draws=True, slices=True)
    yield base.row("heads inside nodes, three groups", family="llama_8_key_heads", sp_groups=3)
    yield sliced.row("heads inside nodes, at once", sp_overlap=False)
    yield base.row("heads inside nodes, split", "sp4/zb-h1", "tp2sp2/zb-h1")
    of_8 = replace(sliced, strategies=("sp8", "tp2sp4", "sp4pp2/v"), steps=3)
    yield of_8.row("heads inside nodes of 4 ranks", node_size=4)
    yield of_8.row("heads inside nodes, on four nodes", family="llama_1_key_head")
    yield sliced.row("heads inside nodes, on three nodes", "sp6", "tp2sp3", "3*tp2", steps=3)
    # A row of 240 tokens fills its memory, so that all ranks share its heads; others do not.
    full = replace(base, family="llama_8_key_heads", lengths=(240, 40, 30, 20, 33, 11) * 12, tokens_per_step=250)
    yield full.row("heads inside nodes, full rows", "sp4", quick=True)
    full = replace(full, family="latent, dropout", draws=True, strategies=("sp4", "tp2sp2"))
    yield full.row("heads inside nodes, full rows, dropout")
    yield base.row("heads inside nodes, phases", "4*tp1 then sp4")
    yield sliced.row("heads inside nodes fp32", dtype=FLOAT32, optimizer="SGD")


# --- Training cases of modules in which tokens meet: boxes, recurrent layers that carry states through slices,
# and whose heads ranks share.
def boxed() -> Iterator[Case]:
    """Modules in which tokens meet, run once for each sequence: in all layers or in some."""
    base = Case("", "bloom", CHANGING, steps=3, optimizer="SGD", dtype=FLOAT32)
    yield base.row("boxes", "tp2pp2", "sp2 + 2*tp1", dtype=FLOAT64, optimizer="AdamW", quick=True)
    yield base.row("boxes, V", "pp2/v + sp2", "tp2pp2/zb-h1", recompute=True)
    yield base.row("boxes, checkpointed", activation_checkpointing=True)
    yield base.row("boxes, phases", "4*tp1 then 2*tp2 then tp4")
    yield base.row("boxes, dropout", family="gptj, dropout", draws=True, dtype=FLOAT64, optimizer="AdamW")
    own = replace(base, family="one class", dtype=FLOAT64, optimizer="AdamW")
    yield own.row("one class", *CHANGING, quick=True)
    yield own.row("one class, V", "pp2/v + sp2", "tp2pp2/zb-h1", recompute=True)
    yield own.row("one class, dropout", family="one class, tied, dropout", draws=True)
    yield own.row("mixing beside attention", *CHANGING_WITHOUT_TP, family=MIXING, quick=True)
    for family in ("lfm2", "qwen3_next", "falcon_h1"):
        # Exponentials of sums over a sequence magnify FP32's rounding in the delta rule's gradients.
        own = replace(base, family=family, amplifies=family == "qwen3_next")
        yield own.row(f"hybrid, {family}")
        yield own.row(f"hybrid, {family}, V", "pp2/v + sp2", "pp4/zb-h1")
    hybrid = replace(base, family="lfm2")
    yield hybrid.row("hybrid", "tp2pp2/v", "sp2 + pp2", recompute=True, steps=2, quick=True)
    yield hybrid.row("hybrid on 8 ranks", *CHANGING_8)
    yield hybrid.row("hybrid, checkpointed", activation_checkpointing=True)


def states() -> Iterator[Case]:
    """Recurrent layers that carry their states from slice to slice: delta rules, Mamba-2, short convolutions."""
    base = Case("", "qwen3_next", IN_SLICES, steps=3, slices=True)
    for family in ("qwen3_next", "bamba", "lfm2"):
        own = replace(base, family=family)
        yield own.row(f"states, {family}")
        yield own.row(f"states, {family}, one strategy", "pp2")
        yield own.row(f"states, {family}, V", "tp2pp2/v", "pp2/v + sp2", "pp4/list", recompute=True)
    hybrid = base.row("states", "tp2pp2/v", "sp2 + pp2/list", steps=2, recompute=True, quick=True)
    yield hybrid
    yield hybrid.row("states, sp", "sp4", "tp2sp2", family="bamba")
    yield base.row("states, split", "tp2pp2/zb-h1", "sp2 + pp2/zb-h1", "pp4/zb-h1")
    yield base.row("states, checkpointed", family="bamba", activation_checkpointing=True)
    yield base.row("states in phases", "4*tp1 then 2*pp2 then tp2sp2", "pp2 + sp2 then pp4", family="bamba")
    dropped = replace(base, family="lora in boxes with dropout", draws=True, steps=2)
    yield dropped.row("states, lora with dropout", "pp2/v + sp2", "pp4/list", recompute=True, quick=True)
    yield base.row("states, lora", *CHANGING_WITHOUT_TP, family="lora in boxes")
    yield base.row("states, frozen lower layers", family="bamba", frozen=("embed_tokens", "layers.0.", "layers.1."))
    yield base.row("states fp32", family="lfm2", dtype=FLOAT32, optimizer="SGD")
    yield base.row("states on 8 ranks", *CHANGING_8, family="lfm2")
    yield base.row("states, long ones only", "2*pp2", "tp2pp2", lengths=(300, 200, 450) * 8)


_WITH_HEADS = ("qwen3_next", "qwen3_5", "olmo_hybrid", "bamba", "granite_4", "nemotron_h", "granite, experts")
_BY_TP = ("tp2 + 2*tp1", "tp2pp2", "tp4", "tp2sp2")


def _otherwise(case: Case) -> Iterator[Case]:
    """The same, of other types, computed again, and with frozen layers."""
    yield case.row(f"{case.name}, checkpointed", activation_checkpointing=True)
    yield case.row(f"{case.name}, frozen lower layers", frozen=("embeddings", "layers.0.", "layers.1."))
    yield case.row(f"{case.name}, fp32", dtype=FLOAT32, optimizer="SGD")
    yield case.row(f"{case.name}, bf16", dtype=BFLOAT16)


def by_heads() -> Iterator[Case]:
    """Recurrent layers of which each tensor parallel rank computes its own heads."""
    base = Case("", "qwen3_next", _BY_TP, steps=4)
    for family in _WITH_HEADS:
        own = replace(base, family=family)
        yield own.row(f"by heads, {family}")
        yield own.row(
            f"by heads, {family}, slices", "tp2 + 2*tp1", "tp2pp2/v", "tp4", steps=3, slices=True, recompute=True
        )
    few = replace(base, family="nemotron_h", steps=2)
    yield few.row("by heads", "tp4", "tp2pp2/zb-h1", slices=True, recompute=True, quick=True)
    yield few.row("by heads on 8 ranks", "tp8", "tp4sp2", "tp4 + tp2pp2")
    yield few.row("by heads, split", "tp2pp2/zb-h1", "sp2 + tp2/zb-h1", slices=True)
    yield few.row("by heads, phases", "4*tp1 then 2*tp2 then tp4")
    yield from _otherwise(few.row("by heads"))
    for family in ADAPTED_BY_HEADS:
        own = replace(base, family=family, draws="dropout" in family)
        yield own.row(f"by heads, {family}")
        yield own.row(f"by heads, {family}, slices", "tp4", "tp2pp2/v", steps=2, slices=True)


def by_heads_over_tokens() -> Iterator[Case]:
    """Recurrent layers of which each sequence parallel rank computes its own heads, for all tokens."""
    base = Case("", "qwen3_next", ("sp2 + 2*tp1", "sp4", "tp2sp2", "pp2sp2"), steps=4)
    for family in _WITH_HEADS:
        own = replace(base, family=family)
        yield own.row(f"heads over sp, {family}")
        yield own.row(
            f"heads over sp, {family}, slices", "sp4", "pp2sp2/v", "tp2sp2", steps=3, slices=True, recompute=True
        )
    few = replace(base, family="nemotron_h", steps=2)
    yield few.row("heads over sp", "sp4", "pp2sp2/zb-h1", slices=True, recompute=True, quick=True)
    yield few.row("heads over sp on 8 ranks", "sp8", "tp2sp4", "tp4sp2")
    # Four ranks share two key heads, two by two.
    yield few.row("heads over sp, fewer heads", "sp4", "pp2sp2", family="qwen3_next", slices=True)
    yield few.row("heads over sp, split", "pp2sp2/zb-h1", "sp2/zb-h1 + tp2", slices=True)
    yield few.row("heads over sp, phases", "4*tp1 then 2*sp2 then sp4")
    yield from _otherwise(few.row("heads over sp"))
    for family in ADAPTED_BY_HEADS:
        own = replace(base, family=family, draws="dropout" in family, steps=2)
        yield own.row(f"heads over sp, {family}", "sp4", "tp2sp2")
        yield own.row(f"heads over sp, {family}, slices", "sp2 + pp2", "pp2sp2/v", slices=True)


# --- Training cases of pipelines whose stages differ in device class, degrees and layers: the classes are made
# up.
HALVES = ((2, "slow"), (2, "fast"))  # nodes
APART = ((1, "slow"), (2, "fast"), (1, "slow"))
THREE = ((3, "slow"), (1, "fast"))
EIGHT = ((4, "slow"), (2, "fast"), (2, "fast"))


def mixed() -> Iterator[Case]:
    """24 rows; ranks of a class follow each other in some clusters and not in others."""
    base = Case("", "llama", ("(tp2[0:1]@slow > tp2[1:4]@fast)",), steps=3, cluster=HALVES)
    yield base.row("mixed")
    yield base.row("mixed, two pipelines", "(tp1[0:1]@slow > tp1[1:4]@fast) + (tp1[0:2]@slow > tp1[2:4]@fast)",
                   "2*(tp1[0:1]@slow > tp1[1:4]@fast)")  # fmt: skip
    yield base.row("mixed, a class alone", "tp2@slow + tp2@fast", "sp2@slow + 2*tp1@fast")
    yield base.row("mixed, tp and sp", "(sp2[0:1]@slow > tp2[1:4]@fast)", "(tp2[0:2]@fast > sp2[2:4]@slow)")
    yield base.row("mixed, apart", "(tp2[0:3]@slow > tp2[3:4]@fast)", "(tp1[0:1]@slow > tp2[1:3]@fast > tp1[3:4]@slow)",
                   "(sp2@slow > tp2@fast)", cluster=APART, quick=True)  # fmt: skip
    yield base.row("mixed, apart, sp over nodes", "sp2@slow + sp2@fast",
                   "(tp1[0:1]@fast > sp2[1:3]@slow > tp1[3:4]@fast)", cluster=APART)  # fmt: skip
    yield base.row("mixed, three of a class", "(tp2@slow > tp1@slow > tp1@fast)",
                   "tp1@slow + (tp2[0:1]@slow > tp1[1:4]@fast)", cluster=THREE)  # fmt: skip
    yield base.row("mixed, tied", "(tp2[0:1]@slow > tp2[1:4]@fast)", "2*(tp1@slow > tp1@fast)", family="llama_tied")
    for family in ("gemma2", "mixtral", "gpt2", "phi3"):
        yield base.row(f"mixed, {family}", family=family)
    yield base.row("mixed, eight", "(tp4[0:1]@slow > tp2[1:2]@fast > tp1[2:3]@fast > tp1[3:4]@fast)",
                   "2*(tp2[0:1]@slow > tp2[1:4]@fast)", cluster=EIGHT)  # fmt: skip
    yield base.row("mixed, eight, tp4 over nodes", "(tp4[0:1]@slow > tp4[1:4]@fast)",
                   "(tp2sp2[0:1]@slow > sp4[1:4]@fast)", cluster=EIGHT)  # fmt: skip
    split = replace(base, strategies=("(tp2[0:1]@slow > tp2[1:4]@fast)/zb-h1", "2*(tp1@slow > tp1@fast)/zb-h1"))
    yield split.row("mixed, split")
    yield split.row("mixed, list", "(sp2[0:1]@slow > tp2[1:4]@fast)/list")
    of_v = ("(sp2[0:1,3:4]@slow > tp2[1:2,2:3]@fast)/list", "(tp2@slow > sp2@fast)/v")
    yield split.row("mixed, V", *of_v)
    sliced = replace(base, slices=True)
    yield sliced.row("mixed, slices", quick=True)
    yield sliced.row("mixed, slices, V", "(sp2[0:1,3:4]@slow > tp2[1:2,2:3]@fast)/list")
    yield sliced.row("mixed, slices, recomputed", family="mistral", recompute=True)
    yield base.row("mixed, phases", "2*tp1@slow + 2*tp1@fast then (tp2[0:1]@slow > tp2[1:4]@fast)")
    yield base.row("mixed, checkpointed, frozen", activation_checkpointing=True, frozen=("embed_tokens", "layers.0."))
    yield base.row("mixed, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    yield base.row("mixed fp32", dtype=FLOAT32, optimizer="SGD")
    yield base.row("mixed bf16", dtype=BFLOAT16)


FIXED_STRATEGIES = (
    "tp1",
    "tp2",
    "pp2",
    "sp2",
    "tp4",
    "pp4",
    "sp4",
    "tp2pp2",
    "tp2 + 2*tp1",
    "tp2pp3",  # 4 layers over 3 stages
    "tp4 + pp2 + tp1",
    "pp3 + sp4",
    "tp2pp2sp2",
    "tp4sp2",
    "8*tp1",
    "sp4 + tp2pp2",
)

# Rows that train under the strict transport in place of the plain one, and with what it is strict about: a row drawn at
# random, one where a layer reads a weight of a module that it does not call, and some of each kind of messages.
UNDER_STRICT = {
    "functions, sgd fp32": "blocking",
    "layer_list": "connect",
    "dora, all tokens": "blocking connect",
    "phases that change": "blocking one_queue",
    "V, slices": "blocking connect",
    "states": "blocking connect",
    "spread, slices": "blocking connect",
    "heads over sp": "blocking connect",
    "shared queries, gemma3_text": "blocking connect",
    "heads inside nodes, slices": "blocking connect",
    "heads inside nodes, full rows": "blocking connect",
    "heads inside nodes, llama_1_key_head": "lazy one_queue",
    "groups of unequally many heads": "lazy one_queue",
    "tiles": "blocking connect",
    "fetched": "lazy one_queue",
    "fetched, slices": "blocking connect",
    "attention kept": "blocking one_queue",
    "states on host": "blocking connect",
    "owners, V, slices": "blocking connect",
    "states on host, V, fetched": "lazy one_queue",
    "states on host, phases": "blocking one_queue",
    "states on host, sums of 16 bit": "connect",
}
# Of HARD_MODELS, those that draw random numbers in training.
DRAWING = ("dropout (Phi)", "dropout", "dropout by a function", "noise on what is routed", "random routing")

# Rows for every test run, of each axis of parallelism, of heterogeneous mixes and of all that changes how a step is
# computed: one that has several of these stands for rows of one each.
_QUICK_FIXED = {"tp1", "tp4 + pp2 + tp1"}
_QUICK_FAMILIES_FP64 = {"phi3", LAYER_LIST}
_QUICK_FAMILIES_FP32 = {"gpt2"}


def _fixed() -> Iterator[Case]:
    for strategy in FIXED_STRATEGIES:
        yield Case(f"fixed {strategy}", "qwen3", (strategy,), quick=strategy in _QUICK_FIXED)
    for strategy in FIXED_STRATEGIES:
        yield Case(f"fixed {strategy} fp32", "llama", (strategy,), FLOAT32)


def _families() -> Iterator[Case]:
    for family in (*(name for name in FAMILIES if name not in OTHER_SIZES), LAYER_LIST):
        yield Case(f"{family}", family, CHANGING, quick=family in _QUICK_FAMILIES_FP64)
        yield Case(f"{family} fp32", family, CHANGING, FLOAT32, quick=family in _QUICK_FAMILIES_FP32)
    yield Case("llama on 8 ranks", "llama", CHANGING_8)
    yield Case("gemma3 on 8 ranks", "gemma3_text", CHANGING_8)


def _unusual() -> Iterator[Case]:
    for family in UNUSUAL:
        yield Case(family, family, CHANGING, frozen=NO_GRADIENT, amplifies=family in AMPLIFYING)
    for family in CHANGED:
        yield Case(family, family, CHANGING, draws=family == NOISY)
    yield Case(f"{NOISY}, slices", NOISY, SLICED, steps=4, slices=True, draws=True, quick=True)
    for family in CHANGED_LINEARS:
        yield Case(family, family, CHANGING_WITHOUT_TP)


def _drawing() -> Iterator[Case]:
    for family in DRAWING:
        yield Case(family, family, CHANGING, draws=True, frozen=NO_GRADIENT, quick=family == "random routing")
    yield Case("dropout checkpointed", "dropout (Phi)", CHANGING, draws=True, frozen=NO_GRADIENT,
               activation_checkpointing=True, quick=True)  # fmt: skip
    yield Case("dropout on 8 ranks", "dropout (Phi)", CHANGING_8, draws=True)


def _adapted() -> Iterator[Case]:
    """Models with PEFT's adapters, which are trained beside frozen weights."""
    for family in ADAPTED:
        base = Case(family, family, (*CHANGING, "tp2sp2"), draws="dropout" in family, steps=6)
        yield base
        yield base.row(f"{family}, slices", "tp2pp2/v", "pp4/list", "tp4", steps=3, slices=True, recompute=True)
        yield base.row(f"{family}, split", "tp2pp2/zb-h1", "tp2pp2/v", "sp2 + pp2/zb-h1", steps=3)
        quick = family in ("lora and whole modules", "dora")
        yield base.row(f"{family}, all tokens", *CHANGING, token_sharding=False, quick=quick)
    base = Case("", "lora", CHANGING)
    yield base.row("lora, one strategy", "tp2pp2", steps=3, quick=True)
    dropout = replace(base, family="lora with dropout", draws=True)
    yield dropout.row("lora with dropout, V", "tp2pp2/v", slices=True, steps=1, quick=True)
    for family in ("lora", "dora", "lora and tokens"):
        yield base.row(f"{family} bf16", family=family, dtype=BFLOAT16)
    yield base.row("lora fp32", dtype=FLOAT32, optimizer="SGD")
    yield dropout.row("lora, checkpointed", activation_checkpointing=True)
    yield base.row("lora, phases", "2*tp2 then tp4", "4*tp1 then 2*pp2")
    yield base.row("lora on 8 ranks", *CHANGING_8)
    yield base.row("lora, nodes of 2 ranks", node_size=2)
    for family in ADAPTED_STACKS:
        base = Case(family, family, ("tp2pp2", "sp2 + 2*tp1", "tp4", "tp2sp2"), steps=4)
        yield base
        yield base.row(f"{family}, slices", "tp2pp2/v", "tp4", steps=2, slices=True, recompute=True)
        spread = ("tp4ep4", "tp2sp2ep4", "tp2ep2pp2/zb-h1", "sp2ep2 + 2*tp1")
        yield base.row(f"{family}, spread", *spread, quick=family == "lora of stacks")
    for family in ADAPTED_WITHOUT_TP:
        yield Case(family, family, CHANGING_WITHOUT_TP, draws="dropout" in family, quick=family == "lora of the ends")


def _options() -> Iterator[Case]:
    base = Case("", "llama", CHANGING)
    yield base.row("sgd fp32", dtype=FLOAT32, optimizer="SGD")
    yield base.row("sgd fp32 gemma2", family="gemma2", dtype=FLOAT32, optimizer="SGD")
    yield base.row("sgd fp32 8 ranks", *CHANGING_8, dtype=FLOAT32, optimizer="SGD")
    yield base.row("bf16", dtype=BFLOAT16, quick=True)
    yield base.row("bf16, gradients too", dtype=BFLOAT16, grad_accum="bf16")
    yield base.row("bf16 gemma2, gradients too", family="gemma2", dtype=BFLOAT16, grad_accum="bf16")
    yield base.row("bf16 gemma2", family="gemma2", dtype=BFLOAT16)
    yield base.row("bf16, fp32 on the wire", dtype=BFLOAT16, wire="fp32", quick=True)
    yield base.row("fp32, bf16 on the wire", dtype=FLOAT32, wire="bf16")
    yield base.row("fp32, fp16 on the wire", dtype=FLOAT32, wire="fp16")
    yield base.row("no clipping", clip=0.0)
    yield base.row("checkpointed", activation_checkpointing=True)
    yield base.row("checkpointed gemma3", family="gemma3_text", activation_checkpointing=True)
    yield base.row("checkpointed fp32 mixtral", family="mixtral", dtype=FLOAT32, activation_checkpointing=True)
    yield base.row("masked labels", masked_labels=True)
    yield base.row("mean of sequences", loss_norm="sequence", masked_labels=True, quick=True)
    yield base.row("mean of micro-batches", loss_norm="micro_batch", masked_labels=True)
    yield base.row("layer list, mean of sequences", family=LAYER_LIST, loss_norm="sequence", masked_labels=True)
    yield base.row("frozen embeddings", frozen=("embed_tokens",))
    yield base.row("frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."))
    yield base.row("frozen tied", family="llama_tied", frozen=("embed_tokens",))
    yield base.row("frozen layer list", family=LAYER_LIST, frozen=("tied_modules", "1.qkv"))
    yield base.row("idle pipelines", "4*tp1", "2*pp2", lengths=(30,) * 20, tokens_per_step=30)
    yield base.row(
        "idle pipelines on 7 ranks", "sp2 + tp2 + pp3", "7*tp1", lengths=(30, 7) * 20, tokens_per_step=31, quick=True
    )
    yield base.row("fewer tokens than sp", "sp4", "tp2sp2", "2*sp2", lengths=(3,) * 20, tokens_per_step=3, quick=True)
    yield base.row("uneven layers", "pp2 + tp1pp2", "pp3 + tp1", family="llama_3_layers")
    yield base.row("stages of different tp and sp", "(sp2[0:1] > tp2[1:4])")
    yield base.row("stages of different size", "(tp1[0:1] > tp4[1:3] > tp1[3:4]) + sp2", family="gemma2")
    yield base.row("nodes of 2 ranks", node_size=2)
    yield base.row("nodes of 2 ranks bf16", node_size=2, dtype=BFLOAT16)
    yield base.row("nodes of 3 and 1 ranks, tied", family="gemma2", node_size=3)
    yield base.row("8 ranks on 2 nodes", *CHANGING_8, node_size=4, quick=True)
    odd = ("7*tp1", "tp2 + 5*tp1", "tp4 + tp2 + tp1", "3*tp2 + tp1", "tp2pp2 + 3*tp1")
    yield base.row("7 ranks on nodes of 4 and 3", *odd, node_size=4, steps=6)


def _heads() -> Iterator[Case]:
    """Heads and losses in blocks, as those of large vocabularies are."""
    base = Case("", "llama", ("2*tp1", "tp2", "pp2/v"), logits_at_once=1500, masked_labels=True)
    yield base.row("head in blocks")
    yield base.row("head in blocks, tied", "tp2pp2", "tp2 + 2*tp1", family="llama_tied", quick=True)
    yield base.row("head in blocks, bf16", dtype=BFLOAT16)
    yield base.row("head in blocks, frozen", frozen=("lm_head",))
    yield base.row("head in blocks, softcap", "tp2", "2*tp1", family="gemma2", quick=True)
    yield base.row("head in blocks, mean of sequences", loss_norm="sequence", weighted=True)


def _losses() -> Iterator[Case]:
    """Losses of the user's own, which see the logits of all tensor parallel ranks, and weights of sequences."""
    base = Case("", "llama", CHANGING)
    yield base.row("weights of sequences", weighted=True, masked_labels=True, quick=True)
    yield base.row("weights of sequences, mean of each", weighted=True, loss_norm="sequence")
    for own in OWN:
        yield base.row(f"{own} loss", own_loss=own, masked_labels=True, quick=own == "focal")
        yield base.row(f"{own} loss, tied", own_loss=own, family="gemma2", weighted=True)
    yield base.row("focal loss on 8 ranks", *CHANGING_8, own_loss="focal")
    yield base.row("smoothed loss, experts", own_loss="smoothed", family="mixtral")
    yield base.row("focal loss in slices", "pp2/list + 2*tp1/list", own_loss="focal", slices=True)


def _balanced() -> Iterator[Case]:
    """Routers with a loss of their own, in stages, on shared tokens and over slices of sequences."""
    for family in BALANCED:
        yield Case(family, family, CHANGING)
    base = Case("", "mixtral, balanced", CHANGING)
    yield base.row("balanced, slices", "tp2pp2/v", "sp2 + pp2/list", steps=2, slices=True, recompute=True,
                   masked_labels=True, weighted=True, quick=True)  # fmt: skip
    yield base.row("balanced, all tokens", "tp2sp2", "tp4", token_sharding=False)
    yield base.row("balanced, more slices", "tp2sp2/list", "pp2/v + 2*tp1/v", "sp2 + pp2/list", slices=True)
    yield base.row("balanced, mean of sequences", loss_norm="sequence", masked_labels=True)
    yield base.row("balanced, checkpointed", activation_checkpointing=True)
    yield base.row("balanced, split", "tp2pp2/zb-h1", "sp2 + pp2/zb-h1", "pp4/zb-h1")
    yield base.row("balanced, phases", "4*tp1 then 2*tp2 then tp4")
    yield base.row("balanced, own loss", own_loss="focal")
    yield base.row("balanced, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1.", "gate"))
    yield base.row("balanced on 8 ranks", *CHANGING_8)
    yield base.row("balanced fp32", dtype=FLOAT32)


_WITH_FUNCTIONS = ("llama", "llama_tied", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "olmo2", "mixtral",
                   "phi3", "cohere", "glm4")  # fmt: skip


def _functions() -> Iterator[Case]:
    """Functions of few operators in place of the model's own chains."""
    for family in _WITH_FUNCTIONS:
        yield Case(f"functions, {family}", family, CHANGING, functions="recompute", quick=family == "llama_tied")
    base = Case("", "llama", CHANGING, functions="recompute")
    yield base.row("functions on 8 ranks", *CHANGING_8)
    yield base.row("functions, checkpointed", activation_checkpointing=True)
    yield base.row("functions, masked labels", masked_labels=True)
    yield base.row("functions, sgd fp32", dtype=FLOAT32, optimizer="SGD", quick=True)
    yield base.row("functions, frozen queries", frozen=("embed_tokens", "layers.0.", "q_proj"))
    yield base.row("functions, bf16", dtype=BFLOAT16)
    yield base.row("functions, bf16, tied", family="llama_tied", dtype=BFLOAT16, quick=True)
    yield base.row(
        "functions, bf16, tied, split",
        "tp2pp2/zb-h1",
        "tp2pp2/v",
        "pp4/zb-h1",
        "tp4",
        family="llama_tied",
        dtype=BFLOAT16,
    )
    yield base.row("functions, bf16, 50 steps", dtype=BFLOAT16, steps=50, tokens_per_step=450)
    yield base.row("functions, bf16, gradients too", dtype=BFLOAT16, grad_accum="bf16")
    yield base.row("functions, split", "tp2pp2/zb-h1", "sp2 + pp2/zb-h1", "pp4/zb-h1", "2*pp2")
    yield base.row("functions, slices", "tp2pp2", "sp2 + 2*tp1", steps=3, slices=True)
    yield base.row("functions, phases", "4*tp1 then 2*tp2 then tp4")


HOT_SWITCHING = "4*tp1 then 2*tp2 then tp4"


def _phased() -> Iterator[Case]:
    """Steps of several phases: of homogeneous strategies one after the other, and of mixed ones."""
    base = Case("", "llama", (HOT_SWITCHING,))
    yield base.row("phases 4*tp1, 2*tp2, tp4", family="llama_tied")
    yield base.row("phases of mixed strategies", "tp2 + 2*tp1 then pp2 + sp2")
    yield base.row("phases that change", "2*tp2 then tp4", "tp2pp2", "sp2 + 2*tp1 then pp3 + tp1 then sp4",
                   "4*tp1 then tp4", family="qwen3", quick=True)  # fmt: skip
    yield base.row("phases of pipelines", "2*pp2 then pp4 then tp2pp2")
    yield base.row("phases with sp", "2*sp2 then sp4", "4*tp1 then 2*sp2 then tp2sp2")
    yield base.row("phases of uneven stages", "4*tp1 then (sp2[0:1] > tp2[1:4])",
                   "(tp1[0:1] > tp2[1:3] > tp1[3:4]) then 2*tp2", family="gemma2")  # fmt: skip
    yield base.row("phases of one strategy", "2*pp2 then 2*pp2")
    yield base.row("phases, no clipping", clip=0.0)
    yield base.row("phases fp32", family="llama_tied", dtype=FLOAT32, optimizer="SGD")
    yield base.row("phases with idle pipelines", lengths=(30, 70) * 10, tokens_per_step=90)
    yield base.row("phases, mixtral", family="mixtral")
    yield base.row("phases, layer list", HOT_SWITCHING, "pp2 + sp2 then pp4", family=LAYER_LIST)
    yield base.row(
        "phases, dropout", HOT_SWITCHING, "pp2 + sp2 then pp4", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT
    )
    yield base.row("phases, checkpointed", activation_checkpointing=True)
    yield base.row("phases, masked labels", masked_labels=True)
    yield base.row("phases, mean of sequences", loss_norm="sequence", masked_labels=True)
    yield base.row("phases, mean of micro-batches", loss_norm="micro_batch", masked_labels=True)
    yield base.row("phases, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."))
    yield base.row("phases, nodes of 2 ranks", node_size=2, family="llama_tied")
    yield base.row("phases on 8 ranks", "8*tp1 then 2*tp2pp2 then tp4sp2", "tp4 + 2*pp2 then pp4 + sp4")


def _some_otherwise(cases: Iterable[Case]) -> Iterator[Case]:
    """Every third row of those with tensor parallelism has each rank hold all tokens between the blocks, and every
    fourth row of all computes as the model's code says."""
    with_tp = 0
    for number, case in enumerate(cases):
        with_tp += case.has_tp
        if case.has_tp and with_tp % 3 == 0:
            case = replace(case, token_sharding=False)
        yield replace(case, functions="off") if case.functions == "auto" and number % 4 == 0 else case


_TABLE = chain(
    _fixed(), _families(), _unusual(), _drawing(), _options(), _heads(), _losses(), _functions(), _phased(), scheduled()
)
CASES: tuple[Case, ...] = (
    *_some_otherwise(_TABLE),
    *_adapted(),
    *_balanced(),
    *boxed(),
    *states(),
    *by_heads(),
    *by_heads_over_tokens(),
    *spread(),
    *in_groups(),
    *over_nodes(),
    *owned(),
    *with_sinks(),
    *latent(),
    *windows(),
    *shared_queries(),
    *chunks(),
    *mixed(),
    *long_contexts(),
)
assert len({case.name for case in CASES}) == len(CASES), "every row has a name of its own"
assert UNDER_STRICT.keys() <= {case.name for case in CASES if case.quick}, "they are rows of every test run"
