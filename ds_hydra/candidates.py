"""Before step 0: the cost table and the candidate strategies of a job, from its config and its model."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hydra.config import HydraConfig
from ds_hydra.cost_model import CostTable, ModelShape, analytic_cost_table
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.strategy import ParallelScheme, place_strategy
from ds_hydra.planner.proposal import propose_strategies
from ds_hydra.table_file import JobPrint, TableFile, check_job, read_table_file
from ds_hydra.zero_hetero.errors import ConfigError, PlanError

# Rough speeds for the analytic table, of one rank: FLOP/s and bytes/s between ranks.
_SPEEDS = {"cuda": (1.5e14, 1.5e11), "cpu": (2e10, 1e9)}


def feasible_schemes(plan: ModelPlan, num_ranks: int, node_size: int) -> tuple[ParallelScheme, ...]:
    """Every scheme of up to `num_ranks` ranks that the model can be cut by; TP and SP stay inside a node."""
    node = min(node_size, num_ranks)
    schemes: list[ParallelScheme] = []
    for tp in range(1, node + 1):
        for sp in range(1, node // tp + 1):
            for pp in range(1, min(num_ranks // (tp * sp), plan.num_layers) + 1):
                scheme = ParallelScheme(tp, pp, sp)
                try:
                    plan.check(place_strategy([scheme], scheme.num_ranks, plan.num_layers))
                except PlanError:
                    continue
                schemes.append(scheme)
    return tuple(schemes)


def model_shape(plan: ModelPlan, hidden: int, vocab: int | None) -> ModelShape:
    """Sizes that the analytic cost depends on, read off the parameters."""
    params = [param for bucket in plan.buckets for param in bucket.params]
    largest = max((max(param.shape) for param in params if param.name in plan.layers[-1]), default=hidden)
    heads = max(1, plan.num_heads)
    return ModelShape(
        hidden=hidden,
        layers=plan.num_layers,
        heads=heads,
        kv_heads=max(1, plan.num_kv_heads),
        intermediate=largest,
        vocab=vocab or 1,
        params=sum(param.numel for param in params),
    )


def job_cost_table(
    config: HydraConfig, shape: ModelShape, schemes: Sequence[ParallelScheme], longest: int, job: JobPrint
) -> TableFile:
    """The measured table of the config, or an analytic one for sequences of up to `longest` tokens.

    Raises ConfigError when the measured table was made for another job, or lacks a scheme that a strategy of the
    config uses.
    """
    if config.cost_table is None:
        flops, link = _SPEEDS["cpu" if job.threads else "cuda"]
        context = max(longest, config.tokens_per_step)
        return TableFile(analytic_cost_table(shape, schemes, context, device_flops=flops, link_bytes_per_second=link))
    found = read_table_file(config.cost_table)
    check_job(found, job, repr(config.cost_table))
    table = found.table
    missing = sorted({s for strategy in config.schemes for s in strategy} - set(table.schemes))
    if missing:
        raise ConfigError(
            f"cost table {config.cost_table!r} has no entry for {', '.join(map(str, missing))}, which "
            f"hydra.strategies use; it has {', '.join(map(str, table.schemes))}. Measure them, or leave them out"
        )
    return found


def proposed_strategies(
    config: HydraConfig, table: CostTable, lengths: Sequence[int], num_ranks: int, node_size: int
) -> tuple[tuple[ParallelScheme, ...], ...]:
    """What the planner proposes for `strategies: "auto"`; lengths in tokens, of all sequences of the data."""
    if not lengths:
        raise ConfigError(
            'hydra.strategies "auto" needs training_data to propose strategies for; list strategies instead'
        )
    return propose_strategies(
        table,
        num_ranks,
        lengths,
        config.tokens_per_step,
        max(lengths),
        node_size=node_size,
        seed=config.planner_options().seed,
    )
