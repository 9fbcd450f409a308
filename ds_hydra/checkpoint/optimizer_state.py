"""An optimizer's state as flat tensors and plain numbers; and what was saved, checked, as an optimizer's new state.

[Note: a trial of the optimizer]
Which numbers and tensors an optimizer keeps, and of which types, only its own step tells. So before anything is
installed, a copy of it with one element makes a step with the saved options: what it keeps then is what must have been
saved; and a second one goes on from the saved numbers, which must end in a finite value. A checkpoint from which the
next step would fail, or whose state is another optimizer's, is refused by that, on all ranks.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hydra.checkpoint.format import MAX_STEP, OtherJobError, SavedGroup, SavedScalar
from ds_hydra.host.optimizers import ELEMENT_WISE
from ds_hydra.pipe.model_plan import ShardRule
from ds_hydra.pipe.stage import to_flat
from ds_hydra.step.update import NeedsWholes
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError
from ds_hydra.zero_hetero.masters import MasterShards, OptimizerSpan

_PLAIN = (bool, int, float, str, type(None))
_STEP = "step"  # what every optimizer that counts its steps calls that number


@dataclass(frozen=True)
class NewState:
    """What `install_optimizer` assigns: the state of each parameter of the optimizer, the options of each group."""

    states: list[tuple[nn.Parameter, dict[str, Any]]]
    options: list[dict[str, Any]]


def element_wise_states(spans: Iterable[OptimizerSpan], optimizer: Optimizer) -> dict[str, torch.dtype]:
    """Names and types of the state tensors that have one value for each element."""
    keys: dict[str, torch.dtype] = {}
    for span in spans:
        for key, value in optimizer.state.get(span.param, {}).items():
            # Tensors without dimensions, such as Adam's step, are numbers of the whole group: see `_scalars`.
            if isinstance(value, Tensor) and value.dim():
                if value.shape != span.param.shape:
                    raise CheckpointError(
                        f"optimizer {type(optimizer).__name__} keeps a state {key!r} of shape {tuple(value.shape)} for "
                        f"{span.param.numel()} elements, which cannot be resharded: use an element-wise optimizer"
                    )
                keys.setdefault(key, value.dtype)
    return keys


def state_source(
    optimizer: Optimizer, spans: Sequence[OptimizerSpan], key: str, numel: int, dtype: torch.dtype
) -> Callable[[], Tensor]:
    """Fetches one state of one bucket's shard, without a copy where one span is the whole shard."""

    def fetch() -> Tensor:
        # Called when its turn to be written comes, so that there is one copy at a time.
        values = [optimizer.state.get(span.param, {}).get(key) for span in spans]
        if len(spans) == 1 and spans[0].stop - spans[0].start == numel and values[0] is not None:
            return values[0]
        # Several optimizer groups share the shard: their states are put side by side, zero where a group has none.
        where = next((value.device for value in values if value is not None), "cpu")
        whole = torch.zeros(numel, dtype=dtype, device=where)
        for span, value in zip(spans, values, strict=True):
            if value is not None:
                whole[span.start : span.stop] = value
        return whole

    return fetch


def collect_groups(optimizer: Optimizer) -> list[SavedGroup]:
    """Options and shared numbers of each parameter group, as far as this rank has parameters in it."""
    return [
        SavedGroup(
            {key: _plain(value, f"option {key!r}") for key, value in group.items() if key != "params"},
            _scalars(optimizer, group["params"]),
        )
        for group in optimizer.param_groups
    ]


def _plain(value: Any, what: str) -> Any:
    """An option as JSON can hold it; CheckpointError for anything but numbers, text and lists of them."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item, what) for item in value]
    if isinstance(value, _PLAIN):
        return value
    raise CheckpointError(
        f"the optimizer's {what} is a {type(value).__name__}, which a checkpoint cannot hold: use numbers or text"
    )


def _scalars(optimizer: Optimizer, params: Sequence[Any]) -> dict[str, SavedScalar]:
    """Numbers that the optimizer keeps for each parameter; CheckpointError where they differ within the group.

    Parameters here are runs of elements, which are cut elsewhere with another number of ranks. So a number can only be
    kept where all of them have the same.
    """
    found: dict[str, SavedScalar] = {}
    for param in params:
        for key, value in optimizer.state.get(param, {}).items():
            if value is None or (isinstance(value, Tensor) and value.dim()):
                continue
            is_tensor = isinstance(value, Tensor)
            dtype = str(value.dtype).removeprefix("torch.") if is_tensor else None
            scalar = SavedScalar(value.item() if is_tensor else value, dtype)
            if found.setdefault(key, scalar) != scalar:
                raise CheckpointError(
                    f"the optimizer's {key!r} differs within one parameter group ({found[key].value}, {scalar.value}): "
                    "a checkpoint keeps one value for each group, so give their parameters groups of their own"
                )
    return found


def merge_groups(everyone: Sequence[Sequence[SavedGroup]]) -> tuple[SavedGroup, ...]:
    """One list of groups from those of all ranks: a rank without parameters in a group knows no numbers of it."""
    return tuple(
        SavedGroup(own[0].options, next((group.scalars for group in own if group.scalars), {}))
        for own in zip(*everyone, strict=True)
    )


def fresh_state(optimizer: Optimizer, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the optimizer keeps of one element after a step with these options; None where it cannot be tried."""
    if isinstance(optimizer, NeedsWholes) and (kept := optimizer.keeps(options)) is not None:
        return dict(kept)
    can_be_tried = isinstance(optimizer, NeedsWholes) or type(optimizer) in ELEMENT_WISE.values()
    return _tried(optimizer, options, {}) if can_be_tried else None


def _tried(optimizer: Optimizer, options: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """The state of one element after a further step [Note: a trial of the optimizer]. CheckpointError if that fails."""
    of = next((param for group in optimizer.param_groups for param in group["params"]), torch.zeros(1))
    param = nn.Parameter(torch.ones(1, dtype=of.dtype, device=of.device))
    param.grad = torch.ones_like(param)
    kept: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    if state:
        kept[param] = state
    # In place of the state and the groups of all elements, of which a copy would take much memory.
    memo = {id(optimizer.state): kept, id(optimizer.param_groups): [{**options, "params": [param]}]}
    taken = inspect.signature(type(optimizer)).parameters
    try:
        type(optimizer)([param], **{key: value for key, value in options.items() if key in taken})  # checks their range
        copy.deepcopy(optimizer, memo).step()
        finite = bool(torch.isfinite(param.detach()).all())
    except Exception as error:
        raise CheckpointError(f"no step can follow it ({type(error).__name__}: {error})") from None
    if not finite:
        raise CheckpointError("the step that follows it is not finite")
    return {key: value for key, value in kept[param].items() if value is not None}


def build_state(
    masters: MasterShards,
    optimizer: Optimizer,
    loaded: Mapping[str, Sequence[Tensor]],
    groups: Sequence[SavedGroup],
) -> NewState:
    """The optimizer's new state, of nothing that it has now. `loaded` has each state by trained bucket.

    Raises CheckpointError for what this optimizer cannot go on from, and OtherJobError for another one's state.
    """
    numbers, options, kept_of = [], [], []
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        if saved.options.get("use_muon", group.get("use_muon")) != group.get("use_muon"):
            raise OtherJobError(
                f"its parameter group {index} is {'' if group['use_muon'] else 'not '}to be orthogonalized"
            )
        if ("max_coeff" in saved.options) != ("max_coeff" in group):  # its moments have the names of Adam's
            raise OtherJobError(f"its parameter group {index} is {'not ' if 'max_coeff' in group else ''}LAMB's")
        new = {key: _option(group[key], value, key) for key, value in saved.options.items() if key in group}
        whole = {key: value for key, value in group.items() if key != "params"} | new
        fresh = fresh_state(optimizer, whole)
        kept = sorted(loaded) if fresh is None else [k for k, v in fresh.items() if isinstance(v, Tensor) and v.dim()]
        if group.get("use_muon") and "use_muon" not in saved.options:
            saved = SavedGroup(saved.options, {})  # of another engine's: what it counts, it counts for all groups
        _check_keys(optimizer, index, bool(group["params"]), fresh, kept, saved, loaded)
        scalars = {key: _scalar(key, scalar, group, fresh) for key, scalar in saved.scalars.items()}
        if fresh is not None and saved.scalars:
            # Copies: the trial changes what it is given.
            zeros = {key: torch.zeros_like(fresh[key]) for key in kept}
            _tried(optimizer, whole, {**copy.deepcopy(scalars), **zeros})
        numbers.append(scalars)
        options.append(new)
        kept_of.append({key: fresh[key].dtype if fresh else None for key in kept if key in loaded})
    unknown = set(loaded).difference(*kept_of)
    if unknown:
        raise OtherJobError(f"it holds the states {sorted(unknown)}, which {type(optimizer).__name__} does not keep")
    group_of = {param: index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    states = []
    for span in masters.spans:
        index = group_of[span.param]
        # Each parameter has numbers of its own: a step counts them up in place.
        state: dict[str, Any] = copy.deepcopy(numbers[index])
        for key, dtype in kept_of[index].items():
            values = loaded[key][span.bucket][span.start : span.stop]
            state[key] = values.to(masters.flat.device, dtype)
        states.append((span.param, state))
    return NewState(states, options)


def state_of_whole(
    masters: MasterShards,
    optimizer: Optimizer,
    states: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Sequence[str]],
    rules: Mapping[str, ShardRule],
) -> NewState:
    """The optimizer's new state of what it has kept of whole parameters, by name; `groups` are those of its parameter
    groups. ConfigError where parameters of one group have made other numbers of steps."""
    keys = {key for own in states.values() for key, value in own.items() if isinstance(value, Tensor) and value.dim()}
    loaded = {key: [torch.zeros_like(shard) for shard in masters.shards] for key in keys}
    for piece in masters.pieces():
        rule, own = rules[piece.name], states.get(piece.name, {})
        for key in keys & {key for key, value in own.items() if value is not None}:
            flat = to_flat(own[key], rule.dim, rule.parts)[piece.start : piece.stop]
            loaded[key][piece.bucket][piece.first : piece.first + len(flat)].copy_(flat)
    saved = []
    for names in groups:
        scalars: dict[str, SavedScalar] | None = None
        for name in names:
            own = {key: value for key, value in states.get(name, {}).items() if key not in keys and value is not None}
            found = {
                key: SavedScalar(value.item() if isinstance(value, Tensor) else value) for key, value in own.items()
            }
            if scalars not in (None, found):
                raise ConfigError(
                    f"optimizer {type(optimizer).__name__} has made other steps for {name} than for {names[0]} of the "
                    f"same group ({found}, {scalars}), and ranks count them for a group: give a fresh one"
                )
            scalars = found
        saved.append(SavedGroup({}, scalars or {}))
    return build_state(masters, optimizer, loaded, saved)


def _check_keys(
    optimizer: Optimizer,
    index: int,
    has_params: bool,
    fresh: Mapping[str, Any] | None,
    kept: Sequence[str],
    saved: SavedGroup,
    loaded: Mapping[str, Any],
) -> None:
    """OtherJobError unless what was saved of a group is what the optimizer keeps; nothing was before its first step."""
    if fresh is None or not has_params or not (saved.scalars or loaded):
        return
    wanted, found = set(fresh) - set(kept), set(saved.scalars)
    missing = sorted((wanted - found) | (set(kept) - set(loaded)))
    if missing or found - wanted:
        what = f"lacks {missing}" if missing else f"holds {sorted(found - wanted)}"
        raise OtherJobError(f"what it {what} of parameter group {index} is not what {type(optimizer).__name__} keeps")


def install_optimizer(optimizer: Optimizer, new: NewState) -> None:
    """Give every parameter of the optimizer its state, and every group its options."""
    for param, state in new.states:
        if state:
            optimizer.state[param] = state
        else:
            optimizer.state.pop(param, None)  # saved before the first step: what is here is of another run
    for group, options in zip(optimizer.param_groups, new.options, strict=True):
        group.update(options)


def _scalar(key: str, saved: SavedScalar, group: dict[str, Any], fresh: Mapping[str, Any] | None) -> Any:
    """The number as the optimizer keeps it: plain, or a tensor of its type where the optimizer expects it."""
    if key == _STEP:
        check_count(saved.value, "the optimizer's step")
    like = None if fresh is None else fresh[key]
    try:
        if isinstance(like, Tensor):
            return torch.full_like(like, saved.value)
        if saved.dtype is None or like is not None:
            return saved.value if like is None else type(like)(saved.value)
        dtype = getattr(torch, saved.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"the optimizer's {key!r} is of unknown type {saved.dtype[:40]!r}")
        # torch keeps the step on the host, and on the device only for kernels that read it there.
        on_device = bool(group.get("fused") or group.get("capturable")) and bool(group["params"])
        return torch.tensor(saved.value, dtype=dtype, device=group["params"][0].device if on_device else "cpu")
    except (RuntimeError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"the optimizer's {key!r} cannot be {str(saved.value)[:40]} ({error})") from None


def check_count(value: Any, what: str, least: int = 0) -> None:
    """CheckpointError unless the value is a whole number that a job can reach."""
    whole = type(value) is int or (type(value) is float and value.is_integer())
    if not whole or not least <= value <= MAX_STEP:
        raise CheckpointError(f"{what} is {str(value)[:40]}, which is no count")


def _option(current: Any, value: Any, key: str) -> Any:
    """A saved option as the kind of value it replaces; CheckpointError for another kind."""
    if isinstance(current, Tensor) and _is_number(value):
        return torch.full_like(current, value)
    if isinstance(current, (list, tuple)) and isinstance(value, list) and len(value) == len(current):
        # JSON knows no tuples; Adam's betas were one.
        return type(current)(_option(now, then, key) for now, then in zip(current, value, strict=True))
    if current is None or isinstance(current, bool):
        fits = isinstance(value, (bool, type(None))) or (current is None and isinstance(value, (int, float, str)))
    else:
        fits = isinstance(value, str) if isinstance(current, str) else _is_number(value)
    if not fits:
        raise CheckpointError(f"the optimizer's option {key!r} is {str(value)[:80]}, here it is {str(current)[:80]}")
    if key == _STEP:
        check_count(value, "the optimizer's step")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
