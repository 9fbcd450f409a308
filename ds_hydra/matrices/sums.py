"""Optimizers whose step needs sums over whole parameters (norms, means of rows and columns), on parts of them.

[Note: sums of whole parameters] A rank has an interval of a parameter, and adds up what it has. One table with a place
for each sum of every parameter goes around all ranks, once a round: an all-reduce in FP64, after which all have all
totals to the bit. No parameter, gradient or state travels, and states lie element by element on the even masters, so
checkpoints, new cuts and copies of other ranks know nothing of sums. Nothing changes until all totals are there:
whoever is lost meanwhile, the step can be made again. Who keeps a copy updates it by the same totals.

Example: of a matrix of 4 elements 1 2 2 4 rank 0 has two, and rank 1 the others. They put 5 and 20 in the place of its
squares, and both find the norm 5.

Before step 0 a job's optimizer updates small parameters of all kinds on three ranks of this process, by the tables that
it will use, and must make of them what loops over whole parameters do, which know nothing of boxes and intervals.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hydra.matrices.owners import MatrixParam, matrix_params
from ds_hydra.matrices.proof import KINDS, ParamKind, drawn, params_of, put_grads, ranks_of, whole_values
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.masters import MasterShards, as_tensors
from ds_hydra.zero_hetero.transport import Transport

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

    def run(self, optimizer: OfSums) -> None:
        """Give each parameter of the optimizer its parts' totals; every rank must call it, with its gradients as they
        are to be used. Nothing else changes."""
        totals: list[Tensor] = []
        for _ in self._numels:
            totals.append(self.add(self.partial(optimizer, totals)))
        self.give(totals)

    def partial(self, optimizer: OfSums, totals: Totals) -> Tensor:
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


class OfSums(Optimizer):
    """An optimizer that updates each part of a parameter by sums over the whole of it; `states` are its names of what
    it keeps of each element. One without an exchange has its parameters whole."""

    exchange: Sums | None = None

    def attach(
        self,
        groups: Sequence[Mapping[str, Any]],
        masters: MasterShards,
        plan: ModelPlan,
        transport: Transport,
        group: dist.ProcessGroup | None,
        shift: int = 0,
    ) -> None:
        """Make the tables of this job's ranks, which are `group`; every rank must call it. ConfigError where small
        parameters show that this would not be the optimizer of one process."""
        for own in self.param_groups:
            prove_sums(type(self), own, self.in_one_process)
        params = matrix_params(plan.buckets, {name: 1 for own in groups for name in own["names"]})
        self.exchange = Sums(masters, params, self.sizes, group)

    def run_exchange(self) -> None:
        """Fetch the totals of the next step; every rank must call it, with its gradients as they are to be used."""
        assert self.exchange is not None, "the engine has attached it"
        with torch.no_grad(), as_tensors():
            self.exchange.run(self)

    @staticmethod
    @abstractmethod
    def in_one_process(value: Tensor, grads: Sequence[Tensor], group: Group) -> Tensor:
        """What a plain loop over these gradients makes of a whole parameter, for small ones."""

    @abstractmethod
    def names(self, group: Group) -> tuple[str, ...]:
        """Of the states that are kept of each element."""

    @abstractmethod
    def sizes(self, param: MatrixParam) -> Sequence[int]:
        """How many sums each round has of a parameter."""

    @abstractmethod
    def sums(self, own: Values, totals: Totals) -> Tensor:
        """A part's share in the sums of the round after these, (sums,) in FP64. Nothing changes."""

    @abstractmethod
    def update(self, own: Values, totals: Totals) -> None:
        """Update a part and its states, in place."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient, by what `run_exchange` has fetched."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            self.begin(group)
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def begin(self, group: dict[str, Any]) -> None:
        """What changes once a step in a group's options."""

    def _update(self, param: Any, group: Group) -> None:
        wholes = vars(param).pop("wholes", None)
        assert wholes is not None or self.exchange is None, "run_exchange() comes first: a part has no sums of its own"
        if wholes is None:
            alone = Part(MatrixParam(0, "", 0, tuple(param.shape), None), 0, param.numel(), 0)
            wholes, own = [(alone, list[Tensor]())], Values.of(param, self.state.get(param, {}), alone, group)
            for _ in self.sizes(alone.param):
                wholes[0][1].append(self.sums(own, wholes[0][1]))
        state = self.state[param]
        for key in self.names(group):
            if key not in state:
                state[key] = torch.zeros_like(param, memory_format=torch.contiguous_format).view(-1)
        for part, totals in wholes:
            self.update(Values.of(param, state, part, group), totals)
        state["step"] = state.get("step", 0) + 1

    def keeps(self, options: Group) -> dict[str, Any]:
        """What is kept of one element of a group with these options."""
        of = next((param for group in self.param_groups for param in group["params"]), torch.zeros(1))
        kept = {key: torch.zeros(1, dtype=of.dtype, device=of.device) for key in self.names(options)}
        return {**kept, "step": 0}


_STEPS, _NEAR = 2, 1e-9
_KINDS: Mapping[str, tuple[int, ParamKind]] = {
    **{name: (bucket, kind._replace(heads=1)) for name, (bucket, kind) in KINDS.items()},
    "stack cut by columns": (1, ParamKind((3, 4, 6), 2)),
}
Loop = Callable[[Tensor, Sequence[Tensor], Mapping[str, Any]], Tensor]


def prove_sums(kind: Any, group: Mapping[str, Any], loop: Loop) -> None:
    """ConfigError unless the optimizer of this class makes of each kind of parameter what `loop` makes of the whole
    one, of its value and the gradients of each step, with the settings of this group."""
    own = {key: value for key, value in group.items() if key not in ("params", "name", "initial_lr")}
    own["lr"] = float(own["lr"]) or 1e-3  # a schedule may begin with 0
    values, grads = drawn(_KINDS, _STEPS)
    found = _on_ranks(kind, own, values, grads)
    for name, value in values.items():
        apart = float((found[name] - loop(value, [one[name] for one in grads], own)).abs().max())
        if not apart <= _NEAR:
            raise ConfigError(
                f"{kind.__name__} on ranks is not what it is in one process: of small parameters ({name}, "
                f"{tuple(value.shape)}) it makes values that are {apart:.1e} apart; train with AdamW, and tell us"
            )


def _on_ranks(
    kind: Any, group: Mapping[str, Any], values: Mapping[str, Tensor], grads: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Values after the steps."""
    params = params_of(_KINDS)[1]
    ranks = [
        (masters, kind([{**group, "params": parts[0]}])) for masters, parts in ranks_of(_KINDS, values, [[*_KINDS]])
    ]
    for masters, optimizer in ranks:
        optimizer.exchange = Sums(masters, params, optimizer.sizes, None)
    for given in grads:
        for masters, _ in ranks:
            put_grads(masters, _KINDS, given)
        totals: list[Tensor] = []
        for _ in ranks[0][1].sizes(params[0]):
            each = [optimizer.exchange.partial(optimizer, totals) for _, optimizer in ranks]
            totals.append(torch.stack(each).sum(0))
        for _, optimizer in ranks:
            optimizer.exchange.give(totals)
            optimizer.step()
    return whole_values([masters for masters, _ in ranks], _KINDS)
