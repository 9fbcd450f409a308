"""One item of a dataset: its tokens, its labels and the sequences packed in it, checked. Pure: no torch.

[Note: columns]
A column that says something about training is used or refused, and never ignored:

    input_ids                          the tokens
    labels                             what to predict, not shifted; IGNORE_INDEX where nothing is to be learnt
    attention_mask                     0: padding, taken out, never between tokens of one sequence; 1, 2, 3, ...: the
                                       packed sequence that a token belongs to
    completion_mask, assistant_masks   0: not learnt
    position_ids                       count from 0 and begin anew at each packed sequence
    seq_lengths                        tokens of each packed sequence
    seq_idx                            another number at each packed sequence
    cu_seq_lens_q, cu_seq_lens_k       where each packed sequence begins, and the number of tokens
    max_length_q, max_length_k         one number: tokens of the longest packed sequence, or more
    sequence_weight                    one number: the losses of the item's tokens count this many times

An item with input_ids (5 6 7 8 9) and position_ids (0 1 2 0 1) is two sequences, (5 6 7) and (8 9): they are trained
on apart, as if the dataset had held them so.

[Note: columns that a model takes]
Training hands a model its tokens and their positions, and nothing else of an item. A column beside these changes
nothing if the model's forward has no argument of its name: it is named once in the log. If there is such an argument,
the user's own model would compute something else with it, so the column is refused; token_type_ids of 0 are what
models of BERT's kind take for none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds_hydra.zero_hetero.errors import ConfigError

IGNORE_INDEX = -100
Int64Array = npt.NDArray[np.int64]

_LOSS_MASKS = ("completion_mask", "assistant_masks")
# By what transformers' flash attention and the kernels themselves call them; collators write them beside position_ids.
STARTS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens")
LONGEST = ("max_length_q", "max_length_k", "max_seqlen_q", "max_seqlen_k", "max_seqlen")
_OF_SEQUENCES = ("seq_lengths", *STARTS)  # columns with numbers of sequences, and not of tokens
_PACKING = ("position_ids", "seq_idx", *_OF_SEQUENCES)
_ARRAYS = ("input_ids", "labels", "attention_mask", *_LOSS_MASKS, *_PACKING)
_WEIGHT = "sequence_weight"
READ = frozenset((*_ARRAYS, *LONGEST, _WEIGHT))
MASKS = (*_LOSS_MASKS, "attention_mask", *_PACKING)


class Item(NamedTuple):
    """The content of an item without its padding; both arrays are (tokens,), and `lengths` add up to that."""

    input_ids: Int64Array
    labels: Int64Array  # not shifted
    lengths: tuple[int, ...]  # tokens of each sequence in it; one, unless it is packed
    weight: float = 1.0  # of each of them

    def sequence(self, part: int) -> tuple[Int64Array, Int64Array]:
        """Token ids and labels of one of its sequences."""
        tokens = self.tokens(part)
        return self.input_ids[tokens], self.labels[tokens]

    def tokens(self, part: int) -> slice:
        """The places of one of its sequences."""
        start = sum(self.lengths[:part])
        return slice(start, start + self.lengths[part])


def as_array(values: Any) -> npt.NDArray[Any]:
    """A list, array or tensor, of whatever device, as an array on the host."""
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)


def is_packed(item: Any) -> bool:
    """Whether an item has columns by which it may hold several sequences."""
    if not isinstance(item, Mapping):
        return False
    mask = item.get("attention_mask")
    return any(item.get(name) is not None for name in _PACKING) or (
        mask is not None and as_array(mask).max(initial=0) > 1
    )


def read_item(item: Any, index: int) -> Item:
    """Read item `index` of a dataset. ConfigError if it is no token sequence or its columns contradict each other."""
    if not isinstance(item, Mapping):
        tokens = _whole_numbers(item, index, "the item")
        return Item(tokens, tokens, (len(tokens),))
    if "input_ids" not in item:
        raise ConfigError(
            f"item {index} of the data has the columns {sorted(map(str, item))} but no 'input_ids': give token ids, "
            "as a tokenizer returns them"
        )
    columns = {
        str(name): _whole_numbers(item[name], index, str(name))
        for name in _ARRAYS
        if item.get(name) is not None and not (name == "seq_idx" and np.ndim(item[name]) == 0)  # an item's own number
    }
    input_ids = columns["input_ids"]
    for name, values in columns.items():
        if name not in _OF_SEQUENCES and len(values) != len(input_ids):
            raise ConfigError(
                f"item {index} of the data has {len(input_ids)} input_ids but {len(values)} entries in {name!r}: "
                "there must be as many of each, so correct how the column was made"
            )
    labels = columns.get("labels", input_ids)
    for name in _LOSS_MASKS:
        if name in columns:
            labels = np.where(columns[name] == 0, IGNORE_INDEX, labels)
    mask = columns.get("attention_mask", np.ones_like(input_ids))
    _check_mask(mask, labels, index)
    kept = mask != 0
    packed = _packed_lengths(columns, kept, index)
    for name in LONGEST:
        if item.get(name) is not None and max(packed, default=0) > int(item[name]):
            raise ConfigError(
                f"item {index} of the data has {name} {int(item[name])}, but a sequence of {max(packed)} tokens in it: "
                "correct or remove what is wrong"
            )
    places = np.flatnonzero(kept)
    _check_holes(places, packed, index)
    return Item(input_ids[kept], labels[kept], packed, _weight(item.get(_WEIGHT), index))


def _weight(value: Any, index: int) -> float:
    if value is None:
        return 1.0
    try:
        weight = float(value)
    except (TypeError, ValueError, RuntimeError):
        weight = math.nan
    if not math.isfinite(weight):
        raise ConfigError(f"item {index} of the data: {_WEIGHT} must be one finite number, but is {value!r}")
    return weight


def _check_mask(mask: Int64Array, labels: Int64Array, index: int) -> None:
    """ConfigError for a mask (tokens,) that is none of 0 and 1, nor of the numbers 1, 2, 3, ... of packed sequences."""
    kept = mask[mask != 0]
    if not len(kept):
        if len(mask) and (labels != IGNORE_INDEX).any():
            raise ConfigError(
                f"item {index} of the data: attention_mask is 0 at all of its {len(mask)} tokens, but labels are to be "
                "learnt there: correct the mask, or leave the item out"
            )
        return
    wrong = np.concatenate(([kept[0] != 1], ~np.isin(np.diff(kept), (0, 1))))
    if wrong.any():
        at = int(np.flatnonzero(mask != 0)[np.argmax(wrong)])
        raise ConfigError(
            f"item {index} of the data: attention_mask has {mask[at]} at token {at}, but only 0 for padding and 1 are "
            "understood, or 1, 2, 3, ... for the packed sequence that a token belongs to, one after the other: correct "
            "the mask"
        )


def _check_holes(kept: Int64Array, lengths: tuple[int, ...], index: int) -> None:
    """ConfigError for padding inside a sequence; `kept` are the places of the tokens that are none."""
    # Hugging Face leaves a masked token in place, so those behind it keep their positions. Here padding is taken out.
    holes = np.flatnonzero(np.diff(kept) > 1) + 1
    inside = holes[~np.isin(holes, np.cumsum(lengths))]
    if len(inside):
        at = int(kept[inside[0] - 1]) + 1
        raise ConfigError(
            f"item {index} of the data: attention_mask is 0 at token {at}, between tokens of one sequence, of which "
            "ds_hydra takes padding only before, behind and between packed sequences: take these tokens out of the "
            f"item, or keep them and put {IGNORE_INDEX} into 'labels' where nothing is to be learnt"
        )


def _packed_lengths(columns: Mapping[str, Int64Array], kept: npt.NDArray[np.bool_], index: int) -> tuple[int, ...]:
    """Tokens of each sequence of an item without its padding, which `kept` leaves out; ConfigError if its columns
    disagree about them."""
    # Several columns can say it, and collators write two and more of them. For the lengths (3, 2): position_ids
    # 0 1 2 0 1, attention_mask 1 1 1 2 2, seq_lengths 3 2, seq_idx 0 0 0 1 1, cu_seq_lens_q 0 3 5. If two disagree, one
    # is wrong; after a wrong guess, tokens would attend to another sequence.
    num_tokens = int(kept.sum())
    said: dict[str, tuple[int, ...]] = {}
    if "position_ids" in columns:
        said["position_ids"] = _lengths_from(_restarts(columns["position_ids"][kept], index))
    mask = columns.get("attention_mask", kept)[kept]
    if mask.max(initial=0) > 1:
        said["attention_mask"] = _lengths_from(np.diff(mask, prepend=0) != 0)
    if "seq_idx" in columns:
        numbers = columns["seq_idx"][kept]
        said["seq_idx"] = _lengths_from(np.diff(numbers, prepend=numbers[:1] - 1) != 0)
    for name in STARTS:
        if name in columns:
            said[name] = _lengths_between(columns[name], kept, name, index)
    if "seq_lengths" in columns:
        said["seq_lengths"] = tuple(columns["seq_lengths"].tolist())
        if sum(said["seq_lengths"]) != num_tokens or min(said["seq_lengths"], default=1) < 1:
            raise ConfigError(
                f"item {index} of the data: seq_lengths {_shown(said['seq_lengths'])} must be lengths of at least 1 "
                f"that add up to its {num_tokens} tokens: correct or remove the column"
            )
    if len(set(said.values())) > 1:
        one, first = next(iter(said.items()))
        other, second = next(pair for pair in said.items() if pair[1] != first)
        raise ConfigError(
            f"item {index} of the data is packed with sequences of {_shown(first)} tokens by {one}, but of "
            f"{_shown(second)} by {other}: remove the column that is wrong"
        )
    return next(iter(said.values()), (num_tokens,))


def _restarts(positions: Int64Array, index: int) -> npt.NDArray[np.bool_]:
    """Where a sequence begins, (tokens,)."""
    due = np.concatenate(([0], positions[:-1] + 1))  # what counting on would give
    wrong = np.flatnonzero((positions != 0) & (positions != due[: len(positions)]))
    if len(wrong):
        at = int(wrong[0])
        raise ConfigError(
            f"item {index} of the data: position_ids has {positions[at]} at token {at}, where only {due[at]} is "
            "understood, or 0 where a packed sequence begins: remove the column if the item is one sequence, else "
            "give seq_lengths in its place"
        )
    return np.asarray(positions == 0)


def _lengths_between(starts: Int64Array, kept: npt.NDArray[np.bool_], name: str, index: int) -> tuple[int, ...]:
    """Tokens between each two of `starts`, which count either all tokens or, like kernels, those that are kept."""
    whole, num_tokens = len(kept), int(kept.sum())
    if not len(starts) or starts[0] or (np.diff(starts) < 0).any() or starts[-1] not in (whole, num_tokens):
        raise ConfigError(
            f"item {index} of the data: {name} {_shown(tuple(starts.tolist()))} must count up from 0 to its {whole} "
            "tokens: correct or remove the column"
        )
    if starts[-1] == whole:
        starts = np.concatenate(([0], np.cumsum(kept)))[starts]
    lengths = np.diff(starts)
    return tuple(lengths[lengths > 0].tolist())


def _lengths_from(begins: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(np.diff(np.append(np.flatnonzero(begins), len(begins))).tolist())


def _shown(lengths: tuple[int, ...]) -> str:
    return ", ".join(map(str, lengths[:8])) + (", ..." if len(lengths) > 8 else "")


def _whole_numbers(values: Any, index: int, what: str) -> Int64Array:
    try:
        numbers = as_array(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"item {index} of the data: {what} is no list of whole numbers ({error}): give one sequence an item, "
            "neither padded nor collated"
        ) from None
    if numbers.size == 0:
        return np.zeros(0, dtype=np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iub":
        raise ConfigError(
            f"item {index} of the data: {what} must be one-dimensional whole numbers, but has shape {numbers.shape}, "
            f"type {numbers.dtype}: give one sequence an item, as token ids"
        )
    return numbers.astype(np.int64)


_HARMLESS = frozenset(("special_tokens_mask", "token_type_ids", "length", "lengths", "num_tokens"))
"""Written by tokenizers and samplers for other uses; a causal language model is trained without them."""
_MASK_LIKE = re.compile(r"mask|weight|label|position|segment|seq_?(len|idx|id)|seqlens?|document_ids|turn_ids")
_TYPES = "token_type_ids"
_ENOUGH = 32  # labels that tell whether all are shifted


class ModelInput(NamedTuple):
    """What a model's forward does with what items may hold."""

    arguments: frozenset[str] = frozenset()  # that it takes
    zero_types: bool = False  # whether token_type_ids of 0 are the same to it as none
    first_position: int = 0  # of a sequence
    uncounted: tuple[int, ...] = ()  # tokens that it leaves out where it numbers those of a sequence
    counts_padding: bool = False  # whether it numbers the padding before a sequence, where no positions are given


TOKENS_ONLY = ModelInput()


class ItemCheck:
    """Looks at the items of some data [Note: columns that a model takes]; it says everything once."""

    def __init__(self, inputs: ModelInput = TOKENS_ONLY) -> None:
        self._inputs = inputs
        self._seen: set[tuple[str, ...]] = set()  # sets of columns: to look at values costs time for every item
        self._labels, self._same, self._next, self._before = 0, 0, 0, 0
        self._padding_told = self._first_told = False

    def check(self, item: Any, read: Item, index: int, *, reads_fields: bool = False) -> list[str]:
        """Lines for the log about item `index`, as it is and as it was read; with `reads_fields` a loss is given all
        columns that say nothing of tokens and labels.

        Raises ConfigError for a column that the model's forward takes, and for one that looks as if it decided which
        tokens are learnt or belong together: by its name, or because it holds a 0 or 1 for each token.
        """
        if not isinstance(item, Mapping):
            return []
        names = tuple(name for name in item if isinstance(name, str) and item[name] is not None)
        if _TYPES in names and _TYPES in self._inputs.arguments:
            self._check_types(item[_TYPES], index)
        if "position_ids" in names and self._inputs.first_position:
            raise ConfigError(
                f"item {index} of the data has position_ids, but the model numbers the tokens of a sequence from "
                f"{self._inputs.first_position} on: take the column out, and give seq_lengths where items are packed"
            )
        if self._inputs.counts_padding and "attention_mask" in names and "position_ids" not in names:
            self._check_padding_before(item["attention_mask"], index)
        lines = self._shifted(read, index) if "labels" in names else []
        if "labels" in names and "attention_mask" in names and not self._padding_told:
            lines += self._padding(item, index)
        if "labels" in names and not self._first_told:
            lines += self._first(read, index)
        if reads_fields:
            for name in names:
                if name not in READ:
                    self._refuse_argument(name, item[name], index)
        elif names not in self._seen:
            unread = sorted(name for name in names if name not in READ)
            for name in unread:
                self._check_column(name, item[name], item["input_ids"], index)
            self._seen.add(names)
            if unread:
                lines.append(f"items of the data also hold {', '.join(unread)}, which training does not read")
        return lines

    def _check_padding_before(self, values: Any, index: int) -> None:
        mask = as_array(values)
        if mask.any() and not mask.flat[0]:
            raise ConfigError(
                f"item {index} of the data has {int(np.argmax(mask != 0))} tokens of padding before its first one, and "
                "no position_ids: the model would number them too, and ds_hydra takes them out. Pad behind, or give "
                "position_ids as attention_mask.cumsum(-1) - 1, or items without padding"
            )

    def _check_types(self, values: Any, index: int) -> None:
        types = as_array(values)
        if self._inputs.zero_types and not types.any():
            return
        at = int(np.argmax(types != 0)) if types.any() else 0
        raise ConfigError(
            f"item {index} of the data: {_TYPES} has {types.ravel()[at]} at token {at}, and the model's forward takes "
            f"them, but ds_hydra does not hand them on: take the column out of the data, if the model is to be trained "
            "without it"
        )

    def _refuse_argument(self, name: str, value: Any, index: int) -> None:
        if name in self._inputs.arguments and name != _TYPES and not isinstance(value, str):
            raise ConfigError(
                f"item {index} of the data has a column {name!r}, which the model's forward takes, but ds_hydra does "
                "not hand it on: take the column out of the data, if the model is to be trained without it"
            )

    def _check_column(self, name: str, value: Any, input_ids: Any, index: int) -> None:
        self._refuse_argument(name, value, index)
        if name not in _HARMLESS and _looks_like_a_mask(name, value, input_ids):
            raise ConfigError(
                f"item {index} of the data has a column {name!r}, which looks like a mask but is not one that ds_hydra "
                f"reads ({', '.join(MASKS)}): rename it to the one it is, put {IGNORE_INDEX} into 'labels' where "
                "nothing is to be learnt, or remove it"
            )

    def _padding(self, item: Any, index: int) -> list[str]:
        padding, labels = as_array(item["attention_mask"]) == 0, as_array(item["labels"])
        if padding.shape != labels.shape:
            return []
        lines = []
        if (labels[padding] != IGNORE_INDEX).any():
            lines.append(f"item {index} of the data has labels at padding (attention_mask 0): they are not learnt")
        # Of a token that sees nothing a plain model has what its attention's kernel makes of it: often NaN.
        first = int(np.argmin(padding)) if padding.any() else 0
        if first and labels[first] != IGNORE_INDEX:
            lines.append(
                f"item {index} of the data begins with {first} tokens of padding, and the first token behind them has "
                f"a label: it is not learnt, where a plain model would learn it from padding. Set it to {IGNORE_INDEX}"
            )
        self._padding_told = bool(lines)
        return lines

    def _first(self, read: Item, index: int) -> list[str]:
        """What is said of labels that have no token of their sequence before them, but another sequence."""
        begins = np.cumsum(read.lengths)[:-1]
        if not (read.labels[begins] != IGNORE_INDEX).any():
            return []
        self._first_told = True
        return [
            f"item {index} of the data has a label at the first token of a sequence, behind another sequence: it is "
            "not learnt, where Hugging Face's loss would learn it from what stands before it"
        ]

    def _shifted(self, read: Item, index: int) -> list[str]:
        """What is wrong with labels that stand at their neighbours' places, once there are enough to tell."""
        if self._labels >= _ENOUGH:
            return []
        tokens, labels = read.input_ids, read.labels
        own, learnt = labels[1:-1], labels[1:-1] != IGNORE_INDEX
        self._labels += int(learnt.sum())
        for name, there in (("_same", tokens[1:-1]), ("_next", tokens[2:]), ("_before", tokens[:-2])):
            setattr(self, name, getattr(self, name) + int((own == there)[learnt].sum()))
        if self._labels < _ENOUGH or 2 * self._same > self._labels:
            return []
        for count, place, effect in (
            (self._next, "i + 1", "each token would learn to predict the one after the next"),
            (self._before, "i - 1", "each token would learn to predict itself"),
        ):
            if 10 * count >= 9 * self._labels:
                return [
                    f"the labels of the data seem to be shifted already (item {index} and before: labels[i] is "
                    f"input_ids[{place}] at {count} of {self._labels} places): they are shifted once more here, as in "
                    f"Hugging Face's models, so {effect}. Give each label at the place of its own token, as "
                    "labels = input_ids does"
                ]
        return []


def _looks_like_a_mask(name: str, value: Any, input_ids: Any) -> bool:
    try:
        values = as_array(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    if values.ndim == 0 or values.dtype.kind not in "iubf":
        return False
    flags = values.shape == np.shape(input_ids) and bool(np.isin(values, (0, 1)).all())
    return flags or _MASK_LIKE.search(name.lower()) is not None
