"""The memory model and a stage's simulated actions in, bytes over time out. Pure: no torch.

A sequence in slices has keys and values of all its tokens from the first slice's forward to that slice's backward, and
the sums of their gradients from the last slice's backward on [Note: contexts]. Example of four slices of one token,
each with keys and values of one byte within what it keeps and sums of two: after the first forward there is room for
three tokens more, 3 bytes, after the last one 0. The last slice's backward, which is the first, makes sums of 8 bytes
and leaves its keys and values behind, 9 bytes beside what the other three keep; the first slice's gives all back.
States that layers carry on [Note: carried states] are made by the forward of a slice that others follow, their
gradients by the backward of the next one, and both are given back by the slice's own backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ds_hydra.costs.memory import JobMemory, Needs
from ds_hydra.pipe.placement import whole_layers
from ds_hydra.plan.step_plan import PipelinePlan
from ds_hydra.simulate.pipeline import StageTimes


def memory_over_time(memory: JobMemory, plan: PipelinePlan, times: StageTimes) -> list[tuple[float, float]]:
    """(time in s, bytes held from then on) of the fullest rank of a stage: its states, and the micro-batches alive.

    While it computes a micro-batch it holds that one's transient too, and beside slices what their contexts take. Of
    layers that are computed again it holds a share, and where that is all of them, one as a whole in the backward.
    ConfigError as `JobMemory.needs`.
    """
    needs = memory.needs(plan.shape.cost_key, times.index)
    # The model counts the most micro-batches that the schedule ever keeps; here each counts while it is kept.
    layers = [last - first for first, last in times.stage.ranges]
    ends = (needs.per_token / needs.alive - sum(layers) * needs.layer) / len(layers)
    contexts = _Contexts(plan, needs, memory.param_bytes)
    head = _Head(contexts, needs, alone=not memory.plain_head)
    # Costs have one key for a V and for plain pipelines, whose last stage has the head, as a V's first one has.
    ends_model = times.stage.ranges[-1].last == memory.plan.num_layers
    sizes = [batch.num_tokens for batch in plan.microbatches]
    held = float(needs.states)
    curve = [(times.start, held)]
    for (kind, microbatch, part), start, stop in times.actions:
        size, kept = sizes[microbatch], layers[part] * needs.layer
        again = whole_layers(plan.microbatches[microbatch].recompute, layers[part]) / layers[part]
        alive = size * (ends + kept * (1.0 - again * (1.0 - needs.recomputed)))
        waiting = size * kept * (1.0 - again) * needs.until_weight
        freed = {"backward": alive, "input_gradient": alive - waiting, "weight_gradient": waiting}.get(kind, 0.0)
        made, given_back = (layers[part] * one for one in contexts.of(kind, microbatch))
        held += alive if kind == "forward" else 0.0
        # Where some layers are not computed again, what they kept is free by the time of those that are. The embeddings
        # come last, in the backward of the first part.
        back = kind in ("backward", "input_gradient")
        end = freed if back and part == 0 else math.inf
        own = head.of(kind, microbatch) if ends_model and part == len(layers) - 1 else _NONE
        on_top = needs.on_top(size, again=back and again == 1.0, given_back=end, head=own.made, logits=own.logits)
        # Contexts grow layer by layer, while a backward gives back what these kept.
        curve.append((start, held + on_top + max(0.0, made - freed)))
        held += made - freed - given_back + own.kept
        curve.append((stop, held))
    return curve


class _Contexts:
    """What the contexts of one layer take beside what slices keep."""

    def __init__(self, plan: PipelinePlan, needs: Needs, param_bytes: int):
        self._plan, self._totals = plan, dict[int, int]()
        for sequence, _, stop in (span for batch in plan.microbatches for span in batch.spans):
            self._totals[sequence] = max(self._totals.get(sequence, 0), stop)
        # Sums are of 4 bytes at least. Layers that are all computed again keep no keys and values of their own, and
        # their figure is of both; else it is of the sums.
        wide = max(4, param_bytes)
        self._cut = [tuple(self._slices(number)) for number in range(len(plan.microbatches))]
        self._kept = 0.0 if needs.until_weight == 0.0 else 1.0
        self._sums = needs.context * needs.layer * (1.0 if self._kept else wide / (wide + param_bytes))
        self._rows = self._sums * param_bytes / wide
        self._state = needs.state / 2

    def of(self, kind: str, microbatch: int) -> tuple[float, float]:
        """Bytes of one layer that an action makes, and that are free after it."""
        made = given_back = 0.0
        for start, stop, total in self._cut[microbatch]:
            own = self._kept * self._rows * (stop - start)
            if kind == "forward":
                made += self._rows * total * (start == 0)
                given_back += own  # it counts among what the slice keeps
                made += self._state * (stop < total)
            elif kind in ("backward", "input_gradient"):
                made += self._sums * total * (stop == total) + own
                given_back += (self._sums + self._rows) * total * (start == 0)
                made += self._state * (start > 0)
                given_back += 2 * self._state * (stop < total)
        return made, given_back

    def followed(self, microbatch: int) -> bool:
        """Whether a micro-batch holds a slice that others of its sequence follow."""
        return any(stop < total for _, stop, total in self._cut[microbatch])

    def _slices(self, microbatch: int) -> Iterator[tuple[int, int, int]]:
        """Where slices begin and end, and how long their sequences are; whole sequences are none."""
        for sequence, start, stop in self._plan.microbatches[microbatch].spans:
            if (start, stop) != (0, self._totals[sequence]):
                yield start, stop, self._totals[sequence]


class _OfHead(NamedTuple):
    """What an action does at the head."""

    made: bool  # a gradient of its weight, beside those that are kept
    logits: bool
    kept: int  # bytes of such gradients that are kept from then on, or given back


_NONE = _OfHead(False, False, 0)


class _Head:
    """Which micro-batch has made the gradient of the head's weight in its forward [Note: head and loss as one]."""

    def __init__(self, contexts: _Contexts, needs: Needs, *, alone: bool):
        """`alone`: head and loss are not one, so each backward makes its own."""
        self._contexts, self._bytes, self._alone = contexts, needs.head, alone
        self._holder: int | None = None

    def of(self, kind: str, microbatch: int) -> _OfHead:
        """What an action does at the head, in the order of the actions."""
        if kind == "weight_gradient":
            return _NONE
        if kind == "forward":
            if self._alone or self._holder is not None or self._contexts.followed(microbatch):
                return _OfHead(self._alone, True, 0)
            self._holder = microbatch
            return _OfHead(True, True, self._bytes)
        if self._holder == microbatch:
            self._holder = None
            return _OfHead(False, False, -self._bytes)
        return _OfHead(True, True, 0)
