"""One forward as a rank of several in, without data and without the others; what its parameters meet out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_hydra.pipe.model_plan import end_of_slots
from ds_hydra.pipe.models.flow import keep_stack
from ds_hydra.pipe.models.graph import arguments, tensors_in
from ds_hydra.pipe.models.meta_copy import are_few, devices_to_run_on, repeated, run_experts_one_by_one
from ds_hydra.pipe.placement import Pipeline, Stage
from ds_hydra.pipe.rows import MicroBatch, Pack
from ds_hydra.pipe.stage import StageModule, StagePlace, dtype_of
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.pipe.models.causal_lm import CausalLM

_STATISTICS = frozenset(
    {"mean", "std", "var", "std_mean", "var_mean", "sum", "norm", "vector_norm", "softmax", "log_softmax", "logsumexp"}
    | {"amax", "amin", "argmax", "argmin", "topk", "sort", "argsort", "kthvalue", "median", "quantile", "cumsum"}
)
_NORMS = frozenset({"layer_norm", "rms_norm"})

Shape = tuple[int, ...]


@dataclass
class Seen:
    """What one forward did, as far as it ran."""

    met: dict[str, list[Shape]]  # parameter -> shapes of the tensors that it meets
    reduced: dict[tuple[str, str], list[Shape]]  # module and function -> sizes it reduces, call by call
    error: Exception | None = None


def look(source: CausalLM, tp: int, **how: Any) -> Seen:
    """What rank 0 of `tp` does, as `_run` says, without the model's values."""
    first, then = devices_to_run_on(source.template)
    seen = _run(source, tp, first, **how)
    again = seen.error is not None and not isinstance(seen.error, ConfigError)
    return _run(source, tp, then, **how) if again else seen


def cannot_run(source: CausalLM) -> str:
    """Why one stage of a model with boxes cannot run a pack; empty if it can."""
    error = _run(source, 1, torch.device("cpu"), within=_Apart()).error
    return "" if error is None else f"{type(error).__name__}: {str(error).partition('. ')[0]}"  # torch's go on for long


class _Apart(TorchFunctionMode):
    """Within it, nothing is computed of numbers and of what has none: in place, torch would not say that it did not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        hollow = {value.is_meta for value in arguments(args, kwargs) if isinstance(value, Tensor)}
        if len(hollow) > 1 and getattr(func, "__name__", "") not in ("to", "_to"):
            raise ConfigError(f"{getattr(func, '__name__', func)} is given what was not computed before the layers")
        return func(*args, **kwargs)


def _run(
    source: CausalLM,
    tp: int,
    device: torch.device,
    *,
    tokens: int = 11,
    token_sharding: bool = False,
    linear: bool = False,
    prepare: Callable[[nn.Module], None] = lambda module: None,
    within: AbstractContextManager[Any] | None = None,
) -> Seen:
    """One forward of all layers; `linear`: linear layers and embeddings meet their input too; `prepare` is called with
    the stage's module before it runs."""
    dtype = source.dtype
    stage = Stage(tuple(range(tp)), 0, source.plan.num_layers, tp)
    group = _Silent(0, tp) if tp > 1 else None
    place = StagePlace(Pipeline((stage,)), 0, 0, 0, group, None, token_sharding=token_sharding)
    watch = _Watch(source.layers_path)
    seen = Seen(watch.met, watch.reduced)
    try:
        built = source.build(place, device, dtype)
        _install_numbers(source, built, stage, device, dtype)
        run_experts_one_by_one(built.module)
        prepare(built.module)
        keep_stack(built.module, watch.stack)
        watch.follow(built, linear=linear)
        ids = torch.arange(3, 3 + tokens, device=device)
        weights = torch.ones(tokens, dtype=torch.float64, device=device)
        positions = torch.arange(tokens, device=device)[None]
        with torch.no_grad(), torch.random.fork_rng(devices=[]), watch, within or nullcontext():
            built.forward(None, MicroBatch(Pack((tokens,)), positions, ids[None], ids, weights))
    except Exception as error:  # of the model's own forward: whatever it is, it is told to the user
        seen.error = error
    return seen


class _Watch(TorchFunctionMode):
    """Notes what parameters meet, and the sizes of the dimensions that functions within layers reduce.

    What enters a module meets its parameters; a bare parameter of a module with others inside meets what a function is
    handed together with it.
    """

    def __init__(self, layers_path: str):
        super().__init__()
        self.stack: list[str] = []
        self.met: dict[str, list[Shape]] = {}
        self.reduced: dict[tuple[str, str], list[Shape]] = {}
        self._prefix = layers_path + "."
        self._bare: dict[int, str] = {}

    def follow(self, built: StageModule, *, linear: bool) -> None:
        names = {id(parameter): name for name, parameter in built.parameters.items()}
        for module in built.module.modules():
            own = {id(p): names[id(p)] for p in module._parameters.values() if p is not None and id(p) in names}
            if not own or (isinstance(module, nn.Linear | nn.Embedding) and not linear):
                continue
            if next(module.children(), None) is not None:
                self._bare |= own
            else:
                module.register_forward_pre_hook(self._enters(tuple(own.values())), with_kwargs=True)

    def _enters(self, parameters: Sequence[str]) -> Any:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            found = next(tensors_in((args, kwargs)), None)
            for name in parameters if found is not None else ():
                self.met.setdefault(name, []).append(tuple(found.shape))  # type: ignore[union-attr]

        return enter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").removeprefix("linalg_")
        if self.stack and self.stack[-1].startswith(self._prefix):
            if name in _STATISTICS or name in _NORMS:
                self.reduced.setdefault((self.stack[-1], name), []).append(_reduced_sizes(name, args, kwargs))
            if self._bare:
                self._meet([value for value in arguments(args, kwargs) if isinstance(value, Tensor)])
        return func(*args, **kwargs)

    def _meet(self, handed: Sequence[Tensor]) -> None:
        others = [tuple(value.shape) for value in handed if id(value) not in self._bare]
        for value in handed if others else ():
            if id(value) in self._bare:
                self.met.setdefault(self._bare[id(value)], []).append(max(others, key=len))


def _reduced_sizes(name: str, args: Any, kwargs: Any) -> Shape:
    values = args[0] if args else kwargs.get("input")
    if not isinstance(values, Tensor):
        return ()
    if name in _NORMS:
        return tuple(args[1] if len(args) > 1 else kwargs["normalized_shape"])
    dims = kwargs.get("dim", next((arg for arg in args[1:] if isinstance(arg, int | tuple | list)), None))
    if name in ("topk", "kthvalue", "quantile"):  # the number that comes first is no dimension
        dims = kwargs.get("dim", args[2] if len(args) > 2 else -1)
    dims = tuple(range(values.dim())) if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
    return tuple(values.shape[dim] for dim in dims)


def _install_numbers(
    source: CausalLM, built: StageModule, stage: Stage, device: torch.device, dtype: torch.dtype
) -> None:
    """One repeated number for every parameter."""
    few = are_few(source.template.parameters())
    for bucket in source.plan.buckets:
        number = torch.full((), 0.01, dtype=dtype_of(bucket, dtype), device=device)
        slots = source.plan.slots(bucket, stage, 0)
        for slot in slots:
            built.install(slot, repeated(number, (end_of_slots(slots),), few=few))


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class _Silent(dist.ProcessGroup):
    """A group in which nobody answers: right in shapes, not in values."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)  # type: ignore[call-arg]

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        return _Done()

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> _Done:
        for parts, mine in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(mine)
        return _Done()

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Done:
        output.view(self.size(), -1).copy_(source.view(1, -1))
        return _Done()

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Done:
        output.copy_(source[: output.numel()])
        return _Done()

    # What torch before 2.13 calls them.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # type: ignore[assignment]
