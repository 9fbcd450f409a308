"""Tries a user's loss of tokens: ConfigError unless it gives a number for each token, of that token's logits alone.

[Note: losses that are tried]
Tokens of one sequence stand on several ranks, and on one rank in several blocks of logits, some of which are computed
again for the backward. So a loss must give each token the same number and the same gradient whatever stands beside it,
however often it is called and on whichever rank. That is tried: 64 tokens of few words at once, once more, in pieces,
in another order and at the head of a long row. While it runs all that torch computes is watched: a random number, a
message between ranks, or a tensor of the model that takes part would make another loss of it than in one process, where
the model's weights are at hand and each token is seen once.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hydra.pipe.loss import TokenLoss
from ds_hydra.pipe.model_plan import LOGITS_AT_ONCE
from ds_hydra.pipe.models.refusals import known_tokens
from ds_hydra.pipe.models.state import state_of
from ds_hydra.ranks.channel import Channel
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.told import Told, mark_told, told_with_place

_TOKENS = 64
_PIECES = (1, 7, 20, 36)
_LONG = 1 << 14  # tokens of the long row, at most; of large vocabularies as many as are ever handed in at once


class _Found(NamedTuple):
    """What a loss made of some tokens."""

    losses: Tensor  # (T,)
    gradients: Tensor  # (T, V) of the losses times what each counts


class _Tried(NamedTuple):
    """The tokens that a loss is tried on."""

    logits: Tensor  # (T, V)
    labels: Tensor  # (T,)
    counts: Tensor  # (T,) what each token's loss counts

    def pick(self, tokens: Tensor, scale: float = 1.0) -> _Tried:
        return _Tried(self.logits[tokens], self.labels[tokens], self.counts[tokens] * scale)


def try_loss(loss_fn: TokenLoss | None, model: nn.Module, device: torch.device, compute: torch.dtype) -> Tensor:
    """`check_token_loss` of the loss of a job that computes in the type `compute`; zeros (64,) where it has none."""
    if loss_fn is None:
        return torch.zeros(_TOKENS, dtype=torch.float64)
    wide = torch.float64 if compute == torch.float64 else torch.float32
    return check_token_loss(loss_fn, known_tokens(model) or 2, device, model=model, dtype=wide)


def same_on_all(channel: Channel, losses: Tensor) -> None:
    """ConfigError on all ranks if the losses (64,) of one of them are others than rank 0's. Every rank must call it."""
    rows = channel.rows(losses)
    for rank, row in enumerate(rows):
        if not torch.allclose(row, rows[0], rtol=1e-4, atol=1e-4):
            at = int((row - rows[0]).abs().argmax())
            error = ConfigError(
                f"loss_fn gives {float(rows[0][at]):.6g} on rank 0 but {float(row[at]):.6g} on rank {rank} for the "
                "same token: pass the same function on all ranks, and let it not depend on the rank"
            )
            raise mark_told(error, Told(rank, f"ConfigError: {error}", here=True))


def check_token_loss(
    loss_fn: TokenLoss,
    vocabulary: int,
    device: torch.device | None = None,
    *,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Try a loss on tokens of a `vocabulary` [Note: losses that are tried]; returns the losses (64,) that it gave.

    `model` is what it is to train, whose weights it must not read, and `dtype` the type of the logits in training.
    ConfigError that says what the loss returned, read or looked at beside the token.
    """
    tokens = _drawn(vocabulary, device, dtype)
    names = names_of(model)
    everything = torch.arange(_TOKENS, device=device)

    def run(picked: _Tried) -> _Found:
        return _run(loss_fn, picked, names)

    first = run(tokens.pick(everything))
    if not torch.isfinite(first.losses).all() or not torch.isfinite(first.gradients).all():
        at = int((~torch.isfinite(first.losses) | ~torch.isfinite(first.gradients).all(dim=-1)).nonzero()[0])
        label = int(tokens.labels[at])
        hint = " (it stands for every label of -100 too)" if label == 0 else ""
        raise ConfigError(
            f"{FORM}, but for the label {label}{hint} it gave {float(first.losses[at]):g} or a gradient that is not "
            "finite: give a finite number for every word of the vocabulary"
        )
    before = state_of(loss_fn, "loss_fn")
    _compare(first, run(tokens.pick(everything)), tokens, everything, "when it was called again", 0.0)
    after = state_of(loss_fn, "loss_fn")
    changed = next((name for name in before if before[name] != after.get(name)), None)
    changed = changed or next(iter(after.keys() - before.keys()), None)
    if changed is not None:
        raise ConfigError(
            f"{FORM}, but a call changes {changed}: it is called once for each block of tokens, on many ranks, and "
            "again for the backward, so let it keep nothing; what follows the steps is for the script to set"
        )
    near = 1e-9 if dtype == torch.float64 else 1e-5
    for what, others, scale in _others(tokens, device):
        # Of the gradients twice or half as much is exact, so what they are scaled by must not show.
        found = run(tokens.pick(others, scale))
        _compare(first, found._replace(gradients=found.gradients / scale), tokens, others, what, near)
    return first.losses.double().cpu()


def _drawn(vocabulary: int, device: torch.device | None, dtype: torch.dtype) -> _Tried:
    """The long row; its first 64 tokens have labels of at most ten words, the first and the last word among them."""
    long = max(_TOKENS, min(_LONG, LOGITS_AT_ONCE // max(1, vocabulary)))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(long, vocabulary, generator=generator, dtype=dtype) * 3
    words = torch.cat((torch.randint(vocabulary, (8,), generator=generator), torch.tensor([0, vocabulary - 1])))
    labels = torch.randint(vocabulary, (long,), generator=generator)
    labels[:_TOKENS] = words[torch.randint(len(words), (_TOKENS,), generator=generator)]
    labels[:3] = torch.tensor([vocabulary - 1, 0, 0])
    # Of some tokens the model is sure, rightly or wrongly.
    logits[2:_TOKENS:5, :] = logits[2:_TOKENS:5, :] / 3
    logits[torch.arange(4, _TOKENS, 5), labels[4:_TOKENS:5]] += 8
    counts = torch.rand(long, generator=generator, dtype=dtype) + 0.5
    return _Tried(logits.to(device), labels.to(device), counts.to(device))


def _others(tokens: _Tried, device: torch.device | None) -> Iterator[tuple[str, Tensor, float]]:
    """How the 64 tokens are tried otherwise: in words, which tokens stand in the row, and what they count."""
    start = 0
    for length in _PIECES:
        yield f"beside {length - 1} others", torch.arange(start, start + length, device=device), 0.5
        start += length
    order = torch.randperm(_TOKENS, generator=torch.Generator().manual_seed(1))
    yield "in another order", order.to(device), 2.0
    if len(tokens.labels) > _TOKENS:
        row = len(tokens.labels)
        yield f"beside {row - 1} others", torch.arange(row, device=device), 1.0


def _run(loss_fn: TokenLoss, tokens: _Tried, names: Mapping[int, str]) -> _Found:
    """Losses and gradients of some tokens. ConfigError for what is no loss of tokens, or has more than these in it."""
    leaf = tokens.logits.clone().requires_grad_()
    given, count = leaf * 1, len(tokens.labels)  # as in training no leaf: then what is done in place shows
    watch = Watch(names)
    try:
        with torch.enable_grad(), watch:
            losses = loss_fn(given, tokens.labels.clone())
    except Exception as error:
        watch.refuse()
        raise ConfigError(f"{FORM}; for {count} tokens it raised {told_with_place(error)}") from error
    watch.refuse()
    if not isinstance(losses, Tensor) or losses.shape != (count,):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ConfigError(
            f"{FORM}, but for {count} tokens it returned {shape}: take its mean or sum out (reduction='none')"
        )
    if not losses.requires_grad:
        raise ConfigError(f"{FORM}, but what it returned has no gradient: compute it from the logits by torch")
    if not torch.equal(given.detach(), tokens.logits):
        raise ConfigError(f"{FORM}, but it changes the logits that it is given: let it work on a copy")
    if losses.device != leaf.device or not losses.is_floating_point():
        raise ConfigError(
            f"{FORM}, but it returned {losses.dtype} on {losses.device} for logits of {leaf.dtype} on {leaf.device}"
        )
    _refuse_own(loss_fn, losses, leaf, names)
    try:
        with watch:
            (gradients,) = torch.autograd.grad((losses.to(leaf.dtype) * tokens.counts).sum(), leaf, allow_unused=True)
    except Exception as error:
        watch.refuse()
        raise ConfigError(f"{FORM}; its backward raised {told_with_place(error)}") from error
    watch.refuse()
    if gradients is None:
        raise ConfigError(f"{FORM}, but what it returned has no gradient: compute it from the logits by torch")
    return _Found(losses.detach(), gradients)


def _refuse_own(loss_fn: Any, losses: Tensor, leaf: Tensor, names: Mapping[int, str]) -> None:
    """`refuse_leaves`, which knows the parameters of a loss that is a module by name."""
    own = dict(loss_fn.named_parameters()) if isinstance(loss_fn, nn.Module) else {}
    whose = {memory_of(parameter): f"its own parameter {name}" for name, parameter in own.items()}
    refuse_leaves(losses, leaf, lambda: {**whose, **names}, "loss_fn")


def _compare(first: _Found, found: _Found, tokens: _Tried, places: Tensor, what: str, near: float) -> None:
    """ConfigError if tokens at `places` of the row have other losses or gradients than among the 64."""
    own = places < _TOKENS
    for name, mine, other in (
        ("loss", first.losses, found.losses),
        ("gradient", first.gradients, found.gradients),
    ):
        right, tried = mine[places[own]], other[own]
        if near == 0.0 and torch.equal(right, tried):
            continue
        off = (right - tried).abs().double().flatten(1 if right.dim() > 1 else 0)
        off = off if off.dim() == 1 else off.max(dim=-1).values
        # A NaN is off, too. Two equal calls may differ in the last bits of sums that a device adds in any order.
        limit = (near or 16 * torch.finfo(right.dtype).eps) * float(mine.abs().max())
        if bool((off <= limit).all()):
            continue
        at = int(torch.where(off <= limit, 0.0, off.nan_to_num(torch.inf)).argmax())
        label = int(tokens.labels[places[own][at]])
        among = (right[at], tried[at]) if name == "loss" else (right[at].norm(), tried[at].norm())
        again = near == 0.0
        raise ConfigError(
            f"{FORM}, but the {name} of one token "
            + ("is another in each call" if again else "depends on other tokens")
            + f": for the label {label} it is {float(among[0]):.6g} beside 63 others, {float(among[1]):.6g} {what}"
            + (
                ". Leave random numbers and what is kept from call to call out"
                if again
                else ". Blocks of tokens are computed apart, so leave means, counts and orders of tokens out"
            )
        )


# ---- What a loss reads, draws and sends beside what it is given. ----

FORM = "loss_fn must be a function of logits (T, V) and labels (T,) that returns the loss of each token, (T,)"
NOT_THERE = (
    "the model's weights are not in the model while it trains, so it would see old values, and no gradient would reach "
    "them; give what the loss needs as logits, or as a copy if it is to stay as it is"
)


class Watch(TorchDispatchMode):
    """Sees all that torch computes within it, and what of that must not be part of a loss."""

    def __init__(self, names: Mapping[int, str], form: str = f"{FORM} made of the token's logits alone"):
        """`form` says, for errors, what the loss is to be."""
        super().__init__()
        self._names, self._form, self._fault = names, form, ""
        self._drawn = _random_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._fault:
            self._fault = self._seen(func, args, kwargs)
        return func(*args, **kwargs)

    def _seen(self, func: Any, args: Any, kwargs: Any) -> str:
        if func.namespace in ("c10d", "_c10d_functional"):
            return f"it talks to other ranks ({func}), which call it at other times and as often as they have tokens"
        if torch.Tag.nondeterministic_seeded in func.tags:
            return f"it draws random numbers ({func}), which would follow the plan: leave dropout and noise out"
        for tensor in _tensors((args, kwargs)):
            if (name := self._names.get(memory_of(tensor))) is not None:
                return f"it reads {name}: {NOT_THERE}"
        return ""

    def refuse(self) -> None:
        """ConfigError for what was seen."""
        if not self._fault and _random_state() != self._drawn:
            self._fault = "it draws random numbers of Python or NumPy: leave noise out"
        if self._fault:
            raise ConfigError(f"{self._form}, but {self._fault}")


def refuse_leaves(losses: Tensor, leaf: Tensor, names: Callable[[], Mapping[int, str]], what: str) -> None:
    """ConfigError if the graph of `losses` ends in other tensors than `leaf` that want a gradient.

    `names` are those of the model's tensors, which are asked for only then; `what` is the loss.
    """
    seen: set[Any] = set()
    left: list[Any] = [losses.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [following for following, _ in node.next_functions]
        found = getattr(node, "variable", None)
        if not isinstance(found, Tensor) or found is leaf:
            continue
        read = getattr(found, "_hydra_name", "")  # a copy that a released parameter handed out
        name = f"the model's {read}" if read else names().get(memory_of(found))
        said = name or f"a tensor of shape {tuple(found.shape)} that wants a gradient"
        remedy = NOT_THERE if name and name.startswith("the model's") else (
            "no optimizer of the engine trains that, so it would never change; freeze it by requires_grad_(False)"
        )  # fmt: skip
        raise ConfigError(f"{what} must be made of what it is given alone, but it reads {said}: {remedy}")


def names_of(model: nn.Module | None) -> dict[int, str]:
    """The tensors of a model by where they lie in memory, in words."""
    if model is None:
        return {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    found = {memory_of(tensor): f"the model's {name}" for name, tensor in reversed(named)}
    found.pop(0, None)
    return found


def memory_of(tensor: Tensor) -> int:
    """What all views of a tensor have in common, on the meta device too."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # it has none
        return 0


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


def _random_state() -> tuple[Any, ...]:
    return random.getstate(), pickle.dumps(np.random.get_state())
