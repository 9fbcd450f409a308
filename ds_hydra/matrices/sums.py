"""What each rank adds up of its parts of parameters in, totals over all ranks out: norms, means of rows and columns.

[Note: sums of whole parameters] A rank has an interval of a parameter, and adds up what it has. One table with a place
for each sum of every parameter goes around all ranks, once a round: an all-reduce in FP64, after which all have all
totals to the bit. No parameter, gradient or state travels, and states lie element by element on the even masters, so
checkpoints, new cuts and copies of other ranks know nothing of sums. Nothing changes until all totals are there:
whoever is lost meanwhile, the step can be made again. Who keeps a copy updates it by the same totals.

Example: of a matrix of 4 elements 1 2 2 4 rank 0 has two, and rank 1 the others. They put 5 and 20 in the place of its
squares, and both find the norm 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hydra.matrices.owners import MatrixParam
from ds_hydra.zero_hetero.masters import MasterShards

Group = Mapping[str, Any]  # of the optimizer
Totals = Sequence[Tensor]  # of one parameter, by round, (its sums,) each in FP64


class Part(NamedTuple):
    """Elements [start, stop) of a parameter in flat order, and where they begin in the optimizer's parameter."""

    param: MatrixParam
    start: int
    stop: int
    first: int

    def of(self, values: Tensor) -> Tensor:
        """Of what the optimizer's parameter has, flat."""
        return values[self.first : self.first + self.stop - self.start]


class Summing(Protocol):
    """An optimizer, as tables see it."""

    param_groups: list[dict[str, Any]]
    state: Any

    def sums(self, own: Values, totals: Totals) -> Tensor: ...


class Sums:
    """One job's tables [Note: sums of whole parameters]. `sizes` says how many sums each round has of a parameter."""

    def __init__(
        self,
        masters: MasterShards,
        params: Sequence[MatrixParam],
        sizes: Callable[[MatrixParam], Sequence[int]],
        group: dist.ProcessGroup | None,
    ):
        self.places, self._group, self._params = [masters], group, {param.name: param for param in params}
        every = [sizes(param) for param in params]
        starts = [list(accumulate(own, initial=0)) for own in zip(*every, strict=True)]
        self._numels = [own[-1] for own in starts]
        self._slices = {param.name: [slice(own[at], own[at + 1]) for own in starts] for at, param in enumerate(params)}

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of an optimizer on trial has its parameters whole, and asks nobody."""
        return None

    def follow(self, copied: MasterShards) -> None:
        """Give totals to a copy of another rank's masters, too."""
        self.places.append(copied)

    def connect(self) -> None:
        """Add up numbers that all know, before a step depends on it; every rank must call it. AssertionError where the
        sum is another."""
        masters = self.places[0]
        for numel in self._numels:
            table = torch.full((numel,), masters.rank + 1.0, dtype=torch.float64, device=masters.flat.device)
            ranks = masters.num_ranks
            assert bool((self.add(table) == ranks * (ranks + 1) / 2).all()), "each rank's sums count once"

    def add(self, table: Tensor) -> Tensor:
        """The sum of all ranks' tables, in place."""
        if self._group is not None and dist.get_world_size(self._group) > 1:
            dist.all_reduce(table, group=self._group)
        return table

    def run(self, optimizer: Summing) -> None:
        """Give each parameter of the optimizer its parts' totals; every rank must call it, with its gradients as they
        are to be used. Nothing else changes."""
        totals: list[Tensor] = []
        for _ in self._numels:
            totals.append(self.add(self.partial(optimizer, totals)))
        self.give(totals)

    def partial(self, optimizer: Summing, totals: Totals) -> Tensor:
        """This rank's table of the round after these."""
        masters = self.places[0]
        table = torch.zeros(self._numels[len(totals)], dtype=torch.float64, device=masters.flat.device)
        group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        for param, parts in self.parts(masters):
            for part in parts:
                place = table[self._slices[part.param.name][len(totals)]]
                own = Values.of(param, optimizer.state.get(param, {}), part, group_of[id(param)])
                place += optimizer.sums(own, self._of(part, totals))
        return table

    def give(self, totals: Totals) -> None:
        """Each parameter of the optimizers, of the masters and of a copy, has its parts with their totals."""
        for masters in self.places:
            for param, parts in self.parts(masters):
                vars(param)["wholes"] = [(part, self._of(part, totals)) for part in parts]

    def parts(self, masters: MasterShards) -> list[tuple[nn.Parameter, list[Part]]]:
        """What each parameter of the optimizer has of which of the model's."""
        pieces = list(masters.pieces())
        return [
            (span.param, [Part(self._params[piece.name], piece.start, piece.stop, piece.first - span.start)
                          for piece in pieces if piece.bucket == span.bucket and span.start <= piece.first < span.stop])
            for span in masters.spans
        ]  # fmt: skip

    def _of(self, part: Part, totals: Totals) -> list[Tensor]:
        return [table[own] for table, own in zip(totals, self._slices[part.param.name], strict=False)]


class Values(NamedTuple):
    """What an update of a part is made of, (elements,) each."""

    part: Part
    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]  # zeros where there is none yet
    step: int  # the number of the coming one, from 1 on
    group: Group

    @classmethod
    def of(cls, param: Tensor, state: Mapping[str, Any], part: Part, group: Group) -> Values:
        """Of a part of the optimizer's parameter."""
        assert param.grad is not None, "a step has put gradients there"
        grad = part.of(param.grad.view(-1))
        held = {key: part.of(value) for key, value in state.items() if isinstance(value, Tensor)}
        return cls(part, part.of(param.detach().view(-1)), grad, held, state.get("step", 0) + 1, group)

    def held(self, key: str) -> Tensor:
        """A state, zeros before the first step."""
        return self.state[key] if key in self.state else torch.zeros_like(self.grad)


def squares(values: Tensor) -> Tensor:
    """Their sum, (1,) in FP64."""
    return torch.linalg.vector_norm(values, dtype=torch.float64).square().view(1)
