"""One sequence's token ids and labels in; what it is trained with, cut and shifted, out. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ds_hydra.data.columns import IGNORE_INDEX, Int64Array, Item
from ds_hydra.data.item_check import TOKENS_ONLY, ModelInput
from ds_hydra.zero_hetero.errors import ConfigError

Float64Array = npt.NDArray[np.float64]


class TokenSequence(NamedTuple):
    """A sequence as it is trained on; both arrays are (tokens,)."""

    input_ids: Int64Array
    labels: Int64Array  # at each position the token to predict; IGNORE_INDEX where nothing is learnt
    weight: float = 1.0  # its tokens' losses count this many times; the number of targets that divides them stays
    fields: Float64Array | None = None  # (tokens, columns) [Note: fields], shifted as labels are


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
