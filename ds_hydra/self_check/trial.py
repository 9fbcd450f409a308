"""A small copy of a model, what one process computes with it, and verdicts on schemes that are tried on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.self_check.compare import compare, finite
from ds_hydra.self_check.runs import Outcome, evaluate_plain, run_pipeline, train_plain, uneven_data
from ds_hydra.self_check.schemes import BASE, parts, uneven_pipeline
from ds_hydra.self_check.shrink import VOCABULARY
from ds_hydra.self_check.small_copy import NoCopyError, small_copy, without_dropout
from ds_hydra.self_check.verdicts import Verdict

MakeSource = Callable[[Any], ModelSource]

# Three sequences in one pack, of which one reaches beyond the positions at which rotary tables change and beyond the
# windows of the small copy, and a pack of one; every sequence parallel rank holds parts of some.
_LENGTHS = ((5, 33, 2), (12,))
_REMEDIES = {"tp": "use strategies with tp1 for this model", "pp": "use strategies with pp1 for this model",
             "sp": "use strategies with sp1 for this model"}  # fmt: skip
_NO_REMEDY = "no strategy trains this model as one process does"


class UntryableError(Exception):
    """Nothing can be said of a model's schemes; the text says why."""


class Trial:
    """Runs schemes on one small copy of a model. Random numbers are drawn from generators of its own."""

    def __init__(self, model: Any, schemes: Sequence[ParallelScheme], make_source: MakeSource, *, memory_bytes: float):
        """Makes the copy and computes with it in one process, twice. Raises UntryableError."""
        self._known: dict[ParallelScheme, Verdict] = {}
        try:
            small = small_copy(model, schemes, memory_bytes)
        except NoCopyError as error:
            raise UntryableError(f"there is no small copy of it: {error}") from error
        self._num_layers = small.num_layers
        self._data = uneven_data(VOCABULARY, _LENGTHS)
        calm = without_dropout(small.model)
        loss, gradients = train_plain(calm, self._data)
        self._right = Outcome(loss, evaluate_plain(small.model, self._data), gradients)
        if not finite(self._right):
            raise UntryableError("the loss or a gradient of its small copy is not finite")
        backwards = range(len(self._data.sequences))[::-1]
        loss, gradients = train_plain(calm, self._data, backwards)
        again = Outcome(loss, evaluate_plain(small.model, self._data), gradients)
        self.differs_from_itself = compare(self._right, again).what
        self._refusal: str | None = None
        try:
            self._source = make_source(calm)
            self._eval_source = self._source if calm is small.model else make_source(small.model)
        except Exception as error:
            self._refusal = _told(error)

    def verdict(self, scheme: ParallelScheme) -> Verdict:
        """Run a scheme and compare; a refusal names what differs first, and the remedy."""
        if scheme not in self._known:
            began = time.perf_counter()
            verdict = self._judge(scheme)
            self._known[scheme] = Verdict(
                verdict.state, verdict.reason, verdict.difference, time.perf_counter() - began
            )
        return self._known[scheme]

    def _judge(self, scheme: ParallelScheme) -> Verdict:
        if self.differs_from_itself is not None:
            return Verdict(
                "refused",
                f"the plain model differs from itself when it runs twice ({self.differs_from_itself}): it draws random "
                "numbers or keeps a state between sequences; switch that off in its config",
                float("inf"),
            )
        if self._refusal is not None:
            return Verdict("refused", self._refusal, float("inf"))
        try:
            pipeline = uneven_pipeline(scheme, self._num_layers)
            outcome = run_pipeline(self._source, pipeline, self._data, eval_source=self._eval_source)
        except Exception as error:
            return Verdict("refused", f"{_told(error)}; {self._remedy(scheme)}", float("inf"))
        difference = compare(self._right, outcome)
        if difference.what is None:
            return Verdict("equal", difference=difference.worst)
        return Verdict("refused", f"{difference.what}; {self._remedy(scheme)}", difference.worst)

    def _remedy(self, scheme: ParallelScheme) -> str:
        """Which degrees to do without: those that fail alone, or else all of the scheme together."""
        if scheme == BASE or self.verdict(BASE).state != "equal":
            return _NO_REMEDY
        failing = [part for part in parts(scheme) if part == scheme or self.verdict(part).state != "equal"]
        if not failing:
            return f"its degrees can each be used alone, but not together as in {scheme}"
        names = [next(name for name in _REMEDIES if getattr(part, name) > 1) for part in failing]
        return "; ".join(f"{name}: {_REMEDIES[name]}" for name in names)


def _told(error: Exception) -> str:
    """An error of a run as a clause: refusals of our own as they are, others with their kind."""
    text = str(error).strip().rstrip(".").partition("\n")[0]
    ours = type(error).__module__.startswith("ds_hydra.")
    return text if ours else f"its run ends with {type(error).__name__}: {text}"


def quiet_generators() -> AbstractContextManager[None]:
    """A context in which drawing leaves torch's own random numbers as they were."""
    return torch.random.fork_rng(devices=[])
