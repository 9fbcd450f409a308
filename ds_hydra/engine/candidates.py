"""Before step 0: the cost table and the candidate strategies of a job, from its config and its model."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.costs.analytic import ModelShape, analytic_cost_table
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.table_file import JobFingerprint, TableFile, check_job, read_table_file
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.planner.proposal.propose import propose_strategies
from ds_hydra.zero_hetero.errors import ConfigError

# Rough speeds for the analytic table, of one rank: FLOP/s and bytes/s between ranks.
_SPEEDS = {"cuda": (1.5e14, 1.5e11), "cpu": (2e10, 1e9)}


def job_cost_table(
    config: HydraConfig, shape: ModelShape, schemes: Sequence[ParallelScheme], longest: int, job: JobFingerprint
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
