"""The engine: what users of a DeepSpeed engine call, each handed to the part that does it.

Start reading at `train_batch`. A step is planned (`plans`), run, applied and recorded (`steps`), and saved when that is
due (`saving`); `crew` assembles these parts for one set of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from ds_hydra.checkpoint.loading import PartsToLoad
from ds_hydra.config.hydra_block import ParsedConfig
from ds_hydra.engine.away import kinds_of, wants_host
from ds_hydra.engine.calls import EngineCall, gathered, taken_once
from ds_hydra.engine.costs import device_name
from ds_hydra.engine.crew import Crew
from ds_hydra.engine.data import read_twice, scan_together
from ds_hydra.engine.guard import Guard
from ds_hydra.engine.job import Job, give_buffers, look_once, model_source, spread_where_cheaper
from ds_hydra.engine.losses import SequenceLoss
from ds_hydra.engine.own_loss import same_on_all, try_loss
from ds_hydra.engine.plans import Callback, PreStepCallback
from ds_hydra.engine.plugs import GoesOn, plugged
from ds_hydra.engine.rounds import Rounds, in_rows, places_of
from ds_hydra.engine.saving import EngineCheckpoints
from ds_hydra.engine.scoring import Evaluation, RoutedScores, TokenScores
from ds_hydra.engine.steps import Handed, TrainingSteps
from ds_hydra.engine.weights import Weights
from ds_hydra.host.ending import Signals
from ds_hydra.host.environment import launched_node_size, longest_wait_s
from ds_hydra.host.host_engine import HostEngine
from ds_hydra.host.released import give_back
from ds_hydra.host.three_calls import PendingLoss, ThreeCalls
from ds_hydra.host.user_model import limits_of, make_whole
from ds_hydra.pipe.loss import ScoreLoss, TokenFunction, TokenLoss
from ds_hydra.pipe.models.adapted import base_of, is_peft_model
from ds_hydra.pipe.models.causal_lm import CausalLM, ModelFacts
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.ranks.channel import Channel, first_channel, together
from ds_hydra.ranks.groups import CONNECTING, side_groups
from ds_hydra.ranks.nodes import GivenNode, Standing, cluster_of
from ds_hydra.ranks.world import World
from ds_hydra.step.outcome import WANTED, StepOutcome
from ds_hydra.watchdog.host import host
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class HydraEngine(HostEngine):
    """Trains a model by layouts that change from step to step, of replicas with different parallelism.

    `ds_hydra.initialize` makes it. From then on the parameters are FP32 shards, 1/N on each of N ranks, and those of
    the model itself lie on the meta device; `fp32_state_dict` gathers them. Every rank must make the same calls in the
    same order, and an error of one rank is raised on all.
    """

    job: Job
    crew: Crew = None  # type: ignore[assignment]  # as `steps` and `saving` there between `assemble` and `drop`
    steps: TrainingSteps = None  # type: ignore[assignment]
    saving: EngineCheckpoints = None  # type: ignore[assignment]
    weights: Weights = None  # type: ignore[assignment]  # after the first assembly
    three_calls: ThreeCalls
    rounds: Rounds
    going_on: GoesOn | None = None  # without lost ranks, where hydra.elastic asks for it

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
            guard = Guard(channel, parsed.hydra, self._coming_step)
            if starting is not None:
                starting.watchdog.close(goes_on=True)
            with guard.assembling():
                make_whole(model, channel)
                give_back(model)  # plain parameters, where another engine has trained it
                self._read(channel, parsed, model, loss_fn, arguments)
                job = replace(self.job, pre_step=pre_step_callback)
                self.job = job if parsed.hydra.shapes else spread_where_cheaper(job)
        with guard.assembling():
            self._signals = Signals(self.global_rank)
            joined = False
            if self.hydra_config.elastic is None:
                self.assemble(guard=guard)
            else:
                joined = plugged("going on", "hydra.elastic")(self, self.hydra_config.elastic, guard)
            # The masters have taken the values. Else each rank would hold the whole model beside its share of it.
            self.job.source.values = {}
            self.weights = Weights(self, self.job.source, self.three_calls, lambda: self.crew, self.gradients_wait)
            self.weights.watch_model()
            if self.job.config.checkpoint is not None:
                self._signals.install()
            if not joined:
                self.saving.resume()

    def _coming_step(self) -> int:
        return self.global_steps + 1

    def _asked(self) -> int:
        """What this rank tells the others with its figures of a step: what a signal has asked it for, and whether a
        process waits to join."""
        return self._signals.request + WANTED * (self.going_on is not None and self.going_on.wanted)

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
            self.module, config = model, self.hydra_config
            wide = torch.float64 if self.types.compute == torch.float64 else torch.float32
            self.three_calls = ThreeCalls(self.config, self.device, self.gradient_accumulation_steps, wide)
            self.rounds = Rounds(self, config.losses)
            give_buffers(base, config.initial_weights)
        make_source = look_once(partial(self.source_of, base, loss_fn=loss_fn), base, config.stage_options, channel)
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
        if config.images:
            proven = plugged("images", "hydra.images").proven(self.job.source, config, channel)
            self.job = replace(self.job, source=proven)
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
            guard = guard or Guard(world.background, self.job.config, self._coming_step, starts=False)
            shift = 1 if self.going_on is None else self.going_on.shift
            self.crew = Crew(self.job, world, self, self._asked, guard, initial=job is None, shift=shift)
        self.job = self.crew.job
        self.saving = EngineCheckpoints(self, self.crew, self._signals)
        self.steps = TrainingSteps(self, self.crew)
        world.wait_at_most(self.job.config.timeout_seconds)
        if self.weights is not None:
            self.weights.watch_model()

    def source_of(self, model: Any, facts: ModelFacts | None = None, loss_fn: TokenLoss | None = None) -> ModelSource:
        """The model as a source of stages, with what is known of it. ConfigError if its layers cannot be found, or for
        a loss of its routers that hydra.loss_norm does not define."""
        config = self.hydra_config
        make = plugged("images", "hydra.images").source_of if config.images else model_source
        source = make(
            model, config.stage_options, loss_fn=loss_fn, facts=facts, shapes=config.shapes,
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
        wait = longest_wait_s(config, begun=self.crew is not None)
        aborting = None if self.going_on is None else self.going_on.aborting
        return World.of_process(self.device, cluster, timeout_s=wait, aborts=aborting)

    @property
    def pre_step_callback(self) -> PreStepCallback | Callback | None:
        """What rank 0 calls before each step for its plan [Note: the pre-step callback]; None on other ranks."""
        return self.crew.plans.pre_step_callback

    def _train(self, name: str, handed: Handed | None) -> StepOutcome:
        """Run the next step within the call `name` of all ranks, and save it if that is due."""
        with self.crew.calling(name):
            self.weights.lent.take_back()
            if self.going_on is not None:
                return self.going_on.train()
            outcome = self.steps.train(handed)
            self.rounds.step_made()
            self.saving.when_due(outcome.request)
            return outcome

    def on_all(self, name: str, call: EngineCall[Result], *, meets: bool = False) -> Result:
        """What a call of all ranks returns; where some are lost in it, for those that are left [Note: calls].

        `meets`: first with a message of its own that compares the calls of all ranks [Note: one call on all ranks].
        """

        def met() -> Result:
            self.meet()
            return call.part()

        made = replace(call, part=met) if meets else call

        def make() -> Result:
            with self.crew.calling(name):
                return made.part() if self.going_on is None else self.going_on.call(made)

        return self.rounds.calling(make)

    def _evaluating(self, name: str, call: EngineCall[Result], *, meets: bool = False) -> Result:
        """`on_all`, of one that runs the model forward as the script has it now."""
        return self.on_all(f"{name}{self.steps.scoring.mode}", call, meets=meets)

    def meet(self) -> None:
        """Return when all ranks have come to it."""
        self.crew.world.channel.texts("")

    # A step in one call.

    def train_batch(self, data_iter: Any = None, *, sequence_loss: SequenceLoss | None = None) -> Tensor:
        """Run one step and return its loss, a scalar in FP32 that is equal on all ranks. Every rank must call it.

        The sequences come from `training_data`, or from the script: `data_iter` is then this rank's share of the step,
        a list of sequences or a collated batch [Note: what can be handed in], or an iterator or loader whose next item
        is one. A rank without any passes an empty list.

        `sequence_loss` maps the summed losses (n,) of this rank's sequences to the losses (groups,) of pairs or groups
        of them. Their mean over all ranks is then trained on [Note: losses of whole sequences].

        Raises ConfigError on all ranks for what cannot be trained on, with the rank and the item, and StopIteration
        when the iterators of all ranks have ended.
        """
        if sequence_loss is not None and data_iter is None:
            raise ConfigError("a sequence_loss is of sequences that are handed in: pass them to train_batch() too")
        self.rounds.begin()
        self.steps.begin_training("train_batch()")
        step = partial(self.steps.handed.next, self.global_steps, data_iter, sequence_loss)
        handed = None if data_iter is None else step
        return torch.tensor(self._train("train_batch()", handed).loss, dtype=torch.float32, device="cpu")

    # A step in parts [Note: a step in parts].

    def forward_backward(
        self,
        sequences: Any,
        loss: ScoreLoss | None = None,
        *,
        normaliser: float | None = None,
        temperature: float | None = None,
        mixes_tokens: bool | None = None,
    ) -> Tensor:
        """Add the gradient of a loss of some sequences to those that wait for `optimizer_step`; returns the loss, a
        scalar in FP32 that is equal on all ranks. Every rank must call it.

        `sequences` are this rank's, a list or a collated batch as for `train_batch`, or an empty list; it may be called
        any number of times before an update. `loss` is called as loss(log_probs, entropy, fields) and returns one loss
        for each token [Note: losses of log-probabilities]: `log_probs` (T,) are those of the tokens that are learnt,
        `entropy` (T,) that of the distribution which each is drawn from, and `fields` the items' other columns by name,
        (T,) or (T, k) [Note: fields]. Without one it is the job's own, such as the cross entropy. Of a model whose head
        gives one number for each token it is called as loss(values, fields), and there must be one.

        Their sum over all ranks is divided by `normaliser`, a number that is equal on all of them. Without one it is
        divided by the number of targets of this call on all ranks, or by what the loss names (`ds_hydra.losses`). If a
        step has several calls, give each of them the count of all the step's tokens. `temperature` divides the logits;
        a column of that name does so for each sequence or token.

        A loss that needs other tokens too, of the sequence or of its group, says so by `mixes_tokens`, or by an
        attribute of that name. It is called once on each rank, with all targets of this rank's sequences, which
        `fields["sequence"]` numbers, and may return any number of losses (n,). Their number on all ranks is the
        normaliser, unless one is given. It costs one more forward.

        A column `routed_experts`, (tokens, routers, chosen), has the experts that the routers use in place of their own
        choices, as `log_probs` gives them [Note: replayed routers]. No loss sees it.

        From the first step of several calls on, each rank keeps its 1/N of the gradients in memory of their own, one
        number a parameter. Predictions of memory do not count them.

        Raises ConfigError on all ranks, with rank and item, for sequences that cannot be trained on, and for a field
        that is not finite, of a wrong length, or missing on some. Also for a loss that looks at other tokens and does
        not say so, reads the model, or draws random numbers. Then nothing has changed.
        """
        self.rounds.begin()
        self.steps.begin_training("forward_backward()")
        with self.crew.calling("forward_backward()"):
            found = self.steps.parts.forward_backward(sequences, loss, normaliser, temperature, mixes_tokens)
        return torch.tensor(found, dtype=torch.float32, device="cpu")

    def optimizer_step(self) -> float:
        """Update the parameters by the gradients of all `forward_backward` calls since the last update; returns their
        norm before clipping. If that is not finite, nothing changes and the step counts as skipped. Every rank must
        call it.

        It counts as a step and is recorded as one; the LR schedule moves by `lr_scheduler.step()` alone. ConfigError if
        there are no gradients.
        """
        self.weights.lent.take_back()
        self.rounds.begin()
        with self.crew.calling("optimizer_step()"):
            outcome = self.steps.parts.optimizer_step()
            self.rounds.step_made()
        self.saving.when_due(outcome.request)
        return outcome.grad_norm

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Drop the gradients of `forward_backward` calls since the last update. Other steps begin with gradients of
        their own. ConfigError between `backward` and the boundary's `step`, where DeepSpeed would drop some."""
        self.three_calls.refuse_dropping("engine.zero_grad()")
        self.three_calls.shows_gradients = False
        if not self.rounds.hold:  # gradients of a batch whose backward is still to come
            self.steps.parts.forget()

    def gradients_wait(self) -> bool:
        """Whether gradients of some `backward` or `forward_backward` wait for their update."""
        return self.three_calls.wait or self.steps.parts.count > 0

    # DeepSpeed's loop of three calls [Note: three calls].

    def forward(self, *inputs: Any, **kwargs: Any) -> PendingLoss:
        """Collect a batch for the coming step and return its loss, a scalar whose value is there after that step, or
        when it is read [Note: losses read early]. `engine(batch)` is the same call.

        The batch is one argument, a mapping or anything else that `train_batch` takes, or the keyword arguments of a
        Hugging Face model. After `eval()` the batches of all ranks run at once: the loss is the mean over the targets
        of this rank's batch, in FP32. Then every rank must call it, with an empty list where it has no batch.
        """
        batch = self.three_calls.batch(inputs, kwargs)
        if self.three_calls.evaluating:
            return self.three_calls.known(self.evaluate_collected(batch)[0], lambda: self._logits(batch))
        entry = self.three_calls.collect(batch, self.backward, kwargs.get("num_items_in_batch"))
        self.rounds.hand_in(entry)
        return self.three_calls.loss_of(entry)

    def _logits(self, batch: Any) -> Tensor:
        """Of an evaluated batch where its tokens stand, (rows, length, words)."""
        found = self.predict(batch)[1]
        return in_rows(places_of(batch, len(found)), found)

    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True, **unused: Any) -> Tensor:
        """Let a loss of `engine(batch)` count in the coming step, with the factors that the script put on it.

        Returns what DeepSpeed's engine returns: the loss over gradient_accumulation_steps, unless `scale_wrt_gas` is
        False. `retain_graph` has no effect.
        """
        return self.three_calls.backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)

    def step(self, lr_kwargs: Any = None) -> None:
        """At the gradient accumulation boundary plan and run all collected batches, and update; elsewhere only count.
        `lr_kwargs` go to the LR schedule's step. Every rank must call it."""
        self.micro_steps, self._step_applied = self.micro_steps + 1, False
        if (batches := self.three_calls.taken()) is None:
            return
        self._lr_kwargs, micro_steps = dict(lr_kwargs or {}), self.micro_steps
        given = [(entry.batch, entry.factor or 0.0) for entry in batches]
        whole = self.three_calls.batches_of_update() * self.world_size
        step = partial(self.steps.handed.collected, self.global_steps, given, whole)
        losses = self.rounds.make_step(partial(self._train, "step()", step), batches).batch_losses
        self._lr_kwargs, self.micro_steps = {}, micro_steps
        for entry, loss in zip(batches, losses, strict=True):
            entry.settle(loss)

    def train(self, mode: bool = True) -> HydraEngine:
        """From now on `engine(batch)` collects; with mode False it evaluates at once."""
        self.three_calls.evaluating = not mode
        super().train(mode)
        return self

    def eval(self) -> HydraEngine:
        """From now on `engine(batch)` evaluates at once."""
        return self.train(False)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the coming `step` makes an update."""
        return self.three_calls.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on `step` makes an update if this is true, and none if it is false."""
        self.three_calls.boundary = is_boundary

    # Without an update.

    def evaluate_collected(self, batch: Any) -> tuple[float, float]:
        """Mean losses of what the ranks hand in: over the targets of this rank's batch, and over those of all ranks."""

        def evaluate() -> tuple[float, float]:
            with self.crew.calling(f"engine(batch) after eval(){self.steps.scoring.mode}"):
                return self.steps.scoring.handed(batch)

        return self.rounds.calling(evaluate)

    def eval_batch(self, data_iter: Any = None) -> Tensor:
        """Mean loss of a batch of sequences, without an update: a scalar in FP32, equal on all ranks.

        `data_iter` is a dataset or list of sequences like `training_data`, or an iterator whose next item is one.
        Every rank must call it with the same sequences.
        """
        batch = next(data_iter) if hasattr(data_iter, "__next__") else data_iter
        if batch is None:
            raise ConfigError("eval_batch() needs sequences: a dataset, a list of token lists, or an iterator of them")
        part = EngineCall(lambda: self.steps.scoring.batch(batch))
        return torch.tensor(self._evaluating("eval_batch()", part, meets=True), dtype=torch.float32, device="cpu")

    def evaluate(self, dataset: Any) -> Evaluation:
        """Loss, perplexity and the loss of each sequence of a map-style dataset, without an update.

        About hydra.tokens_per_step tokens run at a time. Every rank must call it with the same dataset.
        """
        part = EngineCall(lambda: self.steps.scoring.evaluate(dataset), Evaluation.to_json, Evaluation.from_json)
        return self._evaluating("evaluate()", part, meets=True)

    def predict(self, batch: Any, function: TokenFunction | None = None) -> tuple[Tensor, Tensor]:
        """Evaluate a batch, and compute something of each token's logits, such as an argmax; without an update.

        Returns the mean loss of the batches of all ranks, (), and what `function` gives for the tokens of this rank's
        batch, (tokens, k) in FP64, sequence after sequence. `function` maps logits (1, T, V) and labels (1, T) of any T
        tokens to (1, T) or (1, T, k), each token by itself; it runs on the rank that has the logits. Without a function
        these are the logits.

        ConfigError for a function that looks at several tokens, and for a PipelineModule. Every rank must call it, with
        an empty list where it has no batch.
        """
        if not isinstance(self.job.source, CausalLM):
            raise ConfigError("predict() needs a Hugging Face model: the layers of a PipelineModule end in its loss")
        part = EngineCall(lambda: self.steps.scoring.predict(batch, function), once="predict")
        loss, found = self._evaluating("predict()", part)
        return torch.tensor(loss, dtype=torch.float32, device="cpu"), found

    @overload
    def log_probs(
        self,
        sequences: Any,
        *,
        entropy: bool = False,
        temperature: float | None = None,
        routed_experts: Literal[False] = False,
    ) -> TokenScores: ...

    @overload
    def log_probs(
        self, sequences: Any, *, entropy: bool = False, temperature: float | None = None, routed_experts: Literal[True]
    ) -> RoutedScores: ...

    def log_probs(
        self, sequences: Any, *, entropy: bool = False, temperature: float | None = None, routed_experts: bool = False
    ) -> TokenScores | RoutedScores:
        """The log-probability of each token of this rank's sequences, given those before it, as `TokenScores`; with
        `entropy` that of each token's distribution too. Nothing is dropped out. Every rank must call it.

        `sequences` and `temperature` as of `forward_backward`; other columns than those for tokens, labels and masks
        are not read, but for `routed_experts`. With that argument it returns `RoutedScores`, which has the experts that
        the routers of a mixture have chosen. ConfigError where a sequence would be truncated or left out, and for
        routers that choose by other means than `torch.topk` [Note: replayed routers].
        """

        def score() -> TokenScores | RoutedScores:
            return self.steps.scoring.log_probs(sequences, temperature, entropy=entropy, routed_experts=routed_experts)

        return self._evaluating("log_probs()", EngineCall(score, once="log_probs"))

    def values(self, sequences: Any) -> list[Tensor]:
        """The values of a critic, a model whose head has one output, before each token of this rank's sequences: one
        tensor (tokens,) each, in FP32, or in FP64 for a model in that. Nothing is dropped out. Every rank must call it.

        At place i stands what the head makes of the tokens before i; 0 at the first, and where `labels` or a mask say
        that nothing is to be learnt. `sequences` as of `log_probs`.
        """
        return self._evaluating("values()", EngineCall(lambda: self.steps.scoring.values(sequences), once="values"))

    # Weights and checkpoints.

    def fp32_state_dict(self) -> dict[str, Tensor]:
        """Full parameters on CPU by the model's own names, tied ones under each of theirs; FP64 for an FP64 model.

        Every rank must call it, and gets all of them.
        """
        part = EngineCall(lambda: self.saving.fp32_state_dict())
        if self.going_on is not None:
            part = gathered(part.part, self.meet)
        return self.on_all("fp32_state_dict()", part, meets=True)

    def full_parameters(
        self, *, dtype: torch.dtype | None = None, ranks: Sequence[int] | None = None, adapters: str = "merged"
    ) -> Iterator[tuple[str, Tensor]]:
        """The weights for an inference engine: (name, whole tensor on the device) one after the other, in the type that
        the model is computed in, or in `dtype`. A rank holds the whole tensors of some layers at a time, not of all.

        Names are those of the model's Hugging Face folder, as `save_16bit_model` writes it, with experts one by one;
        tied parameters come once. The order is the same on all ranks, and all must take all of them; `ranks` are those
        that get them (default: all), others get none. Of a PEFT model `adapters` are "merged" into their layers, under
        the names of the model without them, or come "alone", as a folder of adapters holds them. ConfigError for
        adapters that cannot be merged.
        """

        def every() -> Iterator[tuple[str, Tensor]]:
            def meet() -> None:
                with self.crew.calling("full_parameters()"):
                    self.meet()

            self.rounds.calling(meet)
            return self.saving.full_parameters(dtype, ranks, adapters)

        return every() if self.going_on is None else taken_once(every, "full_parameters", self.going_on.by_fault)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that training needs to go on, under `save_dir`/`tag` ("global_stepN" by default).

        `client_state` is any JSON. With hydra.checkpoint.asynchronous this returns when the state is copied to host
        memory; an error of that save is raised by the next. Raises CheckpointError on all ranks, and while
        gradients wait for an update, which no checkpoint holds. Every rank must call it.
        """
        how = {"save_latest": save_latest, "with_frozen": not exclude_frozen_parameters}
        self._on_weights("save_checkpoint", lambda: self.saving.save(save_dir, tag, client_state, **how), once=False)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load the checkpoint `tag`, or the one that the file `latest` names; return its path and its client_state.

        Any number of ranks can load what any other number saved. `load_module_only` loads the parameters and leaves
        optimizer, schedule, steps and data as they are. Returns (None, {}) if nothing was ever saved. Raises
        CheckpointError on all ranks if the checkpoint is damaged or ambiguous, or gradients wait for an update; then
        nothing has changed. Every rank must call it.
        """
        # Trainer asks for a load that is not strict where it has adapters.
        if custom_load_fn is not None or not (load_module_strict or is_peft_model(self.module)):
            raise CheckpointError(
                "load_checkpoint(custom_load_fn=..., load_module_strict=False) is not supported: a checkpoint holds "
                "exactly the model's parameters; load others with load_16bit_model()"
            )
        parts = PartsToLoad(load_optimizer_states, load_lr_scheduler_states, not load_module_only)
        return self._on_weights("load_checkpoint", lambda: self.saving.load(load_dir, tag, parts))

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str | None = None,
        exclude_frozen_parameters: bool = False,
        *,
        max_shard_size: str = "5GB",
        tokenizer: Any = None,
    ) -> bool:
        """Write the model, in the types that it is computed in, as a folder that `from_pretrained` loads.

        Rank 0 gathers and writes safetensors shards, config and tokenizer (the one given, or the one beside the model
        that was loaded). The folder's file names are Hugging Face's. Of a PEFT model the adapters are written, as
        `PeftModel.from_pretrained` loads them. Every rank must call it.
        """
        if save_filename is not None or exclude_frozen_parameters:
            raise CheckpointError(
                "save_16bit_model(save_filename=..., exclude_frozen_parameters=True) is not supported: it writes a "
                "whole Hugging Face folder under its usual names; leave these arguments out"
            )
        how = {"max_shard_size": max_shard_size, "tokenizer": tokenizer}
        self.on_all("save_16bit_model()", EngineCall(lambda: self.saving.save_pretrained(save_dir, **how)), meets=True)
        return True

    def load_16bit_model(self, load_dir: str | Path) -> None:
        """Load the parameters of a Hugging Face folder; steps, optimizer and data stay. Every rank must call it.

        A rank reads only the part of each parameter that it owns, so no rank holds the whole model. CheckpointError
        while gradients wait for an update.
        """
        self._on_weights("load_16bit_model", lambda: self.saving.load_pretrained(load_dir))

    def _on_weights(self, name: str, part: Callable[[], Result], *, once: bool = True) -> Result:
        """A call of all ranks on a whole model; CheckpointError while gradients wait for an update."""
        self.rounds.drop()
        self.steps.parts.refuse_if_any(f"{name}()", CheckpointError)
        return self.on_all(f"{name}()", EngineCall(part, once=name if once else ""), meets=True)

    def wait_for_checkpoint(self) -> None:
        """Wait until no save is under way. Raises the error of the last save in the background, if it had one."""
        self.saving.wait()

    def to(self, device: Any, model: bool = True, optimizer: bool = True, grad: bool = True) -> Any:  # type: ignore[override]  # moves no module
        """Move states to the host ("cpu") or back to the engine's device; returns the engine. Ranks need not agree.

        `model`: the parameters, and all memory that steps use; `optimizer`: its states; `grad`: gradients that wait for
        an update. The host keeps this rank's 1/N in pinned memory, and training goes on as if nothing had been moved,
        to the bit. A call that needs what is on the host brings it back by itself: bring it back before, where others
        use the memory of the device. On CPUs "cpu" does the same, by copies. ConfigError for another device or a type.
        """
        kinds = kinds_of(model=model, optimizer=optimizer, grad=grad)
        if not wants_host(device, self.device):
            self.crew.away.bring_back(kinds)
            return self
        self.weights.lent.take_back()
        if not self.crew.away.kinds and self.crew.masters.trained.dropped_grads:  # by the optimizer's own zero_grad
            self.zero_grad()
        self.crew.put_away(kinds)
        return self

    def side_groups(self) -> AbstractContextManager[None]:
        """Within it a script makes process groups of some ranks, or with an inference engine's processes, that carry
        weights: where the default group is bound to its device, torch would wait for all ranks."""
        return side_groups()

    def offload_states(self, include: Any = None, device: Any = "cpu", **_: Any) -> None:
        """DeepSpeed's name of `to("cpu")`; `include` are members of its OffloadStateTypeEnum (default: all)."""
        names = ["hp_params", "lp_params", "optim_states", "lp_grads", "contiguous_grad_buffer"]
        kinds = zip(names, ("model", "model", "optimizer", "grad", "grad"), strict=True)
        asked = {getattr(one, "value", one) for one in (names if include is None else include)}
        wanted = {kind for name, kind in kinds if name in asked}
        self.to(getattr(device, "value", device), **{kind: kind in wanted for kind in ("model", "optimizer", "grad")})

    def reload_states(self, **_: Any) -> None:
        """DeepSpeed's name of what brings all states back to the device."""
        self.crew.away.bring_back()

    # The engine's life.

    def drop(self) -> None:
        """Let go of the present ranks' parts and groups, in whatever state an error has left them; after torch's own
        group has been destroyed `assemble` may follow.

        The caller must have left the `except` block of that error, and released it (`zero_hetero.told.release`).
        """
        (steps, crew), self.saving = (self.steps, self.crew), None  # type: ignore[assignment]
        self.steps = self.crew = None  # type: ignore[assignment]
        if steps is not None:
            steps.drop()
        if crew is not None:
            crew.drop()

    def destroy(self) -> None:
        """Finish a save that is under way, print the summary, release all that this engine and DeepSpeed's hold."""
        if self.crew is not None:  # unless the constructor failed
            self._signals.remove()
            self.crew.close()
            if self.going_on is not None:
                self.going_on.close()
        super().destroy()
