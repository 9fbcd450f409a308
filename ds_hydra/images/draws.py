"""Random calls of an encoder in; the same numbers for an image out, whoever encodes it, and beside what.

[Note: an encoder's draws]
Numbers are hashes of what they are for [Note: draws by place], with the rows of a tensor in the place of tokens:

    seed, step, sequence, first row of features of the image -> its key, and with it one for each row of the tensor
    count of the draw in the encoder's run                    -> the place
    number in the row                                         -> the column

An encoder that draws runs one image at a time, so that a tensor's rows are those of that image. In slices an image that
is encoded again draws again what it drew. Of an image that ranks share, what one of them has of a tensor are rows of
the whole one [Note: rows of a large image].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ds_hydra.pipe.dropout import drop, keep_mask, place_key, token_keys, uniform
from ds_hydra.pipe.models.draws import DROPOUTS, FROM_UNIFORM, dropout_of, has_rule, random_call
from ds_hydra.pipe.pinned import on_device
from ds_hydra.zero_hetero.errors import ConfigError


class UnitDraws(TorchFunctionMode):
    """Within it random calls draw for the image of a key [Note: an encoder's draws]. ConfigError for one without a
    rule."""

    def __init__(self, key: int):
        super().__init__()
        self._key = key
        self.count = 0  # of draws so far
        self._parts: tuple[tuple[int, int, int, int], ...] = ()

    def of_part(self, *parts: tuple[int, int, int, int]) -> None:
        """What draws from now on has an interval alone of axes of rows: the axis, counted from the last one, its size,
        and the interval's first and size. Nothing: all of them."""
        self._parts = parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        call = random_call(func, args, given)
        if not call:
            return func(*args, **given)
        if func.__name__ == "scaled_dot_product_attention":
            return self._attended(*args, **given)
        if not has_rule(func):
            raise ConfigError(f"its encoder draws random numbers ({call}) that would depend on which rank draws them")
        if func in DROPOUTS:
            x, rate, inplace = dropout_of(args, given)
            out = self._dropped(x, rate)
            return x.copy_(out) if inplace or func is torch.dropout_ else out
        drawn = func(*args, **given)
        with torch.no_grad():
            rows, place, columns = self._next(drawn)
            u = uniform(rows, place, columns, drawn.dtype).view(drawn.shape)
            return drawn.copy_(FROM_UNIFORM[func.__name__](u, args, given))

    def _next(self, x: Tensor) -> tuple[Tensor, int, range]:
        """Keys of the rows of a tensor, and place and columns of a draw for each of its numbers."""
        width, whole = (x.shape[-1] if x.dim() else 1), list(x.shape[:-1])
        # What is drawn for an image as a whole has another size.
        parts = [part for part in self._parts if len(whole) >= -part[0] and whole[part[0]] == part[3]]
        for axis, size, _, _ in parts:
            whole[axis] = size
        keys = token_keys((math.prod(whole),), (self._key,)).view(whole)
        for axis, _, first, count in parts:
            keys = keys.narrow(axis, first, count)
        self.count += 1
        return on_device(keys.reshape(-1), x.device), place_key(None, "images", self.count), range(width)

    def _dropped(self, x: Tensor, rate: float) -> Tensor:
        keys, place, columns = self._next(x)
        return x * 0.0 if rate >= 1.0 else drop(x, keep_mask(keys, place, columns, rate).view(x.shape), rate)

    def _attended(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """torch's own attention, whose kernels draw for themselves, in plain operators."""
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(groups, dim=-3) for x in (key, value))
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        least = torch.finfo(scores.dtype).min
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            masked = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, least) if masked else (scores + attn_mask).clamp(min=least)
        return self._dropped(scores.softmax(dim=-1), dropout_p) @ value
