"""Boxes: modules in which tokens meet, each called as it is once for each sequence of a pack, and what calls them.

[Note: boxes]
Between its mixers a model treats every token alone, so a packed row may run through it as if it were one sequence. A
mixer that does not go by Hugging Face's attention interface knows nothing of packs: a recurrence would carry its state
from one sequence into the next, a convolution would look over the boundary. Such a module is a box. It is given what
the model would give it if each sequence ran alone, one after the other, and its outputs are put back into a row:

  row           A A A B B B B B C C      hidden states, whatever stands between the boxes computes them
  box           A A A                    with the masks, positions and rotary tables of a sequence of 3 tokens
                      B B B B B          of 5
                                C C      of 2

What a layer is handed beside the hidden states comes from captures: the model's own forward runs for one sequence with
layers that do nothing but note what they are called with. Of sequences of one length it is the same, as a rule.
Of a slice of a sequence a box is handed, and hands on, what it carries [Note: carried states].
Sequence parallel ranks gather the row, and each computes the sequences that overlap its own tokens. Tensor parallel
ranks all compute the whole of a box. Or both share its heads [Note: recurrent heads].

Where some layer attends by the interface, what comes before the layers is computed for the row, as in any stage.
Elsewhere nothing of it is: hidden states enter the first layer as they did for each sequence alone, and what the layers
are handed besides is replaced in the boxes. Then it is run on the meta device only, so that neither masks nor positions
of a whole row are ever made.

Which modules are boxes, and which of their arguments are what, is found by trying: `find_boxes.py`.

Recurrent modules of transformers keep a state for generation: they ask an object that they are handed for the last
inputs of their convolution and for their state, and hand it both back. In a slice they are handed a `CarriedState`,
which writes nothing in place, so that gradients flow through it.

A slice of one token is no step of generation, whose code has no backward in kernels. It is computed with a copy of
itself behind it, and is carried to the next slice in place of a state after it:

  slice 0..4                x x x x                  carries the state after 4 tokens
  slice 4..5                x x'                     the second output is dropped; carries the state after 4, and x
  slice 5..9                x y y y y                with the state after 4; the first output is dropped
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_hydra.pipe.attention.interface import attending_by, packed_configs
from ds_hydra.pipe.collectives import all_of_row, own_of_sum
from ds_hydra.pipe.contexts import Carried
from ds_hydra.pipe.models.cut import CutForward, ForwardEnded, hand_on
from ds_hydra.pipe.models.draws import Draws, Keys
from ds_hydra.pipe.models.flow import Door, Flow, tensors_in
from ds_hydra.pipe.models.recurrent_heads import OwnHeads
from ds_hydra.pipe.placement import Stage
from ds_hydra.pipe.rows import Chunk, MicroBatch, Pack
from ds_hydra.pipe.wrappers import wrap
from ds_hydra.zero_hetero.errors import ConfigError

Leaves = list[Any]
Dims = tuple[int, ...]
_ALONE, _KEY = "token", "key"  # what is carried of a slice of one token


class CarriedState:
    """What recurrent modules ask for and hand back: those calls of transformers' `Cache` that they make."""

    def __init__(self, before: Mapping[Hashable, Tensor]):
        self._before = before
        self.after: dict[Hashable, Tensor] = {}

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self._before)

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._before.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._before.get(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        """The inputs (..., tokens) of a convolution with those before them in front; the last ones are carried on."""
        before = self._before.get(("conv", state_idx))
        joined = conv_states if before is None else torch.cat((before, conv_states), -1)
        self.after["conv", state_idx] = joined[..., max(0, joined.shape[-1] - conv_kernel_size + 1) :]
        return joined

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.after["recurrent", state_idx] = recurrent_states
        return recurrent_states


class BoxSlice:
    """One call of a box on a slice of a sequence."""

    def __init__(self, carried: Carried, chunk: Chunk, dim: int):
        """`dim` counts the tokens of what the box is handed."""
        self._carried, self._chunk, self._dim = carried, chunk, dim
        self._before = carried.take(chunk.start)
        self._waiting, self._key = self._before.pop(_ALONE, None), self._before.pop(_KEY, None)
        self._is_copied = chunk.start > 0 and chunk.stop - chunk.start == 1 and self._waiting is None

    def around(self, own: Tensor, waiting: Tensor | None, dim: int) -> Tensor:
        """What the slice has of something for each token, with that of the other tokens of the call."""
        if self._is_copied:
            return torch.cat((own, own.detach()), dim)
        return own if waiting is None else torch.cat((waiting, own), dim)

    def keys(self, own: Tensor | None) -> Tensor | None:
        """What random numbers are drawn from, (tokens,) of the call."""
        return None if own is None else self.around(own, self._key, 0)

    def call(
        self, forward: Callable[[Tensor, CarriedState], list[tuple[Any, Dims]]], own: Tensor, keys: Tensor | None
    ) -> Leaves:
        """What a box returns of the tokens of a slice, of all that `forward` returns with its dimensions of tokens."""
        state = CarriedState(self._before)
        tokens = self.around(own, self._waiting, self._dim)
        returned = forward(tokens, state)
        after = state.after
        if self._is_copied:
            after = {**self._before, _ALONE: own} | ({} if keys is None else {_KEY: keys})
        here, all_here = own.shape[self._dim], tokens.shape[self._dim]
        in_front = 0 if self._waiting is None else all_here - here
        found = [
            value.narrow(dims[0], in_front, here)
            if isinstance(value, Tensor) and len(dims) == 1 and value.shape[dims[0]] == all_here
            else value
            for value, dims in returned
        ]
        found[0] = self._carried.hand_on(found[0], after, self._chunk.start, self._chunk.stop)
        return found


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


@dataclass(frozen=True)
class Box:
    """A mixer of a layer. Leaves are counted in the order in which nested arguments are taken apart."""

    path: str  # within the layer; empty: the layer itself
    handed: tuple[tuple[int, ...], ...]  # of each leaf of its arguments the dimensions that count tokens
    sources: tuple[int | None, ...]  # of each: which leaf of its layer's arguments it is; None: computed in the layer
    returned: tuple[tuple[int, ...], ...]  # of each leaf of what it returns the dimensions that count tokens
    batched: bool = False  # whether sequences of one length may be rows of one call
    state: int | None = None  # which leaf of its arguments is its cache, if it passes what it carries on in slices
    carries: int = 0  # bytes that it does, of a sequence
    by_heads: bool = False  # whether ranks share it [Note: recurrent heads]

    @property
    def rows(self) -> int | None:
        """Which leaf of its arguments is the tokens, if there is one alone that was computed in the layer."""
        found = [place for place, (dims, source) in enumerate(zip(self.handed, self.sources, strict=True))
                 if dims and source is None]  # fmt: skip
        return found[0] if len(found) == 1 and len(self.handed[found[0]]) == 1 else None


@dataclass(frozen=True)
class Boxes:
    """What was found of a model's mixers: the boxes of each layer; nothing where all attend by the interface."""

    of: tuple[tuple[Box, ...], ...] = ()
    packed: bool = True  # whether what comes before the layers is computed for the row, with the sequences' positions
    by_length: bool = True  # whether what layers are handed beside the hidden states follows from the length alone
    heads: frozenset[tuple[int, int]] = frozenset()  # of queries, and of keys and values, where layers attend by it

    attention: str = ""  # what Hugging Face calls the attention of boxes
    whole: str = ""  # why no sequence may be cut into slices

    def __bool__(self) -> bool:
        return any(self.of)

    def paths(self, layers_path: str) -> tuple[str, ...]:
        """The modules that are boxes, by their paths in the model."""
        return tuple(
            f"{layers_path}.{index}.{box.path}".rstrip(".") for index, boxes in enumerate(self.of) for box in boxes
        )

    def told(self, layers_path: str) -> str:
        """What is run once for each sequence, in a sentence."""
        paths = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", path) for path in self.paths(layers_path)})
        slices = f"sequences are not cut into slices: {self.whole}" if self.whole else "also on slices of sequences"
        return f"run once for each sequence of a pack, as it is: {', '.join(paths)}; {slices}"


@dataclass
class Capture:
    """What layers are called with when one sequence runs alone."""

    entered: Tensor | None = None  # the first layer's hidden states
    layers: dict[int, Leaves] = field(default_factory=dict)


@dataclass
class BoxRun:
    """One micro-batch on its way through the boxes."""

    pack: Pack
    captures: Sequence[Capture]  # by sequence
    keys: Keys | None = None  # what random calls of its tokens draw from
    # Stand-ins for what a box returns of each sequence that no row can hold, by identity: what they stand for.
    apart: dict[int, tuple[Tensor, Mapping[int, Any]]] = field(default_factory=dict)


def is_plain(value: Any) -> bool:
    """Whether a value is one of Python's, of which there is no telling one from another."""
    return isinstance(value, _PLAIN)


class BoxedLayers:
    """Runs the boxes of some layers [Note: boxes]."""

    def __init__(self, boxes: Boxes, doors: Sequence[Door], draws: Draws | None = None):
        self._boxes, self._doors, self._draws = boxes, doors, draws
        self._shared: dict[tuple[int, str], OwnHeads] = {}
        self._run: BoxRun | None = None
        self._capture: Capture | None = None
        self._wanted: Collection[int] = ()

    def install(self, layers: Mapping[int, nn.Module]) -> None:
        """Let these layers, by their number in the model, run their boxes; they are changed in place."""
        for index, layer in layers.items():
            whole = None
            for box in self._boxes.of[index]:
                if box.path:
                    module = layer.get_submodule(box.path)
                    wrap(module, partial(self._call, box, index, module.forward), "boxed")
                else:
                    whole = partial(self._call, box, index, layer.forward)
            wrap(layer, partial(self._enter, index, whole or layer.forward), "boxed", "notes what it is handed")

    def share(self, index: int, path: str, own: OwnHeads) -> None:
        """Let sequence parallel ranks share the heads of a box of a layer."""
        self._shared[index, path] = own

    @contextmanager
    def of(self, run: BoxRun | None) -> Iterator[None]:
        """Within it, boxes run on the sequences of a micro-batch."""
        before, self._run = self._run, run
        try:
            yield
        finally:
            self._run = before

    @property
    def running(self) -> BoxRun | None:
        """The micro-batch whose forward runs."""
        return self._run

    @contextmanager
    def capturing(self, wanted: Collection[int]) -> Iterator[Capture]:
        """A block that runs the model for one sequence, as far as the last layer of `wanted`: nothing is computed in
        the layers, and what these are handed is noted."""
        self._capture, self._wanted = Capture(), wanted
        try:
            yield self._capture
        except ForwardEnded:
            pass
        finally:
            self._capture = None

    def _enter(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of a layer."""
        if self._capture is None:
            if self._run is not None and not self._boxes.packed:
                args, kwargs = self._as_captured(index, args, kwargs)
            return forward(*args, **kwargs)
        door = self._doors[index]
        if self._capture.entered is None:
            self._capture.entered = door.hidden(args, kwargs)
        if index in self._wanted:
            self._capture.layers[index] = tree_flatten((args, kwargs))[0]
        if index >= max(self._wanted, default=0):
            raise ForwardEnded
        return hand_on(door)(*args, **kwargs)

    def _as_captured(self, index: int, args: Any, kwargs: Any) -> Any:
        """What a layer is handed where nothing was computed for the row, but for what Python's values tell: a mask may
        be none, for a sequence alone."""
        assert self._run is not None, "asked before"
        flat, spec = tree_flatten((args, kwargs))
        captured = self._run.captures[0].layers[index]
        if len(flat) != len(captured):
            raise ConfigError(
                f"layer {index} is handed {len(flat)} values for a pack, and {len(captured)} for a sequence"
            )
        # What another layer has made is there, and is no part of a capture.
        pairs = (
            (v, own, is_plain(v) or (isinstance(v, Tensor) and v.is_meta))
            for v, own in zip(flat, captured, strict=True)
        )
        return tree_unflatten([own if is_plain(own) and hollow else v for v, own, hollow in pairs], spec)

    def _call(self, box: Box, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of a box."""
        run = self._run
        if run is None or self._capture is not None:
            return forward(*args, **kwargs)
        flat, spec = tree_flatten((args, kwargs))
        if len(flat) != len(box.sources):
            raise ConfigError(
                f"layer {index} calls {box.path or 'itself'} with {len(flat)} values, and with {len(box.sources)} when "
                "it was examined: a module in which tokens meet must be called alike for all sequences"
            )
        own = self._shared.get((index, box.path))
        cut = _Cut(run, box, index, flat, sharers=1 if own is None else own.by_sp)
        outs: dict[int, Leaves] = {}
        counts = None if self._draws is None else self._draws.counts
        out_spec = spec

        def call(arguments: Leaves, keys: Tensor | None) -> list[tuple[Any, tuple[int, ...]]]:
            nonlocal out_spec
            given, named = tree_unflatten(arguments, spec)
            with self._alone(keys, counts):
                returned, out_spec = tree_flatten(forward(*given, **named))
            return list(cut.pairs(returned))

        with nullcontext() if own is None else own.held():
            for group in cut.groups(alone=run.keys is not None):
                keys, arguments = cut.keys(group[0]), cut.arguments(group)
                if group[0] == 0 and run.pack.chunk is not None:
                    outs[0] = call_on_slice(call, box, arguments, keys, run.pack.chunk, (index, box.path))
                    continue
                returned = call(arguments, keys)
                for place, sequence in enumerate(group):
                    outs[sequence] = [_row(value, dims, place, len(group)) for value, dims in returned]
        return tree_unflatten(cut.joined(outs), out_spec)

    def _alone(self, keys: Tensor | None, counts: Any) -> Any:
        """Within it, a sequence whose tokens have these keys draws what it draws where it runs alone."""
        return nullcontext() if self._draws is None or keys is None else self._draws.alone(Keys(keys, keys), counts)


def call_on_slice(
    call: Callable[[Leaves, Tensor | None], list[tuple[Any, tuple[int, ...]]]], box: Box, arguments: Leaves,
    keys: Tensor | None, chunk: Chunk, module: Hashable,
) -> Leaves:  # fmt: skip
    """What a box returns of a slice of a sequence. ConfigError for one that runs whole sequences only."""
    if box.state is None or box.rows is None:
        raise ConfigError(
            f"tokens {chunk.start} to {chunk.stop} of a sequence of {chunk.contexts.total} run as a slice, but "
            f"{box.path or 'the layer'} runs whole sequences only: plan without slices"
        )
    state, rows = box.state, box.rows
    one = BoxSlice(chunk.contexts.carried(module), chunk, box.handed[rows][0])
    given = [*arguments]

    def forward(tokens: Tensor, kept: CarriedState) -> list[tuple[Any, tuple[int, ...]]]:
        given[rows], given[state] = tokens, kept
        return call(given, one.keys(keys))

    return one.call(forward, arguments[rows], keys)


class _Cut:
    """A box's call for a row, taken apart into calls for its sequences."""

    def __init__(self, run: BoxRun, box: Box, index: int, flat: Leaves, *, sharers: int):
        """`sharers`: sequence parallel ranks that compute the same tokens, each some heads [Note: who shares heads]."""
        self.run, self.box, self.index, self.flat, self.sharers = run, box, index, flat, sharers
        pack = run.pack
        first = pack.sp_rank // sharers * sharers
        self.start, self.stop = (sum(pack.tokens[:rank]) for rank in (first, first + sharers))
        self.offsets = pack.offsets
        # A rank without tokens takes part in the gathering, and in its backward.
        ends = enumerate(pairwise(self.offsets))
        self.here = [sequence for sequence, (a, b) in ends if a < self.stop and b > self.start] or [0]
        # All compute a slice, for what it carries to the next one.
        self.beside = [0] if pack.chunk is not None and self.here[0] > 0 else []
        self.rows: dict[int, Tensor] = {}
        for place, (value, dims, source) in enumerate(zip(flat, box.handed, box.sources, strict=True)):
            if source is None and dims and isinstance(value, Tensor) and id(value) not in run.apart:
                if len(dims) > 1 and pack.sp > 1:
                    raise ConfigError(
                        f"layer {index} hands {box.path} a tensor {tuple(value.shape)} of tokens by tokens that it has "
                        "computed itself: sequence parallel ranks have a part of it only; use strategies with sp1"
                    )
                self.rows[place] = all_of_row(value, dims[0], pack) if len(dims) == 1 else value

    def groups(self, *, alone: bool) -> list[list[int]]:
        """The sequences of each call; `alone`: one by one."""
        slices = [] if self.run.pack.chunk is None else [0]
        whole = [sequence for sequence in self.here if sequence not in slices]
        run = [[sequence] for sequence in slices]
        if alone or not self.box.batched:
            return run + [[sequence] for sequence in whole]
        length = self.run.pack.lengths.__getitem__
        return run + [list(group) for _, group in groupby(sorted(whole, key=length), key=length)]

    def keys(self, sequence: int) -> Tensor | None:
        """What random calls of a sequence's tokens draw from."""
        keys = self.run.keys
        return None if keys is None else keys.row[self.offsets[sequence] : self.offsets[sequence + 1]]

    def arguments(self, group: Sequence[int]) -> Leaves:
        """What the box is handed for sequences of one length."""
        return [self._of(place, group) for place in range(len(self.flat))]

    def _of(self, place: int, group: Sequence[int]) -> Any:
        value, source, run = self.flat[place], self.box.sources[place], self.run
        each: list[Any]
        if source is not None:
            each = [run.captures[sequence].layers[self.index][source] for sequence in group]
        elif place in self.rows:
            each = []
            for sequence in group:
                part = self.rows[place]
                for dim in self.box.handed[place]:
                    part = part.narrow(dim, self.offsets[sequence], run.pack.lengths[sequence])
                each.append(part)
        elif id(value) in run.apart:
            each = [run.apart[id(value)][1][sequence] for sequence in group]
        else:
            return value
        one = each[0]
        if len(each) == 1 or not isinstance(one, Tensor) or one.dim() < 2 or one.shape[0] != 1:
            return one
        if all(other is one for other in each):
            return one.expand(len(each), *one.shape[1:])
        return torch.cat(each)

    def pairs(self, returned: Leaves) -> Iterator[tuple[Any, tuple[int, ...]]]:
        """What a call returned, each with its dimensions of tokens."""
        dims = (*self.box.returned, *[()] * len(returned))
        yield from zip(returned, dims, strict=False)

    def joined(self, outs: Mapping[int, Leaves]) -> Leaves:
        """What the row returns of what its sequences did."""
        found: Leaves = []
        for place, values in enumerate(zip(*(outs[sequence] for sequence in self.here), strict=True)):
            dims = self.box.returned[place] if place < len(self.box.returned) else ()
            if not dims or not isinstance(values[0], Tensor):
                found.append(values[0])  # a parameter, a number: of each sequence the same
            elif self._is_row(place, values, dims):
                # Of what is computed beside, nothing but its place in the graph: its backward takes states' gradients.
                beside = [outs[sequence][place].narrow(dims[0], 0, 0) for sequence in self.beside]
                row = torch.cat((*beside, *values), dims[0])
                tokens = self.stop - self.start
                skipped = max(0, self.start - self.offsets[self.here[0]]) if tokens else 0
                found.append(self._of_rank(row.narrow(dims[0], skipped, tokens), dims[0]))
            else:  # of tokens by tokens, or of a size that follows from the length: of use to another box only
                stand_in = values[0].new_empty(0)
                self.run.apart[id(stand_in)] = (stand_in, dict(zip(self.here, values, strict=True)))
                found.append(stand_in)
        return found

    def _of_rank(self, tokens: Tensor, dim: int) -> Tensor:
        """The own tokens, of those that this rank has computed: with its heads, if it shares these."""
        pack = self.run.pack
        if self.sharers == 1:
            return tokens
        rows = tokens.movedim(dim, 0)
        before, after = (rows.new_zeros((n, *rows.shape[1:])) for n in (self.start, pack.num_tokens - self.stop))
        whole = rows if self.sharers == pack.sp else torch.cat((before, rows, after))
        return own_of_sum(whole, pack).movedim(0, dim)

    def _is_row(self, place: int, values: Sequence[Tensor], dims: tuple[int, ...]) -> bool:
        """Whether what the sequences return is to be put into a row: all tensors of hidden states, and others that
        differ in the number of tokens only."""
        if len(dims) > 1 or (place and self.run.pack.sp > 1):  # what fits would be another thing on each rank
            return False
        dim = dims[0]
        rest = {(*value.shape[:dim], *value.shape[dim + 1 :]) for value in values}
        lengths = (self.run.pack.lengths[sequence] for sequence in self.here)
        return len(rest) == 1 and all(value.shape[dim] == n for value, n in zip(values, lengths, strict=True))


def _row(value: Any, dims: tuple[int, ...], place: int, rows: int) -> Any:
    """Of what several sequences returned together, what one did."""
    if rows == 1 or not dims or not isinstance(value, Tensor):
        return value
    return value.narrow(0, place, 1)


_KEPT_BYTES = 16 * 2**20  # of captures, by length: masks grow with its square


class StageBoxes:
    """Runs one stage of a model with boxes."""

    def __init__(self, boxes: Boxes, flow: Flow, stage: Stage, draws: Draws):
        self._boxes, self._doors, self._draws = boxes, flow.doors, draws
        self._own = range(stage.first_layer, stage.last_layer)
        self._is_first = stage.first_layer == 0
        self._layers = BoxedLayers(boxes, flow.doors, draws if draws.widths else None)
        self._kept: OrderedDict[int, dict[int, Leaves]] = OrderedDict()  # by length
        self._row: Tensor | None = None

    def install(self, layers: nn.ModuleList) -> None:
        """Let the stage's layers run their boxes."""
        self._layers.install({index: layers[index] for index in self._own})

    def share(self, layers_path: str, found: Mapping[str, OwnHeads]) -> None:
        """Let sequence parallel ranks share heads of recurrent modules, which are found by their paths."""
        for index in self._own:
            for box in self._boxes.of[index]:
                if (own := found.get(f"{layers_path}.{index}.{box.path}")) is not None and own.by_sp > 1:
                    self._layers.share(index, box.path, own)

    def enter(self, layers: nn.ModuleList, cut: CutForward) -> None:
        """After all else that stands around the layers: let the first one be handed what entered it."""
        self._cut, self._configs = cut, packed_configs(cut.model)
        if self._is_first and not self._boxes.packed:
            self._doors[0].enter_by(layers[0], self._replace_row)

    def again(self) -> AbstractContextManager[None]:
        """Within it, layers are computed again as they are now."""
        return self._layers.of(self._layers.running)

    def __call__(self, received: Tensor | None, batch: MicroBatch, run: BoxRun, inputs: Mapping[str, Any]) -> Any:
        """What the stage's last layer, or the model below its head, returns; `inputs` are the row's."""
        with self._layers.of(run):
            if self._boxes.packed:
                return self._cut(received, **inputs)
            ids = torch.empty(batch.position_ids.shape, dtype=torch.long, device="meta")
            start, stop = batch.pack.local
            if self._is_first:
                dim = self._doors[0].token_dim
                self._row = torch.cat([_entered(one) for one in run.captures], dim).narrow(dim, start, stop - start)
            try:
                with attending_by(self._boxes.attention, self._configs):
                    return self._cut(received, hollow=True, input_ids=ids, use_cache=False)
            finally:
                self._row = None

    def _replace_row(self, hidden: Tensor) -> Tensor:
        if self._row is None:  # a capture
            return hidden
        self._cut.leave()
        return self._row

    def captured(self, batch: MicroBatch, keys: Keys | None) -> BoxRun:
        """A micro-batch with what each of its sequences' layers are handed; none of these may be computed again."""
        pack, entering = batch.pack, self._is_first and not self._boxes.packed
        whole: Tensor = torch.zeros((1, pack.num_tokens), dtype=torch.long, device=batch.position_ids.device)
        if batch.input_ids is not None and (entering or not self._boxes.by_length):
            whole = all_of_row(batch.input_ids, 1, pack)
        of_length: dict[int, dict[int, Leaves]] = {}
        captures = []
        for sequence, length in enumerate(pack.lengths):
            known = of_length.get(length) or self._kept.get(length) if self._boxes.by_length else None
            if known is not None and not entering:
                captures.append(Capture(None, known))
                continue
            capture = self._capture(whole, pack, sequence, keys, [] if known is not None else self._own)
            if known is not None:
                capture.layers = known
            of_length[length] = capture.layers
            captures.append(capture)
        if self._boxes.by_length:
            self._keep(of_length)
        return BoxRun(pack, captures, keys)

    def _capture(self, ids: Tensor, pack: Pack, sequence: int, keys: Keys | None, wanted: Any) -> Capture:
        """What layers are called with where a sequence runs alone."""
        start, stop = pack.offsets[sequence : sequence + 2]
        own = None if keys is None else Keys(keys.row[start:stop], keys.row[start:stop])
        graph = nullcontext() if self._is_first or not self._boxes.by_length else torch.no_grad()
        with graph, self._draws.of(own), attending_by(self._boxes.attention, self._configs):  # noqa: SIM117
            with self._layers.capturing(wanted) as capture:
                self._cut.capture(input_ids=ids[:, start:stop], use_cache=False)
        return capture

    def _keep(self, found: Mapping[int, dict[int, Leaves]]) -> None:
        """Keep small ones for later micro-batches, those of the lengths that came last."""
        for length, layers in found.items():
            self._kept[length] = layers
            self._kept.move_to_end(length)
        sizes = {length: _num_bytes(layers) for length, layers in self._kept.items()}
        while sum(sizes.values()) > _KEPT_BYTES:
            length, _ = self._kept.popitem(last=False)
            del sizes[length]


def _entered(capture: Capture) -> Tensor:
    assert capture.entered is not None, "each sequence ran to the first layer"
    return capture.entered


def _num_bytes(layers: Mapping[int, Leaves]) -> int:
    """Of the tensors, each once: layers share most of them."""
    found = {id(tensor): tensor.nbytes for leaves in layers.values() for tensor in tensors_in(leaves)}
    return sum(found.values())
