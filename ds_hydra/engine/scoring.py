"""Sequences that ranks hand in, in; the log-probabilities and entropies of their tokens, where they came from, out."""

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
from ds_hydra.pipe.scores import ENTROPY, LOG_PROB, Objective
from ds_hydra.step.collecting import collect, pieces_of
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
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

    def log_probs(self, batch: Any, temperature: float | None, *, entropy: bool) -> TokenScores:
        """See `EngineInParts.log_probs`."""
        crew, shares = self._crew, self._shares
        self.check_model()
        with crew.activity("evaluation"):
            try:
                reads = reads_with(temperature, only=frozenset((TEMPERATURE,)))
                mine = shares.read([(batch, 1.0)], reads).checked(check_all)
            except ConfigError as error:
                mine = Mine(error=error)
            gathered = shares.gather(mine, "log_probs", "log_probs")
            plan = crew.plans.plan_once(tuple(range(len(gathered.lengths))), gathered.lengths)
            delivered = shares.deliver(plan, mine.sequences, gathered, gathered.layout.num_columns)
        with crew.together("evaluation"):
            found = self.of_sequences(plan, delivered, gathered)
        dtype = torch.float64 if crew.job.types.compute == torch.float64 else torch.float32

        def at_own_place(column: int) -> list[Tensor]:
            """What was found at a token is about the next."""
            moved = (torch.from_numpy(one[:, column]).roll(1) for one in found)
            return [one.to(self._device, dtype) for one in moved]

        return TokenScores(at_own_place(LOG_PROB), at_own_place(ENTROPY) if entropy else None)

    def of_sequences(
        self, plan: StepPlan, delivered: Delivered, gathered: Gathered, step: int | None = None
    ) -> list[Float64Array]:
        """The scores of this rank's own sequences, (tokens, 2) each; with a `step` those of its training."""
        crew, objective = self._crew, Objective(layout=gathered.layout)
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


def check_all(mine: Mine) -> None:
    """ConfigError where some of what was handed in has no place in what a script gets back."""
    if mine.left_out != LeftOut():
        raise ConfigError(f"log-probabilities are of all sequences that are handed in, but {mine.left_out}")


def reads_with(temperature: Any, only: frozenset[str] | None = None) -> Reads:
    """Which columns are read as fields where a call gives a temperature, or None. ConfigError for no number."""
    if temperature is None:
        return Reads(only=only)
    try:
        return Reads({TEMPERATURE: float(temperature)}, only)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"temperature must be a positive number, but is {temperature!r}") from None
