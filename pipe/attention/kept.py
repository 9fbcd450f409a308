"""What attention has made in a layer's forward, handed back when the backward runs that forward again.

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
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

Made = deque[tuple[Tensor, ...]]
_pass = threading.local()
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
