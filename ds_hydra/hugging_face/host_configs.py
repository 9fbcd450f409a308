"""A DeepSpeed config with the block "hydra" in; what Accelerate and transformers see of it, and what the engine gets.

[Note: configs of hosts]
Both hosts go through a config before an engine is made: they fill in each "auto", refuse one that they have no value
for, write over "steps_per_print", and where the ZeRO stage is 3 cut a model while it is loaded. What is the engine's in
the config is none of their business, so they see something else there:

    the config                                       a host sees                      the engine gets
    "hydra": {"strategies": "auto"}                  the same, and goes not into it   the block as written
    "zero_optimization": {"stage": 3, ...} or none   "zero_optimization": {"stage": 1}   the block as written
    "steps_per_print": 5                             infinity, as Accelerate has it   5
    what the engine does its own way, such as        nothing                             the block as written
    "tensor_parallel" (`deepspeed_keys.TOLD`)
    everything else                                  the same, each "auto" filled in  what the host made of it

Masters are sharded as by stage 1 whatever the stage is, so no host has to act as for another one. A config without the
block "hydra" is none of this module's business.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from accelerate import DeepSpeedPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig

from ds_hydra.config.checks import AUTO
from ds_hydra.config.deepspeed_settings import TOLD
from ds_hydra.config.hydra_block import BLOCK

_GIVEN = "hydra_given"  # key of a host's config: what stood there for the engine
_FOR_ENGINE = ("zero_optimization", "steps_per_print", *TOLD)


@functools.cache
def teach_hosts() -> None:
    """From now on hosts see configs with the block as [Note: configs of hosts] says; calling it again does nothing."""
    read_stage, fill_in = HfDeepSpeedConfig.set_stage_and_offload, DeepSpeedPlugin.deepspeed_config_process

    # The one method that every form of a config goes through, before a stage is asked for: a path, a dict, base64 text,
    # an object that holds it, and a file that `accelerate launch` names.
    def read_stage_of_hosts(self: Any) -> None:
        if BLOCK in self.config and _GIVEN not in self.config:
            self.config[_GIVEN] = {key: self.config.pop(key) for key in _FOR_ENGINE if key in self.config}
            self.config["zero_optimization"] = {"stage": 1}
        read_stage(self)

    def fill_in_others(self: Any, prefix: str = "", *args: Any, **kwargs: Any) -> None:
        if prefix not in (f"{BLOCK}.", f"{_GIVEN}."):  # it calls itself for each block
            fill_in(self, prefix, *args, **kwargs)

    HfDeepSpeedConfig.set_stage_and_offload = read_stage_of_hosts
    DeepSpeedPlugin.deepspeed_config_process = fill_in_others


def for_engine(config: Mapping[str, Any]) -> dict[str, Any]:
    """A host's config as the engine gets it: what hosts see something else of is as it was written."""
    given = config.get(_GIVEN)
    if given is None:
        return dict(config)
    others = {key: value for key, value in config.items() if key not in (_GIVEN, *_FOR_ENGINE)}
    return others | {key: _decided(value) for key, value in given.items()}


def _decided(value: Any) -> Any:
    """A block of ZeRO without each "auto": a host would fill it in, and the engine leaves it at its own way."""
    if not isinstance(value, Mapping):
        return value
    return {key: _decided(one) for key, one in value.items() if one != AUTO}
