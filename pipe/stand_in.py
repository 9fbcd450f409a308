"""A tensor of the shape of all rows, without their values, for code that only looks at shapes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ds_hydra.zero_hetero.errors import ConfigError

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
