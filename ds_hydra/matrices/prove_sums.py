"""Is a step by sums over whole parameters what it is in one process? Tried on small ones before step 0.

Three ranks in this process hold even intervals of two buckets with parameters of all kinds: vectors, matrices that lie
as they are or turned, fused, in stacks that are cut by matrices or within them. Two steps are made by the tables and
the optimizer that the job uses, in FP64, and by loops over whole parameters, which know nothing of boxes and intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hydra.matrices.proof import KINDS, Kind, drawn, params_of, put_grads, ranks_of, whole_values
from ds_hydra.matrices.sums import Sums
from ds_hydra.zero_hetero.errors import ConfigError

_STEPS, _NEAR = 2, 1e-9
_KINDS: Mapping[str, tuple[int, Kind]] = {
    **{name: (bucket, kind._replace(heads=1)) for name, (bucket, kind) in KINDS.items()},
    "stack cut by columns": (1, Kind((3, 4, 6), 2)),
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
