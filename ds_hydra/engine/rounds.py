"""Rounds in which the batches of a step run as scripts hand them in, so that losses are there before the step.

See [Note: losses read early] and [Note: factors that are not known yet]. Every rank comes to a round with the batches
that it wants the losses of, or with none, as it is at another call: who is there serves rounds until no rank has a
batch. A rank that is to read a loss where rounds have not begun sends the first message of a call, under a name that
all know: it meets that of the others' next call, which all then leave, to begin rounds (`ranks.calling.LossIsRead`).

[Note: factors that are not known yet]
Where losses are known to be read early, a batch runs forward and backward at its call, in a part of its step. What it
counts is only known after `backward`, and what the step divides by at its end [Note: a step in parts].
So it runs with the factor that the batch of this number had in the step before, over the normaliser of that step, and
the end sets it right. Two batches of 10 and 30 targets that count 0.5 each, in a step after one of 50 targets:

  while they run      (0.5 g1 + 0.5 g2) / 50
  at the update       times 50 / 40

If all batches of all ranks count c times what they have run with, the sums count c times as much, too. Anything else
(a batch that is left out, factors that depend on its loss) drops the sums, and the step runs as one that is collected.

[Note: logits of batches]
A script may make its loss of the logits of its batch (distillation, rewards, a cross entropy of its own). They lie on
the last stages of the pipelines that run the batch's sequences. So the batches of a round run forward, and each rank
gets the logits z of what it has handed in, as a tensor of torch's own graph. What `backward` leaves there, G = dL/dz,
are plain numbers; a second run of the same plan trains on the sum of G z, whose gradient is that of L by the chain
rule. What `out.loss` counts in L is added to G: a loss's gradient by the logits follows from the logits.

Such a step counts each batch as DeepSpeed's loop does: 1 over gradient_accumulation_steps and ranks. Logits of an
evaluation are numbers alone.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ds_hydra.engine.losses import by_gradients
from ds_hydra.engine.scoring import every_token, summed_loss
from ds_hydra.host.three_calls import Collected
from ds_hydra.pipe.loss import Objective
from ds_hydra.pipe.rows import FieldLayout
from ds_hydra.ranks.calling import READS, ROUND, LossIsRead
from ds_hydra.ranks.moving import user_frame, walk
from ds_hydra.step.outcome import mean_of
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.data.tokens import TokenSequence
    from ds_hydra.engine.data import Dispatched, Gathered, Mine
    from ds_hydra.engine.engine import HydraEngine
    from ds_hydra.ranks.rank_stats import Floats
    from ds_hydra.step.outcome import StepOutcome

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

# What a rank says in a round: how many batches it has, whether these have tokens or an error, and whether it has read a
# loss of this step before it ran.
# Of its batches the least and the largest ratio of what they count to what they have run with. Whether it reads logits;
# whether it is at a step; how many runs of logits it is ready to train on; how many of its batches are trained, and the
# sum of their losses.
_BATCHES, _RUNS, _READ, _LEAST, _MOST, _LOGITS, _STEP, _READY, _TRAINED, _MADE = range(10)
_NEAR = 1e-12  # relative, of equal ratios


class _Own(NamedTuple):
    """A batch of this rank in a run."""

    entry: Collected
    sequences: tuple[TokenSequence, ...]
    logits: Tensor  # (tokens, words)
    kept: Tensor  # (rows, length) which places are tokens


class LogitRun(NamedTuple):
    """Batches that have run forward for their logits, and are to be trained on by them [Note: logits of batches]."""

    host: HydraEngine
    handed: Dispatched
    own: list[_Own]

    @classmethod
    def forward(cls, host: HydraEngine, mine: Mine, entries: Sequence[Collected], first: int) -> LogitRun:
        """Run the batches of all ranks forward and hand each rank's its logits; `first` sequences of the step ran
        before."""
        crew, steps, step = host.crew, host.steps, host.global_steps
        with crew.activity("reading sequences"):
            mine = mine.checked(lambda _: steps.scoring.check_model(trains=True))
            handed = steps.shares.dispatch(mine, step=step, first=first, run=every_token)
        with crew.together("evaluation"):
            objective = Objective(of_logits=crew.job.source.vocab_size or 0)
            found, _ = steps.scoring.found_by(objective, handed, step + 1)
        own, begin = [], 0
        for entry, (share, _) in zip(entries, mine.batches, strict=True):
            parts = found[begin : (begin := begin + len(share.sequences))]
            numbers = torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0, objective.of_logits)
            kept = places_of(entry.batch, len(numbers))
            host.three_calls.hand_out(entry, in_rows(kept, numbers))
            own.append(_Own(entry, share.sequences, numbers.to(host.three_calls.dtype), kept))
        return cls(host, handed, own)

    @property
    def is_ready(self) -> bool:
        """Whether `backward` has come to all batches of this rank."""
        return all(one.entry.is_trained for one in self.own)

    def losses(self) -> list[float]:
        """The mean loss of each of this rank's batches."""
        return [float(self.loss(one.logits, one)) for one in self.own]

    def loss(self, logits: Tensor, one: _Own) -> Tensor:
        """The mean loss of a batch's targets, (), by its logits (tokens, words)."""
        summed, count = summed_loss(self.host.job.source, logits, one.sequences)
        return summed / count

    def train(self) -> bool:
        """Train on what a script has made of the logits; they are let go of. Whether it has counted padding."""
        steps, words = self.host.steps, self.host.crew.job.source.vocab_size or 0
        sequences: list[TokenSequence] = []
        padding = any(
            bool(given.cpu()[~one.kept].any()) for one in self.own if (given := one.entry.by_logits) is not None
        )
        for one in self.own:
            counts = self.counts(one).double().cpu().numpy()
            begin = 0
            for sequence in every_token(one.sequences):
                part = counts[begin : (begin := begin + len(sequence.labels))]
                sequences.append(sequence._replace(fields=part))
            if one.entry.is_trained:  # and stays so
                one.entry.factor = one.entry.factor or 0.0
            one.entry.logits = one.entry.by_logits = None
        delivered = steps.shares.deliver(self.handed.plan, sequences, self.handed.gathered, words)
        whole = self.host.three_calls.batches_of_update() * self.host.world_size
        objective = by_gradients(FieldLayout(), of_logits=words)
        steps.parts.add_objective(self.handed.planned, delivered, objective, float(whole))
        return padding

    def counts(self, one: _Own) -> Tensor:
        """What each logit counts, (tokens, words)."""
        entry, found = one.entry, torch.zeros_like(one.logits)
        if entry.by_logits is not None:
            found += entry.by_logits.cpu()[one.kept]
        if entry.factor:
            leaf = one.logits.detach().requires_grad_()
            with torch.enable_grad():
                (by_loss,) = torch.autograd.grad(self.loss(leaf, one), leaf)
            found += entry.factor * by_loss
        return found


def in_rows(kept: Tensor, numbers: Tensor, padding: float = 0.0) -> Tensor:
    """Numbers (tokens, k) of a batch's tokens at the places that are `kept`, (rows, length, k); `padding` elsewhere."""
    out = numbers.new_full((*kept.shape, numbers.shape[1]), padding)
    out[kept] = numbers
    return out


def places_of(batch: Any, tokens: int, what: str = "logits") -> Tensor:
    """Which places of a batch (rows, length) are tokens. ConfigError where it is no such batch, or lacks some."""
    ids = batch.get("input_ids") if hasattr(batch, "get") else None
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise ConfigError(f"{what} are handed out for batches with a tensor input_ids (rows, length): collate them")
    mask = batch.get("attention_mask")
    kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    if int(kept.sum()) != tokens:
        raise ConfigError(
            f"{what} are of all tokens of a batch, but {int(kept.sum()) - tokens} of {int(kept.sum())} belong to "
            "sequences that are left out or cut: give such of two tokens or more, within hydra.context_length"
        )
    return kept.cpu()


class Rounds:
    """Of one engine; ranks come to the same rounds, each at a call of its own."""

    def __init__(self, host: HydraEngine, losses: str):
        """`losses` as hydra.losses."""
        self._host, self._early, self._never = host, losses == "early", losses == "step"
        self._first = True  # whether it is to be found out in this step
        self._was_read = False  # a loss of this step, before it has run
        self._told = self._told_padding = False
        self._ran: list[tuple[Collected, float]] = []  # batches of this step that ran with such a factor
        self._held = self._batches = self._sequences = 0  # parts of this step in the masters, and what these have
        self._dropped = False  # whether the gradients of parts of this step are gone
        self._factors = [1.0]  # of this rank's batches in the step before
        self._normaliser = 0.0  # of the step before
        self._logits = False  # whether batches are run for their logits
        self._logit_runs: list[LogitRun] = []  # of this step
        self._trained_runs = 0  # of these
        self._step: Sequence[Collected] | None = None  # the batches of the step that is being made

    @property
    def run(self) -> bool:
        """Whether calls begin with rounds now."""
        host = self._host
        return not self._never and (self._early or self._first) and host.sampler is None and host.going_on is None

    def hand_in(self, entry: Collected) -> None:
        """A batch is handed in: its loss is found now, where rounds run. An error leaves it out of the step."""
        entry.read, entry.read_logits = (None, None) if self._never else (self._read, self._read_logits)
        if self.run:
            try:
                self._round([entry])
            except BaseException:
                self._host.three_calls.drop(entry)
                raise

    def calling(self, call: Callable[[], Result]) -> Result:
        """Make a call of all ranks, when no rank has a batch for a round any more."""
        return self._served(lambda _: call())

    def _served(self, call: Callable[[Tensor | None], Result]) -> Result:
        """The same of a call that is given what `serve` returns; again, where a rank reads a loss in its place."""
        while True:
            said = self.serve()
            try:
                return call(said)
            except LossIsRead:
                self._first = True

    def make_step(self, collected: Callable[[], StepOutcome], batches: Sequence[Collected]) -> StepOutcome:
        """Make the step of these batches: of the parts that have run, where what they count allows it, or the
        `collected` one."""
        host, early, self._step = self._host, self._early, batches

        def made(said: Tensor | None) -> StepOutcome:
            nonlocal early
            early = early or (said is not None and bool(said[:, _READ].any()))
            if said is not None and self._logits and said[:, _TRAINED].any():
                return self._end(1.0, batches, float(said[:, _MADE].sum()) / self._whole)
            if said is not None and (scale := self._scale(said)) is not None:
                return self._end(scale, batches)
            host.steps.handed.run_twice = self._batches
            self.drop()
            return collected()

        try:
            outcome = self._served(made)
            self._normaliser = float(outcome.weight)
            self._early, self._first = early or self._logits, False
            return outcome
        finally:
            self._factors = [entry.factor for entry in batches if entry.factor] or self._factors
            self._was_read = self._dropped = False
            self._logit_runs, self._trained_runs, self._step, host.three_calls.made = [], 0, None, 0.0
            self._ran, self._held, self._batches, self._sequences = [], 0, 0, 0
            host.steps.handed.run_twice = 0

    def begin(self) -> None:
        """Before a call that makes a step, or a part of one, by itself."""
        self.serve()
        self.drop()

    def step_made(self) -> None:
        """The first step has shown what is to be found out."""
        self._first = False

    def drop(self) -> None:
        """Let go of the gradients of this step's parts, if there are any: it then runs as one that is collected."""
        if self._trained_runs:
            raise ConfigError(
                "gradients of losses that were made from logits wait for an update, and cannot be computed again: "
                "make this call after the engine.step() that makes it"
            )
        if self._held:
            self._held, self._dropped = 0, True
            self._host.steps.parts.forget()

    @property
    def hold(self) -> bool:
        """Whether gradients of parts of this step are in the masters."""
        return self._held > 0 or self._trained_runs > 0

    def _scale(self, said: Tensor) -> float | None:
        """What the sums of this step's parts count, by what all ranks have said; None where they are of no use."""
        least, most = float(said[:, _LEAST].min()), float(said[:, _MOST].max())
        if not self._held or not 0 < abs(least) < float("inf") or not abs(most - least) <= _NEAR * abs(most):
            return None
        handed = self._host.steps.handed
        handed.tell_other(self._batches, self._whole)
        return least if handed.by_batch else least * self._normaliser / max(1, self._host.crew.stepper.weight)

    @property
    def _whole(self) -> int:
        return self._host.three_calls.batches_of_update() * self._host.world_size

    def _end(self, scale: float, batches: Sequence[Collected], loss: float | None = None) -> StepOutcome:
        """The update by the parts that have run."""
        host = self._host
        with host.crew.calling("step()"):
            host.weights.lent.take_back()
            outcome = host.steps.parts.end_step(scale, loss)
            host.saving.when_due(outcome.request)
        known = [float("nan") if entry.early is None else float(entry.early.detach()) for entry in batches]
        return replace(outcome, batch_losses=known)

    def serve(self) -> Tensor | None:
        """Take part in rounds until no rank has a batch for one, nor reads logits: what all have said in the last, None
        without rounds."""
        while self.run:
            said = self._round([])
            if not said[:, [_BATCHES, _LOGITS]].any():
                return said
        return None

    def _read(self, entry: Collected, *, logits: bool = False) -> None:
        """The script reads the loss of a batch, whose step has not run, or its `logits`, which one round brings too."""
        self._tell()
        self._was_read = True
        if entry.early is not None:
            return
        if not self.run:
            crew = self._host.crew
            try:
                with crew.calling(READS):
                    crew.world.channel.texts("")
            except LossIsRead:
                self._first = True
        self._round(self._host.three_calls.unread, reads_logits=logits)

    def _read_logits(self, entry: Collected) -> Tensor:
        """The script asks for the logits of a batch, whose step has not run."""
        if entry.logits is None:
            self._read(entry, logits=True)
            if entry.logits is None and entry.by_logits is None and entry in self._host.three_calls.collected:
                self._round([], reads_logits=True)
        if entry.logits is None:
            raise RuntimeError("the logits of this batch were trained on already: call engine(batch) again for others")
        return entry.logits

    def _tell(self) -> None:
        if self._told or self._early:
            return
        self._told = True
        logger.warning(
            "a loss is read before its step, at %s: from the next step on each batch runs at its engine(batch), and "
            "not with all others of its step. Read losses after the engine.step() that makes the update, where that "
            "does as well (told once)", user_frame(list(walk(inspect.currentframe()))),
        )  # fmt: skip

    def _round(self, entries: Sequence[Collected], *, reads_logits: bool = False) -> Tensor:
        """Run the batches of all ranks; what each rank has said, (ranks, ...)."""
        crew, steps, calls = self._host.crew, self._host.steps, self._host.three_calls
        with crew.calling(ROUND):
            trains = self._early and not self._logits
            last = len(self._factors) - 1
            factors = [self._factors[min(len(self._ran) + number, last)] for number in range(len(entries))]
            mine = steps.handed.read([(entry.batch, factor) for entry, factor in zip(entries, factors, strict=True)])
            if trains:
                mine = steps.handed.with_targets(mine)
            runs = mine.error is not None or bool(mine.sequences)
            ready = next((at for at, run in enumerate(self._logit_runs) if not run.is_ready), len(self._logit_runs))
            of_step = calls.collected if self._step is None else self._step
            trained = sum(entry.is_trained for entry in of_step)
            row = [len(entries), runs, self._was_read, *self._ratios(), reads_logits, self._step is not None, ready,
                   trained, calls.made]  # fmt: skip
            said = crew.world.channel.first_rows(torch.tensor(row, dtype=torch.float64))
            losses = [float("nan")] * len(entries)
            if said[:, _LOGITS].any() and not self._logits:
                self.drop()
                self._logits, self._sequences, entries = True, 0, of_step
                mine = steps.handed.read([(entry.batch, 1.0) for entry in entries])
                losses = self._of_logits(mine, entries)
            elif self._logits:
                over = not said[:, _BATCHES].any() and said[:, _STEP].all()
                self._train_runs(len(self._logit_runs) if over else int(said[:, _READY].min()))
                losses = self._of_logits(mine, entries) if said[:, _RUNS].any() else losses
            elif said[:, _RUNS].any():
                losses = self._trained(mine) if trains else self._losses(mine)
        for entry, (share, factor), loss in zip(entries, mine.batches, losses, strict=True):
            if entry.early is None:
                calls.found(entry, loss)
            if trains and share.sequences and not self._logits:
                self._ran.append((entry, factor))
        return said

    def _of_logits(self, mine: Mine, entries: Sequence[Collected]) -> list[float]:
        """`_losses` of batches whose logits are handed out."""
        run = LogitRun.forward(self._host, mine, entries, self._sequences)
        self._logit_runs.append(run)
        self._sequences += len(run.handed.plan.lengths)
        return run.losses()

    def _train_runs(self, number: int) -> None:
        """Train on so many runs of this step."""
        for run in self._logit_runs[self._trained_runs : number]:
            if run.train() and not self._told_padding:
                self._told_padding = True
                logger.warning(
                    "a loss counts the logits of padding, which are zeros here and train nothing: a plain loop would "
                    "train on what the model says of padding. Leave these places out, as by attention_mask (told once)"
                )
            self._trained_runs += 1

    def _ratios(self) -> tuple[float, float]:
        """The least and the largest, of this rank's batches."""
        if self._dropped:
            return float("nan"), float("nan")
        found = [(entry.factor or 0.0) / factor for entry, factor in self._ran]
        return min(found, default=float("inf")), max(found, default=float("-inf"))

    def _trained(self, mine: Mine) -> list[float]:
        """`_losses` of a part of the step, whose gradients are added to those of the parts before."""
        crew, steps, step = self._host.crew, self._host.steps, self._host.global_steps
        steps.refuse(handed=True)
        if not self._held:
            steps.parts.refuse_if_any("engine(batch)")

        weighed: list[TokenSequence] = []

        def weigh(_: Sequence[TokenSequence], gathered: Gathered) -> list[TokenSequence]:
            weighed.extend(steps.handed.weighed(mine, gathered, self._whole))
            return weighed

        with crew.activity("reading sequences"):
            handed = steps.shares.dispatch(mine, step=step, first=self._sequences, run=weigh)
        _, planned, gathered, delivered = handed
        self._normaliser = self._normaliser or float(gathered.num_targets * self._host.gradient_accumulation_steps())
        divisor = None if steps.handed.by_batch else self._normaliser
        kept = steps.parts.add(planned, delivered, divisor)
        self._held, self._batches = self._held + 1, self._batches + gathered.num_batches
        self._sequences += len(gathered.lengths)
        return self._means(handed, kept, lambda: steps.parts.router_loss(weighed))

    def _losses(self, mine: Mine) -> list[float]:
        """The mean loss of each of this rank's batches, as in the step that they are of."""
        crew, step = self._host.crew, self._host.global_steps + 1
        with crew.activity("reading sequences"):
            handed = self._host.steps.shares.dispatch(mine, f"step {step}")
        with crew.together("evaluation"):
            forwards = crew.stepper.forwards
            kept = forwards.sequence_losses(handed.plan, handed.delivered, crew.plans.table, step=step)
            return self._means(handed, kept, lambda: forwards.router_loss(kept))

    def _means(self, handed: Dispatched, kept: tuple[Floats, Floats], of_routers: Callable[[], float]) -> list[float]:
        """The mean loss of each of this rank's batches, with what routers add to it; all ranks call it together."""
        added = of_routers() if self._host.crew.job.source.balances else 0.0
        begin = handed.gathered.begins[self._host.crew.world.rank]
        return [mean_of(kept, own) + added for own in handed.mine.places(begin)]
