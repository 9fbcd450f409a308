"""The user's losses of log-probabilities, of values and of whole sequences: checked, and turned into what tokens count.

[Note: losses of log-probabilities]
A loss is called with the log-probabilities and entropies of some tokens and their fields. One that treats each token
alone gives one number a token. It is called on the last stages, for the tokens that each holds, beside others that
count nothing; so before a step it is tried on tokens of the step's own, with drawn log-probabilities, in one piece, in
several and in another order, and watched as a loss of logits is [Note: losses that are tried].

One that mixes tokens, of a sequence or of a group of sequences, says so. Then the step runs twice, as for a loss of
whole sequences [Note: losses of whole sequences], but with a number for each token: forward only, to learn all
log-probabilities and entropies; the loss is called once on each rank, with those of all targets that it has handed in;
its gradients by them are plain numbers, by which the tokens count in a second run.

A loss of values is called with these in place of log-probabilities and entropies; all else is the same.

[Note: losses of whole sequences]
A loss of pairs or groups (DPO, ranking, policy gradients) is a function L of the sums s_i of several sequences' token
losses. Its gradient is the sum over i of dL/ds_i times the gradient of s_i, and dL/ds_i are plain numbers once all sums
are known. So a step runs twice: forward only, to learn the sums; then as ever, the tokens of sequence i counting
dL/ds_i times. A pair with the sums 12 and 15 and the loss softplus(s_0 - s_1 + 2), which is 0.31: sigmoid(-1) is 0.27,
so the tokens of the first count 0.27 and those of the second -0.27.

The sequences of a pair need not meet for that. They run where the plan puts them, also in slices, and a group may be
as large as what one rank hands in. The price is one more forward, about a third of the computing of a step.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ds_hydra.data.columns import IGNORE_INDEX
from ds_hydra.data.tokens import Float64Array, TokenSequence
from ds_hydra.engine.own_loss import Watch, names_of, refuse_leaves
from ds_hydra.pipe.loss import CANDIDATES, LOG_PROB, Objective, ScoreLoss
from ds_hydra.pipe.rows import SEQUENCE, TEMPERATURE, Field, FieldLayout
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.told import told_with_place

FORM = (
    "a loss of log-probabilities must be a function of log_probs (T,), entropy (T,) and fields that returns the loss "
    "of each token, (T,)"
)
FORM_OF_VALUES = (
    "a loss of values must be a function of values (T,) and fields that returns the loss of each token, (T,)"
)
_TOKENS = 64
_NEAR = 1e-9


class LossRequest(NamedTuple):
    """What a script asks of a part of a step."""

    loss: ScoreLoss
    mixes: bool
    candidates: str
    normaliser: float | str  # a number, or what is counted: "tokens", "sequences"; of a loss that mixes, "losses"
    watched: bool = True  # for what it reads beside its arguments; a trainer's whole loss computes references, metrics
    valued: bool = False  # whether it is of values

    @classmethod
    def of(cls, loss: Any, normaliser: float | None, mixes_tokens: bool | None, *, valued: bool = False) -> LossRequest:
        """What the arguments say, and where they say nothing what the loss says of itself; `valued`: of a model of
        values. ConfigError for what is no loss, and for another normaliser."""
        if not callable(loss):
            raise ConfigError(f"{_form(valued)}, but is a {type(loss).__name__}")
        mixes = getattr(loss, "mixes_tokens", False) if mixes_tokens is None else mixes_tokens
        if not isinstance(mixes, bool):
            raise ConfigError(f"mixes_tokens says whether a loss looks at other tokens: True or False, not {mixes!r}")
        candidates = str(getattr(loss, "candidates", ""))
        if mixes and candidates:
            raise ConfigError("a loss that mixes tokens cannot have candidates: treat each token alone")
        if valued and candidates:
            raise ConfigError(f"the loss wants log-probabilities of {candidates!r}, but the model gives values alone")
        counted = "losses" if mixes else str(getattr(loss, "normaliser", "tokens"))
        if counted not in ("losses", "tokens", "sequences"):
            raise ConfigError(f'the normaliser of a loss must be "tokens" or "sequences", but is {counted!r}')
        divisor = counted if normaliser is None else checked_normaliser(normaliser)
        return cls(loss, mixes, candidates, divisor, bool(getattr(loss, "watched", True)) or not mixes, valued)

    def __str__(self) -> str:
        plain = getattr(self.loss, "__qualname__", None) or type(self.loss).__qualname__
        name = repr(self.loss) if is_dataclass(self.loss) else plain
        return f"{name} over {self.normaliser}{', which mixes tokens' if self.mixes else ''}"

    def objective(self, layout: FieldLayout) -> Objective:
        """On tokens with these fields. ConfigError where they lack the candidates."""
        found = layout.find(self.candidates)
        if self.candidates and (found is None or not found[0].width or not found[0].whole):
            raise ConfigError(
                f"the loss wants the log-probabilities of the words in the field {self.candidates!r}, k whole numbers "
                f"a token, but the fields are {', '.join(field.name for field in layout.fields)}: give it in every item"
            )
        if self.valued and layout.find(TEMPERATURE):
            raise ConfigError("a temperature divides logits, and the model gives values: leave it out")
        return Objective(self.loss, layout, self.candidates, self.valued)


def _form(valued: bool) -> str:
    return FORM_OF_VALUES if valued else FORM


def checked_normaliser(normaliser: Any) -> float:
    """ConfigError for what no loss can be divided by."""
    try:
        number = float(normaliser)
    except (TypeError, ValueError, RuntimeError):
        number = float("nan")
    if not 0 < number < float("inf"):
        raise ConfigError(f"normaliser must be a positive number, equal on all ranks, but is {normaliser!r}")
    return number


def check_objective(
    asked: LossRequest,
    sequences: Sequence[TokenSequence],
    layout: FieldLayout,
    vocabulary: int | None,
    model: nn.Module | None,
) -> None:
    """Try a loss on sequences of this rank [Note: losses of log-probabilities]; `model` is what it is to train.

    ConfigError that says what it returned, read or looked at beside the token.
    """
    objective = asked.objective(layout)
    if not sequences:
        return
    known = [one.labels != IGNORE_INDEX for one in sequences]
    numbers = np.concatenate([fields_of(one)[of] for one, of in zip(sequences, known, strict=True)])
    _check_words(objective, numbers, vocabulary)
    if asked.mixes or not len(numbers):
        return
    some = np.unique(np.linspace(0, len(numbers) - 1, _TOKENS).astype(np.int64))
    with released_on_meta():
        _try(objective, torch.from_numpy(numbers[some].copy()), model)


def released_on_meta() -> AbstractContextManager[None]:
    """Within it, the model's released parameters have no values, which would take all ranks to fetch."""
    return torch._C.DisableTorchFunctionSubclass()  # type: ignore[no-any-return]


def _check_words(objective: Objective, numbers: Float64Array, vocabulary: int | None) -> None:
    found = objective.layout.find(objective.candidates)
    if found is None or not len(numbers):
        return
    words = numbers[:, found[1]]
    if words.min() < 0 or (vocabulary is not None and words.max() >= vocabulary):
        worst = words.min() if words.min() < 0 else words.max()
        raise ConfigError(
            f"the field {objective.candidates!r} holds the word {worst:g}, which the model does not have (vocabulary "
            f"of {vocabulary}): use ids of the model's own tokenizer"
        )


def _try(objective: Objective, numbers: Tensor, model: nn.Module | None) -> None:
    generator = torch.Generator().manual_seed(0)
    count, names = len(numbers), names_of(model)
    scores = torch.rand(count, objective.num_scores, generator=generator, dtype=torch.float64) * 3
    if objective.valued:
        scores[1::2] *= -1
    else:
        scores[:, LOG_PROB] *= -1
        scores[:, CANDIDATES:] *= -1
    own = _run(objective, scores, numbers, names)
    # Fields that happen to be alike may hide that tokens are mixed: a mean of equal numbers is each of them.
    moved = numbers.clone()
    for field, columns in objective.layout.places():
        if not field.whole:
            drawn = torch.rand(moved[:, columns].shape, generator=generator, dtype=torch.float64)
            moved[:, columns] *= 0.5 + drawn
    variants = [(own, numbers)]
    with contextlib.suppress(ConfigError):  # a loss may refuse numbers that it would never be given
        variants.append((_run(objective, scores, moved, names), moved))
    for (losses, gradients), given in variants:
        for what, tokens in _others(count):
            found = _run(objective, scores[tokens], given[tokens], names)
            for name, right, tried in (("loss", losses, found[0]), ("gradient", gradients, found[1])):
                limit = _NEAR * float(right.abs().nan_to_num(0, 0, 0).max())
                if not torch.allclose(right[tokens], tried, rtol=_NEAR, atol=limit, equal_nan=True):
                    off = (right[tokens] - tried).abs().reshape(len(tokens), -1).amax(dim=-1)
                    at = int(off.nan_to_num(torch.inf).argmax())
                    both = [float(one[at].flatten()[0]) for one in (right[tokens], tried)]
                    raise ConfigError(
                        f"{_form(objective.valued)} made of that token alone, but the {name} of one token depends on "
                        f"others: it is {both[0]:.6g} beside {count - 1} others and {both[1]:.6g} {what}. A loss that "
                        "mixes tokens has to say so: pass mixes_tokens=True, or give it that attribute. A mean over "
                        "tokens is what the normaliser is for"
                    )


def _others(count: int) -> Iterator[tuple[str, Tensor]]:
    """How the tokens are tried otherwise: in words, and which stand in the row."""
    start = 0
    for length in (1, max(1, count // 3), count):
        stop = min(count, start + length)
        if 0 < stop - start < count:
            yield f"beside {stop - start - 1} of them", torch.arange(start, stop)
        start = stop
    if count > 1:
        yield "in another order", torch.randperm(count, generator=torch.Generator().manual_seed(1))


def _run(objective: Objective, scores: Tensor, numbers: Tensor, names: dict[int, str]) -> tuple[Tensor, Tensor]:
    """Losses (n,) and their gradients by the scores, (n, num_scores)."""
    leaf, form = scores.clone().requires_grad_(), _form(objective.valued)
    given, watch = leaf * 1, Watch(names, form)
    try:
        with torch.enable_grad(), watch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a deviation of one number, say: no step has asked for it
            losses = objective.losses(given, numbers.clone())
    except Exception as error:
        watch.refuse()
        raise ConfigError(f"{form}; for {len(scores)} tokens it raised {told_with_place(error)}") from error
    watch.refuse()
    check_returned(losses, leaf, form, len(scores))
    if not torch.equal(given.detach(), scores):
        raise ConfigError(f"{form}, but it changes what it is given: let it work on copies")
    refuse_leaves(losses, leaf, lambda: names, f"a loss of {'values' if objective.valued else 'log-probabilities'}")
    (gradients,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach().double(), gradients.detach()


def check_returned(losses: Any, leaf: Tensor, form: str, count: int | None) -> None:
    """ConfigError unless there are losses (n,) with a gradient, `count` of them where that is known."""
    if not isinstance(losses, Tensor) or losses.dim() != 1 or not len(losses) or (count or len(losses)) != len(losses):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ConfigError(f"{form}, but for {len(leaf)} tokens it returned {shape}: leave means and sums to the step")
    if not losses.requires_grad:
        raise ConfigError(f"{form}, but what it returned has no gradient: compute it from what it is given by torch")


def fields_of(sequence: TokenSequence) -> Float64Array:
    """The fields of a sequence that was read with them, (tokens, columns)."""
    assert sequence.fields is not None, "they were read"
    return sequence.fields


MIXING_FORM = (
    "a loss that mixes tokens must be a function of the log_probs (T,) and entropy (T,), or the values (T,), and the "
    "fields of all targets that a rank has handed in that returns losses (n,), whose sum over the normaliser is "
    "trained on"
)
_GRADIENTS = "gradients of the loss by the scores"


class Mixed(NamedTuple):
    """What a loss that mixes tokens makes of those of one rank."""

    total: float  # of its losses
    num_losses: int
    sequences: list[TokenSequence]  # with what their scores count, in as many more columns


def counted(sequence: TokenSequence, beside: Float64Array) -> TokenSequence:
    """A sequence with what its scores count, (tokens, num_scores), behind its fields."""
    return sequence._replace(fields=np.column_stack([fields_of(sequence), beside]))


def mix(
    asked: LossRequest,
    layout: FieldLayout,
    sequences: Sequence[TokenSequence],
    scores: Sequence[Float64Array],
    model: nn.Module | None,
    device: torch.device,
) -> Mixed:
    """Call a loss that mixes tokens on the scores of this rank's sequences, (tokens, num_scores) each. ConfigError for
    what it must not return or read."""
    known = [one.labels != IGNORE_INDEX for one in sequences]
    numbers = np.concatenate([fields_of(one)[of] for one, of in zip(sequences, known, strict=True)])
    numbers = np.column_stack([numbers, np.repeat(np.arange(len(known)), [int(of.sum()) for of in known])])
    found = np.concatenate([one[of] for one, of in zip(scores, known, strict=True)])
    leaf = torch.from_numpy(found).to(device).requires_grad_()
    objective = Objective(asked.loss, layout.and_also(Field(SEQUENCE, 0, True)), valued=asked.valued)
    with torch.enable_grad(), released_on_meta():
        watch = Watch(names_of(model), MIXING_FORM)
        try:
            with watch if asked.watched else contextlib.nullcontext():
                losses = objective.losses(leaf, torch.from_numpy(numbers).to(device))
        except Exception:
            watch.refuse()  # which says more than an error by what it has read
            raise
        check_returned(losses, leaf, MIXING_FORM, None)
        refuse_leaves(losses, leaf, lambda: names_of(model), "a loss that mixes tokens")
        (gradients,) = torch.autograd.grad(losses.double().sum(), leaf)
    counts = iter(np.split(gradients.cpu().numpy(), np.cumsum([int(of.sum()) for of in known])[:-1]))
    weighed = []
    for sequence, of in zip(sequences, known, strict=True):
        beside: Float64Array = np.zeros((len(of), objective.num_scores))
        beside[of] = next(counts)
        weighed.append(counted(sequence, beside))
    return Mixed(float(losses.detach().double().sum()), len(losses), weighed)


def by_gradients(layout: FieldLayout, *, valued: bool = False, of_logits: int = 0) -> Objective:
    """The second run of a loss whose gradients by the scores of its tokens are known: they stand behind the fields."""
    behind = Field(_GRADIENTS, of_logits or (1 if valued else 2), False)
    return Objective(_by_gradients, layout.and_also(behind), valued=valued, of_logits=of_logits)


def _by_gradients(*given: Any) -> Tensor:
    *scores, fields = given
    of_tokens = scores[0] if scores[0].dim() > 1 else torch.stack(scores, dim=-1)
    return (fields[_GRADIENTS] * of_tokens).sum(dim=-1)  # type: ignore[no-any-return]


SequenceLoss = Callable[[Tensor], Tensor]
"""The summed token losses (n,), FP64, of the sequences that a rank has handed in, in that order, in; the loss of each
of its groups, (groups,), out. The step's loss is the mean over the groups of all ranks."""


class Weighed(NamedTuple):
    """What a function makes of the sums of one rank."""

    total: float  # of its groups' losses
    num_groups: int
    gradients: Tensor  # (n,) of the total, by the sums


def weigh(function: SequenceLoss, sums: Tensor, model: nn.Module | None = None) -> Weighed:
    """Call a loss of whole sequences on the sums (n,) of one rank. ConfigError for what it must not return, and for
    tensors beside the sums that want a gradient; those of the `model` are told by name."""
    leaf = sums.detach().clone().requires_grad_()
    with torch.enable_grad():
        form = (
            "sequence_loss must map the losses of a rank's sequences (n,) to the loss of each of its groups, (groups,)"
        )
        losses = function(leaf)
        if not isinstance(losses, Tensor) or losses.dim() != 1 or not len(losses):
            what = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise ConfigError(
                f"{form}, but returned {what}: leave their mean to the step, which takes that of all ranks"
            )
        if not losses.requires_grad:
            raise ConfigError(f"{form}, but what it returned has no gradient: compute it from the losses by torch")
        refuse_leaves(losses, leaf, lambda: names_of(model), "sequence_loss")
        total = losses.sum()
        (gradients,) = torch.autograd.grad(total, leaf)
    return Weighed(total.item(), len(losses), gradients)
