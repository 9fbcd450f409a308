"""Runs one training step and one evaluation by all ranks of a pipeline in one process, in FP64, and compares two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.data.tokens import TokenSequence
from ds_hydra.pipe import recomputed
from ds_hydra.pipe.in_process import InProcessRanks
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.pipe.placement import Pipeline, Strategy
from ds_hydra.pipe.rows import MicroBatch
from ds_hydra.pipe.runtime import StageRuntime
from ds_hydra.pipe.schedules.actions import Slot
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import evaluation_slots, training_slots
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.pipe.stage import (
    ModelSource,
    StageModule,
    StagePlace,
    dtype_of,
    from_flat,
    install_bucket,
    to_flat,
    widths,
)
from ds_hydra.plan.simulate import batches_of
from ds_hydra.plan.step_plan import MicroBatchPlan, PipelinePlan, Span
from ds_hydra.self_check.schemes import BASE, uneven_pipeline
from ds_hydra.step.batching import RankBatches, build_batches
from ds_hydra.watchdog import Activity
from ds_hydra.zero_hetero.clock import Stopwatch
from ds_hydra.zero_hetero.layout import Piece

CPU = torch.device("cpu")
Shards = dict[tuple[str, tuple[Piece, ...]], Tensor]  # by bucket and what a rank holds of it
Result = TypeVar("Result")


@dataclass(frozen=True)
class Data:
    """Token sequences, and how they are packed: micro-batches of positions in `sequences`."""

    sequences: tuple[npt.NDArray[np.int64], ...]
    microbatches: tuple[MicroBatchPlan, ...]

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.sequences]

    def packed(self, packs: Iterable[Sequence[int]]) -> Data:
        """The same sequences, whole ones packed like this."""
        return replace(self, microbatches=tuple(MicroBatchPlan.of_whole(pack, self.lengths) for pack in packs))

    def in_slices(self) -> Data:
        """The same sequences, the longest in four slices, one of them of one token, and the next in two between them.

        As a planner makes rows: slices that are not their sequence's last, and last ones, each alone in a row and with
        other sequences after it. Of the layers of some slices all, or half of them, are computed again, since plans
        with slices may ask for that.
        """
        lengths = self.lengths
        longest, second, *rest = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        total, middle = lengths[longest], lengths[second] // 2
        ends = (0, 3 * total // 10, 3 * total // 10 + 1, 3 * total // 4, total)
        one, *others = (Span(longest, *ends) for ends in pairwise(ends))
        whole = [Span(position, 0, lengths[position]) for position in sorted(rest)]
        rows = (
            MicroBatchPlan((one, *whole[::2]), 1.0),
            MicroBatchPlan((Span(second, 0, middle),), 1.0),
            MicroBatchPlan((others[0],), 0.5),
            MicroBatchPlan((Span(second, middle, lengths[second]), *whole[1::2])),
            MicroBatchPlan((others[1],)),
            MicroBatchPlan((others[2],), 0.5),
        )
        return replace(self, microbatches=rows)

    def load(self, sequence: int) -> TokenSequence:
        """Tokens and the next tokens, IGNORED after the last."""
        tokens = self.sequences[sequence]
        return TokenSequence(tokens, np.append(tokens[1:], IGNORED))


@dataclass(frozen=True)
class Outcome:
    """Summed token losses of a training step and of an evaluation, and the step's gradients by parameter name."""

    loss: float
    eval_loss: float
    gradients: dict[str, Tensor]
    exact: bool = True  # computed in FP64 throughout; not where a function asked for less


def uneven_data(vocabulary: int, lengths: Sequence[Sequence[int]]) -> Data:
    """Random tokens in packs of these lengths; the lowest ids, which are often padding, are left out."""
    draw = np.random.default_rng(0)
    flat = [length for pack in lengths for length in pack]
    sequences = tuple(draw.integers(4, vocabulary, length) for length in flat)
    starts = np.cumsum([0, *(len(pack) for pack in lengths)])
    return Data(sequences, ()).packed([range(a, b) for a, b in pairwise(starts)])


def known_to_schedules(data: Data, parts: int) -> Batches:
    """What a schedule has to know of the packs: every token takes the same time, and there is room for all of them."""
    planned = PipelinePlan(BASE, data.microbatches, 0.0)
    cost = SchemeCost(ParallelScheme(), 0.0, 1.0, 0.0, 2 * sum(data.lengths))
    return batches_of(data.microbatches, planned.chain, cost, Shares.usual(), parts=parts)


_TILE_ROWS = 4  # so that the few tokens of a trial are several tiles


def run_pipeline(source: ModelSource, pipeline: Pipeline, data: Data) -> Outcome:
    """All ranks 0.. of a pipeline in this process, in FP64: its own stages, schedule, messages and layouts."""
    totals = {bucket.name: torch.zeros(bucket.numel, dtype=torch.float64) for bucket in source.plan.buckets}

    def program(worker: RankOfPipeline) -> tuple[float, float]:
        loss = worker.train(data)
        worker.contribute(totals)
        return loss, worker.evaluate(data)

    with recomputed.of_rows(_TILE_ROWS):
        losses, exact = on_all_ranks(source, pipeline, program)
    gradients = _gradients(source, totals)
    return Outcome(sum(loss for loss, _ in losses), sum(evaluated for _, evaluated in losses), gradients, exact)


def run_stage(
    source: ModelSource, data: Data, *, factor: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    """A training step of the whole model as one stage, in a dtype: each token's loss, (tokens of all sequences,) in the
    order in which they are packed, and the gradients of the sum of `factor` * loss, by name."""
    worker = RankOfPipeline(source, uneven_pipeline(BASE, source.plan.num_layers), 0, InProcessRanks(1), device, dtype)
    worker.install(_flat_values(source, dtype), {})
    losses = worker.train_keeping(data, factor)
    totals = {
        bucket.name: torch.zeros(bucket.numel, dtype=dtype_of(bucket, dtype), device=device)
        for bucket in source.plan.buckets
    }
    worker.contribute(totals)
    return losses, _gradients(source, totals)


def _gradients(source: ModelSource, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By name, of flat ones by bucket."""
    gradients: dict[str, Tensor] = {}
    for bucket in source.plan.buckets:
        start = 0
        for param in bucket.params:
            flat = totals[bucket.name][start : start + param.numel]
            if bucket.trainable:
                gradients[param.name] = from_flat(flat, param.shape, param.rule.dim, param.rule.parts)
            start += param.numel
    return gradients


def on_all_ranks(
    source: ModelSource, pipeline: Pipeline, program: Callable[[RankOfPipeline], Result]
) -> tuple[list[Result], bool]:
    """`program` on each rank of a pipeline, all in this process: results by rank, and whether FP64 was kept."""
    ranks, values = InProcessRanks(len(pipeline.ranks)), _flat_values(source)
    shards: Shards = {}
    with doubled() as mode:

        def body(rank: int) -> Result:
            with mode:
                worker = RankOfPipeline(source, pipeline, rank, ranks)
                worker.install(values, shards)
                return program(worker)

        return ranks.run(body), mode.exact


def _flat_values(source: ModelSource, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Each bucket's parameters in flat order."""
    return {
        bucket.name: torch.cat(
            [
                to_flat(source.values[p.name], p.rule.dim, p.rule.parts).to(dtype_of(bucket, dtype))
                for p in bucket.params
            ]
        )
        for bucket in source.plan.buckets
    }


class RankOfPipeline:
    """One rank: its stage, the parameters that it holds, and what it contributes to the gradients.

    Every other micro-batch counts as one of ranks of several nodes [Note: heads inside a node], in training those that
    in an evaluation do not; but not those with slices.
    """

    def __init__(
        self,
        source: ModelSource,
        pipeline: Pipeline,
        rank: int,
        ranks: InProcessRanks,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float64,
    ):
        self.rank, self._plan, self._strategy = rank, source.plan, Strategy((pipeline,))
        self._device, self._dtype = device, dtype
        self._balances = source.balances
        self.index, self._num_stages = pipeline.stage_index(rank), len(pipeline.stages)
        places = StagePlace.all_of(
            pipeline, rank, lambda members: ranks.group(members, rank) if len(members) > 1 else None,
            token_sharding=source.plan.token_sharding, overlap=source.overlap._replace(least_tokens=0),
        )  # fmt: skip
        self.place = places[-1]  # that of the loss, if the rank has it
        self.parts: tuple[StageModule, ...] = tuple(source.build(place, device, dtype) for place in places)
        self._grads: dict[str, Tensor] = {}
        self._coming: dict[str, Callable[[], None]] = {}  # by bucket, what fills it
        self._bucket_of = {param.name: bucket.name for bucket in self._plan.buckets for param in bucket.params}
        for part in self.parts:
            part.before_use = self._before_use
        self._runtime = StageRuntime(
            self.parts, pipeline, rank, ranks.transport(rank), [widths(source, place) for place in places], device,
            dtype, activity=Activity(), watch=Stopwatch(None),
        )  # fmt: skip

    def install(self, values: Mapping[str, Tensor], shards: Shards) -> None:
        """Give the stage its shards of the buckets' values; ranks with the same ones share them in memory.

        As in training a bucket is there when the stage has said that it is about to use it: what is read without a word
        is not a number.
        """
        for bucket in self._plan.buckets:
            layout = self._plan.pull_layout(bucket, self._strategy)
            pieces = tuple(layout.pieces[self.rank])
            if (bucket.name, pieces) not in shards:
                size, dtype = layout.sizes[self.rank], dtype_of(bucket, self._dtype)
                shards[bucket.name, pieces] = torch.full((size,), math.nan, dtype=dtype, device=self._device)
            buffer = shards[bucket.name, pieces]
            self._coming[bucket.name] = partial(_fill, buffer, pieces, values[bucket.name])
            grads = self._grads[bucket.name] = torch.zeros_like(buffer)
            slots = self._plan.slots(bucket, self._strategy.stage_of(self.rank), self.place.holder)
            for leaf in install_bucket(self.parts, slots, buffer):
                if bucket.trainable:
                    leaf.parameter.grad = leaf.view(grads)

    def _before_use(self, name: str) -> None:
        fill = self._coming.pop(self._bucket_of[name], None)
        if fill is not None:
            fill()

    def contribute(self, totals: dict[str, Tensor]) -> None:
        """Add this rank's share of the gradients to each bucket's, as a push would."""
        for bucket in self._plan.buckets:
            for start, stop, offset in self._plan.push_layout(bucket, self._strategy).pieces[self.rank]:
                totals[bucket.name][start:stop] += self._grads[bucket.name][offset : offset + stop - start]

    def train(self, data: Data) -> float:
        """A step's forwards and backwards; this rank's share of the loss."""
        batches = self._batches(data, over_nodes=1)
        known = known_to_schedules(data, len(self.parts))
        slots = training_slots(self.place.schedule, known, self._num_stages, self.index)
        return self._run(slots, batches)

    def train_keeping(self, data: Data, factor: float) -> Tensor:
        """`train` with each token's loss counted `factor` times; the losses themselves, (tokens,), on one rank."""
        packed = self._packed(data).on(self._device).keeping_losses()
        for batch in packed.batches:
            for weights in (batch.weights, batch.balance and batch.balance.weights):
                if weights is not None:
                    weights.mul_(factor)
        known = known_to_schedules(data, 1)
        self._run(training_slots(self.place.schedule, known, 1, 0), packed.batches)
        kept = (batch.token_losses for batch in packed.batches)
        return torch.cat([losses[: batch.pack.num_tokens] for losses, batch in zip(kept, packed.batches, strict=True)
                          if losses is not None])  # fmt: skip

    def evaluate(self, data: Data) -> float:
        """The forwards of an evaluation; this rank's share of the loss."""
        return self.forward(data, training=False)

    def forward(self, data: Data, *, training: bool) -> float:
        """The forwards alone, in training's or in evaluation's mode."""
        for part in self.parts:
            part.module.train(training)  # as the engine does
        known = known_to_schedules(data, len(self.parts))
        return self._run(evaluation_slots(known, self._num_stages, self.index), self._batches(data, over_nodes=0))

    def tokens(self, data: Data) -> list[int]:
        """Tokens that this rank holds of each pack."""
        return [batch.pack.tokens[self.place.sp_rank] for batch in self._packed(data).batches]

    def _batches(self, data: Data, *, over_nodes: int) -> Sequence[MicroBatch]:
        batches = self._packed(data).batches
        return [_over_nodes(batch) if number % 2 == over_nodes else batch for number, batch in enumerate(batches)]

    def _packed(self, data: Data) -> RankBatches:
        ids = range(len(data.sequences))
        return build_batches(
            data.microbatches, ids, self.place, data.load, "token", self._device, balances=self._balances
        )

    def _run(self, slots: Sequence[Slot], batches: Sequence[MicroBatch]) -> float:
        loss = self._runtime.run(slots, batches)
        return float(loss) if self.place.tp_rank == 0 else 0.0  # equal on all tensor parallel ranks


def _over_nodes(batch: MicroBatch) -> MicroBatch:
    """The same where sequence parallel ranks are those of as few nodes as can have equally many of them; but a slice as
    it is, for all slices of a sequence go the same way."""
    pack = batch.pack
    if pack.chunk is not None:
        return batch
    near = next((n for n in range(pack.sp // 2, 0, -1) if pack.sp % n == 0), 0)
    return replace(batch, pack=replace(pack, near=near, frugal=False))


def _fill(buffer: Tensor, pieces: Iterable[Piece], values: Tensor) -> None:
    for start, stop, offset in pieces:
        buffer[offset : offset + stop - start] = values[start:stop]


# ---- How far two outcomes of one step are apart, and where. ----


class Tolerance(NamedTuple):
    """Largest deviations that count as rounding."""

    of_itself: float  # of a loss, or of a gradient by its largest entry
    of_largest: float  # of a gradient by the largest of all: one may be zero but for rounding


# Two right runs in FP64 differ by 1e-12 at most. Where a model asks for BF16 or an FP32 that cannot be widened, they
# differ by up to 2e-6 of a gradient's largest entry, and a gradient that is zero by 2e-8 of the largest gradient.
EXACT, ROUNDED = Tolerance(1e-9, 1e-12), Tolerance(1e-5, 1e-6)


class Difference(NamedTuple):
    """The worst deviation, relative to the largest entry, and the first thing that differs (None: nothing does)."""

    worst: float
    what: str | None
    forward: Literal["training", "evaluation"] | None = None  # whose forward differs already
    tolerance: float = EXACT.of_itself  # what it was held to


def compare(right: Outcome, other: Outcome) -> Difference:
    """What of `other` is not what `right` says: the losses first, then gradients in the order of the parameters."""
    allowed = EXACT if right.exact and other.exact else ROUNDED
    training, evaluation = _relative(right.loss, other.loss), _relative(right.eval_loss, other.eval_loss)
    largest = max((_peak(gradient) for gradient in right.gradients.values()), default=0.0)
    gradients = {n: _deviation(g, other.gradients.get(n), largest, allowed) for n, g in right.gradients.items()}
    worst = 0.0
    for off in (training, evaluation, *gradients.values()):
        worst = off if off != off or off > worst else worst  # not a number counts as largest
    found = partial(Difference, worst, tolerance=allowed.of_itself)
    if training != training and right.loss == right.loss:
        return found("the loss is not a number, as where a parameter is read before the stage waits for it", "training")
    if not training <= allowed.of_itself:
        return found(f"the loss is {training:.1e} off", "training")
    if not evaluation <= allowed.of_itself:
        return found(f"the loss of an evaluation is {evaluation:.1e} off", "evaluation")
    differing = [name for name, off in gradients.items() if not off <= allowed.of_itself]
    if not differing:
        return found(None)
    more = f" (and those of {len(differing) - 1} more)" if len(differing) > 1 else ""
    return found(f"the gradient of {differing[0]} is {gradients[differing[0]]:.1e} off{more}")


def _relative(right: float, other: float) -> float:
    return abs(right - other) / max(abs(right), 1e-300)


def _deviation(right: Tensor, other: Tensor | None, largest: float, allowed: Tolerance) -> float:
    """Largest deviation over the largest entry; entries that are zero but for rounding do not count."""
    if other is None or other.shape != right.shape:
        return float("inf")
    apart = float((right - other).abs().max()) if right.numel() else 0.0
    if apart <= allowed.of_largest * largest and not apart <= allowed.of_itself * _peak(right):
        return 0.0
    return apart / max(_peak(right), 1e-300)


def _peak(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def finite(outcome: Outcome) -> bool:
    """Whether an outcome can be compared at all."""
    numbers = [torch.tensor([outcome.loss, outcome.eval_loss]), *outcome.gradients.values()]
    return all(bool(torch.isfinite(values).all()) for values in numbers)


# ---- What a model computes in FP32, in FP64: then two right runs agree but for the rounding of FP64. ----

Tensors = Tensor | Sequence[Tensor]
_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})


class Doubles(TorchFunctionMode):
    """Within it, a function that is asked for FP32 returns FP64.

    Hugging Face's norms, routers and softmaxes go down to FP32 in a model of any dtype, by `x.float()`,
    `x.to(torch.float32)` or `dtype=torch.float32`. Rounded so, two right runs differ by 1e-7, and errors below that
    could not be told from rounding. `exact` is False once a function returned a narrower number all the same (a model
    may ask for BF16). A thread of its own must enter the same mode by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exact = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.backward, torch.autograd.backward):
            return self._backward(*args, **kwargs)
        if func is Tensor.float:
            func = Tensor.double
        if any(value is torch.float32 for value in (*args, *kwargs.values())):
            args = tuple(_wide(value) for value in args)
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.dtype in _NARROW:
            self.exact = False
        return result

    def _backward(self, tensors: Tensors, given: Tensors | None = None, **kwargs: Any) -> None:
        """A mode is off while it handles a call; but in this one layers may be recomputed, and must find it on."""
        gradient = next((kwargs[key] for key in ("gradient", "grad_tensors") if kwargs.get(key) is not None), given)
        outs = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        grads = (gradient,) * len(outs) if gradient is None or isinstance(gradient, Tensor) else tuple(gradient)
        grads = tuple(torch.ones_like(o) if g is None else g for o, g in zip(outs, grads, strict=True))
        with self:
            torch.autograd.Variable._execution_engine.run_backward(
                outs, grads, False, False, (), allow_unreachable=True, accumulate_grad=True
            )


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def doubled() -> Iterator[Doubles]:
    """Within it, this thread computes in FP64, and tensors of no given dtype are made in FP64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Doubles() as mode:
            yield mode
    finally:
        torch.set_default_dtype(before)
