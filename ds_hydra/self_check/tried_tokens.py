"""A vocabulary in, sequences whose tokens show what a model makes of single tokens beyond embedding them, out.

Models count separators, restart positions at them, or look at what a sequence begins with. So among the tokens are the
special ones of the config and both ends of the vocabulary, before others of their sequence and of their pack, and
tokens that come again, within a sequence and in the next one. The last sequence of a pack has no special ones: what a
pack has and a sequence of it has not is told apart so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np

from ds_hydra.self_check.runs import Data

_ENDS = 4  # ids at each end of the vocabulary


def tried_data(
    vocabulary: int, lengths: Sequence[Sequence[int]], *, special: Sequence[int] = (), left_out: Collection[int] = ()
) -> Data:
    """Sequences in packs of these lengths, of all tokens but those `left_out`; `special` count as such."""
    draw = np.random.default_rng(0)
    ends = [*range(_ENDS), *range(vocabulary - _ENDS, vocabulary)]
    telling = [t for t in dict.fromkeys((*special, *ends)) if 0 <= t < vocabulary and t not in left_out]
    plain = [t for t in range(vocabulary) if t not in telling and t not in left_out] or telling
    sequences = [draw.choice(plain, length) for pack in lengths for length in pack]
    starts = np.cumsum([0, *map(len, lengths)])
    longest = max(sequences, key=len)
    for first, last in pairwise(starts):
        for tokens in sequences[first : last - 1]:
            places = 1 + draw.permutation(3 * len(tokens) // 4 - 1)[: len(telling)]  # others come after them
            tokens[places] = telling[: len(places)]
            tokens[0] = telling[0]
            if tokens is not longest:
                tokens[-1] = telling[min(1, len(telling) - 1)]
    again = len(longest) // 8
    longest[len(longest) - again :] = longest[:again]
    longest[-again - 1] = longest[-again - 2]
    for tokens in sequences:
        if tokens is not longest:
            tokens[len(tokens) // 2] = longest[-again - 1]
    return Data(tuple(sequences), ()).packed([range(a, b) for a, b in pairwise(starts)])
