"""The training data of a config in; what draws a step's sequences from them, and the loader for scripts, out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.data.lengths import assumed_tokens
from ds_hydra.data.sampler import SortedPairs, StepLoader, TokenBudgetSampler
from ds_hydra.data.sequences import SequenceData
from ds_hydra.data.stream import StreamSampler, StreamSteps
from ds_hydra.data.tokens import Limits
from ds_hydra.zero_hetero.errors import ConfigError


def sized(config: HydraConfig, training_data: Any, num_ranks: int) -> HydraConfig:
    """A config with `tokens_per_step`, an estimate where steps are handed in and it is 0.

    Raises ConfigError where training data need it, or nothing says how long a sequence may be.
    """
    if config.tokens_per_step:
        return config
    if training_data is not None:
        raise ConfigError(
            "hydra.tokens_per_step is missing: a step draws sequences of training_data until it holds so many tokens; "
            "add it"
        )
    if config.context_length is None:
        raise ConfigError(
            "hydra.context_length is missing: steps are handed in, and nothing says how long a sequence may be; add "
            "it, in tokens"
        )
    return replace(config, tokens_per_step=assumed_tokens(config.context_length, num_ranks))


def streamed(
    stream: Any, config: HydraConfig, limits: Limits, next_step: Callable[[], int], *, reads: bool
) -> tuple[StreamSampler, StreamSteps]:
    """Of data that are iterated; the rank that `reads` tells the others what comes."""
    _refuse_batches(config)
    refuse_reordering(config, "training_data is a stream, which is read in its own order")
    sampler = StreamSampler(
        stream, config.tokens_per_step, limits, config.planner.ahead, reads=reads, saves=config.checkpoint is not None
    )
    return sampler, StreamSteps(config.total_steps, next_step)


def drawn_from(
    data: SequenceData, config: HydraConfig, next_step: Callable[[], int]
) -> tuple[TokenBudgetSampler | SortedPairs, StepLoader]:
    """Of data that can be indexed, in an order that each rank knows."""
    _refuse_batches(config)
    drawn = TokenBudgetSampler(data.lengths, config.tokens_per_step, config.seed)
    sampler = drawn if config.reorder_steps == 1 else SortedPairs(drawn)
    return sampler, StepLoader(sampler, next_step, config.total_steps)


def refuse_reordering(config: HydraConfig, why: str) -> None:
    """ConfigError where steps are to be sorted two by two though the next one is not known."""
    if config.reorder_steps != 1:
        raise ConfigError(
            f"hydra.reorder_steps {config.reorder_steps} needs sequences whose lengths are known ahead, but {why}: "
            "pass training_data that can be indexed, or remove the setting"
        )


def _refuse_batches(config: HydraConfig) -> None:
    if config.loss_norm == "batch":
        raise ConfigError(
            'hydra.loss_norm "batch" is of the batches that a script hands in, but training_data are drawn by '
            'tokens: use "token", "sequence" or "micro_batch", or leave training_data out of initialize()'
        )
