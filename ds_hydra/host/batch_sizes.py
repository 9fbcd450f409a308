"""A DeepSpeed config and a number of ranks in; the three batch sizes that DeepSpeed makes of them out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ds_hydra.config.checks import AUTO, as_number, integer
from ds_hydra.config.deepspeed_settings import BATCH_KEYS
from ds_hydra.zero_hetero.errors import ConfigError


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
