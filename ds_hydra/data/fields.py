"""An item's columns beside tokens, labels and masks in; the fields of all items of a step out. Pure: no torch.

See [Note: fields]. A column is a field if it has a number, or a row of k numbers, for each of the item's `input_ids`,
padding included, or is one number. The same holds for `temperature`, which must be positive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds_hydra.data.columns import IGNORE_INDEX, READ, as_array
from ds_hydra.data.tokens import Float64Array, TokenSequence
from ds_hydra.pipe.fields import NUM_TARGETS, RESERVED, ROUTED_EXPERTS, TEMPERATURE, Field, FieldLayout, Routing
from ds_hydra.zero_hetero.errors import ConfigError

Values = Mapping[str, npt.NDArray[Any]]
"""Of one item without its padding, by name: (tokens,), (tokens, k), or () for one number."""

_EXACT = 2.0**53  # whole numbers up to here are exact in FP64
_REMEDY = "correct how the column was made, or take it out"


class Reads(NamedTuple):
    """Which columns of the items are fields."""

    given: Mapping[str, float] = MappingProxyType({})  # fields that have one number for all sequences
    only: frozenset[str] | None = None  # of the items' columns; None: all that say nothing of tokens and labels
    routing: Callable[[], Routing] | None = None  # tells of the routers, where items have choices of experts


class FieldItem(NamedTuple):
    """The fields of an item, and how errors name it."""

    place: str
    values: Values


def read_fields(item: Any, index: int, reads: Reads) -> FieldItem:
    """The fields of item `index`. ConfigError for a column that is to be one and cannot be."""
    place, given = f"item {index} of the data", reads.given
    found: dict[str, npt.NDArray[Any]] = {}
    if isinstance(item, Mapping):
        num_tokens = len(as_array(item["input_ids"]))
        mask = item.get("attention_mask")
        kept = np.ones(num_tokens, dtype=np.bool_) if mask is None else as_array(mask) != 0
        names = [name for name in item if name not in READ and item[name] is not None]
        if unnamed := [name for name in names if not isinstance(name, str)]:
            raise ConfigError(f"{place} has a column {unnamed[0]!r}, and a field is called by its name: {_REMEDY}")
        for name in sorted(name for name in names if reads.only is None or name in reads.only):
            if name in given:
                raise ConfigError(f"{place} has a column {name!r}, which the call gives as an argument too: keep one")
            if name == ROUTED_EXPERTS and reads.routing is not None:
                found[name] = _choices(item[name], kept, place, reads.routing())
            else:
                found[name] = _values(item[name], name, kept, place)
    found |= {name: np.float64(value) * np.ones(()) for name, value in given.items()}
    if TEMPERATURE in found and (found[TEMPERATURE].ndim > 1 or not (found[TEMPERATURE] > 0).all()):
        raise ConfigError(f"{place}: {TEMPERATURE} must be a positive number, for the item or for each of its tokens")
    return FieldItem(place, found)


def _values(column: Any, name: str, kept: npt.NDArray[np.bool_], place: str) -> npt.NDArray[Any]:
    """One column without the padding."""
    if name in RESERVED:
        raise ConfigError(f"{place} has a column {name!r}, a name that losses are given something else by: rename it")
    try:
        # NumPy has no BF16.
        values = as_array(column.float() if str(getattr(column, "dtype", "")) == "torch.bfloat16" else column)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{place}: {name} is no array of numbers ({error}): {_REMEDY}") from None
    if values.dtype.kind not in "iubf":
        raise ConfigError(
            f"{place}: {name} holds no numbers (type {values.dtype}), and each column beside tokens, labels and masks "
            f"is a field for the loss: {_REMEDY}"
        )
    if values.ndim and (values.ndim > 2 or len(values) != len(kept) or values[:1].size == 0):
        raise ConfigError(
            f"{place} has {len(kept)} input_ids, but the field {name!r} has the shape {values.shape}: give one number, "
            f"or a number or a row of them for each of the input_ids ({len(kept)}, at the token's own place); {_REMEDY}"
        )
    values = values[kept] if values.ndim else values
    wrong = ~np.isfinite(values) | (np.abs(values) > _EXACT if values.dtype.kind in "iu" else False)
    if wrong.any():
        at = f" at token {np.argwhere(wrong)[0][0]}" if values.ndim else ""
        raise ConfigError(f"{place}: the field {name!r} holds {values[wrong].flat[0]}{at}: {_REMEDY}")
    return values


def _choices(column: Any, kept: npt.NDArray[np.bool_], place: str, routing: Routing) -> npt.NDArray[Any]:
    """Choices of experts, (tokens, routers * chosen), without the padding."""
    values, routers = as_array(column), len(routing.paths)
    form = (len(kept), routers, routing.chosen)
    if values.dtype.kind not in "iu" or values.shape != form:
        raise ConfigError(
            f"{place}: {ROUTED_EXPERTS} has the shape {values.shape} and the type {values.dtype}, but with {len(kept)} "
            f"input_ids, {routers} routers and {routing.chosen} experts of a token it is to have whole numbers of the "
            f"shape {form}, the routers in the order of the model's layers ({routing.paths[0]}, ...)"
        )
    values = values[kept].astype(np.int64)
    experts = np.array(routing.experts)[:, None]
    order = np.sort(values, axis=-1)
    for wrong, what in (((values < 0) | (values >= experts), "which there is not"),
                        (order[..., 1:] == order[..., :-1], "twice")):  # fmt: skip
        if wrong.any():
            token, router, at = np.argwhere(wrong)[0]
            which = order if what == "twice" else values
            raise ConfigError(
                f"{place}: at token {token} {ROUTED_EXPERTS} names the expert {which[token, router, at]} of "
                f"{routing.paths[router]} (0 to {routing.experts[router] - 1}), {what}: {_REMEDY}"
            )
    return values.reshape(len(values), -1)


def layout_of(items: Sequence[FieldItem]) -> FieldLayout:
    """What all of these have. ConfigError where one has other fields than the first, or wider ones."""
    if not items:
        return FieldLayout()
    own = [
        FieldLayout(
            tuple(
                Field(name, values.shape[1] if values.ndim == 2 else 0, values.dtype.kind in "iub")
                for name, values in sorted(item.values.items())
            )
        )
        for item in items
    ]
    return merged(list(zip([item.place for item in items], own, strict=True)))


def merged(layouts: Sequence[tuple[str, FieldLayout]]) -> FieldLayout:
    """The layout that all of these, with the places that have them, agree on. ConfigError where they do not."""
    (first, one), *others = layouts
    for place, other in others:
        if _shapes(other) != _shapes(one):
            raise ConfigError(
                f"{place} has the fields {_shown(other)}, but {first} {_shown(one)}: give all sequences of a step the "
                "same fields"
            )
    whole = [all(layout.fields[i].whole for _, layout in layouts) for i in range(len(one.fields))]
    return FieldLayout(tuple(field._replace(whole=is_whole) for field, is_whole in zip(one.fields, whole, strict=True)))


def _shapes(layout: FieldLayout) -> list[tuple[str, int]]:
    return [(field.name, field.width) for field in layout.fields]


def _shown(layout: FieldLayout) -> str:
    return ", ".join(f"{name} ({width} a token)" if width else name for name, width in _shapes(layout)) or "none"


def with_fields(sequence: TokenSequence, values: Values, layout: FieldLayout, tokens: slice) -> TokenSequence:
    """A sequence, the `tokens` of an item, with its columns of `layout`, and behind them its number of targets."""
    length = len(sequence.input_ids)
    matrix: Float64Array = np.zeros((length, layout.num_columns + 1))
    for field, columns in layout.places():
        value = values[field.name]
        if field.name == ROUTED_EXPERTS:
            matrix[:, columns] = value[tokens][:length]
            continue
        # Shifted as labels are: what is said of the next token meets what predicts it.
        matrix[:-1, columns] = value if value.ndim == 0 else value[tokens][1:length].reshape(length - 1, -1)
    matrix[:, -1] = int((sequence.labels != IGNORE_INDEX).sum())
    return sequence._replace(fields=matrix)


def with_targets(layout: FieldLayout) -> FieldLayout:
    """The columns of `with_fields`."""
    return layout.and_also(Field(NUM_TARGETS, 0, True))
