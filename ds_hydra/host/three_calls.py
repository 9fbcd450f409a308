"""DeepSpeed's loop of three calls, engine(batch), engine.backward(loss), engine.step(), over whole planned steps.

[Note: three calls]
A step can only be planned when all its batches are there. So `engine(batch)` collects, `backward` says what the batch's
loss counts, and the `step` at the gradient accumulation boundary plans and runs all that was collected since the last
one, on all ranks, as one `train_batch`. With 2 ranks and gradient_accumulation_steps 2, four batches make an update.

What their losses count follows hydra.loss_norm. Let the four batches have 10, 30, 5 and 5 targets:

  "token"   each target counts 1/50, as with train_batch: the mean over all targets
  "batch"   each batch counts 1/4, each target of the first 1/40 and each of the third 1/20: the mean of the batches'
            means, as DeepSpeed's own loop computes it (backward() divides by gradient_accumulation_steps, and the
            gradients are averaged over the ranks). It does so as well in an update of fewer or more batches: of two
            batches each still counts 1/4, so that the gradient is half of their mean

The two agree where all updates have as many batches as configured, of equally many targets. A batch without any has no
mean: under "batch" it is refused, on all ranks. A factor that the script puts on a loss multiplies what its batch
counts: with `loss / 2` the first batch's targets count half of this. `backward(loss, scale_wrt_gas=False)` says that
the script has divided by gradient_accumulation_steps itself, as Accelerate does.

[Note: losses read early]
A script that reads its loss before the step that its batch belongs to (`total += loss.item()` behind `engine(batch)`)
needs the loss of one batch, which all ranks compute together. Batches that nobody looks at are collected until the
step, and calls exchange nothing [Note: three calls]. So which of the two a script does must be found out:

  first step    each `engine(batch)` begins with a round, in which the batches of all ranks run forward: a read finds
                its number there. Who is at another call serves rounds until all ranks are
  then          where no rank has read a loss before its step: as ever, without a message more. Else rounds go on, and
                each batch runs at its call
  later         who reads a loss for the first time waits for the next call of all others, and the rounds begin there

What is read is a plain tensor in torch's own graph, `counted`. So any function of it works, such as its square, a
clamp, or a skip by its size, and the gradient that arrives is the factor by which its batch counts in the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ds_hydra.host.devices import refuse_modes, tell_modes
from ds_hydra.host.own_updates import refuse_dropping
from ds_hydra.host.released import needs_no_value
from ds_hydra.host.settings import refuse_num_items
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)


_COPIES = frozenset((
    "clone", "detach", "contiguous", "mean", "sum", "squeeze", "unsqueeze", "reshape", "view", "flatten",
    "to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type_as",
))  # fmt: skip
"""Functions of one number whose result is that number, maybe in another type, shape or place."""

_SIGNS = {"add": 1.0, "sub": -1.0, "subtract": -1.0, "rsub": -1.0}
_FACTORS = {"mul": 1, "multiply": 1, "div": -1, "divide": -1, "true_divide": -1, "truediv": -1}  # powers of the factor


_HAS_RUN = "engine.backward(): the step of this loss has run already: call engine(batch) again for another one"
_SECOND = (
    "engine.backward() was given a loss of the same batch for the second time: add the losses up and give their sum, "
    "or say engine.backward(loss, retain_graph=True) the first time"
)
_WAITING = "_ds_hydra_loss"  # attribute of a plain tensor to which a pending loss was added


class _Counted(torch.autograd.Function):
    """The value itself; its gradient goes to a function."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, count: Callable[[Tensor], None]) -> Tensor:
        ctx.count = count
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.count(grad)
        return None, None, None


def counted(value: Tensor, count: Callable[[Tensor], None]) -> Tensor:
    """A tensor of this value, with a gradient that `count` is called with in each backward that comes to it."""
    with torch.enable_grad():
        found: Tensor = _Counted.apply(torch.zeros((), requires_grad=True), value, count)
    return found


@dataclass(eq=False)
class Collected:
    """A batch that was handed to `engine(batch)`, and what has become of it."""

    batch: Any
    backward: Callable[..., Any] = field(repr=False)  # the engine's
    factor: float | None = None  # what its loss counts; None: there was no backward() yet
    is_freed: bool = False  # a plain loss has no graph any more after a backward() that does not retain it
    value: float | None = None  # its mean loss, once its step has run
    waiting: list[PendingLoss] = field(default_factory=list, repr=False)  # for the value
    num_items: Any = None  # by which a plain model would divide its loss, as Trainer hands it on
    read: Callable[[Collected], None] | None = field(default=None, repr=False)  # finds its loss before its step
    early: Tensor | None = field(default=None, repr=False)  # () its loss before its step, where it is known
    read_logits: Callable[[Collected], Tensor] | None = field(default=None, repr=False)
    logits: Tensor | None = field(default=None, repr=False)  # (rows, length, words), where they were handed out
    by_logits: Tensor | None = field(default=None, repr=False)  # what they count: the gradient of what was made of them

    def now(self) -> Tensor:
        """Its loss before its step, (), with a gradient that says what it counts [Note: losses read early].
        RuntimeError where nobody computes it."""
        if self.read is not None:
            self.read(self)
        if self.early is None:
            raise RuntimeError(
                "this loss is not computed yet: a step is planned from all its batches at once, and runs in the "
                "engine.step() that ends gradient accumulation. Read the loss after that call, or "
                "engine.last_step.loss; engine.eval() makes engine(batch) compute at once"
            )
        return self.early

    @property
    def is_trained(self) -> bool:
        """Whether some backward has come to it."""
        return self.factor is not None or self.by_logits is not None

    def settle(self, value: float) -> None:
        """The step has run: every loss that was made of this one gets its number."""
        self.value, self.batch = value, None
        waiting, self.waiting = {id(loss): loss for loss in self.waiting}, []
        for loss in waiting.values():
            loss.fill()


@dataclass(frozen=True)
class Term:
    """A part of a loss: the loss of one batch times a factor, which `detach` leaves out of the backward."""

    entry: Collected
    factor: float
    has_gradient: bool = True

    def scaled(self, factor: float) -> Term:
        """Times a factor."""
        return Term(self.entry, self.factor * factor, self.has_gradient)

    def detached(self) -> Term:
        """The number alone."""
        return Term(self.entry, self.factor, has_gradient=False)


class PendingLoss(Tensor):
    """A scalar tensor made of the losses of collected batches: sum of factor * loss, plus a constant.

    It takes what scripts do with a loss before the step: `loss / n`, `loss += other`, `loss.detach()`,
    `loss.backward()`. Its value, the mean over its batch's targets as the model's own forward gives it, is known after
    the `engine.step()` at the gradient accumulation boundary; from then on it is a tensor in FP32 on the engine's
    device in all that is done with it, collectives and functions that write to it among them. Where it is read
    earlier, or a function of it is not linear, it is a tensor of torch's own from there on [Note: losses read early].

    It also stands for the output that it came with: `.loss` and `[0]` are itself, and `.logits` is an error that says
    how to train with a loss of one's own.
    """

    terms: tuple[Term, ...]  # of batches whose step has not run
    _plain: Tensor
    _constant: float | Tensor
    _target: Tensor | None  # a plain tensor that takes the value
    _find_logits: Callable[[], Tensor] | None = None  # of a batch that was evaluated
    _found: Tensor | None = None  # its logits, once they were asked for

    @staticmethod
    def __new__(cls, terms: Sequence[Term], constant: float | Tensor = 0.0, like: Tensor | None = None) -> PendingLoss:
        made = torch.full((), torch.nan) if like is None else torch.full_like(like, torch.nan)
        loss = Tensor._make_subclass(cls, made)
        loss._plain, loss._target = made, None
        loss._set(terms, constant)
        return loss

    def _set(self, terms: Sequence[Term], constant: float | Tensor) -> None:
        self.terms, self._constant = tuple(terms), constant
        for term in terms:
            if term.entry.value is None:
                term.entry.waiting.append(self)
        self.fill()

    def fill(self) -> None:
        """Take the value, if the steps of all terms have run."""
        # What is known is added up at once: a script that sums its losses over an epoch keeps no batch alive.
        self._constant = sum(
            (term.factor * term.entry.value for term in self.terms if term.entry.value is not None), self._constant
        )
        self.terms = tuple(term for term in self.terms if term.entry.value is None)
        if self.is_known:
            value = self._constant
            self.tensor().fill_(value.to(self.tensor().device) if isinstance(value, Tensor) else value)
            self._constant = 0.0
            self._write(self.tensor())

    def write_into(self, target: Tensor) -> None:
        """A script has added the loss to a tensor of its own, which is NaN until the value is there."""
        if target._base is not None and target._base.numel() > 1:
            target.copy_(_now(self).detach())  # what else is written to the same memory could not be told from this
            return
        if (earlier := _written_into(target)) is not None:
            earlier._target = None
        if type(target) is Tensor:
            target.__class__ = _Waiting
        with torch._C.DisableTorchFunctionSubclass():
            target.fill_(torch.nan)
        self._target = target
        setattr(target, _WAITING, self)

    def _write(self, value: Tensor | None) -> None:
        """Give the tensor that waits for this loss the value, or let go of it."""
        target, self._target = self._target, None
        if target is None:
            return
        if type(target) is _Waiting:
            target.__class__ = Tensor  # type: ignore[assignment]
        if value is not None:
            target.copy_(value)

    @property
    def is_known(self) -> bool:
        """Whether the steps that it belongs to have run."""
        return not self.terms

    def tensor(self) -> Tensor:
        """The plain tensor that shares its memory; NaN before the step."""
        return self._plain

    def backward(
        self, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        """`engine.backward(loss)`, times `gradient`."""
        if self.is_known:
            raise RuntimeError("backward() of a loss whose step has run already: call engine(batch) for another one")
        if create_graph or inputs is not None:
            raise ConfigError(
                "loss.backward(create_graph=..., inputs=...): gradients are computed in engine.step(), for the whole "
                "model; leave these out"
            )
        loss = self if gradient is None else self * gradient
        self.terms[0].entry.backward(loss, retain_graph=bool(retain_graph))

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return any(term.has_gradient for term in self.terms)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if self.requires_grad and not value:
            raise RuntimeError("a loss of engine(batch) keeps its gradient: take loss.detach() for the number alone")

    def requires_grad_(self, requires_grad: bool = True) -> PendingLoss:
        """It does so until its step has run, and has nothing to give a gradient to afterwards."""
        self.requires_grad = requires_grad
        return self

    def detach_(self) -> PendingLoss:
        """From now on the number alone."""
        self.terms = tuple(term.detached() for term in self.terms)
        return self

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @property
    def loss(self) -> Tensor:
        return self.tensor() if self.is_known else self

    @property
    def logits(self) -> Tensor:
        """Of this rank's batch, (rows, length, words), with a gradient in training [Note: logits of batches]. In an
        evaluation all ranks must ask for them."""
        if self._find_logits is not None:
            self._found = self._find_logits() if self._found is None else self._found
            return self._found
        entry = self.terms[0].entry if len(self.terms) == 1 else None
        if entry is None or entry.read_logits is None:
            raise ConfigError(
                "logits are handed out before the step of their batch alone, and while training: for a loss of "
                "log-probabilities, as policies have it, call engine.forward_backward(batch, loss) and "
                "engine.optimizer_step(); for a loss of each token pass loss_fn(logits, labels) to "
                "ds_hydra.initialize(); for metrics call engine.evaluate(dataset) or engine.predict(batch, function)"
            )
        return entry.read_logits(entry)

    def _part(self, key: Any) -> Any:
        """What an output has under a key or at a place."""
        if isinstance(key, slice):
            return (self.loss, self.logits)[key]
        return self.loss if key in (0, "loss") else self.logits

    def get(self, key: str, default: Any = None) -> Any:
        """What an output has under a name, or `default`, as of transformers' outputs."""
        return self._part(key) if key in ("loss", "logits") else default

    def to_tuple(self) -> tuple[Tensor, Tensor]:
        """The loss and the logits."""
        return self.loss, self.logits

    def __iter__(self) -> Any:
        return iter(self.to_tuple())  # of what unpacks an output

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.tensor()) if self.is_known else "PendingLoss(pending)"

    def __str__(self) -> str:
        return str(_now(self)) if self._is_computed else "PendingLoss(pending)"

    def __format__(self, spec: str) -> str:
        return format(_now(self), spec) if self._is_computed else "pending"

    @property
    def _is_computed(self) -> bool:
        """Whether somebody computes it when it is read."""
        return all(term.entry.read is not None for term in self.terms)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _now(self).detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return _now(self).detach().clone()

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        # No method of the class stands for these: torch.tensor() would take its losses for sequences.
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "__getitem__" and isinstance(args[0], cls) and isinstance(args[1], int | str | slice):
            return args[0]._part(args[1])
        if name == "__contains__" and isinstance(args[0], cls) and isinstance(args[1], str):
            known = args[0]._find_logits is not None or all(one.entry.read_logits for one in args[0].terms)
            return args[1] == "loss" or (args[1] == "logits" and known)
        losses = [value for value in tree_leaves((args, kwargs)) if isinstance(value, PendingLoss)]
        unknown = [loss for loss in losses if not loss.is_known]
        if unknown and (len(unknown) > 1 or unknown[0] is not args[0] or not needs_no_value(function)):
            return _of_pending(name, function, args, kwargs)
        plain = {id(loss): loss.tensor() for loss in losses}
        found = function(*tree_map(lambda value: plain.get(id(value), value), args),
                         **tree_map(lambda value: plain.get(id(value), value), kwargs))  # fmt: skip
        # What writes to a loss returns that loss.
        return next((loss for loss in losses if found is plain[id(loss)]), found)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        # For whoever reads the number past __torch_function__, as torch.tensor(loss) does.
        args, kwargs = tree_map(
            lambda value: _now(value).detach() if isinstance(value, PendingLoss) else value, (args, kwargs or {})
        )
        return function(*args, **kwargs)


class _Waiting(Tensor):
    """A tensor of the script's to which a loss was added before its step: whatever reads it reads that loss."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        if any(isinstance(value, PendingLoss) for value in given) and getattr(function, "__name__", "") != "copy_":
            return PendingLoss.__torch_function__(function, types, args, kwargs)
        overwrites = getattr(function, "__name__", "") in ("zero_", "fill_", "copy_")
        for value in given if overwrites or not needs_no_value(function) else ():
            if isinstance(value, _Waiting) and (loss := _written_into(value)) is not None:
                loss._write(None if overwrites and value is args[0] else _now(loss).detach())
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "Tensor(pending)"


def _written_into(target: Tensor) -> PendingLoss | None:
    """The pending loss that a plain tensor waits for."""
    loss: PendingLoss | None = getattr(target, _WAITING, None)
    return loss if loss is not None and loss._target is target else None


def _now(loss: PendingLoss, *, reads: bool = True) -> Tensor:
    """What it is before its step too, a plain tensor; without `reads` the script does not ask for it."""
    if loss.is_known:
        return loss.tensor()
    with torch.enable_grad():
        found: Any = loss._constant
        for term in loss.terms:
            value = term.entry.now() if reads else term.entry.early
            assert value is not None, "it was read, or is there"
            found = found + term.factor * (value if term.has_gradient else value.detach())
        return found.to(loss.tensor()).reshape(loss.tensor().shape)  # type: ignore[no-any-return]


def _by_value(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A function of losses of which one at least must be read for it."""
    name = getattr(function, "__name__", "")
    if name.endswith("_") and not name.endswith("__") and args and _is_unknown(args[0]):
        raise RuntimeError(f"{name}() would write to a loss before its step: write loss = loss.{name.strip('_')}(...)")
    args, kwargs = tree_map(lambda value: _now(value) if isinstance(value, PendingLoss) else value, (args, kwargs))
    return function(*args, **kwargs)


def _is_unknown(value: Any) -> bool:
    return isinstance(value, PendingLoss) and not value.is_known


def _of_pending(name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function of numbers of which one at least is not known yet: linear ones give a pending loss."""
    first: Any = args[0] if args else None
    writes = name.endswith("_") and not name.endswith("__")
    core = name.strip("_")
    like: Tensor | None = None
    if (core in _SIGNS or core in _FACTORS) and any(map(_has_more, args)):
        return _by_value(function, args, kwargs)
    if isinstance(first, PendingLoss) and (name in _COPIES or (name == "__getitem__" and args[1] in (None, ...))):
        terms, constant, like = first.terms, first._constant, function(first.tensor(), *args[1:], **kwargs)
    elif core in ("neg", "negative") and len(args) == 1:
        terms, constant = _scaled(first, -1.0)
    elif core in _SIGNS and len(args) == 2 and set(kwargs) <= {"alpha"}:
        one, other = args[::-1] if core == "rsub" else args
        terms, constant = _sum(one, other, _SIGNS[core] * kwargs.get("alpha", 1))
    elif core in _FACTORS and len(args) == 2 and not kwargs:
        loss, number = args if isinstance(first, PendingLoss) and not first.is_known else args[::-1]
        if _is_unknown(number) or (_FACTORS[core] < 0 and loss is not first):
            return _by_value(function, args, kwargs)
        terms, constant = _scaled(loss, float(number) ** _FACTORS[core])
    else:
        return _by_value(function, args, kwargs)
    if name == "detach" or not torch.is_grad_enabled():
        terms = tuple(term.detached() for term in terms)
    if not writes:
        pending = (value.tensor() for value in args if isinstance(value, PendingLoss) and not value.is_known)
        return PendingLoss(terms, constant, next(pending) if like is None else like)
    if isinstance(first, PendingLoss):
        first._set(terms, constant)
        return first
    PendingLoss(terms, constant, first).write_into(first)
    return first


def _scaled(loss: PendingLoss, factor: float) -> tuple[tuple[Term, ...], float | Tensor]:
    return tuple(term.scaled(factor) for term in loss.terms), loss._constant * factor


def _sum(one: Any, other: Any, sign: float) -> tuple[tuple[Term, ...], float | Tensor]:
    (terms, constant), (others, added) = map(_parts, (one, other))
    return (*terms, *(term.scaled(sign) for term in others)), constant + sign * added


def _parts(value: Any) -> tuple[tuple[Term, ...], Any]:
    if isinstance(value, PendingLoss):
        return (value.terms, value._constant) if value.terms else ((), value.tensor().clone())
    if isinstance(value, Tensor) and (waiting := _written_into(value)) is not None:
        return waiting.terms, waiting._constant
    return (), value.detach().reshape(()).clone() if isinstance(value, Tensor) else float(value)


def _has_more(value: Any) -> bool:
    """Whether it is more than a number beside a loss: then the loss is read."""
    return isinstance(value, Tensor) and not isinstance(value, PendingLoss) and (
        value.requires_grad or value.numel() != 1)  # fmt: skip


_NOT_DATA = frozenset(("use_cache", "return_dict", "return_loss", "num_items_in_batch"))
"""Arguments of a Hugging Face model's forward that say nothing about what is trained on, or that "token" makes so."""


class ThreeCalls:
    """What a script hands in batch by batch for the coming step, and what its losses count [Note: three calls].

    Every rank must make the same calls; a rank may have no batch left for a step, as long as it calls `step`.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        device: torch.device,
        steps: Callable[[], int],
        dtype: torch.dtype = torch.float32,
    ):
        """`steps` gives gradient_accumulation_steps; losses are of this `dtype`."""
        self._config, self._steps = config, steps
        self._like = torch.zeros((), device=device, dtype=dtype)
        self._scale = 1.0  # on gradients that come to batches, in a backward that is under way
        self._reached: list[Collected] = []  # by it
        self.dtype, self.made = dtype, 0.0  # of losses; the sum of those that came to backward() before the step
        self._collected: list[Collected] = []
        self._calls = 0  # of step()
        self.boundary: bool | None = None  # as set by hand
        # Since eval(). A model that from_pretrained made is in evaluation mode from the start, and trains.
        self.evaluating = False
        self.shows_gradients = False  # whether a plain loop has gradients though the update is made, as within Trainer
        self.accumulates: int | None = None  # batches of each rank in an update, where its caller counts, as Trainer
        self.items_are_counted = False  # whether its caller compares num_items_in_batch with the step's targets

    def batch(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The batch of a call engine(...). ConfigError or RuntimeError where it can have no effect."""
        batch, num_items = _batch_of(inputs, kwargs), kwargs.get("num_items_in_batch")
        if num_items is not None and not self.items_are_counted:
            refuse_num_items(float(num_items))
        self.shows_gradients = False
        tell_modes("engine(batch)")
        if not self.evaluating:
            instead = "call engine.eval() before it, and engine.train() after it"
            refuse_modes("engine(batch)", instead, later=True)
        return batch

    def known(self, loss: float, find_logits: Callable[[], Tensor] | None = None) -> PendingLoss:
        """The loss of a batch that has run, and what finds its logits."""
        found = PendingLoss((), loss, self._like)
        found._find_logits = find_logits
        return found

    def collect(self, batch: Any, backward: Callable[..., Any], num_items: Any) -> Collected:
        """Keep a batch for the coming step; the `backward` of its loss is the engine's."""
        entry = Collected(_as_it_is(batch), backward, num_items=num_items)
        self._collected.append(entry)
        return entry

    def loss_of(self, entry: Collected) -> PendingLoss:
        """The loss of a batch."""
        return PendingLoss([Term(entry, 1.0)], like=self._like)

    def drop(self, entry: Collected) -> None:
        """Leave a batch out that cannot be trained on."""
        self._collected.remove(entry)

    @property
    def unread(self) -> list[Collected]:
        """Batches of the coming step whose losses are not known yet."""
        return [entry for entry in self._collected if entry.early is None]

    def found(self, entry: Collected, loss: float) -> None:
        """The loss of a batch is known before its step [Note: losses read early]."""
        entry.early = counted(torch.full_like(self._like, loss), partial(self._count, entry))

    @property
    def collected(self) -> list[Collected]:
        """Batches of the coming step."""
        return list(self._collected)

    def hand_out(self, entry: Collected, logits: Tensor) -> Tensor:
        """The logits of a batch, with a gradient that says what they count."""
        entry.logits = counted(logits.to(self._like), partial(self._count_logits, entry))
        return entry.logits

    def _count_logits(self, entry: Collected, gradient: Tensor) -> None:
        self._reach(entry)
        entry.by_logits = gradient * self._scale + (0.0 if entry.by_logits is None else entry.by_logits)

    def _reach(self, entry: Collected) -> None:
        if entry not in self._collected:
            raise RuntimeError(_HAS_RUN)
        if entry.is_freed:
            raise RuntimeError(_SECOND)
        self._reached.append(entry)

    def _count(self, entry: Collected, gradient: Tensor) -> None:
        """A backward of what a script has made of a batch has come to it."""
        self._reach(entry)
        entry.factor = float(gradient) * self._scale + (entry.factor or 0.0)

    def backward(self, loss: Any, *, retain_graph: bool, scale_wrt_gas: bool) -> Tensor:
        """Let a loss count in the coming step, with the factors that were put on it."""
        ours = isinstance(loss, PendingLoss)
        pending = ours and bool(loss.terms) and all(term.entry in self._collected for term in loss.terms)
        if self.evaluating and not pending:
            raise RuntimeError(
                "engine.backward() after engine.eval(), by which losses are there at once and nothing is trained on: "
                "call engine.train() before engine(batch)"
            )
        if not ours:
            return self._backward_of(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        if not pending:
            raise RuntimeError(_HAS_RUN)
        if not loss.requires_grad:
            raise RuntimeError("engine.backward() was given a loss without a gradient: give it before detach()")
        trained = [term for term in loss.terms if term.has_gradient]
        if any(term.entry.is_freed for term in trained):
            raise RuntimeError(_SECOND)
        accumulation = self.batches_of_update()
        if all(term.entry.early is not None for term in loss.terms):
            self.made += float(_now(loss, reads=False).detach()) * (1.0 if scale_wrt_gas else accumulation)
        for term in trained:
            whole = term.factor if scale_wrt_gas else term.factor * accumulation
            term.entry.factor = whole + (term.entry.factor or 0.0)
            term.entry.is_freed = not retain_graph
        return loss / accumulation if scale_wrt_gas else loss

    def _backward_of(self, loss: Any, *, retain_graph: bool, scale_wrt_gas: bool) -> Tensor:
        """`backward` of a tensor of torch's own: by its graph, which ends in losses that were read."""
        accumulation, self._reached = self.batches_of_update(), []
        self._scale = 1.0 if scale_wrt_gas else float(accumulation)
        try:
            if isinstance(loss, Tensor) and loss.requires_grad:
                loss.backward(retain_graph=retain_graph)
        finally:
            self._scale, reached, self._reached = 1.0, self._reached, []
        if not reached:
            raise ConfigError(
                f"engine.backward() was given a {type(loss).__name__} that is not a loss of engine(batch): make it of "
                "what engine(batch) returns"
            )
        for entry in reached:
            entry.is_freed = not retain_graph
        self.made += float(loss.detach()) * (1.0 if scale_wrt_gas else accumulation)
        return loss.detach() / accumulation if scale_wrt_gas else loss.detach()

    def taken(self) -> list[Collected] | None:
        """Count a call of step(): at the gradient accumulation boundary the batches to train on, elsewhere None."""
        at_boundary = self.at_boundary
        self._calls += 1
        if not at_boundary:
            return None
        entries, self._collected = self._collected, []
        trained = [entry for entry in entries if entry.is_trained]
        if len(trained) < len(entries):
            logger.warning(
                "%d of %d batches were given to engine() but their losses not to engine.backward(): they are not "
                "trained on", len(entries) - len(trained), len(entries),
            )  # fmt: skip
        return trained

    @property
    def at_boundary(self) -> bool:
        """Whether the coming step() makes an update."""
        if self.boundary is not None:
            return self.boundary
        if self._config.get("managed_gradient_accumulation") is False:
            return True
        return (self._calls + 1) % self._steps() == 0

    def batches_of_update(self) -> int:
        """Of each rank, by which DeepSpeed's loop divides losses."""
        return self.accumulates or self._steps()

    @property
    def wait(self) -> bool:
        """Whether some `backward` was called whose update has not been made."""
        return any(entry.is_trained for entry in self._collected)

    def refuse_dropping(self, call: str) -> None:
        """ConfigError where a call would drop gradients of collected batches."""
        if self.wait:
            refuse_dropping(call)


def _as_it_is(value: Any) -> Any:
    """A copy of what a script may write its next batch into, or change otherwise, before the step runs."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _as_it_is(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        numbers = bool(value) and isinstance(value[0], int)
        return list(value) if numbers else [_as_it_is(one) for one in value]
    return value.copy() if isinstance(value, np.ndarray) else value


def _batch_of(inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The one batch that `engine(...)` was called with."""
    data = {name: value for name, value in kwargs.items() if name not in _NOT_DATA}
    if len(inputs) + bool(data) != 1:
        raise ConfigError(
            f"engine() was given {len(inputs)} positional arguments and the keywords {sorted(data)}: give one batch, a "
            "mapping with input_ids, or its columns by keyword"
        )
    return inputs[0] if inputs else {name: value for name, value in data.items() if value is not None}
