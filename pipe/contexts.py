"""Keeps keys and values of a sequence's earlier slices for the later ones, and sums up their gradients.

[Note: contexts]
A long sequence may run in slices, each in a micro-batch of its own. The tokens of a slice attend to all tokens before
them, so every layer keeps the keys and values of a sequence until its last slice has run, in a `Context`. With the
slices 0..4, 4..6 and 6..9 of a sequence of 9 tokens:

  forward of 0..4    writes rows 0..4    attends to rows 0..4
  forward of 4..6    writes rows 4..6    attends to rows 0..6
  forward of 6..9    writes rows 6..9    attends to rows 0..9

A row's gradient comes from all slices that attended to it. If the backwards run in the reverse order, the gradients of
a slice's own rows are complete when its backward comes, since all later slices have added theirs:

  backward of 6..9   adds to rows 0..9   hands on rows 6..9
  backward of 4..6   adds to rows 0..6   hands on rows 4..6
  backward of 0..4   adds to rows 0..4   hands on rows 0..4; nobody needs the context any more

So a slice's backward is an ordinary one that begins with what it handed on, and autograd knows of no other slice. In
any other order the gradients would be wrong without a sign of it, so an order that is not the reverse is refused.

[Note: reach]
Where tokens see only some of those before them, a slice is handed only rows in its reach. With a window of 3 tokens:

  forward of 0..4    writes rows 0..4    attends to rows 0..4
  forward of 4..6    writes rows 4..6    attends to rows 2..6
  forward of 6..9    writes rows 6..9    attends to rows 4..9

With chunks of 4 tokens the last two attend to rows 4..6 and 4..9. What a slice attends to stays for its backward, where
its layer is not computed again. Where it is, or no backward comes, only what the next slice is handed stays: the two
last rows of each slice, however long it is. So that neighbours that stay need not be copied, they lie in one piece of
memory of several reaches; a slice that begins a new piece copies the rows in its reach.

The idea of slices with the keys and values of those before: Li et al. 2021 (TeraPipe); backwards in reverse order: Sun
et al. 2024 (Seq1F1B).

[Note: carried states]
Of the tokens before a slice a recurrence needs a state of one size, however many they were, and a convolution its last
few inputs. Both are what the slice before has ended with, so each module keeps them in a `Carried` where attention
keeps keys and values [Note: contexts]. With the slices 0..4, 4..6 and 6..9 of a sequence of 9 tokens:

  forward of 0..4    begins with nothing                      keeps what it ends with, for 4
  forward of 4..6    begins with what is kept for 4           keeps what it ends with, for 6
  forward of 6..9    begins with what is kept for 6           ends the sequence: nothing is kept

  backward of 6..9   leaves the gradient of what it began with, at 6
  backward of 4..6   begins with the gradients of its outputs and with what is left at 6; leaves a gradient at 4
  backward of 0..4   begins with those of its outputs and with what is left at 4

What a slice begins with is a leaf of its graph, so autograd knows of no other slice, and the backwards must run in the
reverse order. A layer that is computed again begins with the same: what is kept for a slice stays until the slice
before has had its backward.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_hydra.pipe.on_host import HostRows, HostStore
from ds_hydra.pipe.recomputed import runs_again
from ds_hydra.pipe.rows import ALL, Reach
from ds_hydra.zero_hetero.errors import PlanError

States = Mapping[Hashable, Tensor]


def _refuse_another_order(start: int, stop: int, total: int, due: int, what: str) -> None:
    """PlanError for the backward of a slice when that of the one up to `due` must come."""
    if stop != due:
        raise PlanError(
            f"the backward of the tokens {start} to {stop} of a sequence of {total} runs when that of the slice up to "
            f"{due} is due: {what} would be wrong. A schedule must run the backwards of the slices of a sequence in "
            "reverse order"
        )


class Carried:
    """The states of a sequence in one module, and their gradients [Note: carried states].

    Sequence parallel ranks all compute the slice, and each has the gradients that come from its own tokens.
    """

    def __init__(self, total: int):
        self.total = total
        self._kept: dict[int, dict[Hashable, Tensor]] = {}  # by the token at which a slice begins
        self._gradients: dict[int, dict[Hashable, Tensor]] = {}
        self._open = total  # the next backward is that of the slice that stops here

    def take(self, start: int) -> dict[Hashable, Tensor]:
        """What a slice that begins at `start` begins with, leaves of its graph; empty for the first.

        Raises PlanError where the slice before has not run.
        """
        if not start:
            return {}
        if start not in self._kept:
            raise PlanError(
                f"a slice of a sequence of {self.total} tokens begins at token {start}, where no slice that has run "
                f"ends; states are kept for {sorted(self._kept) or 'none'}: a schedule must run slices in order"
            )
        return {key: self._leaf(start, key, value) for key, value in self._kept[start].items()}

    def _leaf(self, start: int, key: Hashable, value: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and value.is_floating_point()):
            return value.clone()  # code without gradients may write where it reads
        leaf = value.detach().requires_grad_()
        leaf.register_hook(partial(self._left, start, key))
        return leaf

    def _left(self, start: int, key: Hashable, gradient: Tensor) -> None:
        self._gradients.setdefault(start, {})[key] = gradient

    def hand_on(self, out: Tensor, states: States, start: int, stop: int) -> Tensor:
        """Keep what the slice `start` to `stop` ends with; `out`, of which everything that follows is computed, back.

        The backward of what is returned adds the gradients that the next slice has left. It raises PlanError where
        that slice's backward has not run.
        """
        if stop == self.total:
            states = {}
        if stop < self._open:  # a layer that is computed again in its backward comes too late for the next slice
            self._kept[stop] = {key: value.detach().clone() for key, value in states.items()}
        handed: Tensor = _HandOn.apply(out, self, start, stop, tuple(states), *states.values())
        return handed

    def bytes_at(self, start: int) -> int:
        """Bytes of what a slice that begins at `start` begins with."""
        return sum(value.nbytes for value in self._kept.get(start, {}).values())

    def left_at(self, start: int, stop: int) -> dict[Hashable, Tensor]:
        """The gradients of what the slice `start` to `stop` ended with, in its backward."""
        _refuse_another_order(start, stop, self.total, self._open, "the gradients of its states")
        self._open = start
        self._kept.pop(stop, None)
        return self._gradients.pop(stop, {})


class _HandOn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, carried: Carried, start: int, stop: int, keys: tuple[Hashable, ...], *states: Tensor
    ) -> Tensor:
        ctx.carried, ctx.start, ctx.stop, ctx.keys = carried, start, stop, keys
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        left = ctx.carried.left_at(ctx.start, ctx.stop)
        return gradient, None, None, None, None, *(left.get(key) for key in ctx.keys)


_PIECE = 8  # reaches: of rows that stay an eighth is copied, at most


class Context:
    """Keys and values of a sequence in one layer, and the sums of their gradients [Note: contexts].

    Under Ulysses a rank keeps all tokens of its own heads, each group of them in a context of its own; under tensor
    parallelism its own heads too.
    """

    def __init__(self, total: int, away: Away | None = None):
        """`away`: where rows that all later slices attend to wait for them on the host, if they do."""
        self.total, self._away = total, away
        self._rows: tuple[Tensor, ...] = ()  # keys and values (tokens, kv_heads, d) that lie together
        self._rows_from, self._rows_to = 0, 0  # the first of these tokens, and the end of those that are there
        self._before: dict[int, tuple[Tensor, ...]] = {}  # what a slice that begins at a token is handed
        self._sums: tuple[Tensor, ...] = ()  # of their gradients, of those tokens that may still get more
        self._sums_from = 0  # the first of these tokens
        self._written = 0  # tokens whose keys and values have been there
        self._open = total  # the next backward is that of the slice that stops here
        self._groups: dict[int, Context] = {}

    def of_group(self, number: int) -> Context:
        """That of one group of key/value heads, where they are computed group by group [Note: exchange in groups]."""
        if number and number not in self._groups:
            self._groups[number] = Context(self.total, None if self._away is None else self._away.beside())
        return self._groups[number] if number else self

    def join(self, k: Tensor, v: Tensor, start: int, reach: Reach = ALL) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of a slice, and return those that its tokens may attend to.

        k (s, kv_heads, d) and v (s, kv_heads, d_v) of the tokens from `start` on -> the rows of the tokens
        reach.first(start), ..., start + s - 1. Raises PlanError for slices out of order, also in the backward.
        """
        joined: tuple[Tensor, Tensor] = _Join.apply(k, v, self, start, reach, torch.is_grad_enabled())
        return joined

    def write(self, own: tuple[Tensor, ...], start: int, reach: Reach, *, backward: bool) -> tuple[Tensor, ...]:
        """Keep the rows of a slice, of which a `backward` comes or not, and return all rows in reach up to its end."""
        stop, first = start + len(own[0]), reach.first(start)
        if start > self._written:
            raise PlanError(
                f"tokens {start} to {stop} of a sequence of {self.total} run forward when only {self._written} tokens "
                "have: a schedule must run the slices of a sequence in order"
            )
        is_first = stop > self._written
        self._written = max(self._written, stop)  # a layer that is recomputed writes the same rows again
        if reach.most is None and self._away is not None:
            return self._away.written(own, start, self.total, is_first=is_first)
        if reach.most is None:
            return self._placed(own, start, 0, self.total)
        before = self._before.get(start, ()) if backward else self._before.pop(start, ())
        stays = backward and not runs_again()
        if stays or (is_first and len(own[0]) <= reach.most):
            rows = self._placed(
                own, start, first, max(stop - first, min(self.total - first, _PIECE * reach.most)), before
            )
        else:
            rows = tuple(torch.cat(parts) for parts in (zip(before, own, strict=True) if before else zip(own)))
        if is_first and stop < self.total:
            handed = tuple(x[reach.first(stop) - first :] for x in rows)
            self._before[stop] = handed if stays or len(own[0]) <= reach.most else tuple(x.clone() for x in handed)
        return rows

    def _placed(
        self, own: tuple[Tensor, ...], start: int, first: int, size: int, before: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        """The rows from `first` to a slice's end, which has been put behind those that are there, or behind what it is
        handed, in a piece of memory of `size` rows."""
        stop = start + len(own[0])
        if not self._rows or first < self._rows_from or stop > self._rows_from + len(self._rows[0]):
            self._rows = tuple(x.new_empty(size, *x.shape[1:]) for x in own)
            self._rows_from = self._rows_to = first
        # `.data` has a version of its own: later slices write below what autograd keeps for the backward of this one.
        for rows, x in zip(self._rows, own, strict=True):
            rows.data[start - self._rows_from : stop - self._rows_from] = x
        if start > self._rows_to:
            for rows, x in zip(self._rows, before, strict=True):
                rows.data[first - self._rows_from : start - self._rows_from] = x
        self._rows_to = max(self._rows_to, stop)
        return tuple(rows.data[first - self._rows_from : stop - self._rows_from] for rows in self._rows)

    def add(self, gradients: tuple[Tensor, ...], start: int, first: int) -> tuple[Tensor, ...]:
        """Add the gradients of the rows from `first` to a slice's end; return those of its own rows, now complete."""
        stop = first + len(gradients[0])
        _refuse_another_order(start, stop, self.total, self._open, "its gradients")
        self._open = start
        # In FP32 at least: many slices may add to a row, and each sum in 16 bit would lose bits.
        if self._away is not None and self._away.used:
            return self._away.added(gradients, start, self.total)
        sums, before = self._sums, self._sums_from
        if not sums or before != first:  # with a window: of the rows that this slice saw, and no others
            sums = tuple(
                torch.zeros(len(x), *x.shape[1:], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
                for x in gradients
            )
            for total, seen in zip(sums, self._sums, strict=bool(self._sums)):
                total[before - first :] += seen[: stop - before]
        for total, x in zip(sums, gradients, strict=True):
            total[: stop - first] += x
        own = tuple(total[start - first : stop - first].to(x.dtype) for total, x in zip(sums, gradients, strict=True))
        # With a window only the rows that slices before may add to are kept; without one they stay where they are, as
        # all of them are.
        self._sums = tuple(total[: start - first].clone() for total in sums) if first else sums
        self._sums_from = first
        if self._before or start == 0:  # what stays of it, others hold
            self._rows = ()
        self._before.pop(start, None)
        if start == 0:
            self._sums = ()
        return own


class Away:
    """Rows of one context on the host [Note: fetched layers]: keys and values of earlier slices, and the sums of their
    gradients. They come back while the layer before computes, in whichever direction the layers run."""

    def __init__(self, store: HostStore, order: list[Away]):
        """`order`: of all contexts of a sequence, in that in which a forward comes to them."""
        self._store, self._order, self._place = store, order, len(order)
        self._rows, self._sums = HostRows(store), HostRows(store)
        self.used = False
        order.append(self)

    def beside(self) -> Away:
        """Another one of the same sequence."""
        return Away(self._store, self._order)

    def written(self, own: tuple[Tensor, ...], start: int, total: int, *, is_first: bool) -> tuple[Tensor, ...]:
        """All rows up to a slice's end, of which its own are kept for later slices in its first run."""
        self.used = True
        before = self._rows.take(start) if start else []
        self._next(1 if is_first else -1, start, start + len(own[0]))
        if is_first and start + len(own[0]) < total:
            self._rows.keep([x.detach() for x in own], start, total)
        return tuple(map(torch.cat, zip(before, own, strict=True))) if before else tuple(x.clone() for x in own)

    def added(self, gradients: tuple[Tensor, ...], start: int, total: int) -> tuple[Tensor, ...]:
        """As `Context.add`."""
        stop = len(gradients[0])
        sums = self._sums.take(stop) if stop < total else []
        if not sums:
            sums = [x.to(torch.promote_types(x.dtype, torch.float32), copy=True) for x in gradients]
        else:
            for one, x in zip(sums, gradients, strict=True):
                one += x
        if start:
            self._sums.keep([one[:start] for one in sums], 0, total)
        else:
            self.free()
        return tuple(one[start:].to(x.dtype) for one, x in zip(sums, gradients, strict=True))

    def free(self) -> None:
        """Give all memory back."""
        self._rows.free()
        self._sums.free()

    def _next(self, side: int, start: int, stop: int) -> None:
        """Begin to bring what the neighbour needs, if it is there: a neighbour in the other part of a V may be behind,
        and a sum is complete when the slice that follows has just added to it."""
        if 0 <= self._place + side < len(self._order):
            other = self._order[self._place + side]
            if other._rows.end >= start:
                other._rows.fetch(start)
            if side < 0 and other._sums.end == stop:
                other._sums.fetch(stop)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, context: Context, start: int, reach: Reach, backward: bool
    ) -> tuple[Tensor, ...]:
        ctx.context, ctx.start, ctx.first = context, start, reach.first(start)
        return context.write((k, v), start, reach, backward=backward)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.context.add(gradients, ctx.start, ctx.first), None, None, None, None


class Contexts:
    """All contexts of one sequence on one rank: one for each module that attends, or that carries a state."""

    def __init__(self, total: int):
        """`total` tokens has the sequence."""
        self.total = total
        self.store: HostStore | None = None  # where keys and values wait for later slices, if they do
        self._order: list[Away] = []
        self._of: dict[Hashable, Context] = {}
        self._beside: dict[Hashable, dict[int, Tensor]] = {}
        self._carried: dict[Hashable, Carried] = {}

    def note_heads(self, heads: int, kv_heads: int) -> None:
        """Told of every module that attends; for whoever wants to know."""

    def of(self, module: Hashable) -> Context:
        """The context of a module, which must attend once in each forward of a slice."""
        if module not in self._of:
            self._of[module] = Context(self.total, None if self.store is None else Away(self.store, self._order))
        return self._of[module]

    def carried(self, module: Hashable) -> Carried:
        """What a recurrent module carries from slice to slice [Note: carried states]."""
        return self._carried.setdefault(module, Carried(self.total))

    def beside(self, key: Hashable) -> dict[int, Tensor]:
        """What slices keep for each other beside keys and values, by the position of a slice's first token."""
        return self._beside.setdefault(key, {})

    def free(self) -> None:
        """Give all memory back: no slice of the sequence will run any more."""
        for away in self._order:
            away.free()
        self._of.clear()
        self._order.clear()
        self._beside.clear()
        self._carried.clear()
