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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_hydra.pipe.adapters import plain_name
from ds_hydra.pipe.attention.interface import tell_pack
from ds_hydra.pipe.models.cut import hidden_in
from ds_hydra.pipe.models.lone_rank import Seen, look
from ds_hydra.pipe.models.meta_copy import give_values, place_on
from ds_hydra.pipe.models.unnamed_rules import least_degree
from ds_hydra.pipe.rows import Pack
from ds_hydra.pipe.tensor_parallel import style_of
from ds_hydra.pipe.token_sharding import SHARDED_STYLES, blocks_of

if TYPE_CHECKING:
    from ds_hydra.pipe.models.causal_lm import CausalLM

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


def _looks(source: CausalLM, blocks: frozenset[str], returned: dict[str, Returned]) -> tuple[Seen, Seen]:
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


def _partial(source: CausalLM, whole: Seen, shared: Seen) -> list[str]:
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


class _BelowHead(BaseException):
    """Ends a forward before its head. Not an `Exception`: a model's own handlers must not swallow it."""

    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden


def _below_head(source: CausalLM, model: Any, hidden: Tensor, layers: TorchFunctionMode) -> Tensor:
    """What the layers and what follows them make of some of the tokens, when the model is called with 6 of them; they
    run within the mode `layers`."""
    key = source.flow.doors[0].key

    within = ExitStack()

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        within.enter_context(layers)
        if isinstance(key, int):
            return (*args[:key], hidden, *args[key + 1 :]), kwargs
        return args, kwargs | {key: hidden}

    def leave(_: nn.Module, __: Any, out: Any) -> None:
        raise _BelowHead(hidden_in(out))

    handles = [
        model.get_submodule(source.layers_path)[0].register_forward_pre_hook(enter, with_kwargs=True),
        model.get_submodule(source.flow.body).register_forward_hook(leave),
    ]
    ids = torch.arange(3, 9)[None]
    positions = torch.arange(6)[None] + source.first_position
    tell_pack(model, lambda: Pack((6,)))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(input_ids=ids, position_ids=positions, use_cache=False)
    except _BelowHead as reached:
        return reached.hidden
    finally:
        within.close()
        for handle in handles:
            handle.remove()
    raise AssertionError(f"{source.name} did not run {source.flow.body}, as it did when traced")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
