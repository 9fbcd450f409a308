"""A small model in, verdicts on schemes that are tried on it out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch

from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.state import refuse_counting
from ds_hydra.pipe.placement import Pipeline, Strategy
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.self_check.compare import Difference, compare, finite
from ds_hydra.self_check.runs import Outcome, run_pipeline
from ds_hydra.self_check.schemes import BASE, parts, uneven_pipeline
from ds_hydra.self_check.small_copy import NoCopyError
from ds_hydra.self_check.subjects import RefusedError, Subject, told
from ds_hydra.self_check.verdicts import Verdict
from ds_hydra.self_check.where import first_to_differ
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
        self._told = ""  # beside a verdict that is equal
        self._whole: str | None = None  # why no sequence may be cut into slices, once that is known
        try:
            self._subject = subject()
            plain = self._subject.plain
            with nullcontext() if plain is None else refuse_counting(plain.model, "a step"):
                self._right, again = self._subject.alone(0), self._subject.alone(1)
            self._refusal = self._objection(again)
            self._told = self._note()
            self._refusal = self._refusal or self._of_all_tokens()
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

    def _of_all_tokens(self) -> str | None:
        """Why no strategy can train a model that has code of a script, as some token of its vocabulary shows."""
        if self._subject.of_all_tokens is None:
            return None
        try:
            subject = self._subject.of_all_tokens()
        except NoCopyError as error:
            logger.info("only the first tokens of the vocabulary are tried: %s", error)
            return None
        right, pipeline = subject.alone(0), uneven_pipeline(BASE, subject.num_layers)
        if (what := compare(right, run_pipeline(subject.source, pipeline, subject.data)).what) is not None:
            return f"with the last tokens of the vocabulary in a pack {what}; {_NO_REMEDY}"
        self._whole = _no_slices(subject, right) or None
        return None

    def _note(self) -> str:
        """What a user should know of a model that trains as one process does; empty if there is nothing."""
        tried, wanted = max(self._subject.data.lengths), self._subject.wanted
        if tried >= wanted:
            return ""
        return (
            f"code of the model that is no installed package's was tried on sequences of up to {tried} tokens; the "
            f"job's may have {wanted}"
        )

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
            no_slices = (self._whole or _no_slices(subject, self._right)) if scheme == BASE else ""
            boxed = told_boxes(subject.source) if scheme == BASE else ""
            return Verdict("equal", self._told, difference.worst, no_slices, boxed=boxed)
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
