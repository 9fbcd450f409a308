"""Sources of stages that are found once, before ranks are forked, and not by each rank again.

To find where a model's stages come from takes a rank several times as long as all else of an engine, and all ranks find
the same. What is found, and how, has tests of its own.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from ds_hydra.engine import engine as engines
from ds_hydra.engine.models import model_source
from ds_hydra.pipe.loss import TokenLoss
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.pipe.stage_options import StageOptions

USUAL = StageOptions(token_sharding=True, functions="auto", sp_overlap=True)  # what a config's defaults ask for


def in_place_of_model_source(known: ModelSource) -> Callable[..., ModelSource]:
    """`model_source` for models that differ in their values only from the one of a source under the usual settings.

    Under other settings, with another loss, and for a model of other parameters, the source is found anew.
    """
    assert isinstance(known, CausalLM)
    alike = {(spec.name, spec.shape, spec.trainable, known.dtype) for one in known.plan.buckets for spec in one.params}

    def find(model: Any, options: StageOptions, **arguments: Any) -> ModelSource:
        named = dict(getattr(base_of(model), "named_parameters", dict)())
        own = {(name, tuple(one.shape), one.requires_grad, one.dtype) for name, one in named.items()}
        if options != USUAL or arguments.get("loss_fn") is not getattr(known, "token_loss", None) or own != alike:
            return model_source(model, options, **arguments)
        found = copy.copy(known)
        found.values = {name: parameter.detach() for name, parameter in named.items() if not parameter.is_meta}
        return found

    return find


@contextlib.contextmanager
def shared_source(model: Any, loss_fn: TokenLoss | None = None) -> Iterator[None]:
    """Engines within it, also those of ranks that are forked, take the source of this model for models like it.

    Only their values may differ, and what a source does not look at.
    """
    known = model_source(model, USUAL, loss_fn=loss_fn)
    with mock.patch.object(engines, "model_source", in_place_of_model_source(known)):
        yield
