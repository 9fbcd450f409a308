"""Updates a rank's masters by a step's gradients, or skips the step on all ranks and says why; loss scaling for FP16.

[Note: the vote]
Where each rank keeps a copy of another one's masters, it gives its row of the gradient norm only when all that was
pushed to it is summed, and the gradient of its copy is there. So a rank that has the rows of all knows that every
shard's gradient of the step exists twice, and it will until all ranks begin the next step. If a rank dies, the step is
complete if any survivor has the table: the others take it from that one and make the update, too (`complete`). If
none has it, nobody has changed anything, and the step is run again.

An optimizer of whole parameters fetches from other ranks what it updates its parts by, which changes nothing yet. There
a rank has the table only when all have fetched theirs, so what follows needs nobody else either.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from torch import Tensor
from torch.optim import Optimizer

from ds_hydra.ranks.rank_stats import unequal_pairs
from ds_hydra.zero_hetero.clock import Laps, Stopwatch
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, NumericsError
from ds_hydra.zero_hetero.masters import clip_, norm_of, norm_table
from ds_hydra.zero_hetero.norm_table import NormTable

if TYPE_CHECKING:
    import torch.distributed as dist

    from ds_hydra.config.hydra_block import FaultsConfig
    from ds_hydra.pipe.model_plan import ModelPlan
    from ds_hydra.planner import StepPlan
    from ds_hydra.ranks.world import World
    from ds_hydra.step.host_states import HostStates
    from ds_hydra.step.model_masters import ModelMasters
    from ds_hydra.step.outcome import PhaseRun
    from ds_hydra.step.strategy_runtime import StrategyRuntime
    from ds_hydra.zero_hetero.masters import MasterShards
    from ds_hydra.zero_hetero.transport import Transport

logger = logging.getLogger(__name__)


class Applied(NamedTuple):
    """What the host knows when an update has been started.

    The device has passed all that came before the update. So `laps` can be read: the norm of this step, and the update
    of the step before.
    """

    norm: float  # of the gradient; not finite: the step was skipped
    losses: tuple[float, ...]  # this rank's share, phase by phase
    router_losses: tuple[float, ...]  # the parts of them that routers have
    laps: Laps


class ModelNow(NamedTuple):
    """How the user's model stands before an update."""

    problem: str = ""  # what was changed in it that has no effect, in words
    frozen: frozenset[str] = frozenset()  # parameters with masters that are not to be trained now
    moved: str = ""  # what buffers were moved to, equal where they are


class Exchanged(Protocol):
    """How an optimizer of whole parameters fetches what it needs of other ranks."""

    def connect(self) -> None:
        """Use all that will exchange anything once. Every rank must call it."""

    def follow(self, masters: MasterShards) -> None:
        """Fetch also for these masters, the copy of another rank's, what they are updated by."""


@runtime_checkable
class NeedsWholes(Protocol):
    """An optimizer whose step needs whole parameters, of which each rank has a part."""

    @property
    def exchange(self) -> Exchanged | None:
        """None before `attach`."""

    def attach(
        self,
        groups: Sequence[Mapping[str, Any]],
        masters: MasterShards,
        plan: ModelPlan,
        transport: Transport,
        group: dist.ProcessGroup | None,
        shift: int = 0,
    ) -> None:
        """Compile the exchange of this job's ranks, which are `group`; `groups` have the `names` of the parameters of
        each group, `shift` says which rank's copy this one keeps. Every rank must call it."""

    def run_exchange(self) -> None:
        """Fetch what the next step updates by, by the gradients as they are now. Every rank must call it."""

    def keeps(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """What is kept of one element of a group with these options; None where a trial of the step tells it."""


class Copied(Protocol):
    """The copy that this rank keeps of another one's masters (`elastic.copies`)."""

    masters: ModelMasters

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """(sender, receiver) of the messages of all ranks' copies."""

    def leave(self, bucket: int) -> None:
        """Begin to send this rank's summed gradient of a bucket to who keeps its copy, and to get that of its own copy;
        no more is added to it in this step."""

    def exchange_grads(self) -> None:
        """Do so for all that have not left, and return when all gradients are here and there."""

    def side(self, optimizer: Optimizer) -> tuple[MasterShards, Optimizer]:
        """Masters and optimizer of the copy, which updates as `optimizer` does now."""

    def settle(self) -> None:
        """Wait until values and states of the copy may be read."""

    @property
    def stale(self) -> bool:
        """Whether the masters have got values that the copy does not have."""

    def refresh(self) -> None:
        """Make it whole."""

    def compare(self, step: int) -> None:
        """NumericsError, on all ranks, where a copy differs from its owner's masters in a bit."""


class Update:
    """Updates the masters of this rank. Every rank must call the same methods; all come to the same decision."""

    def __init__(
        self,
        masters: MasterShards,
        optimizer: Optimizer,
        clipping: float,
        loss_scale: LossScale,
        world: World,
        faults: FaultsConfig,
        unread: frozenset[str] = frozenset(),
        *,
        states: HostStates | None = None,
    ):
        """`clipping` is the largest norm of the gradient; 0 does not clip. Parameters that are `unread` have no
        gradient in torch, so that no optimizer touches them: nor does it here, while theirs are zeros. `states` are
        those of the masters where they are on the host."""
        self._masters, self.optimizer, self._clipping = masters, optimizer, clipping
        self.loss_scale, self._world, self._faults, self.unread = loss_scale, world, faults, unread
        self._states, self.skipped_in_a_row = states, 0
        self.copy: Copied | None = (
            None  # of another rank's masters, which is updated like the own ones [Note: the vote]
        )
        self.committed = 0  # steps whose update was made
        self.table: NormTable | None = None  # of the step that is open, if it is whole
        self.last: NormTable | None = None  # of the step before
        self._watch = Stopwatch(world.clock)
        self.model: Callable[[], ModelNow] = ModelNow  # asked before each update
        self.is_updating = False  # while the optimizer's step is this one's
        self._scaled = False  # whether the open step's gradients are clipped, and what others give has been fetched

    def apply(
        self, losses: Sequence[Tensor], router_losses: Sequence[Tensor], share: Callable[[], Tensor | float] = float
    ) -> Applied:
        """Clip the gradient and make an optimizer step; `losses` are this rank's shares, a scalar of each phase, and
        `router_losses` the parts of them that routers have; `share` gives what this rank adds to the loss.

        If the loss or the gradient of any rank is not finite, nothing changes on any rank, and the norm is not finite.
        Nor does anything change if the model of any rank was changed: all ranks raise ConfigError.
        """
        # All ranks must skip a step if one of them has a loss that is not finite, even where its gradients are finite
        # (a sequence whose weight is 0, say). To ask each other would take one more message and a wait for the device.
        # The norm is gathered from all ranks anyway, so the loss joins it as one more element: 0 * 2.3 is 0 and changes
        # nothing, 0 * inf and 0 * NaN are NaN and make the norm NaN on every rank.
        model = self.model()
        with self._watch.lap("optimizer"):
            grads = self._masters.grads
            shares = torch.stack([loss.detach() for loss in (*losses, *router_losses)])
            poison = shares * 0.0
            if self.copy is not None:
                self.copy.exchange_grads()
            for masters, _ in self._sides() if model.frozen else ():
                for piece in masters.pieces():
                    if piece.name in model.frozen:
                        masters.grad_of(piece).zero_()
            # What the ranks say of their models travels with it, too: they must freeze the same, or none goes on.
            said = (_word(model),) if self.copy is None else (_word(model), share())
            table = self._table([*grads, poison], *said)
            norm, words = norm_of(table) / self.loss_scale.value, table[:, 1]
            figures = torch.cat((torch.stack((norm, words.min(), words.max())), shares.to(norm)))
        # The one moment of a step at which the host waits for the device. Reading the loss apart from the norm would be
        # another: after the update, it would wait for that too, and the device would idle until the next step begins.
        value, least, most, *found = figures.tolist()
        laps = self._watch.take()
        if least < 0 or least != most:
            self._refuse(model)
        with self._watch.lap("optimizer"):
            if math.isfinite(value):
                self._fetch(norm)
            if self.copy is not None:
                self.table = NormTable(self.committed, tuple(map(tuple, table.tolist())))
            self._make(norm, value, model.frozen)
        return Applied(value, tuple(found[: len(losses)]), tuple(found[len(losses) :]), laps)

    def _table(self, grads: Sequence[Tensor], *said: float | Tensor) -> Tensor:
        """`norm_table` of all ranks."""
        if self.copy is None:
            return norm_table(grads, self._world.group, *said)
        # The vote goes over the host: a row that is there proves that its rank has all, whatever befalls others then.
        row = norm_table(grads, None, *said)[0]
        self._world.settle()
        return self._world.channel.rows(row.cpu()).to(row.device)

    def complete(self, table: NormTable) -> None:
        """Make the update of the open step, for which another rank has the table of all ranks [Note: the vote]."""
        self.table = table
        rows = torch.tensor(table.rows, dtype=torch.float64, device=self._masters.device)
        norm = norm_of(rows) / self.loss_scale.value
        self._make(norm, norm.item(), self.model().frozen)

    def _make(self, norm: Tensor, value: float, frozen: frozenset[str]) -> None:
        """Update masters and copy by the gradients' norm; `value` is the number that it holds."""
        self.is_updating = True
        try:
            if math.isfinite(value):
                self._scale(norm)
                for masters, optimizer in self._sides():
                    self._step(masters, optimizer, frozen | self._idle(masters))
        finally:
            self.is_updating = False
        self.committed, self.last, self.table, self._scaled = self.committed + 1, self.table, None, False

    def _fetch(self, norm: Tensor) -> None:
        """What an optimizer of whole parameters does first; no other does anything."""
        if not isinstance(self.optimizer, NeedsWholes):
            return
        self._scale(norm)
        self.optimizer.run_exchange()
        if self.copy is not None:  # who is past this knows that all have theirs
            self._world.settle()
            self._world.channel.texts("")

    def _scale(self, norm: Tensor) -> None:
        """Unscale and clip the gradients of the open step, once."""
        for masters, _ in self._sides() if not self._scaled else ():
            self.loss_scale.unscale(masters.grads)
            if self._clipping > 0:
                clip_(masters.grads, norm, self._clipping)
        self._scaled = True

    def _step(self, masters: MasterShards, optimizer: Optimizer, frozen: frozenset[str]) -> None:
        """The optimizer's step, which leaves frozen parameters and their states as they are."""
        step: Callable[[], object] = optimizer.step
        if self._states is not None:
            self._states.bring_home(optimizer)
            step = partial(self._states.step, optimizer)
        if not frozen:
            step()
            return
        # It runs over long intervals of many parameters, so what it must not touch is put back. A state that it has
        # made just now is what it is at first, zeros.
        before = {view.data_ptr(): view.detach().clone() for view in masters.state_of(optimizer, frozen)}
        step()
        if self.copy is not None:
            self.copy.settle()
        with torch.no_grad():
            for view in masters.state_of(optimizer, frozen):
                kept = before.get(view.data_ptr())
                view.copy_(kept) if kept is not None else view.zero_()

    def _sides(self) -> list[tuple[MasterShards, Optimizer]]:
        """The rank's masters and those of its copy, each with its optimizer."""
        return [(self._masters, self.optimizer)] + ([] if self.copy is None else [self.copy.side(self.optimizer)])

    @property
    def counts_steps(self) -> bool:
        """Whether the optimizer has made steps and counts them, one number for all parameters of a group."""
        return any("step" in state for state in self.optimizer.state.values())

    def _idle(self, masters: MasterShards) -> set[str]:
        """Parameters that nothing learnt goes through, of which these masters have a part without a gradient."""
        unread = (piece for piece in masters.pieces() if piece.name in self.unread) if self.unread else ()
        return {piece.name for piece in unread if not bool(masters.grad_of(piece).any())}

    def _refuse(self, model: ModelNow) -> NoReturn:
        """Raise what the ranks have found in their models, on all of them."""
        texts = self._world.channel.texts(model.problem)
        found = next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), None)
        raise ConfigError(
            found
            or "the ranks have frozen different parameters, or moved buffers of the model's layers to different "
            "values: call requires_grad_ on all ranks alike, and write the same values on all of them"
        )

    def compare(self, step: int, runtime: StrategyRuntime) -> None:
        """Every `compare_every` steps, compare the parameters that each rank used in a phase with the masters.

        Call it after each phase, before the next one pulls.

        Raises NumericsError on all ranks, naming sender and receiver, where they differ.
        """
        if self._faults.compare_every == 0 or step % self._faults.compare_every:
            return
        wrong = unequal_pairs(runtime.pulls.checksums(self._masters.num_ranks), self._world.channel)
        if wrong:
            pairs = ", ".join(f"rank {receiver} from rank {sender}" for sender, receiver in wrong[:8])
            raise NumericsError(
                f"step {step}: parameters are not what was sent ({pairs}; {len(wrong)} pairs in all). Memory or "
                "network of these ranks has changed bits, or the model writes to its own parameters; no update was "
                "made. Exchange the hardware and restart: the job resumes from the newest checkpoint"
            )

    def explain(self, step: int, plan: StepPlan, runs: Sequence[PhaseRun]) -> None:
        """Log what was not finite: micro-batches with their sequences, and parameters with such a gradient."""
        if self.loss_scale.dynamic:
            return  # skipped steps are how it finds its scale
        found = list(_not_finite(plan, runs))
        masters = self._masters
        names = [piece.name for piece in masters.pieces() if not bool(masters.grad_of(piece).isfinite().all())]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            found.append(f"gradient of {', '.join(names[:3])}{more}")
        lines = [
            f"rank {r}: {text}" for r, text in enumerate(self._world.channel.texts("; ".join(found)[:4000])) if text
        ]
        if self._world.rank == 0:
            logger.warning("step %d is skipped, not finite: %s", step, " | ".join(lines[:16]))

    def count(self, step: int, norm: float) -> None:
        """Record whether `step` was skipped. Raises NumericsError when too many steps in a row were."""
        self.loss_scale.update(overflow=not math.isfinite(norm))
        if self.loss_scale.dynamic:
            return
        self.skipped_in_a_row = 0 if math.isfinite(norm) else self.skipped_in_a_row + 1
        limit = self._faults.skipped_steps
        if self.skipped_in_a_row >= limit:
            raise NumericsError(
                f"{limit} steps in a row were skipped, the last is step {step}: losses or gradients are not finite. "
                "Look at the sequences and parameters named above, lower the learning rate, or raise "
                "hydra.faults.skipped_steps"
            )


def _word(model: ModelNow) -> float:
    """What a rank says of its model to the others: equal numbers for equal sets of frozen parameters and buffers, or
    -1."""
    if model.problem:
        return -1.0
    text = "\n".join(sorted(model.frozen)) + model.moved
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) if text else 0)


def _not_finite(plan: StepPlan, runs: Sequence[PhaseRun]) -> Iterator[str]:
    """Each micro-batch of this rank whose loss is not finite, with its sequences; a tensor parallel group says it once.

    Phases are named where there are more than one.
    """
    for number, (phase, run) in enumerate(zip(plan.phases, runs, strict=True)):
        if run.runtime.place.tp_rank != 0:
            continue
        where = f"pipeline {run.runtime.pipeline_index}" + (f" of phase {number}" if len(runs) > 1 else "")
        microbatches = phase.pipelines[run.runtime.pipeline_index].microbatches
        for index, loss in run.losses.items():
            if not math.isfinite(loss):
                ids = ", ".join(str(plan.sequence_ids[span.sequence]) for span in microbatches[index].spans[:16])
                yield f"{where}, micro-batch {index}: loss {float(loss)}, sequences {ids}"


_MOST_SCALE = 2.0**100
_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class Precision(Protocol):
    """The methods of a DeepSpeed engine that give the settings of its block "fp16"."""

    types: Any  # `DataTypes`, of which the type that the model is computed in is read

    def loss_scale(self) -> float: ...
    def dynamic_loss_scale_args(self) -> dict[str, Any]: ...


class LossScale:
    """The factor on the loss that keeps FP16 gradients from vanishing; 1 for every other type.

    A dynamic scale follows DeepSpeed's rule: a step that overflows is skipped and, after as many of them as
    `hysteresis` says, halves the scale; `loss_scale_window` steps without overflow double it.
    """

    def __init__(self, engine: Precision):
        half = engine.types.compute == torch.float16
        self.dynamic = half and engine.loss_scale() == 0
        self._scaler: Any = CreateLossScaler(
            engine.types.compute, engine.loss_scale() or 1.0, self.dynamic, engine.dynamic_loss_scale_args()
        )

    @property
    def value(self) -> float:
        """The scale of the coming step."""
        return float(self._scaler.cur_scale)

    def unscale(self, grads: Iterable[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        # FP16 holds nothing below 6e-8, so a gradient of 1e-9 would become 0. With a scale of 65536 it is carried as
        # 6.6e-5, and divided here, where gradients are FP32.
        if self.value != 1.0:
            for grad in grads:
                grad.mul_(1.0 / self.value)

    def update(self, *, overflow: bool) -> None:
        """Record whether a step overflowed on any rank. NumericsError if it did even with the least scale."""
        try:
            self._scaler.update_scale(overflow)
        except Exception as error:  # DeepSpeed raises nothing more specific
            raise NumericsError(
                f"the gradient overflows FP16 even at the least loss scale, {self.value:g}: losses or gradients are "
                "not finite whatever the scale; lower the learning rate, look at the data, or use bf16"
            ) from error

    def state_dict(self) -> dict[str, Any] | None:
        """Numbers to save; None for a scale that never changes."""
        return {key: getattr(self._scaler, key) for key in _STATE} if self.dynamic else None

    def check_state(self, state: Mapping[str, Any] | None) -> None:
        """CheckpointError unless `load_state_dict` can go on with these numbers; None is no state of this kind."""
        if state is None or not self.dynamic:
            return
        least = {"cur_scale": 0, "cur_iter": 0, "last_overflow_iter": -1, "cur_hysteresis": 1}
        wrong = [f"the keys are {', '.join(state)[:200]}"] if state.keys() != least.keys() else []
        wrong = wrong or [
            f"{key} is {str(state[key])[:40]}" for key in _STATE if not _fits(key, state[key], least[key])
        ]
        if wrong:
            raise CheckpointError(f"the saved loss scale is damaged: {wrong[0]}; use another tag")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with saved numbers. A fixed scale keeps the config's value."""
        if self.dynamic:
            for key in _STATE:
                setattr(self._scaler, key, type(getattr(self._scaler, key))(state[key]))


def _fits(key: str, value: Any, least: int) -> bool:
    """Whether a number can be that of a scaler: a scale above 0, or a count."""
    if key == "cur_scale":
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _MOST_SCALE
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value % 1 == 0 and least <= value < 2**48
