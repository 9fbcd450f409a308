"""Traces the forward of a model: which part computes with which parameters, and which layers are alike.

[Note: the trace]
Nothing is taken from names or from the order in which modules were declared. A few tokens run through the model's own
forward. At each layer's door the hidden states are replaced by a new leaf of the autograd graph, so that the graphs end
there: what the leaf's predecessor reaches was computed by the part before. With three layers:

    embeddings -> [leaf] -> layer 0 -> [leaf] ... [leaf] -> layer 1 -> ... -> layer 2 -> [leaf] -> norm, head -> logits
    first stage             layer 0         between         layer 1                                last stage

A parameter that is reached through a layer's *other* arguments (an embedding that every layer reads) is needed by every
stage; one of another layer there means that layers share what they compute, and no pipeline can be cut. Frozen
parameters and those used under `no_grad` leave no graph: so every function that is handed a parameter is noted too.

[Note: kinds of layers]
What is found out about a model by running parts of it again is the same for layers of one kind. Two layers are of one
kind where nothing tells them apart but the values of their parameters and their number:

- No code of a script and no hook is anywhere in the model [Note: whose code]: such code may go by anything.
- They are built alike: of the same classes, with equal attributes, equal buffers, and parameters of the same shapes,
  types and use; and nothing in them is part of anything else.
- They ran alike in the trace [Note: the trace]: the same functions, of the same parameters, with the same numbers and
  sizes. So code that goes by a layer's number, which is its own for each, is told apart by what it does.

What cannot be told counts as different: at worst each layer is examined. The self-check's kinds are others: its small
copy may leave out layers that differ in a number.

  24 layers, windows in every other one     kinds 0 and 1 stand for all
  4 dense layers before 57 of experts       kinds 0 and 4
  60 layers, a class of the script in one   each for itself
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ds_hydra.pipe.attention.interface import let_attention_drop, tell_pack
from ds_hydra.pipe.contexts import Context, Contexts
from ds_hydra.pipe.models.draws import Place, Recorder
from ds_hydra.pipe.models.whose_code import own_code
from ds_hydra.pipe.rows import Chunk, Pack
from ds_hydra.zero_hetero.errors import ConfigError

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


_PLAIN = (bool, int, float, str, bytes, set, frozenset, torch.dtype, torch.device, torch.Size)
_ITS_NUMBER = "layer_idx"  # what transformers calls the place of a layer in the model
_HELD = frozenset({"_parameters", "_buffers", "_modules"})
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class LayerKinds:
    """The layers at `path`: of each the first one that is like it."""

    path: str
    firsts: tuple[int, ...]

    @property
    def like_others(self) -> tuple[int, ...]:
        """The layers that need not be examined."""
        return tuple(index for index, first in enumerate(self.firsts) if first != index)

    def in_first(self, name: str) -> bool:
        """Whether a module or parameter is in the first layer of a kind, or outside of the layers."""
        return self._first(name) == name

    def spread(self, found: Mapping[str, _Found], names: Iterable[str]) -> dict[str, _Found]:
        """What was found in the first layers and outside, for all of these names."""
        return {name: found[first] for name in names if (first := self._first(name)) in found}

    def spread_groups(self, groups: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
        """The same of groups of modules, each of one layer or outside of them."""
        yield from (group for group in groups if self._layer(group[0]) is None)
        for layer, first in enumerate(self.firsts):
            for group in groups:
                if self._layer(group[0]) == first:
                    yield tuple(self._within(name, layer) for name in group)

    def _first(self, name: str) -> str:
        layer = self._layer(name)
        return name if layer is None else self._within(name, self.firsts[layer])

    def _layer(self, name: str) -> int | None:
        """The layer that a name is in; of the list itself and what is outside None."""
        if not name.startswith(f"{self.path}."):
            return None
        return int(name.removeprefix(f"{self.path}.").partition(".")[0])

    def _within(self, name: str, layer: int) -> str:
        """The same place in another layer."""
        _, dot, rest = name.removeprefix(f"{self.path}.").partition(".")
        return f"{self.path}.{layer}{dot}{rest}"


class LayerCalls:
    """What each layer ran in a trace, function by function."""

    def __init__(self, layers_path: str, names: Mapping[int, str]):
        """`names` are those of the parameters, by identity."""
        self._prefix, self._names = layers_path, names
        self._calls: dict[int, list[Hashable]] = {}

    def note(self, layer: int, module: str, func: Any, given: Sequence[Any], result: Any) -> None:
        """Take a function's call within a layer, by the innermost module that runs."""
        prefix = f"{self._prefix}.{layer}"
        of = [self._described(value, prefix) for value in given]
        out = [self._described(value, prefix) for value in (result if isinstance(result, tuple | list) else [result])]
        self._calls.setdefault(layer, []).append((func, module.removeprefix(prefix), tuple(of), tuple(out)))

    def _described(self, value: Any, prefix: str) -> Hashable:
        if isinstance(value, Tensor):
            name = self._names.get(id(value), "").removeprefix(prefix)
            return name, tuple(value.shape), value.dtype, value.requires_grad
        if value is None or isinstance(value, _PLAIN):
            return type(value), repr(value)
        return f"{type(value).__module__}.{type(value).__qualname__}"

    def firsts(self, num_layers: int) -> tuple[int, ...]:
        """Of each layer the first one that ran the same."""
        calls = [self._calls.get(index) for index in range(num_layers)]
        return tuple(calls.index(own) if own else index for index, own in enumerate(calls))


def find_kinds(model: nn.Module, template: nn.Module, path: str, ran: Sequence[int]) -> LayerKinds:
    """The kinds of a model's layers; `template` is its copy, and `ran` tells of each layer the first one that ran the
    same in the trace."""
    layers: Any = template.get_submodule(path)
    alone = LayerKinds(path, tuple(range(len(layers))))
    if len(layers) != len(ran) or own_code(model):
        return alone
    uses = Counter(id(module) for _, module in template.named_modules(remove_duplicate=False))
    uses += Counter(id(parameter) for _, parameter in template.named_parameters(remove_duplicate=False))
    firsts: list[int] = []
    kinds: list[int] = []  # the first layers, but those that share something
    for index, layer in enumerate(layers):
        apart = all(uses[id(each)] == 1 for each in (*layer.modules(), *layer.parameters()))
        like = (
            kind for kind in kinds
            if apart and ran[kind] == ran[index]
            and _Likeness((f"{path}.{kind}.", f"{path}.{index}.")).alike(layers[kind], layer)
        )  # fmt: skip
        firsts.append(next(like, index))
        if apart and firsts[index] == index:
            kinds.append(index)
    return LayerKinds(path, tuple(firsts))


@dataclass(frozen=True)
class _Likeness:
    """Compares what two layers hold; each calls itself by a path of its own."""

    paths: tuple[str, str]

    def alike(self, one: nn.Module, other: nn.Module) -> bool:
        """Whether two modules are built alike, with all that is in them."""
        mine, others = vars(one), vars(other)
        return (
            type(one) is type(other)
            and mine.keys() == others.keys()
            and all(self.equal(mine[key], others[key]) for key in mine.keys() - _HELD - {_ITS_NUMBER})
            and self._pairs(one._parameters, other._parameters, _same_use)
            and self._pairs(one._buffers, other._buffers, self.equal)
            and self._pairs(one._modules, other._modules, self.equal)
        )

    def equal(self, one: Any, other: Any) -> bool:
        """Whether two values are the same, as far as that can be told."""
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, nn.Module):
            return self.alike(one, other)
        if isinstance(one, Tensor):
            told = not one.is_meta and (one.dtype, one.device) == (other.dtype, other.device)
            return told and one.requires_grad == other.requires_grad and torch.equal(one, other)
        if isinstance(one, dict):
            return self._pairs(one, other, self.equal)
        if isinstance(one, list | tuple):
            return len(one) == len(other) and all(map(self.equal, one, other))
        if isinstance(one, partial):
            return self.equal((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
        if isinstance(one, float):
            return repr(one) == repr(other)  # 0.0 and -0.0 are two
        if isinstance(one, str):  # PEFT's layers keep their names
            return one.replace(self.paths[0], "") == other.replace(self.paths[1], "")
        return isinstance(one, _PLAIN) and bool(one == other)

    @staticmethod
    def _pairs(one: Mapping[Any, Any], other: Mapping[Any, Any], same: Callable[[Any, Any], bool]) -> bool:
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)


def _same_use(one: nn.Parameter | None, other: nn.Parameter | None) -> bool:
    """Whether parameters differ in their values at most."""
    if one is None or other is None:
        return one is other
    same_type = type(one) is type(other) and one.dtype == other.dtype
    return same_type and one.shape == other.shape and one.requires_grad == other.requires_grad


class Attended(Contexts):
    """Notes which modules attend, and with how many heads."""

    def __init__(self, total: int):
        super().__init__(total)
        self.calls: Counter[Hashable] = Counter()
        self.heads: set[tuple[int, int]] = set()

    def note_heads(self, heads: int, kv_heads: int) -> None:
        self.heads.add((heads, kv_heads))

    def of(self, module: Hashable) -> Context:
        self.calls[module] += 1
        return super().of(module)


class AttendingModules:
    """The modules of a model that attended, by their paths."""

    def __init__(self, attended: Attended, model: Any, layers_path: str):
        names: dict[Hashable, str] = {module: name for name, module in model.named_modules()}
        self._calls = {names.get(module, type(module).__name__): n for module, n in attended.calls.items()}
        layers = enumerate(model.get_submodule(layers_path))
        self.unattended = frozenset(
            index for index, layer in layers if not any(module in attended.calls for module in layer.modules())
        )
        """Layers in which no module did."""

    @property
    def no_slices(self) -> str:
        """Why the tokens of a slice would not see those before it; empty if they would, as far as a trace tells.

        A context is that of a module, so each may attend once [Note: contexts]. A layer that does not attend may look
        at other tokens in ways that are not known here, such as a recurrent state.
        """
        if self.attends_twice or not self.unattended:
            return self.attends_twice
        return f"layer {min(self.unattended)} does not attend by Hugging Face's attention interface"

    @property
    def attends_twice(self) -> str:
        """Which module does, in a sentence; empty: none."""
        twice = ((name, count) for name, count in self._calls.items() if count > 1)
        return next((f"{name} attends {count} times in one forward" for name, count in twice), "")


# Token counts that are tried: one that is no other size of the hidden states tells which dimension counts tokens.
TOKEN_COUNTS = (11, 13, 17)


class CannotCutError(Exception):
    """Why the layers of a model cannot be dealt out to stages."""


@dataclass(frozen=True)
class Door:
    """How the hidden states enter and leave a layer, as the model calls it."""

    key: int | str  # position or name of the argument that holds them
    shape: tuple[int, ...]  # with one token at `token_dim`
    token_dim: int
    returned: tuple[type, int] | None  # None: a tensor; else the type and length of what holds it in front

    @property
    def width(self) -> int:
        """Features of a token."""
        return torch.Size(self.shape).numel()

    def hidden(self, args: Any, kwargs: Any) -> Tensor:
        """The hidden states among a layer's arguments."""
        found: Tensor = args[self.key] if isinstance(self.key, int) else kwargs[self.key]
        return found

    def given(self, hidden: Tensor, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A layer's arguments with other hidden states."""
        if isinstance(self.key, int):
            return (*args[: self.key], hidden, *args[self.key + 1 :]), kwargs
        return args, kwargs | {self.key: hidden}

    def enter_by(self, layer: nn.Module, change: Callable[[Tensor], Tensor]) -> Any:
        """Let a layer run on what `change` makes of the hidden states that it is handed. Returns the hook's handle."""
        return layer.register_forward_pre_hook(
            lambda _, args, kwargs: self.given(change(self.hidden(args, kwargs)), args, kwargs),
            with_kwargs=True, prepend=True,
        )  # fmt: skip


@dataclass(frozen=True)
class Flow:
    """What a trace found [Note: the trace]; parameters by their first name in the model."""

    first: frozenset[str]
    layers: tuple[frozenset[str], ...]
    last: frozenset[str]
    doors: tuple[Door, ...]
    body: (
        str  # path of the module whose output the rest of the model's forward turns into logits: the last layer, where
    )
    # the model itself runs its layers
    readers: Mapping[str, frozenset[str]]  # parameters that are read while their owner does not run -> modules that do
    draws: Mapping[Place, int]  # random calls in training -> features (of attention: heads) that they draw for
    obstacle: str = ""  # why no pipeline can be cut; the parts above are then only what one stage holds
    attention_dropout: float = 0.0  # largest rate
    vocabulary: int = 0  # logits of a token
    heads: frozenset[tuple[int, int]] = frozenset()  # of queries, and of keys and values, where layers attend
    no_slices: str = ""  # why no sequence can be cut into slices
    unread: frozenset[str] = frozenset()  # parameters that nothing is computed with which has a gradient
    ran: tuple[int, ...] = ()  # of each layer the first one that ran the same functions [Note: kinds of layers]
    unattended: frozenset[int] = frozenset()  # layers that did not attend by the attention interface

    @property
    def slow_attention(self) -> str:
        """What attention that drops costs, and what to do about it; empty where it drops nothing."""
        if not self.attention_dropout:
            return ""
        return (
            f"attention drops {self.attention_dropout:g} of its probabilities: they are computed in blocks that stand "
            "in memory, which takes two to three times as long as fused attention; set attention_dropout to 0 in the "
            "model's config if you can"
        )


@dataclass
class _Record:
    """What hooks and functions note while the model runs."""

    calls: list[int] = field(default_factory=list)
    doors: dict[int, Door] = field(default_factory=dict)
    entries: dict[int, Tensor] = field(default_factory=dict)
    exits: dict[int, Tensor] = field(default_factory=dict)
    entering: dict[int, set[int]] = field(default_factory=dict)  # leaves behind what enters a layer
    inside: dict[int, set[int]] = field(default_factory=dict)  # leaves behind what a layer hands on
    beside: dict[int, set[int]] = field(default_factory=dict)  # leaves behind a layer's other arguments
    handed_on: dict[int, tuple[int, Tensor]] = field(default_factory=dict)  # other results: identity -> layer, tensor
    body: str = ""
    obstacle: str = ""


class _Watch(TorchFunctionMode):
    """Notes which parameters any function is handed, by part of the forward, and what draws random numbers."""

    def __init__(self, model: nn.Module, layers_path: str, tokens: int, *, alone: bool) -> None:
        super().__init__()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.owners: dict[int, set[str]] = {}
        for path, parameter in model.named_parameters(remove_duplicate=False):
            self.owners.setdefault(id(parameter), set()).add(path.rpartition(".")[0])
        self.part: tuple[str, int] = ("before", 0)
        self.touched: dict[tuple[str, int], set[int]] = {}
        self.stack: list[str] = []
        self.readers: dict[str, set[str]] = {}
        self.recorder = Recorder(tokens, layers_path, self.stack, alone=alone)
        self.ran = LayerCalls(layers_path, self.names)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        attribute = getattr(func, "__name__", "") == "__get__"
        given = [] if attribute else arguments(args, kwargs)
        result = func(*args, **kwargs)
        for value in args if attribute and isinstance(result, Tensor) else given:  # .T reads it, .shape does not
            if isinstance(value, Tensor) and id(value) in self.names:
                self._touch(id(value))
        if given and self.part[0] == "layer":
            self.ran.note(self.part[1], self.stack[-1], func, given, result)
        self.recorder.note(func, args, kwargs, result)
        return result

    def _touch(self, parameter: int) -> None:
        self.touched.setdefault(self.part, set()).add(parameter)
        if self.stack and not self.owners[parameter] & set(self.stack):
            self.readers.setdefault(self.names[parameter], set()).add(self.stack[-1])

    def in_part(self, kind: str, index: int = 0) -> set[int]:
        return self.touched.get((kind, index), set())


def trace(model: Any, layers_path: str, positions_from: int = 0, *, alone: bool = False) -> Flow:
    """Run a few tokens through a copy of the model whose parameters are leaves, and tell what happened.

    `alone`: by the attention that the copy has, and with the positions that it makes of none given.
    Hooks stay on the copy: it is of no other use. Errors of the model's own forward pass through.
    """
    device = next(model.parameters()).device
    layers = list(model.get_submodule(layers_path))
    record = _Record()
    hidden = int(model.config.get_text_config().hidden_size)
    tokens = next(count for count in TOKEN_COUNTS if count not in (hidden, len(layers)))
    watch = _Watch(model, layers_path, tokens, alone=alone)
    keep_stack(model, watch.stack)
    for name, module in model.named_modules():
        let_attention_drop(module, partial(watch.recorder.attention, name))
    for index, layer in enumerate(layers):
        _watch_layer(layer, index, record, watch, tokens)
    ids = torch.arange(3, 3 + tokens, device=device)[None]
    positions = torch.arange(positions_from, positions_from + tokens, device=device)[None]
    model.train()
    attended = Attended(tokens)
    pack = Pack((tokens,), chunk=Chunk(0, tokens, attended))
    tell_pack(model, lambda: pack)
    numbered = {} if alone else {"position_ids": positions}
    with torch.random.fork_rng(devices=[]), watch:
        out = model(input_ids=ids, use_cache=False, **numbered)
    if watch.recorder.obstacle:
        raise ConfigError(watch.recorder.obstacle)
    logits = out.logits if hasattr(out, "logits") else out[0]
    if logits.shape[:-1] != ids.shape:
        raise ConfigError(f"{type(model).__name__} returns {tuple(logits.shape)} for {tokens} tokens of one sequence: "
                          "a head must give something for each token")  # fmt: skip
    record.body = record.body or f"{layers_path}.{len(layers) - 1}"
    found = _conclude(model, layers_path, record, watch, logits)
    where = AttendingModules(attended, model, layers_path)
    learnt = _read(record, watch, logits) if found.obstacle else _learnt(record, logits)
    return replace(
        found,
        attention_dropout=watch.recorder.attention_rate,
        vocabulary=logits.shape[-1],
        heads=frozenset(attended.heads),
        no_slices=where.no_slices,
        unattended=where.unattended,
        unread=frozenset(watch.names[each] for each in watch.names.keys() - learnt),
        ran=watch.ran.firsts(len(layers)),
    )


def _read(record: _Record, watch: _Watch, logits: Tensor) -> set[int]:
    """Identities of all that something was computed with."""
    parts = (record.entering, record.inside, record.beside, watch.touched)
    return leaves([logits]).union(*(found for part in parts for found in part.values()))


def _learnt(record: _Record, logits: Tensor) -> set[int]:
    """Identities of all that a loss of the logits has a gradient for: what runs without one, or before the hidden
    states are detached, has none."""
    reached = leaves([logits])
    found = set(reached)
    for index in reversed(range(len(record.calls))):
        if id(record.exits[index]) not in reached:
            break
        found |= record.inside[index] | record.beside[index]
        if id(record.entries[index]) not in record.inside[index]:
            break
        reached = record.entering[index]
        found |= reached
    return found


def keep_stack(model: nn.Module, stack: list[str]) -> None:
    """Keep the paths of the modules that are running in `stack`, the innermost last, by hooks that stay."""

    def push(name: str) -> None:
        if not name:  # the model begins: what an exception has ended before is over
            stack.clear()
        stack.append(name)

    def pop(*_: Any) -> None:
        stack.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: push(name), prepend=True)
        module.register_forward_hook(pop, always_call=True)


def _watch_layer(layer: nn.Module, index: int, record: _Record, watch: _Watch, tokens: int) -> None:
    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        key = hidden_of(args, kwargs)
        if key is None or (index in record.calls):
            record.obstacle = f"layer {index} runs twice" if key is not None else f"layer {index} is handed no tokens"
            return None
        hidden: Tensor = args[key] if isinstance(key, int) else kwargs[key]
        dims = [dim for dim, size in enumerate(hidden.shape) if size == tokens]
        if len(dims) != 1:
            record.obstacle = f"layer {index} is handed a tensor {tuple(hidden.shape)} for {tokens} tokens"
            return None
        record.body = record.body or (watch.stack[1] if len(watch.stack) > 2 else "")
        record.calls.append(index)
        watch.part = ("layer", index)
        record.entering[index] = leaves([hidden])
        others = [tensor for tensor in tensors_in((args, kwargs)) if tensor is not hidden]
        record.beside[index] = leaves([tensor for tensor in others if tensor.requires_grad])
        for tensor in others:
            if id(tensor) in record.handed_on:
                record.obstacle = _shared(index, record.handed_on[id(tensor)][0])
        leaf = hidden.detach().requires_grad_()
        record.entries[index] = leaf
        shape = (*hidden.shape[: dims[0]], *hidden.shape[dims[0] + 1 :])
        record.doors[index] = Door(key, shape, dims[0], None)
        return record.doors[index].given(leaf, args, kwargs)

    def leave(_: nn.Module, __: Any, out: Any) -> Any:
        watch.part = ("after", index)
        if index not in record.doors:
            return None
        hidden = out if isinstance(out, Tensor) else out[0] if type(out) in (tuple, list) and out else None
        if not isinstance(hidden, Tensor) or hidden.shape != record.entries[index].shape:
            record.obstacle = f"layer {index} does not hand on hidden states of the shape that entered it"
            return None
        record.inside[index] = leaves([hidden])
        leaf = hidden.detach().requires_grad_()
        record.exits[index] = leaf
        if isinstance(out, Tensor):
            return leaf
        record.handed_on |= {id(tensor): (index, tensor) for tensor in tensors_in(list(out[1:]))}
        record.doors[index] = replace(record.doors[index], returned=(type(out), len(out)))
        return type(out)((leaf, *out[1:]))

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(leave)


def _shared(index: int, other: int) -> str:
    return f"layer {index} uses what layer {other} computed beside the hidden states"


def _conclude(model: Any, layers_path: str, record: _Record, watch: _Watch, logits: Tensor) -> Flow:
    """The parts of the model, or what is in the way of cutting it."""
    num_layers = len(model.get_submodule(layers_path))
    names = watch.names

    def named(found: set[int]) -> set[str]:
        return {names[each] for each in found if each in names}

    own: list[set[str]] = [set() for _ in range(num_layers)]
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if path.startswith(layers_path + "."):
            own[int(path[len(layers_path) + 1 :].split(".")[0])].add(names[id(parameter)])
    readers = {name: frozenset(found) for name, found in watch.readers.items()}
    draws = watch.recorder.widths
    last = named(leaves([logits]) | watch.in_part("after", num_layers - 1))
    try:
        _check_order(record, num_layers)
        first = named(record.entering[0])
        everywhere = named(watch.in_part("before")) - first
        between: list[set[str]] = [set()]
        for index in range(num_layers):
            everywhere |= _beside(index, own, named, record, watch)
            if index:
                between.append(named(record.entering[index] | watch.in_part("after", index - 1)))
                _refuse_foreign(f"layer {index}", between[index], own)
        _refuse_foreign("the head", last, own)
    except CannotCutError as obstacle:
        rest = set(names.values()).difference(*own) - last
        parts = tuple(frozenset(mine) for mine in own)
        doors = tuple(record.doors.get(index, Door(0, (1, _width(model)), 1, None)) for index in range(num_layers))
        return Flow(
            frozenset(rest), parts, frozenset(last), doors, record.body, readers, draws, str(obstacle)
        )  # fmt: skip
    layers = tuple(frozenset(mine | before | everywhere) for mine, before in zip(own, between, strict=True))
    doors = tuple(record.doors[index] for index in range(num_layers))
    return Flow(frozenset(first | everywhere), layers, frozenset(last), doors, record.body, readers, draws)


def _width(model: Any) -> int:
    return int(model.config.get_text_config().hidden_size)


def _check_order(record: _Record, num_layers: int) -> None:
    if record.obstacle:
        raise CannotCutError(record.obstacle)
    if record.calls != list(range(num_layers)):
        raise CannotCutError(f"its {num_layers} layers run in the order {record.calls}")
    for index in range(num_layers):
        around = [
            j for j in range(index)
            if id(record.entries[j]) in record.entering[index]
            or (j < index - 1 and id(record.exits[j]) in record.entering[index])
        ]  # fmt: skip
        if around:
            raise CannotCutError(f"what enters layer {index} was computed around layer {around[0]} or {index - 1}")


def _beside(index: int, own: list[set[str]], named: Any, record: _Record, watch: _Watch) -> set[str]:
    """Parameters that a layer needs beside its own: those that every stage must hold."""
    found: set[str] = named(record.beside[index] | record.inside[index] | watch.in_part("layer", index)) - own[index]
    for other, mine in enumerate(own):
        if found & mine:
            raise CannotCutError(f"{_shared(index, other)} ({min(found & mine)})")
    return found


def _refuse_foreign(what: str, found: set[str], own: list[set[str]]) -> None:
    """What comes between layers or after them may not come from inside a layer, except by the hidden states."""
    for other, mine in enumerate(own):
        alone = mine.difference(*(names for index, names in enumerate(own) if index != other))
        if found & alone:
            raise CannotCutError(f"{what} reads what layer {other} computed around the hidden states ({min(found)})")
