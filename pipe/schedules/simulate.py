"""A plan in, the time it takes under an event simulation of 1F1B out (ms). Pure: no torch.

Every stage runs the 1F1B order: PP-1-s warm-up forwards on stage s, then one forward and one backward in turn,
then the backwards that are left. A forward takes a third of its micro-batch's load, a backward two thirds;
sending takes no time. An operation starts once its stage is free and its input is there.
"""

from __future__ import annotations

from collections.abc import Sequence

FORWARD_SHARE = 1.0 / 3.0


def schedule_1f1b(stage: int, num_stages: int, num_microbatches: int) -> list[tuple[bool, int]]:
    """The operations of one stage in order, as (is_forward, micro-batch)."""
    warm_up = min(num_stages - 1 - stage, num_microbatches)
    order = [(True, m) for m in range(warm_up)]
    for m in range(num_microbatches - warm_up):
        order += [(True, warm_up + m), (False, m)]
    return order + [(False, m) for m in range(num_microbatches - warm_up, num_microbatches)]


def simulate_pipeline(loads: Sequence[float], num_stages: int) -> float:
    """Time of one pipeline over micro-batches with these loads (ms, one stage, forward and backward)."""
    return simulate_stages([loads] * num_stages)


def simulate_stages(loads: Sequence[Sequence[float]]) -> float:
    """As `simulate_pipeline` for stages that differ: `loads[stage][micro-batch]` in ms."""
    num_stages, count = len(loads), len(loads[0])
    done: dict[tuple[int, bool, int], float] = {}
    orders = [schedule_1f1b(stage, num_stages, count) for stage in range(num_stages)]
    at, free = [0] * num_stages, [0.0] * num_stages
    remaining = 2 * count * num_stages
    while remaining:
        before = remaining
        for stage in range(num_stages):
            while at[stage] < len(orders[stage]):
                forward, m = orders[stage][at[stage]]
                ready = _ready(done, forward, m, stage, num_stages)
                if ready is None:
                    break
                share = FORWARD_SHARE if forward else 1.0 - FORWARD_SHARE
                free[stage] = max(free[stage], ready) + share * loads[stage][m]
                done[stage, forward, m] = free[stage]
                at[stage] += 1
                remaining -= 1
        assert remaining < before, "the 1F1B schedule does not end"
    return max(free, default=0.0)


def _ready(
    done: dict[tuple[int, bool, int], float], forward: bool, m: int, stage: int, num_stages: int
) -> float | None:
    """When the input of an operation is there; None while it has not been produced."""
    if forward:
        return 0.0 if stage == 0 else done.get((stage - 1, True, m))
    if stage == num_stages - 1:
        return done.get((stage, True, m))
    return done.get((stage + 1, False, m))
