"""What each rank's script hands in for a step in; the step's plan, and its sequences where they run, out.

[Note: a step that is handed in]
Nothing is known of such a step before the call, so nothing of it can be planned ahead. In order:

  read      each rank reads its own share; an error of one is raised on all, with the rank and the item
  gather    one small message: every rank learns all lengths, and with them whose the sequences are
  plan      rank 0 plans, by compiled kernels in milliseconds, and tells the others
  deliver   token ids go from the rank that has them to those that run them (`step.delivery`)

Until the last of these nothing of the engine has changed: a script may catch the error and hand in something else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise, starmap
from typing import Any, NamedTuple

import torch

from ds_hydra.data.stream import is_stream
from ds_hydra.data.tokens import LeftOut, Limits, Sequences, TokenSequence
from ds_hydra.engine.crew import Crew
from ds_hydra.engine.sequence_loss import SequenceLoss, Weighed, weigh
from ds_hydra.engine.shares import Gathered, Mine, Shares
from ds_hydra.pipe.models.refusals import in_evaluation
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import PlannedStep
from ds_hydra.ranks.together import agree
from ds_hydra.step.delivery import Delivered
from ds_hydra.step.outcome import Outcome, mean_of
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)


class Intake:
    """Takes the share of each step from what a script passes: the share itself, or an iterator or loader of shares."""

    def __init__(self) -> None:
        self._loader: Any = None
        self._iterator: Iterator[Any] = iter(())

    def take(self, handed: Any) -> Any:
        """The share of the next step. Raises StopIteration when an iterator has none left.

        A loader, which can be iterated but not indexed, is iterated again when it ends, as long as the script passes
        the same one.
        """
        if hasattr(handed, "__next__"):
            return next(handed)
        if not is_stream(handed):
            return handed
        if handed is not self._loader:
            self._loader, self._iterator = handed, iter(handed)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(handed)
            return next(self._iterator)


class ReadyStep(NamedTuple):
    """A step that is ready to run."""

    planned: PlannedStep
    sequences: Sequences
    loss: float | None = None  # the step's, where it is not that of its tokens
    batches: tuple[slice, ...] | None = None  # the sequences of each of this rank's batches, where their losses count

    def completed(self, outcome: Outcome) -> Outcome:
        """The outcome of the step, with the losses that scripts are told."""
        kept = outcome.of_sequences
        # A model's own output has its routers' loss in it: a batch is told the whole step's.
        own = [mean_of(kept, part) + outcome.router_loss for part in self.batches or ()] if kept else []
        return replace(outcome, other_loss=self.loss, batch_losses=own)


class HandedSteps:
    """Makes steps of what scripts hand in [Note: a step that is handed in]. Every rank must call the same methods.

    They raise on all ranks ConfigError for items that cannot be trained on, and PlanError where no strategy holds the
    longest sequence.
    """

    def __init__(self, crew: Crew, limits: Limits):
        self._crew, self._intake, self.shares = crew, Intake(), Shares(crew, limits)
        self._by_batch, self._told_other = crew.job.config.loss_norm == "batch", False

    def next(self, step: int, handed: Any, sequence_loss: SequenceLoss | None = None) -> ReadyStep:
        """Plan and deliver `step`, counted from 0, from what this rank's script passed to `train_batch`.

        With a `sequence_loss` the sequences run forward first [Note: losses of whole sequences]. Raises StopIteration
        when the iterators of all ranks have ended.
        """
        mine = self._taken(handed)
        if sequence_loss is None:
            return self._planned(step, mine)
        gathered = self.shares.gather(self._all_of(mine), f"step {step + 1}")
        planned = self._crew.plans.given(step, gathered.lengths)
        return self._weighed_by(sequence_loss, step, planned, mine, gathered)

    def collected(self, step: int, batches: Iterable[tuple[Any, float]], whole: int) -> ReadyStep:
        """Plan and deliver `step` from this rank's batches and the factors of their losses; `whole` batches of all
        ranks make an update."""
        mine = self.shares.read(batches)
        model = self._crew.job.model
        if (path := in_evaluation(model, self._crew.job.source.drawing)) is not None:
            mine = Mine(error=ConfigError(
                f"{path} is in evaluation mode, as from_pretrained makes a model: in DeepSpeed's loop it would train "
                "as in an evaluation, without dropout and noise, and stages train as in training. Call engine.train() "
                "before the first batch, or set the rates to 0 in the model's config"
            ))  # fmt: skip
        return self._planned(step, mine, whole)

    def evaluated(self, batch: Any) -> tuple[StepPlan, Delivered, slice]:
        """Plan and deliver a batch of this rank for an evaluation; the slice says which of the plan's sequences it
        holds."""
        mine = self.shares.read([(batch, 1.0)])
        gathered = self.shares.gather(mine, "evaluation")
        plan = self._crew.plans.plan_once(tuple(range(len(gathered.lengths))), gathered.lengths)
        return plan, self.shares.deliver(plan, mine.sequences, gathered), gathered.own(self._crew.world.rank)

    def _taken(self, handed: Any) -> Mine:
        try:
            return self.shares.read([(self._intake.take(handed), 1.0)])
        except StopIteration:
            return Mine(ended=True)
        except Exception as raised:  # of the script's own iterator: the other ranks wait for this one
            return Mine(error=raised)

    def _planned(self, step: int, mine: Mine, whole: int = 0) -> ReadyStep:
        """`whole`: of the three calls, whose batches are told their losses; else as many as there are."""
        empty = [number for number, (share, _) in enumerate(mine.batches) if share.num_items and not share.num_targets]
        if self._by_batch and empty:
            mine = Mine(error=ConfigError(
                f"batch {empty[0]} has no target, so the mean over its targets is no number, but hydra.loss_norm is "
                '"batch": hand in none without targets, or use "token"'
            ))  # fmt: skip
        gathered = self.shares.gather(mine, f"step {step + 1}")
        planned = self._crew.plans.given(step, gathered.lengths)
        sizes = (len(share.sequences) for share, _ in mine.batches)
        begins = accumulate(sizes, initial=gathered.begins[self._crew.world.rank])
        own = tuple(starmap(slice, pairwise(begins))) if whole else None
        weighed = self._weighed(mine, gathered, whole or gathered.num_batches)
        return ReadyStep(planned, self.shares.deliver(planned.plan, weighed, gathered), batches=own)

    def _all_of(self, mine: Mine) -> Mine:
        """An error in place of a share that a loss of whole sequences cannot be computed on."""
        config = self._crew.job.config
        if mine.left_out != LeftOut() and mine.error is None:
            return Mine(
                error=ConfigError(f"a sequence_loss is of all sequences that are handed in, but {mine.left_out}")
            )
        if config.loss_norm in ("sequence", "micro_batch"):
            return Mine(error=ConfigError(
                f'a sequence_loss says itself what sequences count, but hydra.loss_norm is "{config.loss_norm}": leave '
                'it at "token"'
            ))  # fmt: skip
        if self._crew.job.source.balances:
            return Mine(error=ConfigError(
                "a sequence_loss may count a sequence negatively, and its routers' loss with it: set "
                "output_router_logits to false in the model's config"
            ))  # fmt: skip
        return mine

    def _weighed_by(
        self, function: SequenceLoss, step: int, planned: PlannedStep, mine: Mine, gathered: Gathered
    ) -> ReadyStep:
        """Run a step's sequences forward, and let their tokens count what the function makes of the sums."""
        crew, plan, channel = self._crew, planned.plan, self._crew.world.channel
        delivered = self.shares.deliver(plan, mine.sequences, gathered)
        with crew.together("evaluation"):
            sums, _ = crew.stepper.forwards.sequence_losses(plan, delivered, crew.plans.table_of(step), step=step + 1)
        own = gathered.own(channel.rank)
        factors = torch.tensor([sequence.weight for sequence in mine.sequences], dtype=torch.float64)
        weighed, error = Weighed(0.0, 0, factors), None
        try:
            if len(factors):
                weighed = weigh(function, torch.from_numpy(sums[own]) * factors, crew.job.model)
        except Exception as raised:  # of the script's own function: the other ranks wait for this one
            error = raised
        agree(channel, error, f"the sequence_loss of step {step + 1}", alike=True)
        row = torch.zeros(2 + len(plan.lengths), dtype=torch.float64)
        row[0], row[1] = weighed.total, weighed.num_groups
        row[2:][own] = factors * weighed.gradients
        total, num_groups, *counts = channel.rows(row).sum(dim=0).tolist()
        # The step divides by all targets; this loss by all groups.
        scale = gathered.num_targets / num_groups
        weights = {number: count * scale for number, count in zip(plan.sequence_ids, counts, strict=True)}
        return ReadyStep(planned, delivered.weighed(weights), total / num_groups)

    def _weighed(self, mine: Mine, gathered: Gathered, whole: int) -> list[TokenSequence]:
        """This rank's sequences, with what their losses count; `whole` batches make an update [Note: three calls]."""
        weighed: list[TokenSequence] = []
        if self._by_batch and gathered.num_batches != whole and not self._told_other:
            self._told_other = True
            if self._crew.world.rank == 0:
                logger.warning(
                    "an update of %d batches, where gradient_accumulation_steps and ranks make %d: by hydra.loss_norm "
                    '"batch" each counts 1/%d as in DeepSpeed\'s loop, so it is %.3g of their mean; "token" takes the '
                    "mean over the targets that there are (told once)",
                    gathered.num_batches, whole, whole, gathered.num_batches / whole,
                )  # fmt: skip
        for share, factor in mine.batches:
            # The step divides by all targets, 50. To count 1/4 in all, the 10 targets of one of 4 batches weigh
            # 50 / (4 * 10) each: 10 * 1.25 / 50 is 1/4.
            if self._by_batch:
                factor *= gathered.num_targets / max(1, whole * share.num_targets)
            weighed += [sequence._replace(weight=sequence.weight * factor) for sequence in share.sequences]
        return weighed
