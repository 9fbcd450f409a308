"""The user's model after `initialize`: whether a script has changed what the stages are copies of.

[Note: the twin]
Stages compute with copies of the model, and its values are the masters. So what a script does to the model afterwards
has no effect on what is trained. Whether a parameter requires a gradient is asked anew in every step. Whether anything
else makes the model compute something else is tried, and told before the next update, so that nobody trains for days on
what he thinks that he has changed.

The twin is a copy from when the engine was made, of which each rank has one. Both run forward and backward on some
tokens of the step, with any values: windows of short rows of random numbers, so that nothing is gathered and next to no
memory is taken. The same code on the same rank gives the same bits, so a bit that differs is an edit. They run where a
cheap sign shows that something was changed, and every so many steps that it takes 1 % of the time. What they find equal
is let pass. What they cannot see is told by its sign: a change in a module that no token comes to, and one that counts.
"""

from __future__ import annotations

import functools
import logging
import operator
import random
import sys
import time
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_hydra.pipe.models.meta_copy import copy_to_meta, parameter_hooks, replace_parameters
from ds_hydra.pipe.models.positions import tried_tokens
from ds_hydra.pipe.models.refusals import failing, known_tokens, refuse_own_attention
from ds_hydra.pipe.models.state import inside, refuse_counting
from ds_hydra.pipe.models.whose_code import GLOBAL_HOOKS, HOOKS, TORCHS
from ds_hydra.step.update import ModelNow
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

TWIN_TOKENS = 128  # of a step that a twin sees
_AT_SIGNS = 2048  # where something was changed, such as a window; fewer where there is no memory for so many
_SHARE = 0.01  # of a job's time that it may take
_OFFSETS = 4096  # at which windows of a row begin
_DEPTH = 6  # lists and objects in each other that are compared
_SMALL = 1 << 14  # bytes of tensors and arrays that are compared by their numbers
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CODE: Any = (Callable, types.ModuleType, property, staticmethod, classmethod)
_MODE = "mode of training"
_HELD = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_WHOLE = (nn.Module, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, GenerationConfig)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_REMEDY = (
    "Stages are copies of the model, so this would have no effect. Change it before ds_hydra.initialize(); in the "
    "middle of a run save a checkpoint, make the engine of the changed model, and load"
)

Sign = dict[tuple[str, str], Any]  # what a model consists of, by path of the module and by words for the part
Marks = dict[str, list[list[int]]]  # of what modules computed, in the order in which they ended, and of gradients


class KeptModel:
    """Compares a model with what it was when this was made."""

    def __init__(
        self, model: nn.Module, names: Mapping[str, str], *,
        steps_differ: Callable[[], bool], twin: Callable[[], Twin] | None = None, speaks: bool = False,
    ):  # fmt: skip
        """`names`: of each path of a parameter its name among the masters. `steps_differ`: whether the optimizer counts
        steps for each parameter, which one that was frozen for a while has made fewer of. `twin` makes the model's,
        where it has a forward. `speaks`: whether this rank tells what all do."""
        self._model, self._names, self._steps_differ, self._speaks = model, names, steps_differ, speaks
        self._sign, self._code = sign_of(model), Code(model)
        self._trained = self._trained_now()
        self._frozen: frozenset[str] = frozenset()  # since when this was made
        self._twin: Twin | None = None
        try:
            self._twin = twin and twin()
        except Exception as error:
            self._without_twin(error)
        self._every, self._equal, self._ended = 0, 0, 0.0

    def moved(self, layers: str) -> dict[str, Tensor]:
        """Buffers below the path of the layers that a script has written to since this was asked last, by path: stages
        take them over, and they count as changes no more."""
        found = {}
        for path, module in self._model.get_submodule(layers).named_modules(prefix=layers):
            for key, buffer in module._buffers.items():
                before, now = self._sign.get((path, f"buffer {key}")), _token(buffer, 0, {})
                if before and now and before != now and before[1] == now[1]:  # alike but in value
                    self._sign[path, f"buffer {key}"] = now
                    found[f"{path}.{key}"] = buffer
                    if self._twin is not None:
                        self._twin.copied.get_buffer(f"{path}.{key}").copy_(buffer)
        return found

    def now(self, step: int = 0, tokens: Tensor | None = None, longest: int = TWIN_TOKENS) -> ModelNow:
        """What has changed before the update of `step`, and which trained parameters require no gradient any more.
        `tokens` (1, any) of it, whose `longest` sequence has so many."""
        took = time.perf_counter() - self._ended if self._ended else 0.0
        changed, problem = self._changed(), ""
        if changed or (took and (not self._every or step % self._every == 0)):
            began = time.perf_counter()
            problem = self._tried(step, tokens, longest, changed)
            self._set_pace(time.perf_counter() - began, took)
        trained = self._trained_now()
        thawed = sorted(trained - self._trained)
        if thawed and not problem:
            problem = f"{thawed[0]} requires a gradient, but was frozen when the engine was made. {_REMEDY}"
        frozen = frozenset(self._trained - trained)
        again = sorted(self._frozen - frozen)
        if again and not problem and self._steps_differ():
            problem = (
                f"{again[0]} was frozen for some steps, and the optimizer counts steps for all parameters together: it "
                "would go on with the others' count. Keep it frozen, or use an optimizer without such a count, as SGD"
            )
        self._frozen, self._ended = frozen, time.perf_counter()
        return ModelNow(problem, frozen)

    def _changed(self) -> dict[str, str]:
        """The signs of change: what of which module, in words, and the path of the module."""
        before, now = self._sign, sign_of(self._model)
        keys = () if before == now else {**before, **now}
        found = [key for key in keys if before.get(key, self) != now.get(key, self)]
        # Adapters of a pretrained model are made in training inside a model in evaluation, until the first train().
        what = {f"{of} of {f'{path} of the model' if path else 'the model'}": path for path, of in found
                if of != _MODE or (path, of) in now}  # fmt: skip
        code = self._code.changed()
        return what | {f"{code} of the model": "" for _ in [code] if code}

    def _tried(self, step: int, tokens: Tensor | None, longest: int, changed: Mapping[str, str]) -> str:
        """Why the job cannot go on, if the model computes something else than its twin; `changed` as `_changed` has
        it."""
        where, came, what = "", frozenset[str](), [f"{one} was changed after the engine was made" for one in changed]
        try:
            if changed:
                parameter_hooks(self._model)
                refuse_own_attention(self._model)
            if self._twin is not None:
                where, came = self._compared(tokens, longest, bool(changed))
        except _CannotRun as error:
            self._without_twin(error)
        except ConfigError as error:
            return f"{what[0]}: {error}. {_REMEDY}"
        if where:
            last = f"found equal at step {self._equal}" if self._equal else "not tried before"
            said = f"{what[0]}, and {where}" if changed else f"{where} than when the engine was made"
            return f"{said} ({last}; step {step} stops before its update). {_REMEDY}"
        for one, path in zip(what, changed.values(), strict=True):
            if not any(f"{other}.".startswith(f"{path}." if path else "") for other in came):
                return f"{one}. {_REMEDY}"  # nobody can tell what it changes where no token of a text comes to
        self._sign, self._code, self._equal = sign_of(self._model), Code(self._model), step
        return ""

    def _compared(self, tokens: Tensor | None, longest: int, at_sign: bool) -> tuple[str, frozenset[str]]:
        """As `Twin.differs`."""
        assert self._twin is not None, "asked by who has one"
        if at_sign and longest > TWIN_TOKENS:
            with suppress(torch.OutOfMemoryError):
                return self._twin.differs(tokens, min(_AT_SIGNS, longest), counting=True)
        try:
            return self._twin.differs(tokens, min(TWIN_TOKENS, longest), counting=at_sign)
        except torch.OutOfMemoryError as error:
            raise _CannotRun(failing(error)) from error

    def _without_twin(self, error: Exception) -> None:
        self._twin = None
        if self._speaks:
            logger.warning("the model cannot be run beside a copy of it (%s), so that whatever a script changes in "
                           "it is refused, also what changes no number", failing(error))  # fmt: skip

    def _set_pace(self, seconds: float, step_seconds: float) -> None:
        """Say how often the twin runs, which takes so long beside a step. Powers of two, so that ranks which measure
        other times run it in the same steps."""
        if self._twin is None or not step_seconds:
            return
        first, self._every = not self._every, 1 << int(seconds / step_seconds / _SHARE).bit_length()
        if first and self._speaks:
            logger.info("in every %d. step, and where something of it was changed, the model is run beside a copy from "
                        "the start, for %.0f ms, to see whether both compute the same",
                        self._every, 1e3 * seconds)  # fmt: skip

    def _trained_now(self) -> set[str]:
        """The masters of parameters that require a gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            named = self._model.named_parameters(remove_duplicate=False)
            return {self._names[path] for path, own in named if own.requires_grad and path in self._names}


class _CannotRun(Exception):
    """The twin itself cannot be run so that its results mean anything."""


class Twin:
    """A copy of a model from when this was made, to run beside it."""

    def __init__(
        self, model: nn.Module, names: Mapping[str, str], dtype: torch.dtype, wide: Collection[str],
        device: torch.device,
    ):  # fmt: skip
        """`names` as of `KeptModel`; floating parameters are of the `dtype`, but for those that are `wide`. ConfigError
        for a model that cannot be copied."""
        self._model, self._device, self._code = model, device, Code(model)
        with torch._C.DisableTorchFunctionSubclass():
            self.copied = copy_to_meta(model)
        for path, hooks in parameter_hooks(model).items():
            self.copied.get_parameter(path)._backward_hooks = OrderedDict(enumerate(hooks))
        both = [(names.get(path, path), own) for one in (model, self.copied) for path, own in one.named_parameters()]
        self._held = [own for _, own in both]  # so that no other gets the identity of one
        self._name_of = {id(own): name for name, own in both}
        wides, of_copied = {names.get(path, path) for path in wide}, both[len(both) // 2 :]
        kinds = {name: torch.float32 if name in wides else dtype for name, _ in of_copied}
        self._values = functools.partial(_any_values, of_copied, kinds, device)  # made for each run, and let go
        self._modes = {path: of.training for path, of in model.named_modules() if of.training != model.training}
        self._known = known_tokens(model)
        self._special = torch.tensor(tried_tokens(model), dtype=torch.int64)

    def differs(self, tokens: Tensor | None, most: int, *, counting: bool) -> tuple[str, frozenset[str]]:
        """What of the model computes something else than the twin, in words, empty if nothing does; and the modules
        that ran, on so many `tokens`, as of `KeptModel.now`. `counting`: ConfigError where a script's code counts its
        calls. Raises `_CannotRun`, and OutOfMemoryError."""
        given = torch.arange(self._known) if tokens is None else tokens.flatten().cpu()
        given = torch.cat((self._special, given.repeat(-(-most // len(given)))))[:most][None].to(self._device)
        right = self._of_twin(given)
        try:
            mine = self._ran(self._model, given, counting=counting)
        except (ConfigError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return f"the model cannot run any more ({failing(error)})", frozenset()
        first = next((key for key in [*mine, *right] if mine.get(key) != right.get(key)), None)
        if first is not None and self._of_twin(given) != right:
            raise _CannotRun("its own bits differ from run to run on this device")
        return "" if first is None else f"{first or 'the model'} computes something else", frozenset((*right, *mine))

    def _of_twin(self, tokens: Tensor) -> Marks:
        """Marks of the twin, in the modes that the model has now, but for parts that it has put into another one."""
        now, whole = dict(self._model.named_modules()), self._model.training
        for path, module in self.copied.named_modules():
            own = path in self._modes and path in now and now[path].training != whole
            module.training = self._modes[path] if own else whole
        try:
            with self._code.as_before():
                marks = self._ran(self.copied, tokens, counting=False)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise _CannotRun(failing(error)) from error
        if marks["finite"] != [[1]]:
            raise _CannotRun("of values drawn at random it makes none that are finite")
        return marks

    def _ran(self, model: Any, tokens: Tensor, *, counting: bool) -> Marks:
        """Marks of all that a model's modules compute, and of gradients."""
        found: list[tuple[str, Tensor]] = []
        values = self._values()
        trained = {self._name_of.get(id(own)): own.requires_grad for own in self._model.parameters()}

        def lent(_: str, own: nn.Parameter) -> nn.Parameter:
            name = self._name_of.get(id(own), "")  # none: a script has put it there, and it has a value of its own
            value = values[name] if name else own
            new = nn.Parameter(value.data, requires_grad=trained.get(name, own.requires_grad))
            for hook in (own._backward_hooks or {}).values():
                new.register_hook(hook)

            def take(one: Tensor) -> None:
                found.append((f"the gradient of {name}", _mark(one.grad)))  # type: ignore[arg-type]
                one.grad = None  # so that there is one at a time

            if new.requires_grad:
                new.register_post_accumulate_grad_hook(take)
            return new

        def keep(path: str, _module: nn.Module, _args: Any, out: Any) -> None:
            found.extend((path, _mark(one)) for one in _tensors(out))

        with _same_numbers(self._device), torch._C.DisableTorchFunctionSubclass(), _as_it_was(model, self._device), \
                refuse_counting(model, "the forward") if counting else nullcontext(), torch.enable_grad():  # fmt: skip
            replace_parameters(model, lent)
            modules = model.named_modules()
            hooks = [module.register_forward_hook(functools.partial(keep, path)) for path, module in modules]
            out = [one for one in _tensors(model(input_ids=tokens, use_cache=False)) if one.requires_grad]
            for hook in hooks:  # layers that are computed again in the backward would end once more
                hook.remove()
            wide = (one.to(torch.promote_types(one.dtype, torch.float32)) for one in out)
            loss = sum((one.square().sum() for one in wide), torch.zeros(())) / tokens.numel()
            if out:
                loss.backward()
        marks: Marks = {}
        numbers = torch.stack([mark.to(self._device) for _, mark in found]).tolist()
        for (key, _), number in zip(found, numbers, strict=True):
            marks.setdefault(key, []).append(number)
        return marks | {"finite": [[int(loss.isfinite())]]}


def _any_values(
    parameters: Iterable[tuple[str, Tensor]], kinds: Mapping[str, torch.dtype], device: torch.device
) -> dict[str, Tensor]:
    """Of each parameter numbers of a type: windows of a random row, no two alike, which take no memory of their own."""
    found: dict[str, Tensor] = {}
    rows: dict[Any, Tensor] = {}
    for number, (name, own) in enumerate(parameters):
        # Row i of a matrix begins 3 numbers behind the one before; in a stack each is whole, as kernels of experts ask.
        strides = [*[16] * (own.dim() - 2), own.shape[-1] if own.dim() > 2 else 3, 1][-own.dim() or 3 :]
        most = _OFFSETS + 1 + sum((size - 1) * by for size, by in zip(own.shape, strides, strict=True))
        # Of matrices as small as usual: of scores of attention that are large each token sees but one other.
        scale = own.shape[-1] ** -0.5 if own.dim() > 1 else 1.0
        kind = most, scale, kinds[name] if own.is_floating_point() else own.dtype
        if kind not in rows:
            rows[kind] = (scale * torch.randn(most, generator=torch.Generator().manual_seed(1))).to(device, kind[2])
        found[name] = rows[kind].as_strided(own.shape, strides, 97 * number % _OFFSETS)
    return found


def _tensors(out: Any) -> list[Tensor]:
    return [one for one in tree_leaves(out) if isinstance(one, Tensor)]


def _mark(tensor: Tensor) -> Tensor:
    """Two numbers (2,) that follow from all bits of a tensor and where they stand."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    bits = real.contiguous().view(_BITS[real.itemsize])
    rows = bits.flatten(0, -2) if bits.dim() > 1 else bits.reshape(1, -1)
    sums = (rows.sum(dim) for dim in (0, 1))
    return torch.stack([(one * torch.arange(1, len(one) + 1, device=one.device)).sum() for one in sums])


@contextmanager
def _same_numbers(device: torch.device) -> Iterator[None]:
    """Within, what is drawn at random is the same each time, and sums on a device are made in one order."""
    ours, numpys = random.getstate(), np.random.get_state()
    exact, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    on_device = [] if device.type == "cpu" else [device]
    try:
        # What was compiled runs as it is written, as copies do; where nothing can have been, nothing is imported.
        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        with torch.random.fork_rng(on_device), warnings.catch_warnings(action="ignore"), eager:
            random.seed(1)
            np.random.seed(1)
            torch.default_generator.manual_seed(1)
            for one in on_device:
                with one:
                    torch.cuda.manual_seed(1)
            torch.use_deterministic_algorithms(exact or bool(on_device), warn_only=True)
            yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)
        torch.use_deterministic_algorithms(exact, warn_only=warns)


@contextmanager
def _as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within, buffers are copies on the device, and what the block changes on modules is put back at its end."""
    own = [vars(module) for module in model.modules()]
    parts = [held[key] for held in own for key in held if key in TORCHS and isinstance(held[key], dict)]
    kept = [(held, held.copy()) for held in (*own, *parts)]
    try:
        for module in model.modules():
            for key, buffer in module._buffers.items():
                module._buffers[key] = None if buffer is None else buffer.to(device, copy=True)
        yield
    finally:
        for held, before in kept:
            held.clear()
            held.update(before)


class Code:
    """What functions, classes and modules the names mean by which a model's code calls them."""

    def __init__(self, model: nn.Module):
        """As it is now."""
        kinds = {kind for module in model.modules() for kind in type(module).__mro__}
        tables = [table for of in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
                  for table in (of._global_mapping, of._local_mapping)]  # fmt: skip
        functions = (one for table in tables for one in table.values())
        homes = {getattr(one, "__module__", "") for one in (*kinds, *functions)}
        files = {sys.modules[home] for home in homes if home in sys.modules}
        files |= {one for file in files for one in vars(file).values() if isinstance(one, types.ModuleType)}
        found: list[tuple[str, Any]] = [("attention", table) for table in tables]
        found += [(one.__name__, one) for held in (kinds, files) for one in held]
        found += [(key.strip("_"), vars(nn.modules.module)[key]) for key in GLOBAL_HOOKS]
        # What comes into a file was not called before, such as other modules that it asks for when they are needed.
        self._spaces = [(name, space, -1 if isinstance(space, types.ModuleType) else len(_inside(space)),
                         {key: one for key, one in _inside(space).items() if issubclass(type(one), _CODE)})
                        for name, space in found]  # fmt: skip

    def _others(self) -> Iterator[tuple[str, Any, Any, Mapping[Any, Any]]]:
        """What means something else now: the name of a place and the place, the name there, and what that meant."""
        for name, space, count, known in self._spaces:
            names = _inside(space)
            if not all(map(operator.is_, map(names.get, known), known.values())):
                yield from ((name, space, key, known) for key, one in known.items() if names.get(key) is not one)
            if count not in (-1, len(names)):
                yield from (
                    (name, space, key, known)
                    for key in set(names).difference(known)
                    if issubclass(type(names[key]), _CODE)
                )

    def changed(self) -> str:
        """A name that means something else now, in words; empty if none does."""
        return next((f"{name} {key} in the code" for name, _, key, _ in self._others()), "")

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Within, names mean what they meant."""
        before = [(space, key, known.get(key), _inside(space).get(key)) for _, space, key, known in self._others()]
        try:
            for space, key, then, _ in before:
                _mean(space, key, then)
            yield
        finally:
            for space, key, _, now in before:
                _mean(space, key, now)


def _inside(space: Any) -> Mapping[Any, Any]:
    return space if isinstance(space, Mapping) else vars(space)


def _mean(space: Any, key: Any, value: Any) -> None:
    """Let a name mean something, or nothing."""
    if isinstance(space, dict):
        space.pop(key, None) if value is None else space.update({key: value})
    else:
        delattr(space, key) if value is None else setattr(space, key, value)


def sign_of(model: nn.Module) -> Sign:
    """What changes with most that a script may change of a model, in a form that can be compared and holds on to what
    it names."""
    found: Sign = {}
    configs: set[int] = set()
    with torch._C.DisableTorchFunctionSubclass():  # released parameters would each call Python
        for path, module in model.named_modules():
            found[path, "class"] = type(module)
            if module.training != model.training:  # as a whole it is switched by whoever trains or evaluates it
                found[path, _MODE] = module.training
            for key, value in vars(module).items():
                if key in _HELD:
                    found |= {(path, f"{_HELD[key]} {name}"): _token(one, 0, {}) for name, one in value.items()}
                elif key in HOOKS:
                    found[path, key.strip("_").replace("_", " ")] = [_token(one, 0, {}) for one in value.values()]
                elif isinstance(value, PretrainedConfig):
                    settings = vars(value) if id(value) not in configs else {}  # most modules have the same one
                    configs.add(id(value))
                    found |= {(path, f"setting {n} in the {key}"): _token(one, 0, {}) for n, one in settings.items()}
                elif key != "training" and not (type(value) is OrderedDict and not value):
                    found[path, f"attribute {key}"] = _token(value, 0, {})
    return found


class _Same:
    """An object that is equal to itself alone."""

    __slots__ = ("held",)

    def __init__(self, held: Any):
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def _token(value: Any, depth: int, seen: dict[int, Any]) -> Any:
    """What of an attribute's value a script may change: numbers, the contents of lists and objects, whose functions."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if isinstance(value, np.ndarray):
        return _Same(value), value.tobytes() if value.nbytes <= _SMALL else None
    # What is the engine's own changes by its own doing. Functions are what the script's are, whatever they hold.
    whole = isinstance(value, _WHOLE) or type(value).__module__.startswith("ds_hydra.")
    if whole or id(value) in seen or depth > _DEPTH:
        return _Same(value)
    seen[id(value)] = value
    return type(value), [(name, _token(part, depth + 1, seen)) for name, part in inside(value, "")]


def _of_tensor(tensor: Tensor) -> Any:
    """A tensor by its identity, its memory and how often it was written to; a small one by its numbers too, since what
    is written to its `data` is not counted."""
    hooks = [hook for key in _HOOKS_OF_TENSORS for hook in (getattr(tensor, key, None) or {}).values()]
    small = tensor.device.type == "cpu" and tensor.nbytes <= _SMALL
    numbers = bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()) if small else None
    what = tensor.device, tensor.shape, tensor.dtype, tuple(map(_Same, hooks))
    return _Same(tensor), what, tensor.data_ptr(), tensor._version, numbers
