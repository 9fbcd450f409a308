"""A copy of a model in; which modules of its layers let tokens meet, found by trying, out.

A module mixes if another token of what it returns changes with one token of what is computed for it. Where it raises
then, or returns no row of tokens, it is taken to mix. Nothing goes by names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_hydra.pipe.models.boxes import Box, Leaves, is_plain
from ds_hydra.pipe.models.cut import hand_on
from ds_hydra.pipe.models.flow import Door
from ds_hydra.pipe.models.graph import tensors_in

_COUNTS = (13, 11, 17, 19, 23)  # of tokens: one that is no size of a parameter
_NEAR = 1e-5  # other tokens that change by less, of the largest number, do not change
FIRST = 5  # token ids begin here


@dataclass
class Call:
    """The first call of a module in a run, and how many there were."""

    flat: Leaves
    spec: Any
    sources: tuple[int | None, ...]
    returned: Leaves = field(default_factory=list)
    returned_spec: Any = None
    times: int = 1


Calls = dict[tuple[int, str], Call]


class Mixers:
    """Tries the modules of a model's layers."""

    def __init__(self, model: Any, layers_path: str, doors: Sequence[Door], firsts: Sequence[int]):
        """`model` is a copy with values, in evaluation from here on; `firsts` tells of each layer which one is like
        it, and that one is tried for all [Note: kinds of layers]."""
        self.model, self.doors, self.firsts = model.eval(), doors, firsts
        self.path = layers_path
        self.layers: Sequence[nn.Module] = model.get_submodule(layers_path)
        self.kinds = sorted(set(firsts))
        for index in set(range(len(self.layers))) - set(self.kinds):
            self.layers[index].forward = hand_on(doors[index])  # type: ignore[method-assign]
        sizes = {size for parameter in model.parameters() for size in parameter.shape}
        self.tokens = next(count for count in _COUNTS if count not in sizes)
        self.device = next(model.parameters()).device
        self._noise = torch.Generator().manual_seed(3)

    def ids(self, length: int, first: int = FIRST) -> Tensor:
        """Token ids (1, length)."""
        return torch.arange(first, first + length, device=self.device)[None]

    def run(self, *, among: bool, **inputs: Any) -> Calls:
        """The calls of the layers, and `among` them of their children, in a run of all tokens."""
        calls: Calls = {}
        own: dict[int, tuple[int, ...]] = {}  # by layer: what it is handed, by identity
        handed_on: dict[int, Tensor] = {}  # what layers return beside the hidden states
        kept: list[Any] = []

        def before(index: int, path: str, args: Any, kwargs: Any) -> None:
            flat, spec = tree_flatten((args, kwargs))
            kept.append(flat)
            if not path:
                door = self.doors[index]
                hidden = args[door.key] if isinstance(door.key, int) else kwargs[door.key]
                foreign = [is_plain(value) or value is hidden or id(value) in handed_on for value in flat]
                own[index] = tuple(0 if out else id(value) for value, out in zip(flat, foreign, strict=True))
            if (index, path) in calls:
                calls[index, path].times += 1
                return
            places = own.get(index, ())
            sources = tuple(places.index(id(value)) if id(value) in places else None for value in flat)
            calls[index, path] = Call([_copied(value) for value in flat], spec, sources)

        def after(index: int, path: str, out: Any) -> None:
            if not path and not isinstance(out, Tensor):
                kept.append(out)
                handed_on.update((id(tensor), tensor) for tensor in tensors_in(list(out[1:])))
            call = calls[index, path]
            if call.times == 1:
                flat, call.returned_spec = tree_flatten(out)
                call.returned = [_copied(value) for value in flat]

        handles = []
        for index in self.kinds:
            children = self.layers[index].named_children() if among else ()
            for path, module in (("", self.layers[index]), *children):
                handles += [
                    module.register_forward_pre_hook(
                        lambda _, args, kwargs, index=index, path=path: before(index, path, args, kwargs),
                        with_kwargs=True,
                    ),
                    module.register_forward_hook(lambda _, __, out, index=index, path=path: after(index, path, out)),
                ]
        try:
            with torch.no_grad():
                self.model(input_ids=self.ids(self.tokens), use_cache=False, **inputs)
        finally:
            for handle in handles:
                handle.remove()
        return calls

    def module(self, index: int, path: str) -> nn.Module:
        """A module of a layer, or the layer."""
        return self.layers[index].get_submodule(path)

    def mixes(self, index: int, path: str, call: Call) -> bool:
        """Whether tokens meet in a module."""
        module, at = self.module(index, path), self.tokens // 2
        changed = []
        for value, source in zip(call.flat, call.sources, strict=True):
            dims = _dims(value, self.tokens)
            if source is None and len(dims) == 1 and value.is_floating_point():
                value = value.clone()
                row = value.select(dims[0], at)
                row += torch.randn(row.shape, generator=self._noise, dtype=torch.float64).to(row)
            changed.append(value)
        try:
            one, other = (called(module, call, flat) for flat in (call.flat, changed))
        except Exception:  # whatever a module makes of noise
            return True
        return _others_change(one, other, at, self.tokens)

    def mixes_without(self, index: int, paths: Sequence[str], calls: Calls) -> bool:
        """Whether tokens meet in a layer in which these children keep them apart."""
        saved = {}
        try:
            for path in paths:
                if (stub := self._stub(calls[index, path])) is None:
                    return True
                module = self.module(index, path)
                saved[path] = vars(module).get("forward")
                module.forward = stub  # type: ignore[method-assign]
            return self.mixes(index, "", calls[index, ""])
        finally:
            for path, forward in saved.items():
                put_back(self.module(index, path), forward)

    def _stub(self, call: Call) -> Callable[..., Any] | None:
        """What returns what a module returned, and lets each token's own change through; None where that cannot be."""
        tokens, out = self.tokens, call.returned[0] if call.returned else None
        mains = (
            place for place, (value, source) in enumerate(zip(call.flat, call.sources, strict=True))
            if source is None and len(_dims(value, tokens)) == 1 and value.is_floating_point()
        )  # fmt: skip
        main = next(mains, None)
        if main is None or not isinstance(out, Tensor) or len(_dims(out, tokens)) != 1:
            return None
        entering, leaving = _dims(call.flat[main], tokens)[0], _dims(out, tokens)[0]
        shape = [1] * out.dim()
        shape[leaving] = tokens

        def stub(*args: Any, **kwargs: Any) -> Any:
            now = tree_flatten((args, kwargs))[0][main]
            change = (now - call.flat[main]).movedim(entering, 0).flatten(1).mean(1)
            return tree_unflatten([out + change.view(shape), *call.returned[1:]], call.returned_spec)

        return stub

    def boxes(self, index: int, calls: Calls) -> tuple[Box, ...]:
        """The children of a layer that mix, if it mixes by them alone; else the layer."""
        paths = [path for path, _ in self.layers[index].named_children()]
        found = [path for path in paths if (index, path) in calls and self.mixes(index, path, calls[index, path])]
        whole = not found or any(calls[index, path].times > 1 for path in found)
        if whole or self.mixes_without(index, found, calls):
            return (self.box("", calls[index, ""]),)
        return tuple(self.box(path, calls[index, path]) for path in found)

    def box(self, path: str, call: Call) -> Box:
        """A module as a box."""
        handed, returned = ([_dims(value, self.tokens) for value in leaves] for leaves in (call.flat, call.returned))
        return Box(path, tuple(handed), call.sources, tuple(returned))


def put_back(module: nn.Module, forward: Any) -> None:
    vars(module).pop("forward", None)
    if forward is not None:
        module.forward = forward


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def called(module: nn.Module, call: Call, flat: Leaves) -> Leaves:
    """What a module returns of these values, called as it was."""
    args, kwargs = tree_unflatten([_copied(value) for value in flat], call.spec)
    with torch.no_grad():
        return tree_flatten(module(*args, **kwargs))[0]


def _dims(value: Any, tokens: int) -> tuple[int, ...]:
    """The dimensions of a tensor that count tokens."""
    return tuple(dim for dim, size in enumerate(value.shape) if size == tokens) if isinstance(value, Tensor) else ()


def _others_change(before: Leaves, after: Leaves, at: int, tokens: int) -> bool:
    """Whether another token than that `at` this place differs, or no tokens can be told apart."""
    seen = False
    rest = [token for token in range(tokens) if token != at]
    for one, other in zip(before, after, strict=True):
        dims = _dims(one, tokens)
        if len(dims) != 1 or not one.is_floating_point() or one.shape != other.shape:
            continue
        seen = True
        a, b = (value.index_select(dims[0], torch.tensor(rest, device=value.device)) for value in (one, other))
        if float((a - b).abs().max()) > _NEAR * max(1e-9, float(a.abs().max())):
            return True
    return not seen
