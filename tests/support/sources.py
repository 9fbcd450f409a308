"""Sources of stages that are found once, before ranks are forked, and not by each rank again.

To find where a model's stages come from takes a rank several times as long as all else of an engine, and all ranks find
the same. What is found, and how, has tests of its own.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

from ds_hydra.engine import engine as engines
from ds_hydra.engine import job as jobs
from ds_hydra.engine.job import model_source
from ds_hydra.pipe.loss import TokenLoss
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.self_check.cache import fingerprint

USUAL = StageOptions(token_sharding=True, functions="auto", sp_overlap=True)  # what a config's defaults ask for


@contextlib.contextmanager
def in_place_of_looking(known: ModelSource) -> Iterator[None]:
    """Engines within it take a source under the usual settings for models that differ in their values only.

    Under other settings, with another loss, for a model of other parameters and where strategies spread experts, the
    source is found anew. What is known needs no name by which ranks would tell each other of it: to make one takes half
    as long as all else.
    """
    assert isinstance(known, CausalLM)
    alike = {(spec.name, spec.shape, spec.trainable, known.dtype) for one in known.plan.buckets for spec in one.params}

    def is_known(model: Any, options: StageOptions) -> bool:
        named = dict(getattr(base_of(model), "named_parameters", dict)())
        own = {(name, tuple(one.shape), one.requires_grad, one.dtype) for name, one in named.items()}
        return options == USUAL and own == alike

    def find(model: Any, options: StageOptions, **arguments: Any) -> ModelSource:
        stages = (stage for shape in arguments.get("shapes", ()) for one in shape.pipelines for stage in one.stages)
        other = arguments.get("loss_fn") is not (None if known.valued else known.token_loss)
        if other or not is_known(model, options) or any(stage.ep > 1 for stage in stages):
            return model_source(model, options, **arguments)
        found = copy.copy(known)
        named = base_of(model).named_parameters()
        found.values = {name: parameter.detach() for name, parameter in named if not parameter.is_meta}
        return found

    def name(model: Any, what: str, *settings: Any) -> str | None:
        return None if is_known(model, StageOptions(*settings)) else fingerprint(model, what, *settings)

    with mock.patch.object(engines, "model_source", find), mock.patch.object(jobs, "fingerprint", name):
        yield


def shared_source(model: Any, loss_fn: TokenLoss | None = None) -> contextlib.AbstractContextManager[None]:
    """Engines within it, also those of ranks that are forked, take the source of this model for models like it.

    Only their values may differ, and what a source does not look at.
    """
    return in_place_of_looking(model_source(model, USUAL, loss_fn=loss_fn))
