"""Experts and their routers: whole experts, balancing losses, and choices that are given.

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
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ds_hydra.pipe.adapters import plain_name
from ds_hydra.pipe.attention.interface import tell_pack, use_in
from ds_hydra.pipe.collectives import start_gather
from ds_hydra.pipe.expert_parallel import Routed, balanced, num_experts, totals_of
from ds_hydra.pipe.models.boxes import Boxes
from ds_hydra.pipe.models.flow import keep_stack
from ds_hydra.pipe.models.state import refuse_state
from ds_hydra.pipe.rows import MicroBatch, Pack, Routes, Routing
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.pipe.tensor_parallel import style_of
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.pipe.models.causal_lm import CausalLM


STYLE = "moe_tp_experts"
"""Style of a module whose ranks each make a part of the sum of its experts."""
_STACK = "grouped_gemm"  # of a stack in a model's own plan for expert parallelism


@dataclass(frozen=True)
class Experts:
    """Paths of the modules of stacks, names of the stacks, the different numbers of experts that they have; or why
    experts cannot be spread, a clause for the user."""

    modules: tuple[str, ...] = ()
    stacks: frozenset[str] = frozenset()
    counts: tuple[int, ...] = ()
    obstacle: str = ""


def find_experts(model: Any) -> Experts:
    """The stacks that the model's own plan for expert parallelism (`ep_plan`) cuts by experts."""
    plan = dict(getattr(model, "ep_plan", None) or {})
    stacks = {name for name, _ in model.named_parameters() if style_of(plan, plain_name(name)) == _STACK}
    modules = tuple(dict.fromkeys(name.rpartition(".")[0] for name in sorted(stacks)))
    if not modules:
        routes = "experts" in " ".join(name for name, _ in model.named_modules()).lower()
        what = "publishes no plan (ep_plan) of stacks of whole experts" if routes else "has no experts to spread"
        return Experts(obstacle=f"{type(model).__name__} {what}; use strategies without ep")
    beside = {
        f"{path}.{name}" for path in modules for name, _ in model.get_submodule(path).named_parameters()
    } - stacks  # fmt: skip
    if beside:
        return Experts(
            obstacle=f"{min(beside)} is in the same module as stacks of experts, and of all of them; use strategies "
            "without ep"
        )
    counts = sorted({num_experts(model.get_submodule(path)) for path in modules})
    return Experts(modules, frozenset(stacks), tuple(counts))


def spreading_experts(source: CausalLM) -> CausalLM:
    """The same model, whose experts are spread as whole ones where stages have an `ep`, and never cut by width."""
    other = copy.copy(source)
    boxes = source.boxes.paths(source.layers_path)
    other.experts = outside_of(find_experts(source.template), boxes, source.template)
    return other.planned(source.unnamed, source.tokens)


def for_strategies(source: CausalLM, strategies: Iterable[StrategyShape]) -> CausalLM:
    """The source of a job with these strategies: one that spreads experts if any of them has an `ep`."""
    stages = (stage for strategy in strategies for pipeline in strategy.pipelines for stage in pipeline.stages)
    return spreading_experts(source) if any(stage.ep > 1 for stage in stages) else source


def outside_of(experts: Experts, boxes: Collection[str], model: nn.Module) -> Experts:
    """The same; not of experts within modules that run once for each sequence, where every rank computes all."""
    inside = [path for path in experts.modules if any(f"{path}.".startswith(f"{box}.") for box in boxes)]
    if not inside:
        return experts
    return Experts(
        obstacle=f"{inside[0]} of {type(model).__name__} is in a module in which tokens meet, which every rank "
        "computes as a whole; use strategies without ep"
    )


_FLAG = "output_router_logits"
FEW_TOKENS = 5
_REMEDY = f"set {_FLAG} to false in the model's config to train without it"


@dataclass(frozen=True)
class Balancing:
    """How a model's routers are to use their experts alike [Note: the routers' loss]."""

    coefficient: float
    top_k: int
    num_experts: int
    routers: Mapping[str, int]  # path of each module that routes -> place of its logits in what it returns
    own: Callable[..., Tensor]  # the model's: tuple of logits (tokens, E), E and k to the loss of these tokens

    def loss(self, logits: tuple[Tensor, ...]) -> Tensor:
        """The loss of one sequence by the model's own function, from the logits (tokens, E) of all its routers."""
        each = [self.own((of_one,), self.num_experts, self.top_k) for of_one in logits]
        return self.coefficient * torch.stack(each).mean()

    @property
    def is_models_own(self) -> bool:
        """Whether `loss` is what the model's own forward adds to its loss of one sequence."""
        return len(self.routers) == 1

    @property
    def difference(self) -> str:
        """What is another loss than the model's own, for the log."""
        return (
            f"the load balancing loss of the {len(self.routers)} routers is that of each layer by itself, and their "
            "mean. transformers adds up what all layers count before it multiplies, as if expert 3 of one layer were "
            "expert 3 of another: of the same sequence its loss and the routers' gradients are others. Set "
            f"{_FLAG} to false in the model's config to train without it"
        )

    def loss_of_all_together(self, logits: tuple[Tensor, ...]) -> Tensor:
        """What the model's own forward adds to its loss of one sequence."""
        return self.coefficient * self.own(logits, self.num_experts, self.top_k)


def asks_for_balance(model: Any) -> bool:
    """Whether the config asks for a routers' loss. In `model`, which is a copy, it does no more from here on: its
    forward would collect logits that no stage has all of."""
    configs = (model.config, model.config.get_text_config())
    asked = any(bool(getattr(config, _FLAG, False)) for config in configs)
    for config in configs if asked else ():
        setattr(config, _FLAG, False)
    return asked


def find_balancing(source: CausalLM) -> Balancing | None:
    """The routers of a model that is asked to balance them, and its own loss; None where that counts nothing.

    Which modules route is seen by running it: those that made what it returns as `router_logits`. Raises ConfigError
    for a model without routers, or with a loss of another kind.
    """
    model, text, name = source.template, source.text_config, source.name
    coefficient = getattr(model, "router_aux_loss_coef", getattr(text, "router_aux_loss_coef", None))
    top_k = getattr(model, "num_experts_per_tok", getattr(text, "num_experts_per_tok", None))
    own = next(filter(None, (_function_beside(kind) for kind in source.model_class.__mro__)), None)
    if own is None or not isinstance(coefficient, int | float) or not isinstance(top_k, int):
        raise ConfigError(f"{name} has {_FLAG}, but no load balancing loss that ds_hydra knows: {_REMEDY}")
    if not coefficient:
        return None
    routers, num_experts = _routers(source)
    found = Balancing(float(coefficient), top_k, num_experts, routers, own)
    _check_formula(found, name)
    return found


def _function_beside(kind: type) -> Callable[..., Tensor] | None:
    """The loss that Hugging Face's module of a model class defines."""
    return getattr(sys.modules[kind.__module__], "load_balancing_loss_func", None)


def _routers(source: CausalLM) -> tuple[dict[str, int], int]:
    """Which modules route, with the place of their logits in what they return; and their number of experts."""
    try:
        made, logits = source.without_values(partial(_run, first_position=source.first_position, boxes=source.boxes))
    except Exception as error:
        raise ConfigError(f"{source.name} does not return its routers' logits ({error}): {_REMEDY}") from error
    places = [made.get(id(of_one)) for of_one in logits]
    routers = {place[0]: place[1] for place in places if place is not None}
    experts = {of_one.shape[-1] for of_one in logits}
    if not routers or len(routers) < len(logits) or len(experts) > 1:
        raise ConfigError(f"{source.name}: {len(logits)} routers' logits cannot be told apart by module: {_REMEDY}")
    return routers, experts.pop()


def _run(copied: Any, first_position: int, boxes: Boxes) -> tuple[dict[int, tuple[str, int]], tuple[Tensor, ...]]:
    """One forward of a few tokens: module and place that first returned each tensor, and the routers' logits."""
    made: dict[int, tuple[str, int]] = {}
    kept: list[Tensor] = []  # so that no other tensor gets the identity of one

    def note(path: str, out: Any) -> None:
        for place, value in enumerate(out if isinstance(out, tuple) else (out,)):
            if isinstance(value, Tensor):
                made.setdefault(id(value), (path, place))
                kept.append(value)

    for path, module in copied.named_modules():
        module.register_forward_hook(lambda _module, _args, out, path=path: note(path, out))
    return made, tuple(run_few_tokens(copied, first_position, boxes, **{_FLAG: True}).router_logits)


def run_few_tokens(copied: Any, first_position: int, boxes: Boxes, **settings: Any) -> Any:
    """What a copy of a model, which is of no other use, returns for FEW_TOKENS tokens."""
    device = next(copied.parameters()).device
    ids = torch.arange(3, 3 + FEW_TOKENS, device=device)[None]
    positions = torch.arange(FEW_TOKENS, device=device)[None] + first_position
    tell_pack(copied, lambda: Pack((FEW_TOKENS,)))
    if boxes:
        use_in(copied, boxes.attention)
    numbered = {"position_ids": positions} if boxes.packed else {}
    with torch.no_grad(), torch.random.fork_rng(devices=[]), refuse_state(copied):
        return copied(input_ids=ids, use_cache=False, **numbered, **settings)


def _check_formula(found: Balancing, name: str) -> None:
    """ConfigError unless the model's own function is the loss of [Note: the routers' loss] for one router."""
    tokens = 7
    logits = torch.randn((tokens, found.num_experts), generator=torch.Generator().manual_seed(0))
    totals = totals_of(logits, torch.zeros(tokens, dtype=torch.long), 1, found.top_k)[0]
    counts, probabilities = totals.chunk(2)
    expected = found.num_experts * (counts @ probabilities) / tokens**2
    try:
        value = found.own((logits,), found.num_experts, found.top_k)
    except Exception as error:
        raise ConfigError(f"{name} has a load balancing loss of another kind ({error}): {_REMEDY}") from error
    if not torch.allclose(value.to(expected), expected, rtol=1e-4):
        raise ConfigError(
            f"{name} has a load balancing loss of another kind: {float(value):.6g} for logits whose loss is "
            f"{float(expected):.6g} as the Switch Transformer has it: {_REMEDY}"
        )


class Routers:
    """The routers of one stage, on one rank: they add up their losses, and give their logits the gradients of these."""

    def __init__(self, balancing: Balancing, place: StagePlace):
        self._rules, self._place = balancing, place
        self._batch: MicroBatch | None = None
        self._again = False  # whether a layer is computed once more, in the backward
        self._total: Tensor | None = None

    def install(self, model: nn.Module) -> None:
        """Let the routers of the model, of which only the stage's own run, balance in training."""
        for path, index in self._rules.routers.items():
            model.get_submodule(path).register_forward_hook(
                lambda module, _args, out, path=path, index=index: self._returned(path, index, module, out)
            )

    def take(self) -> Tensor | None:
        """The routers' losses since they were taken last, (): of the tokens of this rank, or of its tensor parallel
        group; None where nothing ran."""
        total, self._total = self._total, None
        return total

    @contextmanager
    def of(self, batch: MicroBatch) -> Iterator[None]:
        """Within it the routers run on a micro-batch."""
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None

    @contextmanager
    def recomputing(self, others: AbstractContextManager[Any]) -> Iterator[None]:
        """Within it, which is within `others` too, layers are computed again: nothing counts once more."""
        self._again = True
        try:
            with others:
                yield
        finally:
            self._again = False

    def _returned(self, path: str, index: int, module: nn.Module, out: Any) -> Any:
        """What a router returns, changed in nothing but its backward."""
        routed = self._again or (self._batch is not None and self._batch.balance is not None)
        if not module.training or not routed:
            return None
        outs = list(out) if isinstance(out, tuple) else [out]
        logits: Tensor = outs[index].flatten(0, -2)
        # Of what is computed again only the tensors are of use: the first run's counts are in its own backward.
        known = None if self._again else self._count(path, logits.detach())
        places = [i for i, value in enumerate(outs) if isinstance(value, Tensor) and value.requires_grad]
        if logits.requires_grad:
            for place, value in zip(places, balanced(known, logits, [outs[i] for i in places]), strict=True):
                outs[place] = value
        return type(out)(outs) if isinstance(out, tuple) else outs[0]

    def _count(self, path: str, logits: Tensor) -> Routed:
        """Count where the tokens at hand go, add what that means to the loss, and tell how to differentiate it."""
        batch = self._batch
        assert batch is not None, "asked before"
        assert batch.balance is not None, "asked before"
        pack, place, (sequence, weights) = batch.pack, self._place, batch.balance
        own = len(logits) < len(sequence)  # of the tokens that the ranks of a tensor parallel group share
        if own:
            sequence = sequence[place.tp_rank * len(logits) :][: len(logits)]
        if len(sequence) != len(logits):
            raise ConfigError(f"{path} routes {len(logits)} rows of {len(sequence)} tokens: {_REMEDY}")
        experts = self._rules.num_experts
        weights = weights * (self._rules.coefficient * experts / len(self._rules.routers))
        totals = totals_of(logits, sequence, len(weights), self._rules.top_k)
        if own:
            dist.all_reduce(totals, group=place.tp_group)
        counts, probabilities = (part.contiguous() for part in totals.chunk(2, dim=-1))
        if pack.sp > 1:  # of the probabilities each rank adds its own to the loss
            dist.all_reduce(counts, group=pack.sp_group)
        whole = _Counted(path, pack, counts, probabilities)
        loss = whole.products().to(torch.float64) @ weights.to(torch.float64)
        self._total = loss if self._total is None else self._total + loss
        return Routed(sequence, weights, whole.counts)


class _Counted:
    """What one run of a router has counted, and what others of the same sequence have, where it runs in slices."""

    def __init__(self, path: str, pack: Pack, counts: Tensor, probabilities: Tensor):
        """Both (sequences, E), of the rows of a pack."""
        self._counts, self._probabilities, self._chunk = counts, probabilities, pack.chunk
        self._slices: dict[int, Tensor] = {}
        if pack.chunk is not None:
            self._slices = pack.chunk.contexts.beside(("router", path))
            self._slices[pack.chunk.start] = torch.stack((counts[0], probabilities[0]))

    def counts(self) -> Tensor:
        """Of whole sequences: (sequences, E). Of one in slices, all of them must have run."""
        if self._chunk is None:
            return self._counts
        return torch.cat((sum(self._slices.values())[:1], self._counts[1:]))  # type: ignore[index]

    def products(self) -> Tensor:
        """The sum over e of c_e * (sum over t of p_te) of each sequence, (sequences,): 0 but of a whole one, or the
        last slice of one."""
        products = (self._counts * self._probabilities).sum(dim=-1)
        if self._chunk is None:
            return products
        counts, probabilities = sum(self._slices.values())  # type: ignore[misc]
        return torch.cat(((counts @ probabilities)[None] * self._chunk.is_last, products[1:]))


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
