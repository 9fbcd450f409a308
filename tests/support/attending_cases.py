"""Training cases of kinds of attention: keys and values that come from a latent, windows and
chunks over slices of sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.support.attending_models import DROPPING, LATENT
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


def windows() -> Iterator[Case]:
    """Sliding windows over slices, of which only rows in reach stay: slices longer and shorter than they are, layers
    computed again and not, beside layers without a window."""
    base = Case("", "mistral", IN_SLICES, steps=4, slices=True, recompute=True)
    yield replace(base, name="windows, mistral")
    yield replace(base, name="windows, gemma3", family="gemma3_text", quick=True)
    yield replace(base, name="windows, gpt_oss", family="gpt_oss")
    yield replace(base, name="windows, checkpointed", activation_checkpointing=True)
    yield replace(base, name="windows, some checkpointed", family="gemma3_text", activation_checkpointing=True)
    yield replace(base, name="windows, nothing again", recompute=False, lengths=(300, 200, 450) * 8)
    yield replace(base, name="windows, split", strategies=("tp2pp2/zb-h1", "sp2 + pp2/zb-h1"), steps=2)
    yield replace(base, name="windows, phases", strategies=("4*tp1 then 2*pp2/v then tp4/list",))
    yield replace(base, name="windows fp32", dtype=FLOAT32, optimizer="SGD")


def chunks() -> Iterator[Case]:
    """Attention in chunks and queries that are scaled by their position, in packs and slices (Llama 4)."""
    base = Case("", "llama4", CHANGING, steps=4)
    yield replace(base, name="chunks")
    sliced = replace(base, strategies=IN_SLICES, slices=True, recompute=True)
    yield replace(sliced, name="chunks, slices", quick=True)
    yield replace(sliced, name="chunks, checkpointed", activation_checkpointing=True)
    yield replace(sliced, name="chunks, nothing again", recompute=False, lengths=(300, 200, 450) * 8)
    yield replace(sliced, name="chunks, split", strategies=("tp2pp2/zb-h1", "sp2 + pp2/zb-h1"), steps=2)
    yield replace(base, name="chunks, phases", strategies=("4*tp1 then 2*tp2 then tp4",))
    yield replace(base, name="chunks fp32", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="chunks on 8 ranks", strategies=CHANGING_8)


def shared_queries() -> Iterator[Case]:
    """More sequence parallel ranks than the heads divide into: of eight heads those of `sp3` share none, and of those
    of `sp6` three have the same four."""
    base = Case("", "llama", ("sp3 + tp1", "tp2pp2", "sp3 + tp1"), steps=3)
    for family, draws in (("llama", False), ("gemma2", False), ("gemma3_text", False), ("gpt_oss", False),
                          ("llama4", False), ("deepseek_v3", False), ("dropout (Phi)", True)):  # fmt: skip
        own = replace(base, family=family, draws=draws)
        yield replace(own, name=f"shared queries, {family}", quick=family == "gemma3_text")
        yield replace(own, name=f"shared queries, {family}, slices", slices=True, recompute=not draws)
    dropping = replace(base, strategies=("sp3 + tp1", "tp2sp2"), draws=True, slices=True, steps=2)
    for family in DROPPING:
        yield replace(dropping, name=f"shared queries, {family}", family=family)
    by_two = replace(base, strategies=("sp6 + 2*tp1", "tp2sp3 + tp2"), slices=True)
    yield replace(by_two, name="shared queries, two by two")
    yield replace(by_two, name="shared queries, two by two, sinks", family="gpt_oss", steps=2)
    yield replace(by_two, name="shared queries, two by two, dropout", family="dropout (Phi)", draws=True, steps=2)
    yield replace(base, name="shared queries, split", strategies=("sp3/zb-h1 + tp1",), slices=True)
    yield replace(base, name="shared queries, checkpointed", activation_checkpointing=True)
    yield replace(base, name="shared queries, all heads at once", sp_overlap=False, slices=True)
    yield replace(base, name="shared queries, fewer tokens", lengths=(3,) * 20, tokens_per_step=6, strategies=("sp6",))
    yield replace(base, name="shared queries, phases", strategies=("4*tp1 then sp3 + tp1",))
    yield replace(base, name="shared queries over nodes", node_size=2, strategies=("sp3 + tp1", "2*sp2"), slices=True)
    yield replace(base, name="shared queries fp32", dtype=FLOAT32, optimizer="SGD")
    yield from _inside_nodes()


def _inside_nodes() -> Iterator[Case]:
    """Heads that only the sequence parallel ranks of a node share, and queries that nodes do: two nodes of two ranks,
    of which `sp4` has two and `tp2sp2` one each."""
    base = Case("", "llama", ("sp4", "tp2sp2"), steps=2, node_size=2)
    sliced = replace(base, slices=True, recompute=True)
    yield replace(base, name="heads inside nodes")
    yield replace(sliced, name="heads inside nodes, slices", quick=True)
    for family in ("llama_1_key_head", "gemma2", "mistral", "gpt_oss", "llama4", "deepseek_v3"):
        yield replace(sliced, name=f"heads inside nodes, {family}", family=family, quick=family == "llama_1_key_head")
    yield replace(base, name="heads inside nodes, latent", family="deepseek_v3", activation_checkpointing=True)
    yield replace(base, name="heads inside nodes, dropout", family="dropout (Phi)", draws=True)
    yield replace(base, name="heads inside nodes, dropout, slices", family="dropout (Phi)", draws=True, slices=True)
    yield replace(base, name="heads inside nodes, three groups", family="llama_8_key_heads", sp_groups=3)
    yield replace(sliced, name="heads inside nodes, at once", sp_overlap=False)
    yield replace(base, name="heads inside nodes, split", strategies=("sp4/zb-h1", "tp2sp2/zb-h1"))
    of_8 = replace(sliced, strategies=("sp8", "tp2sp4", "sp4pp2/v"), steps=3)
    yield replace(of_8, name="heads inside nodes of 4 ranks", node_size=4)
    yield replace(of_8, name="heads inside nodes, on four nodes", family="llama_1_key_head")
    yield replace(sliced, name="heads inside nodes, on three nodes", strategies=("sp6", "tp2sp3", "3*tp2"), steps=3)
    # A row of 240 tokens fills its memory, so that all ranks share its heads; others do not.
    full = replace(base, family="llama_8_key_heads", lengths=(240, 40, 30, 20, 33, 11) * 12, tokens_per_step=250)
    yield replace(full, name="heads inside nodes, full rows", strategies=("sp4",), quick=True)
    full = replace(full, family="latent, dropout", draws=True, strategies=("sp4", "tp2sp2"))
    yield replace(full, name="heads inside nodes, full rows, dropout")
    yield replace(base, name="heads inside nodes, phases", strategies=("4*tp1 then sp4",))
    yield replace(sliced, name="heads inside nodes fp32", dtype=FLOAT32, optimizer="SGD")
