"""Random numbers that depend on what they are drawn for, never on who draws them, when, or beside what else.

[Note: draws by place]
A generator hands out numbers in the order of the calls, so that a mask depends on which rank drew how much before. Here
every number is a hash of what it is for:

    seed, step, sequence, position   -> a key of 32 bits for each token
    layer, module, count of the draw -> the place, 32 bits
    feature                          -> the column

Two ranks that hold the same token of the same sequence draw the same numbers for it, a rank that holds features
[8, 16) draws what one process draws there, and a forward that is recomputed draws again what it drew. The hash is
"lowbias32" (C. Wellons, Prospecting for Hash Functions, 2018): xor with a shift, multiply, twice. Keys, places and
columns are mixed each for itself first; the T x width numbers then need one round more.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_hydra.pipe.pinned import on_device

_M1, _M2, _GOLDEN, _WORD = 0x7FEB352D, 0x846CA68B, 0x9E3779B9, 0xFFFFFFFF
_HEADS = 0x85EBCA6B  # sets the columns of heads apart from those of features


def mix(number: int) -> int:
    """lowbias32 of a number, of which 32 bits count."""
    number &= _WORD
    number = (number ^ number >> 16) * _M1 & _WORD
    number = (number ^ number >> 15) * _M2 & _WORD
    return number ^ number >> 16


def step_key(seed: int, step: int) -> int:
    """32 bits that all draws of a step share."""
    return mix(mix(mix(seed) ^ seed >> 32) + step * _GOLDEN)


def sequence_key(step: int, sequence_id: int) -> int:
    """32 bits for a sequence (its number in the data) in a step, given by its `step_key`."""
    return mix(mix(sequence_id * _GOLDEN) ^ mix(sequence_id >> 32) ^ step)


@lru_cache(maxsize=65536)
def place_key(layer: int | None, module: str, count: int) -> int:
    """32 bits for the `count`-th draw of a module in a run of a layer; None: outside of the layers."""
    text = f"{'' if layer is None else layer}/{module}#{count}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def token_keys(lengths: Sequence[int], keys: Sequence[int], *, past: int = 0) -> Tensor:
    """Keys of the tokens of a packed row, int32 (T,) on the host, from those of its sequences.

    `past` is the position of the first token, which is not 0 for a slice of a sequence.
    """
    sequences = np.repeat(np.asarray(keys, dtype=np.uint32), lengths)
    positions = np.concatenate([np.arange(length, dtype=np.uint32) for length in lengths])
    positions[: lengths[0]] += np.uint32(past)
    return torch.from_numpy(_mix_array(sequences ^ positions * np.uint32(_GOLDEN)).view(np.int32))


def _mix_array(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    x = (x ^ x >> np.uint32(16)) * np.uint32(_M1)
    x = (x ^ x >> np.uint32(15)) * np.uint32(_M2)
    return x ^ x >> np.uint32(16)


def random_bits(keys: Tensor, place: int, columns: range) -> Tensor:
    """Random bits, int32 (*keys.shape, len(columns)), for tokens with these keys at a place; the upper bits are best.

    Torch has no logical shift of int32: the bits that an arithmetic one drags in are masked away.
    """
    rows = _mix(keys ^ _signed(place))
    bits = rows.unsqueeze(-1) ^ _column_keys(columns, keys.device)
    bits.mul_(_M1)
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    return bits.mul_(_signed(_M2))


def keep_mask(keys: Tensor, place: int, columns: range, rate: float) -> Tensor:
    """Which of the features `columns` of tokens with these keys are kept: bool (*keys.shape, len(columns)).

    Each is dropped with probability `rate`, below 1.
    """
    return random_bits(keys, place, columns) >= round(rate * 2**32) - 2**31


def uniform(keys: Tensor, place: int, columns: range, dtype: torch.dtype) -> Tensor:
    """Numbers in (0, 1), the same in every dtype but for its rounding: (*keys.shape, len(columns))."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    upper = (random_bits(keys, place, columns) >> 9).bitwise_and_(0x7FFFFF)
    return upper.to(wide).add_(0.5).mul_(2.0**-23)


def drop(x: Tensor, keep: Tensor, rate: float) -> Tensor:
    """`x` where it is kept, scaled so that its mean stays, and 0 elsewhere."""
    return torch.where(keep, x, 0.0) * (1.0 / (1.0 - rate))


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of attention's probabilities: a number for each head, query and key, wherever they are computed."""

    rate: float
    keys: Tensor  # int32 (T,) of all tokens of the packed row
    place: int
    first_head: int = 0  # of the heads at hand, in the whole model
    past: int = 0  # position of the first key at hand, which is not 0 for a slice with a window

    def __call__(self, weights: Tensor, *, first_token: int, first_query: int, first_key: int) -> Tensor:
        """`weights` (1, heads, queries, keys) of one sequence, some of them dropped.

        Its queries start at `first_token` of the row; `first_query` and `first_key` count from the first at hand.
        """
        if self.rate >= 1.0:
            return weights * 0.0
        heads, queries, num_keys = weights.shape[1:]
        per_query = self.keys[first_token + first_query :][:queries]
        per_head = _column_keys(range(self.first_head, self.first_head + heads), weights.device) ^ _signed(_HEADS)
        keys = _mix(per_query ^ _mix(per_head).unsqueeze(-1))
        keep = keep_mask(keys, self.place, range(self.past + first_key, self.past + first_key + num_keys), self.rate)
        return drop(weights, keep.unsqueeze(0), self.rate)


@lru_cache(maxsize=64)
def _column_keys(columns: range, device: torch.device) -> Tensor:
    numbers = np.arange(columns.start, columns.stop, dtype=np.uint32) * np.uint32(_GOLDEN)
    return on_device(torch.from_numpy(_mix_array(numbers).view(np.int32)), device)


def _mix(x: Tensor) -> Tensor:
    """lowbias32 of int32 numbers."""
    x = (x ^ (x >> 16).bitwise_and_(0xFFFF)) * _M1
    x = (x ^ (x >> 15).bitwise_and_(0x1FFFF)) * _signed(_M2)
    return x ^ (x >> 16).bitwise_and_(0xFFFF)


def _signed(word: int) -> int:
    """The int32 with the bits of an unsigned one."""
    return word - (1 << 32) if word >> 31 else word


def normal_from(u: Tensor) -> Tensor:
    """Standard normal numbers from numbers in (0, 1)."""
    return torch.erfinv(u * 2.0 - 1.0) * math.sqrt(2.0)
