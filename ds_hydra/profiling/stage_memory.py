"""Bytes of a stage's activations: what a forward keeps, and the most that a step needs.

What is kept is counted from the tensors that autograd saves; the most at any time is what `Allocations` has seen.

On a GPU the allocator tells. On a CPU torch's profiler does: it is told of all memory that is given and taken back,
inside of operators too, which the process's size does not show. It is told by the threads that it follows. A thread of
a process group is none of them, and may be the last that lets go of a tensor that was sent: nobody tells of that. So a
block counts until it is taken back, or its address is given out again.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count, pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile, record_function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_hydra.costs.memory import Activations
from ds_hydra.costs.shares import CONTEXT
from ds_hydra.pipe import recomputed
from ds_hydra.pipe.contexts import Contexts
from ds_hydra.pipe.head_sharing import state_bytes
from ds_hydra.pipe.model_plan import LOGITS_AT_ONCE
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.placement import split_layers
from ds_hydra.pipe.recomputed import watched
from ds_hydra.pipe.rows import Chunk, MicroBatch
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.profiling.stage_timer import StageTimer

_MARK, _MEMORY = "ds-hydra mark", "[memory]"
_SENT, _GONE = "ds-hydra-sent", "ds-hydra-gone"


class Allocations:
    """While entered it follows the memory of one device's tensors; afterwards it tells the bytes, more or less than at
    the beginning."""

    def __init__(self, device: torch.device, *, sends: bool = False):
        """`sends`: whether tensors are sent to other ranks meanwhile; it makes every operation slower."""
        self._device, self._sent = device, _Sent() if sends and device.type == "cpu" else nullcontext()
        self.held: list[int] = []  # at each mark
        self.peak = 0

    def __enter__(self) -> Allocations:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # torch's profiler would print that it starts
            self._profile: Any = profile(profile_memory=True)
            self._profile.__enter__()
            self._sent.__enter__()
        return self

    def mark(self) -> None:
        """The next of `held` is what is held now."""
        gc.collect()
        if self._device.type == "cuda":
            self.held.append(torch.cuda.memory_allocated(self._device) - self._before)
        else:
            _note(_MARK)

    def __exit__(self, *error: Any) -> None:
        if self._device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self._device) - self._before
            return
        self._sent.__exit__(*error)
        self._profile.__exit__(*error)
        now, given = 0, dict[int, _Block]()  # by address
        sent: dict[str, _Block | None] = {}
        events = _all(self._profile.kineto_results.experimental_event_tree(), False)
        for event, of_gloo in sorted(events, key=_begin):
            what, _, told = event.name.partition(" ")
            if event.name == _MEMORY:
                size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
                if size < 0 and address not in given:
                    now += size  # it was there before
                before = given.pop(address, None)
                now -= before.size if before else 0
                if size > 0:
                    given[address] = _Block(0 if of_gloo else size)
                    now += given[address].size
                self.peak = max(self.peak, now)
            elif event.name == _MARK:
                self.held.append(now)
            elif what == _SENT:
                sent[told] = given.get(int(told.split()[1]))
            elif what == _GONE and (block := sent.pop(told)) and given.get(address := int(told.split()[1])) is block:
                now -= given.pop(address).size


@dataclass(eq=False, slots=True)
class _Block:
    size: int


class _Sent(TorchDispatchMode):
    """Notes what is sent, and when it is gone, whichever thread was the last to let go of it."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = count()
        self._there: dict[int, tuple[StorageWeakRef, int]] = {}  # by address; and the number of the note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            for tensor in (one for one in tree_leaves(args) if isinstance(one, Tensor)):
                storage = tensor.untyped_storage()
                if (address := storage.data_ptr()) not in self._there:
                    self._there[address] = StorageWeakRef(storage), (number := next(self._numbers))
                    _note(f"{_SENT} {number} {address}")
        out = func(*args, **(kwargs or {}))
        for address, (kept, number) in list(self._there.items()):
            if kept.expired():
                del self._there[address]
                _note(f"{_GONE} {number} {address}")
        return out


def _note(text: str) -> None:
    with record_function(text):
        pass


def _begin(event: tuple[Any, bool]) -> int:
    return event[0].start_time_ns  # type: ignore[no-any-return]


def _all(events: Iterable[Any], within: bool) -> Iterator[tuple[Any, bool]]:
    """Events and those within them, and whether each is within a process group's operation."""
    for event in events:
        yield event, within
        yield from _all(event.children, within or event.name.startswith("c10d::"))


def kept_bytes(timer: StageTimer, lengths: Sequence[int]) -> int:
    """Bytes of distinct storages that autograd keeps of a forward, parameters apart."""
    out, seen = _forward(timer, timer.batch(lengths), lambda: True)
    if not timer.place.is_last:
        seen[out.untyped_storage().data_ptr()] = out.untyped_storage().nbytes()
    return sum(seen.values())


def _forward(timer: StageTimer, batch: MicroBatch, counts: Callable[[], bool]) -> tuple[Tensor, dict[int, int]]:
    """What a forward gives, and bytes by address of the storages that autograd keeps of it while it `counts`,
    parameters and what the batch is made of apart."""
    inputs = [t for t in (batch.input_ids, batch.labels, batch.weights, batch.position_ids) if t is not None]
    own = {tensor.untyped_storage().data_ptr() for tensor in (*timer.module.parameters.values(), *inputs)}
    seen: dict[int, int] = {}
    alive: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if counts() and storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        alive.append(storage)  # an address is not given out twice
        return tensor

    # What attention has made is not among these, where it stays while its layer is computed again.
    with watched(pack), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return timer.forward(batch), seen


def step_peak(timer: StageTimer, lengths: Sequence[int]) -> int:
    """Most bytes that a micro-batch's forward and backward hold at any time, parameters and gradients apart."""
    timer.run(timer.batch(lengths))  # has made the gradients afterwards
    batch, store = timer.batch(lengths), getattr(timer.module, "store", None)
    if store is not None:
        store.empty()
    with Allocations(timer.device) as found:
        timer.run(batch)
    # On a CPU the host's memory is the device's.
    return found.peak - (store.most if store is not None and timer.device.type == "cpu" else 0)


def measure_activations(
    source: ModelSource, tp: int, sp: int, device: torch.device, dtype: torch.dtype, num_tokens: int
) -> Activations:
    """Bytes per token kept by layers, embeddings and head, the transient, and what stays of a split backward and for
    slices, by running local shapes.

    A stage of a few layers in the middle tells the layers' own, the stages before and after it the rest.
    """
    plan = source.plan
    # Three stages: the middle one holds layers only. What the first keeps beyond as many layers is the embeddings',
    # what the last keeps beyond them the head's.
    stages = min(plan.num_layers, 3)
    scheme = ParallelScheme(tp, stages, sp, tp if plan.experts else 1)
    timers = [StageTimer(source, scheme, index, device, dtype) for index in range(stages)]
    counts = split_layers(plan.num_layers, stages)
    kept = [kept_bytes(timer, (num_tokens,)) / num_tokens for timer in timers]
    kept[-1] -= _probabilities(timers[-1], num_tokens) / num_tokens
    middle = timers[1] if stages == 3 else timers[0]
    layer = kept[1] / counts[1] if stages == 3 else sum(kept) / plan.num_layers
    if source.options.activation_checkpointing and stages == 3:
        # What leaves the stage is kept by the next layer; what enters stays, but in one stage it would be on the host.
        beside = (1 + source.options.host_activations) * _input_bytes(middle)
        layer = max(0.0, kept[1] - beside) / counts[1]
    first, last = (max(0.0, kept[i] - counts[i] * layer) for i in (0, -1)) if stages == 3 else (0.0, 0.0)
    context = 0.0 if plan.no_slices else kept_for_slices(middle, num_tokens)
    # What was measured is of one slice that another follows, with the states that it hands on.
    own = middle.place.stage
    states = state_bytes(plan.boxes[own.first_layer : own.last_layer], tp, sp)
    context = max(0.0, context - states / (own.num_layers * layer * num_tokens)) if states else context
    until_weight, again = kept_until_weight(middle, num_tokens), kept_when_recomputed(middle, num_tokens)
    fixed = 0.0
    if context and _has_reach(source):
        (context, of_sums), (again, of_rows) = (_apart(of, middle, num_tokens) for of in (_for_slices, _recomputed))
        fixed = (of_sums + of_rows) / own.num_layers
    of_experts, share = kept_in_experts(middle, num_tokens)
    layer += (1.0 - share) * of_experts
    transient, tile = _while_computing(middle, num_tokens)
    host = _input_bytes(middle) if source.options.host_activations else 0.0
    if host:  # an input that comes beside the one that is used; keys and values of two layers
        transient, context = transient + host, 2 * CONTEXT
    return Activations(
        layer, first, last, transient, until_weight, context, again,
        state_bytes(plan.boxes, tp, sp) / plan.num_layers + fixed, of_experts, tile, host,
        float(recomputed.TILE_ROWS * sp),
    )  # fmt: skip


def _input_bytes(timer: StageTimer) -> float:
    """Of what enters a layer, for a token of the pipeline."""
    own = timer.place
    return timer.source.width(own.stage.first_layer) * timer.dtype.itemsize / (own.stage.sp * own.shards)


def _has_reach(source: ModelSource) -> bool:
    """Whether layers may have a window or chunks, of whose rows a slice hands on as many however long it is."""
    config = getattr(source, "text_config", None)
    return any(getattr(config, key, None) for key in ("sliding_window", "attention_chunk_size"))


def _apart(
    measured: Callable[[StageTimer, int], tuple[int, int]], timer: StageTimer, num_tokens: int
) -> tuple[float, float]:
    """Of bytes that are measured beside those of a whole sequence what grows with the tokens, as a share of these, and
    the bytes that do not grow."""
    (found, whole), (of_half, _) = measured(timer, num_tokens), measured(timer, num_tokens // 2)
    fixed = min(found, max(0, 2 * of_half - found))
    return (found - fixed) / whole, fixed


def kept_in_experts(timer: StageTimer, num_tokens: int) -> tuple[float, float]:
    """Bytes of a layer for each token that whole experts keep where as many tokens choose each rank's, and how many
    times as many have chosen this one's; 0 bytes where no experts are spread, or this rank's were chosen by none."""
    spread = getattr(timer.source, "experts", None)
    if spread is None or timer.place.stage.ep == 1:
        return 0.0, 1.0
    inside: list[nn.Module] = []
    modules = [timer.module.module.get_submodule(path) for path in spread.modules]
    handles = [module.register_forward_pre_hook(lambda module, _: inside.append(module)) for module in modules]
    handles += [module.register_forward_hook(lambda module, *_: inside.remove(module)) for module in modules]
    timer.module.take_imbalances()
    _, seen = _forward(timer, timer.batch((num_tokens,)), lambda: bool(inside))
    for handle in handles:
        handle.remove()
    shares = [share for share in timer.module.take_imbalances() if share]
    return (sum(seen.values()) / num_tokens / sum(shares), fmean(shares)) if shares else (0.0, 1.0)


def kept_until_weight(timer: StageTimer, num_tokens: int) -> float:
    """Of what a micro-batch keeps from its forward on, the share that stays after the input's gradient."""
    batch = timer.batch((num_tokens,))
    with Allocations(timer.device) as found:
        with timer.queue.of(0):
            out = timer.forward(batch)
        found.mark()
        with timer.queue.of(0, backward=True):
            timer.backward(out)
        del out
        found.mark()
        timer.queue.run([0])
    kept, until_weight = found.held
    return min(1.0, until_weight / kept)


def kept_for_slices(timer: StageTimer, num_tokens: int) -> float:
    """What a token keeps more in a slice than in a whole sequence, as a share of what it keeps there."""
    more, kept = _for_slices(timer, num_tokens)
    return more / kept


def _for_slices(timer: StageTimer, num_tokens: int) -> tuple[int, int]:
    """Bytes that a slice keeps more, and those of a whole sequence.

    Of two slices, it is what the first keeps more after the second one's backward, which leaves gradients of keys and
    values behind, and what both keep more than a whole sequence before it, such as keys and values of layers that are
    computed again.
    """
    size = num_tokens // 2
    contexts = Contexts(2 * size)
    slices = [timer.batch((size,), Chunk(start, start + size, contexts)) for start in (0, size)]
    whole = timer.batch((2 * size,))
    with Allocations(timer.device) as found:
        timer.run(whole)
        found.mark()
        out = timer.forward(whole)
        found.mark()
        timer.backward(out)
        del out
        found.mark()
        outs = [timer.forward(slices[0])]
        found.mark()
        outs.append(timer.forward(slices[1]))
        found.mark()
        timer.backward(outs.pop())
        found.mark()
        timer.backward(outs.pop())
    before, alone, nothing, one, both, after = found.held
    kept = alone - before
    return after - one + max(0, both - nothing - kept), kept


def kept_when_recomputed(timer: StageTimer, num_tokens: int) -> float:
    """Of what layers keep of a whole sequence, the share that they keep of its slices if they are computed again.

    For slices they keep keys and values too. Where sequences are not cut, it is the share of the whole one.
    """
    again, kept = _recomputed(timer, num_tokens)
    return min(1.0, again / kept)


def _recomputed(timer: StageTimer, num_tokens: int) -> tuple[int, int]:
    """Bytes of slices whose layers are computed again, and those of a whole sequence."""
    whole, contexts = timer.batch((num_tokens,)), Contexts(num_tokens)
    cuts = (0, num_tokens) if timer.source.plan.no_slices else (0, num_tokens // 2, num_tokens)
    parts = [whole] if len(cuts) == 2 else [
        timer.batch((stop - start,), Chunk(start, stop, contexts)) for start, stop in pairwise(cuts)
    ]  # fmt: skip
    with Allocations(timer.device) as found:
        timer.run(whole)
        found.mark()
        out = timer.forward(whole)
        found.mark()
        timer.backward(out)
        del out
        found.mark()
        outs = [timer.forward(replace(part, recompute=1.0)) for part in parts]
        found.mark()
        while outs:
            timer.backward(outs.pop())
    before, alone, nothing, again = found.held
    return again - nothing, alone - before


def _while_computing(timer: StageTimer, num_tokens: int) -> tuple[float, float]:
    """Bytes per token that a stage without logits needs beyond what it keeps, and those of a tile, however many tokens
    there are."""
    options = timer.source.options

    def beyond(tokens: int, rows: int) -> int:
        with recomputed.of_rows(rows):
            return step_peak(timer, (tokens,)) - kept_bytes(timer, (tokens,))

    if not (options.tiles and options.activation_checkpointing and timer.source.functions.by_rows):  # type: ignore[attr-defined]
        return max(0.0, beyond(num_tokens, recomputed.TILE_ROWS) / num_tokens), 0.0
    # Few rows, so that a tile is small beside the tokens: what it takes grows with them, but for the weights' sums.
    few = max(1, num_tokens // timer.place.stage.sp // 16)
    small, half, large = beyond(num_tokens, few), beyond(num_tokens // 2, few), beyond(num_tokens, 2 * few)
    by_token, by_row = max(0.0, 2 * (small - half) / num_tokens), max(0.0, (large - small) / few)
    return by_token, max(0.0, small - by_token * num_tokens) + by_row * (recomputed.TILE_ROWS - few)


def _probabilities(timer: StageTimer, num_tokens: int) -> int:
    """Bytes that the loss keeps of one block of logits: probabilities in FP32 or wider."""
    if not isinstance(timer.source, CausalLM) or not timer.source.vocab_size:
        return 0
    if timer.module.plain_head:  # type: ignore[attr-defined]
        return 0  # it keeps gradients of hidden states instead
    rows = -(-(1 if timer.source.valued else timer.source.vocab_size) // timer.place.stage.tp)
    start, stop = timer.batch((num_tokens,)).pack.local
    if (stop - start) * rows > LOGITS_AT_ONCE:
        return 0  # blocks are recomputed
    return (stop - start) * rows * max(4, timer.dtype.itemsize)
