"""The user's own parameters after `initialize`: names, shapes and flags at once, values when all ranks ask for them.

[Note: released parameters]
From then on the masters are the parameters, and each rank has a part of them. Scripts go on using `engine.module`: they
count parameters, freeze some, write `state_dict()` to a file. A parameter of the meta device would answer the last
of these with tensors that hold nothing, without a word. So each parameter is a tensor of its own kind:

  names, shapes, types, counts, flags, hooks   are answered as they are
  the device                                   is that on which the engine computes, where scripts put their batches
  a value, by whatever function                is gathered, a bucket at a time, if all ranks ask within some seconds
  a function that writes                       is refused: what it writes would be lost

A rank that asks alone, as scripts do that save on rank 0, is refused too and told what to call.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import has_torch_function
from torch.utils._pytree import tree_leaves, tree_map

from ds_hydra.host.pending import METADATA
from ds_hydra.pipe.models.meta_copy import replace_parameters
from ds_hydra.zero_hetero.errors import ConfigError

_WAIT_S = 10.0
_LOOK_S = 0.002
_CLOSED = 1 << 32  # more than there are ranks
# Attributes of a tensor that are computed from its values.
_VALUES = frozenset(("T", "mT", "H", "mH", "real", "imag"))
_WRITERS = frozenset(("__setitem__", "copy_", "set_"))


class Values:
    """Where the values are: gathers some of the parameters, by the model's own names; all ranks call it alike."""

    def __init__(
        self,
        buckets: Mapping[str, Sequence[str]],
        gather: Callable[[Sequence[str]], Mapping[str, Tensor]],
        revision: Callable[[], object],
        device: torch.device,
        dtype: torch.dtype,
    ):
        """`buckets`: of each parameter those that are gathered with it. `gather` maps names to whole values on CPU.
        `revision`: differs whenever the values do. `dtype`: of floating values that are handed out."""
        self._buckets, self._gather, self._revision = buckets, gather, revision
        self.device, self._dtype = device, dtype
        self._found: tuple[object, Mapping[str, Tensor]] = (None, {})

    def of(self, name: str) -> Tensor:
        """A copy of a parameter's value on the device. RuntimeError unless all ranks ask for it."""
        revision, found = self._found
        if revision != self._revision() or name not in found:
            meet(f"the parameter {name} of engine.module")
            self._found = self._revision(), self._gather(self._buckets[name])
        value = self._found[1][name]
        return value.to(self.device, self._dtype if value.is_floating_point() else value.dtype, copy=True)

    def __deepcopy__(self, memo: Any) -> Values:
        return self


class ReleasedParameter(nn.Parameter):
    """A parameter whose value is among the masters [Note: released parameters]."""

    _hydra_name: str
    _hydra_values: Values

    @staticmethod
    def in_place_of(parameter: nn.Parameter, name: str, values: Values) -> ReleasedParameter:
        """One of a parameter's shape, type, flag and gradient hooks."""
        hollow = torch.empty_like(parameter.data, device="meta")
        new = Tensor._make_subclass(ReleasedParameter, hollow, parameter.requires_grad)
        new._hydra_name, new._hydra_values = name, values
        for hook in (parameter._backward_hooks or {}).values():
            new.register_hook(hook)
        return new

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        first = args[0] if args else None
        if isinstance(first, cls):
            if name == "__get__" and attribute in ("device", "data"):
                return first._hydra_values.device if attribute == "device" else first
            if name == "__set__" and (attribute == "data" or (attribute == "grad" and args[1] is not None)):
                _refuse_writing(first, f"setting its .{attribute}")
            if name == "data_ptr":
                return id(first)  # no two parameters have the same
            empty = name.endswith("_like") or name.startswith("new_")
            if empty or name in ("__set__", "requires_grad_") or (name in METADATA and attribute not in _VALUES):
                with torch._C.DisableTorchFunctionSubclass():
                    given = {"device": first._hydra_values.device, **kwargs} if empty else kwargs
                    return function(*args, **given)
            if name in _WRITERS or (name.endswith("_") and not name.endswith("__")):
                _refuse_writing(first, name)
        for one in tree_leaves(kwargs.get("out")):
            if isinstance(one, cls):
                _refuse_writing(one, f"{name}(out=...)")
        valued = functools.cache(lambda own: own._hydra_values.of(own._hydra_name))
        args, kwargs = tree_map(lambda one: valued(one) if isinstance(one, cls) else one, (args, kwargs))
        return function(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ReleasedParameter({self._hydra_name}, shape {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            # The engine copies what the parameter is, a script what it holds.
            asked = has_torch_function((self,))
            value = self._hydra_values.of(self._hydra_name) if asked else torch.empty_like(self, device="meta")
            memo[id(self)] = nn.Parameter(value, requires_grad=self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self._hydra_values.of(self._hydra_name), self.requires_grad).__reduce_ex__(protocol)


def release(model: Any, values: Values, names: Mapping[str, str]) -> None:
    """Put released parameters in place of a model's own, which frees these; tied parameters stay tied. `names`: of each
    path of a parameter its name among the masters.

    What `model.generate` needs is gathered once, and not at each use.
    """
    by_id = {id(p): names.get(path, path) for path, p in model.named_parameters(remove_duplicate=False)}
    replace_parameters(model, lambda _, own: ReleasedParameter.in_place_of(own, by_id[id(own)], values))
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_refuse_loading)
    if hasattr(model, "generate"):
        model.generate = functools.partial(_generate, model, values, model.generate)


def _refuse_loading(module: nn.Module, *_: Any) -> None:
    """Before torch would collect an error for each parameter; copies with values of their own are loaded as ever."""
    for parameter in module._parameters.values():
        if isinstance(parameter, ReleasedParameter):
            _refuse_writing(parameter, "load_state_dict()")


def _generate(model: nn.Module, values: Values, generate: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with whole(model, values):
        return generate(*args, **kwargs)


@contextmanager
def whole(model: nn.Module, values: Values) -> Iterator[None]:
    """Within, the model has its values on this rank's device; all ranks enter it together."""
    own = [dict(module._parameters) for module in model.modules()]
    buffers = [dict(module._buffers) for module in model.modules()]
    full: dict[int, nn.Parameter] = {}
    try:
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if isinstance(parameter, ReleasedParameter):
                    if id(parameter) not in full:
                        full[id(parameter)] = nn.Parameter(values.of(parameter._hydra_name), requires_grad=False)
                    module._parameters[key] = full[id(parameter)]
            for key, buffer in module._buffers.items():
                module._buffers[key] = None if buffer is None else buffer.to(values.device)
        yield
    finally:
        for module, parameters, kept in zip(model.modules(), own, buffers, strict=True):
            module._parameters.update(parameters)
            module._buffers.update(kept)


def meet(what: str) -> None:
    """Return when all ranks have called this for the same thing; RuntimeError on those that waited too long for others.

    Through the ranks' common store, for a collective that some ranks never come to would hang.
    """
    num_ranks = dist.get_world_size()
    store: Any = dist.distributed_c10d._get_default_store()
    deadline = time.monotonic() + _WAIT_S
    turns = f"ds_hydra/meet/{what}"
    key, came = "", num_ranks + 1
    while came > num_ranks:  # the turn is over, and who ended it is about to begin the next
        if key:
            time.sleep(_LOOK_S)
        if time.monotonic() > deadline:
            _refuse_alone(what, 0, num_ranks)
        key = f"{turns}/{store.add(turns, 0)}"
        came = store.add(key, 1)
    if came == num_ranks:
        store.add(turns, 1)
        return
    while came < num_ranks:
        time.sleep(_LOOK_S)
        # Who closes the turn learns in the same moment how many had come: either all pass or none does.
        came = store.add(key, _CLOSED if time.monotonic() > deadline else 0)
        if came >= _CLOSED and came % _CLOSED < num_ranks:
            if came < 2 * _CLOSED:
                store.add(turns, 1)
            _refuse_alone(what, came % _CLOSED, num_ranks)


def _refuse_alone(what: str, came: int, num_ranks: int) -> NoReturn:
    raise RuntimeError(
        f"{what} was read on {came} of {num_ranks} ranks. Each rank has a part of the weights, so all ranks must read "
        "them together, and write on rank 0 alone what they have read: call engine.module.state_dict(), "
        "save_pretrained() or generate() on every rank, or engine.save_16bit_model(folder), which writes on rank 0 "
        "what from_pretrained loads, or engine.fp32_state_dict()"
    )


def _refuse_writing(parameter: ReleasedParameter, how: str) -> NoReturn:
    raise ConfigError(
        f"{how} would write to the parameter {parameter._hydra_name} of engine.module, whose value the ranks share "
        "since ds_hydra.initialize(): it would be lost. Change it before; or load a folder of weights by "
        "engine.load_16bit_model(folder), a checkpoint by engine.load_checkpoint(folder)"
    )
