"""Calls of a DeepSpeedEngine that a planned engine refuses, and why; each function raises the error of one case.

A DeepSpeedEngine is driven from outside: the script hands it one micro-batch after the other and says when to step.
Here a plan decides that, for all ranks and from all sequences of a step at once. Calls that contradict a plan are
refused with what to do in their place, since to ignore them would train something else than the script says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from torch.optim import Optimizer

from ds_hydra.zero_hetero.errors import ConfigError


def batch_size_of_data(call: str) -> NoReturn:
    """A step that is drawn from training_data has a number of tokens, not of sequences."""
    raise ConfigError(f"{call}: a step of training_data is sized by hydra.tokens_per_step: set that, and restart")


def num_items(given: float) -> NoReturn:
    """By which a Hugging Face model would divide its loss."""
    raise ConfigError(
        f"engine(batch, num_items_in_batch={given:g}) would have no effect: a step's losses are divided by the targets "
        'of all its batches, or by each batch\'s own where hydra.loss_norm is "batch": leave it out, and put a factor '
        "on the loss where it is to count otherwise"
    )


def call(name: str, remedy: str) -> Callable[..., NoReturn]:
    """A method of an engine that DeepSpeed's has, and that would change nothing here."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"engine.{name}() would have no effect on planned steps: {remedy}")

    refuse.__name__, refuse.__doc__ = name, "Refused."
    return refuse


def foreign_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Raise ConfigError if an LR scheduler was made for another optimizer than the one that was passed.

    It would go on setting the rates of an optimizer that makes no steps, while the engine's own keeps its first rate.
    """
    bound = getattr(scheduler, "optimizer", None)
    if isinstance(bound, Optimizer) and bound is not optimizer:
        raise ConfigError(
            f"the LR scheduler {type(scheduler).__name__} belongs to an optimizer that was not "
            "passed to initialize(): pass that optimizer too, or a callable that makes the scheduler"
        )


def scheduler_of_metrics(scheduler: Any) -> None:
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


def step_beyond(total_steps: int | None, step: int) -> None:
    """Raise ConfigError if `step` comes after the last one that the config asks for."""
    if total_steps is not None and step > total_steps:
        raise ConfigError(
            f"step {step} was asked for, but training ends with hydra.total_steps {total_steps}: loop "
            "with `for _ in loader`, which ends there after a restart too, or raise it"
        )
