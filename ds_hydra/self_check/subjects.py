"""The self-check's small model, its data, and the result of one process as the reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.experts import spreading_experts
from ds_hydra.pipe.models.positions import special_tokens
from ds_hydra.pipe.models.refusals import known_tokens, module_of
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.self_check.layer_lists import short_layer_list
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.precision import doubled
from ds_hydra.self_check.reach import LONGEST, Extent, affordable_alone, lengthened
from ds_hydra.self_check.runs import Data, Outcome, run_pipeline
from ds_hydra.self_check.schemes import BASE, uneven_pipeline
from ds_hydra.self_check.shrink import POSITIONS, VOCABULARY
from ds_hydra.self_check.small_copy import small_copy

# Three sequences in one pack, of which one reaches beyond the positions at which rotary tables change and beyond the
# windows of the small copy, and a pack of one; every sequence parallel rank holds parts of some. 41 and 13 are prime:
# where tensor parallel ranks share tokens, rows get padding, which must train nothing. Of a pack and its sequences some
# are even and some odd.
_LENGTHS = ((6, 33, 2), (13,))
# Recurrences compute in chunks of 64 tokens, whatever the config says, and states pass from one to the next.
_BEYOND_A_CHUNK = ((6, 65, 2), (13,))
_ENDS = 4  # ids at each end of the vocabulary that are tried
_LEAST_VOCABULARY = 16  # of a layer list, which does not say how many tokens it knows
_COINS = (1e-6, 1 - 1e-6)  # what single random numbers give in one run and in the other
_WHOLE_VOCABULARY = 4096  # that is tried together with long sequences


class RefusedError(Exception):
    """No strategy can train a model; the text says why."""


@dataclass(frozen=True)
class Subject:
    """A small model, copied for its stages, and what it computes in one process."""

    data: Data
    num_layers: int
    source: ModelSource
    alone: Callable[[int], Outcome]  # one process, one sequence at a time; the second run in reverse order
    known_tokens: int
    plain: Plain | None = None  # None: nothing but its stages computes it
    before: Mapping[str, Tensor] = field(default_factory=dict)  # parameters and buffers before anything was run
    # Another one, with short sequences of all tokens that the model knows; None: this one has them.
    of_all_tokens: Callable[[], Subject] | None = None
    wanted: int = 0  # tokens of the sequence that is there for code of a script, if it could be as long as the job's


def make_subject(
    model: Any,
    schemes: Sequence[PipelineShape],
    *,
    options: StageOptions,
    memory_bytes: float,
    extent: Extent,
) -> Subject:
    """A subject on which all `schemes` can be tried, with what `options` ask for where it is found to allow that.

    `extent` is what `extent_of` says. Raises RefusedError where no stages can be made of the small model, and
    other errors where there is none.
    """
    if hasattr(model, "_layer_specs"):
        return _of_layer_list(short_layer_list(model, schemes, memory_bytes, options), extent)
    if not extent.sequence:
        return _of_model(model, schemes, options, memory_bytes, extent, VOCABULARY)
    known = known_tokens(model)
    vocabulary = known if known <= _WHOLE_VOCABULARY else VOCABULARY
    subject = _of_model(model, schemes, options, memory_bytes, extent, vocabulary)
    if subject.known_tokens >= known:
        return subject
    return replace(subject, of_all_tokens=partial(_of_model, model, schemes, options, memory_bytes, Extent(), known))


def _of_model(
    model: Any, schemes: Sequence[PipelineShape], options: StageOptions, memory_bytes: float, extent: Extent,
    vocabulary: int,
) -> Subject:  # fmt: skip
    small = small_copy(
        model, schemes, memory_bytes, positions=POSITIONS + min(extent.sequence, LONGEST), vocabulary=vocabulary
    )
    try:
        with doubled():
            source = CausalLM(small.model, options)
            if any(stage.ep > 1 for shape in schemes for stage in shape.stages):
                source = spreading_experts(source)
    except Exception as error:
        raise RefusedError(told(error)) from error
    known = known_tokens(small.model)
    data_of = partial(tried_data, known, special=special_tokens(small.model), left_out=source.uncounted)
    carries = any(box.state is not None for of in source.boxes.of for box in of)
    lengths = _BEYOND_A_CHUNK if carries else _LENGTHS
    data = data_of(lengths)
    # Boxes take their sequences' part of what layers are handed, and routers choose among experts, which are stacks of
    # matrices, also where they run again.
    if source.boxes or any(len(spec.shape) > 2 for spec in source.specs.values()):
        data = replace(data, microbatches=tuple(replace(batch, recompute=0.5) for batch in data.microbatches))
    plain = Plain(small.model, source.flow.draws, source.layers_path, source.balancing, source.token_loss)
    before = {name: value.clone() for name, value in small.model.state_dict().items()}
    if extent.sequence:
        parameters = sum(parameter.numel() for parameter in small.model.parameters())
        tried = extent.affordable(parameters, known)
        alone_most = affordable_alone(tried.sequence, plain, data) - source.first_position
        data = lengthened(lengths, tried._replace(sequence=alone_most), data_of, plain.evaluate)

    def alone(run: int) -> Outcome:
        return plain.outcome(data, range(len(data.sequences))[:: 1 - 2 * run], coin=_COINS[run])

    return Subject(data, small.num_layers, source, alone, known, plain, before, wanted=extent.sequence)


def _of_layer_list(source: ModelSource, extent: Extent) -> Subject:
    """A layer list has no forward but its layers': they run on one rank, one sequence at a time."""
    layers = source.plan.num_layers

    def apart(data: Data, order: Iterable[int]) -> Outcome:
        return run_pipeline(source, uneven_pipeline(BASE, layers), data.packed([(sequence,) for sequence in order]))

    parameters = sum(param.numel for bucket in source.plan.buckets for param in bucket.params)
    data = lengthened(
        _LENGTHS,
        extent.affordable(parameters, _LEAST_VOCABULARY),
        partial(tried_data, _LEAST_VOCABULARY),
        lambda data: apart(data, range(len(data.sequences))),
    )

    def alone(run: int) -> Outcome:
        return apart(data, range(len(data.sequences))[:: 1 - 2 * run])

    return Subject(data, layers, source, alone, _LEAST_VOCABULARY, wanted=extent.sequence)


def told(error: Exception) -> str:
    """An error of a run as a clause: refusals of our own as they are, others with their kind."""
    text = str(error).strip().rstrip(".").partition("\n")[0]
    if type(error).__module__.startswith("ds_hydra."):
        return text
    path = module_of(error)
    return f"its run ends with {type(error).__name__}: {text}{f' (in {path})' if path else ''}"


def tried_data(
    vocabulary: int, lengths: Sequence[Sequence[int]], *, special: Sequence[int] = (), left_out: Collection[int] = ()
) -> Data:
    """Sequences in packs of these lengths, of all tokens but those `left_out`; `special` count as such.

    Models count separators, restart positions at them, or look at what a sequence begins with. So among the tokens are
    the special ones of the config and both ends of the vocabulary, before others of their sequence and of their pack,
    and tokens that come again, within a sequence and in the next one. The last sequence of a pack has no special ones:
    what a pack has and a sequence of it has not is told apart so.
    """
    draw = np.random.default_rng(0)
    ends = [*range(_ENDS), *range(vocabulary - _ENDS, vocabulary)]
    telling = [t for t in dict.fromkeys((*special, *ends)) if 0 <= t < vocabulary and t not in left_out]
    plain = [t for t in range(vocabulary) if t not in telling and t not in left_out] or telling
    sequences = [draw.choice(plain, length) for pack in lengths for length in pack]
    starts = np.cumsum([0, *map(len, lengths)])
    longest = max(sequences, key=len)
    for first, last in pairwise(starts):
        for tokens in sequences[first : last - 1]:
            places = 1 + draw.permutation(3 * len(tokens) // 4 - 1)[: len(telling)]  # others come after them
            tokens[places] = telling[: len(places)]
            tokens[0] = telling[0]
            if tokens is not longest:
                tokens[-1] = telling[min(1, len(telling) - 1)]
    again = len(longest) // 8
    longest[len(longest) - again :] = longest[:again]
    longest[-again - 1] = longest[-again - 2]
    for tokens in sequences:
        if tokens is not longest:
            tokens[len(tokens) // 2] = longest[-again - 1]
    return Data(tuple(sequences), ()).packed([range(a, b) for a, b in pairwise(starts)])
