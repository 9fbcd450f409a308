"""Training cases of pipelines whose stages differ in device class, degrees and layers: the classes are made up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.support.case import BFLOAT16, FLOAT32, NO_GRADIENT, Case

HALVES = ((2, "slow"), (2, "fast"))  # nodes
APART = ((1, "slow"), (2, "fast"), (1, "slow"))
THREE = ((3, "slow"), (1, "fast"))
EIGHT = ((4, "slow"), (2, "fast"), (2, "fast"))


def mixed() -> Iterator[Case]:
    """24 rows; ranks of a class follow each other in some clusters and not in others."""
    base = Case("", "llama", ("(tp2[0:1]@slow > tp2[1:4]@fast)",), steps=3, cluster=HALVES)
    yield replace(base, name="mixed")
    yield replace(base, name="mixed, two pipelines", strategies=("(tp1[0:1]@slow > tp1[1:4]@fast) + "
                  "(tp1[0:2]@slow > tp1[2:4]@fast)", "2*(tp1[0:1]@slow > tp1[1:4]@fast)"))  # fmt: skip
    yield replace(base, name="mixed, a class alone", strategies=("tp2@slow + tp2@fast", "sp2@slow + 2*tp1@fast"))
    yield replace(base, name="mixed, tp and sp", strategies=("(sp2[0:1]@slow > tp2[1:4]@fast)",
                  "(tp2[0:2]@fast > sp2[2:4]@slow)"))  # fmt: skip
    yield replace(base, name="mixed, apart", cluster=APART, quick=True, strategies=("(tp2[0:3]@slow > tp2[3:4]@fast)",
                  "(tp1[0:1]@slow > tp2[1:3]@fast > tp1[3:4]@slow)", "(sp2@slow > tp2@fast)"))  # fmt: skip
    yield replace(base, name="mixed, apart, sp over nodes", cluster=APART, strategies=("sp2@slow + sp2@fast",
                  "(tp1[0:1]@fast > sp2[1:3]@slow > tp1[3:4]@fast)"))  # fmt: skip
    yield replace(base, name="mixed, three of a class", cluster=THREE, strategies=("(tp2@slow > tp1@slow > tp1@fast)",
                  "tp1@slow + (tp2[0:1]@slow > tp1[1:4]@fast)"))  # fmt: skip
    yield replace(base, name="mixed, tied", family="llama_tied", strategies=("(tp2[0:1]@slow > tp2[1:4]@fast)",
                  "2*(tp1@slow > tp1@fast)"))  # fmt: skip
    for family in ("gemma2", "mixtral", "gpt2", "phi3"):
        yield replace(base, name=f"mixed, {family}", family=family)
    yield replace(base, name="mixed, eight", cluster=EIGHT, strategies=("(tp4[0:1]@slow > tp2[1:2]@fast > "
                  "tp1[2:3]@fast > tp1[3:4]@fast)", "2*(tp2[0:1]@slow > tp2[1:4]@fast)"))  # fmt: skip
    yield replace(base, name="mixed, eight, tp4 over nodes", cluster=EIGHT,
                  strategies=("(tp4[0:1]@slow > tp4[1:4]@fast)", "(tp2sp2[0:1]@slow > sp4[1:4]@fast)"))  # fmt: skip
    split = replace(base, strategies=("(tp2[0:1]@slow > tp2[1:4]@fast)/zb-h1", "2*(tp1@slow > tp1@fast)/zb-h1"))
    yield replace(split, name="mixed, split")
    yield replace(split, name="mixed, list", strategies=("(sp2[0:1]@slow > tp2[1:4]@fast)/list",))
    of_v = ("(sp2[0:1,3:4]@slow > tp2[1:2,2:3]@fast)/list", "(tp2@slow > sp2@fast)/v")
    yield replace(split, name="mixed, V", strategies=of_v)
    sliced = replace(base, slices=True)
    yield replace(sliced, name="mixed, slices", quick=True)
    yield replace(sliced, name="mixed, slices, V", strategies=("(sp2[0:1,3:4]@slow > tp2[1:2,2:3]@fast)/list",))
    yield replace(sliced, name="mixed, slices, recomputed", family="mistral", recompute=True)
    yield replace(base, name="mixed, phases", strategies=("2*tp1@slow + 2*tp1@fast then (tp2[0:1]@slow > "
                  "tp2[1:4]@fast)",))  # fmt: skip
    yield replace(base, name="mixed, checkpointed, frozen", activation_checkpointing=True,
                  frozen=("embed_tokens", "layers.0."))  # fmt: skip
    yield replace(base, name="mixed, dropout", family="dropout (Phi)", draws=True, frozen=NO_GRADIENT)
    yield replace(base, name="mixed fp32", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="mixed bf16", dtype=BFLOAT16)
