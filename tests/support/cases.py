"""The table of training cases: each row is trained on ranks and compared with the single-process reference.

To add a case, add a row; `tests/gloo/test_training.py` draws from the rows marked quick, but for those that
`tests/gloo/test_strict_training.py` runs, `tools.check_equivalence` all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from tests.support.adapted_models import ADAPTED, ADAPTED_STACKS, ADAPTED_WITHOUT_TP
from tests.support.attending_cases import chunks, latent, shared_queries, windows
from tests.support.boxed_cases import boxed, by_heads, by_heads_over_tokens, states
from tests.support.case import (
    AMPLIFYING,
    BFLOAT16,
    CHANGING,
    CHANGING_8,
    CHANGING_WITHOUT_TP,
    FLOAT32,
    NO_GRADIENT,
    UNUSUAL,
    Case,
)
from tests.support.changed_models import CHANGED, CHANGED_LINEARS
from tests.support.expert_cases import spread
from tests.support.families import BALANCED, FAMILIES, LAYER_LIST, OTHER_SIZES
from tests.support.losses import OWN
from tests.support.mixed_cases import mixed
from tests.support.scheduled_cases import in_groups, over_nodes, scheduled, with_sinks

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
        yield Case(family, family, CHANGING)
    for family in CHANGED_LINEARS:
        yield Case(family, family, CHANGING_WITHOUT_TP)


def _drawing() -> Iterator[Case]:
    for family in DRAWING:
        yield Case(family, family, CHANGING, draws=True, frozen=NO_GRADIENT, quick=family == "random routing")
    yield Case(
        "dropout checkpointed",
        "dropout (Phi)",
        CHANGING,
        draws=True,
        frozen=NO_GRADIENT,
        activation_checkpointing=True,
        quick=True,
    )
    yield Case("dropout on 8 ranks", "dropout (Phi)", CHANGING_8, draws=True)


def _adapted() -> Iterator[Case]:
    """Models with PEFT's adapters, which are trained beside frozen weights."""
    for family in ADAPTED:
        base = Case(family, family, (*CHANGING, "tp2sp2"), draws="dropout" in family, steps=6)
        yield base
        yield replace(
            base, name=f"{family}, slices", strategies=("tp2pp2/v", "pp4/list", "tp4"), steps=3,
            slices=True, recompute=True,
        )  # fmt: skip
        yield replace(
            base, name=f"{family}, split", strategies=("tp2pp2/zb-h1", "tp2pp2/v", "sp2 + pp2/zb-h1"), steps=3
        )
        quick = family == "lora and whole modules"
        yield replace(base, name=f"{family}, all tokens", strategies=CHANGING, token_sharding=False, quick=quick)
    base = Case("", "lora", CHANGING)
    yield replace(base, name="lora, one strategy", strategies=("tp2pp2",), steps=3, quick=True)
    dropout = replace(base, family="lora with dropout", draws=True)
    yield replace(dropout, name="lora with dropout, V", strategies=("tp2pp2/v",), slices=True, steps=1, quick=True)
    yield replace(base, name="lora bf16", dtype=BFLOAT16)
    yield replace(base, name="lora fp32", dtype=FLOAT32, optimizer="SGD")
    yield replace(dropout, name="lora, checkpointed", activation_checkpointing=True)
    yield replace(base, name="lora, phases", strategies=("2*tp2 then tp4", "4*tp1 then 2*pp2"))
    yield replace(base, name="lora on 8 ranks", strategies=CHANGING_8)
    yield replace(base, name="lora, nodes of 2 ranks", node_size=2)
    for family in ADAPTED_STACKS:
        base = Case(family, family, ("tp2pp2", "sp2 + 2*tp1", "tp4", "tp2sp2"), steps=4)
        yield base
        yield replace(
            base, name=f"{family}, slices", strategies=("tp2pp2/v", "tp4"), steps=2, slices=True, recompute=True
        )
        spread = ("tp4ep4", "tp2sp2ep4", "tp2ep2pp2/zb-h1", "sp2ep2 + 2*tp1")
        yield replace(base, name=f"{family}, spread", strategies=spread, quick=family == "lora of stacks")
    for family in ADAPTED_WITHOUT_TP:
        yield Case(family, family, CHANGING_WITHOUT_TP, draws="dropout" in family, quick=family == "lora of the ends")


def _options() -> Iterator[Case]:
    base = Case("", "llama", CHANGING)
    yield replace(base, name="sgd fp32", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="sgd fp32 gemma2", family="gemma2", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="sgd fp32 8 ranks", strategies=CHANGING_8, dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="bf16", dtype=BFLOAT16, quick=True)
    yield replace(base, name="bf16, gradients too", dtype=BFLOAT16, grad_accum="bf16")
    yield replace(base, name="bf16 gemma2, gradients too", family="gemma2", dtype=BFLOAT16, grad_accum="bf16")
    yield replace(base, name="bf16 gemma2", family="gemma2", dtype=BFLOAT16)
    yield replace(base, name="bf16, fp32 on the wire", dtype=BFLOAT16, wire="fp32", quick=True)
    yield replace(base, name="fp32, bf16 on the wire", dtype=FLOAT32, wire="bf16")
    yield replace(base, name="fp32, fp16 on the wire", dtype=FLOAT32, wire="fp16")
    yield replace(base, name="no clipping", clip=0.0)
    yield replace(base, name="checkpointed", activation_checkpointing=True)
    yield replace(base, name="checkpointed gemma3", family="gemma3_text", activation_checkpointing=True)
    yield replace(
        base, name="checkpointed fp32 mixtral", family="mixtral", dtype=FLOAT32, activation_checkpointing=True
    )
    yield replace(base, name="masked labels", masked_labels=True)
    yield replace(base, name="mean of sequences", loss_norm="sequence", masked_labels=True, quick=True)
    yield replace(base, name="mean of micro-batches", loss_norm="micro_batch", masked_labels=True)
    yield replace(
        base, name="layer list, mean of sequences", family=LAYER_LIST, loss_norm="sequence", masked_labels=True
    )
    yield replace(base, name="frozen embeddings", frozen=("embed_tokens",))
    yield replace(base, name="frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."))
    yield replace(base, name="frozen tied", family="llama_tied", frozen=("embed_tokens",))
    yield replace(base, name="frozen layer list", family=LAYER_LIST, frozen=("tied_modules", "1.qkv"))
    yield replace(base, name="idle pipelines", strategies=("4*tp1", "2*pp2"), lengths=(30,) * 20, tokens_per_step=30)
    yield replace(
        base, name="idle pipelines on 7 ranks", strategies=("sp2 + tp2 + pp3", "7*tp1"), lengths=(30, 7) * 20,
        tokens_per_step=31, quick=True,
    )  # fmt: skip
    yield replace(
        base, name="fewer tokens than sp", strategies=("sp4", "tp2sp2", "2*sp2"), lengths=(3,) * 20,
        tokens_per_step=3, quick=True,
    )  # fmt: skip
    yield replace(base, name="uneven layers", family="llama_3_layers", strategies=("pp2 + tp1pp2", "pp3 + tp1"))
    yield replace(base, name="stages of different tp and sp", strategies=("(sp2[0:1] > tp2[1:4])",))
    yield replace(
        base, name="stages of different size", family="gemma2",
        strategies=("(tp1[0:1] > tp4[1:3] > tp1[3:4]) + sp2",),
    )  # fmt: skip
    yield replace(base, name="nodes of 2 ranks", node_size=2)
    yield replace(base, name="nodes of 2 ranks bf16", node_size=2, dtype=BFLOAT16)
    yield replace(base, name="nodes of 3 and 1 ranks, tied", family="gemma2", node_size=3)
    yield replace(base, name="8 ranks on 2 nodes", strategies=CHANGING_8, node_size=4, quick=True)
    odd = ("7*tp1", "tp2 + 5*tp1", "tp4 + tp2 + tp1", "3*tp2 + tp1", "tp2pp2 + 3*tp1")
    yield replace(base, name="7 ranks on nodes of 4 and 3", strategies=odd, node_size=4, steps=6)


def _heads() -> Iterator[Case]:
    """Heads and losses in blocks, as those of large vocabularies are."""
    base = Case("", "llama", ("2*tp1", "tp2", "pp2/v"), logits_at_once=1500, masked_labels=True)
    yield replace(base, name="head in blocks")
    yield replace(
        base, name="head in blocks, tied", family="llama_tied", strategies=("tp2pp2", "tp2 + 2*tp1"), quick=True
    )
    yield replace(base, name="head in blocks, bf16", dtype=BFLOAT16)
    yield replace(base, name="head in blocks, frozen", frozen=("lm_head",))
    yield replace(base, name="head in blocks, softcap", family="gemma2", strategies=("tp2", "2*tp1"), quick=True)
    yield replace(base, name="head in blocks, mean of sequences", loss_norm="sequence", weighted=True)


def _losses() -> Iterator[Case]:
    """Losses of the user's own, which see the logits of all tensor parallel ranks, and weights of sequences."""
    base = Case("", "llama", CHANGING)
    yield replace(base, name="weights of sequences", weighted=True, masked_labels=True, quick=True)
    yield replace(base, name="weights of sequences, mean of each", weighted=True, loss_norm="sequence")
    for own in OWN:
        yield replace(base, name=f"{own} loss", own_loss=own, masked_labels=True, quick=own == "focal")
        yield replace(base, name=f"{own} loss, tied", own_loss=own, family="gemma2", weighted=True)
    yield replace(base, name="focal loss on 8 ranks", own_loss="focal", strategies=CHANGING_8)
    yield replace(base, name="smoothed loss, experts", own_loss="smoothed", family="mixtral")
    yield replace(
        base, name="focal loss in slices", own_loss="focal", strategies=("pp2/list + 2*tp1/list",), slices=True
    )


def _balanced() -> Iterator[Case]:
    """Routers with a loss of their own, in stages, on shared tokens and over slices of sequences."""
    for family in BALANCED:
        yield Case(family, family, CHANGING)
    base = Case("", "mixtral, balanced", CHANGING)
    yield replace(
        base, name="balanced, slices", strategies=("tp2pp2/v", "sp2 + pp2/list"), steps=2, slices=True, recompute=True,
        masked_labels=True, weighted=True, quick=True,
    )  # fmt: skip
    yield replace(base, name="balanced, all tokens", strategies=("tp2sp2", "tp4"), token_sharding=False)
    yield replace(
        base, name="balanced, more slices", strategies=("tp2sp2/list", "pp2/v + 2*tp1/v", "sp2 + pp2/list"), slices=True
    )
    yield replace(base, name="balanced, mean of sequences", loss_norm="sequence", masked_labels=True)
    yield replace(base, name="balanced, checkpointed", activation_checkpointing=True)
    yield replace(base, name="balanced, split", strategies=("tp2pp2/zb-h1", "sp2 + pp2/zb-h1", "pp4/zb-h1"))
    yield replace(base, name="balanced, phases", strategies=("4*tp1 then 2*tp2 then tp4",))
    yield replace(base, name="balanced, own loss", own_loss="focal")
    yield replace(base, name="balanced, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1.", "gate"))
    yield replace(base, name="balanced on 8 ranks", strategies=CHANGING_8)
    yield replace(base, name="balanced fp32", dtype=FLOAT32)


_WITH_FUNCTIONS = ("llama", "llama_tied", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "olmo2", "mixtral",
                   "phi3", "cohere", "glm4")  # fmt: skip


def _functions() -> Iterator[Case]:
    """Functions of few operators in place of the model's own chains."""
    for family in _WITH_FUNCTIONS:
        yield Case(f"functions, {family}", family, CHANGING, functions="recompute", quick=family == "llama_tied")
    base = Case("", "llama", CHANGING, functions="recompute")
    yield replace(base, name="functions on 8 ranks", strategies=CHANGING_8)
    yield replace(base, name="functions, checkpointed", activation_checkpointing=True)
    yield replace(base, name="functions, masked labels", masked_labels=True)
    yield replace(base, name="functions, sgd fp32", dtype=FLOAT32, optimizer="SGD", quick=True)
    yield replace(base, name="functions, frozen queries", frozen=("embed_tokens", "layers.0.", "q_proj"))
    yield replace(base, name="functions, bf16", dtype=BFLOAT16)
    yield replace(base, name="functions, bf16, 50 steps", dtype=BFLOAT16, steps=50, tokens_per_step=450)
    yield replace(base, name="functions, bf16, gradients too", dtype=BFLOAT16, grad_accum="bf16")
    yield replace(base, name="functions, split", strategies=("tp2pp2/zb-h1", "sp2 + pp2/zb-h1", "pp4/zb-h1", "2*pp2"))
    yield replace(base, name="functions, slices", strategies=("tp2pp2", "sp2 + 2*tp1"), steps=3, slices=True)
    yield replace(base, name="functions, phases", strategies=("4*tp1 then 2*tp2 then tp4",))


HOT_SWITCHING = "4*tp1 then 2*tp2 then tp4"


def _phased() -> Iterator[Case]:
    """Steps of several phases: of homogeneous strategies one after the other, and of mixed ones."""
    base = Case("", "llama", (HOT_SWITCHING,))
    yield replace(base, name="phases 4*tp1, 2*tp2, tp4", family="llama_tied")
    yield replace(base, name="phases of mixed strategies", strategies=("tp2 + 2*tp1 then pp2 + sp2",))
    yield replace(
        base, name="phases that change", family="qwen3", quick=True,
        strategies=("2*tp2 then tp4", "tp2pp2", "sp2 + 2*tp1 then pp3 + tp1 then sp4", "4*tp1 then tp4"),
    )  # fmt: skip
    yield replace(base, name="phases of pipelines", strategies=("2*pp2 then pp4 then tp2pp2",))
    yield replace(base, name="phases with sp", strategies=("2*sp2 then sp4", "4*tp1 then 2*sp2 then tp2sp2"))
    yield replace(
        base, name="phases of uneven stages", family="gemma2",
        strategies=("4*tp1 then (sp2[0:1] > tp2[1:4])", "(tp1[0:1] > tp2[1:3] > tp1[3:4]) then 2*tp2"),
    )  # fmt: skip
    yield replace(base, name="phases of one strategy", strategies=("2*pp2 then 2*pp2",))
    yield replace(base, name="phases, no clipping", clip=0.0)
    yield replace(base, name="phases fp32", family="llama_tied", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="phases with idle pipelines", lengths=(30, 70) * 10, tokens_per_step=90)
    yield replace(base, name="phases, mixtral", family="mixtral")
    yield replace(base, name="phases, layer list", family=LAYER_LIST, strategies=(HOT_SWITCHING, "pp2 + sp2 then pp4"))
    yield replace(
        base, name="phases, dropout", family="dropout (Phi)", strategies=(HOT_SWITCHING, "pp2 + sp2 then pp4"),
        draws=True, frozen=NO_GRADIENT,
    )  # fmt: skip
    yield replace(base, name="phases, checkpointed", activation_checkpointing=True)
    yield replace(base, name="phases, masked labels", masked_labels=True)
    yield replace(base, name="phases, mean of sequences", loss_norm="sequence", masked_labels=True)
    yield replace(base, name="phases, mean of micro-batches", loss_norm="micro_batch", masked_labels=True)
    yield replace(base, name="phases, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."))
    yield replace(base, name="phases, nodes of 2 ranks", node_size=2, family="llama_tied")
    yield replace(
        base, name="phases on 8 ranks", strategies=("8*tp1 then 2*tp2pp2 then tp4sp2", "tp4 + 2*pp2 then pp4 + sp4")
    )


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
    *with_sinks(),
    *latent(),
    *windows(),
    *shared_queries(),
    *chunks(),
    *mixed(),
)
assert len({case.name for case in CASES}) == len(CASES), "every row has a name of its own"
assert UNDER_STRICT.keys() <= {case.name for case in CASES if case.quick}, "they are rows of every test run"
