"""A model in; how the tokens of each layer meet, and what a trace found of its forward, out.

Three ways, in this order:

- by Hugging Face's attention interface, which is packed attention in stages: in one call for all sequences of a pack;
- by boxes, each called as it is once for each sequence [Note: boxes];
- in no way that can be run: ConfigError.

A model whose class and config promise the interface, and whose layers all attend by it where a few tokens are packed,
is not looked at further: the self-check would find a layer that does something else besides.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ds_hydra.pipe.attention import interface as attention
from ds_hydra.pipe.models.boxes import Boxes
from ds_hydra.pipe.models.failing import failing
from ds_hydra.pipe.models.find_boxes import find_boxes
from ds_hydra.pipe.models.flow import Flow
from ds_hydra.pipe.models.kinds import find_kinds
from ds_hydra.pipe.models.mixers import Mixers
from ds_hydra.pipe.models.refusals import may_mix_otherwise
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.pipe.models.causal_lm import CausalLM

logger = logging.getLogger(__name__)


def find_ways(source: CausalLM, model: Any, values: Mapping[str, Tensor]) -> tuple[Boxes, Flow]:
    """The boxes of a model's layers, and its flow. `source` is not yet traced; `values` are for all parameters."""
    device = next(iter(values.values())).device
    source.first_position = 0
    refusal: ConfigError | None = None
    packed: Flow | None = None
    try:
        source.number(source.copy_to_run(device, values))
        if not may_mix_otherwise(model):
            packed = source.trace(model)
            if not packed.unattended:
                return Boxes(), packed
    except attention.NotPackedError as error:
        refusal = error
    except ConfigError:  # of what no way of running it would cure
        raise
    except Exception as error:  # of a forward that takes no positions, say
        refusal = ConfigError(f"{source.name} cannot run one packed sequence: {failing(error)}")
    try:
        boxes, flow = _boxed(source, model, values, packs=refusal is None)
    except Exception as error:
        if packed is not None:  # the self-check has the last word on layers that do not attend
            return Boxes(), packed
        if refusal is None or str(error) == str(refusal):
            raise
        raise ConfigError(f"{refusal}. Nor can it run once for each sequence of a pack: {error}") from error
    if boxes:
        logger.info("%s", boxes.told(source.layers_path))
        return boxes, flow
    if refusal is not None:
        raise refusal
    return Boxes(), packed or source.trace(model)


def _boxed(source: CausalLM, model: Any, values: Mapping[str, Tensor], *, packs: bool) -> tuple[Boxes, Flow]:
    """The boxes of a model that may need some, and its flow where sequences run alone."""
    try:
        flow = source.trace(model, alone=True)
    except ConfigError:
        if source.own_attention == "eager":
            raise
        source.own_attention = "eager"  # the kernels of others draw random numbers where nobody sees it
        flow = source.trace(model, alone=True)
    kinds = find_kinds(model, source.template, source.layers_path, () if flow.obstacle else flow.ran)
    device = next(iter(values.values())).device
    alone, packed = (
        Mixers(source.copy_to_run(device, values), source.layers_path, flow.doors, kinds.firsts) for _ in range(2)
    )
    attention.use_in(alone.model, source.own_attention)
    boxes = find_boxes(alone, packed if packs else None, source.first_position)
    return replace(boxes, attention=source.own_attention), replace(flow, heads=boxes.heads, no_slices=boxes.whole)
