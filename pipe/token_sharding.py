"""Tensor parallelism whose ranks share the tokens between the blocks (Megatron's sequence parallelism).

[Note: token sharding]
Under plain tensor parallelism all ranks of a group hold every token between the blocks (attention, MLP, experts), and
all compute the same norms and residual sums. Here each holds its share of the tokens there, and what it keeps for the
backward becomes as many times smaller (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", who call it sequence parallelism). An MLP on 8 tokens of 64 features, widened to 256, on two ranks:

  norm, on tokens 0..3 and 4..7          (4, 64)    each rank its own
  enters the block: the rows gathered    (8, 64)    equal on both
  gate, up: column-parallel              (8, 128)   each rank its own features
  down: row-parallel                     (8, 64)    a part of the sum
  leaves the block: added and scattered  (4, 64)    each rank its own tokens

A gather and a scatter of sums move as much as the one sum over all ranks that they replace. In the backward each is the
other.

A block is a module with column-parallel children, or one of experts. The rows that enter it are not kept: one function
computes all column-parallel children of a block, keeps the shard, and gathers again in the backward, while the
gradient of the rows is computed; that is added and scattered while the gradients of the weights are computed. So the
block itself is handed a stand-in, which has the shape of the rows and no values: should something else than its
column-parallel children read it, the run ends with an error.

Before the layers every rank holds all tokens: whatever a model adds to its embeddings there is as it was. The first
layer takes its rows; behind the last norm they are gathered for the head. Parameters that meet a share of the tokens
have a share of their gradient, so these add up when they are pushed. Rows are padded so that every stage's ranks get
equal parts (`StagePlace.padding`).

With a split backward the gather goes where the weights' gradients are computed. All ranks of a group run the same
actions in the same order, and a queue runs its entries in one order, so collectives meet there as they do elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hydra.pipe.adapters import ends_of, linear_of, linear_path, run_on_own_rows, trained_copy
from ds_hydra.pipe.collectives import (
    Group,
    Pending,
    all_rows,
    gather_last_dim,
    gather_rows,
    scatter_rows,
    sharers,
    start_gather,
    start_sum,
)
from ds_hydra.pipe.recomputed import rows_of_tile
from ds_hydra.pipe.stage import StandIn
from ds_hydra.pipe.tensor_parallel import COLUMN_STYLES, TensorParallel, style_of
from ds_hydra.pipe.weight_gradients import PackedLinears, Product, WeightGradients
from ds_hydra.pipe.wrappers import wrap
from ds_hydra.zero_hetero.errors import ConfigError

SHARDED_STYLES = frozenset({"colwise", "colwise_gather_output", "packed_colwise", "rowwise", "rowwise_split_input",
                            "moe_tp_experts", "replicate", "replicated_with_grad_allreduce", "embedding_rowwise",
                            "local_params"})  # fmt: skip
"""Styles of a tensor parallel plan that token sharding knows."""


class Whereabouts(Protocol):
    """Told whether what follows runs on this rank's own tokens or on those of the whole group: draws depend on it."""

    def inside(self) -> AbstractContextManager[None]:
        """Within it, on all tokens, until `leave` is called."""

    def outside(self) -> AbstractContextManager[None]:
        """Within it, on the own tokens."""

    def leave(self) -> None:
        """From here on, on the own tokens again."""


class TokenSharding(TensorParallel):
    """Wraps the forwards of one stage's modules; see [Note: token sharding]."""

    def __init__(
        self,
        *args: Any,
        whereabouts: Whereabouts,
        queue: WeightGradients,
        packed: Collection[PackedLinears] = (),
        tiles: bool = False,
        **kwargs: Any,
    ):
        """As `TensorParallel`; weights' gradients wait in `queue` where the backward is split. `tiles`: whether rows
        are gathered and scattered a tile at a time in layers that are computed again [Note: tiles]."""
        super().__init__(*args, **kwargs)
        self._whereabouts, self._queue, self._tiles = whereabouts, queue, tiles
        self._packed = {layer: each for each in packed for layer in each.layers.values()}
        self._blocks: dict[nn.Module, _Block] = {}

    def _column(self, style: str, name: str, module: nn.Module, parent: nn.Module) -> None:
        if parent not in self._blocks:
            self._blocks[parent] = _Block(parent, self.group, self._queue, self._whereabouts, self._tiles)
        block, widths, inner = self._blocks[parent], self._widths(name, module, 0), linear_of(module)
        block.columns[inner] = self._packed.get(inner)

        def column(input: Tensor) -> Tensor:
            return block.output_of(inner, input)

        wrap(inner, column, "tensor parallel", "column of shared tokens")
        if inner is not module:
            run_on_own_rows(module, block.share_of, self._whereabouts.outside, partial(gather_rows, group=self.group))
        forward: Callable[[Tensor], Tensor] = module.forward
        if style != "colwise":
            gathered = partial(gather_last_dim, widths=widths, rank=self.tp_rank, group=self.group)
            wrap(module, lambda x: gathered(forward(x)), "tensor parallel", "all columns")

    def _summed(self, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        shards = sharers(self.group).size()
        if self._tiles and (rows := rows_of_tile(x, 1)):
            of_ranks = x.view(shards, -1, x.shape[-1]).split(max(1, rows // shards), 1)
            tiles = (part(tile).flatten(0, 1).unsqueeze(0) for tile in of_ranks)  # none of which is kept as a copy
            out = torch.cat([scatter_rows(tile, self.group) for tile in tiles], -2)
        else:
            out = scatter_rows(part(x), self.group)
        self._whereabouts.leave()
        return out

    def _experts(self, module: nn.Module) -> None:
        forward: Callable[..., Tensor] = module.forward

        def experts(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *rest: Any) -> Tensor:
            rows = gather_rows(hidden, self.group)
            index, weights = all_rows(top_k_index, self.group), gather_rows(top_k_weights, self.group)
            with self._whereabouts.inside():
                out = forward(rows, index, weights, *rest)
            return scatter_rows(out, self.group)

        wrap(module, experts, "tensor parallel", "experts of shared tokens")

    def _other(self, style: str, name: str, module: nn.Module, parent: nn.Module) -> None:
        raise ConfigError(
            f"{name}: the tensor parallel style {style!r} of the model's plan is not implemented for shared tokens; "
            'leave "token_sharding" out of hydra.fast_paths'
        )


def blocks_of(plan: Mapping[str, str], model: nn.Module) -> dict[str, str]:
    """Paths of the modules that make a block, column-parallel ones and experts -> the block's path."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        style = style_of(plan, name)
        if style in COLUMN_STYLES or (style == "packed_colwise" and isinstance(linear_of(module), nn.Linear)):
            found[linear_path(name, module)] = name.rpartition(".")[0]
        elif style == "moe_tp_experts":
            found[name] = name
    ends = ends_of(model)
    return {name: block for name, block in found.items() if trained_copy(model.get_submodule(name)) not in ends}


def with_blocks(
    readers: Mapping[str, Collection[str]], plan: Mapping[str, str], model: nn.Module, names: Mapping[str, str]
) -> dict[str, Collection[str]]:
    """`readers` of parameters, and the blocks that compute with them before their own module is called.

    `names` maps the model's parameters to master names.
    """
    blocks, found = blocks_of(plan, model), {name: set(modules) for name, modules in readers.items()}
    for path, name in names.items():
        block = blocks.get(path.rpartition(".")[0])
        if block is not None:
            found.setdefault(name, set()).add(block)
    return dict(found)


class _Columns(NamedTuple):
    """What the column-parallel children of a block compute in one run of it."""

    modules: Sequence[nn.Module]  # those that are packed as one
    put_off: Sequence[bool]  # whose weights' gradients wait for later
    added: Sequence[bool]  # whose are added to their sums at once [Note: sums of products]
    group: Group
    queue: WeightGradients

    def waits(self, index: int) -> bool:
        """Whether a weight's gradient waits; not where the layer was computed again."""
        return self.put_off[index] and self.queue.keeps(self.modules[index])


@dataclass
class _Entered:
    """One run of a block."""

    shard: Tensor
    stand_in: StandIn
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)  # of children that have not been asked for theirs
    computed: bool = False


class _Block:
    """A module with column-parallel children: handed a share of the rows, it runs on all of them."""

    def __init__(self, module: nn.Module, group: Group, queue: WeightGradients, whereabouts: Whereabouts, tiles: bool):
        self._tiles = tiles
        self.columns: dict[nn.Module, PackedLinears | None] = {}  # column-parallel ones, and with which they are packed
        self._kind, self._group, self._queue, self._whereabouts = type(module).__name__, group, queue, whereabouts
        self._now: _Entered | None = None
        forward: Callable[..., Any] = module.forward
        first = next(iter(inspect.signature(forward).parameters))

        def run(*args: Any, **kwargs: Any) -> Any:
            shard = args[0] if args else kwargs.pop(first)
            with self._entered(shard) as stand_in:
                return forward(stand_in, *args[1:], **kwargs)

        wrap(module, run, "tensor parallel", "block of shared tokens")

    @contextmanager
    def _entered(self, shard: Tensor) -> Iterator[StandIn]:
        before, stand_in = self._now, StandIn.of(shard, sharers(self._group).size())
        self._now = _Entered(shard, stand_in)
        try:
            with self._whereabouts.inside():
                yield stand_in
        finally:
            self._now = before  # it holds activations

    def output_of(self, module: nn.Module, x: Tensor) -> Tensor:
        """What a child makes of all rows; the first that is asked computes what all of them do."""
        now = self._entered_by(x)
        if not now.computed:
            now.outputs, now.computed = self._compute(now.shard), True
        if module not in now.outputs:
            raise ConfigError(f'a layer of {self._kind} runs twice: leave "token_sharding" out of hydra.fast_paths')
        return now.outputs.pop(module).view(*x.shape[:-1], -1)

    def share_of(self, x: Tensor) -> Tensor:
        """This rank's rows of what entered the block and stands for all rows."""
        return self._entered_by(x).shard

    def _entered_by(self, x: Tensor) -> _Entered:
        now = self._now
        if now is None or not isinstance(x, StandIn) or x.numel() != now.stand_in.numel():
            raise ConfigError(
                f"a column-parallel layer of {self._kind} reads something else than what enters {self._kind}: "
                'leave "token_sharding" out of hydra.fast_paths'
            )
        return now

    def _compute(self, shard: Tensor) -> dict[nn.Module, Tensor]:
        queue = self._queue
        products = [packed if packed is not None and packed.weight is not None else module
                    for module, packed in self.columns.items()]  # fmt: skip
        modules = tuple(dict.fromkeys(products))
        put_off = [queue.takes(module, shard) for module in modules]
        weights: list[Any] = [module.weight for module in modules]
        biases: list[Any] = [module.bias for module in modules]
        # Autograd is not to know the weights whose gradients wait [Note: split backward].
        known = [weight.detach() if off else weight for weight, off in zip(weights, put_off, strict=True)]
        columns = _Columns(modules, put_off, [queue.adds(module) for module in modules], self._group, queue)
        found: dict[nn.Module, Tensor] = {}
        shards = sharers(self._group).size()
        rows = rows_of_tile(shard, shards) if self._tiles else 0
        parts = shard.split(rows, -2) if rows else (shard,)
        tiles = [_GatherColumns.apply(part, columns, *known, *biases) for part in parts]
        outs = [_of_all_ranks(each, shards) for each in zip(*tiles, strict=True)] if rows else tiles[0]
        for module, out in zip(modules, outs, strict=True):
            if isinstance(module, PackedLinears):
                found |= zip(module.layers.values(), module.parts(out), strict=True)
            else:
                found[module] = out
        return found


def _of_all_ranks(tiles: Sequence[Tensor], shards: int) -> Tensor:
    """Rows in the order of the ranks that share them, of tiles of each rank's."""
    return torch.cat([tile.view(shards, -1, tile.shape[-1]) for tile in tiles], 1).flatten(0, 1)


class GatheredRows:
    """The rows of which this rank has a share, gathered when somebody asks for them."""

    def __init__(self, shard: Tensor, group: Group):
        self._shard, self._group = shard, group
        self._pending: Pending | None = None

    def start(self) -> None:
        """Begin to gather them: they will be taken."""
        self._pending = start_gather(self._shard, self._group)

    def take(self) -> Tensor:
        """All rows (tokens, features); nothing is kept of them."""
        pending, self._pending = self._pending or start_gather(self._shard, self._group), None
        return pending.wait().flatten(0, -2)


class _GatherColumns(torch.autograd.Function):
    """A shard of rows -> what every column-parallel child of a block makes of all rows."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, columns: _Columns, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        ctx.columns = columns
        ctx.set_materialize_grads(False)
        weights, biases = parameters[: len(columns.modules)], parameters[len(columns.modules) :]
        ctx.save_for_backward(shard, *weights)
        rows = start_gather(shard, columns.group).wait().flatten(0, -2)  # of outputs that are views none can be changed
        return tuple(F.linear(rows, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # The order matters: the rows travel while their gradient is computed, and that travels while the weights'
        # gradients are.
        shard, *weights = ctx.saved_tensors
        columns: _Columns = ctx.columns
        asked, count = ctx.needs_input_grad, len(columns.modules)
        dys = {i: dy.reshape(-1, dy.shape[-1]) for i, dy in enumerate(gradients) if dy is not None}
        later = [i for i in dys if columns.waits(i)]
        at_once = [i for i in dys if (asked[2 + i] or columns.put_off[i]) and i not in later]
        rows = GatheredRows(shard, columns.group)
        if at_once:
            rows.start()
        summed = start_sum(_times_weights(dys, weights), columns.group) if asked[0] else None
        if later:
            products = [Product(columns.modules[i], dys[i]) for i in later]
            columns.queue.put(products, GatheredRows(shard.detach(), columns.group))
        full = rows.take() if at_once else None
        of_weights: list[Tensor | None] = [None] * count
        for i in at_once:
            assert full is not None, "gathered above"
            if columns.put_off[i] or columns.added[i]:
                columns.queue.add(columns.modules[i], full, dys[i])
            else:
                of_weights[i] = dys[i].t() @ full
        of_biases = [dys[i].sum(0) if i in dys and asked[2 + count + i] else None for i in range(count)]
        dx = None if summed is None else summed.wait().view_as(shard)
        return dx, None, *of_weights, *of_biases


def _times_weights(dys: Mapping[int, Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The gradient of the rows: the sum of every child's, added up in place."""
    (first, *others) = dys
    dx = dys[first] @ weights[first]
    for i in others:
        dx.addmm_(dys[i], weights[i])
    return dx
