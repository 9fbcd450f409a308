"""A model in, how far it has to be tried out: the length of the longest sequence.

[Note: code of a script]
How far installed packages' code looks is known: a short sequence and a small vocabulary show whatever packing could do
to it. A script's own code may do something else in rows of a hundred tokens or look a thousand tokens back, or count a
separator that is the last of a large vocabulary. So where a model has such code [Note: whose code] one sequence is as
long as those of the job, as far as that can be computed in seconds, and every token of the vocabulary is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ds_hydra.pipe.models.whose_code import own_code
from ds_hydra.self_check.compare import compare
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.runs import Data

# Tokens of the longest sequence, without and with attention that holds its whole matrix of probabilities; parameters
# times tokens, and tokens of the sequence times those of the vocabulary.
LONGEST, _LONGEST_EAGER = 2048, 512
_PRODUCTS, _LOGITS = 10**10, 2**23
_BESIDE = (4, 7)  # short sequences before and after it in its pack


def longest_sequence(model: Any, context_length: int | None) -> int:
    """Tokens of the longest sequence that a model should be tried with; 0 where it has no code of a script."""
    if hasattr(model, "_layer_specs"):
        return context_length or 0
    if not own_code(model):
        return 0
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    known = known if isinstance(known, int) and known > 0 else LONGEST
    return min(context_length or known, known)


def affordable(longest: int, parameters: int, vocabulary: int) -> int:
    """How much of that can be computed in seconds."""
    return min(longest, LONGEST, _PRODUCTS // max(1, parameters), _LOGITS // vocabulary)


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
    longest: int,
    data_of: Callable[[Sequence[Sequence[int]]], Data],
    runs: Callable[[Data], object],
) -> Data:
    """Packs of these lengths and one with a sequence of `longest` tokens, or of as many as the model `runs` with."""
    most = max(max(pack) for pack in lengths)
    while longest > most:
        data = data_of((*lengths, (_BESIDE[0], longest, _BESIDE[1])))
        try:
            runs(data)
        except Exception:  # of a model with a table of so many positions: the job's sequences are not so long either
            longest //= 2
            continue
        return data
    return data_of(lengths)
