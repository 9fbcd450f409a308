"""Compares a stage with the model's own forward on real sequences.

[Note: real sequences]
The self-check compares every strategy with one process, exactly, but on small widths and drawn tokens. Whatever a model
does on the job's own tokens alone, it cannot see: a token that counts separators, a limit beyond the sequences that it
tries. So the longest, the shortest and as many others as fill a row run once more, in one pack through a stage on one
rank, and one by one through the model's own forward, with the values and in the type that the job has. A layer list,
which has no forward but its layers' own, runs one by one through a stage. Where not all layers can be computed in
seconds, one of each kind is.

In BF16 two right runs differ. How much, the model itself tells: it runs in a wider type too, and a stage may be four
times as far from the model as the model is from itself (right ones were 0.5 of that apart at most, over 40 families).
Experts are chosen by numbers, so that rounding sends a token elsewhere now and then, and distances of few tokens
scatter. So before a stage is refused that is less than three times as far off, it runs in the wider type too, in which
no choice changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_hydra.data.tokens import TokenSequence
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.layer_list import LayerList
from ds_hydra.pipe.models.meta_copy import copy_to_meta, give_values, parameter_hooks, place_on, run_experts_one_by_one
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.runs import Data, doubled, run_stage

_TIMES = 4.0  # the distance of the model from itself
_SCATTER = 3.0  # times that, where the wider type agrees
_ROUNDED = 1e-4  # of a gradient's norm, in FP32
_AGREED = {torch.float32: 1e-3, torch.float64: 1e-5}  # of a gradient's norm, in the wider type
_SMALL_SCALE = 2.0**10  # of FP16, whose gradients would be 0 else


@dataclass(frozen=True)
class RealData(Data):
    """Sequences of the job, in one pack."""

    given: tuple[TokenSequence, ...] = ()

    @staticmethod
    def of(sequences: Sequence[TokenSequence]) -> RealData:
        data = Data(tuple(one.input_ids for one in sequences), ()).packed([range(len(sequences))])
        return RealData(data.sequences, data.microbatches, tuple(sequences))

    def load(self, sequence: int) -> TokenSequence:
        """A sequence, with its tokens counted once, for the cross entropy."""
        return self.given[sequence]._replace(weight=1.0, fields=None)

    @property
    def num_targets(self) -> int:
        """Of all sequences."""
        return sum(int((one.labels != IGNORED).sum()) for one in self.given)


class OwnModel(NamedTuple):
    """The user's model, whole or in few layers, on the meta device; and its values, by its own names."""

    model: Any  # None: a layer list
    values: Mapping[str, Tensor]
    source: CausalLM | LayerList  # of its stages; its values are set here


class Ran(NamedTuple):
    """What a run came to: losses (tokens,) and gradients by name."""

    losses: Tensor
    gradients: Mapping[str, Tensor]

    @property
    def finite(self) -> bool:
        """Whether it can be compared."""
        return all(bool(torch.isfinite(values).all()) for values in (self.losses, *self.gradients.values()))


def difference_on(own: OwnModel, data: RealData, dtype: torch.dtype, device: torch.device) -> str | None:
    """What differs between a stage and the model by more than rounding explains, as a clause; None: nothing does.

    Raises FloatingPointError where the model's own loss or gradients are not finite.
    """
    wide = torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32
    source = own.source
    factor = (_SMALL_SCALE if dtype == torch.float16 else 1.0) / max(1, data.num_targets)
    # In all types the values are those of the job's type, or their rounding would count as the model's distance.
    own_wide = {path for path, name in source.aliases.items() if name in source.wide}
    rounded = {
        path: value.to(dtype) if value.is_floating_point() and path not in own_wide else value
        for path, value in own.values.items()
    }
    source.values = {name: rounded[path] for path, name in source.aliases.items()}
    staged = partial(run_stage, source, data, factor=factor, device=device)
    if isinstance(source, CausalLM):
        alone: Callable[[torch.dtype], Ran] = partial(_alone, own, source, rounded, data, factor, device)
    else:
        apart = data.packed([(sequence,) for sequence in range(len(data.sequences))])
        alone = lambda dtype: Ran(*run_stage(source, apart, factor=factor, device=device, dtype=dtype))  # noqa: E731
    narrow = alone(dtype)
    if not narrow.finite:
        raise FloatingPointError("the model's own loss or gradients of it are not finite")
    stage = Ran(*staged(dtype=dtype))
    # Right runs in FP32 are 1e-6 apart: only where they are further the model has to tell what rounding explains.
    if dtype == torch.float32 and _Allowed.by(narrow, _ROUNDED).difference(narrow, stage) is None:
        return None
    with doubled() if wide == torch.float64 else nullcontext():
        right = alone(wide)
    allowed = _Allowed.of(right, narrow, dtype)
    what = allowed.difference(narrow, stage)
    if what is None or allowed.times(_SCATTER).difference(narrow, stage) is not None:
        return what
    with doubled() if wide == torch.float64 else nullcontext():
        stage = Ran(*staged(dtype=wide))
    return what if _Allowed.by(right, _AGREED[wide]).difference(right, stage) else None


def _alone(
    own: OwnModel,
    source: CausalLM,
    values: Mapping[str, Tensor],
    data: RealData,
    factor: float,
    device: torch.device,
    dtype: torch.dtype,
) -> Ran:
    """The model's own forward, one sequence at a time."""
    model = copy_to_meta(own.model)
    place_on(model, device)

    def typed(path: str, value: Tensor) -> Tensor:
        least = torch.float32 if source.aliases[path] in source.wide else dtype
        return value.to(device, torch.promote_types(dtype, least) if value.is_floating_point() else None)

    give_values(model, {path: typed(path, value) for path, value in values.items()}, device)
    for (path, parameter), before in zip(model.named_parameters(), own.model.parameters(), strict=True):
        parameter.requires_grad_(before.requires_grad)
        for hook in parameter_hooks(own.model).get(path, ()) if before.requires_grad else ():
            parameter.register_hook(hook)
    for config in (model.config, model.config.get_text_config()):
        if source.flow.attention_dropout:  # fused kernels draw for themselves, and not by place
            config._attn_implementation = "eager"
        elif dtype in (torch.float32, torch.float64) and "flash" in (config._attn_implementation or ""):
            config._attn_implementation = "sdpa"
    if dtype == torch.float64:
        run_experts_one_by_one(model)
    plain = Plain(model, source.flow.draws, source.layers_path, source.balancing)
    token_loss = source.token_loss

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        ignored = labels == IGNORED
        if token_loss is not None:
            return token_loss(logits, labels.masked_fill(ignored, 0)).masked_fill(ignored, 0.0)
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")

    losses, gradients = plain.gradients_of(data, factor, loss_of)
    return Ran(losses, {source.aliases[path]: gradient for path, gradient in gradients.items()})


class _Allowed(NamedTuple):
    """How far runs may be apart: norms of differences."""

    losses: float
    whole: float  # of all gradients together
    single: Mapping[str, float]

    @staticmethod
    def of(right: Ran, narrow: Ran, dtype: torch.dtype) -> _Allowed:
        """By how far the model is from itself."""
        least = _Allowed.by(right, 1e-10 if dtype == torch.float64 else torch.finfo(dtype).eps)
        apart = {name: _apart(gradient, narrow.gradients[name]) for name, gradient in right.gradients.items()}
        losses, whole = _apart(right.losses, narrow.losses), sum(off**2 for off in apart.values()) ** 0.5
        typical = _Allowed.by(right, max(whole, least.whole) / max(_norm(right.gradients.values()), 1e-300)).single
        # One that is zero but for rounding, such as a key's bias, is as far off as the others are.
        single = {name: max(off, typical[name]) for name, off in apart.items()}
        return _Allowed(max(losses, least.losses), max(whole, least.whole), single).times(_TIMES)

    @staticmethod
    def by(right: Ran, relative: float) -> _Allowed:
        """By a part of the norms."""
        norm = _norm(right.gradients.values())
        single = {name: relative * max(_norm([one]), 1e-3 * norm) for name, one in right.gradients.items()}
        return _Allowed(relative * _norm([right.losses]), relative * norm, single)

    def times(self, factor: float) -> _Allowed:
        return _Allowed(
            factor * self.losses, factor * self.whole, {name: factor * off for name, off in self.single.items()}
        )

    def difference(self, own: Ran, stage: Ran) -> str | None:
        """Of the losses, of all gradients together, or of one of them."""
        if not (off := _apart(own.losses, stage.losses)) <= self.losses:
            return _told("the tokens' losses are", off, self.losses, _norm([own.losses]))
        missing = [name for name in own.gradients if name not in stage.gradients]
        if missing:
            return f"{missing[0]} has no gradient"
        apart = {name: _apart(gradient, stage.gradients[name]) for name, gradient in own.gradients.items()}
        off = sum(one**2 for one in apart.values()) ** 0.5
        if not off <= self.whole:
            worst = max(apart, key=lambda name: apart[name])
            return _told(f"the gradients (that of {worst} most) are", off, self.whole, _norm(own.gradients.values()))
        differing = [name for name, one in apart.items() if not one <= self.single[name]]
        if not differing:
            return None
        name = differing[0]
        return _told(f"the gradient of {name} is", apart[name], self.single[name], _norm([own.gradients[name]]))


def _told(what: str, off: float, allowed: float, norm: float) -> str:
    size = max(norm, 1e-300)
    return f"{what} {off / size:.1e} of their size off, where rounding explains {allowed / size:.1e}"


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.to(one.device).double()).norm())


def _norm(values: Any) -> float:
    return float(sum(float(one.double().norm()) ** 2 for one in values)) ** 0.5
