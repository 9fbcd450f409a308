"""What tensors were computed from: nested arguments or autograd graphs in, tensors or parameters out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_DEPTH = 5  # containers within containers that are looked into
_ONE = frozenset({Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device})


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers and plain objects (a dict that layers share, a model output), in order."""
    yield from _tensors(value, 0, set())


def _tensors(value: Any, depth: int, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if depth > _DEPTH or id(value) in seen or isinstance(value, nn.Module | type | str | bytes):
        return
    seen.add(id(value))
    parts: Iterable[Any] = ()
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = value
    elif hasattr(value, "__dict__"):
        parts = list(vars(value).values())
    for part in parts:
        yield from _tensors(part, depth + 1, seen)


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Any]:
    """`tree_leaves` of a function's arguments, which are hardly ever nested: then it takes a tenth of the time. Modes
    ask it for each operator of a model that is looked at."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) in _ONE:
            found.append(value)
        else:
            found += tree_leaves(value)
    return found


def leaves(roots: Iterable[Tensor]) -> set[int]:
    """Identities of the leaf tensors that require gradients and that `roots` were computed from."""
    roots = list(roots)
    found = {id(root) for root in roots if root.is_leaf and root.requires_grad}
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # the node that accumulates into a leaf
            found.add(id(node.variable))
        stack += [before for before, _ in node.next_functions if before is not None]
    return found


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
    """Position or keyword of the hidden states among a layer's arguments: its first floating tensor of tokens."""
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in given:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 3:
            return key
    return None
