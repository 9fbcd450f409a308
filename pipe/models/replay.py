"""Choices of experts that routers are given in place of their own, or whose own choices are kept.

[Note: replayed routers]
A loop of reinforcement learning computes what a token's log-probability was twice: where it was drawn, and where it is
learnt. Routers that choose other experts there, by rounding alone, make another model of it. So choices travel with the
tokens, as a field: of each token, for each router, its experts, at the place of the token that is routed. Field and
routers meet on every stage.

Routers are found by running the model: the modules whose own code calls `torch.topk` for (tokens, experts). While such
a module runs, that call gives the experts that were chosen before, and what it has for them: softmax, normalisation
and scale are the model's own, and so are their gradients. One router of each kind is tried alone before: given its own
choices it must return the same bits, and given another expert something else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ds_hydra.pipe.fields import Routing
from ds_hydra.pipe.models.balancing import FEW_TOKENS, run_few_tokens
from ds_hydra.pipe.models.experts import find_experts
from ds_hydra.pipe.models.flow import keep_stack
from ds_hydra.pipe.row_collectives import start_gather
from ds_hydra.pipe.rows import Routes
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.pipe.models.causal_lm import CausalLM


class Replay:
    """The routers of one stage, on one rank."""

    def __init__(self, model: nn.Module, place: StagePlace):
        self._model, self._place = model, place
        self._now: Routes | None = None
        self._running: list[_Choosing] = []
        self._installed = False

    def of(self, routes: Routes | None) -> AbstractContextManager[None]:
        """Within it the routers choose as `routes` say."""
        if routes is not None and not self._installed:
            for index, path in enumerate(routes.routing.paths):
                module = self._model.get_submodule(path)
                module.register_forward_pre_hook(partial(self._enter, index))
                module.register_forward_hook(self._leave, always_call=True)
            self._installed = True
        return self._at(routes)

    def again(self) -> AbstractContextManager[None]:
        """Within it layers are computed once more as they are now: what they choose is known."""
        return self._at(self._now and replace(self._now, found=None))

    @contextmanager
    def _at(self, routes: Routes | None) -> Iterator[None]:
        before, self._now = self._now, routes
        try:
            yield
        finally:
            self._now = before

    def _enter(self, index: int, *_: Any) -> None:
        if self._now is not None:
            self._running.append(_Choosing(self._now, index, self._place))
            self._running[-1].__enter__()

    def _leave(self, *_: Any) -> None:
        if self._running:
            self._running.pop().__exit__(None, None, None)


class _Choosing(TorchFunctionMode):
    """Within it the router at an index gets what was chosen, or tells what it has chosen."""

    def __init__(self, routes: Routes, index: int, place: StagePlace | None = None):
        super().__init__()
        self._routes, self._index, self._place = routes, index, place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, routing = func(*args, **(kwargs or {})), self._routes.routing
        scores = _chosen_from(func, args, kwargs, found)
        if scores is None or (scores.shape[-1], found[1].shape[-1]) != (routing.experts[self._index], routing.chosen):
            return found
        if self._routes.given is not None:
            own = self._own(self._routes.given[:, self._index], len(scores))
            found = torch.return_types.topk((scores.gather(-1, own), own))
        if self._routes.found is not None:
            all_of_them = found[1]
            if len(all_of_them) < len(self._routes.found) and self._place is not None:
                all_of_them = start_gather(all_of_them, self._place.tp_group).wait()
            self._routes.found[:, self._index] = all_of_them
        return found

    def _own(self, given: Tensor, rows: int) -> Tensor:
        """Of choices (T_local, k) those of the rows that are routed here: tensor parallel ranks may share tokens."""
        if rows < len(given) and self._place is not None:
            given = given[self._place.tp_rank * rows :][:rows]
        if len(given) != rows:
            raise ConfigError(
                f"{self._routes.routing.paths[self._index]} routes {rows} rows of {len(given)} tokens: choices of "
                "experts cannot be given to this model"
            )
        return given


def _chosen_from(func: Any, args: Any, kwargs: Any, found: Any) -> Tensor | None:
    """The scores (tokens, experts) of which a call has found the largest, if it is such a call."""
    if getattr(func, "__name__", "") != "topk":
        return None
    scores = args[0] if args else kwargs["input"]
    return scores if scores.dim() == 2 and len(found[1]) == len(scores) else None


@dataclass(frozen=True)
class _Seen:
    """A call of `topk` in a run of a few tokens."""

    path: str  # of the module whose code it is
    experts: int
    chosen: int
    given: tuple[Any, Any]  # arguments of that module


def find_routing(source: CausalLM) -> Routing:
    """The routers of a model that can be given their choices [Note: replayed routers]. ConfigError, which names what
    is in the way, for a model that has none or whose experts are chosen otherwise."""
    try:
        seen = source.without_values(partial(_seen, source))
    except Exception as error:
        raise ConfigError(f"{source.name} cannot run for its routers to be found: {error}") from error
    otherwise = "choices of experts are given to routers that choose by torch.topk of (tokens, experts)"
    if not seen:
        raise ConfigError(f"{source.name} has no routers: {otherwise}")
    paths = [one.path for one in seen]
    blocks = {path.rpartition(".")[0] for path in find_experts(source.template).modules}
    unrouted = sorted(block for block in blocks if not any(f"{path}.".startswith(f"{block}.") for path in paths))
    if unrouted:
        raise ConfigError(f"{unrouted[0]} of {source.name} chooses its experts otherwise: {otherwise}")
    if len(set(paths)) < len(paths) or len({one.chosen for one in seen}) > 1:
        raise ConfigError(
            f"routers of {source.name} choose twice, or not all as many experts ({', '.join(paths[:3])}, ...): "
            f"{otherwise}"
        )
    tried: set[type] = set()
    for one in seen:
        router = source.template.get_submodule(one.path)
        if type(router) not in tried:
            _try(router, one)
            tried.add(type(router))
    return Routing(tuple(paths), tuple(one.experts for one in seen), seen[0].chosen)


def _seen(source: CausalLM, copied: Any) -> list[_Seen]:
    stack: list[str] = []
    given: dict[str, tuple[Any, Any]] = {}
    found: list[_Seen] = []
    for path, module in copied.named_modules():
        module.register_forward_pre_hook(
            lambda _, args, kwargs, path=path: given.__setitem__(path, (args, kwargs)), with_kwargs=True
        )
    keep_stack(copied.eval(), stack)

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            scores = _chosen_from(func, args, kwargs, result)
            if scores is not None and len(scores) == FEW_TOKENS and stack[-1].startswith(source.layers_path):
                path = stack[-1]
                found.append(_Seen(path, scores.shape[-1], result[1].shape[-1], given[path]))
            return result

    with Watching():
        run_few_tokens(copied, source.first_position, source.boxes)
    # Of a router that looks at groups of experts first, the last call is the choice.
    return [one for at, one in enumerate(found) if one.path not in [other.path for other in found[at + 1 : at + 2]]]


def _try(router: nn.Module, seen: _Seen) -> None:
    """ConfigError unless what a router is given is what it chooses."""
    generator = torch.Generator().manual_seed(0)

    def drawn(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            return torch.zeros(value.shape, dtype=value.dtype)
        return torch.randn(value.shape, generator=generator)

    alone = copy.deepcopy(router).to_empty(device="cpu").float()
    with torch.no_grad():
        for tensor in (*alone.parameters(), *alone.buffers()):
            tensor.copy_(drawn(tensor))
    args, kwargs = tree_map(drawn, seen.given)
    routing = Routing((seen.path,), (seen.experts,), seen.chosen)

    def run(given: Tensor | None) -> tuple[list[Tensor], Tensor]:
        kept = Routes(routing, given, torch.zeros(FEW_TOKENS, 1, seen.chosen, dtype=torch.int64))
        with torch.no_grad(), _Choosing(kept, 0):
            out = alone(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        assert kept.found is not None, "it was made above"
        return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)], kept.found

    try:
        own, chosen = run(None)
        same, _ = run(chosen)
        changed, _ = run((chosen + 1) % seen.experts)
    except Exception as error:
        raise ConfigError(f"{seen.path} ({type(router).__name__}) cannot be given its choices: {error}") from error
    alike = [all(map(torch.equal, own, others)) for others in (same, changed)]
    if alike != [True, seen.experts == 1]:
        raise ConfigError(
            f"{seen.path} ({type(router).__name__}) does not choose its experts by the torch.topk that it calls: it "
            "cannot be given its choices"
        )
