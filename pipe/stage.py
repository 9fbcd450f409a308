"""What every stage offers the runtime, whatever its model came from: parameters to install, one call to run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hydra.pipe.collectives import Group
from ds_hydra.pipe.head_sharing import most_of_room
from ds_hydra.pipe.model_plan import Bucket, ModelPlan, Slot
from ds_hydra.pipe.placement import Pipeline, Stage
from ds_hydra.pipe.rows import AT_ONCE, MicroBatch, Overlap
from ds_hydra.pipe.schedules.list_walk import virtual_stage
from ds_hydra.pipe.schedules.registry import splits_backward
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.pipe.weight_gradients import Leaf, Linear, PackedLinears, SplitBackward, WeightGradients
from ds_hydra.pipe.wrappers import chains
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.nodes import NodeSize, ranks_of_each_node

# Functions that look at a tensor's shape, type or device, or make another one of them.
_LOOKS = frozenset(
    {"__get__", "size", "dim", "numel", "ndimension", "nelement", "is_floating_point", "is_complex", "element_size"}
    | {"get_device", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "__repr__", "__len__"}
    | {"new_empty", "new_zeros", "new_ones", "empty_like", "zeros_like", "ones_like", "detach", "untyped_storage"}
)


class StandIn(Tensor):
    """Has the shape, type and device of the rows that enter a block, takes no memory, and may not be read."""

    @classmethod
    def of(cls, shard: Tensor, num_ranks: int) -> StandIn:
        """For the rows of all ranks, of which each has as many as `shard`."""
        nothing = shard.new_full((1,) * shard.dim(), float("nan"))
        shape = (*shard.shape[:-2], num_ranks * shard.shape[-2], shard.shape[-1])
        return nothing.expand(shape).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _LOOKS:
            raise ConfigError(
                f"{getattr(func, '__name__', func)} reads what enters a block beside the block's column-parallel "
                'layers: leave "token_sharding" out of hydra.fast_paths'
            )
        return super().__torch_function__(func, types, args, kwargs or {})


GradientHook = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class StagePlace:
    """Where one rank stands in its pipeline, and the groups it talks to (None where the degree is 1).

    In a V a rank stands in two places, one for each of its ranges of layers [Note: virtual stages].
    """

    pipeline: Pipeline
    index: int  # of its stage
    tp_rank: int
    sp_rank: int
    tp_group: Group
    sp_group: dist.ProcessGroup | None
    part: int = 0  # which range of layers
    token_sharding: bool = False  # of the model: tensor parallel ranks share tokens [Note: token sharding]
    overlap: Overlap = AT_ONCE
    near: int = 0  # sequence parallel ranks of each node, where nodes have as many [Note: heads inside a node]
    room: float = math.inf  # tokens that a micro-batch may have

    @classmethod
    def all_of(
        cls,
        pipeline: Pipeline,
        rank: int,
        group: Callable[[tuple[int, ...]], dist.ProcessGroup | None],
        *,
        token_sharding: bool = False,
        overlap: Overlap = AT_ONCE,
        node_size: NodeSize | None = None,
    ) -> tuple[StagePlace, ...]:
        """The places of `rank` in a pipeline, by part; `group` gives the group of some ranks, None for one alone.

        `node_size` says which ranks share a node; None: all.
        """
        index = pipeline.stage_index(rank)
        stage = pipeline.stages[index]
        tp_rank, sp_rank = stage.coordinates(rank)
        tp_group, sp_group = group(stage.tp_ranks(rank)), group(stage.sp_ranks(rank))
        near = ranks_of_each_node(stage.sp_ranks(rank), node_size) if stage.sp > 1 and node_size is not None else 0
        return tuple(
            cls(pipeline, index, tp_rank, sp_rank, tp_group, sp_group, part, token_sharding, overlap, near)
            for part in range(pipeline.parts)
        )

    @property
    def stage(self) -> Stage:
        """The layers of this place, as a stage."""
        return self.pipeline.stages[self.index].part(self.part)

    @property
    def holder(self) -> int:
        """Which of the stage's holders this rank is, by what it holds."""
        return (self.sp_rank * self.stage.tp + self.tp_rank) % self.stage.holders

    @property
    def virtual(self) -> int:
        """Its number among the pipeline's ranges of layers, from 0 at the model's beginning."""
        return virtual_stage(self.index, self.part, len(self.pipeline.stages))

    @property
    def schedule(self) -> str:
        return self.pipeline.schedule

    @property
    def is_first(self) -> bool:
        return self.virtual == 0

    @property
    def is_last(self) -> bool:
        return self.virtual == self.pipeline.parts * len(self.pipeline.stages) - 1

    @property
    def shards(self) -> int:
        """Ranks of its tensor parallel group that share the tokens between the blocks; 1: each holds all of them."""
        return self.stage.tp if self.token_sharding else 1

    def padding(self, num_tokens: int) -> int:
        """Tokens to add to a row so that every rank of the pipeline gets one, and ranks that share tokens as many.

        Stages of tp2sp2 and of sp3 make 5 tokens 8: 4 parts of 2 in one, parts of 2, 3 and 3 in the other.
        """
        stages = self.pipeline.stages
        multiple = math.lcm(*(s.tp * s.sp for s in stages if s.tp > 1)) if self.token_sharding else 1
        return -(-max(num_tokens, *(stage.sp for stage in stages)) // multiple) * multiple - num_tokens

    def frugal(self, num_tokens: int, *, sliced: bool) -> bool:
        """Of a row of so many tokens: whether the memory for it was planned without keys of other nodes."""
        if sliced or len(self.pipeline.stages) > 1:
            return True
        return self.near > 0 and num_tokens > most_of_room(self.stage.sp // self.near) * self.room

    @property
    def turns(self) -> bool:
        """Whether the range of layers before its own is on the same rank: where a V turns round."""
        return self.part == 1 and self.index == len(self.pipeline.stages) - 1


# Modules that only hold others: no hook of theirs is ever called, however their parameters are read.
_NEVER_RUN = (nn.ParameterDict, nn.ParameterList, nn.ModuleDict, nn.ModuleList)


class StageModule:
    """A rank's share of a stage, or of one part of it: a module on the meta device whose parameters are views of
    pulled buffers."""

    def __init__(
        self,
        model: nn.Module,
        place: StagePlace,
        names: Mapping[str, str],
        *,
        readers: Mapping[str, Collection[str]] | None = None,
        hooks: Mapping[str, Sequence[GradientHook]] | None = None,
        at_once: Collection[str] = (),
    ):
        """`names` maps the module's own parameter names to master names; others belong to other stages.

        `readers` names further modules before whose run a parameter must be there, by master name, and `hooks` what its
        gradient passes. The gradients of parameters in `at_once` are never put off.
        """
        self.module, self.place = model, place
        self._hooks = hooks or {}
        self._owners: dict[str, list[tuple[nn.Module, str]]] = {}
        for path, name in names.items():
            owner, _, leaf = path.rpartition(".")
            self._owners.setdefault(name, []).append((model.get_submodule(owner), leaf))
        self.parameters: dict[str, nn.Parameter] = {}
        self.before_use: Callable[[str], None] | None = None  # called with a master name before it computes
        self.used_by_none: list[str] = []  # by no module that runs, as far as is known: there before anything runs
        for name, owners in self._owners.items():
            users = {module for module, _ in owners} | {
                model.get_submodule(path) for path in (readers or {}).get(name, ())
            }
            if all(isinstance(module, _NEVER_RUN) for module in users):
                self.used_by_none.append(name)
            for module in users:  # ahead of the user's hooks, which may read the parameter
                module.register_forward_pre_hook(lambda _module, _args, name=name: self._use(name), prepend=True)
        self.weight_gradients: SplitBackward | None = None  # where the schedule splits backwards
        self.packed: list[PackedLinears] = []
        self.linear_queue = self._queue(model, names, at_once)
        self.linear: Linear = self.linear_queue.linear  # what computes the linear layers of `model`
        if splits_backward(place.schedule):
            self.weight_gradients = self.linear_queue

    def _queue(self, model: nn.Module, names: Mapping[str, str], at_once: Collection[str]) -> WeightGradients:
        """The weight gradients that are put off, where the schedule splits backwards: of weights that one module reads,
        and no hook of the user."""
        alone = {name for name, owners in self._owners.items() if len(owners) == 1}
        alone -= {name for name in alone if name in at_once or self._hooks.get(name)}
        waiting = alone if splits_backward(self.place.schedule) else frozenset()
        return WeightGradients(model, {path for path, name in names.items() if name in waiting}, names)

    def add_to(self, parameter: nn.Parameter, total: Tensor) -> None:
        """Let the gradient of a parameter add up in `total`, of its shape, which may be of a wider type."""
        if not parameter._backward_hooks:  # one is to see the gradient of one micro-batch, as autograd would show it
            self.linear_queue.add_to(parameter, total)

    def uses(self, name: str) -> bool:
        """Whether it computes with a parameter, by master name."""
        return name in self._owners

    def install(self, slot: Slot, buffer: Tensor) -> nn.Parameter:
        """Make one parameter a view of its bucket's local buffer; returns it (the same object every step)."""
        # `.data` has a version of its own: buckets arrive while tensors of earlier ones are kept for the backward.
        view = shard_view(slot, buffer).data
        parameter = self.parameters.get(slot.param.name)
        if parameter is None:
            parameter = nn.Parameter(view, requires_grad=slot.param.trainable)
            self.parameters[slot.param.name] = parameter
            for owner, leaf in self._owners[slot.param.name]:
                owner._parameters[leaf] = parameter
            for hook in self._hooks.get(slot.param.name, ()) if parameter.requires_grad else ():
                parameter.register_hook(hook)
        else:
            parameter.data = view
        return parameter

    def share(self, name: str, parameter: nn.Parameter) -> None:
        """Use what another part of the stage has installed: a V may hold both users of a tied parameter."""
        self.parameters[name] = parameter
        for owner, leaf in self._owners[name]:
            owner._parameters[leaf] = parameter

    def install_packed(self, slots: Sequence[Slot], buffer: Tensor) -> list[Leaf]:
        """The packed weights of a bucket whose parameters are installed, as views of its local buffer."""
        by_name = {slot.param.name: slot for slot in slots}
        found = [packed.install(by_name, buffer) for packed in self.packed]
        return [leaf for leaf in found if leaf is not None]

    def close(self) -> None:
        """Let go of modules, parameters and groups; it cannot run afterwards."""
        # Modules, the wrappers around their forwards and the hooks of their parameters hold each other and, in
        # closures, the groups. Python's garbage collector does not see through hooks of tensors, and a group that is
        # held keeps its threads and sockets. So every one is emptied.
        for parameter in self.parameters.values():
            drop_hooks(parameter)
        for held in (*self.module.modules(), self.weight_gradients, self.linear_queue, self):
            if held is not None:
                vars(held).clear()

    @property
    def leaves(self) -> set[nn.Parameter]:
        """What autograd accumulates the gradients of its parameters in."""
        packed = {name: each.weight for each in self.packed if each.weight is not None for name in each.layers}
        found = (packed.get(name, parameter) for name, parameter in self.parameters.items())
        return {parameter for parameter in found if parameter.requires_grad}

    @property
    def chains(self) -> dict[str, str]:
        """What stands around the forward of its modules, by path [Note: forward wrappers]."""
        return chains(self.module)

    def _use(self, name: str) -> None:
        if self.before_use is not None:
            self.before_use(name)

    def take_router_loss(self) -> Tensor | None:
        """The losses of its routers since they were taken last, (), as they count in the step's loss; None: none ran.

        Sequence parallel ranks have parts of them, tensor parallel ranks the same [Note: the routers' loss].
        """
        return None

    def take_imbalances(self) -> tuple[float, ...]:
        """For each layer of the model, up to the last whose experts are spread over ranks: the rows of this rank's
        experts since they were taken last, over those that they have where routing is even; 0: none were routed."""
        return ()

    def forward(self, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        """Received hidden states (1, T_local, H) or None -> hidden states, or the loss on the last stage."""
        raise NotImplementedError("stages are built by their model's source")


def drop_hooks(parameter: Tensor) -> None:
    """Drop the gradient of a parameter, and what its hooks hold."""
    parameter.grad = None
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        if hooks is not None:
            hooks.clear()


def install(parts: Sequence[StageModule], slot: Slot, buffer: Tensor) -> nn.Parameter:
    """Make one parameter a view of its bucket's local buffer in all parts of a rank's stage that use it."""
    first, *others = (part for part in parts if part.uses(slot.param.name))
    parameter = first.install(slot, buffer)
    for part in others:
        part.share(slot.param.name, parameter)
    return parameter


def install_bucket(parts: Sequence[StageModule], slots: Sequence[Slot], buffer: Tensor) -> list[Leaf]:
    """Make the parameters of a bucket views of its local buffer; returns what their gradients accumulate in."""
    packed = []
    alone = {slot.param.name: Leaf(install(parts, slot, buffer), (slot,), partial(shard_view, slot)) for slot in slots}
    for part in parts:
        packed += part.install_packed(slots, buffer)
    for leaf in packed:
        for slot in leaf.slots:
            del alone[slot.param.name]
    return [*alone.values(), *packed]


class ModelSource(Protocol):
    """A user's model, read once: what planning needs to know of it, its values, and how to build a stage. What it says
    never changes; its values go when the masters have them."""

    plan: ModelPlan
    values: Mapping[str, Tensor]  # full parameters that this rank has, by master name
    aliases: Mapping[str, str]  # every path of a parameter in the user's model -> its master name
    vocab_size: int | None
    valued: bool  # whether its head gives a value of each token in place of logits
    notes: tuple[str, ...]  # what a user should know of how it is trained
    balances: bool  # whether its routers have a loss: then every micro-batch needs a `Balance`
    options: StageOptions  # how its stages compute
    overlap: Overlap  # of the messages of its attention

    @property
    def drawing(self) -> Collection[str]:
        """Modules that draw random numbers in training, by path."""

    def width(self, layer: int) -> int:
        """Features of the hidden states (1, T, width) that enter a layer."""

    def build(self, place: StagePlace, device: torch.device, dtype: torch.dtype) -> StageModule: ...

    def with_options(self, options: StageOptions, why: str) -> ModelSource:
        """Another source of the same model, whose stages compute by these options, which ask for less than its own."""


def widths(source: ModelSource, place: StagePlace) -> tuple[int, int]:
    """Features that enter and that leave a place; 0 where the loss does."""
    stage = place.stage
    return source.width(stage.first_layer), 0 if place.is_last else source.width(stage.last_layer)


def dtype_of(bucket: Bucket, dtype: torch.dtype) -> torch.dtype:
    """In which a bucket is pulled where the model is computed in `dtype`."""
    return torch.promote_types(dtype, torch.float32) if bucket.wide else dtype


def to_flat(value: Tensor, dim: int | None, parts: int) -> Tensor:
    """A full parameter in the masters' flat order [Note: flat order]."""
    if dim is None or (dim == 0 and parts == 1):
        return value.reshape(-1)
    cut = value.unflatten(dim, (parts, value.shape[dim] // parts))
    return cut.movedim((dim, dim + 1), (0, 1)).reshape(-1)


def from_flat(flat: Tensor, shape: tuple[int, ...], dim: int | None, parts: int) -> Tensor:
    """Inverse of `to_flat`, as a view: also turns a rank's local interval into its shard of shape `shape`."""
    if dim is None or (dim == 0 and parts == 1):
        return flat.view(shape)
    outer = (parts, shape[dim] // parts)
    rest = (*shape[:dim], *shape[dim + 1 :])
    return flat.view(*outer, *rest).movedim((0, 1), (dim, dim + 1)).flatten(dim, dim + 1)


def shard_view(slot: Slot, buffer: Tensor) -> Tensor:
    """View of one parameter's shard in its bucket's local buffer; a row-parallel weight is a transposed view."""
    flat = buffer[slot.offset : slot.offset + slot.numel]
    return from_flat(flat, slot.shape, slot.param.rule.dim, slot.param.rule.parts)
