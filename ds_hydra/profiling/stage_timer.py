"""Milliseconds of a scheme's stages and steps, each built and run as training would run it.

One process may stand for many ranks: its groups' collectives move nothing, so it computes its true share of a stage
[Note: how an entry is made].
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hydra.pipe.contexts import Contexts
from ds_hydra.pipe.model_plan import LOGITS_AT_ONCE, end_of_slots
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.experts import for_strategies
from ds_hydra.pipe.models.meta_copy import stand_in_values
from ds_hydra.pipe.placement import Stage, place_pipeline
from ds_hydra.pipe.rows import Chunk, MicroBatch, Pack, position_ids
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.pipe.stage import ModelSource, StageModule, StagePlace, dtype_of, install_bucket
from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.pipe.weight_gradients import SplitBackward, accumulate_into
from ds_hydra.profiling.links import Collective, Counted, Links
from ds_hydra.zero_hetero.clock import Clock, Moment, clock_of
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.masters import clip_, global_grad_norm

T = TypeVar("T")


def within_memory(work: Callable[[], T], control: dist.ProcessGroup | None = None) -> T | None:
    """The result of `work`, or None on all ranks where one of them has run out of device memory.

    `control` takes tensors on the CPU; None is the default group, or a rank alone. `work` must not communicate: a rank
    that fails in it would leave the others waiting.
    """
    try:
        result = work()
    except torch.OutOfMemoryError:
        result = None
    missing = torch.tensor([result is None], dtype=torch.int32)
    if dist.is_initialized():
        dist.all_reduce(missing, op=dist.ReduceOp.MAX, group=control)
    if missing.item():
        free_unused()
        return None
    return result


def free_unused() -> None:
    """Give back to the device what the allocator keeps for later, in pieces that may fit nothing else."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Done(dist.Work):
    """What was asked of a group: when its copies began, when it started for good, and when it is waited for."""

    def __init__(self, group: LocalGroup, call: Collective) -> None:
        super().__init__()
        self._group, self.call = group, call
        self.asked = self.started = group.clock.now()
        group.asked.append((self, self.started, False))

    def wait(self, timeout: Any = None) -> bool:
        self._group.asked.append((self, self._group.clock.now(), True))
        return True


class StoodIn(NamedTuple):
    """What was asked of a group, and the copies that it made for that; the device must have done all of it."""

    clock: Clock
    asked: tuple[tuple[_Done, Moment, bool], ...]  # each with its moment, and whether that is of a wait, in order

    @property
    def seconds(self) -> float:
        """What standing in took."""
        return sum(self.clock.seconds(one.asked, one.started) for one, _, waits in self.asked if not waits)

    def calls(self, since: Moment) -> tuple[Counted, ...]:
        """All that was asked for since a moment, in order."""
        copied, started, waited = 0.0, dict[_Done, float](), dict[_Done, float]()
        for one, moment, waits in self.asked:
            if waits:
                waited.setdefault(one, self.clock.seconds(since, moment) - copied)
            else:
                copied += self.clock.seconds(one.asked, one.started)
                started[one] = self.clock.seconds(since, one.started) - copied
        return tuple(Counted(one.call, begun, waited.get(one, begun)) for one, begun in started.items())


class LocalGroup(dist.ProcessGroup):
    """Stands in for a group of `num_ranks`; `take` tells what was asked of it, and what standing in took.

    `clock` is the one of whoever takes these seconds off a time. Wall time off CPU time could leave less than nothing
    on a machine that others use too, and the host's time off a device's would take off the launch of a copy only.

    What would have been received is filled with this rank's own values: memory that nobody wrote may hold
    numbers that are slow to compute with. Where each `near` of the ranks are on a node, what stays in one counts as an
    all-to-all of so many, and what goes to one rank of each other node as messages from rank to rank.
    """

    def __init__(self, rank: int, num_ranks: int, clock: Clock, near: int = 0) -> None:
        super().__init__(rank, num_ranks)  # type: ignore[call-arg]
        self.num_ranks, self.clock, self._near = num_ranks, clock, near
        self.asked: list[tuple[_Done, Moment, bool]] = []

    def take(self) -> StoodIn:
        """All since it was last taken."""
        asked, self.asked = tuple(self.asked), []
        return StoodIn(self.clock, asked)

    @contextmanager
    def _instead_of(self, operation: str, num_bytes: int, among: int = 0) -> Iterator[_Done]:
        """Copies that stand in for what the network would have brought: their time is not the stage's own."""
        done = _Done(self, Collective(operation, among or self.num_ranks, num_bytes))
        yield done
        done.started = self.clock.now()

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        (tensor,) = tensors
        return _Done(self, Collective("all_reduce", self.num_ranks, tensor.nbytes))

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> _Done:
        ((parts, mine),) = zip(outputs, inputs, strict=True)
        with self._instead_of("all_gather", mine.nbytes * self.num_ranks) as done:
            for part in parts:
                part.copy_(mine)
        return done

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Done:
        with self._instead_of("all_gather", output.nbytes) as done:
            output.view(self.num_ranks, -1).copy_(source.view(1, -1))
        return done

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Done:
        # In a ring each rank passes as many parts on as in a gather; no figure of its own is measured.
        with self._instead_of("all_gather", source.nbytes) as done:
            output.copy_(source[: output.numel()])
        return done

    # What torch before 2.13 calls them.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # type: ignore[assignment]

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> _Done:
        # Uneven all-to-alls receive more or less than they send: what there is no value for is filled with ones.
        shared, near = min(output.numel(), source.numel()), self._near
        peers = [i for i, sizes in enumerate(zip(input_sizes, output_sizes, strict=True)) if any(sizes)]
        num_bytes, operation, among = max(output.nbytes, source.nbytes), "all_to_all", 0
        if near and max(peers) < near:
            among = near
        elif near > 1 and all(peer % near == 0 for peer in peers):  # [Note: heads inside a node]
            operation, among = "p2p", 2
            num_bytes = source.element_size() * max(sum(input_sizes[1:]), sum(output_sizes[1:]))
        with self._instead_of(operation, num_bytes, among) as done:
            output[:shared].copy_(source[:shared])
            output[shared:].fill_(1.0)
        return done


def hollow_source(
    path: str | Path, options: StageOptions = AS_WRITTEN, strategies: Iterable[StrategyShape] = ()
) -> CausalLM:
    """Stages of the Hugging Face causal language model of a config file or checkpoint folder, for these strategies.

    Fit for timing and counting, not for training. ConfigError for what is no such model or cannot be cut into stages.
    """
    return for_strategies(CausalLM(hollow_model(path), options), strategies)


def hollow_model(path: str | Path, of: str = "AutoModelForCausalLM") -> Any:
    """The Hugging Face causal language model of a config file or checkpoint folder, without its values; `of`:
    transformers' name for its kind.

    Parameters have shapes but next to no memory of their own, buffers are zeros. ConfigError for what is no such model.
    """
    import transformers
    from transformers import AutoConfig

    if not Path(path).exists():
        raise ConfigError(f"the model {str(path)!r} does not exist: give a config JSON or a checkpoint folder")
    try:
        config = AutoConfig.from_pretrained(str(path))
        with torch.device("meta"):
            model = getattr(transformers, of).from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{path} is not the config of a causal language model ({error}): give its config.json"
        ) from error
    _fill(model)
    return model


def _fill(model: Any) -> None:
    """Replace what is on the meta device: parameters by few numbers, of which no two rows are alike, since what mixes
    tokens is found by trying; buffers by zeros."""
    values = stand_in_values(model)
    # Tied weights are one parameter in two modules and stay that.
    replaced = {
        id(parameter): nn.Parameter(values[name], requires_grad=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = replaced[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.is_meta:
                setattr(module, name, torch.zeros(value.shape, dtype=value.dtype))


MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]
"""Parameter groups in, the job's optimizer over them out."""

# Of a larger shard so much is timed. With gradient and two moments that is 2 GiB, far beyond any cache and far above
# what a launch costs, so more elements take as long each.
MOST_ELEMENTS = 1 << 27
_REPEATS, _WARM_UP = 5, 2  # the first ones make the optimizer's state


def step_costs(
    device: torch.device,
    links: Links,
    *,
    elements: int,
    make_optimizer: MakeOptimizer,
    clock: Clock | None = None,
) -> dict[str, float]:
    """Milliseconds per master element of a rank, per byte moved in pull and push, and for a step's small messages.

    `elements` are those of a rank's shard: what training does to it after its pushes is run on so many, or on as many
    as there is memory for. "update_elements" tells how many that were.
    """
    timed = max(1, min(elements, MOST_ELEMENTS))
    milliseconds = _update_ms(device, timed, make_optimizer, clock or clock_of(device))
    while milliseconds is None:
        timed //= 2
        milliseconds = _update_ms(device, timed, make_optimizer, clock or clock_of(device))
    message = [f for f in links.figures if f.operation == "p2p" and not f.inter_node]
    small = [f for f in links.figures if f.operation == "all_gather"]
    return {
        "update_ms_per_element": milliseconds / timed,
        "update_elements": timed,
        "move_ms_per_byte": 1e3 / message[0].bytes_per_second if message else 0.0,
        "fixed_ms": 4 * small[0].latency_us / 1e3 if small else 0.0,
    }


def _update_ms(device: torch.device, elements: int, make_optimizer: MakeOptimizer, clock: Clock) -> float | None:
    """Median milliseconds of norm, clipping and update; None if the device has no memory for so many elements."""
    try:
        parameter = torch.nn.Parameter(torch.zeros(elements, device=device))
        parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer = make_optimizer([{"params": [parameter]}])
        samples = [_once(parameter.grad, optimizer, clock) for _ in range(_WARM_UP + _REPEATS)]
        return statistics.median(samples[_WARM_UP:])
    except torch.OutOfMemoryError:
        if elements == 1:
            raise
    free_unused()
    return None


def _once(grad: torch.Tensor, optimizer: Optimizer, clock: Clock) -> float:
    """Milliseconds of what `step.update` does, the wait of the host in its middle included."""
    began = clock.now()
    norm = global_grad_norm([grad], None)
    float(norm)
    clip_([grad], norm, 1.0)
    optimizer.step()
    ended = clock.now()
    clock.wait()
    return 1e3 * clock.seconds(began, ended)


_SPLITS = "list"  # a schedule whose stages can put their weights' gradients off


@dataclass(frozen=True, slots=True)
class Timing:
    """A micro-batch on one stage, or a part of one: `ms` without collectives that did not really run."""

    ms: float
    calls: tuple[Counted, ...]  # collectives that were counted, not run


class StageTimer:
    """One rank's share of one stage with parameters and gradients, ready to run any micro-batch.

    Without groups the collectives are counted instead of run [Note: how an entry is made]. Parameters are random:
    nothing depends on their values. Routers of mixtures of experts then balance as untrained ones do. The stage can
    run its backward as one, or split.
    """

    def __init__(
        self,
        source: ModelSource,
        scheme: ParallelScheme,
        stage_index: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        tp_group: dist.ProcessGroup | None = None,
        sp_group: dist.ProcessGroup | None = None,
        tp_rank: int = 0,
        sp_rank: int = 0,
        near: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self.device, self.dtype, self._clock = device, dtype, clock or clock_of(device)
        self.scheme, self.source = scheme, source
        shape = replace(PipelineShape.of(scheme), schedule=_SPLITS)
        pipeline = place_pipeline(shape, 0, source.plan.num_layers)
        stage = pipeline.stages[stage_index]
        self.local: list[LocalGroup] = []
        if tp_group is None and sp_group is None:
            tp_group, sp_group = self._stand_in(scheme.tp), self._stand_in(scheme.sp, near)
        self.place = StagePlace(
            pipeline,
            stage_index,
            tp_rank,
            sp_rank,
            tp_group,
            sp_group,
            token_sharding=source.plan.token_sharding,
            overlap=source.overlap,
            near=near,
        )
        self.module = source.build(self.place, device, dtype)
        self.num_params = _install(self.module, source, stage, self.place.holder, device, dtype)

    def _stand_in(self, degree: int, near: int = 0) -> LocalGroup | None:
        if degree == 1:
            return None
        self.local.append(LocalGroup(0, degree, self._clock, near))
        return self.local[-1]

    @property
    def queue(self) -> SplitBackward:
        """Where weights' gradients wait while a backward runs split."""
        assert self.module.weight_gradients is not None, "the stage is built for a schedule that splits backwards"
        return self.module.weight_gradients

    def batch(self, lengths: Sequence[int], chunk: Chunk | None = None) -> MicroBatch:
        """Random tokens of these lengths, as this rank's stage would see them; the first may be those of a slice."""
        padding = self.place.padding(sum(lengths))
        lengths, place = (*lengths, padding) if padding else tuple(lengths), self.place
        pack = Pack(
            lengths, place.sp_rank, place.stage.sp, place.sp_group, (), chunk, place.overlap, place.near,
            place.frugal(sum(lengths), sliced=chunk is not None),
        )  # fmt: skip
        start, stop = pack.local
        positions = torch.from_numpy(position_ids(pack.lengths, start, stop, past=pack.past)).to(self.device)[None]
        size = stop - start
        vocab = self.source.vocab_size or 1
        ids = torch.randint(0, vocab, (1, size), device=self.device)
        labels = torch.randint(0, vocab, (size,), device=self.device)
        weights = torch.full((size,), 1.0 / max(1, pack.num_tokens), dtype=torch.float64, device=self.device)
        return MicroBatch(
            pack,
            positions,
            ids,
            labels if self.place.is_last else None,
            weights if self.place.is_last else None,
        )

    def last_slice(self, start: int, size: int) -> MicroBatch:
        """The last `size` tokens of a sequence, of which `start` tokens have run forward: what they keep is there."""
        contexts = Contexts(start + size)
        with torch.no_grad():
            self.forward(self.batch((start,), Chunk(0, start, contexts)))
        return self.batch((size,), Chunk(start, start + size, contexts))

    def run(self, batch: MicroBatch) -> None:
        """Forward and backward of one micro-batch, gradients accumulating as in training."""
        self.backward(self.forward(batch))

    def forward(self, batch: MicroBatch) -> Tensor:
        """Forward of one micro-batch, from random hidden states where the stage is not the first."""
        return self.module.forward(None if self.place.is_first else self._hidden(batch), batch)

    def backward(self, out: Tensor) -> None:
        """The backward of what a forward has returned."""
        torch.autograd.backward(out, None if self.place.is_last else torch.ones_like(out))

    def time(self, lengths: Sequence[int], *, warm_up: int = 1) -> Timing:
        """Milliseconds of one run, after `warm_up` others."""
        batch = self.batch(lengths)
        for _ in range(warm_up):
            self.run(batch)
        return self._timed(lambda: self.run(batch))[0]

    def time_parts(self, lengths: Sequence[int], start: int = 0) -> tuple[Timing, ...]:
        """Milliseconds of the forward, the input's gradient and the weights' gradients of one micro-batch.

        With `start` it is one slice, the last of a sequence of which so many tokens come before it.
        """
        batch = self.last_slice(start, sum(lengths)) if start else self.batch(lengths)
        outs: list[Tensor] = []

        def forward() -> None:
            with self.queue.of(0):
                outs.append(self.forward(batch))

        def input_gradient() -> None:
            with self.queue.of(0, backward=True):
                self.backward(outs.pop())

        try:
            return self._timed(forward, input_gradient, lambda: self.queue.run([0]))
        finally:  # where memory ends in the middle, all is given back
            outs.clear()
            self.queue.forget()

    def _timed(self, *parts: Callable[[], None]) -> tuple[Timing, ...]:
        """The times of parts that run one after the other; the host waits for the device before and after them all."""
        for group in self.local:
            group.take()
        self._clock.wait()
        moments, stood_in = [self._clock.now()], []
        for part in parts:
            part()
            moments.append(self._clock.now())
            stood_in.append([group.take() for group in self.local])
        self._clock.wait()
        return tuple(
            Timing(
                1e3 * (self._clock.seconds(begin, end) - sum(each.seconds for each in stood)),
                tuple(call for each in stood for call in each.calls(begin)),
            )
            for (begin, end), stood in zip(pairwise(moments), stood_in, strict=True)
        )

    @property
    def block_tokens(self) -> int | None:
        """Tokens of a micro-batch from which on this stage computes its head twice; None where it never does."""
        if not self.place.is_last or not isinstance(self.source, CausalLM):
            return None
        if self.module.plain_head is None:  # type: ignore[attr-defined]
            self.run(self.batch((self.scheme.sp * self.scheme.tp,)))
        if self.module.plain_head:  # type: ignore[attr-defined]
            return None
        start, stop = self.module.vocab  # type: ignore[attr-defined]
        return max(1, LOGITS_AT_ONCE // max(1, stop - start)) * self.scheme.sp

    def message_ms(self, num_tokens: int, links: Links, *, inter_node: bool = False) -> float:
        """Activations and gradients that this stage exchanges with its neighbours, per micro-batch."""
        neighbours = (not self.place.is_first) + (not self.place.is_last)
        if not neighbours:
            return 0.0
        width = self.source.width(max(1, self.place.stage.first_layer))
        # The hidden states go forward and their gradients come back: two messages for each neighbour.
        size = num_tokens // (self.scheme.sp * self.place.shards) * width * self.dtype.itemsize
        return links.ms(Collective("p2p", 2, size), inter_node=inter_node) * 2 * neighbours

    def _hidden(self, batch: MicroBatch) -> Tensor:
        start, stop = batch.pack.local
        width = self.source.width(self.place.stage.first_layer)
        hidden = torch.randn((1, (stop - start) // self.place.shards, width), device=self.device, dtype=self.dtype)
        return hidden.requires_grad_()


def _install(
    module: StageModule, source: ModelSource, stage: Stage, holder: int, device: torch.device, dtype: torch.dtype
) -> int:
    """Random parameters as views of one buffer a bucket, gradients likewise; returns their number."""
    total = 0
    for bucket in source.plan.buckets:
        slots = source.plan.slots(bucket, stage, holder)
        size = end_of_slots(slots)
        # Small values, as in a trained model: large ones run into infinities, which some kernels are slow with.
        buffer = torch.randn(size, device=device, dtype=dtype_of(bucket, dtype)).mul_(0.02)
        grads = torch.zeros(size, device=device, dtype=torch.promote_types(dtype, torch.float32))
        total += size
        for leaf in install_bucket([module], slots, buffer):
            if leaf.parameter.requires_grad:
                _collect(module, leaf.parameter, leaf.view(grads))
    return total


def _collect(module: StageModule, parameter: nn.Parameter, gradients: Tensor) -> None:
    """Gradients accumulate where training accumulates them: in FP32 beside 16 bit parameters."""
    module.add_to(parameter, gradients)
    if gradients.dtype == parameter.dtype:
        parameter.grad = gradients
        return

    parameter.register_post_accumulate_grad_hook(accumulate_into(gradients))
