"""Training cases of long contexts on few devices: MLPs in tiles of rows, what layers keep and states on the host."""

from __future__ import annotations

from collections.abc import Iterator

from tests.support.case import BFLOAT16, CHANGING, CHANGING_8, FLOAT32, IN_SLICES, NO_GRADIENT, Case

V = ("tp2pp2/v", "sp2 + pp2/list", "tp4/list")


def long_contexts() -> Iterator[Case]:
    """Rows of all kinds of layouts with both; tiles of few rows, so that micro-batches have several uneven ones."""
    tiled = Case("", "llama", CHANGING, activation_checkpointing=True, tile_rows=24)
    yield tiled.row("tiles", quick=True)
    yield tiled.row("tiles, gemma2", family="gemma2")
    yield tiled.row("tiles, phi3", family="phi3")
    yield tiled.row("tiles, shared experts", "tp2pp2", "tp4", "sp2 + 2*tp1", family="deepseek_v3")
    yield tiled.row("tiles, all tokens", token_sharding=False)
    yield tiled.row("tiles, as written", functions="off")
    yield tiled.row("tiles, split", "tp2pp2/zb-h1", "sp2 + pp2/zb-h1", steps=2)
    yield tiled.row("tiles, some layers", *V, activation_checkpointing=False, recompute=True, slices=True, steps=4)
    yield tiled.row("tiles, frozen gates", frozen=("gate_proj", "layers.0."))
    yield tiled.row("tiles, lora", family="lora")
    yield tiled.row("tiles, fp32", dtype=FLOAT32, optimizer="SGD")
    yield tiled.row("tiles, bf16", dtype=BFLOAT16)
    both = Case("", "llama", CHANGING, activation_checkpointing=True, tile_rows=24, fetched=True)
    yield both.row("fetched", quick=True)
    yield both.row("fetched, slices", *V, slices=True, steps=4, quick=True)
    yield both.row("fetched, windows", *V, family="gemma3_text", slices=True, steps=4)
    yield both.row("fetched, split", "tp2pp2/zb-h1", "sp2 + pp2/zb-h1", steps=2, slices=True)
    yield both.row("fetched, frozen embeddings", frozen=("embed_tokens", "layers.1."))
    yield both.row("fetched, phases", "4*tp1 then 2*pp2/v then tp4/list")
    yield both.row("fetched, dropout", family="dropout (Phi)", frozen=NO_GRADIENT, draws=True, tile_rows=0)
    yield both.row("fetched on 8 ranks", *CHANGING_8)
    yield both.row("fetched, bf16", dtype=BFLOAT16)
    attends = Case("", "llama", CHANGING, activation_checkpointing=True, attention_kept=True)
    yield attends.row("attention kept", quick=True)
    yield attends.row("attention kept, slices", *V, slices=True, steps=4, tile_rows=24, quick=True)
    yield attends.row("attention kept, windows", *V, family="gemma3_text", slices=True, steps=4)
    yield attends.row("attention kept, sinks", *IN_SLICES, family="gpt_oss", slices=True)
    yield attends.row("attention kept, split", "tp2pp2/zb-h1", "sp2 + pp2/zb-h1", steps=2)
    yield attends.row("attention kept, dropout", family="dropout (Phi)", frozen=NO_GRADIENT, draws=True)
    yield attends.row("attention kept on 8 ranks", *CHANGING_8)
    yield attends.row("attention kept, bf16", dtype=BFLOAT16)
    states = Case("", "llama", CHANGING, run=500)
    yield states.row("states on host", quick=True)
    yield states.row("states on host, V, fetched", *V, activation_checkpointing=True, fetched=True, quick=True)
    yield states.row("states on host, phases", "4*tp1 then 2*pp2 then tp4", quick=True)
    yield states.row("states on host, sums of 16 bit", dtype=BFLOAT16, grad_accum="bf16", quick=True)
    yield states.row("states on host, frozen", frozen=("embed_tokens", "layers.1."))
    yield states.row("states on host, sgd fp32", dtype=FLOAT32, optimizer="SGD")
    yield states.row("states on host, wide", family="deepseek_v3")
    yield states.row("states on host, 8 ranks", *CHANGING_8)
