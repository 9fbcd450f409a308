"""Forward only: log-probabilities, entropies and values of sequences that ranks hand in, and losses of datasets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_hydra.data.columns import IGNORE_INDEX
from ds_hydra.data.sequences import SequenceData
from ds_hydra.data.tokens import Float64Array, LeftOut, Reads, TokenSequence
from ds_hydra.engine.crew import Crew
from ds_hydra.engine.data import Dispatched, Mine, SequenceExchange
from ds_hydra.host.host_engine import HostEngine
from ds_hydra.pipe.loss import ENTROPY, LOG_PROB, VALUE, Objective, TokenFunction, width_of
from ds_hydra.pipe.models.adapted import active_adapters
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.experts import find_routing
from ds_hydra.pipe.rows import ROUTED_EXPERTS, TEMPERATURE, FieldLayout, Routing
from ds_hydra.step.delivery import collect, pieces_of
from ds_hydra.step.outcome import mean_of
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.pipe.stage import ModelSource
    from ds_hydra.plan.step_plan import StepPlan


@dataclass(frozen=True)
class Evaluation:
    """Losses of a dataset, equal on all ranks."""

    sums: npt.NDArray[np.float64]  #: (sequences,) sum of the losses of its targets
    num_targets: npt.NDArray[np.int64]  #: (sequences,) 0 for a sequence that was left out, or has none

    def to_json(self) -> list[Any]:
        """As JSON holds it."""
        return [self.sums.tolist(), self.num_targets.tolist()]

    @classmethod
    def from_json(cls, told: Sequence[Any]) -> Evaluation:
        """What `to_json` made."""
        sums, counts = told
        return cls(np.array(sums, dtype=np.float64), np.array(counts, dtype=np.int64))

    @property
    def loss(self) -> float:
        """Mean over all targets; NaN where there are none."""
        return float(self.sums.sum() / count) if (count := int(self.num_targets.sum())) else math.nan

    @property
    def perplexity(self) -> float:
        """exp of the loss, where that is a cross entropy."""
        return float(np.exp(self.loss))

    @property
    def sequence_losses(self) -> npt.NDArray[np.float64]:
        """(sequences,) mean over each one's targets; NaN where it has none."""
        return np.divide(self.sums, self.num_targets, out=np.full(len(self.sums), np.nan), where=self.num_targets > 0)


def _parts(data: SequenceData, tokens: int) -> Iterator[tuple[int, ...]]:
    """Ids of consecutive sequences that together reach that many tokens."""
    part: list[int] = []
    held = 0
    for index, length in enumerate(data.lengths.tolist()):
        if length:
            part.append(index)
            held += length
        if held >= tokens:
            yield tuple(part)
            part, held = [], 0
    if part:
        yield tuple(part)


class TokenScores(NamedTuple):
    """Of this rank's sequences, in their order: one tensor (tokens,) each, on the engine's device, in FP32, or in FP64
    for a model in that.

    What stands at place i is about token i, given the tokens before it; it is 0 at the first, and where `labels` or a
    mask say that nothing is to be learnt.
    """

    log_probs: list[Tensor]  #: log p(label), which is the token itself unless `labels` say otherwise
    entropy: list[Tensor] | None  #: of p; None where it was not asked for


class RoutedScores(NamedTuple):
    """`TokenScores` with the experts that the routers have chosen for the token at place i itself."""

    log_probs: list[Tensor]
    entropy: list[Tensor] | None
    routed_experts: list[Tensor]  #: (tokens, routers, chosen) int64


class Scoring:
    """Of one crew. Every rank must call the same methods."""

    def __init__(self, host: HostEngine, crew: Crew, shares: SequenceExchange):
        self._host, self._crew, self._shares, self._device = host, crew, shares, host.device
        self._active = active_adapters(host.module)

    @property
    def mode(self) -> str:
        """What an evaluation has besides its name, which ranks compare: whether a script has switched adapters off.
        ConfigError where it has switched to others."""
        now = active_adapters(self._host.module)
        if now and now != self._active:
            raise ConfigError(
                f"the adapters {list(now)} of the model are active, but the engine was made with {list(self._active)}, "
                "which its stages run: make an engine of the model with the others, or switch all of them off"
            )
        return " without adapters" if self._active and not now else ""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """All ranks run forward, without adapters where the script has switched them off."""
        forwards = self._crew.stepper.forwards
        forwards.adapted = not self.mode
        try:
            with self._crew.together("evaluation"):
                yield
        finally:
            forwards.adapted = True

    def _dispatched(
        self, batch: Any, what: str = "evaluation", call: str = "", *, reads: Callable[[], Reads] | None = None,
        check: Callable[[Mine], None] = lambda _: None, run: Any = lambda own, _: own,
    ) -> Dispatched:  # fmt: skip
        """A batch of each rank's, planned and delivered; `what`, `call` and `run` as of `SequenceExchange.dispatch`."""
        with self._crew.activity("evaluation"):
            try:
                mine = self._shares.read([(batch, 1.0)], None if reads is None else reads()).checked(check)
            except ConfigError as error:
                mine = Mine(error=error)
            return self._shares.dispatch(mine, what, call, run=run)

    def handed(self, batch: Any) -> tuple[float, float]:
        """Mean losses of what the ranks hand in: over this rank's targets, and over all; NaN where there are none."""
        refuse_without_loss(self._crew.job.source)
        handed = self._dispatched(batch)
        with self.evaluating():
            found = self._crew.stepper.forwards.sequence_losses(handed.plan, handed.delivered, self._crew.plans.table)
        return mean_of(found, handed.gathered.own(self._crew.world.rank)), mean_of(found)

    def predict(self, batch: Any, function: TokenFunction | None) -> tuple[float, Tensor]:
        """See `HydraEngine.predict`."""
        crew, source = self._crew, self._crew.job.source
        words = source.vocab_size or 0
        if function is not None:
            refuse_without_loss(source)
            width = width_of(function, words or 2)
            handed = self._dispatched(batch)
            with self.evaluating():
                loss, mine = crew.stepper.forwards.predictions(
                    handed.plan, handed.delivered, crew.plans.table, function, width
                )
                return loss, _joined(self._brought_back(mine, handed), width)
        handed = self._dispatched(batch, "predict()", "logits", check=lambda _: self.check_model(), run=every_token)
        with self.evaluating():
            logits = _joined(self.found_by(Objective(of_logits=words), handed)[0], words)
        summed, count = summed_loss(source, logits, handed.mine.sequences)
        total, targets = crew.world.channel.rows(torch.tensor([float(summed), count], dtype=torch.float64)).sum(dim=0)
        return float(total / targets), logits.to(self._dtype)

    def batch(self, batch: Any) -> float:
        """Mean loss of a dataset that all ranks have, run at once."""
        refuse_without_loss(self._crew.job.source)
        data = self._host.sequences(batch)
        with self.evaluating():
            plan = self._plan_of(data, tuple(i for i, length in enumerate(data.lengths) if length))
            return self._crew.stepper.forwards.evaluate(plan, data, self._crew.plans.table)

    def evaluate(self, dataset: Any) -> Evaluation:
        """The loss of each sequence of a dataset that all ranks have, about hydra.tokens_per_step tokens at a time."""
        refuse_without_loss(self._crew.job.source)
        data = self._host.sequences(dataset)
        sums, counts = np.zeros(len(data)), np.zeros(len(data), dtype=np.int64)
        with self.evaluating():
            for ids in _parts(data, self._host.hydra_config.tokens_per_step):
                plan = self._plan_of(data, ids)
                found = self._crew.stepper.forwards.sequence_losses(plan, data, self._crew.plans.table)
                sums[list(ids)], counts[list(ids)] = found
        return Evaluation(sums, counts)

    def _plan_of(self, data: SequenceData, ids: tuple[int, ...]) -> StepPlan:
        return self._crew.plans.plan_once(ids, tuple(int(data.lengths[i]) for i in ids)).plan

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
        """See `HydraEngine.log_probs`."""
        self.check_model()
        if self.valued:
            raise ConfigError("the model gives a value for each token and no log-probabilities: call values()")
        routing = self._routing if routed_experts else None
        call = "log_probs" if routing is None else "log_probs with routed_experts"
        found, chosen = self._found("log_probs", call, batch, temperature, routing)
        scores = TokenScores(
            self._at_own_place(found, LOG_PROB), self._at_own_place(found, ENTROPY) if entropy else None
        )
        if routing is None:
            return scores
        shape = len(routing.paths), routing.chosen
        experts = [torch.from_numpy(one).long().to(self._device).unflatten(1, shape) for one in chosen]
        return RoutedScores(*scores, experts)

    def values(self, batch: Any) -> list[Tensor]:
        """See `HydraEngine.values`."""
        self.check_model()
        if not self.valued:
            raise ConfigError(
                "the model gives logits and no values: values() is for one whose head has one output, such as "
                "AutoModelForTokenClassification with num_labels=1; call log_probs()"
            )
        return self._at_own_place(self._found("values", "values", batch, None)[0], VALUE)

    def _found(
        self, what: str, call: str, batch: Any, temperature: float | None, routing: Routing | None = None
    ) -> tuple[list[Float64Array], list[Float64Array]]:
        only = frozenset((ROUTED_EXPERTS,) if self.valued else (TEMPERATURE, ROUTED_EXPERTS))
        handed = self._dispatched(batch, what, call, reads=lambda: self.reads(temperature, only), check=check_all)
        with self.evaluating():
            return self.of_sequences(handed, routing=routing)

    @property
    def _dtype(self) -> torch.dtype:
        """Of what scripts get."""
        return torch.float64 if self._crew.job.types.compute == torch.float64 else torch.float32

    def _at_own_place(self, found: list[Float64Array], column: int) -> list[Tensor]:
        """What was found at a token is about the next."""
        moved = (torch.from_numpy(one[:, column]).roll(1) for one in found)
        return [one.to(self._device, self._dtype) for one in moved]

    def of_sequences(
        self, handed: Dispatched, step: int | None = None, *, routing: Routing | None = None
    ) -> tuple[list[Float64Array], list[Float64Array]]:
        """The scores of this rank's own sequences, (tokens, num_scores) each; with a `step` those of its training. With
        a `routing` also the experts that these routers have chosen, (tokens, routers * chosen) each."""
        layout = handed.gathered.layout
        given = routing or self.routing_in(layout)
        objective = Objective(layout=layout, valued=self.valued, routing=given, keeps_routes=routing is not None)
        return self.found_by(objective, handed, step)

    def found_by(
        self, objective: Objective, handed: Dispatched, step: int | None = None
    ) -> tuple[list[Float64Array], list[Float64Array]]:
        """`of_sequences`, of what an objective finds."""
        crew = self._crew
        costs = crew.plans.table if step is None else crew.plans.table_of(step - 1)
        mine, chosen = crew.stepper.forwards.scores(handed.plan, handed.delivered, costs, objective, step=step)
        found = self._brought_back(mine, handed)
        return found, self._brought_back(chosen, handed, all_stages=True) if objective.keeps_routes else []

    def _brought_back(
        self, of_rank: Float64Array, handed: Dispatched, *, all_stages: bool = False
    ) -> list[Float64Array]:
        """What all ranks have found of this rank's sequences, (tokens, width) each; `of_rank` as of `collect`,
        `all_stages` as of `pieces_of`."""
        crew, plan = self._crew, handed.plan
        pieces = pieces_of(
            plan, crew.strategies_of(plan), crew.world.num_ranks, token_sharding=crew.job.source.plan.token_sharding,
            all_stages=all_stages,
        )  # fmt: skip
        found = collect(plan, pieces, handed.gathered.owners, of_rank, crew.world.channel)
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


def every_token(sequences: Sequence[TokenSequence], *_: Any) -> list[TokenSequence]:
    """The same tokens, each of which counts, whatever its label."""
    return [one._replace(labels=np.zeros_like(one.labels), weight=1.0) for one in sequences]


def summed_loss(source: ModelSource, logits: Tensor, sequences: Sequence[TokenSequence]) -> tuple[Tensor, int]:
    """The sum of the losses of the sequences' targets, (), by their logits (tokens, words), and their number."""
    labels = torch.from_numpy(np.concatenate([one.labels for one in sequences] or [np.zeros(0, dtype=np.int64)]))
    learnt = labels != IGNORE_INDEX
    own: Any = getattr(source, "token_loss", None)
    of_tokens = own or (lambda given, targets: F.cross_entropy(given, targets, reduction="none"))
    return of_tokens(logits[learnt], labels[learnt]).sum(), int(learnt.sum())


def _joined(parts: Sequence[Float64Array], width: int) -> Tensor:
    """Sequence after sequence, (tokens, width)."""
    return torch.from_numpy(np.concatenate([np.zeros((0, width)), *parts]))
