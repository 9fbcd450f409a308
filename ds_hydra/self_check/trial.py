"""A small model in, verdicts on schemes that are tried on it out."""

from __future__ import annotations

import time
from collections.abc import Callable

from ds_hydra.pipe.models.refusals import find_layers
from ds_hydra.pipe.placement import Pipeline, Strategy
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.self_check.compare import Difference, compare, finite
from ds_hydra.self_check.runs import run_pipeline
from ds_hydra.self_check.schemes import BASE, parts, uneven_pipeline
from ds_hydra.self_check.subjects import Subject
from ds_hydra.self_check.verdicts import Verdict
from ds_hydra.self_check.where import first_to_differ

_REMEDIES = {"tp": "use strategies with tp1 for this model", "pp": "use strategies with pp1 for this model",
             "sp": "use strategies with sp1 for this model"}  # fmt: skip
_NO_REMEDY = "no strategy trains this model as one process does"


class UntryableError(Exception):
    """Nothing can be said of a model's schemes; the text says why."""


class Trial:
    """Runs schemes on one small model; `subject` makes it."""

    def __init__(self, subject: Callable[[], Subject]):
        """Computes with the small model in one process, twice. Raises UntryableError."""
        self._known: dict[PipelineShape, Verdict] = {}
        try:
            self._subject = subject()
            order = range(len(self._subject.data.sequences))
            self._right, again = self._subject.alone(order), self._subject.alone(order[::-1])
        except Exception as error:
            raise UntryableError(f"there is no small copy of the model to check: {_told(error)}") from error
        if not finite(self._right):
            raise UntryableError("the loss or a gradient of its small copy is not finite")
        self._refusal: str | None = None
        itself = compare(self._right, again).what
        if itself is not None:
            self._refusal = (
                f"the plain model differs from itself when it runs twice ({itself}): it draws random numbers or keeps "
                "a state between sequences; switch that off in its config"
            )
            return
        try:
            self._sources = self._subject.sources()
        except Exception as error:
            self._refusal = _told(error)

    def verdict(self, scheme: PipelineShape) -> Verdict:
        """Run a scheme and compare; a refusal names what differs first, and the remedy."""
        if scheme not in self._known:
            began = time.perf_counter()
            verdict = self._judge(scheme)
            self._known[scheme] = Verdict(
                verdict.state, verdict.reason, verdict.difference, time.perf_counter() - began
            )
        return self._known[scheme]

    def _judge(self, scheme: PipelineShape) -> Verdict:
        if self._refusal is not None:
            return Verdict("refused", self._refusal, float("inf"))
        training, evaluating = self._sources
        pipeline = uneven_pipeline(scheme, self._subject.num_layers)
        try:
            training.plan.check(Strategy((pipeline,)))
            outcome = run_pipeline(training, pipeline, self._subject.data, eval_source=evaluating)
        except Exception as error:
            told = _told(error)
            remedy = "" if "use strategies with" in told else f"; {self._remedy(scheme)}"
            return Verdict("refused", told + remedy, float("inf"))
        difference = compare(self._right, outcome)
        if difference.what is None:
            return Verdict("equal", difference=difference.worst)
        return Verdict(
            "refused", f"{difference.what}{self._place(difference, pipeline)}; {self._remedy(scheme)}", difference.worst
        )

    def _place(self, difference: Difference, pipeline: Pipeline) -> str:
        """The module at which a forward goes another way, as the rest of a sentence; empty if it cannot be told."""
        if difference.forward is None or self._subject.models is None:
            return ""
        training = difference.forward == "training"
        model, source = self._subject.models[not training], self._sources[not training]
        path = find_layers(model, self._subject.num_layers)
        found = first_to_differ(model, path, source, pipeline, self._subject.data, training=training)
        return "" if found is None else f", and {found} is the first module that computes something else"

    def _remedy(self, scheme: PipelineShape) -> str:
        """Which degrees to do without: those that fail alone, or else all of the scheme together."""
        if scheme == BASE or self.verdict(BASE).state != "equal":
            return _NO_REMEDY
        alone = parts(scheme)
        failing = [name for name, part in alone.items() if part == scheme or self.verdict(part).state != "equal"]
        if not failing:
            return f"its degrees can each be used alone, but not together as in {scheme}"
        return "; ".join(f"{name}: {_REMEDIES[name]}" for name in failing)


def _told(error: Exception) -> str:
    """An error of a run as a clause: refusals of our own as they are, others with their kind."""
    text = str(error).strip().rstrip(".").partition("\n")[0]
    ours = type(error).__module__.startswith("ds_hydra.")
    return text if ours else f"its run ends with {type(error).__name__}: {text}"
