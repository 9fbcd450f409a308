"""Sequences that ranks hand in, in; log-probabilities, entropies or values of their tokens, on those ranks, out."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ds_hydra.data.tokens import Float64Array, LeftOut, Reads
from ds_hydra.engine.crew import Crew
from ds_hydra.engine.shares import Gathered, Mine, Shares
from ds_hydra.pipe.loss import ENTROPY, LOG_PROB, VALUE, Objective
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.experts import find_routing
from ds_hydra.pipe.rows import ROUTED_EXPERTS, TEMPERATURE, FieldLayout, Routing
from ds_hydra.step.collecting import collect, pieces_of
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.pipe.stage import ModelSource
    from ds_hydra.plan.step_plan import StepPlan
    from ds_hydra.step.delivery import Delivered


class TokenScores(NamedTuple):
    """Of the sequences that this rank has handed in, in that order: one tensor (tokens,) each, on the engine's device,
    in FP32 or, for a model in FP64, in that.

    What stands at place i is about token i, given the tokens before it; it is 0 at the first, and where `labels` or a
    mask say that nothing is to be learnt.
    """

    log_probs: list[Tensor]  # log p(label), which is the token itself unless `labels` say otherwise
    entropy: list[Tensor] | None  # of p


class RoutedScores(NamedTuple):
    """The same, with what the routers have chosen for the token at place i itself: (tokens, routers, chosen) int64."""

    log_probs: list[Tensor]
    entropy: list[Tensor] | None
    routed_experts: list[Tensor]


class Scoring:
    """Of one crew. Every rank must call the same methods."""

    def __init__(self, crew: Crew, shares: Shares, device: torch.device):
        self._crew, self._shares, self._device = crew, shares, device

    @property
    def valued(self) -> bool:
        """Whether the job's model gives values in place of logits."""
        return self._crew.job.source.valued

    @cached_property
    def _routing(self) -> Routing:
        """The routers that can be given their choices. ConfigError where there are none."""
        source = self._crew.job.source
        if not isinstance(source, CausalLM):
            raise ConfigError("choices of experts are given to the routers of a Hugging Face model")
        return find_routing(source)

    def routing_in(self, layout: FieldLayout) -> Routing | None:
        """The routers, if these fields have choices of experts for them."""
        return self._routing if layout.find(ROUTED_EXPERTS) else None

    def reads(self, temperature: Any, only: frozenset[str] | None = None) -> Reads:
        """Which columns are read as fields where a call gives a temperature, or None. ConfigError for no number."""
        try:
            given = {} if temperature is None else {TEMPERATURE: float(temperature)}
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(f"temperature must be a positive number, but is {temperature!r}") from None
        return Reads(given, only, lambda: self._routing)

    def log_probs(
        self, batch: Any, temperature: float | None, *, entropy: bool, routed_experts: bool
    ) -> TokenScores | RoutedScores:
        """See `EngineInParts.log_probs`."""
        self.check_model()
        if self.valued:
            raise ConfigError("the model gives a value for each token and no log-probabilities: call values()")
        routing = self._routing if routed_experts else None
        found, chosen = self._found("log_probs", batch, temperature, routing)
        scores = TokenScores(
            self._at_own_place(found, LOG_PROB), self._at_own_place(found, ENTROPY) if entropy else None
        )
        if routing is None:
            return scores
        shape = len(routing.paths), routing.chosen
        experts = [torch.from_numpy(one).long().to(self._device).unflatten(1, shape) for one in chosen]
        return RoutedScores(*scores, experts)

    def values(self, batch: Any) -> list[Tensor]:
        """See `EngineInParts.values`."""
        self.check_model()
        if not self.valued:
            raise ConfigError(
                "the model gives logits and no values: values() is for one whose head has one output, such as "
                "AutoModelForTokenClassification with num_labels=1; call log_probs()"
            )
        return self._at_own_place(self._found("values", batch, None)[0], VALUE)

    def _found(
        self, call: str, batch: Any, temperature: float | None, routing: Routing | None = None
    ) -> tuple[list[Float64Array], list[Float64Array]]:
        crew, shares = self._crew, self._shares
        with crew.activity("evaluation"):
            try:
                only = (ROUTED_EXPERTS,) if self.valued else (TEMPERATURE, ROUTED_EXPERTS)
                mine = shares.read([(batch, 1.0)], self.reads(temperature, frozenset(only))).checked(check_all)
            except ConfigError as error:
                mine = Mine(error=error)
            gathered = shares.gather(mine, call, call if routing is None else f"{call} with routed_experts")
            plan = crew.plans.plan_once(tuple(range(len(gathered.lengths))), gathered.lengths)
            delivered = shares.deliver(plan, mine.sequences, gathered, gathered.layout.num_columns)
        with crew.together("evaluation"):
            return self.of_sequences(plan, delivered, gathered, routing=routing)

    def _at_own_place(self, found: list[Float64Array], column: int) -> list[Tensor]:
        """What was found at a token is about the next."""
        dtype = torch.float64 if self._crew.job.types.compute == torch.float64 else torch.float32
        moved = (torch.from_numpy(one[:, column]).roll(1) for one in found)
        return [one.to(self._device, dtype) for one in moved]

    def of_sequences(
        self,
        plan: StepPlan,
        delivered: Delivered,
        gathered: Gathered,
        step: int | None = None,
        *,
        routing: Routing | None = None,
    ) -> tuple[list[Float64Array], list[Float64Array]]:
        """The scores of this rank's own sequences, (tokens, num_scores) each; with a `step` those of its training. With
        a `routing` also the experts that these routers have chosen, (tokens, routers * chosen) each."""
        crew, given = self._crew, self.routing_in(gathered.layout)
        objective = Objective(
            layout=gathered.layout, valued=self.valued, routing=routing or given, keeps_routes=routing is not None
        )
        costs = crew.plans.table if step is None else crew.plans.table_of(step - 1)
        mine, chosen = crew.stepper.forwards.scores(plan, delivered, costs, objective, step=step)
        strategies = [crew.stepper.runtimes.strategy_of(phase) for phase in plan.phases]
        pieces = partial(
            pieces_of, plan, strategies, crew.world.num_ranks, token_sharding=crew.job.source.plan.token_sharding
        )

        def collected(of_rank: Float64Array, *, all_stages: bool) -> list[Float64Array]:
            of_ranks = pieces(all_stages=all_stages)
            found = collect(plan, of_ranks, gathered.owners, of_rank, crew.world.channel)
            return [found[position] for position in sorted(found)]

        return collected(mine, all_stages=False), [] if routing is None else collected(chosen, all_stages=True)

    def check_model(self, *, trains: bool = False) -> None:
        """ConfigError where the job's model has no log-probabilities, or adds something of its own to a loss."""
        source = self._crew.job.source
        if not isinstance(source, CausalLM):
            raise ConfigError(
                "log-probabilities need a Hugging Face model: the layers of a PipelineModule end in a loss"
            )
        if source.balances and trains:
            raise ConfigError(
                "a loss of log-probabilities says itself what tokens count, and the loss of the model's routers has no "
                "share in it: set output_router_logits to false in the model's config"
            )


def refuse_without_loss(source: ModelSource) -> None:
    """ConfigError for a model that has no loss of its own."""
    if source.valued:
        raise ConfigError(
            "the model gives a value for each token, which has no loss of its own: train it by "
            "engine.forward_backward(sequences, loss) with a loss of values, such as ds_hydra.losses.ValueLoss(), and "
            "engine.optimizer_step(); engine.values(sequences) evaluates it"
        )


def check_all(mine: Mine) -> None:
    """ConfigError where some of what was handed in has no place in what a script gets back."""
    if mine.left_out != LeftOut():
        raise ConfigError(f"log-probabilities and values are of all sequences that are handed in, but {mine.left_out}")
