"""Linear layers of a stage: weights that lie side by side, and weight gradients put off.

[Note: split backward]
The backward of a linear layer y = x wᵀ computes two products of the gradient dy: dx = dy w, for which the layer below
waits and in the end the stage before, and dw = dyᵀ x, for which nobody waits until the gradients are pushed. A schedule
that splits backwards runs the first of all layers as I and the second as W, at a time when the stage would have nothing
else to do (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241). Between the two an entry (weight, x, dy) of
each layer waits in a queue:

  forward   y of layer 0, y of layer 1
  I         dx of layer 1, which puts its entry; dx of layer 0, which puts its entry
  W         dw of layer 1 is added to the gradient's sum, then dw of layer 0

Autograd is not to know the weight: it would take the gradient for complete in I, and call hooks without one. So it is
given a detached weight, and the queue adds to the sum of gradients itself. The products of one weight from several
micro-batches are added in the order in which the schedule lists their W, so equal plans give equal bits.

What is not put off is computed in I, as in a backward that is not split. That is right for whatever can be trained, and
only hides less: norms, embeddings, experts that are stacked, a linear layer whose class, weight or input is in any way
special, and a layer that the backward computes again (activation checkpointing): its x and dy would fill the memory
that the second computing is there to save.

[Note: sums of products]
Where a sum of gradients is wider than its weight, FP32 beside BF16, autograd would write dw in 16 bit, and a hook read
it and add it up: of a weight of n elements 12 n bytes pass, and each micro-batch is rounded to 16 bit. A product that
adds to the sum itself passes 8 n, and rounds nothing in between. So the backward of a linear layer adds dw by itself,
and tells autograd that there is none; hooks that follow the accumulation run all the same. An embedding's adds to the
rows that were looked up, and passes no others. Experts that are stacked have one product for all of them, whose rows
are sorted by expert; autograd's would pass 16 n, as it copies dw into the stack's order besides. Here each expert that
has rows adds its product to its part of the sum. Where its rows end is copied to the host in the forward, so that the
backward has it without waiting for the device.

[Note: packed weights]
Queries, keys and values read the same rows, and so do the gate of an MLP and what it lets through. Their weights follow
each other in their bucket's buffer, so one weight covers them all, a view as each of them is, and one product makes
what they make:

  buffer      | q (8, 4)     | k (2, 4)      | v (2, 4)      |      elements 0..31, 32..39, 40..47
  packed      | (12, 4)                                      |
  x (T, 4)    -> (T, 12): q's are the columns 0..7, k's 8 and 9, v's 10 and 11

To autograd the packed weight is the leaf in place of the others. Its gradient, one product as well, adds up in the view
that covers theirs, so whatever pushes gradients finds them where they always are.

A weight is packed where those of a bucket happen to lie so, and where a trace has seen that one input enters all of its
layers. A layer that is handed something else in spite of that uses its rows of the packed weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_hydra.pipe.fused import Gated, parts_of
from ds_hydra.pipe.model_plan import Slot
from ds_hydra.pipe.pinned import readable_soon
from ds_hydra.pipe.wrappers import wrap

Linear = Callable[[nn.Module, Tensor, Tensor | None], Tensor]
"""(module, input, bias) in, the input times the module's weight, plus the bias, out."""
_ADDED_AT_ONCE = 1 << 18  # elements of a gradient, on a CPU
_EXACT_ROWS = 8192  # of a sum that are added at once where a product has another type: it is a tensor of its own


def linear(module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., features) in, what a linear module with its `weight` makes of it out."""
    assert isinstance(module.weight, Tensor), "the weight of a linear layer"
    return F.linear(x, module.weight, bias)


class SplitBackward(Protocol):
    """What a stage keeps from the input gradients of micro-batches to their weight gradients."""

    finished: Callable[[nn.Parameter], None]
    """Called with a parameter as soon as nothing of its gradient waits any more."""

    def add_to(self, parameter: nn.Parameter, total: Tensor) -> None:
        """Let the gradient of a parameter add up in `total`, of its shape, which may be of a wider type."""

    def of(self, microbatch: int, *, backward: bool = False) -> AbstractContextManager[None]:
        """Within it, a forward or an I of a micro-batch runs, the backward of which is split."""

    def run(self, microbatches: Sequence[int]) -> None:
        """The W of these micro-batches, together."""

    @property
    def unfinished(self) -> frozenset[nn.Parameter]:
        """The parameters whose gradients wait."""

    def forget(self) -> None:
        """Drop what a run that an error has ended left behind."""


class Later(Protocol):
    """An input that is not kept, but can be had once more."""

    def start(self) -> None:
        """It will be taken soon."""

    def take(self) -> Tensor:
        """The input (tokens, in)."""


class Product(NamedTuple):
    """A use of a linear layer: with the layer's input it makes the weight's gradient."""

    module: nn.Module
    dy: Tensor  # (tokens, out)


class _Entry(NamedTuple):
    """Of one use of some weights (out, in) with the same input, what their gradients are the products of."""

    place: int  # of the first one's module in the order of the model
    weights: tuple[nn.Parameter, ...]
    x: Tensor | Later  # (tokens, in)
    dys: tuple[Tensor, ...]  # (tokens, out)


class WeightGradients:
    """The queue of one stage [Note: split backward]; a `SplitBackward`. Gradients add up in the weights' `.grad`, or in
    what `add_to` says."""

    def __init__(self, model: nn.Module, paths: Collection[str], others: Collection[str] = ()):
        """Puts off the gradients of the weights at these paths, where a plain linear layer owns them; those of
        `others`, and of embeddings, are added where they have a wider sum [Note: sums of products]."""
        self.finished: Callable[[nn.Parameter], None] = lambda _: None
        self._places: dict[nn.Module, int] = {}  # of the modules whose gradients are put off
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._waiting: dict[int, list[_Entry]] = {}  # by micro-batch, in the order of their backward
        self._open: Counter[nn.Parameter] = Counter()  # their number by weight
        self._microbatch: int | None = None  # whose forward or I is running
        self._in_backward = False
        self._again: set[nn.Module] = set()  # which the present I has computed again
        held = {*paths, *others}
        for place, (name, module) in enumerate(model.named_modules()):
            stacks = {leaf for leaf, one in module._parameters.items() if one is not None and one.dim() == 3}
            if any(f"{name}.{leaf}" in held for leaf in stacks - {"weight"}):  # a convolution's is no stack
                wrap(module, self._stacked_of(module.forward), "summed", "stacks")
            if f"{name}.weight" not in held:
                continue
            # A subclass, a parametrization and a forward that was replaced compute something of their own.
            plain = type(module) is nn.Linear and "forward" not in vars(module) and "weight" in module._parameters
            if plain and f"{name}.weight" in paths:
                self._places[module] = place
            if plain:
                wrap(module, self._forward_of(module), "summed")
            elif type(module) is nn.Embedding and "forward" not in vars(module):
                wrap(module, self._lookup_of(module), "summed", "rows")

    def put_off_as(self, first: nn.Module, module: nn.Module) -> None:
        """Put the gradients of `module`, a linear layer beside the model's own, off where those of `first` are."""
        if first in self._places:
            self._places[module] = self._places[first]

    def _forward_of(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        def forward(input: Tensor) -> Tensor:  # the name that callers of nn.Linear may use
            return self.linear(module, input, module.bias)  # type: ignore[arg-type]

        return forward

    def _lookup_of(self, module: nn.Embedding) -> Callable[[Tensor], Tensor]:
        forward: Callable[[Tensor], Tensor] = module.forward
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse

        def lookup(input: Tensor) -> Tensor:
            if not plain or not self.adds(module):
                return forward(input)
            total = self.sum_of(module.weight)
            return _Lookup.apply(input, module.weight, module.padding_idx, total)  # type: ignore[no-any-return]

        return lookup

    def _stacked_of(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def stacked(*args: Any, **kwargs: Any) -> Any:
            with _Stacked(self):
                return forward(*args, **kwargs)

        return stacked

    def add_to(self, parameter: nn.Parameter, total: Tensor) -> None:
        """See `SplitBackward`."""
        self._sums[parameter] = total

    @contextmanager
    def of(self, microbatch: int, *, backward: bool = False) -> Iterator[None]:
        """See `SplitBackward`."""
        self._microbatch, self._in_backward = microbatch, backward
        try:
            yield
        finally:
            self._microbatch, self._in_backward = None, False
            self._again.clear()

    def linear(self, module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """As `weight_gradients.linear`, with the weight's gradient put off where that is possible, or added at once."""
        weight: Any = module.weight
        if isinstance(x, Gated):
            return x.linear(weight, bias, partial(self.add, module) if self.adds(module) else None)
        waits = self.takes(module, x)
        if not waits and not self.adds(module):
            return F.linear(x, weight, bias)
        # Autograd is not to know a weight whose gradient waits [Note: split backward].
        weight = weight.detach() if waits else weight
        if not x.is_contiguous():
            return _PutOff.apply(x, weight, bias, module, self)  # type: ignore[no-any-return]
        # In rows: with a bias torch makes more dimensions by a view, and a Function's view cannot be changed in place.
        out: Tensor = _PutOff.apply(x.view(-1, x.shape[-1]), weight, bias, module, self)
        return out.view(*x.shape[:-1], -1)

    def takes(self, module: nn.Module, x: Tensor) -> bool:
        """Whether the weight's gradient of a linear layer is put off when it is now computed with `x`."""
        weight: Any = module.weight
        # Without a gradient of the input there is no I to which this layer would add; W can be done at once.
        if not (
            module in self._places
            and self._microbatch is not None
            and torch.is_grad_enabled()
            and x.requires_grad
            and weight.requires_grad
            and weight.is_leaf  # a slice of one is the module's for a while only
            and not torch.is_autocast_enabled(x.device.type)  # which has the product computed in another type
        ):
            return False
        if self._in_backward:
            self._again.add(module)
        return True

    def sum_of(self, weight: Tensor) -> Tensor | None:
        """What the gradient of a weight adds up in, if that is wider than the weight [Note: sums of products]."""
        total = self._sums.get(weight)  # type: ignore[call-overload]
        return total if total is not None and total.dtype != weight.dtype else None

    def adds(self, module: nn.Module) -> bool:
        """Whether the weight's gradient of a layer that is now computed is added to its sum by the backward itself."""
        return self.adds_to(module.weight)  # type: ignore[arg-type]

    def adds_to(self, weight: Tensor) -> bool:
        """The same of a weight."""
        return (
            self.sum_of(weight) is not None
            and torch.is_grad_enabled()
            and weight.requires_grad
            and not torch.is_autocast_enabled(weight.device.type)
        )

    def keeps(self, module: nn.Module) -> bool:
        """Whether what a layer puts off in the present backward waits: in a split one, and not if it was computed
        again."""
        return self._microbatch is not None and module in self._places and module not in self._again

    def put(self, products: Sequence[Product], x: Tensor | Later) -> None:
        """Let the weights' gradients of layers with the same input (tokens, in) wait, in the I of a micro-batch."""
        assert self._microbatch is not None, "what was put off in a forward is asked for in the I of its micro-batch"
        modules, dys = zip(*products, strict=True)
        entry = _Entry(self._places[modules[0]], tuple(module.weight for module in modules), x, dys)
        self._waiting.setdefault(self._microbatch, []).append(entry)
        self._open.update(entry.weights)

    def add(self, module: nn.Module, x: Tensor, dy: Tensor) -> None:
        """Add the weight's gradient of a layer to its sum, of x (tokens, in) and dy (tokens, out)."""
        self._add(module.weight, [(x, dy)])  # type: ignore[arg-type]

    def run(self, microbatches: Sequence[int]) -> None:
        """See `SplitBackward`: last layer first, and each weight for all micro-batches."""
        # One micro-batch after the other would leave the last layer unfinished until the last of them begins, and with
        # it every push: buckets leave in the order of the layers, last one first.
        by_place: dict[int, list[_Entry]] = {}
        for microbatch in microbatches:
            for entry in self._waiting.pop(microbatch, ()):
                by_place.setdefault(entry.place, []).append(entry)
        with torch.no_grad():
            for place in sorted(by_place, reverse=True):
                entries = by_place.pop(place)  # their tensors are freed with them
                self._run(entries)
                self._open.subtract(weight for entry in entries for weight in entry.weights)
                for weight in dict.fromkeys(weight for entry in entries for weight in entry.weights):
                    if not self._open[weight]:
                        del self._open[weight]
                        self.finished(weight)

    def _run(self, entries: Sequence[_Entry]) -> None:
        """Add what entries of one place wait with."""
        kept: dict[nn.Parameter, list[tuple[Tensor, Tensor]]] = {}
        for entry in entries:
            if isinstance(entry.x, Tensor):
                for weight, dy in zip(entry.weights, entry.dys, strict=True):
                    kept.setdefault(weight, []).append((entry.x, dy))
                continue
            x = entry.x.take()  # for all weights that read it; one micro-batch's at a time
            for weight, dy in zip(entry.weights, entry.dys, strict=True):
                self._add(weight, [(x, dy)])
        for weight, factors in kept.items():
            self._add(weight, factors)

    @property
    def unfinished(self) -> frozenset[nn.Parameter]:
        """See `SplitBackward`."""
        return frozenset(self._open)

    def forget(self) -> None:
        """See `SplitBackward`."""
        self._waiting.clear()
        self._open.clear()

    def _add(self, weight: nn.Parameter, factors: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add the products of some x and dy to the sum of a weight's gradient."""
        total = self._sums.get(weight)
        if total is None:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            total = weight.grad
        for x, dy in _joined(factors, total):
            add_product(total, dy.t(), x)


def add_product(total: Tensor, left: Tensor, right: Tensor, *, beta: int = 1, exact: bool = False) -> None:
    """total (a, b) = beta total + left (a, n) right (n, b); a beta of 0 writes over anything.

    On a CPU, where no product of 16 bit factors is had in FP32, it is rounded to 16 bit before it is added, or with
    `exact` computed in the type of `total`.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=beta)
    elif total.is_cuda and total.dtype == torch.float32 and total.stride(1) == 1:
        # The product itself adds, and is not rounded before. Rows need not follow each other: a stack's do not.
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    elif total.is_cuda and total.dtype == torch.float32 and total.stride(0) == 1:  # of a part of a row
        torch.addmm(total.t(), right.t(), left.t(), out_dtype=total.dtype, beta=beta, out=total.t())
    elif exact:
        right = right.to(total.dtype)
        for part, factor in zip(total.split(_EXACT_ROWS), left.split(_EXACT_ROWS), strict=True):
            part.addmm_(factor.to(total.dtype), right, beta=beta)
    else:
        add_to_sum(total if beta else total.zero_(), left @ right)


class _PutOff(torch.autograd.Function):
    """A linear layer whose backward computes the gradients of its input and bias, and puts that of its weight off, or
    adds it to its sum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: nn.Module, queue: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module, ctx.queue = module, queue
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors  # a checkpointed layer is computed again here
        rows = dy.reshape(-1, dy.shape[-1])
        x = x.detach().reshape(-1, x.shape[-1])  # detached: else what waits would keep the graph, down to the input
        if ctx.queue.keeps(ctx.module):
            ctx.queue.put([Product(ctx.module, rows)], x)
        else:
            ctx.queue.add(ctx.module, x, rows)
        bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        return dx, None, bias, None, None


class _Lookup(torch.autograd.Function):
    """Rows of an embedding, whose backward adds to those rows of the weight's sum and passes no others."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None, total: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.total = padding, total
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None, None]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        rows = dy.flatten(0, -2).to(ctx.total.dtype)
        if ctx.padding is not None:
            rows = rows.masked_fill((ids.flatten() == ctx.padding).unsqueeze(-1), 0.0)
        if ctx.total.is_cuda:  # sorted by row, so that equal steps have equal bits
            ctx.total.index_put_((ids.flatten(),), rows, accumulate=True)
        else:
            ctx.total.index_add_(0, ids.flatten(), rows)
        return None, None, None, None


class _Stacked(TorchFunctionMode):
    """Within it products of rows with a stack of weights have a backward that adds to the stack's sum."""

    def __init__(self, queue: WeightGradients):
        super().__init__()
        self._queue = queue

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch._grouped_mm and len(args) == 2 and args[1].dim() == 3:
            rows, weight = args
            stack = weight if weight._base is None else weight._base
            turned = weight.stride() == stack.mT.stride()
            whole = weight is stack or (turned and weight.shape == stack.mT.shape)
            more = {name for name, value in kwargs.items() if value is not None}
            if whole and stack.is_leaf and more == {"offs"} and self._queue.adds_to(stack):
                return _Grouped.apply(rows, stack, kwargs["offs"], weight is not stack, self._queue.sum_of(stack))
        return func(*args, **kwargs)


class _Grouped(torch.autograd.Function):
    """Rows (T, in) of each expert times its part of a stack (E, in, out), or of its transposed view; the backward adds
    to the stack's sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: Tensor, offs: Tensor, turned: bool, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, stack, offs)
        ctx.turned, ctx.total, ctx.ends = turned, total, readable_soon(offs)
        return torch._grouped_mm(x, stack.mT if turned else stack, offs=offs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None, None]:  # type: ignore[override]
        x, stack, offs = ctx.saved_tensors
        left, right = (dy, x) if ctx.turned else (x, dy)
        ends = ctx.ends()
        for part, start, end in zip(ctx.total.unbind(), (0, *ends[:-1]), ends, strict=True):
            if end > start:
                add_product(part, left[start:end].t(), right[start:end])
        weight = stack if ctx.turned else stack.mT
        return torch._grouped_mm(dy, weight, offs=offs) if ctx.needs_input_grad[0] else None, None, None, None, None


def accumulate_into(total: Tensor) -> Callable[[Tensor], None]:
    """Hook that sums a 16 bit gradient into FP32: many micro-batches would lose bits in 16."""

    def accumulate(parameter: Tensor) -> None:
        if parameter.grad is not None:  # else the backward has added it [Note: sums of products]
            add_to_sum(total, parameter.grad)
            parameter.grad = None

    return accumulate


def add_to_sum(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient to a sum in a wider type."""
    if total.is_cuda or gradient.numel() <= _ADDED_AT_ONCE:
        total.add_(gradient)
        return
    # Between types a CPU makes a wide copy first, which for embeddings would be the largest tensor of a backward.
    rows = max(1, _ADDED_AT_ONCE * len(gradient) // gradient.numel())
    for part, added in zip(total.split(rows), gradient.split(rows), strict=True):
        part.add_(added)


def _joined(factors: Sequence[tuple[Tensor, Tensor]], total: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of x and dy whose products are to be added to `total`: one pair for all where that is cheaper."""
    # A product of its own for each pair reads and writes the whole sum, and where types differ a temporary too. To
    # join them copies their tokens, so it pays for few tokens and large weights: with 2 micro-batches of 1024 tokens, a
    # weight of 4096 x 4096 and sums in FP32 of 16 bit products, a copy moves 64 MiB and a further product 192 MiB.
    bytes_copied = 2 * sum(x.nbytes + dy.nbytes for x, dy in factors)
    temporary = 0 if total.dtype == factors[0][0].dtype else total.numel() * factors[0][0].itemsize
    bytes_added = 2 * (total.nbytes + temporary)
    if len(factors) > 1 and bytes_copied < (len(factors) - 1) * bytes_added:
        yield torch.cat([x for x, _ in factors]), torch.cat([dy for _, dy in factors])
        return
    yield from factors


class Leaf(NamedTuple):
    """What autograd accumulates a gradient in: one parameter of a bucket, or a packed weight that covers several."""

    parameter: nn.Parameter
    slots: tuple[Slot, ...]
    view: Callable[[Tensor], Tensor]  # of a buffer in the bucket's order: the part that is this leaf's


class PackedLinears(nn.Module):
    """Children of a module, linear layers without biases that read the same rows, as one [Note: packed weights]."""

    weight: nn.Parameter | None

    def __init__(self, parent: nn.Module, layers: Mapping[str, nn.Module], linear: Linear):
        """`layers` by the master names of their weights; `linear` computes. Replaces the forwards of them all, and lets
        the parent's forget what they have made."""
        super().__init__()
        self.layers, self._linear = dict(layers), linear
        self.register_parameter("weight", None)  # until the weights are found side by side
        self.bias = None
        self._starts: list[int] = []
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []
        for index, layer in enumerate(self.layers.values()):
            wrap(layer, self._forward_of(index, layer.forward), "packed", "one of several")
        wrap(parent, self._forgetting(parent.forward), "packed", "forgets")

    def install(self, slots: Mapping[str, Slot], buffer: Tensor) -> Leaf | None:
        """Cover the weights in their bucket's buffer, if they lie one after the other there."""
        found = tuple(slots[name] for name in self.layers if name in slots)
        if len(found) < len(self.layers) or not _side_by_side(found):
            return None
        self._starts = [0, *accumulate(slot.shape[0] for slot in found)]
        first, shape = found[0].offset, (self._starts[-1], found[0].shape[1])

        def view(buffer: Tensor) -> Tensor:
            return buffer[first : first + shape[0] * shape[1]].view(shape)

        if self.weight is None:
            self.weight = nn.Parameter(view(buffer).data)
        else:
            self.weight.data = view(buffer).data
        return Leaf(self.weight, found, view)

    def parts(self, out: Tensor) -> tuple[Tensor, ...]:
        """What each layer makes, of what all of them make (..., features), which nobody else reads."""
        return parts_of(out, [stop - start for start, stop in pairwise(self._starts)])

    def _forward_of(self, index: int, alone: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(input: Tensor) -> Tensor:  # the name that callers of nn.Linear may use
            if self.weight is None:
                return alone(input)
            if input is not self._input:
                self._input, self._outputs = input, list(self.parts(self._linear(self, input, None)))
            out, self._outputs[index] = self._outputs[index], None
            if out is None:  # it runs twice
                return F.linear(input, self.weight[self._starts[index] : self._starts[index + 1]])
            return out

        return forward

    def _forgetting(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def forget(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            finally:
                self._input, self._outputs = None, []  # they hold activations

        return forget


def _side_by_side(slots: Sequence[Slot]) -> bool:
    """Whether weights (out, in), none of them transposed or frozen, follow each other without a gap."""
    plain = all(slot.param.rule.dim in (None, 0) and slot.param.rule.parts == 1 for slot in slots)
    trained = all(slot.param.trainable and slot.shape[1:] == slots[0].shape[1:] for slot in slots)
    return plain and trained and all(one.offset + one.numel == other.offset for one, other in pairwise(slots))
