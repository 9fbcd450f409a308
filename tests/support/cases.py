"""The table of training cases: each row is trained on ranks and compared with the single-process reference.

To add a case, add a row; `tests/gloo/test_training.py` runs the rows marked quick, `tools.check_equivalence` all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.support.changed_models import CHANGED, CHANGED_LINEARS
from tests.support.families import FAMILIES, LAYER_LIST

FLOAT64, FLOAT32, BFLOAT16 = "float64", "float32", "bfloat16"

MOST = 10**6  # tokens that no sequence has
LONG_TAILED = (3, 5, 700, 33, 120, 64, 9, 400, 31, 77, 250, 8, 90, 12, 333, 45) * 3


@dataclass(frozen=True)
class Aims:
    """Largest difference allowed, relative to the largest entry of the reference's tensor; None: printed only."""

    loss: float
    norm: float
    gradient: float
    parameter: float | None
    moment: float | None


@dataclass(frozen=True)
class Case:
    """One training run: step i runs under strategies[i % len(strategies)], such as "tp4" or "4*tp1 then tp4".

    Of several phases each takes the sequences that are short enough, as `SHARES` says.
    """

    name: str
    family: str
    strategies: tuple[str, ...]
    dtype: str = FLOAT64
    optimizer: str = "AdamW"
    steps: int = 5
    lengths: tuple[int, ...] = LONG_TAILED
    tokens_per_step: int = 900
    clip: float = 0.1
    loss_norm: str = "token"
    activation_checkpointing: bool = False
    masked_labels: bool = False  # some targets are not learnt, in one sequence none is
    frozen: tuple[str, ...] = ()  # words in the names of parameters that are not trained
    draws: bool = False  # the model draws random numbers in training
    amplifies: bool = False  # rounding grows so fast that each step is compared from the ranks' own parameters
    slices: bool = False  # long sequences run in slices, cut at random
    wire: str | None = None  # communication_data_type, if not the type of computing
    node_size: int | None = None  # ranks of a node, as if there were several nodes
    grad_accum: str | None = None  # data_types.grad_accum_dtype
    quick: bool = False  # runs in every test run, and under --quick

    def shortened(self) -> Case:
        """The case with a quarter of its tokens, if it has the table's usual lengths."""
        if self.lengths is not LONG_TAILED:
            return self
        lengths = tuple(-(-length // 4) for length in self.lengths)
        return replace(self, lengths=lengths, tokens_per_step=self.tokens_per_step // 4)

    @property
    def aims(self) -> Aims:
        """FP64 runs must agree throughout. Adam magnifies FP32 rounding where a gradient is near zero, so there its
        parameters are only printed. BF16 is compared with one process in BF16: its rounding is all that is left. FP32
        gradients that travel in 16 bit are rounded once.
        """
        if self.dtype == FLOAT64:
            whole_run = None if self.amplifies else 1e-9
            return Aims(1e-9, 1e-9, 1e-9, whole_run, whole_run)
        if self.dtype == FLOAT32 and self.wire is not None:
            return Aims(1e-6, 1e-3, 2.0**-8, None, None)
        if self.dtype == FLOAT32:
            return Aims(1e-6, 1e-5, 1e-5, 1e-5 if self.optimizer == "SGD" else None, None)
        return Aims(5e-3, 5e-2, 1e-1, None, None)


SHARES = {1: (MOST,), 2: (60, MOST), 3: (30, 100, MOST)}
"""The longest sequence of each phase, by the number of a step's phases."""

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
CHANGING = ("tp2pp2", "sp2 + 2*tp1", "tp4", "pp3 + tp1", "sp4")
CHANGING_8 = ("tp4 + 2*pp2", "sp4 + tp2sp2", "8*tp1", "tp2pp2sp2", "pp4 + tp4")

SPLIT = ("tp2pp2/zb-h1", "sp2 + pp2/zb-h1", "pp4/zb-h1", "pp3/zb-h1 + tp1", "2*pp2")
SPLIT_8 = ("2*tp2pp2/zb-h1", "pp4/zb-h1 + sp2pp2/zb-h1", "tp2pp2sp2/zb-h1", "tp4pp2/zb-h1")

CHANGING_WITHOUT_TP = ("pp4", "sp2 + 2*tp1", "2*pp2", "pp3 + tp1", "sp4")

# Of HARD_MODELS, those that train under every strategy; the others are refused.
UNUSUAL = (
    "final norm without parameters",
    "one norm before and after the layers",
    "activation with parameters",
    "norms of queries and keys (GLM-4.5)",
    "norms of queries and keys (Phi)",
    "norms of each head (Command R+)",
    "longrope",
    "positions from the padding id",
    "BERT as a decoder",
    "embeddings of another width (OPT-350m)",
    "embeddings scaled in place",
    "layers called by keyword",
    "embeddings of each layer",
)
_QUICK_UNUSUAL = {"longrope", "hooks that hold other modules"}
# From step to step its differences grow thirtyfold (AdamW; SGD: twenty), with one strategy as with changing ones: 1e-13
# in the gradients of step 1 are 1e-9 in step 3.
_AMPLIFYING = {"embeddings of each layer"}
# Of HARD_MODELS, those that draw random numbers in training.
DRAWING = ("dropout (Phi)", "dropout", "dropout by a function", "noise on what is routed", "random routing")
# Biases of keys change nothing in attention: their gradients are rounding alone.
_NO_GRADIENT = ("k_proj.bias", "key.bias", "Wk.bias")

# Rows for every test run: each axis of parallelism, heterogeneous mixes, every number of ranks up to 8.
_QUICK_FIXED = {"tp1", "tp2pp3", "tp4 + pp2 + tp1", "tp2pp2sp2"}
_QUICK_FAMILIES_FP64 = {"llama_tied", "gemma2", "phi3", "mixtral", LAYER_LIST}
_QUICK_FAMILIES_FP32 = {"qwen3", "gpt2"}


def _fixed() -> Iterator[Case]:
    for strategy in FIXED_STRATEGIES:
        yield Case(f"fixed {strategy}", "qwen3", (strategy,), quick=strategy in _QUICK_FIXED)
    for strategy in FIXED_STRATEGIES:
        yield Case(f"fixed {strategy} fp32", "llama", (strategy,), FLOAT32, quick=strategy == "sp4 + tp2pp2")


def _families() -> Iterator[Case]:
    for family in (*(name for name in FAMILIES if name != "llama_3_layers"), LAYER_LIST):
        yield Case(f"{family}", family, CHANGING, quick=family in _QUICK_FAMILIES_FP64)
        yield Case(f"{family} fp32", family, CHANGING, FLOAT32, quick=family in _QUICK_FAMILIES_FP32)
    yield Case("llama on 8 ranks", "llama", CHANGING_8, quick=True)
    yield Case("gemma3 on 8 ranks", "gemma3_text", CHANGING_8)


def _unusual() -> Iterator[Case]:
    for family in UNUSUAL:
        quick, amplifies = family in _QUICK_UNUSUAL, family in _AMPLIFYING
        yield Case(family, family, CHANGING, frozen=_NO_GRADIENT, amplifies=amplifies, quick=quick)
    for family in CHANGED:
        yield Case(family, family, CHANGING, quick=family in _QUICK_UNUSUAL)
    for family in CHANGED_LINEARS:
        yield Case(family, family, CHANGING_WITHOUT_TP)


def _drawing() -> Iterator[Case]:
    for family in DRAWING:
        yield Case(family, family, CHANGING, draws=True, frozen=_NO_GRADIENT, quick=True)
    yield Case(
        "dropout checkpointed",
        "dropout (Phi)",
        CHANGING,
        draws=True,
        frozen=_NO_GRADIENT,
        activation_checkpointing=True,
        quick=True,
    )
    yield Case("dropout on 8 ranks", "dropout (Phi)", CHANGING_8, draws=True)


def _options() -> Iterator[Case]:
    base = Case("", "llama", CHANGING)
    yield replace(base, name="sgd fp32", dtype=FLOAT32, optimizer="SGD", quick=True)
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
    yield replace(base, name="checkpointed", activation_checkpointing=True, quick=True)
    yield replace(base, name="checkpointed gemma3", family="gemma3_text", activation_checkpointing=True)
    yield replace(
        base, name="checkpointed fp32 mixtral", family="mixtral", dtype=FLOAT32, activation_checkpointing=True
    )
    yield replace(base, name="masked labels", masked_labels=True, quick=True)
    yield replace(base, name="mean of sequences", loss_norm="sequence", masked_labels=True, quick=True)
    yield replace(base, name="mean of micro-batches", loss_norm="micro_batch", masked_labels=True, quick=True)
    yield replace(
        base, name="layer list, mean of sequences", family=LAYER_LIST, loss_norm="sequence", masked_labels=True
    )
    yield replace(base, name="frozen embeddings", frozen=("embed_tokens",))
    yield replace(base, name="frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."), quick=True)
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
    yield replace(
        base, name="stages of different tp and sp", strategies=("(sp2[0:1] > tp2[1:4])",), quick=True,
    )  # fmt: skip
    yield replace(
        base, name="stages of different size", family="gemma2",
        strategies=("(tp1[0:1] > tp4[1:3] > tp1[3:4]) + sp2",),
    )  # fmt: skip
    yield replace(base, name="nodes of 2 ranks", node_size=2, quick=True)
    yield replace(base, name="nodes of 2 ranks bf16", node_size=2, dtype=BFLOAT16)
    yield replace(base, name="nodes of 3 and 1 ranks, tied", family="gemma2", node_size=3)
    yield replace(base, name="8 ranks on 2 nodes", strategies=CHANGING_8, node_size=4, quick=True)


HOT_SWITCHING = "4*tp1 then 2*tp2 then tp4"


def _phased() -> Iterator[Case]:
    """Steps of several phases: of homogeneous strategies one after the other, and of mixed ones."""
    base = Case("", "llama", (HOT_SWITCHING,))
    yield replace(base, name="phases 4*tp1, 2*tp2, tp4", family="llama_tied", quick=True)
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
        draws=True, frozen=_NO_GRADIENT,
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


def _split() -> Iterator[Case]:
    """Backwards split into gradients of inputs and of weights, mixed with others that are not."""
    for family in (*FAMILIES, LAYER_LIST):
        if family != "llama_3_layers":
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
    yield replace(base, name="split, dropout", family="dropout (Phi)", draws=True, frozen=_NO_GRADIENT)
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


_SLICED = Case("", "llama", ("tp2pp2", "sp2 + 2*tp1", "pp3 + tp1"), steps=3, slices=True)
_QUICK_SLICED = {"gemma2", "mixtral"}


def _sliced() -> Iterator[Case]:
    """Long sequences in slices, which run in turns, with short ones beside and between them."""
    base = _SLICED
    for strategy in ("tp1", "tp2", "pp2", "sp2", "pp4", "tp2pp2sp2", "sp4 + tp2pp2", "2*pp4"):
        quick = strategy in ("pp4", "tp2pp2sp2")
        yield replace(base, name=f"slices {strategy}", family="qwen3", strategies=(strategy,), quick=quick)
    for family in (
        "llama_tied", "mistral", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe", "cohere", "gpt_neox", "gpt2",
        "gpt_oss", "longrope", "positions from the padding id", "embeddings of each layer",
    ):  # fmt: skip
        frozen = _NO_GRADIENT if family in UNUSUAL else ()
        yield replace(
            base, name=f"slices, {family}", family=family, frozen=frozen,
            amplifies=family in _AMPLIFYING, quick=family in _QUICK_SLICED,
        )  # fmt: skip
    yield replace(base, name="slices fp32", family="qwen3", dtype=FLOAT32, quick=True)
    yield replace(base, name="slices fp32 sgd", dtype=FLOAT32, optimizer="SGD")
    yield replace(base, name="slices bf16", dtype=BFLOAT16)
    yield replace(base, name="slices, checkpointed", family="mistral", activation_checkpointing=True, quick=True)
    yield replace(base, name="slices, checkpointed fp32 mixtral", family="mixtral", dtype=FLOAT32,
                  activation_checkpointing=True)  # fmt: skip
    yield replace(base, name="slices, frozen lower layers", frozen=("embed_tokens", "layers.0.", "layers.1."),
                  activation_checkpointing=True, quick=True)  # fmt: skip
    yield replace(base, name="slices, frozen queries and keys", frozen=("embed_tokens", "q_proj", "k_proj", "v_proj"),
                  activation_checkpointing=True)  # fmt: skip
    yield replace(base, name="slices, dropout", family="dropout (Phi)", draws=True, frozen=_NO_GRADIENT, quick=True)
    yield replace(base, name="slices, random routing", family="random routing", draws=True, frozen=_NO_GRADIENT)
    yield replace(base, name="slices, masked labels", masked_labels=True)
    yield replace(
        base, name="slices, mean of sequences", loss_norm="sequence", masked_labels=True,
    )  # fmt: skip
    yield replace(base, name="slices, fewer tokens than sp", strategies=("sp4", "tp2sp2"), lengths=(31,) * 20,
                  tokens_per_step=31)  # fmt: skip
    yield replace(base, name="slices, stages of different tp and sp", strategies=("(sp2[0:1] > tp2[1:4])",))
    yield replace(base, name="slices in phases", strategies=("4*tp1 then 2*pp2 then tp2sp2", "pp2 + sp2 then pp4"),
                  quick=True)  # fmt: skip
    yield replace(base, name="slices on 8 ranks", strategies=CHANGING_8)
    yield replace(base, name="slices on 8 ranks of 2 nodes", strategies=CHANGING_8, node_size=4)
    yield replace(base, name="slices, long ones only", lengths=(300, 200, 450) * 8, strategies=("2*pp2", "tp2pp2"))


CASES: tuple[Case, ...] = (
    *_fixed(), *_families(), *_unusual(), *_drawing(), *_options(), *_phased(), *_split(), *_sliced()
)  # fmt: skip
assert len({case.name for case in CASES}) == len(CASES), "every row has a name of its own"
