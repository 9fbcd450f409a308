"""A model that DeepSpeed has cut into parts in; the same model with whole parameters on each rank out.

`deepspeed.zero.Init`, and transformers' `from_pretrained` under a ZeRO-3 config, leave of each parameter a part on each
rank and an empty tensor in the model. The engine takes values from whole parameters.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses, zero3_linear_wrap
from torch import nn

from ds_hydra.host.environment import launched_node_size
from ds_hydra.ranks.host_memory import available_bytes
from ds_hydra.ranks.together import Texts, together
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

_OF_INIT = frozenset((
    "all_gather", "all_gather_coalesced", "partition", "reduce_gradients_at_owner", "partition_gradients",
    "aligned_size", "padding_size", "partition_numel", "item", "convert_to_zero_parameters", "is_external_param",
    "nvme_swapper",
))  # fmt: skip
"""What `zero.Init` sets on a parameter, besides attributes that begin with ds_."""

REMEDY = (
    "take out `with deepspeed.zero.Init()` (transformers' from_pretrained does the same where the config says ZeRO "
    'stage 3: say stage 1), build the model under torch.device("meta") and name its folder in hydra.initial_weights: '
    "then each rank reads its share alone"
)


def make_whole(model: Any, channel: Texts) -> None:
    """Gather each parameter that is cut, on all ranks, in CPU memory; it stays the same object, as optimizers hold it.

    All ranks call it. ConfigError on all where a host's memory does not hold its ranks' models, or for a model that
    an engine of ZeRO stage 3 trains.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    held: list[Any] = [own for module in modules for own in module._parameters.values() if hasattr(own, "ds_id")]
    cut = list({id(own): own for own in held}.values())
    with together(channel, "gathering the model"):
        if any(isinstance(module._parameters, ZeROOrderedDict) for module in modules):
            raise ConfigError(
                "the model was given to an engine of ZeRO stage 3 before, whose hooks cut and gather it: build another "
                "one for ds_hydra.initialize()"
            )
        _refuse_too_large(sum(one.ds_numel * one.element_size() for one in cut), channel.num_ranks)
    for parameter in cut:
        parameter.all_gather()
        parameter.data = parameter.data.detach().to("cpu", copy=True)
        for name in [name for name in vars(parameter) if name in _OF_INIT or name.startswith("ds_")]:
            delattr(parameter, name)
    if cut and torch.nn.functional.linear is zero3_linear_wrap:  # which Init leaves there, for models that stay cut
        torch.nn.functional.linear = InsertPostInitMethodToModuleSubClasses.linear_bk
    if cut and channel.rank == 0:
        logger.warning(
            "deepspeed.zero.Init had cut %d parameters of the model: they were gathered, and are shared out again as "
            "masters. To spare this, %s", len(cut), REMEDY,
        )  # fmt: skip


def _refuse_too_large(size: int, num_ranks: int) -> None:
    """ConfigError where models of this many bytes, one for each rank of this host, are more than it has left."""
    here, left = launched_node_size() or num_ranks, available_bytes()
    if size * here > left:
        raise ConfigError(
            f"deepspeed.zero.Init has cut the model, which takes {size / 2**30:.1f} GiB whole: for {here} ranks of "
            f"this host that is more than the {left / 2**30:.1f} GiB that it has left. To train it, {REMEDY}"
        )
