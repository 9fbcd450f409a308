"""Boxes of a model, found by trying: modules in which tokens meet, their states, and heads that ranks can share.

A layer whose tokens meet by the attention interface alone keeps the tokens of a pack of sequences of one token each
apart, and needs no box. The boxes of any other layer are its children that mix, if the layer does not mix where these
are replaced by stand-ins that keep tokens apart; else the layer as a whole. What is not seen here for want of tokens is
the self-check's to find.

A module mixes if another token of what it returns changes with one token of what is computed for it. Where it raises
then, or returns no row of tokens, it is taken to mix. Nothing goes by names.

A box that is handed a cache is tried on a sequence in two slices, and in three of which one has a single token, against
the whole sequence: what it returns, and the gradients of its input and of its parameters [Note: carried states]. Code
that takes a state for single tokens only, as the scans of Mamba-1 do, computes something else in slices without a word.
Such a box runs whole sequences only, and so does one that is handed more of each token than hidden states.

A recurrent module that is made as `recurrent_heads.py` knows it is tried: ranks' parts of it run one after the other on
a sequence, by a degree that leaves each of them key heads or groups of its own and by one that does not, and the sum of
what they return is compared with what the whole module does. Where it differs every rank computes the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_hydra.pipe.attention.interface import tell_pack
from ds_hydra.pipe.contexts import Contexts
from ds_hydra.pipe.model_plan import ParamSpec
from ds_hydra.pipe.models.boxes import (
    Box,
    BoxedLayers,
    Boxes,
    BoxRun,
    Capture,
    CarriedState,
    Leaves,
    call_on_slice,
    is_plain,
)
from ds_hydra.pipe.models.cut import hand_on
from ds_hydra.pipe.models.flow import Attended, AttendingModules, Door, tensors_in
from ds_hydra.pipe.models.recurrent_heads import HeadCut, gated_norm, head_cut, localized
from ds_hydra.pipe.rows import Chunk, Pack
from ds_hydra.zero_hetero.errors import ConfigError

_COUNTS = (13, 11, 17, 19, 23)  # of tokens: one that is no size of a parameter
_NEAR = 1e-5  # other tokens that change by less, of the largest number, do not change
FIRST = 5  # token ids begin here


@dataclass
class ModuleCall:
    """The first call of a module in a run, and how many there were."""

    flat: Leaves
    spec: Any
    sources: tuple[int | None, ...]
    returned: Leaves = field(default_factory=list)
    returned_spec: Any = None
    times: int = 1

    def of(self, function: Callable[..., Any], flat: Leaves) -> Leaves:
        """What a function returns of these values, called so."""
        args, kwargs = tree_unflatten(flat, self.spec)
        return tree_flatten(function(*args, **kwargs))[0]


Calls = dict[tuple[int, str], ModuleCall]


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
        self._draw = _drawn(3)

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
                hidden = self.doors[index].hidden(args, kwargs)
                foreign = [is_plain(value) or value is hidden or id(value) in handed_on for value in flat]
                own[index] = tuple(0 if out else id(value) for value, out in zip(flat, foreign, strict=True))
            if (index, path) in calls:
                calls[index, path].times += 1
                return
            places = own.get(index, ())
            sources = tuple(places.index(id(value)) if id(value) in places else None for value in flat)
            calls[index, path] = ModuleCall([_copied(value) for value in flat], spec, sources)

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

    def mixes(self, index: int, path: str, call: ModuleCall) -> bool:
        """Whether tokens meet in a module."""
        module, at = self.module(index, path), self.tokens // 2
        changed = []
        for value, source in zip(call.flat, call.sources, strict=True):
            dims = _dims(value, self.tokens)
            if source is None and len(dims) == 1 and value.is_floating_point():
                value = value.clone()
                row = value.select(dims[0], at)
                row += _noise(row, self._draw)
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

    def _stub(self, call: ModuleCall) -> Callable[..., Any] | None:
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

    def box(self, path: str, call: ModuleCall) -> Box:
        """A module as a box."""
        handed, returned = ([_dims(value, self.tokens) for value in leaves] for leaves in (call.flat, call.returned))
        return Box(path, tuple(handed), call.sources, tuple(returned))


def put_back(module: nn.Module, forward: Any) -> None:
    vars(module).pop("forward", None)
    if forward is not None:
        module.forward = forward


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def called(module: nn.Module, call: ModuleCall, flat: Leaves) -> Leaves:
    """What a module returns of copies of these values, called as it was, without a graph."""
    with torch.no_grad():
        return call.of(module, [_copied(value) for value in flat])


def _noise(like: Tensor, draw: torch.Generator) -> Tensor:
    """Random numbers, the same ones in any type and on any device."""
    return torch.randn(like.shape, generator=draw, dtype=torch.float64).to(like)


def _drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _off(found: Tensor | None, right: Tensor, *, floor: float = 0.0, eps: float = 0.0) -> str:
    """How far a result is off, in a clause; empty if by rounding: of the largest number, or `floor` where that is
    smaller, in the result's type, or in a wider one's `eps`."""
    peak, near = float(right.abs().max()), max(eps, torch.finfo(right.dtype).eps) ** 0.5
    same_shape = found is not None and found.shape == right.shape
    apart = float((found - right).abs().max()) if found is not None and same_shape else float("inf")
    return "" if apart <= near * max(floor, peak) else f"off by {apart:.2g} of {peak:.2g}"


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


_FP32 = torch.finfo(torch.float32).eps  # models compute parts of heads so, whatever their type
_LEAST = 1e-6  # of the largest gradient: what is less may be rounding


def with_states(alone: Mixers, boxes: Boxes, calls: Calls) -> Boxes:
    """The boxes with what they carry, and why sequences must stay whole if one carries nothing.

    `calls` are those of a run of a sequence alone.
    """
    found: dict[int, tuple[Box, ...]] = {}
    whole = ""
    for index in alone.kinds:
        tried = [_tried_state(alone, index, box, calls[index, box.path]) for box in boxes.of[index]]
        found[index] = tuple(box for box, _ in tried)
        for box, reason in tried:
            named = f"{box.path} of layer {index}" if box.path else f"layer {index}"
            whole = whole or (reason and f"{named} takes whole sequences only: {reason}")
    return replace(boxes, of=tuple(found[first] for first in alone.firsts), whole=whole)


def _tried_state(alone: Mixers, index: int, box: Box, call: ModuleCall) -> tuple[Box, str]:
    """A box as it is used in slices, or as it was and why it is not."""
    if box.rows is None or any(dims for place, dims in enumerate(box.handed) if place != box.rows):
        return box, "it is handed more of each token than hidden states"
    trial = _StateTrial(alone.module(index, box.path), box, call, alone.tokens)
    if (place := trial.place()) is None:
        return box, "it asks for no state that is known here"
    middle = alone.tokens // 2
    right, carries = trial.whole(), 0
    for ends in ((0, middle, alone.tokens), (0, middle - 1, middle, alone.tokens)):
        try:
            other, kept = trial.in_slices(replace(box, state=place), ends)
        except Exception as error:  # of the module's own forward
            return box, f"in {len(ends) - 1} slices it ends with {type(error).__name__}: {error}"
        if reason := _difference(right, other):
            return box, f"in {len(ends) - 1} slices {reason}"
        carries = carries or kept  # of the second of three, its token too
    return replace(box, state=place, carries=carries), ""


class _StateTrial:
    """A box that computes of a sequence, whole or in slices, its result and gradients, all by name."""

    def __init__(self, module: nn.Module, box: Box, call: ModuleCall, tokens: int):
        assert box.rows is not None, "asked before"
        self._module, self._box, self._call, self._tokens, self._rows = module, box, call, tokens, box.rows
        self._dim = box.handed[box.rows][0]
        draw = _drawn(5)
        self._hidden, self._weights = (_noise(like, draw) for like in (call.flat[box.rows], call.returned[0]))

    def place(self) -> int | None:
        """Where among its arguments it takes a cache: what is none, and is asked for states when it is there."""
        for place in (place for place, value in enumerate(self._call.flat) if value is None):
            state = CarriedState({})
            try:
                with torch.no_grad():
                    self._run(_with(_with(self._call.flat, self._rows, self._hidden), place, state))
            except Exception:  # of a module that takes something else there
                continue
            if state.after:
                return place
        return None

    def whole(self) -> Mapping[str, Tensor]:
        hidden = self._hidden.clone().requires_grad_()
        with torch.enable_grad():
            out = self._run(_with(self._call.flat, self._rows, hidden))[0]
            (out * self._weights).sum().backward()
        return self._found(out, [hidden])

    def in_slices(self, box: Box, ends: Sequence[int]) -> tuple[Mapping[str, Tensor], int]:
        """With the bytes that a slice carries to the next."""
        contexts, out_dim = Contexts(self._tokens), box.returned[0][0]
        parts = [(start, stop - start) for start, stop in pairwise(ends)]
        hidden = [self._hidden.narrow(self._dim, *part).clone().requires_grad_() for part in parts]

        def call(arguments: Leaves, _: Tensor | None) -> list[tuple[Any, tuple[int, ...]]]:
            return [*zip(self._run(arguments), box.returned, strict=True)]

        with torch.enable_grad():
            outs = []
            for own, (start, length) in zip(hidden, parts, strict=True):
                chunk = Chunk(start, start + length, contexts)
                outs.append(call_on_slice(call, box, _with(self._call.flat, self._rows, own), None, chunk, box.path)[0])
            carries = contexts.carried(box.path).bytes_at(ends[-2])
            for out, part in zip(reversed(outs), reversed(parts), strict=True):
                (out * self._weights.narrow(out_dim, *part)).sum().backward()
        return self._found(torch.cat(outs, out_dim), hidden), carries

    def _run(self, flat: Leaves) -> Leaves:
        return self._call.of(self._module, flat)

    def _found(self, out: Tensor, hidden: Sequence[Tensor]) -> Mapping[str, Tensor]:
        found = {name: p.grad for name, p in self._module.named_parameters() if p.grad is not None}
        for parameter in self._module.parameters():
            parameter.grad = None
        gradients = [torch.zeros_like(part) if part.grad is None else part.grad for part in hidden]
        return {"its result": out.detach(), "the gradient of its input": torch.cat(gradients, self._dim)} | {
            f"the gradient of {name}": gradient for name, gradient in found.items()
        }


def _with(flat: Leaves, place: int, value: Any) -> Leaves:
    return [*flat[:place], value, *flat[place + 1 :]]


def _difference(right: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    """What slices compute otherwise; empty if nothing."""
    floor = _LEAST * max(float(value.abs().max()) for value in right.values())
    told = ((name, _off(other.get(name), value, floor=floor)) for name, value in right.items())
    return next((f"{name} is {off}" for name, off in told if off), "")


def with_heads(alone: Mixers, boxes: Boxes, calls: Calls) -> Boxes:
    """The boxes, each told whether ranks may share its heads; `calls` are those of a run of a sequence alone."""
    found = {
        index: tuple(replace(box, by_heads=_shares(alone, index, box, calls)) for box in boxes.of[index])
        for index in alone.kinds
    }
    return replace(boxes, of=tuple(found[first] for first in alone.firsts))


def _shares(alone: Mixers, index: int, box: Box, calls: Calls) -> bool:
    module = alone.module(index, box.path)
    if not box.path or box.rows is None or box.state is None or (cut := head_cut(module)) is None:
        return False
    call = calls[index, box.path]
    trial = _HeadTrial(module, cut, call, _with(call.flat, box.rows, _noise(call.flat[box.rows], _drawn(6))))
    try:
        with torch.no_grad():
            return all(trial.equal(tp) for tp in set(cut.tried))
    except Exception:  # of the module's own forward, or of a norm that is another
        return False


class _HeadTrial:
    """A module that runs as a whole, or in the parts that ranks have of it."""

    def __init__(self, module: nn.Module, cut: HeadCut, call: ModuleCall, flat: Leaves):
        self._module, self._cut, self._call, self._flat = module, cut, call, flat

    def equal(self, tp: int) -> bool:
        """Whether what `tp` ranks return adds up to what the whole module does."""
        with self._without_norm(tp):
            whole, parts = self._run({}), [self._part(rank, tp) for rank in range(tp)]
        return not _off(torch.stack(parts).sum(0), whole, eps=_FP32)

    def _part(self, rank: int, tp: int) -> Tensor:
        own = {}
        for name, parameter in self._module.named_parameters():
            spec = ParamSpec(name, tuple(parameter.shape), self._cut.rules[name])
            ranges = spec.shard_ranges(rank, tp)
            parts = [parameter.narrow(spec.rule.dim or 0, start, stop - start) for start, stop in ranges]
            own[name] = torch.cat(parts, spec.rule.dim or 0) if parts else parameter
        before = localized(self._module, self._cut, tp)
        try:
            return self._run(own)
        finally:
            for (owner, name), number in before.items():
                setattr(owner, name, number)

    def _run(self, parameters: dict[str, Tensor]) -> Tensor:
        def run(*args: Any, **kwargs: Any) -> Any:
            return functional_call(self._module, parameters, args, kwargs)

        (out,) = self._call.of(run, self._flat)
        return out  # type: ignore[no-any-return]

    @contextmanager
    def _without_norm(self, tp: int) -> Iterator[None]:
        """Within it, a norm whose groups ranks share is none: it is tried by itself."""
        if not self._cut.shares_norm(tp):
            yield
            return
        norm: Any = self._module.get_submodule(self._cut.norm)
        draw = _drawn(7)
        hidden, gate = (torch.randn(3, len(norm.weight), generator=draw).to(norm.weight) for _ in range(2))
        first = slice(norm.group_size)
        of_group = SimpleNamespace(
            weight=norm.weight[first], group_size=norm.group_size, variance_epsilon=norm.variance_epsilon
        )
        own = gated_norm(of_group, 1, 0, 1, (), hidden[:, first], gate[:, first])
        if _off(own, norm(hidden, gate)[:, first], eps=_FP32):
            raise ValueError("the norm is another than that of transformers")
        norm.forward = lambda hidden, gate: hidden * torch.sigmoid(gate)
        try:
            yield
        finally:
            del norm.forward


_PART = 5  # tokens of the first and the last of three sequences


def find_boxes(alone: Mixers, packed: Mixers | None, first_position: int = 0) -> Boxes:
    """The boxes of all layers. `alone` runs the model by its own attention, `packed` by packed attention with positions
    from `first_position`; None where the model cannot be run so. ConfigError where a layer has none that are right."""
    calls = alone.run(among=True)
    apart, heads, twice = (
        (set[int](), frozenset[tuple[int, int]](), "") if packed is None else _by_interface(packed, first_position)
    )
    ran = [index for index in alone.kinds if (index, "") in calls]  # others wait for an image, say
    mixing = {index for index in ran if alone.mixes(index, "", calls[index, ""])}
    apart &= mixing
    row = calls
    if packed is not None and apart:
        positions = _positions(packed, first_position, _three(packed.tokens))
        row = packed.run(among=False, position_ids=positions)
        apart = _as_alone(alone, packed, apart, row)
    found = {index: alone.boxes(index, calls) if index in mixing - apart else () for index in alone.kinds}
    paths = {box.path for boxes in found.values() for box in boxes}
    shared = [
        index for index in apart
        if any(not path or ((index, path) in calls and alone.mixes(index, path, calls[index, path])) for path in paths)
    ]  # fmt: skip
    # Ranks share a module in all layers or in none. Those that attend by the interface may be computed by all of them
    # as a whole, as boxes are; it is worth asking for where it lets sequences run in slices.
    if shared and with_states(alone, Boxes(tuple(found[first] for first in alone.firsts)), calls).whole:
        found |= {index: alone.boxes(index, calls) for index in shared}
    packs = any(not found[index] for index in apart)
    if not any(found.values()):
        return Boxes()
    row = row if packs else calls
    boxes = with_heads(alone, with_states(alone, _tried(alone, found, calls, row, packed=packs), calls), calls)
    return replace(boxes, heads=heads if packs else frozenset(), whole=boxes.whole or (twice if packs else ""))


def _by_interface(packed: Mixers, first_position: int) -> tuple[set[int], frozenset[tuple[int, int]], str]:
    """The layers that keep the sequences of a pack apart, with how many heads layers attend by the interface, and why
    they cannot do so in slices of a sequence."""
    attended = Attended(packed.tokens)
    pack = Pack((packed.tokens,), chunk=Chunk(0, packed.tokens, attended))
    tell_pack(packed.model, lambda: pack)
    failed: set[int] = set()
    for index in packed.kinds:
        _let_fail(packed.layers[index], packed.doors[index], lambda index=index: failed.add(index))  # type: ignore[misc]
    calls = packed.run(among=False, position_ids=_positions(packed, first_position, pack))
    twice = AttendingModules(attended, packed.model, packed.path).attends_twice
    pack = Pack((1,) * packed.tokens)
    ran = {index for index in packed.kinds if (index, "") in calls}
    kept = {index for index in ran - failed if not packed.mixes(index, "", calls[index, ""])}
    return kept, frozenset(attended.heads), twice


def _as_alone(alone: Mixers, packed: Mixers, layers: Collection[int], row: Calls) -> set[int]:
    """Of some layers those that compute of a pack by packed attention what they do of its sequences alone."""
    pack = _three(packed.tokens)
    tell_pack(packed.model, lambda: pack)
    trial = _Trial(alone, Boxes(tuple(() for _ in alone.layers)), packed=True)
    try:
        return {index for index in layers if not trial.reason(index, row[index, ""], packed.layers[index])}
    finally:
        trial.end()


def _positions(packed: Mixers, first: int, pack: Pack) -> Tensor:
    numbers = [torch.arange(first, first + length, device=packed.device) for length in pack.lengths]
    return torch.cat(numbers)[None]


def _three(tokens: int) -> Pack:
    """Three sequences of so many tokens, two of them of one length."""
    return Pack((_PART, tokens - 2 * _PART, _PART))


def _let_fail(layer: nn.Module, door: Door, failed: Callable[[], None]) -> None:
    """Let a layer that cannot run hand on what it is given, and tell of it."""
    forward = layer.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception:  # of attention that packs lack, or of what follows from it
            failed()
            return hand_on(door)(*args, **kwargs)

    layer.forward = run  # type: ignore[method-assign]


def _tried(
    alone: Mixers, found: Mapping[int, tuple[Box, ...]], calls: Calls, row: Calls, *, packed: bool
) -> Boxes:  # fmt: skip
    """The first of a few ways to box each layer under which it computes of a pack what it does of its sequences."""
    left = {index: boxes for index, boxes in found.items() if boxes}
    proved: dict[int, tuple[Box, ...]] = dict.fromkeys(found, ())
    why, by_length = "", True
    for whole, batched in ((False, True), (False, False), (True, True), (True, False)):
        trying = {
            index: tuple(replace(box, batched=batched) for box in boxes)
            for index, boxes in left.items()
        }  # fmt: skip
        if whole:
            trying = {index: (replace(alone.box("", calls[index, ""]), batched=batched),) for index in left}
        if not trying:
            break
        trial = _Trial(alone, Boxes(tuple(trying.get(index, ()) for index in range(len(alone.layers)))), packed)
        by_length = by_length and trial.by_length
        for index, boxes in trying.items():
            reason = trial.reason(index, row[index, ""])
            if not reason:
                proved[index] = boxes
                del left[index]
            why = reason or why
        trial.end()
    if left:
        raise ConfigError(f"layer {min(left)} cannot run once for each sequence of a pack ({why}): not supported")
    return Boxes(tuple(proved[first] for first in alone.firsts), packed, by_length)


class _Trial:
    """Layers with boxes, on a pack of three sequences."""

    def __init__(self, alone: Mixers, boxes: Boxes, packed: bool):
        self._alone, self._packed = alone, packed
        self._pack = _three(alone.tokens)
        touched = {alone.module(i, box.path) for i, of in enumerate(boxes.of) for box in of}
        touched |= {alone.layers[index] for index in alone.kinds}
        self._saved = {module: vars(module).get("forward") for module in touched}
        self._layers = BoxedLayers(boxes, alone.doors)
        self._layers.install({index: alone.layers[index] for index in alone.kinds})
        row, other = (alone.ids(alone.tokens, first) for first in (FIRST, FIRST + 1))
        self._captures, others = ([self._capture(p) for p in ids.split(self._pack.lengths, 1)] for ids in (row, other))
        self.by_length = all(map(_same, self._captures, others))

    def _capture(self, ids: Tensor) -> Capture:
        with self._layers.capturing(self._alone.kinds) as capture:
            self._alone.model(input_ids=ids, use_cache=False)
        return capture

    def reason(self, index: int, call: ModuleCall, packed: nn.Module | None = None) -> str:
        """Why a layer, or the one that attends in packs, computes something else; empty if it does not."""
        alone, door = self._alone, self._alone.doors[index]
        places = [place for place, (v, s) in enumerate(zip(call.flat, call.sources, strict=True))
                  if s is None and isinstance(v, Tensor)]  # fmt: skip
        if len(places) != 1:  # it uses what another layer made of the same tokens: nothing to try it with
            return ""
        at, hidden = places[0], call.flat[places[0]]
        noise = _noise(hidden, _drawn(4))
        try:
            with torch.no_grad():
                right = []
                for start, length, capture in zip(self._pack.offsets, self._pack.lengths, self._captures, strict=False):
                    own = noise.narrow(door.token_dim, start, length)
                    right.append(called(alone.layers[index], call, _with(capture.layers[index], at, own))[0])
                given = [
                    value if self._packed or not isinstance(value, Tensor) else value.to("meta") for value in call.flat
                ]
                with self._layers.of(BoxRun(self._pack, self._captures)):
                    row = called(packed or alone.layers[index], call, _with(given, at, noise))[0]
        except Exception as error:  # of the model's own forward
            return f"{type(error).__name__}: {error}"
        off = _off(row, torch.cat(right, door.token_dim), floor=1.0)
        return off and f"its result is {off}"

    def end(self) -> None:
        """Take the boxes out again."""
        for module, forward in self._saved.items():
            put_back(module, forward)
            vars(module).pop("_hydra_chain", None)


def _same(one: Capture, other: Capture) -> bool:
    """Whether two sequences of one length are handed the same."""
    pairs = [pair for index in one.layers for pair in zip(one.layers[index], other.layers[index], strict=True)]
    hidden = {id(one.entered), id(other.entered)}
    return all(id(a) in hidden or _equal(a, b) for a, b in pairs)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return (
            isinstance(other, Tensor) and not one.requires_grad and one.shape == other.shape and torch.equal(one, other)
        )
    return is_plain(one) and bool(one == other)
