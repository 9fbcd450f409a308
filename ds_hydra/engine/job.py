"""The job: what is trained, on what, and how; the source of its stages, and the first values of its parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_hydra.checkpoint.pretrained import load_pretrained, stored_buffers
from ds_hydra.config.hydra_block import OPTIMIZER, HydraConfig
from ds_hydra.costs.cost_table import read_table_file
from ds_hydra.costs.shape_costs import whole_are_cheaper
from ds_hydra.data.sampler import Order
from ds_hydra.data.sequences import SequenceData
from ds_hydra.engine.plans import Callback
from ds_hydra.host.optimizers import OptimizerRecipe, needs_whole
from ds_hydra.host.user_model import DataTypes
from ds_hydra.pipe.loss import TokenLoss
from ds_hydra.pipe.models.adapted import base_of, has_adapters
from ds_hydra.pipe.models.causal_lm import CausalLM, ModelFacts
from ds_hydra.pipe.models.experts import spreading_experts
from ds_hydra.pipe.models.layer_list import LayerList
from ds_hydra.pipe.models.meta_copy import drawn_parameter, set_buffers, unset_buffers
from ds_hydra.pipe.models.refusals import failing, refuse_shared_memory
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.ranks.channel import Channel, together
from ds_hydra.ranks.world import World
from ds_hydra.self_check.cache import fingerprint
from ds_hydra.self_check.verdicts import CheckResult
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.zero_hetero.errors import ConfigError, PlanError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """Everything that an assembly of the engine starts from, whichever ranks it is for."""

    config: HydraConfig
    source: ModelSource
    model: Any  # as the user made it, for what can be told from its structure: its values move to the masters
    recipe: OptimizerRecipe
    data: SequenceData | None  # map-style; None: they are streamed, or handed in
    sampler: Order | None  # of the training data, if there are any; loading a checkpoint moves its place
    types: DataTypes
    clipping: float  # largest norm of a step's gradient; 0 does not clip
    pre_step: Callback | None = None  # the user's own; None: the job plans by itself
    checked: CheckResult | None = None  # what an assembly for other ranks has found of its strategies

    @property
    def states_on_host(self) -> bool:
        """Whether FP32 masters and optimizer states are in the host's memory [Note: updates by runs]."""
        return OPTIMIZER in self.config.offload and not self.states_stay

    @property
    def states_stay(self) -> str:
        """Why they are on the devices though the config asks for the host; "": they need not be."""
        if OPTIMIZER not in self.config.offload:
            return ""
        if self.config.elastic is not None:
            return "hydra.elastic keeps copies of them that other ranks may ask for at any time"
        return f"{self.recipe.name} needs whole parameters at once" if needs_whole(self.recipe.name) else ""


_USUAL = 8  # ranks that share a stage, at most, and in powers of two


def model_source(
    model: Any,
    options: StageOptions,
    *,
    loss_fn: TokenLoss | None = None,
    facts: ModelFacts | None = None,
    shapes: Iterable[StrategyShape] = (),
    computed_in: torch.dtype = torch.float32,
) -> ModelSource:
    """The source of stages for the kind of model that was given, trained on `loss_fn` in place of the cross entropy.

    `facts` are what another rank has found of the same model; `shapes` are the strategies that were listed, and
    `computed_in` is the type that it is computed in. ConfigError if its layers cannot be found, or where the model's
    own code ends with an error.
    """
    model = base_of(model)
    try:
        return _source_of(model, options, loss_fn, facts, shapes, computed_in)
    except (ConfigError, PlanError):
        raise
    except Exception as error:
        raise ConfigError(
            f"{type(model).__name__} cannot be taken apart into stages: trying it out ends with {failing(error)}"
        ) from error


def _source_of(
    model: Any, options: StageOptions, loss_fn: TokenLoss | None, facts: ModelFacts | None,
    shapes: Iterable[StrategyShape], computed_in: torch.dtype,
) -> ModelSource:  # fmt: skip
    from transformers import PreTrainedModel

    if isinstance(model, nn.Module):
        refuse_shared_memory(model)
    if isinstance(model, PipelineModule):
        if loss_fn is not None:
            raise ConfigError("a PipelineModule has a loss_fn of its own: give it there, and not to initialize()")
        if options.activation_checkpointing:
            raise ConfigError(
                "hydra.activation_checkpointing works with Hugging Face models only; wrap the layers' own"
            )
        return LayerList(model, options)
    if isinstance(model, PreTrainedModel):
        source = CausalLM(model, options, token_loss=loss_fn, facts=facts, computed_in=computed_in)
        stages = (stage for shape in shapes for pipeline in shape.pipelines for stage in pipeline.stages)
        return spreading_experts(source) if any(stage.ep > 1 for stage in stages) else source
    kind = type(model).__name__
    what = "a module without a config of transformers" if isinstance(model, nn.Module) else "not a module"
    raise ConfigError(
        f"the model is a {kind}, {what}: give a Hugging Face causal language model or a DeepSpeed PipelineModule, or "
        "derive a class of your own from transformers' PreTrainedModel, with a config and get_input_embeddings()"
    )


def spread_where_cheaper(job: Job) -> Job:
    """The job, whose experts are spread as whole ones if the planner proposes strategies and the cost table was
    measured with both kinds and says that this takes no longer [Note: whole experts].

    Not where strategies come from elsewhere too: from recorded plans, the user's own callback, or for other ranks. And
    only of numbers of experts that eight divides, as the usual degrees then do. ConfigError for a table that cannot be
    read.
    """
    config, source = job.config, job.source
    fixed = config.shapes or config.replay or config.elastic or job.pre_step
    table_of_all = None if isinstance(config.cost_table, Mapping) else config.cost_table
    if fixed or any(nodes.device for nodes in config.cluster) or table_of_all is None:
        return job
    if not isinstance(source, CausalLM) or source.experts is not None:
        return job
    other = spreading_experts(source)
    if other.experts is None or other.experts.obstacle or any(count % _USUAL for count in other.experts.counts):
        return job
    table = read_table_file(table_of_all).table
    of_classes = any(isinstance(cost.scheme, PipelineShape) for cost in table.costs)
    return job if of_classes or not whole_are_cheaper(table) else replace(job, source=other)


def look_once(
    make: Callable[[ModelFacts | None], ModelSource], model: Any, options: StageOptions, channel: Channel
) -> Callable[[], ModelSource]:
    """How a rank gets its source: rank 0 looks at the model, and others that have the same take what it found.

    Every rank of the channel must call it. `make` makes the source, with what is known. It is the same model if all is
    equal that the facts depend on; where that cannot be told, as of code with hooks, each rank looks. Errors of `make`
    are raised by what is returned, as ranks wait for rank 0 here.
    """
    if channel.num_ranks == 1:
        return partial(make, None)
    name = _name(model, options)
    if channel.rank != 0:
        of, _, text = channel.tell(None).partition("\n")
        return partial(make, ModelFacts.from_text(text) if text and of == name else None)
    try:
        source = make(None)
    except Exception:
        channel.tell("")
        return partial(make, None)  # which fails again
    channel.tell(f"{name}\n{source.facts.to_text()}" if name and isinstance(source, CausalLM) else "")
    return lambda: source


def _name(model: Any, options: StageOptions) -> str | None:
    """A text that changes with anything that facts depend on; None if that cannot be told."""
    try:
        return fingerprint(model, "facts", *astuple(options))
    except Exception as error:  # of a model that is refused later, with a reason
        logger.debug("no facts are shared: %s", error)
        return None


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
