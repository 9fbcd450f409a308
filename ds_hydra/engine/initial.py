"""A job's model and `hydra.initial_weights` in; the first values of buffers and masters out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_hydra.checkpoint.pretrained import load_pretrained, stored_buffers
from ds_hydra.engine.job import Job
from ds_hydra.pipe.models.adapted import has_adapters
from ds_hydra.pipe.models.meta_copy import drawn_parameter, set_buffers, unset_buffers
from ds_hydra.ranks.together import together
from ds_hydra.ranks.world import World
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.zero_hetero.errors import ConfigError

RANDOM = "random"


def give_buffers(model: Any, initial_weights: str | None) -> None:
    """Give a model that was built on the meta device its buffers. ConfigError for one whose value nothing tells."""
    names = unset_buffers(model)
    if not names:
        return
    folder = None if initial_weights in (None, RANDOM) else Path(initial_weights)
    set_buffers(model, {} if folder is None else stored_buffers(folder, names))


def give_masters(masters: ModelMasters, job: Job, world: World) -> None:
    """Give masters the model's values, those of a folder, or drawn ones; every rank must call it.

    Raises ConfigError or CheckpointError on all ranks.
    """
    where = job.config.initial_weights
    if where is not None and has_adapters(job.model):
        raise ConfigError(
            f"hydra.initial_weights is {where!r} but the model has adapters, which begin as PEFT draws them: remove "
            "the setting, and load the base's weights before get_peft_model()"
        )
    if where is None:
        masters.load(job.source.values, world.group)
    elif where == RANDOM:
        with together(world.channel, "initialising the model"):
            if known := list(job.source.values):
                raise ConfigError(
                    f'hydra.initial_weights is "random" but the model has a value for {known[0]!r} and '
                    f'{len(known) - 1} more parameters: build it under torch.device("meta"), or remove the setting'
                )
            masters.draw(lambda name: drawn_parameter(job.model, name, job.config.seed))
    else:
        load_pretrained(masters, Path(where), job.source.aliases, job.model, world)
