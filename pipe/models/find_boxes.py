"""A model's mixers in; its boxes, each tried on a pack and on the sequences alone, out [Note: boxes].

A layer whose tokens meet by the attention interface alone keeps the tokens of a pack of sequences of one token each
apart, and needs no box. The boxes of any other layer are its children that mix, if the layer does not mix where these
are replaced by stand-ins that keep tokens apart; else the layer as a whole. What is not seen here for want of tokens is
the self-check's to find.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.pipe.attention.interface import tell_pack
from ds_hydra.pipe.models.attended import Attended, Where
from ds_hydra.pipe.models.boxed_layers import BoxedLayers
from ds_hydra.pipe.models.boxes import Box, Boxes, Capture, Leaves, Run, is_plain
from ds_hydra.pipe.models.cut import hand_on
from ds_hydra.pipe.models.find_heads import with_heads
from ds_hydra.pipe.models.find_states import with_states
from ds_hydra.pipe.models.flow import Door
from ds_hydra.pipe.models.mixers import FIRST, Call, Calls, Mixers, called, put_back
from ds_hydra.pipe.rows import Chunk, Pack
from ds_hydra.zero_hetero.errors import ConfigError

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
    twice = Where(attended, packed.model, packed.path).attends_twice
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

    def reason(self, index: int, call: Call, packed: nn.Module | None = None) -> str:
        """Why a layer, or the one that attends in packs, computes something else; empty if it does not."""
        alone, door = self._alone, self._alone.doors[index]
        places = [place for place, (v, s) in enumerate(zip(call.flat, call.sources, strict=True))
                  if s is None and isinstance(v, Tensor)]  # fmt: skip
        if len(places) != 1:  # it uses what another layer made of the same tokens: nothing to try it with
            return ""
        at, hidden = places[0], call.flat[places[0]]
        noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(hidden)
        try:
            with torch.no_grad():
                right = []
                for start, length, capture in zip(self._pack.offsets, self._pack.lengths, self._captures, strict=False):
                    own = noise.narrow(door.token_dim, start, length)
                    right.append(called(alone.layers[index], call, _with(capture.layers[index], at, own))[0])
                given = [
                    value if self._packed or not isinstance(value, Tensor) else value.to("meta") for value in call.flat
                ]
                with self._layers.of(Run(self._pack, self._captures)):
                    row = called(packed or alone.layers[index], call, _with(given, at, noise))[0]
        except Exception as error:  # of the model's own forward
            return f"{type(error).__name__}: {error}"
        expected = torch.cat(right, door.token_dim)
        near = torch.finfo(expected.dtype).eps ** 0.5 * max(1.0, float(expected.abs().max()))
        worst = float((row - expected).abs().max()) if row.shape == expected.shape else float("inf")
        return "" if worst <= near else f"its result is off by {worst:.2g} of {float(expected.abs().max()):.2g}"

    def end(self) -> None:
        """Take the boxes out again."""
        for module, forward in self._saved.items():
            put_back(module, forward)
            vars(module).pop("_hydra_chain", None)


def _with(flat: Leaves, place: int, value: Any) -> Leaves:
    return [*flat[:place], value, *flat[place + 1 :]]


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
