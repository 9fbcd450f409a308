"""Runs one stage's layers by the whole model's own forward, and layers again in the backward.

[Note: cutting by the forward]
The model's own forward runs in every stage. Layers before the stage's first hand on what they are given, and the last
of them returns what was received from the stage before; so whatever a model does between two layers is done once, by
the receiver. What the embeddings would have computed is replaced by placeholders of its shape, which nobody reads.
After the stage's last layer an exception leaves the forward. For layers 2 and 3 of 5:

    embeddings        layer 0   layer 1               layer 2   layer 3
    placeholders  ->  hand on   returns the received  computes  computes, then `ForwardEnded` ends the forward

No layer, norm or embedding needs a name for this, and nothing that follows the layers exists in an earlier stage.

[Note: recomputed layers]
A layer that the backward computes again keeps its input from forward to backward, and no more. How many do so is up to
each micro-batch: a plan gives it a share, which every stage rounds up to whole layers of its own. Of 7 layers a share
of 0.5 takes the first 4:

  forward    0 1 2 3 keep their input    4 5 6 keep all
  backward   6 5 4                       3 2 1 0, each computed again just before

The first ones and not the last: when their backward comes, what the layers above them kept is free already, and gives
the room for what one layer keeps while it is computed again.

Models do other things behind their layers: they scale logits, cap them, add a bias, drop parts of what enters the head.
No attribute tells of all that. So the model's own forward runs with one token in front of a head that computes nothing
and hands out a stand-in for logits. If the head was called once, with the very values that entered the forward, and the
stand-in has come out without any operation on it, then nothing else is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ds_hydra.pipe.models.flow import Door, Flow
from ds_hydra.pipe.models.whose_code import HOOKS
from ds_hydra.pipe.on_host import HostStore
from ds_hydra.pipe.placement import Stage, whole_layers
from ds_hydra.pipe.recomputed import Made, computed_again, kept_in
from ds_hydra.pipe.tensor_parallel import is_linear
from ds_hydra.pipe.wrappers import wrap

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""What a forward, and the same forward once more, run in: `context_fn` of torch's `checkpoint`."""


class Recomputing:
    """Of the layers of a stage, the first few are computed again in the backward [Note: recomputed layers]."""

    def __init__(
        self,
        layers: int,
        contexts: Contexts = noop_context_fn,
        store: HostStore | None = None,
        doors: Sequence[Door] = (),
        *,
        attention: bool = False,
    ):
        """The inputs of layers, which enter at `doors`, wait in `store`, if there is one [Note: fetched layers];
        `attention`: what it makes is kept [Note: kept attention]."""
        self._layers, self._first, self._contexts, self._store, self._doors = layers, 0, contexts, store, doors
        self._attention = attention

    def take(self, share: float) -> None:
        """From now on, this share of the layers is computed again; none to begin with."""
        self._first = whole_layers(share, self._layers)
        if self._store is not None:
            self._store.begin()

    def run(self, place: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the forward of the layer at a place returns."""
        if place >= self._first or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self._store is not None:
            key = self._doors[place].key
            # What another stage has sent stays: its gradient is sent back.
            if isinstance(key, int) and not (args[key].is_leaf and args[key].requires_grad):
                forward, args = _fetching(self._store, args[key], forward, key), (*args[:key], *args[key + 1 :])
        return checkpoint(forward, *args, use_reentrant=False, context_fn=self._passes, **kwargs)

    def _passes(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = self._contexts()
        made: Made | None = deque() if self._attention else None
        return _within(first, kept_in(made, again=False)), _within(again, kept_in(made, again=True))

    def install(self, layers: Iterable[nn.Module]) -> None:
        """Let all layers of the stage, in order, run so."""
        for place, layer in enumerate(layers):
            # The forward, and not the call: hooks of the layer itself run once, as whoever set them expects, and one
            # of them ends the whole forward [Note: cutting by the forward].
            wrap(layer, partial(self.run, place, layer.forward), "recomputed")


def _fetching(store: HostStore, hidden: Tensor, forward: Callable[..., Any], key: int) -> Callable[..., Any]:
    """The forward of a layer without its argument at position `key`, which is there at first, and fetched then."""
    waiting, asks, first = store.put(hidden), hidden.requires_grad, [hidden]

    def run(*args: Any, **kwargs: Any) -> Any:
        entered = first.pop() if first else waiting.take().requires_grad_(asks)
        return forward(*args[:key], entered, *args[key:], **kwargs)

    return run


@contextmanager
def _within(given: AbstractContextManager[Any], kept: AbstractContextManager[Any]) -> Iterator[None]:
    with computed_again(), kept, given:
        yield


class PlainHead:
    """A linear layer without a bias, whose calls nobody watches."""

    def __init__(self, head: nn.Linear):
        self._head = head

    @classmethod
    def of(cls, model: nn.Module, head: nn.Module) -> PlainHead | None:
        """Of a head as the user has written it, before anything is installed in the model; None if it is another."""
        watched = any(getattr(module, key) for module in (model, head) for key in HOOKS)
        if watched or not isinstance(head, nn.Linear) or not is_linear(head) or head.bias is not None:
            return None
        return cls(head)

    @property
    def weight(self) -> Tensor:
        """(V_local, H)"""
        return self._head.weight

    def is_all(self, hidden: Tensor, run: Callable[[], Tensor]) -> bool:
        """Whether `run`, the model's forward behind its layers with hidden states (1, 1, H), is the head alone."""
        entered: list[Tensor] = []
        made = _StandIn.of(hidden, len(self.weight))

        def head(x: Tensor) -> Tensor:
            entered.append(x)
            return made

        before = self._head.__dict__.get("forward")
        self._head.forward = head  # type: ignore[method-assign,assignment]
        version = hidden._version
        try:
            out = run()
        finally:
            del self._head.forward
            if before is not None:
                self._head.forward = before  # type: ignore[method-assign]
        same = len(entered) == 1 and _place(entered[0]) == _place(hidden) and hidden._version == version
        return same and out is made and not made.touched


class _StandIn(Tensor):
    """Logits (1, 1, V_local) of any values, which note that something was computed with them."""

    touched: bool

    @staticmethod
    def of(hidden: Tensor, vocabulary: int) -> _StandIn:
        made = hidden.new_empty((1, 1, vocabulary)).as_subclass(_StandIn)
        made.touched = False
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # attributes such as shape, dtype and device
            for one in args:
                if isinstance(one, _StandIn):
                    one.touched = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Which bytes a tensor is made of, and how."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


_NUMBERS = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__"})
_COLLECTIVES = dist.all_reduce.__module__
_QUESTIONS = frozenset({"size", "dim", "numel", "stride", "element_size", "__len__", "is_floating_point", "nelement"})


class ForwardEnded(BaseException):
    """Ends a model's forward with what was wanted of it. Not an `Exception`: a model's own handlers must not swallow
    it."""

    def __init__(self, value: Any = None):
        super().__init__()
        self.value = value


class Placeholders(TorchFunctionMode):
    """Within it, whatever is computed with a parameter on the meta device is a real tensor of its shape, of zeros."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, structure = tree_flatten((args, kwargs))
        if not any(isinstance(value, Tensor) and value.is_meta for value in flat):
            return func(*args, **kwargs)
        if getattr(func, "__module__", "") == _COLLECTIVES:  # of ranks that all have nothing to tell
            return None
        if func is Tensor.device.__get__:  # type: ignore[attr-defined]
            return self.device
        if getattr(func, "__name__", "") in _QUESTIONS or getattr(func, "__name__", "") == "__get__":
            answer = func(*args, **kwargs)
            if not isinstance(answer, Tensor):
                return answer
        if getattr(func, "__name__", "") in _NUMBERS:  # what the placeholders would answer
            zeros = [torch.zeros(v.shape, dtype=v.dtype) if isinstance(v, Tensor) else v for v in flat]
            given, named = tree_unflatten(zeros, structure)
            return func(*given, **named)
        meta_args, meta_kwargs = tree_unflatten([self._on_meta(value) for value in flat], structure)
        with torch.no_grad():
            return tree_map(self._real, func(*meta_args, **meta_kwargs))

    @staticmethod
    def _on_meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to("meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    def _real(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        return torch.zeros(value.shape, dtype=value.dtype, device=self.device)


class CutForward:
    """Runs one stage's part of a model's own forward [Note: cutting by the forward]."""

    def __init__(self, model: Any, flow: Flow, layers_path: str, stage: Stage, device: torch.device):
        """`model` is changed in place: its layers before the stage hand on, its last local one ends the forward."""
        self.model, self._flow = model, flow
        self.beside: dict[str, Any] = {}  # what the model is handed of a micro-batch beside its tokens
        self._received: Tensor | None = None
        self._placeholders: Placeholders | None = None
        self._capturing = False
        self._device = device
        self._first, self._last = stage.first_layer, stage.last_layer
        layers: Sequence[nn.Module] = model.get_submodule(layers_path)
        for index in range(self._first):
            _clear_hooks(layers[index])
            last = index == self._first - 1
            wrap(layers[index], hand_on(flow.doors[index], self._enter if last else None), "handed on")
        body: nn.Module = model.get_submodule(flow.body)
        ending = body if self._last == len(layers) else layers[self._last - 1]
        ending.register_forward_hook(_reach)

    def __call__(self, received: Tensor | None, *, hollow: bool = False, **inputs: Any) -> Any:
        """What the stage's last layer, or the model below its head, returns. `hollow`: what comes before the stage's
        layers is not computed, and its results are on the meta device; the first layer's door calls `leave`."""
        self._received = received
        try:
            if self._first or hollow:
                self._placeholders = Placeholders(torch.device("meta") if hollow else self._device)
                self._placeholders.__enter__()
            self.model(**{**inputs, **self.beside})
        except ForwardEnded as ended:
            return ended.value
        finally:
            self.leave()
            self._received = None
        raise AssertionError(f"{type(self.model).__name__} did not run {self._flow.body}, as it did when traced")

    def capture(self, **inputs: Any) -> None:
        """Run the model for what its layers are handed; who asks ends the forward by an exception."""
        self._capturing = True
        try:
            with Placeholders(self._device) if self._first else nullcontext():
                self.model(**inputs)
        finally:
            self._capturing = False

    def _enter(self, hidden: Any) -> Any:
        """What the layer before the stage's first hands on."""
        if self._capturing:
            return hidden
        self.leave()
        return self._received

    def leave(self) -> None:
        """From here on everything is computed."""
        if self._placeholders is not None:
            self._placeholders.__exit__(None, None, None)
            self._placeholders = None


def hand_on(door: Door, replaced: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
    """The forward of a layer that does nothing: it hands on what it is given, or what takes its place."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        hidden = door.hidden(args, kwargs)
        hidden = hidden if replaced is None else replaced(hidden)
        if door.returned is None:
            return hidden
        kind, length = door.returned
        return kind((hidden, *[None] * (length - 1)))

    return stand_in


def _reach(module: nn.Module, args: Any, out: Any) -> None:
    raise ForwardEnded(out)


def _clear_hooks(module: nn.Module) -> None:
    """A layer of another stage runs none of the user's hooks; those within it never run."""
    for key, value in vars(module).items():
        if key.endswith("_hooks") and isinstance(value, dict):
            value.clear()


def hidden_in(out: Any) -> Tensor:
    """The hidden states in what a layer or the model below the head returned."""
    hidden = out if isinstance(out, Tensor) else out[0]
    assert isinstance(hidden, Tensor), "the trace found hidden states in front"
    return hidden


def to_wire(hidden: Tensor, door: Door) -> Tensor:
    """Hidden states as stages send them: (1, T, features)."""
    if door.token_dim == 1 and len(door.shape) == 2:
        return hidden
    return hidden.movedim(door.token_dim, 0).flatten(1).unsqueeze(0)


def from_wire(wire: Tensor, door: Door) -> Tensor:
    """Inverse of `to_wire`."""
    if door.token_dim == 1 and len(door.shape) == 2:
        return wire
    return wire.squeeze(0).unflatten(1, door.shape).movedim(0, door.token_dim)


class Above:
    """The model's own forward behind its layers, with hidden states that were computed before.

    The module below the head hands them on. Where that is the last layer, as the model runs its layers itself, the
    others hand on what they are given, and what stands before and between them is not computed: it is on the meta
    device.
    """

    def __init__(self, model: Any, flow: Flow, layers_path: str):
        owner, _, name = flow.body.rpartition(".")
        self._model, self._modules = model, model.get_submodule(owner)._modules
        self._hollow = owner == layers_path and bool(owner)
        names = list(self._modules) if self._hollow else [name]
        self._given = {own: _Given(self._modules[own]) for own in names}
        self._body = self._given[name]
        for own, door in zip(names, flow.doors if self._hollow else (), strict=False):
            self._given[own].forward = hand_on(door)  # type: ignore[method-assign]

    def __call__(self, below: Any, input_ids: Tensor) -> Tensor:
        """Logits (1, T, V_local) of what the module below the head returned for these tokens (1, T)."""
        within, own = ExitStack(), dict(self._modules)

        def leave(*_: Any, **__: Any) -> Any:
            within.close()
            return below

        self._body.forward = leave  # type: ignore[method-assign]
        self._modules.update(self._given)
        try:
            with within:
                if self._hollow:
                    input_ids = input_ids.to("meta")
                    within.enter_context(Placeholders(input_ids.device))
                out = self._model(input_ids=input_ids, use_cache=False)
        finally:
            self._modules.update(own)
            del self._body.forward
        logits: Tensor = out.logits if hasattr(out, "logits") else out[0]
        return logits


class _Given(nn.Module):
    """Stands in for a module: has the attributes that a forward reads off it."""

    def __init__(self, body: Any):
        super().__init__()
        object.__setattr__(self, "_body", body)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


def with_hidden(out: Any, hidden: Tensor) -> Any:
    """What the model below the head returns, with other hidden states and nothing else."""
    if isinstance(out, tuple):
        return (hidden, *[None] * (len(out) - 1))
    if isinstance(out, Tensor):
        return hidden
    return type(out)(**{next(iter(out)): hidden})
