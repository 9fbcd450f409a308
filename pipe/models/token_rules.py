"""Whether the tensor parallel ranks of a model can share its tokens between the blocks [Note: token sharding].

Nothing that a model computes there may look at another token, and no class or config says whether it does. So it is
tried, in a second and without the model's values:

- One forward runs as a rank of several that share tokens, without data. All shapes must fit, and nothing but
  column-parallel layers may read what enters a block. It is compared with one under plain tensor parallelism: a
  parameter that meets fewer tokens here has a part of its gradient on each rank, one that meets fewer tokens in some of
  its uses only cannot be trained so.
- One forward runs with blocks that treat each token alone, on 6 random tokens, on the first 3 and on the last 3. What
  leaves the last norm must be the same for each token, and no branch may depend on their values: ranks would go
  different ways, and wait for each other for ever.

  norm of layer    (1, 12, 64) alone, (1, 6, 64) as one rank of two   -> its gradient is a part of the sum
  q_norm           (1, 12, 4, 8)      (1, 12, 4, 8)                   -> as under plain tensor parallelism
  shift by a token 6 tokens: a + 0, b + a, c + b, d + c, ...; the last 3 alone: d + 0, ...    -> refused

Such a plan cuts the linear layers. What lies between two of them (a norm of the queries, an activation with parameters)
computes on a part of the features, and its parameters with it. So one forward is run as a single rank and one as a
rank of several, both without data, and what enters each module is compared. For 6 heads of 8 features under tp=3:

    enters          alone          tp=3           parameter        rule
    norm of layer   (1, T, 48)     (1, T, 48)     weight (48,)     complete: every rank computes the same
    q_norm          (1, T, 6, 8)   (1, T, 2, 8)   weight (8,)      partial: the ranks' gradients add up
    q_norm          (1, T, 6, 8)   (1, T, 2, 8)   weight (6, 8)    cut along dimension 0, in 6 units

Latent attention is cut by heads where the plan has no word of it, as the plans of other models have it: keys and values
of all heads come from one latent, which every rank computes whole. Where one forward does not run so, it is left whole.

A mean, a norm or another statistic over features of which each rank has only a part is another number than alone. Who
takes one is told by the sizes that its functions reduce: a module of a layer is then computed whole by every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_hydra.pipe.adapters import plain_name
from ds_hydra.pipe.attention.interface import tell_pack
from ds_hydra.pipe.model_plan import ShardRule, end_of_slots
from ds_hydra.pipe.models.cut import ForwardEnded, hidden_in
from ds_hydra.pipe.models.flow import arguments, keep_stack, tensors_in
from ds_hydra.pipe.models.meta_copy import (
    are_few,
    devices_to_run_on,
    give_values,
    place_on,
    repeated,
    run_experts_one_by_one,
)
from ds_hydra.pipe.placement import Pipeline, Stage
from ds_hydra.pipe.rows import MicroBatch, Pack
from ds_hydra.pipe.stage import StageModule, StagePlace, dtype_of
from ds_hydra.pipe.tensor_parallel import style_of
from ds_hydra.pipe.token_sharding import SHARDED_STYLES, blocks_of
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
class Looked:
    """What one forward did, as far as it ran."""

    met: dict[str, list[Shape]]  # parameter -> shapes of the tensors that it meets
    reduced: dict[tuple[str, str], list[Shape]]  # module and function -> sizes it reduces, call by call
    error: Exception | None = None


def look(source: CausalLM, tp: int, **how: Any) -> Looked:
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
) -> Looked:
    """One forward of all layers; `linear`: linear layers and embeddings meet their input too; `prepare` is called with
    the stage's module before it runs."""
    dtype = source.dtype
    stage = Stage(tuple(range(tp)), 0, source.plan.num_layers, tp)
    group = _Silent(0, tp) if tp > 1 else None
    place = StagePlace(Pipeline((stage,)), 0, 0, 0, group, None, token_sharding=token_sharding)
    watch = _Watch(source.layers_path)
    seen = Looked(watch.met, watch.reduced)
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


# Projections of latent attention, by the names that they have in all models of transformers (DeepSeek-V2's plan).
_LATENT = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_a_proj_with_mqa": "mla_kv_a_proj", "kv_b_proj": "colwise",
           "o_proj": "rowwise"}  # fmt: skip
_LATENT_ALL = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_ATTEMPTS = 5  # a rule that was found lets the forward run on to the next parameter without one


@dataclass(frozen=True)
class UnnamedRules:
    """Rules by the parameter's name with `*` for layer numbers, and why tensor parallelism is impossible, if it is.

    Modules in `whole`, by their paths, with `*` again, are computed by each rank as if it were alone, whatever the plan
    says. `latent`: the plan is `latent_styles` too.
    """

    rules: Mapping[str, ShardRule] = field(default_factory=dict)
    obstacle: str = ""
    whole: frozenset[str] = frozenset()
    latent: bool = False

    def rule(self, name: str) -> ShardRule | None:
        """The rule of a parameter, if it has one."""
        return self.rules.get(_generic(name))


def without(plan: Mapping[str, str], modules: Iterable[str]) -> dict[str, str]:
    """A plan of styles without what it says of modules, by their paths, and of what is in them."""
    inside = tuple(_generic(f"{path}.") for path in modules)
    return {key: style for key, style in plan.items() if not _generic(f"{key}.").startswith(inside)}


def derive(source: CausalLM) -> UnnamedRules:
    """Rules of all parameters that need one. The obstacle is a sentence for the user."""
    tp = least_degree(source)
    if tp == 1 or source.plan.no_tp:
        return UnnamedRules()
    if source.latent:
        found = _derived(source, tp, UnnamedRules(latent=True))
        if not found.obstacle:
            return found
    return _derived(source, tp, UnnamedRules())


def latent_styles(model: nn.Module, plan: Mapping[str, str], boxes: Iterable[str]) -> dict[str, str]:
    """Styles by which tensor parallel ranks share the heads of latent attention, by the paths of its projections: of
    modules of which the plan has no word, and that are in no box."""
    found: dict[str, str] = {}
    inside = tuple(f"{path}." for path in boxes)
    for path, module in model.named_modules():
        children = {name for name, _ in module.named_children()}
        if not children.issuperset(_LATENT_ALL) or f"{path}.".startswith(inside):
            continue
        own = {f"{path}.{name}": style for name, style in _LATENT.items() if name in children}
        if not any(style_of(plan, name) for name in own):
            found |= own
    return found


def _derived(source: CausalLM, tp: int, known: UnnamedRules) -> UnnamedRules:
    """Rules of all parameters that need one beside what is known."""
    alone = look(source, 1)
    if known.latent:
        source = source.planned(known, source.tokens)
    for _ in range(_ATTEMPTS):
        cut = look(source, tp)
        rules = dict(_new_rules(source, alone, cut, known.rules))
        part = _of_a_part(alone, cut)
        inside = part is not None and re.match(rf"{re.escape(source.layers_path)}\.\d+\.", part.module)
        if rules:
            known = replace(known, rules={**known.rules, **rules})
        elif part is not None and inside and cut.error is None:
            known = replace(known, whole=known.whole | {_generic(f"{part.module}.").rstrip(".")})
        else:
            break
        source = source.planned(known, source.tokens)
    return replace(known, obstacle=_obstacle(source, tp, alone, cut))


class _Part(NamedTuple):
    """A module that takes a mean or its like over features, of which a rank has only some."""

    module: str
    function: str
    sizes: tuple[object, object]


def _of_a_part(alone: Looked, cut: Looked) -> _Part | None:
    """The first of them."""
    for (module, function), sizes in alone.reduced.items():
        parts = cut.reduced.get((module, function), [])
        if len(parts) == len(sizes) and parts != sizes:
            return _Part(module, function, next(pair for pair in zip(sizes, parts, strict=True) if pair[0] != pair[1]))
    return None


def _obstacle(source: CausalLM, tp: int, alone: Looked, cut: Looked) -> str:
    remedy = "use strategies with tp1 for this model"
    if cut.error is not None:
        return (
            f"one forward of {source.name} as a rank of tp={tp} fails ({type(cut.error).__name__}: {cut.error}): its "
            f"tensor parallel plan does not fit it; {remedy}"
        )
    if (part := _of_a_part(alone, cut)) is None:
        return ""
    whole, some = part.sizes
    return f"{part.module} takes a {part.function} over {whole}, of which a rank of tp={tp} has only {some}; {remedy}"


def least_degree(source: CausalLM) -> int:
    """The least TP degree above 1 that the model's heads can be cut by; 1 where there is none."""
    heads, kv_heads = source.plan.num_heads, source.plan.num_kv_heads
    if not heads and source.boxes:  # no rank has a part of the heads: any degree is as good
        return 2
    fit = (tp for tp in range(2, heads + 1) if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0))
    return next(fit, 1)


def _new_rules(
    source: CausalLM, alone: Looked, cut: Looked, known: Mapping[str, ShardRule]
) -> Iterator[tuple[str, ShardRule]]:
    for name, (whole, *_) in alone.met.items():
        part, spec = next(iter(cut.met.get(name, [])), whole), source.specs[name]
        if part == whole or len(part) != len(whole):
            continue
        if _generic(name) in known or spec.rule.dim is not None or spec.rule.gradient == "partial":
            continue
        # Counted from the right, as broadcasting aligns a parameter with what it meets.
        smaller = [dim - len(whole) for dim in range(len(whole)) if whole[dim] != part[dim]]
        dims = [dim for dim in smaller if -dim <= len(spec.shape) and spec.shape[dim] == whole[dim]]
        if dims:
            yield _generic(name), ShardRule(len(spec.shape) + dims[0], units=whole[dims[0]])
        else:
            yield _generic(name), ShardRule(gradient="partial")


def _generic(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


_TOKENS = 6  # of a rank, where shapes are compared
_NEAR = 1e-4  # rounding of FP32 norms; other tokens are off by a tenth and more
_MOST_NUMBERS = 1 << 22  # of a parameter that gets a random number for each of its own
# Functions that hand numbers of a tensor over to Python, which may go another way by them.
_ASK = frozenset({"__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy", "equal", "allclose"})

Returned = tuple[type, int] | None
"""What a block returns: None for a tensor; else the type and length of what holds it in front of nothing else."""


@dataclass(frozen=True)
class TokenRules:
    """Parameters whose gradient is a part of the sum on each rank, and why tokens are not shared, if they are not."""

    partial: frozenset[str] = frozenset()
    obstacle: str = ""


class _DoesNotAllowError(Exception):
    """Why ranks cannot share tokens."""


def share_tokens(source: CausalLM) -> TokenRules:
    """The rules for a source that is planned for plain tensor parallelism. The obstacle is a clause for the user."""
    try:
        blocks = _blocks(source)
        returned: dict[str, Returned] = {}
        whole, shared = _looks(source, blocks, returned)
        partial = frozenset(_partial(source, whole, shared))
        _compare_tokens(source, returned)
    except _DoesNotAllowError as error:
        return TokenRules(obstacle=str(error))
    return TokenRules(partial)


def _blocks(source: CausalLM) -> frozenset[str]:
    """Paths of the blocks, if the plan and the layers are of the kind that is known."""
    if source.plan.no_tp or source.plan.no_pp:
        raise _DoesNotAllowError(source.plan.no_tp or source.plan.no_pp)
    if least_degree(source) == 1:
        raise _DoesNotAllowError("no tensor parallel degree divides its attention heads")
    model = source.template
    for name in (*(name for name, _ in model.named_modules()), *source.specs):
        style = style_of(source.style_plan, name)
        if style is not None and style not in SHARDED_STYLES:
            raise _DoesNotAllowError(f"{name} has the tensor parallel style {style}")
    blocks = frozenset(blocks_of(source.style_plan, model).values())
    if not blocks:
        raise _DoesNotAllowError("its tensor parallel plan cuts no layer")
    if any(door.token_dim != 1 or len(door.shape) != 2 for door in source.flow.doors):
        raise _DoesNotAllowError("its layers do not hand on hidden states of the shape (1, tokens, features)")
    return blocks


def _looks(source: CausalLM, blocks: frozenset[str], returned: dict[str, Returned]) -> tuple[Looked, Looked]:
    """One rank's forward with all tokens and with shared ones; notes what the blocks return."""
    tp = least_degree(source)

    def keep(module: nn.Module) -> None:
        for path in blocks:
            module.get_submodule(path).register_forward_hook(
                lambda _module, _args, out, path=path: returned.update({path: _kind(out)})
            )

    whole = look(source, tp, tokens=tp * _TOKENS, linear=True)
    shared = look(source, tp, tokens=tp * _TOKENS, linear=True, token_sharding=True, prepare=keep)
    if shared.error is not None:
        raise _DoesNotAllowError(f"a forward of tp={tp} with shared tokens fails: {_first_line(shared.error)}")
    return whole, shared


def _kind(out: Any) -> Returned:
    if isinstance(out, Tensor):
        return None
    if type(out) in (tuple, list) and isinstance(out[0], Tensor) and all(item is None for item in out[1:]):
        return type(out), len(out)
    raise _DoesNotAllowError(f"a block returns more than hidden states ({type(out).__name__})")


def _partial(source: CausalLM, whole: Looked, shared: Looked) -> list[str]:
    """Uncut parameters of which each rank has a part of the gradient."""
    found: list[str] = []
    for name, spec in source.specs.items():
        if not spec.trainable or spec.rule.dim is not None:
            continue
        module, _, leaf = plain_name(name).rpartition(".")
        if leaf == "bias" and (style_of(source.style_plan, module) or "").startswith("rowwise"):
            found.append(name)  # added to the own tokens of what leaves the layer, where its input has all
            continue
        before, after = whole.met.get(name), shared.met.get(name)
        if not before or not after or len(before) != len(after):
            raise _DoesNotAllowError(f"{name} is used in a way that does not tell which tokens it meets")
        fewer = {one != other for one, other in zip(before, after, strict=True)}
        if len(fewer) > 1:
            raise _DoesNotAllowError(f"{name} meets all tokens in one place and the shared ones in another")
        if fewer == {True}:
            found.append(name)
    return found


def _compare_tokens(source: CausalLM, returned: Mapping[str, Returned]) -> None:
    """Whether each token's hidden states below the head are the same among others and among fewer."""
    model, generator = source.copy_to_run(torch.device("cpu"), None).eval(), torch.Generator().manual_seed(0)
    place_on(model, torch.device("cpu"), torch.float32)
    inside = tuple(f"{path}." for path in returned)
    values = {
        name: _random_values(parameter.shape, generator, one_row=name.startswith(inside))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    give_values(model, values, torch.device("cpu"))
    for path, kind in returned.items():
        block = model.get_submodule(path)
        block.forward = _token_wise(kind)  # type: ignore[method-assign]
    hidden = torch.randn((1, 6, source.width(0)), generator=generator)
    decisions = _Decisions()
    try:
        together = _below_head(source, model, hidden, decisions)
        apart = torch.cat([_below_head(source, model, part, decisions) for part in hidden.chunk(2, dim=1)], dim=1)
    except Exception as error:
        raise _DoesNotAllowError(f"its layers do not run on a part of the tokens: {_first_line(error)}") from error
    if decisions.found:
        raise _DoesNotAllowError(f"between its blocks it decides by the values of the tokens ({decisions.found})")
    if together.shape != apart.shape:
        raise _DoesNotAllowError(f"its layers make {tuple(apart.shape)} of the parts of {tuple(together.shape)}")
    if not bool((together - apart).abs().max() <= _NEAR * together.abs().max()):
        raise _DoesNotAllowError("between its blocks a token sees other tokens")


def _random_values(shape: torch.Size, generator: torch.Generator, *, one_row: bool) -> Tensor:
    """Random numbers; with `one_row`, or of what is too large for a table of positions, one row stands for all."""
    if one_row or shape.numel() > _MOST_NUMBERS:
        return torch.randn(shape[-1:], generator=generator).expand(shape)  # takes no memory
    return torch.randn(shape, generator=generator)


class _Decisions(TorchFunctionMode):
    """Notes that numbers are asked for, upon which a forward may go another way: each rank would ask its own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ""  # the function that was called first

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        # Whole numbers are positions and the like, of which all ranks have all.
        if name in _ASK and (args[0].is_floating_point() or args[0].dtype == torch.bool):
            self.found = self.found or name
        return func(*args, **(kwargs or {}))


def _token_wise(returned: Returned) -> Callable[..., Any]:
    """A block that treats each token alone."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = torch.sin(args[0] if args else next(iter(kwargs.values()))) / 2
        return out if returned is None else returned[0]((out, *[None] * (returned[1] - 1)))

    return forward


def _below_head(source: CausalLM, model: Any, hidden: Tensor, layers: TorchFunctionMode) -> Tensor:
    """What the layers and what follows them make of some of the tokens, when the model is called with 6 of them; they
    run within the mode `layers`."""
    within = ExitStack()

    def enter(_: Tensor) -> Tensor:
        within.enter_context(layers)
        return hidden

    def leave(_: nn.Module, __: Any, out: Any) -> None:
        raise ForwardEnded(hidden_in(out))

    handles = [
        source.flow.doors[0].enter_by(model.get_submodule(source.layers_path)[0], enter),
        model.get_submodule(source.flow.body).register_forward_hook(leave),
    ]
    ids = torch.arange(3, 9)[None]
    positions = torch.arange(6)[None] + source.first_position
    tell_pack(model, lambda: Pack((6,)))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(input_ids=ids, position_ids=positions, use_cache=False)
    except ForwardEnded as ended:
        return ended.value  # type: ignore[no-any-return]
    finally:
        within.close()
        for handle in handles:
            handle.remove()
    raise AssertionError(f"{source.name} did not run {source.flow.body}, as it did when traced")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
