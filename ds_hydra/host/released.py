"""The user's own parameters after `initialize`: names, shapes and flags at once, values when all ranks ask for them.

[Note: released parameters]
From then on the masters are the parameters, and each rank has a part of them. Scripts go on using `engine.module`: they
count parameters, freeze some, write `state_dict()` to a file. A parameter of the meta device would answer the last
of these with tensors that hold nothing, without a word. So each parameter is a tensor of its own kind:

  names, shapes, types, counts, flags, hooks   are answered as they are
  the device                                   is that on which the engine computes, where scripts put their batches
  a value, by whatever function                is gathered, a bucket at a time, if all ranks ask within some seconds
  a function that writes                       is refused: what it writes would be lost
  a gradient                                   is refused where a backward would compute it

A rank that asks alone, as scripts do that save on rank 0, is refused too and told what to call. What is handed out is a
copy; where torch would have handed out the parameter's own memory (`p[2:4]`, `p.detach()`), a write to it is refused
when the next value is read, or before the next update.
"""

from __future__ import annotations

import functools
import json
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import has_torch_function
from torch.utils._pytree import tree_leaves, tree_map

from ds_hydra.host.own_updates import HOOKS_OF_TENSORS, attribute_of, makes_another, needs_no_value, refuse_reading
from ds_hydra.pipe.models.meta_copy import in_place_of, replace_parameters
from ds_hydra.zero_hetero.errors import ConfigError

_WRITERS = frozenset(("__setitem__", "copy_", "set_"))
_CONVERSIONS = frozenset(("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "contiguous"))
_PLACES = frozenset(("is_meta", "is_cpu", "is_cuda"))


class ReleasedParameter(nn.Parameter):
    """A parameter whose value is among the masters [Note: released parameters]."""

    _hydra_name: str
    _hydra_values: Values
    _hydra_id: int  # of the one in the model
    _hp_mapping = None  # by which deepspeed.utils.safe_get_full_fp32_param() knows that it may ask

    @staticmethod
    def in_place_of(parameter: nn.Parameter, name: str, values: Values) -> ReleasedParameter:
        """One of a parameter's shape, type, flag and gradient hooks."""
        new = ReleasedParameter._hollow(parameter.data, name, values, parameter.requires_grad)
        new._hydra_id = id(new)
        for hook in (parameter._backward_hooks or {}).values():
            new.register_hook(hook)
        return new

    @staticmethod
    def _hollow(like: Tensor, name: str, values: Values, requires_grad: bool) -> ReleasedParameter:
        hollow = torch.empty_like(like, device="meta", requires_grad=False)
        new = Tensor._make_subclass(ReleasedParameter, hollow, requires_grad)
        new._hydra_name, new._hydra_values = name, values
        return new

    def _data(self) -> ReleasedParameter:
        """The same one, of which no gradient is asked."""
        data = ReleasedParameter._hollow(self, self._hydra_name, self._hydra_values, requires_grad=False)
        data._hydra_id = self._hydra_id
        return data

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        attribute = attribute_of(function)
        first = args[0] if args else None
        if isinstance(first, cls):
            device = first._hydra_values.device
            if name == "__get__" and attribute in ("device", "data"):
                return device if attribute == "device" else first._data()
            if name == "__get__" and attribute in _PLACES:
                return getattr(torch.empty(0, device=device), attribute)
            if name == "__set__" and attribute in ("data", "grad"):
                if args[1] is None or getattr(args[1], "_hydra_id", None) == first._hydra_id:
                    return None
                return _on_plain(first, f"setting its .{attribute}", function, args, kwargs)
            if name == "copy_" and len(args) > 1 and args[1] is first:  # loaded, and the masters have it
                return first
            if name == "__get__" and attribute == "grad" and first._hydra_values.gradients_wait():
                refuse_reading(first._hydra_name)
            if name in _CONVERSIONS and not any(isinstance(one, cls) for one in args[1:]):
                alike = torch.empty(0, device=device, dtype=first.dtype)
                if function(alike, *args[1:], **kwargs) is alike:
                    return first
            if name == "data_ptr":
                return first._hydra_id  # no two parameters have the same
            if name in ("__set__", "requires_grad_") or needs_no_value(function):
                with torch._C.DisableTorchFunctionSubclass():
                    given = {"device": device, **kwargs} if makes_another(function) else kwargs
                    return function(*args, **given)
            if name in _WRITERS or (name.endswith("_") and not name.endswith("__")):
                return _on_plain(first, name, function, args, kwargs)
        for one in tree_leaves(kwargs.get("out")):
            if isinstance(one, cls):
                return _on_plain(one, f"{name}(out=...)", function, args, kwargs)
        if function is torch.autograd.grad:
            _refuse_gradient("a parameter")
        valued = functools.cache(_value_in_a_graph)
        used = {one for one in tree_leaves((args, kwargs)) if isinstance(one, cls)}
        args, kwargs = tree_map(lambda one: valued(one) if isinstance(one, cls) else one, (args, kwargs))
        result = function(*args, **kwargs)
        for one in used:
            _watch(one, valued(one), result, function)
        return result

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

    # What the functions of deepspeed.utils call that read and write what an optimizer holds.

    def get_full_hp_param(self, optim_state_key: str | None = None) -> Tensor:
        """The parameter's FP32 value. All ranks must call it."""
        if optim_state_key is not None:
            raise ConfigError(
                f"the optimizer state {optim_state_key!r} of the parameter {self._hydra_name} is shared out over all "
                "ranks: engine.save_checkpoint(folder) saves it"
            )
        return self._hydra_values.of(self._hydra_name, torch.float32)

    def set_full_hp_param(self, value: Tensor, optim_state_key: str | None = None) -> NoReturn:
        """Refused."""
        _refuse_writing(self, "safe_set_full_fp32_param() or safe_set_full_optimizer_state()")

    def get_full_hp_grad(self) -> NoReturn:
        """Refused."""
        _refuse_gradient(f"the parameter {self._hydra_name}")

    def set_full_hp_grad(self, value: Tensor) -> NoReturn:
        """Refused."""
        _refuse_writing(self, "safe_set_full_grad()")


def _value_in_a_graph(parameter: ReleasedParameter) -> Tensor:
    """A copy of its value, whose gradient is refused if one is to be computed."""
    value = parameter._hydra_values.of(parameter._hydra_name)
    if parameter.requires_grad and torch.is_grad_enabled():
        value.requires_grad_().register_hook(lambda _: _refuse_gradient(f"the parameter {parameter._hydra_name}"))
        value._hydra_name = parameter._hydra_name  # type: ignore[attr-defined]
    return value


def _watch(parameter: ReleasedParameter, value: Tensor, result: Any, function: Callable[..., Any]) -> None:
    """Refuse what a function has written to a copy, and remember results that stand for the parameter's memory."""
    name, values = parameter._hydra_name, parameter._hydra_values
    # Collectives do not count what they write; a broadcast of what all ranks have in common writes nothing new.
    may_write = value._version > 0 or (getattr(function, "__module__", None) or "").startswith("torch.distributed")
    if may_write and values.is_changed(name, value):
        _refuse_writing(parameter, getattr(function, "__name__", "a function"))
    memory = value.untyped_storage().data_ptr()
    for part in tree_leaves(result):
        if isinstance(part, Tensor) and part.device == value.device and part.untyped_storage().data_ptr() == memory:
            values.lend(name, part)


def _refuse_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, ReleasedParameter):
                raise ConfigError(
                    f"{type(optimizer).__name__}.step() of an optimizer that was made of engine.module's parameters: "
                    "they have no gradients, for the engine trains by its own optimizer. Pass the optimizer to "
                    "ds_hydra.initialize(optimizer=...), made before it, and call engine.step()"
                )


@functools.cache
def _watch_optimizers() -> None:
    """From now on."""
    register_optimizer_step_pre_hook(_refuse_optimizer)


class FormerParameter(ReleasedParameter):
    """What a model's parameter was before `initialize`, where a script has kept it: it answers as the present one.

    A list of `model.parameters()` made early would go on holding the first values, and gradients of None: to clip by
    it, to compute a norm, or to read a weight would do something else than with plain torch, without a word.
    """

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, attribute = getattr(function, "__name__", ""), attribute_of(function)
        if name in HOOKS_OF_TENSORS or name == "requires_grad_" or (name == "__set__" and attribute == "requires_grad"):
            raise ConfigError(
                f"{attribute or name} of the parameter {args[0]._hydra_name} was asked of what the script has kept of "
                "the model from before ds_hydra.initialize(), which has another parameter in its place now: take it "
                "from engine.module.named_parameters()"
            )
        return super().__torch_function__(function, types, args, kwargs)


class _Generate(functools.partial[Any]):
    """`model.generate` with the values of all parameters; a copy of the model has its own."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.args[0], "generate")


def release(model: Any, values: Values, names: Mapping[str, str]) -> None:
    """Put released parameters in place of a model's own, which frees these; tied parameters stay tied. `names`: of each
    path of a parameter its name among the masters.

    What a script has kept of the model's own answers as these. What `model.generate` needs is gathered once, and not at
    each use.
    """
    before = dict(model.named_parameters())
    by_id = {id(p): names.get(path, path) for path, p in model.named_parameters(remove_duplicate=False)}
    replace_parameters(model, lambda _, own: ReleasedParameter.in_place_of(own, by_id[id(own)], values))
    for path, parameter in before.items():
        now = model.get_parameter(path)
        if type(parameter) is nn.Parameter and isinstance(now, ReleasedParameter):
            parameter.__class__ = FormerParameter
            vars(parameter).update(vars(now))
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_load)
    tied: dict[str, list[str]] = {}
    for path, _ in model.named_parameters(remove_duplicate=False):
        tied.setdefault(names.get(path, path), []).append(path)
    model.register_state_dict_post_hook(functools.partial(_tie, [paths for paths in tied.values() if len(paths) > 1]))
    if hasattr(model, "generate"):
        model.generate = _Generate(_generate, model, values, model.generate)
    _watch_optimizers()


def give_back(model: nn.Module) -> dict[str, nn.Parameter]:
    """Make released parameters plain ones again, which hold their values on CPU: for another engine of the same model.

    They stay the same objects, as lists and groups of a script hold them. All ranks must call it; RuntimeError on those
    that waited too long for others. A model without such parameters stays as it is. Returns those that were made plain,
    by their names among the masters.
    """
    found: dict[str, nn.Parameter] = {}
    modules = list(model.modules())
    held = (own for module in modules for own in module._parameters.values() if isinstance(own, ReleasedParameter))
    for parameter in {id(own): own for own in held}.values():
        name = parameter._hydra_name
        value = parameter._hydra_values.of(name).cpu()
        plain = in_place_of(parameter, value)
        with torch._C.DisableTorchFunctionSubclass():
            torch.utils.swap_tensors(parameter, plain)
        found[name] = parameter
    for module in modules:
        if isinstance(vars(module).get("generate"), _Generate):
            del module.generate
    return found


def _tie(tied: Sequence[Sequence[str]], module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Tied parameters are one tensor in a state too, and once in a file."""
    for first, *others in tied:
        state.update({prefix + path: state[prefix + first] for path in others if prefix + path in state})


def _load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before `load_state_dict` would write to a module's parameters: the masters take the values, if the shapes are
    right, and the parameters stay. Copies with values of their own are loaded as ever."""
    own = {path: one for path, one in module.named_parameters(remove_duplicate=False)
           if isinstance(one, ReleasedParameter)}  # fmt: skip
    if prefix or not own:  # of a child: all was taken when the call began
        return
    values = next(iter(own.values()))._hydra_values
    if values.training_is_over is not None:
        values.training_is_over()
        return
    fits = {path: one for path, one in own.items() if getattr(state.get(path), "shape", None) == one.shape}
    found = {one._hydra_name: state[path] for path, one in fits.items() if state[path] is not one}
    state.update(fits)
    if found:
        values.load(found)


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


@contextmanager
def held_values(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Within, a rank reads the released ones of these parameters without the others; all ranks enter it together."""
    names: dict[Values, set[str]] = {}
    for one in parameters:
        if isinstance(one, ReleasedParameter):
            names.setdefault(one._hydra_values, set()).add(one._hydra_name)
    with ExitStack() as stack:
        for values, of_one_model in names.items():
            stack.enter_context(values.held(of_one_model))
        yield


def _on_plain(
    parameter: ReleasedParameter, how: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What writes to a parameter: refused while the ranks share its value; once training is over the model is given
    back to the script first, and the function runs on its plain parameters."""
    give, before = parameter._hydra_values.training_is_over, tree_leaves((args, kwargs))
    if give is None:
        _refuse_writing(parameter, how)
    names = {id(one): one._hydra_name for one in before if isinstance(one, ReleasedParameter)}
    plain = give()

    def now(one: Any) -> Any:
        # A registered parameter has become a plain one itself; what stands for its .data has not.
        return plain[names[id(one)]].data if isinstance(one, ReleasedParameter) else one

    args, kwargs = tree_map(now, (tuple(args), dict(kwargs)))
    return function(*args, **kwargs)


def _refuse_writing(parameter: ReleasedParameter, how: str) -> NoReturn:
    raise ConfigError(
        f"{how} would write to the parameter {parameter._hydra_name} of engine.module, whose value the ranks share "
        f"since ds_hydra.initialize(): it would be lost. {REMEDY}"
    )


def _refuse_gradient(what: str) -> NoReturn:
    raise ConfigError(
        f"{what} of engine.module gets no gradient in the script: the engine computes them in engine.step(), and "
        "engine.get_global_grad_norm() is their norm. A loss of your own goes through loss_fn(logits, labels) of "
        "ds_hydra.initialize(); read values under torch.no_grad() or by .detach()"
    )


# ---- Values of the masters, gathered when all ranks ask, and lent, not given. ----

_WAIT_S = 10.0
_LOOK_S = 0.002
_END_S = 2.0  # how long a rank whose script has ended stays for others that begin to read
_ENGINES = count()  # as many as each other rank has made, in the same order
_CLOSED = 1 << 32  # more than there are ranks
REMEDY = (
    "Change it before ds_hydra.initialize(); or load a folder of weights by engine.load_16bit_model(folder), a "
    "checkpoint by engine.load_checkpoint(folder). To change or merge weights after training, save them by "
    "engine.save_16bit_model(folder) and load that folder into a plain model"
)


class Values:
    """Where the values are: gathers some of the parameters, by the model's own names; all ranks call it alike."""

    def __init__(
        self,
        buckets: Mapping[str, Sequence[str]],
        gather: Callable[[Sequence[str]], Mapping[str, Tensor]],
        revision: Callable[[], object],
        device: torch.device,
        dtype: torch.dtype,
        gradients_wait: Callable[[], bool] = lambda: False,
        wide: Collection[str] = (),
        load: Callable[[Mapping[str, Tensor]], None] | None = None,
    ):
        """`buckets`: of each parameter those that are gathered with it. `gather` maps names to whole values on CPU.
        `revision`: differs whenever the values do. `dtype`: of floating values that are handed out, but for those that
        are kept `wide`. `gradients_wait`: whether a plain parameter would have a gradient now. `load` takes values that
        all ranks have."""
        self._buckets, self._gather, self._revision = buckets, gather, revision
        self.device, self._dtype, self.gradients_wait, self._wide = device, dtype, gradients_wait, frozenset(wide)
        self._load = load
        self._found: tuple[object, Mapping[str, Tensor]] = (None, {})
        self._held: tuple[object, Mapping[str, Tensor]] = (None, {})
        self._lent: list[tuple[str, weakref.ref[Tensor], int]] = []
        self._last: Tensor | None = None  # kept until the next, for a script that does not keep what it writes to
        self._asks = f"ds_hydra/asks/{next(_ENGINES)}"  # where a rank that reads says what, by engine
        self._problem = ""
        self.training_is_over: Callable[[], Mapping[str, Any]] | None = None
        """Once training is over, what gives the model back to the script: its plain parameters, by name."""

    def of(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of a parameter's value on the device. RuntimeError unless all ranks ask for it."""
        if problem := _written(self._lent[-1:]):
            self._lent.pop()
            raise ConfigError(problem)
        value = self._gathered(name)
        if value is None:
            meet(f"the parameter {name} of engine.module", self._asks, self._buckets[name])
            self._found = self._revision(), self._gather(self._buckets[name])
            value = self._found[1][name]
        narrow = value.is_floating_point() and name not in self._wide
        return value.to(self.device, dtype or (self._dtype if narrow else value.dtype), copy=True)

    def load(self, given: Mapping[str, Tensor]) -> None:
        """Take whole values, by name. All ranks call it with the same ones; RuntimeError on those that waited too long
        for others."""
        assert self._load is not None, "of an engine"
        whole = {name: value.detach() for name, value in given.items()}  # of another engine's model it gathers them
        meet(f"load_state_dict() of {len(whole)} parameters from {min(whole)} on")
        self._load(whole)

    def _gathered(self, name: str) -> Tensor | None:
        """A parameter's present value where it is on this rank."""
        now = self._revision()
        return next((of[name] for revision, of in (self._held, self._found) if name in of and revision == now), None)

    @contextmanager
    def held(self, names: Collection[str]) -> Iterator[None]:
        """Within, each rank has these values and reads them by itself. All ranks enter it together; RuntimeError on
        those that waited too long for others."""
        before, others = self._held, len(names) - 1
        what = f"the parameter {min(names)}{f' with {others} others' if others else ''} of engine.module"
        meet(what, self._asks, sorted(names))
        self._held = self._revision(), {**before[1], **self._gather(sorted(names))}
        try:
            yield
        finally:
            self._held = before

    def help_others(self) -> None:
        """At the end of this rank's script: gather what ranks that go on read, until all have ended or none reads."""
        with suppress(RuntimeError, ValueError):  # the script has destroyed the groups, or the store's rank has left
            store: Any = dist.distributed_c10d._get_default_store()
            num_ranks, ended, until = dist.get_world_size(), f"{self._asks}/ended", time.monotonic() + _END_S
            store.add(ended, 1)
            while store.add(ended, 0) < num_ranks and time.monotonic() < until:
                what, turn, names = json.loads(store.get(self._asks)) if store.check([self._asks]) else ("", "", [])
                if not names or not 0 < store.add(turn, 0) < num_ranks:
                    time.sleep(_LOOK_S)
                    continue
                meet(what)
                self._gather(names)
                until = time.monotonic() + _END_S

    def is_changed(self, name: str, value: Tensor) -> bool:
        """Whether a copy that `of` has just given is another than the parameter's value; so it is taken to be where
        others have been gathered since."""
        right = self._gathered(name)
        return right is None or not torch.equal(value.detach(), right.to(value.device, value.dtype))

    def lend(self, name: str, part: Tensor) -> None:
        """Remember what stands for a parameter's own memory."""
        self._last = part
        self._lent = [lent for lent in self._lent if lent[1]() is not None]
        self._lent.append((name, weakref.ref(part), part._version))

    def take_back(self) -> None:
        """Before a step: what was lent takes no memory of it, and nobody asks later what is written to it."""
        self._problem = self._problem or _written(self._lent)
        self._lent, self._last = [], None

    def problem(self) -> str:
        """What a script has written to before the step, "" if nothing."""
        found, self._problem = self._problem, ""
        return found

    def __deepcopy__(self, memo: Any) -> Values:
        return self


def _written(lent: Sequence[tuple[str, weakref.ref[Tensor], int]]) -> str:
    for name, reference, version in lent:
        part = reference()
        if part is not None and part._version != version:
            return (
                f"a script has written to what it read of the parameter {name} of engine.module, which is a copy: the "
                f"ranks share its value since ds_hydra.initialize(). {REMEDY}"
            )
    return ""


def meet(what: str, asks: str = "", names: Sequence[str] = ()) -> None:
    """Return when all ranks have called this for the same thing; RuntimeError on those that waited too long for others.

    Through the ranks' common store, for a collective that some ranks never come to would hang. Who comes first says at
    `asks` which parameters are then gathered, for ranks whose script has ended.
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
    if came == 1 and asks:
        store.set(asks, json.dumps([what, key, list(names)]))
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
