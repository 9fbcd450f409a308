"""Items of data in; ConfigError for what would not train as it says, and lines for the log, out. Pure: no torch.

[Note: columns that a model takes]
Training hands a model its tokens and their positions, and nothing else of an item. A column beside these changes
nothing if the model's forward has no argument of its name: it is named once in the log. If there is such an argument,
the user's own model would compute something else with it, so the column is refused; token_type_ids of 0 are what
models of BERT's kind take for none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ds_hydra.data.columns import IGNORE_INDEX, MASKS, READ, Item, as_array
from ds_hydra.zero_hetero.errors import ConfigError

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
            self._seen.add(names)
            unread = sorted(name for name in names if name not in READ)
            for name in unread:
                self._check_column(name, item[name], item["input_ids"], index)
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
        if padding.shape != labels.shape or not (labels[padding] != IGNORE_INDEX).any():
            return []
        self._padding_told = True
        return [f"item {index} of the data has labels at padding (attention_mask 0): they are not learnt"]

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
