"""One training case: what is trained and how, how near the reference it must come; and losses that users write."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.testing import Aims

# --- One training case: what is trained and how, and how near the reference it must come.
FLOAT64, FLOAT32, BFLOAT16 = "float64", "float32", "bfloat16"

_FEW = 3  # strategies
MOST = 10**6  # tokens that no sequence has
LONG_TAILED = (3, 5, 700, 33, 120, 64, 9, 400, 31, 77, 250, 8, 90, 12, 333, 45) * 3


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
    recompute: bool = False  # micro-batches compute shares of their layers again, drawn at random
    own_loss: str = ""  # of `losses.OWN`; else the cross entropy
    weighted: bool = False  # each sequence has a weight of its own
    wire: str | None = None  # communication_data_type, if not the type of computing
    node_size: int | None = None  # ranks of a node, as if there were several nodes
    owned_by: str = ""  # the strategy by whose stages masters are owned; "": evenly by all ranks
    cluster: tuple[tuple[int, str], ...] = ()  # nodes whose devices differ, as if they did: ranks and their class
    grad_accum: str | None = None  # data_types.grad_accum_dtype
    token_sharding: bool = True  # tensor parallel ranks share tokens, if the model allows it
    sp_overlap: bool = True  # heads travel in groups, however few the tokens
    sp_groups: int = 8  # of these, at most
    logits_at_once: int | None = None  # of the head, so that a micro-batch has several blocks of them
    functions: str = "auto"  # in place of the model's own operators
    tile_rows: int = 0  # of MLPs of layers that are computed again; 0: no tiles
    fetched: bool = False  # what these layers keep waits on the host
    attention_kept: bool = False  # what attention makes in these layers stays
    run: int = 0  # elements that come to the device at once, for states on the host; 0: they are on the device
    quick: bool = False  # runs in every test run
    drawn: bool = False  # as a whole: its sequences need not be such that each of its options shows

    @property
    def options(self) -> StageOptions:
        """How its stages are to compute."""
        tiles = self.tile_rows > 0
        return StageOptions(
            self.activation_checkpointing,
            self.functions,
            self.token_sharding,
            self.sp_overlap,
            tiles,
            self.fetched,
            self.attention_kept,
        )

    @property
    def has_tp(self) -> bool:
        """Whether some stage is shared by tensor parallel ranks."""
        return any(re.search(r"tp(?!1(?!\d))", text) for text in self.strategies)

    def row(self, name: str, *strategies: str, **changes: Any) -> Case:
        """This case under another name, under these strategies if there are any, and with what else changes."""
        return replace(self, name=name, strategies=strategies or self.strategies, **changes)

    def shortened(self) -> Case:
        """The case in few steps, each under a strategy drawn by the case's name, and two at least; of the strategies
        that most cases have two, so that all of them are there among the cases many times. And with a quarter of its
        tokens, if it has the table's usual lengths."""
        few = min(2 if self.strategies in (CHANGING, IN_SLICES) else _FEW, len(self.strategies))
        drawn = random.Random(self.name).sample(range(len(self.strategies)), few)
        strategies = tuple(self.strategies[number] for number in sorted(drawn))
        case = replace(self, strategies=strategies, steps=min(self.steps, max(2, few)))
        if self.lengths is not LONG_TAILED:
            return case
        lengths = tuple(-(-length // 4) for length in self.lengths)
        return replace(case, lengths=lengths, tokens_per_step=self.tokens_per_step // 4)

    @property
    def aims(self) -> Aims:
        """FP64 runs must agree throughout. Adam magnifies FP32 rounding where a gradient is near zero, so there its
        parameters are only printed. BF16 is compared with one process in BF16: their rounding is all that is left, and
        where the reference's is large, as of products that nearly cancel, the gradients' may be, too. FP32
        gradients that travel in 16 bit are rounded once. In a long BF16 run the parameters have gone apart by rounding,
        with and without functions, and the gradients with them; the losses must not have.
        """
        if self.dtype == FLOAT64:
            whole_run = None if self.amplifies else 1e-9
            return Aims(1e-9, 1e-9, 1e-9, whole_run, whole_run)
        if self.dtype == FLOAT32 and self.wire is not None:
            return Aims(1e-6, 1e-3, 2.0**-8, None, None)
        if self.dtype == FLOAT32:
            return Aims(1e-6, 1e-5, 1e-5, 1e-5 if self.optimizer == "SGD" and not self.amplifies else None, None)
        return Aims(5e-3, 5e-2, 1e-1 if self.steps <= 10 else None, None, None)


SHARES = {1: (MOST,), 2: (60, MOST), 3: (30, 100, MOST)}
"""The longest sequence of each phase, by the number of a step's phases."""

CHANGING = ("tp2pp2", "sp2 + 2*tp1", "tp4", "pp3 + tp1", "sp4")
CHANGING_WITHOUT_TP = ("pp4", "sp2 + 2*tp1", "2*pp2", "pp3 + tp1", "sp4")
IN_SLICES = ("tp2pp2", "sp2 + 2*tp1", "pp3 + tp1")
CHANGING_8 = ("tp4 + 2*pp2", "sp4 + tp2sp2", "8*tp1", "tp2pp2sp2", "pp4 + tp4")

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
# From step to step its differences grow thirtyfold (AdamW; SGD: twenty), with one strategy as with changing ones: 1e-13
# in the gradients of step 1 are 1e-9 in step 3.
AMPLIFYING = {"embeddings of each layer"}
# Biases of keys change nothing in attention: their gradients are rounding alone.
NO_GRADIENT = ("k_proj.bias", "key.bias", "Wk.bias")


# --- Losses that users write: one number for each token, from logits (T, V) and labels (T,).
def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """(1 - p)^2 of the cross entropy: tokens that the model is sure of count little (arXiv 1708.02002)."""
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (1 - torch.exp(-losses)) ** 2 * losses


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy with a tenth of the target spread over the vocabulary."""
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)


def by_word(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy weighted by the word that is to be predicted, with a z-loss on the normaliser."""
    weights = 0.5 + torch.arange(logits.shape[-1], dtype=logits.dtype, device=logits.device) / logits.shape[-1]
    normaliser = torch.logsumexp(logits, dim=-1)
    chosen = logits.gather(-1, labels[:, None]).squeeze(-1)
    return weights[labels] * (normaliser - chosen) + 1e-2 * normaliser**2


OWN = {"focal": focal, "smoothed": smoothed, "by word": by_word}
