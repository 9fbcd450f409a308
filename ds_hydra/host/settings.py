"""A config's settings as DeepSpeed reads them, batch sizes and training data; and DeepSpeed's calls that are refused.

A DeepSpeedEngine is driven from outside: the script hands it one micro-batch after the other and says when to step.
Here a plan decides that, for all ranks and from all sequences of a step at once. Calls that contradict a plan are
refused with what to do in their place, since to ignore them would train something else than the script says.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import logger as deepspeed_logger
from torch import nn
from torch.optim import Optimizer

from ds_hydra.config.checks import AUTO, as_number, integer, nearest
from ds_hydra.config.deepspeed_settings import BATCH_KEYS, stage_of
from ds_hydra.config.hydra_block import HydraConfig, ParsedConfig
from ds_hydra.data.lengths import assumed_tokens
from ds_hydra.data.sampler import SortedPairs, StepLoader, TokenBudgetSampler
from ds_hydra.data.sequences import SequenceData
from ds_hydra.data.stream import StreamSampler, StreamSteps
from ds_hydra.data.tokens import Limits
from ds_hydra.host.optimizers import optimizer_of_block
from ds_hydra.zero_hetero.errors import ConfigError


def refuse_batch_size(call: str) -> NoReturn:
    """A step that is drawn from training_data has a number of tokens, not of sequences."""
    raise ConfigError(f"{call}: a step of training_data is sized by hydra.tokens_per_step: set that, and restart")


def refuse_num_items(given: float) -> NoReturn:
    """By which a Hugging Face model would divide its loss."""
    raise ConfigError(
        f"engine(batch, num_items_in_batch={given:g}) would have no effect: a step's losses are divided by the targets "
        'of all its batches, or by each batch\'s own where hydra.loss_norm is "batch": leave it out, and put a factor '
        "on the loss where it is to count otherwise"
    )


def refused_call(name: str, remedy: str) -> Callable[..., NoReturn]:
    """A method of an engine that DeepSpeed's has, and that would change nothing here."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"engine.{name}() would have no effect on planned steps: {remedy}")

    refuse.__name__, refuse.__doc__ = name, "Refused."
    return refuse


def refuse_foreign_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Raise ConfigError if an LR scheduler was made for another optimizer than the one that was passed.

    It would go on setting the rates of an optimizer that makes no steps, while the engine's own keeps its first rate.
    """
    bound = getattr(scheduler, "optimizer", None)
    if isinstance(bound, Optimizer) and bound is not optimizer:
        raise ConfigError(
            f"the LR scheduler {type(scheduler).__name__} belongs to an optimizer that was not "
            "passed to initialize(): pass that optimizer too, or a callable that makes the scheduler"
        )
    if type(scheduler).__name__ == "AdafactorSchedule":
        raise ConfigError(
            "the LR scheduler AdafactorSchedule reads rates from states of whole parameters, which no rank has: leave "
            "it out; with relative_step Adafactor sets its own rate, and lr of its groups tells it"
        )


def refuse_metrics_scheduler(scheduler: Any) -> None:
    """Raise ConfigError for an LR scheduler that wants more than to be told of a step, such as ReduceLROnPlateau."""
    if scheduler is None:
        return
    wanted = [
        one.name
        for one in inspect.signature(scheduler.step).parameters.values()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    if wanted:
        raise ConfigError(
            f"the LR scheduler {type(scheduler).__name__} wants {', '.join(wanted)} in each step, which the engine "
            "does not know: give initialize() the optimizer alone, and call the scheduler's step() between steps"
        )


class BatchSizes(NamedTuple):
    """Sequences, of scripts that hand batches in; nothing of a planned step follows from the first two."""

    whole: int | None  # of an update, on all ranks; None where the config has no batch size
    micro: int  # of a batch of one rank
    accumulation: int  # batches of a rank in an update


def batch_sizes(config: Mapping[str, Any], num_ranks: int) -> BatchSizes:
    """What the config says; what it leaves out follows from the rest as in DeepSpeed. ConfigError for what is no number
    of batches, and for "auto" that nobody has filled in."""
    if AUTO in (config.get(key) for key in BATCH_KEYS):
        raise ConfigError(
            f'config: {", ".join(BATCH_KEYS)} say "{AUTO}", which transformers\' Trainer fills in: give '
            "gradient_accumulation_steps as a number for a loop of engine(), backward() and step()"
        )
    whole, micro, steps = (_size(config.get(key), key) for key in BATCH_KEYS)
    if steps is None and whole is not None and micro is not None:
        steps, left = divmod(whole, micro * num_ranks)
        if left:
            raise ConfigError(
                f"config: train_batch_size {whole} is not a multiple of train_micro_batch_size_per_gpu {micro} times "
                f"{num_ranks} ranks: give gradient_accumulation_steps"
            )
    steps = steps or 1
    if micro is None:
        micro = 1 if whole is None else whole // (num_ranks * steps)
    elif whole is None:
        whole = micro * steps * num_ranks
    return BatchSizes(whole, micro, steps)


def _size(value: Any, key: str) -> int | None:
    """A whole number of at least 1, also as a text or with a point; None where there is none."""
    number = as_number(value)
    whole = int(number) if isinstance(number, float) and number.is_integer() else number
    return None if whole is None else int(integer(1)(whole, key))


def sized(config: HydraConfig, training_data: Any, num_ranks: int) -> HydraConfig:
    """A config with `tokens_per_step`, an estimate where steps are handed in and it is 0.

    Raises ConfigError where training data need it, or nothing says how long a sequence may be.
    """
    if config.tokens_per_step:
        return config
    if training_data is not None:
        raise ConfigError(
            "hydra.tokens_per_step is missing: a step draws sequences of training_data until it holds so many tokens; "
            "add it, or train_micro_batch_size_per_gpu to read a map-style dataset in batches, as DeepSpeed does"
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


_OFFLOADS = frozenset(("offload_optimizer", "offload_param"))
NO_MONITORS = DeepSpeedMonitorConfig()
_MONITOR_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


def deepspeed_config(parsed: ParsedConfig) -> DeepSpeedConfig:
    """DeepSpeed's half of the config as DeepSpeed itself reads it. ConfigError carries the text of its own errors."""
    try:
        config = DeepSpeedConfig(dict(parsed.deepspeed))
        _answer_as_written(config, parsed.source.get("zero_optimization"))
    except (AssertionError, DeepSpeedConfigError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"config: DeepSpeed refuses its settings: {error}. Correct or remove that one") from error
    if config.scheduler_name is not None:
        config.scheduler_params = dict(config.scheduler_params or {})
    for block, package in _MONITOR_PACKAGES.items():
        if getattr(config.monitor_config, block).enabled and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f'config: the monitor "{block}" is enabled but the package {package!r} is not installed: '
                f"pip install {package}, or disable it"
            )
    return config


def _answer_as_written(config: DeepSpeedConfig, zero: Any) -> None:
    """Let the engine's getters answer from the user's block "zero_optimization", which has no other effect, as far as
    that is true: masters are shared out as in stage 1, and nothing is offloaded."""
    if not isinstance(zero, Mapping):
        return
    stage = min(stage_of(zero.get("stage")), 1)
    known = {name for key, field in DeepSpeedZeroConfig.model_fields.items() for name in (key, field.alias)}
    true = {key: value for key, value in zero.items() if key in known - _OFFLOADS and value != AUTO}
    config.zero_config = DeepSpeedZeroConfig(**{**true, "stage": stage})
    config.zero_optimization_stage, config.zero_enabled = stage, stage > 0


def deepspeed_defaults(parsed: ParsedConfig, config: DeepSpeedConfig) -> tuple[str, ...]:
    """One line for the log for each thing that DeepSpeed does although the config does not mention it."""
    if parsed.source.get("gradient_clipping") is not None or not config.gradient_clipping:
        return ()
    norm = f"a norm of {config.gradient_clipping:g}"
    return (f'"gradient_clipping" is not set: gradients are clipped to {norm}, as DeepSpeed does; 0.0 never clips',)


def with_model_settings(config: HydraConfig, model: Any) -> HydraConfig:
    """The block "hydra", with checkpointing on if the script called the model's gradient_checkpointing_enable()."""
    # The newer releases' name first: they warn about the other one.
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    asked = next((bool(getattr(model, name)) for name in names if hasattr(model, name)), False)
    return replace(config, activation_checkpointing=config.activation_checkpointing or asked)


def _scheduler_class(name: str) -> Callable[..., Any] | None:
    """The class behind scheduler.type: DeepSpeed's own first, then torch's."""
    if name in lr_schedules.VALID_LR_SCHEDULES:
        return getattr(lr_schedules, name)
    found = getattr(torch.optim.lr_scheduler, name, None)
    return found if inspect.isclass(found) else None


def check_updates(parsed: ParsedConfig, config: DeepSpeedConfig) -> None:
    """Make the blocks "optimizer" and "scheduler" once, over parameters of one element, and throw them away.

    So a wrong one is refused now, and not once the masters are made, minutes into the start of a large job.
    """
    block = parsed.deepspeed.get("optimizer") or {"type": "SGD", "params": {"lr": 1e-3}}
    make = optimizer_of_block(block["type"], dict(block.get("params") or {}))
    name = config.scheduler_name
    if name is None:
        return
    scheduler = _scheduler_class(name)
    if scheduler is None:
        torch_names = [n for n, kind in vars(torch.optim.lr_scheduler).items() if inspect.isclass(kind)]
        hint = nearest(name, [*lr_schedules.VALID_LR_SCHEDULES, *torch_names])
        raise ConfigError(f'config: scheduler.type "{name}" is not known; {hint}')
    params = config.scheduler_params
    groups = max((len(rates) for rates in params.values() if isinstance(rates, list)), default=1)  # a rate for each
    optimizer = make([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(max(1, groups))])
    with quietly():
        try:
            refuse_metrics_scheduler(scheduler(optimizer, **params))
        except (TypeError, ValueError, AssertionError, KeyError) as error:
            accepted = ", ".join(list(inspect.signature(scheduler).parameters)[1:])
            raise ConfigError(f"config: scheduler.params of {name}: {error}; it takes {accepted}") from None


@contextmanager
def quietly() -> Iterator[None]:
    """Within it DeepSpeed's schedules do not warn, on every rank, of their own first call."""
    level = deepspeed_logger.level
    deepspeed_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        deepspeed_logger.setLevel(level)
