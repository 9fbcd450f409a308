"""What is tried before step 0: a small model, data for it, and what one process computes with both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.options import StageOptions
from ds_hydra.pipe.models.positions import special_tokens
from ds_hydra.pipe.models.refusals import known_tokens
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.self_check.layer_lists import short_layer_list
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.runs import Data, Outcome, run_pipeline
from ds_hydra.self_check.schemes import BASE, uneven_pipeline
from ds_hydra.self_check.small_copy import small_copy
from ds_hydra.self_check.tried_tokens import tried_data

# Three sequences in one pack, of which one reaches beyond the positions at which rotary tables change and beyond the
# windows of the small copy, and a pack of one; every sequence parallel rank holds parts of some. 41 and 13 are prime:
# where tensor parallel ranks share tokens, rows get padding, which must train nothing. Of a pack and its sequences some
# are even and some odd.
_LENGTHS = ((6, 33, 2), (13,))
_LEAST_VOCABULARY = 16  # of a layer list, which does not say how many tokens it knows
_COINS = (1e-6, 1 - 1e-6)  # what single random numbers give in one run and in the other


class RefusedError(Exception):
    """No strategy can train a model; the text says why."""


@dataclass(frozen=True)
class Subject:
    """A small model, copied for its stages, and what it computes in one process."""

    data: Data
    num_layers: int
    source: ModelSource
    alone: Callable[[int], Outcome]  # one process, one sequence at a time; the second run in reverse order
    plain: Plain | None = None  # None: nothing but its stages computes it


def make_subject(
    model: Any,
    schemes: Sequence[PipelineShape],
    *,
    options: StageOptions,
    memory_bytes: float,
) -> Subject:
    """A subject on which all `schemes` can be tried, with what `options` ask for where it is found to allow that.

    Raises RefusedError where no stages can be made of the small model, and other errors where there is none.
    """
    if hasattr(model, "_layer_specs"):
        return _of_layer_list(short_layer_list(model, schemes, memory_bytes, sp_overlap=options.sp_overlap))
    small = small_copy(model, schemes, memory_bytes)
    try:
        source = CausalLM(small.model, **options._asdict())
    except Exception as error:
        raise RefusedError(told(error)) from error
    known, special = known_tokens(small.model), special_tokens(small.model)
    data = tried_data(known, _LENGTHS, special=special, left_out=source.uncounted)
    plain = Plain(small.model, source.flow.draws, source.layers_path, source.balancing)

    def alone(run: int) -> Outcome:
        return plain.outcome(data, range(len(data.sequences))[:: 1 - 2 * run], coin=_COINS[run])

    return Subject(data, small.num_layers, source, alone, plain)


def _of_layer_list(source: ModelSource) -> Subject:
    """A layer list has no forward but its layers': they run on one rank, one sequence at a time."""
    data, layers = tried_data(_LEAST_VOCABULARY, _LENGTHS), source.plan.num_layers

    def alone(run: int) -> Outcome:
        order = range(len(data.sequences))[:: 1 - 2 * run]
        apart = data.packed([(sequence,) for sequence in order])
        return run_pipeline(source, uneven_pipeline(BASE, layers), apart)

    return Subject(data, layers, source, alone)


def told(error: Exception) -> str:
    """An error of a run as a clause: refusals of our own as they are, others with their kind."""
    text = str(error).strip().rstrip(".").partition("\n")[0]
    ours = type(error).__module__.startswith("ds_hydra.")
    return text if ours else f"its run ends with {type(error).__name__}: {text}"
