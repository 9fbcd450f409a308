"""The queries of a part of a row in; their attention to the keys that they see out [Note: shared queries]."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ds_hydra.pipe.attention.backends import Segments
from ds_hydra.pipe.dropout import AttentionDropout
from ds_hydra.pipe.head_sharing import RowPart
from ds_hydra.pipe.reach import Reach
from ds_hydra.pipe.rows import Pack

KeysAndValues = tuple[Tensor, Tensor]


def part_of_row(
    q: Tensor, own: KeysAndValues, joined: KeysAndValues | None, pack: Pack, dropout: AttentionDropout | None,
    attend: Callable[..., Tensor], reach: Reach, part: RowPart,
) -> Tensor:  # fmt: skip
    """Attention of a part's queries, (T, heads, d), to keys that `attend` is given with theirs.

    `own` are keys and values of the row's tokens from `part.first` on, `joined` of the sequence of which a slice stands
    first in the row, up to the slice's end.
    """
    offsets = pack.offsets
    # The part may begin within a sequence, whose keys begin before it; of those behind it all tokens are in the part.
    number = bisect_right(offsets, part.start) - 1
    begin, stop = offsets[number], min(part.stop, offsets[number + 1])
    position, size = (pack.past if number == 0 else 0) + part.start - begin, stop - part.start
    first = reach.first(position)
    # With which position of the sequence the keys begin that are at hand.
    rows, origin = own, part.first - begin
    if joined is not None and number == 0:
        rows, origin = joined, reach.first(pack.past)
    k, v = (x[first - origin : position + size - origin] for x in rows)
    drop = None if dropout is None else replace(dropout, keys=dropout.keys[part.start : stop], past=first)
    outs = [attend(q[:size], k, v, Segments((size,), (len(k),)).chunked(reach.chunk), dropout=drop)]
    if joined is not None and number > 0:
        # What slices behind it have left for the slice's own keys is handed on by the backward of what it was given.
        outs[0] = outs[0] + joined[0][:0].sum() + joined[1][:0].sum()
    if stop < part.stop:
        k, v = (x[stop - part.first : part.stop - part.first] for x in own)
        ends = [min(end, part.stop) for end in offsets[number + 1 :] if end < part.stop] + [part.stop]
        lengths = tuple(end - start for start, end in pairwise(ends))
        drop = None if dropout is None else replace(dropout, keys=dropout.keys[stop : part.stop])
        outs.append(attend(q[size:], k, v, Segments.whole(lengths).chunked(reach.chunk), dropout=drop))
    return torch.cat(outs) if len(outs) > 1 else outs[0]
