"""One sequence's tokens, labels and fields: what it is trained with, cut and shifted. Pure: no torch.

See [Note: fields]. A column is a field if it has a number, or a row of k numbers, for each of the item's `input_ids`,
padding included, or is one number. The same holds for `temperature`, which must be positive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ds_hydra.data.columns import IGNORE_INDEX, READ, TOKENS_ONLY, Int64Array, Item, ModelInput, as_array
from ds_hydra.pipe.rows import NUM_TARGETS, RESERVED, ROUTED_EXPERTS, TEMPERATURE, Field, FieldLayout, Routing
from ds_hydra.zero_hetero.errors import ConfigError

Float64Array = npt.NDArray[np.float64]


class TokenSequence(NamedTuple):
    """A sequence as it is trained on; both arrays are (tokens,)."""

    input_ids: Int64Array
    labels: Int64Array  # at each position the token to predict; IGNORE_INDEX where nothing is learnt
    weight: float = 1.0  # its tokens' losses count this many times; the number of targets that divides them stays
    fields: Float64Array | None = None  # (tokens, columns) [Note: fields], shifted as labels are
    images: Any = None  # of a job that trains images, what its capability keeps of them


class LeftOut(NamedTuple):
    """What was not trained on, as the config allows it or because there is nothing to predict."""

    truncated: int = 0  # sequences
    skipped: int = 0  # sequences, as too long
    short: int = 0  # sequences of fewer than two tokens
    tokens: int = 0  # that truncating and skipping took away

    def __add__(self, other: object) -> LeftOut:  # type: ignore[override]
        assert isinstance(other, LeftOut)
        return LeftOut(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def __str__(self) -> str:
        said = {
            "truncated": self.truncated,
            "skipped as too long": self.skipped,
            "of fewer than two tokens left out": self.short,
            "tokens left out": self.tokens,
        }
        return ", ".join(f"{count:,} {what}" for what, count in said.items() if count) or "none left out"


class Sequences(Protocol):
    """Where a rank finds the sequences that it runs."""

    def load_sequence(self, sequence_id: int) -> TokenSequence:
        """The sequence of that id."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What a job can train on. ConfigError for a context that is longer than the model's positions."""

    context_length: int | None = None  # in tokens
    too_long: str = "error"  # what becomes of a longer sequence: "error", "truncate" or "skip"
    vocab_size: int | None = None
    max_positions: int | None = None  # of the model
    inputs: ModelInput = TOKENS_ONLY

    def __post_init__(self) -> None:
        if self.context_length is None or self.max_positions is None or self.context_length <= self.max_positions:
            return
        raise ConfigError(
            f"hydra.context_length {self.context_length} is more than the model's {self.max_positions} "
            f"positions (max_position_embeddings): set it to at most {self.max_positions}, or give a model with more"
        )

    def usable(self, full: Int64Array, place: Callable[[int], str]) -> tuple[Int64Array, LeftOut]:
        """Tokens that sequences of these lengths (n,) are trained with, (n,), 0 for none; and what that leaves out.

        ConfigError, by which `place` names a sequence, for those that are longer than the context where `too_long` is
        "error", or than the model has positions.
        """
        limit = int(full.max(initial=0)) if self.context_length is None else self.context_length
        over = full > limit
        if self.too_long == "error" and over.any():
            raise ConfigError(self._told_of(full, over, place))
        lengths = full.copy()
        lengths[over] = 0 if self.too_long == "skip" else limit
        short = full < 2
        lengths[short] = 0
        if len(lengths):
            longest = int(lengths.argmax())
            self.check_positions(int(lengths[longest]), place(longest))
        cut = over & ~short
        used = lengths > 0
        return lengths, LeftOut(
            truncated=int((cut & used).sum()),
            skipped=int((cut & ~used).sum()),
            short=int(short.sum()),
            tokens=int((full - lengths)[cut].sum()),
        )

    def _told_of(self, full: Int64Array, over: npt.NDArray[np.bool_], place: Callable[[int], str]) -> str:
        worst = [int(i) for i in np.argsort(full, kind="stable")[::-1][:3] if over[i]]
        shown = ", ".join(f"{place(i)} has {full[i]} tokens" for i in worst)
        return (
            f"{shown}: {int(over.sum())} of {len(full)} sequences are longer than hydra.context_length "
            f'{self.context_length}. Set hydra.too_long to "truncate" or "skip", or raise hydra.context_length'
        )

    def check_positions(self, length: int, place: str) -> None:
        """ConfigError if a sequence of that many tokens is longer than the model has positions."""
        if self.max_positions is not None and length > self.max_positions:
            raise ConfigError(
                f"{place} has {length} tokens, more than the model's {self.max_positions} "
                f"positions (max_position_embeddings): set hydra.context_length to at most {self.max_positions} and "
                'hydra.too_long to "truncate" or "skip", or give a model with more'
            )

    def sequence(
        self, input_ids: Int64Array, labels: Int64Array, length: int, place: str, *, weight: float = 1.0
    ) -> TokenSequence:
        """The first `length` tokens of a sequence, labels shifted: labels[t] is what to predict at position t, the last
        one IGNORE_INDEX. ConfigError, which begins with `place`, for ids outside of the vocabulary."""
        input_ids, labels = input_ids[:length], labels[:length]
        self._check_tokens(input_ids, place, "token")
        shifted = np.full(length, IGNORE_INDEX, dtype=np.int64)
        shifted[:-1] = labels[1:]
        self._check_tokens(shifted[shifted != IGNORE_INDEX], place, "label")
        self._check_counted(input_ids, place)
        return TokenSequence(input_ids, shifted, weight)

    def check(self, item: Item, place: str) -> None:
        """ConfigError, which begins with `place`, if a sequence of an item has tokens or labels that `sequence` would
        refuse."""
        for part, full in enumerate(item.lengths):
            over = self.context_length is not None and full > self.context_length
            length = min(full, self.context_length or full)
            if length > 1 and not (over and self.too_long == "skip"):
                self.sequence(*item.sequence(part), length, place)

    def _check_counted(self, input_ids: Int64Array, place: str) -> None:
        for token in self.inputs.uncounted:
            at = np.flatnonzero(input_ids == token)
            if len(at):
                raise ConfigError(
                    f"{place} holds the token {token} at position {at[0]}, which the model does not count when it "
                    "numbers the tokens of a sequence, such as its padding token: packed sequences are numbered "
                    "through. Mark padding by attention_mask, use another token inside of sequences, or give the model "
                    "another pad_token_id"
                )

    def _check_tokens(self, tokens: Int64Array, place: str, what: str) -> None:
        limit = self.vocab_size
        if not len(tokens):
            return
        worst = int(tokens.max()) if limit is not None and tokens.max() >= limit else int(tokens.min())
        if worst < 0 or (limit is not None and worst >= limit):
            size = f" (vocabulary of {limit}: ids 0..{limit - 1})" if limit is not None else ""
            raise ConfigError(
                f"{place} holds the {what} id {worst}, which the model does not have{size}: "
                "use the tokenizer that belongs to the model, or a model with a larger vocabulary"
            )


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
                f"{place} has the fields {_names_of(other)}, but {first} {_names_of(one)}: give all sequences "
                "of a step the same fields"
            )
    whole = [all(layout.fields[i].whole for _, layout in layouts) for i in range(len(one.fields))]
    return FieldLayout(tuple(field._replace(whole=is_whole) for field, is_whole in zip(one.fields, whole, strict=True)))


def _shapes(layout: FieldLayout) -> list[tuple[str, int]]:
    return [(field.name, field.width) for field in layout.fields]


def _names_of(layout: FieldLayout) -> str:
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
