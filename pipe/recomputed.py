"""Layers that the backward computes again: what they keep of attention, and their modules in tiles of rows.

[Note: kept attention]
A layer that is computed again keeps its input. With long rows most of its second forward is attention, whose cost grows
with the square of the length, while what it makes does not: an output as wide as the queries, and a number for each
head, the log-sum-exp. A kernel's backward asks for these two beside queries, keys and values. So they may stay:

  forward         norm  q k v   attention            o  mlp     keeps the layer's input, out and log-sum-exp
  forward again   norm  q k v   out, log-sum-exp     o  mlp     attention is not run
  backward        of all of it, the kernel's own for attention

Each call of a kernel is one entry, first in, first out: a layer makes several where heads travel in groups, or where a
slice stands beside whole sequences. They lie beside the layer's forward that is to run again, and go with it. Where no
kernel tells its log-sum-exp, attention is run again: with a softcap, with dropout, of values narrower than keys, and on
GPUs in more than 16 bit.

Selective recomputation: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".

[Note: tiles]
The MLP of an 8B model is 3.5 times as wide as what enters it, and its backward holds several tensors of that width. It
computes each row by itself. So where a layer is computed again in the backward, it runs on some thousand rows at a
time, forward and backward:

  forward                       out[tile] = mlp(x[tile]) for each tile; nothing is kept
  backward, layer again         stops where the MLP begins, if nothing that keeps anything follows it
  backward of the MLP           for each tile: mlp(x[tile]) once more, its backward, dx[tile], and the weights'
                                gradients are added up

So the MLP is computed as often as without tiles, twice forward: torch's checkpoint ends its second run as soon as all
that was saved is there again, and the last that is saved is what enters the MLP. What computes it in the backward is
not in the layer's graph. Ranks that share tokens gather and scatter the rows of a tile alone, so their buffers are
small, too (Jacob et al. 2025, "Arctic Long Sequence Training", sequence tiling). So do the linear layers around
attention, which tensor parallel ranks gather all rows for: of an 8B model 8 KiB a token, and as much for the gradient.

Weights' gradients of tiles are added up in FP32 at least and rounded once, as one product over all rows is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.pipe.weight_gradients import PackedLinears
from ds_hydra.pipe.wrappers import wrap

_pass = threading.local()


@contextmanager
def computed_again() -> Iterator[None]:
    """Within it, in this thread, a layer runs that its backward computes again, the first time or the second."""
    before, _pass.again = getattr(_pass, "again", False), True
    try:
        yield
    finally:
        _pass.again = before


def runs_again() -> bool:
    """Whether such a layer runs in this thread."""
    return getattr(_pass, "again", False)


Made = deque[tuple[Tensor, ...]]
_watching: list[Callable[[Tensor], object]] = []


@contextmanager
def kept_in(made: Made | None, *, again: bool) -> Iterator[None]:
    """Within it, in this thread, a layer runs of whose attention is kept what `made` has, which it fills, or takes when
    it runs `again`; None: nothing is kept."""
    before, _pass.now = getattr(_pass, "now", None), None if made is None else (made, again)
    try:
        yield
    finally:
        _pass.now = before


def is_kept() -> bool:
    """Whether a layer runs in this thread of which attention's output is kept."""
    return getattr(_pass, "now", None) is not None


def made_once(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What `compute` makes, outside of autograd; where a layer runs again, what it has made the first time."""
    if not is_kept():
        return compute()
    made, again = _pass.now
    if again:
        return made.popleft()  # type: ignore[no-any-return]
    found = compute()
    # Apart from autograd: what a graph holds must not hold the graph.
    made.append(tuple(one.detach() for one in found))
    for told in _watching:
        for one in found:
            told(one)
    return found


@contextmanager
def watched(told: Callable[[Tensor], object]) -> Iterator[None]:
    """Within it `told` is called with each tensor that is kept; for whoever counts bytes."""
    _watching.append(told)
    try:
        yield
    finally:
        _watching.remove(told)


TILE_ROWS = 4096  # of all ranks that share tokens; few launches beside the work, and small beside long rows


@contextmanager
def of_rows(rows: int) -> Iterator[None]:
    """Within it tiles have so many rows."""
    global TILE_ROWS
    before, TILE_ROWS = TILE_ROWS, rows
    try:
        yield
    finally:
        TILE_ROWS = before


def rows_of_tile(x: Tensor, shards: int) -> int:
    """Of how many rows a tile of x (1, T, H) is where a layer runs that is computed again; 0: all run together. So many
    `shards` share the tokens."""
    rows = max(1, TILE_ROWS // shards)
    apart = x.requires_grad and x.dim() == 3 and len(x) == 1 and x.shape[-2] > rows
    return rows if apart and runs_again() and torch.is_grad_enabled() else 0


def install_tiles(module: nn.Module, packed: Sequence[PackedLinears], shards: int) -> None:
    """Let a module x (1, T, H) -> (1, T, H) that computes rows by themselves run in tiles where its layer is computed
    again. `packed`: linear layers of it that are computed as one; `shards`: ranks that share the tokens."""
    forward: Callable[..., Any] = module.forward

    def leaves() -> Iterator[nn.Parameter]:
        together = {layer for each in packed if each.weight is not None for layer in each.layers.values()}
        yield from (each.weight for each in packed if each.weight is not None)
        for one in module.modules():
            yield from () if one in together else one.parameters(recurse=False)

    def in_tiles(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or not (rows := rows_of_tile(x, shards)):
            return forward(*args, **kwargs)
        trained = [leaf for leaf in leaves() if leaf.requires_grad]
        entered: list[Any] = []  # the node of autograd that keeps what has entered
        return _Tiles.apply(_Keep.apply(x, entered), entered, forward, rows, *trained)

    wrap(module, in_tiles, "in tiles")


class _Keep(torch.autograd.Function):
    """Hands rows on, and keeps them: the last that a layer keeps which is computed again up to here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, entered: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        entered.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dy, None


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, entered: list[Any], module: Callable[[Tensor], Tensor], rows: int, *leaves: nn.Parameter
    ) -> Tensor:
        ctx.entered, ctx.module, ctx.rows, ctx.leaves = entered, module, rows, leaves
        out = torch.empty_like(x)
        for part, made in zip(x.split(rows, -2), out.split(rows, -2), strict=True):
            made.copy_(module(part))
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # Where the layer is computed again, asking for what was saved computes it up to here.
        (x,), leaves = ctx.entered.pop().saved_tensors, ctx.leaves
        dx = torch.empty_like(x)
        sums: list[Tensor | None] = [None] * len(leaves)
        for part, given, made in zip(*(one.split(ctx.rows, -2) for one in (x, dy, dx)), strict=True):
            entered = part.detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.module(entered)
            found, *of_leaves = torch.autograd.grad(out, (entered, *leaves), given, allow_unused=True)
            made.copy_(found)
            sums = [_added(total, new) for total, new in zip(sums, of_leaves, strict=True)]
        rounded = (None if total is None else total.to(leaf.dtype) for total, leaf in zip(sums, leaves, strict=True))
        return dx, None, None, None, *rounded


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """The sum of gradients, in FP32 at least; None: no gradient so far."""
    if gradient is None:
        return total
    if total is None:  # a bias' may be a view of what came
        return gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=gradient.dim() < 2)
    return total.add_(gradient)
