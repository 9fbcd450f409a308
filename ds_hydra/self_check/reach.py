"""A model in, how far it has to be tried out: the lengths of the longest sequence and of the longest row.

[Note: code of a script]
How far installed packages' code looks is known: a short sequence and a small vocabulary show whatever packing could do
to it. A script's own code may do something else in rows of a hundred tokens or look a thousand tokens back, or count a
separator that is the last of a large vocabulary. So where a model has such code [Note: whose code] one sequence is as
long as those of the job and one row as long as all of a step in one, as far as that can be computed in seconds, and
every token of the vocabulary is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ds_hydra.pipe.models.whose_code import own_code
from ds_hydra.self_check.compare import compare
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.runs import Data

# Tokens of the longest sequence, without and with attention that holds its whole matrix of probabilities; parameters
# times tokens, and tokens of the sequence times those of the vocabulary.
LONGEST, _LONGEST_EAGER = 2048, 512
_PRODUCTS, _LOGITS = 10**10, 2**23
_BESIDE = (4, 7)  # short sequences before and after it in its pack


class Extent(NamedTuple):
    """Tokens of the longest sequence and of the longest row that a model should be tried with; 0: it has no code of a
    script."""

    sequence: int = 0
    row: int = 0

    def affordable(self, parameters: int, vocabulary: int) -> Extent:
        """How much of that can be computed in seconds."""
        most = min(LONGEST, _PRODUCTS // max(1, parameters), _LOGITS // vocabulary)
        return Extent(*(min(tokens, most) for tokens in self))


def extent_of(model: Any, context_length: int | None, tokens_per_step: int | None) -> Extent:
    """How far a model should be tried out."""
    if hasattr(model, "_layer_specs"):
        return Extent(context_length, tokens_per_step or 0) if context_length else Extent()
    if not own_code(model):
        return Extent()
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    known = known if isinstance(known, int) and known > 0 else LONGEST
    return Extent(min(context_length or known, known), tokens_per_step or 0)


def affordable_alone(longest: int, plain: Plain, data: Data) -> int:
    """How much of that the plain model can compute, which from now on uses fused attention if that is the same."""
    if longest <= _LONGEST_EAGER:
        return longest
    configs = {id(module.config): module.config for module in plain.model.modules() if hasattr(module, "config")}
    eager, fused = plain.outcome(data), None
    try:
        _use(configs.values(), "sdpa")
        fused = plain.outcome(data)
    except Exception:  # of a model that has none
        pass
    if fused is not None and compare(eager, fused).what is None:
        return longest
    _use(configs.values(), "eager")
    return _LONGEST_EAGER


def _use(configs: Any, name: str) -> None:
    for config in configs:
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


def lengthened(
    lengths: Sequence[Sequence[int]],
    extent: Extent,
    data_of: Callable[[Sequence[Sequence[int]]], Data],
    runs: Callable[[Data], object],
) -> Data:
    """Packs of these lengths and a row with a sequence of the longest's tokens, or of as many as the model `runs` with,
    filled with others as long as the longest row is."""
    most, longest = max(max(pack) for pack in lengths), extent.sequence
    while longest > most:
        data = data_of((*lengths, _filled((_BESIDE[0], longest, _BESIDE[1]), longest, extent.row)))
        try:
            runs(data)
        except Exception:  # of a model with a table of so many positions: the job's sequences are not so long either
            longest //= 2
            continue
        return data
    row = _filled((), most, extent.row)
    return data_of((*lengths, row) if sum(row) > max(map(sum, lengths)) else lengths)


def _filled(row: tuple[int, ...], length: int, tokens: int) -> tuple[int, ...]:
    """A row that has so many tokens at least, by more sequences of a length."""
    return (*row, *[length] * -(-(tokens - sum(row)) // length))
