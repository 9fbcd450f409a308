"""Sequences that ranks hand in, in; log-probabilities, entropies or values of their tokens, on those ranks, out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ds_hydra.data.fields import Reads
from ds_hydra.data.tokens import Float64Array, LeftOut
from ds_hydra.engine.crew import Crew
from ds_hydra.engine.shares import Gathered, Mine, Shares
from ds_hydra.pipe.fields import TEMPERATURE
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.scores import ENTROPY, LOG_PROB, VALUE, Objective
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


class Scoring:
    """Of one crew. Every rank must call the same methods."""

    def __init__(self, crew: Crew, shares: Shares, device: torch.device):
        self._crew, self._shares, self._device = crew, shares, device

    @property
    def valued(self) -> bool:
        """Whether the job's model gives values in place of logits."""
        return self._crew.job.source.valued

    def log_probs(self, batch: Any, temperature: float | None, *, entropy: bool) -> TokenScores:
        """See `EngineInParts.log_probs`."""
        self.check_model()
        if self.valued:
            raise ConfigError("the model gives a value for each token and no log-probabilities: call values()")
        found = self._found("log_probs", batch, temperature)
        return TokenScores(self._at_own_place(found, LOG_PROB), self._at_own_place(found, ENTROPY) if entropy else None)

    def values(self, batch: Any) -> list[Tensor]:
        """See `EngineInParts.values`."""
        self.check_model()
        if not self.valued:
            raise ConfigError(
                "the model gives logits and no values: values() is for one whose head has one output, such as "
                "AutoModelForTokenClassification with num_labels=1; call log_probs()"
            )
        return self._at_own_place(self._found("values", batch, None), VALUE)

    def _found(self, call: str, batch: Any, temperature: float | None) -> list[Float64Array]:
        crew, shares = self._crew, self._shares
        with crew.activity("evaluation"):
            try:
                reads = reads_with(temperature, only=frozenset(() if self.valued else (TEMPERATURE,)))
                mine = shares.read([(batch, 1.0)], reads).checked(check_all)
            except ConfigError as error:
                mine = Mine(error=error)
            gathered = shares.gather(mine, call, call)
            plan = crew.plans.plan_once(tuple(range(len(gathered.lengths))), gathered.lengths)
            delivered = shares.deliver(plan, mine.sequences, gathered, gathered.layout.num_columns)
        with crew.together("evaluation"):
            return self.of_sequences(plan, delivered, gathered)

    def _at_own_place(self, found: list[Float64Array], column: int) -> list[Tensor]:
        """What was found at a token is about the next."""
        dtype = torch.float64 if self._crew.job.types.compute == torch.float64 else torch.float32
        moved = (torch.from_numpy(one[:, column]).roll(1) for one in found)
        return [one.to(self._device, dtype) for one in moved]

    def of_sequences(
        self, plan: StepPlan, delivered: Delivered, gathered: Gathered, step: int | None = None
    ) -> list[Float64Array]:
        """The scores of this rank's own sequences, (tokens, num_scores) each; with a `step` those of its training."""
        crew, objective = self._crew, Objective(layout=gathered.layout, valued=self.valued)
        costs = crew.plans.table if step is None else crew.plans.table_of(step - 1)
        mine = crew.stepper.forwards.scores(plan, delivered, costs, objective, step=step)
        strategies = [crew.stepper.runtimes.strategy_of(phase) for phase in plan.phases]
        sharding = crew.job.source.plan.token_sharding
        pieces = pieces_of(plan, strategies, crew.world.num_ranks, token_sharding=sharding)
        found = collect(plan, pieces, gathered.owners, mine, crew.world.channel)
        return [found[position] for position in sorted(found)]

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


def reads_with(temperature: Any, only: frozenset[str] | None = None) -> Reads:
    """Which columns are read as fields where a call gives a temperature, or None. ConfigError for no number."""
    if temperature is None:
        return Reads(only=only)
    try:
        return Reads({TEMPERATURE: float(temperature)}, only)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"temperature must be a positive number, but is {temperature!r}") from None
