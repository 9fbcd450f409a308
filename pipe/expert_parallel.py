"""Whole experts spread over the ranks of a stage: the experts' modules of a stage in, wrapped forwards out.

[Note: whole experts]
Stacked experts are parameters of the shape (experts, ...). Tensor parallelism cuts the width of each, so 768 columns of
an expert become 96 on eight ranks, which products are slow with. Where a stage has an `ep`, each of so many ranks holds
experts / ep of them as they are: an interval of the stack's first dimension, and of its flat order. A router is whole
on every rank, as it is without. Every rank is handed all tokens of the group and where they are routed, and computes
with its own experts the tokens that chose them; the results are parts of the sum, as those of cut experts are, and are
added as these are. Six tokens, two experts for each of them, four experts on two ranks:

  token           0     1     2     3     4     5
  chosen          0 2   1 3   0 1   2 3   3 1   2 0
  rank 0 has 0, 1 0     1     0 1   -       1     0     6 rows of its products
  rank 1 has 2, 3   2     3   -     2 3   3     2       6 rows

No token is dropped, no count is exchanged, and all that ranks send has sizes that they know before. A gather of T
tokens of H features brings each of n ranks T * (n - 1) / n rows, the exchange of each token with the ranks of its k
experts k * T / n * (n - 1) / n: the gather moves as much or less where k >= n, as with eight experts for a token on
eight ranks; with fewer it moves n / k times as much. What ranks compute is as uneven as the routing: one that is chosen
by all tokens has at most T * min(k, experts / ep) rows, and in the mean T * k / ep.

The gradient of an expert is on the ranks that hold it and nowhere else. Of the gradients of hidden states and of the
router's weights each rank has a part, which add up: under tensor parallelism by what stands around these wrappers, over
sequence parallel ranks by the gather here, whose backward is a scatter of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.pipe.row_collectives import all_of_row, own_of_sum
from ds_hydra.pipe.rows import Pack
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.pipe.wrappers import wrap


class Routed:
    """How many rows the experts of a module have computed on this rank, of all rows of the ranks that share them."""

    def __init__(self, ranks: int):
        """So many `ranks` share the experts."""
        self._ranks = ranks
        self._own = self._all = 0

    def add(self, own: int, every: int) -> None:
        """Count rows of a forward, also of one that computes a layer again."""
        self._own += own
        self._all += every

    def take(self) -> float:
        """The rank's rows over those that it has where routing is even, since it was taken last; 0: none were routed.

        Of 4 ranks one that computes 30 of 80 rows has 1.5 times as many as it would have.
        """
        found = self._own * self._ranks / self._all if self._all else 0.0
        self._own = self._all = 0
        return found


def spread_experts(
    model: nn.Module, modules: Collection[str], place: StagePlace, pack: Callable[[], Pack]
) -> dict[str, Routed]:
    """Let the experts' modules at these paths compute with this rank's experts alone; `pack` gives the one that runs.

    To be called before what adds their results up over tensor parallel ranks. Returns what each will have computed, by
    its path.
    """
    stage = place.stage
    found = {path: Routed(stage.ep) for path in modules}
    for path, routed in found.items():
        module = model.get_submodule(path)
        every = num_experts(module)
        count = every // stage.ep
        around = [model.get_submodule(path[: path.index(".base_layer")])] if ".base_layer" in path else []
        for owner in (module, *(each for outer in around for each in outer.modules())):
            for name, value in list(vars(owner).items()):
                if "experts" in name and type(value) is int and value == every:
                    setattr(owner, name, count)  # by which models count, and bound what they index
        first = place.holder % stage.ep * count
        own = partial(_own_experts, module.forward, first, count, routed=routed)
        wrap(module, own, "tensor parallel", "own experts")
        if stage.ep > stage.tp:
            over_all = partial(_over_sequence_ranks, module.forward, pack)
            wrap(module, over_all, "tensor parallel", "experts of all sequence parallel ranks")
    return found


def num_experts(module: nn.Module) -> int:
    """Experts of a module of stacks."""
    return int(next(p for p in module._parameters.values() if p is not None).shape[0])


def _own_experts(
    forward: Callable[..., Tensor], first: int, count: int, hidden: Tensor, chosen: Tensor, weights: Tensor, *rest: Any,
    routed: Routed | None = None,
) -> Tensor:  # fmt: skip
    """What experts first, first + 1, ..., first + count - 1 add to the output of all tokens.

    `hidden` (T, H); `chosen`, the experts of each token, and their `weights` (T, k); out (T, H). `routed` is told of
    the rows.
    """
    own = (chosen >= first) & (chosen < first + count)
    token, place = own.nonzero(as_tuple=True)  # which waits for their number anyway
    if routed is not None:
        routed.add(len(token), chosen.numel())
    if not len(token):  # one that counts for nothing, so that all parameters have a gradient on every rank
        token = place = token.new_zeros(1)
    index = (chosen[token, place] - first).clamp(0, count - 1)
    weight = weights[token, place] * own[token, place]
    out = forward(hidden[token], index[:, None], weight[:, None], *rest)
    # Not `index_add`, which adds up in any order on a GPU.
    return out.new_zeros((len(hidden), out.shape[-1])).index_put((token,), out, accumulate=True)


def _over_sequence_ranks(
    forward: Callable[..., Tensor], pack: Callable[[], Pack], hidden: Tensor, chosen: Tensor, weights: Tensor,
    *rest: Any,
) -> Tensor:  # fmt: skip
    """The own tokens' part of the sum that all sequence parallel ranks make of all of their tokens."""
    now = pack()
    with torch.no_grad():
        every = all_of_row(chosen, 0, now)
    out = forward(all_of_row(hidden, 0, now), every, all_of_row(weights, 0, now), *rest)
    return own_of_sum(out, now)
