"""What is tried before step 0: a small model, data for it, and what one process computes with both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.self_check.layer_lists import short_layer_list
from ds_hydra.self_check.runs import Data, Outcome, evaluate_plain, run_pipeline, train_plain, uneven_data
from ds_hydra.self_check.schemes import BASE, uneven_pipeline
from ds_hydra.self_check.small_copy import small_copy, without_dropout

# Three sequences in one pack, of which one reaches beyond the positions at which rotary tables change and beyond the
# windows of the small copy, and a pack of one; every sequence parallel rank holds parts of some.
_LENGTHS = ((5, 33, 2), (12,))
_LEAST_VOCABULARY = 16  # of a layer list, which does not say how many tokens it knows

Sources = tuple[ModelSource, ModelSource]  # of the stages that train, and of those that evaluate


@dataclass(frozen=True)
class Subject:
    """A small model; `sources` may refuse it with an error."""

    data: Data
    num_layers: int
    alone: Callable[[Sequence[int]], Outcome]  # one process, one sequence at a time, in the order given
    sources: Callable[[], Sources]
    models: tuple[Any, Any] | None = None  # the plain model that trains, and that evaluates; None: there is none


def make_subject(
    model: Any, schemes: Sequence[PipelineShape], *, activation_checkpointing: bool, memory_bytes: float
) -> Subject:
    """A subject on which all `schemes` can be tried. Raises an error that says why there is none."""
    if hasattr(model, "_layer_specs"):
        return _of_layer_list(short_layer_list(model, memory_bytes))
    small = small_copy(model, schemes, memory_bytes)
    calm = without_dropout(small.model)
    data = uneven_data(small.model.get_input_embeddings().weight.shape[0], _LENGTHS)

    def alone(order: Sequence[int]) -> Outcome:
        loss, gradients = train_plain(calm, data, order)
        return Outcome(loss, evaluate_plain(small.model, data), gradients)

    def sources() -> Sources:
        training = CausalLM(calm, activation_checkpointing=activation_checkpointing)
        if calm is small.model:
            return training, training
        return training, CausalLM(small.model, activation_checkpointing=activation_checkpointing)

    return Subject(data, small.num_layers, alone, sources, (calm, small.model))


def _of_layer_list(source: ModelSource) -> Subject:
    """A layer list has no forward but its layers': they run on one rank, one sequence at a time."""
    data, layers = uneven_data(_LEAST_VOCABULARY, _LENGTHS), source.plan.num_layers

    def alone(order: Sequence[int]) -> Outcome:
        apart = replace(data, packs=tuple((sequence,) for sequence in order))
        return run_pipeline(source, uneven_pipeline(BASE, layers), apart, eval_source=source)

    return Subject(data, layers, alone, lambda: (source, source))
