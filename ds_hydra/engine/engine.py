"""The engine: what users of a DeepSpeed engine call, each handed to the part that does it.

Start reading at `train_batch`. A step is planned (`plan_source`), run, applied and recorded (`steps`), and saved when
that is due (`saving`); `crew` assembles these parts for one set of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_hydra.config.hydra_block import HydraConfig, ParsedConfig
from ds_hydra.engine.calls import Call
from ds_hydra.engine.crew import Crew
from ds_hydra.engine.evaluation import Evaluation
from ds_hydra.engine.fingerprint import device_name
from ds_hydra.engine.guard import Guard
from ds_hydra.engine.initial import give_buffers
from ds_hydra.engine.job import Job
from ds_hydra.engine.models import look_once, model_source, spread_where_cheaper
from ds_hydra.engine.own_loss import same_on_all, try_loss
from ds_hydra.engine.part_by_part import EngineInParts
from ds_hydra.engine.pre_step import Callback, PreStepCallback
from ds_hydra.engine.saving import Saving
from ds_hydra.engine.scanning import read_twice, scan_together
from ds_hydra.engine.sequence_loss import SequenceLoss
from ds_hydra.engine.signals import Signals
from ds_hydra.engine.steps import Handed, Steps
from ds_hydra.host.cut_model import make_whole
from ds_hydra.host.environment import launched_node_size, longest_wait_s
from ds_hydra.host.model_limits import limits_of
from ds_hydra.pipe.loss import TokenFunction, TokenLoss
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.facts import ModelFacts
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.ranks.channel import Channel
from ds_hydra.ranks.groups import CONNECTING
from ds_hydra.ranks.nodes import GivenNode, Standing, cluster_of
from ds_hydra.ranks.together import Texts, first_channel, together
from ds_hydra.ranks.world import World
from ds_hydra.step.outcome import Outcome
from ds_hydra.watchdog.host import host
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)


class HydraEngine(EngineInParts):
    """Trains a model by heterogeneous strategies that change from step to step.

    Made by `ds_hydra.initialize`. The model's own parameters move to the meta device: from then on the master
    shards are the parameters, and `fp32_state_dict` gathers them.
    """

    def __init__(
        self,
        parsed: ParsedConfig,
        model: Any,
        *,
        loss_fn: TokenLoss | None = None,
        pre_step_callback: Callback | None = None,
        starting: Guard | None = None,
        **arguments: Any,
    ) -> None:
        """`starting`: the guard of these ranks from before torch's groups were made, which ends here."""
        with first_channel() as channel:
            guard = self._guard(channel, parsed.hydra)
            if starting is not None:
                starting.watchdog.close(goes_on=True)
            with guard.assembling():
                make_whole(model, channel)
                self._read(channel, parsed, self.given_back(model), loss_fn, arguments)
                job = replace(self.job, pre_step=pre_step_callback)
                self.job = job if parsed.hydra.shapes else spread_where_cheaper(job)
        with guard.assembling():
            self._signals = Signals(self.global_rank)
            joined = False
            if self.hydra_config.elastic is None:
                self.assemble(guard=guard)
            else:
                from ds_hydra.engine.going_on import first_assembly

                joined = first_assembly(self, self.hydra_config.elastic, guard)
            # The masters have taken the values. Else each rank would hold the whole model beside its share of it.
            self.job.source.values = {}
            self.release_model()
            self.watch_model()
            if self.job.config.checkpoint is not None:
                self._signals.install()
            if not joined:
                self.saving.resume()

    def _guard(self, channel: Texts, config: HydraConfig) -> Guard:
        return Guard(channel, config, self._coming_step, starts="job" not in vars(self))

    def _coming_step(self) -> int:
        """As the watchdog asks for it, also before there are steps."""
        return int(vars(self).get("global_steps", 0)) + 1

    def _read(
        self, channel: Channel, parsed: ParsedConfig, model: Any, loss_fn: TokenLoss | None, arguments: dict[str, Any]
    ) -> None:
        """Take what `initialize` was given; what fails on one rank fails on all."""
        scanned = scan_together(
            arguments.get("training_data"), channel, lambda: limits_of(parsed.hydra, base_of(model))
        )
        with together(channel, "reading the model and the data"):
            base = base_of(model)  # adapters lie within it; what PEFT has around it is not run
            super().__init__(parsed, base, **arguments, scanned=scanned)
            self.__dict__["_loss_fn"] = loss_fn  # by way of __dict__: it may be a module, but is no part of this one
            self.module, config = model, self.hydra_config
            give_buffers(base, config.initial_weights)
        make_source = look_once(partial(self.source_of, base), base, config.stage_options, channel)
        with together(channel, "reading the model and the data"):
            # The job is what stays the same when the ranks change; `assemble` adds what belongs to the present ranks.
            source, clipping = make_source(), self.gradient_clipping()
            if isinstance(source, CausalLM):
                self.use_inputs(self._inputs._replace(
                    first_position=source.first_position, uncounted=source.uncounted,
                    counts_padding=source.counts_padding,
                ))  # fmt: skip
            tried = try_loss(loss_fn, base, self.device, self.types.compute)
            self.job = Job(config, source, base, self.recipe, self.data, self.sampler, self.types, clipping)
        same_on_all(channel, tried)
        if self.data is not None:
            read_twice(self.data, channel)

    def assemble(self, job: Job | None = None, *, guard: Guard | None = None) -> None:
        """Make the parts that belong to the ranks of torch's default process group; each of these ranks must call it.

        To assemble again, close the present crew and its world first, and give the `job` to continue. The new masters
        hold no values until a checkpoint is loaded.
        """
        self.job = job or self.job
        with torch._C.DisableTorchFunctionSubclass():  # to it a released parameter is one of the meta device
            with nullcontext() if guard is None else guard.activity(f"{CONNECTING} groups of all ranks"):
                world = self.world_of_process()
            guard = guard or self._guard(world.background, self.job.config)
            shift = 1 if self.going_on is None else self.going_on.shift
            self.crew = Crew(self.job, world, self, self._signals, guard, initial=job is None, shift=shift)
        self.job = self.crew.job
        self.saving = Saving(self, self.crew, self._signals)
        self.steps = Steps(self, self.crew)
        world.wait_at_most(self.job.config.timeout_seconds)
        if job is not None:
            self.watch_model()

    def source_of(self, model: Any, facts: ModelFacts | None = None) -> ModelSource:
        """The model as a source of stages, with what is known of it. ConfigError if its layers cannot be found, or for
        a loss of its routers that hydra.loss_norm does not define."""
        config = self.hydra_config
        source = model_source(
            model, config.stage_options, loss_fn=self._loss_fn, facts=facts, shapes=config.shapes,
            computed_in=self.types.compute,
        )  # fmt: skip
        if source.balances and config.loss_norm == "micro_batch":
            raise ConfigError(
                'hydra.loss_norm "micro_batch" gives a sequence in slices no share of the loss, by which its routers '
                'could count: use "token" or "sequence", or set output_router_logits to false'
            )
        return source

    def world_of_process(self) -> World:
        """The world of torch's default process group; each of its ranks must call it. ConfigError where ranks stand on
        hosts so that nodes cannot be told, or otherwise than the config says."""
        config, name = self.job.config, "" if self.device.type == "cpu" else device_name(self.device)
        given = [GivenNode(of.ranks, of.device) for of in config.cluster for _ in range(of.nodes)]
        with first_channel() as channel:
            told = channel.texts(Standing(host(), launched_node_size(), name).to_text())
            cluster = cluster_of([Standing.of_text(text) for text in told], node_size=config.node_size, given=given)
        if self.global_rank == 0:
            logger.info("%s", cluster)
        wait = longest_wait_s(config, begun="crew" in vars(self))
        aborting = None if self.going_on is None else self.going_on.freeing.aborting
        return World.of_process(self.device, cluster, timeout_s=wait, aborts=aborting)

    @property
    def pre_step_callback(self) -> PreStepCallback | Callback | None:
        """What rank 0 calls before each step for its plan [Note: the pre-step callback]; None on other ranks."""
        return self.crew.plans.pre_step_callback

    def train_batch(self, data_iter: Any = None, *, sequence_loss: SequenceLoss | None = None) -> Tensor:
        """Run one step and return its loss, a scalar in FP32. Every rank must call it.

        The sequences come from `training_data`, or are what the ranks hand in: `data_iter` is then this rank's share of
        the step, a list of sequences or a collated batch [Note: what can be handed in], or an iterator or loader whose
        next item is one. A rank that has none passes an empty list. What cannot be trained on raises ConfigError on
        all ranks and names the rank and the item; StopIteration is raised when the iterators of all ranks have ended.

        `sequence_loss` maps the summed losses (n,) of the sequences that this rank hands in to the losses (groups,) of
        pairs or groups of them, whose mean over all ranks is then trained on [Note: losses of whole sequences].
        """
        if sequence_loss is not None and data_iter is None:
            raise ConfigError("a sequence_loss is of sequences that are handed in: pass them to train_batch() too")
        self.steps.begin_training("train_batch()")
        step = partial(self.steps.handed.next, self.global_steps, data_iter, sequence_loss)
        handed = None if data_iter is None else step
        return torch.tensor(self._train("train_batch()", handed).loss, dtype=torch.float32, device="cpu")

    def _train(self, name: str, handed: Handed | None) -> Outcome:
        with self.crew.calling(name):
            return self._trained(handed)

    def _trained(self, handed: Handed | None) -> Outcome:
        self.lent.take_back()
        if self.going_on is not None:
            return self.going_on.train()
        outcome = self.steps.train(handed)
        self.saving.when_due(outcome.request)
        return outcome

    def train_collected(self, batches: Sequence[tuple[Any, float]]) -> list[float]:
        """See `ThreeCallEngine`."""
        whole = self.batches_of_update() * self.world_size
        step = partial(self.steps.handed.collected, self.global_steps, batches, whole)
        return self._train("step()", step).batch_losses

    def evaluate_collected(self, batch: Any) -> tuple[float, float]:
        """See `ThreeCallEngine`."""
        with self.crew.calling("engine(batch) after eval()"):
            return self.steps.evaluate_handed(batch)

    def eval_batch(self, data_iter: Any = None) -> Tensor:
        """Mean loss of a batch of sequences, without an update: a scalar in FP32, equal on all ranks.

        `data_iter` is a dataset or list of sequences like `training_data`, or an iterator whose next item is one.
        Every rank must call it with the same sequences.
        """
        batch = next(data_iter) if hasattr(data_iter, "__next__") else data_iter
        if batch is None:
            raise ConfigError("eval_batch() needs sequences: a dataset, a list of token lists, or an iterator of them")
        part = Call(lambda: self.steps.evaluate_batch(batch))
        return torch.tensor(self.on_all("eval_batch()", part, meets=True), dtype=torch.float32, device="cpu")

    def evaluate(self, dataset: Any) -> Evaluation:
        """Loss, perplexity and the loss of each sequence of a map-style dataset, without an update.

        About hydra.tokens_per_step tokens run at a time. Every rank must call it with the same dataset.
        """
        part = Call(lambda: self.steps.evaluate(dataset), Evaluation.to_json, Evaluation.from_json)
        return self.on_all("evaluate()", part, meets=True)

    def predict(self, batch: Any, function: TokenFunction) -> tuple[Tensor, Tensor]:
        """Mean loss of the batches of all ranks, (), and what `function` gives for each token of this rank's, (tokens,
        k) in FP64, sequence after sequence; without an update.

        `function` maps logits (1, T, V) and labels (1, T) of any T tokens to (1, T) or (1, T, k), each token alone,
        such as an argmax: it runs where the logits are. ConfigError for one that looks at several tokens, and for a
        PipelineModule. Every rank must call it, with an empty list where it has no batch.
        """
        if not isinstance(self.job.source, CausalLM):
            raise ConfigError("predict() needs a Hugging Face model: the layers of a PipelineModule end in its loss")
        part = Call(lambda: self.steps.predict_handed(batch, function), once="predict")
        loss, found = self.on_all("predict()", part)
        return torch.tensor(loss, dtype=torch.float32, device="cpu"), torch.from_numpy(found)

    def destroy(self) -> None:
        """Finish a save that is under way, print the summary, release all that this engine and DeepSpeed's hold."""
        # By way of __dict__: if the constructor failed there is no crew, and nn.Module's lookup would raise instead.
        crew = self.__dict__.get("crew")
        if crew is not None:
            self._signals.remove()
            crew.close()
            if self.going_on is not None:
                self.going_on.close()
        super().destroy()
