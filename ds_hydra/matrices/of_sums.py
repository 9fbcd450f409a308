"""What optimizers have in common whose step needs sums over whole parameters (`sums`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ds_hydra.matrices.owners import MatrixParam, matrix_params
from ds_hydra.matrices.prove_sums import prove_sums
from ds_hydra.matrices.sums import Group, Part, Sums, Totals, Values
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.zero_hetero.masters import MasterShards, as_tensors
from ds_hydra.zero_hetero.transport import Transport


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
