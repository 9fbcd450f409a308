"""Tries schemes on a small model and its data: a verdict for each, beside one process that runs the plain model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.experts import spreading_experts
from ds_hydra.pipe.models.positions import special_tokens
from ds_hydra.pipe.models.refusals import known_tokens, module_of
from ds_hydra.pipe.models.state import refuse_counting
from ds_hydra.pipe.models.whose_code import own_code
from ds_hydra.pipe.placement import Pipeline, Strategy
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.pipe.stage import ModelSource, StagePlace
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.runs import (
    Data,
    Difference,
    Outcome,
    RankOfPipeline,
    compare,
    doubled,
    finite,
    on_all_ranks,
    run_pipeline,
)
from ds_hydra.self_check.schemes import BASE, parts, uneven_pipeline
from ds_hydra.self_check.shrink import POSITIONS
from ds_hydra.self_check.small_copy import short_layer_list, small_copy
from ds_hydra.self_check.verdicts import Verdict
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

_REMEDIES = {"tp": "use strategies with tp1 for this model", "pp": "use strategies with pp1 for this model",
             "sp": "use strategies with sp1 for this model",
             "schedule": "use strategies with the schedule 1f1b for this model"}  # fmt: skip
_NO_REMEDY = "no strategy trains this model as one process does"


class UntryableError(Exception):
    """Nothing can be said of a model's schemes; the text says why."""


class Trial:
    """Runs schemes on one small model; `subject` makes it."""

    def __init__(self, subject: Callable[[], Subject], *, loss_given: bool = False):
        """Computes with the small model in one process, twice. Raises UntryableError."""
        self._known: dict[PipelineShape, Verdict] = {}
        self._refusal: str | None = None
        self._loss_given = loss_given
        try:
            self._subject = subject()
            plain = self._subject.plain
            with nullcontext() if plain is None else refuse_counting(plain.model, "a step"):
                self._right, again = self._subject.alone(0), self._subject.alone(1)
            self._refusal = self._objection(again)
        except (RefusedError, ConfigError) as error:
            self._refusal = told(error)
            return
        except Exception as error:
            raise UntryableError(f"there is no small copy of the model to check: {told(error)}") from error
        if not finite(self._right):
            raise UntryableError("the loss or a gradient of its small copy is not finite")

    def _objection(self, again: Outcome) -> str | None:
        """Why no strategy can train the model, as far as runs in one process tell."""
        itself = compare(self._right, again).what
        if itself is not None:
            return (
                f"the plain model differs from itself when it runs twice ({itself}): it draws random numbers or keeps "
                "a state between sequences; switch that off in its config"
            )
        plain = self._subject.plain
        differs = "" if plain is None or self._loss_given else plain.own_loss(self._subject.data)
        if differs and plain is not None and plain.balances:
            return (
                f"the model's forward makes a loss of its own ({differs}), which is not theirs and the load balancing "
                "loss of its routers: set output_router_logits to false in its config to train without that"
            )
        if differs:
            return (
                f"the model's forward makes a loss of its own ({differs}), and stages would train on the cross entropy "
                "of its logits: pass loss_fn(logits, labels), the loss of each token, to ds_hydra.initialize()"
            )
        before, after = self._subject.before, {} if plain is None else plain.model.state_dict()
        changed = next((name for name, value in before.items() if not torch.equal(value, after[name])), None)
        if changed is not None:
            return (
                f"the model's forward changes {changed}, which each stage would change for itself on the tokens that "
                "it sees: keep such a state out of the model"
            )
        return None

    def verdict(self, scheme: PipelineShape) -> Verdict:
        """Run a scheme and compare; a refusal names what differs first, and the remedy."""
        if scheme not in self._known:
            began = time.process_time()
            verdict = self._judge(scheme)
            self._known[scheme] = replace(verdict, seconds=time.process_time() - began)
        return self._known[scheme]

    def _judge(self, scheme: PipelineShape) -> Verdict:
        if self._refusal is not None:
            return Verdict("refused", self._refusal, float("inf"))
        subject = self._subject
        pipeline = uneven_pipeline(scheme, subject.num_layers)
        try:
            subject.source.plan.check(Strategy((pipeline,)))
            outcome = run_pipeline(subject.source, pipeline, subject.data)
        except Exception as error:
            why = told(error)
            remedy = "" if "use strategies with" in why else f"; {self._remedy(scheme)}"
            return Verdict("refused", why + remedy, float("inf"))
        difference = compare(self._right, outcome)
        if difference.what is None:
            no_slices = _no_slices(subject, self._right) if scheme == BASE else ""
            boxed = told_boxes(subject.source) if scheme == BASE else ""
            return Verdict("equal", "", difference.worst, no_slices, boxed=boxed)
        return Verdict(
            "refused", f"{difference.what}{self._place(difference, pipeline)}; {self._remedy(scheme)}", difference.worst
        )

    def _place(self, difference: Difference, pipeline: Pipeline) -> str:
        """The module at which a forward goes another way, as the rest of a sentence; empty if it cannot be told."""
        subject = self._subject
        if difference.forward is None or subject.plain is None:
            return ""
        training = difference.forward == "training"
        found = first_to_differ(
            subject.plain, subject.source, pipeline, subject.data, training=training, tolerance=difference.tolerance
        )
        return "" if found is None else f", and {found} is the first module that computes something else"

    def _remedy(self, scheme: PipelineShape) -> str:
        """Which degrees to do without: those that fail alone, or else all of the scheme together."""
        if scheme == BASE or self.verdict(BASE).state != "equal":
            return _NO_REMEDY
        alone = parts(scheme)
        failing = [name for name, part in alone.items() if part == scheme or self.verdict(part).state != "equal"]
        if not failing:
            return f"its degrees can each be used alone, but not together as in {scheme}"
        source, others = self._subject.source, {}
        if source.plan.token_sharding:
            others["tp"] = ', or leave "token_sharding" out of hydra.fast_paths'
        if source.overlap.groups > 1:
            others["sp"] = ', or leave "sp_overlap" out of hydra.fast_paths'
        if source.plan.experts:
            others |= {name: others.get(name, "") + ", or take ep out of hydra.strategies" for name in ("tp", "sp")}
        return "; ".join(f"{name}: {_REMEDIES[name]}{others.get(name, '')}" for name in failing)


def told_boxes(source: object) -> str:
    """What of a model runs once for each sequence of a pack, by its paths in layers; empty if nothing."""
    boxes = source.boxes.of if isinstance(source, CausalLM) else ()
    return ", ".join(sorted({box.path or "the layer" for of in boxes for box in of}))


def _no_slices(subject: Subject, right: Outcome) -> str:
    """Why no sequence of the model may be cut into slices; empty if one that is cut trains as a whole one does."""
    if subject.source.plan.no_slices:
        return subject.source.plan.no_slices
    pipeline = uneven_pipeline(BASE, subject.num_layers)
    try:
        outcome = run_pipeline(subject.source, pipeline, subject.data.in_slices())
    except Exception as error:
        return told(error)
    what = compare(right, outcome).what
    return "" if what is None else f"with a sequence in slices, and layers computed again, {what}"


# ---- The small model, its data, and the result of one process as the reference. ----

# Three sequences in one pack, of which one reaches beyond the positions at which rotary tables change and beyond the
# windows of the small copy, and a pack of one; every sequence parallel rank holds parts of some. 41 and 13 are prime:
# where tensor parallel ranks share tokens, rows get padding, which must train nothing. Of a pack and its sequences some
# are even and some odd.
_LONGEST = 33
# Recurrences compute in chunks of 64 tokens, whatever the config says, and states pass from one to the next.
_BEYOND_A_CHUNK = 65
# Code of a script may look far back. Under one rank it is tried on the job's own sequences [Note: real sequences].
_LONG = 193
_ENDS = 4  # ids at each end of the vocabulary that are tried
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
    before: Mapping[str, Tensor] = field(default_factory=dict)  # parameters and buffers before anything was run


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
        return _of_layer_list(short_layer_list(model, schemes, memory_bytes, options))
    own = bool(own_code(model))
    small = small_copy(model, schemes, memory_bytes, positions=_LONG if own else POSITIONS)
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
    longest = _long(model) - source.first_position if own else _BEYOND_A_CHUNK if carries else _LONGEST
    data = data_of(_lengths(longest))
    # Boxes take their sequences' part of what layers are handed, and routers choose among experts, which are stacks of
    # matrices, also where they run again.
    if source.boxes or any(len(spec.shape) > 2 for spec in source.specs.values()):
        data = replace(data, microbatches=tuple(replace(batch, recompute=0.5) for batch in data.microbatches))
    plain = Plain(small.model, source.flow.draws, source.layers_path, source.balancing, source.token_loss)
    before = {name: value.clone() for name, value in small.model.state_dict().items()}

    def alone(run: int) -> Outcome:
        return plain.outcome(data, range(len(data.sequences))[:: 1 - 2 * run], coin=_COINS[run])

    return Subject(data, small.num_layers, source, alone, plain, before)


def _lengths(longest: int) -> tuple[tuple[int, ...], ...]:
    return (6, longest, 2), (13,)


def _long(model: Any) -> int:
    """Tokens of the longest sequence for a model that has code of a script: no more than it has positions."""
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(_LONG, known) if isinstance(known, int) and known > 0 else _LONG


def _of_layer_list(source: ModelSource) -> Subject:
    """A layer list has no forward but its layers': they run on one rank, one sequence at a time."""
    layers = source.plan.num_layers
    data = tried_data(_LEAST_VOCABULARY, _lengths(_LONGEST))

    def alone(run: int) -> Outcome:
        order = range(len(data.sequences))[:: 1 - 2 * run]
        return run_pipeline(source, uneven_pipeline(BASE, layers), data.packed([(sequence,) for sequence in order]))

    return Subject(data, layers, source, alone)


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


# ---- The first module that computes something else in a pipeline than in the plain model. ----

Outputs = dict[str, list[Tensor]]  # by module, in the order in which they end: what each call computed, tokens first


def first_to_differ(
    plain: Plain, source: ModelSource, pipeline: Pipeline, data: Data, *, training: bool, tolerance: float
) -> str | None:
    """Path of the first module of a layer whose output is not the plain model's; None if none can be told.

    Modules whose output is cut over tensor parallel ranks are passed over, and so are those that run several times.
    """
    inside = f"{plain.layers_path}."
    plain.model.train(training)
    with torch.no_grad(), doubled():
        (alone,) = _recorded([plain.model], inside, [(n,) for n in data.lengths], lambda: _run_alone(plain, data))
    with torch.no_grad():
        staged = _of_pipeline(source, pipeline, data, inside, training=training)
    for path, calls in alone.items():
        if path not in staged or len(calls) != len(data.sequences):
            continue
        right, other = torch.cat(calls), staged[path]
        if right.shape == other.shape and not bool((right - other).abs().max() <= tolerance * right.abs().max()):
            return path
    return None


def _run_alone(plain: Plain, data: Data) -> None:
    for sequence in range(len(data.sequences)):
        plain.run(data, sequence)


def _recorded(
    models: Sequence[nn.Module], inside: str, counts: Sequence[Sequence[int]], run: Callable[[], Any]
) -> list[Outputs]:
    """Of each model the outputs of the modules whose path begins with `inside`; the k-th run of one has one of
    `counts[k]` tokens."""
    found: list[Outputs] = [{} for _ in models]

    def keep(outputs: Outputs, path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            calls = outputs.setdefault(path, [])
            known = counts[len(calls)] if len(calls) < len(counts) else ()
            calls += [rows for tokens in known if (rows := _rows(out, tokens)) is not None][:1]

        return hook

    handles = [
        module.register_forward_hook(keep(outputs, path))
        for model, outputs in zip(models, found, strict=True)
        for path, module in model.named_modules()
        if path.startswith(inside)
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _rows(out: Any, tokens: int) -> Tensor | None:
    """The first tensor of an output as (tokens, features)."""
    first = out[0] if isinstance(out, tuple | list) and out else out
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return None
    for dim in (1, 0, 2):
        if first.dim() > dim and first.shape[dim] == tokens:
            return first.detach().movedim(dim, 0).reshape(tokens, -1).clone()
    return None


def _of_pipeline(
    source: ModelSource, pipeline: Pipeline, data: Data, inside: str, *, training: bool
) -> dict[str, Tensor]:
    """What the stages' modules computed for all tokens of all packs: as tensor parallel rank 0 holds it, or as all of
    them do that share the tokens."""

    def program(worker: RankOfPipeline) -> list[tuple[StagePlace, Outputs]]:
        models, shards = [part.module for part in worker.parts], worker.place.shards
        counts = [tuple({tokens: None, tokens // shards: None}) for tokens in worker.tokens(data)]
        found = _recorded(models, inside, counts, lambda: worker.forward(data, training=training))
        return [(part.place, outputs) for part, outputs in zip(worker.parts, found, strict=True)]

    joined: dict[str, Tensor] = {}
    results, _ = on_all_ranks(source, pipeline, program)
    done = [each for of_rank in results for each in of_rank]
    tokens = [sum(span.stop - span.start for span in batch.spans) for batch in data.microbatches]
    for stage in dict.fromkeys(place.stage for place, _ in done):
        sharing = [(place.tp_rank, outputs) for place, outputs in done if place.stage == stage]
        for path in _in_layers(sharing[0][1], inside, range(stage.first_layer, stage.last_layer)):
            calls = [(tp_rank, outputs.get(path, [])) for tp_rank, outputs in sharing]
            if all(len(each) == len(tokens) for _, each in calls):
                packs = [
                    _rows_of_pack([(rank, each[i]) for rank, each in calls], tokens[i]) for i in range(len(tokens))
                ]
                joined[path] = torch.cat(packs)
    return joined


def _rows_of_pack(held: Sequence[tuple[int, Tensor]], tokens: int) -> Tensor:
    """A pack's rows without its padding, of what ranks hold, each given with its tensor parallel rank."""
    of_first = [rows for tp_rank, rows in held if tp_rank == 0]
    enough = sum(map(len, of_first)) >= tokens
    return torch.cat(of_first if enough else [rows for _, rows in held])[:tokens]


def _in_layers(outputs: Outputs, inside: str, layers: range) -> Iterator[str]:
    """Paths in the stage's own layers: modules of others stand in for them."""
    return (path for path in outputs if int(path.removeprefix(inside).partition(".")[0]) in layers)
