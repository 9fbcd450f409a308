"""Lets modules draw their random numbers by place [Note: draws by place].

While such a module runs, its random calls are answered by the hash of what they are for. Draws of a module in a layer
are counted within a forward, so that a module or a layer that runs twice draws anew; a layer that is recomputed goes on
from what was counted when it ran first, and draws the same:

    layer 3 runs        resid_dropout(x) -> place (3, "...resid_dropout", 0)
                        resid_dropout(y) -> place (3, "...resid_dropout", 1)
    outside of layers   emb_dropout(x)   -> place (None, "...emb_dropout", 0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_hydra.pipe.attention.interface import let_attention_drop
from ds_hydra.pipe.dropout import AttentionDropout, drop, keep_mask, normal_from, place_key, token_keys, uniform
from ds_hydra.pipe.pinned import on_device
from ds_hydra.pipe.rows import Pack
from ds_hydra.pipe.wrappers import note
from ds_hydra.zero_hetero.errors import ConfigError

DROPOUTS = frozenset({F.dropout, torch.dropout, torch.dropout_})
_DROPOUTS_WITHOUT_RULE = frozenset(
    {F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.alpha_dropout}
    | {torch.feature_dropout, torch.feature_alpha_dropout}
)

# Numbers in (0, 1) and a call's arguments -> what a function of this name draws.
FROM_UNIFORM: Mapping[str, Callable[[Tensor, Any, Any], Tensor]] = {
    "rand": lambda u, args, kwargs: u,
    "rand_like": lambda u, args, kwargs: u,
    "uniform_": lambda u, args, kwargs: _between(u, *_two(args, kwargs, "from", "to", (0.0, 1.0))),
    "randn": lambda u, args, kwargs: normal_from(u),
    "randn_like": lambda u, args, kwargs: normal_from(u),
    "normal_": lambda u, args, kwargs: _scaled(u, *_two(args, kwargs, "mean", "std", (0.0, 1.0))),
    "exponential_": lambda u, args, kwargs: -u.log() / _argument(args, kwargs, 1, "lambd", 1.0),
    "bernoulli_": lambda u, args, kwargs: u < _argument(args, kwargs, 1, "p", 0.5),
    "bernoulli": lambda u, args, kwargs: u < _argument(args, kwargs, 1, "p", args[0] if args else None),
}
_WITHOUT_RULE = frozenset(
    {"randint", "randint_like", "randperm", "cauchy_", "log_normal_", "geometric_", "random_", "multinomial"}
    | {"poisson", "gumbel_softmax", "rrelu", "normal"}
)


def dropout_of(args: Any, kwargs: Any) -> tuple[Tensor, float, bool]:
    """A dropout's input, its rate (0 out of training), and whether it changes the input in place."""
    rate = _argument(args, kwargs, 1, "p", 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    x = args[0] if args else kwargs["input"]
    return x, float(rate) if training else 0.0, bool(_argument(args, kwargs, 3, "inplace", False))


def random_call(func: Any, args: Any, kwargs: Any) -> str:
    """What a call draws: a dropout with its rate, or the name of a function; empty where it is deterministic."""
    if func in DROPOUTS or func in _DROPOUTS_WITHOUT_RULE:
        rate = dropout_of(args, kwargs)[1]
        return f"{func.__name__} {rate}" if rate else ""
    name = getattr(func, "__name__", "")
    if name == "scaled_dot_product_attention":
        rate = _argument(args, kwargs, 4, "dropout_p", 0.0)
        return f"attention dropout {rate} of torch's own attention" if rate else ""
    return name if name in FROM_UNIFORM or name in _WITHOUT_RULE else ""


def has_rule(func: Any) -> bool:
    """Whether what a function draws can be drawn by place."""
    return func in DROPOUTS or (getattr(func, "__name__", "") in FROM_UNIFORM and func not in _DROPOUTS_WITHOUT_RULE)


def _argument(args: Any, kwargs: Any, index: int, name: str, default: Any) -> Any:
    return kwargs.get(name, args[index] if len(args) > index else default)


def _two(args: Any, kwargs: Any, first: str, second: str, default: tuple[float, float]) -> tuple[Any, Any]:
    return _argument(args, kwargs, 1, first, default[0]), _argument(args, kwargs, 2, second, default[1])


def _between(u: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * u


def _scaled(u: Tensor, mean: float, std: float) -> Tensor:
    return mean + std * normal_from(u)


class Place(NamedTuple):
    """Where a draw stands in the model."""

    layer: int | None
    module: str
    draw: int  # of the module's in the layer, counted from 0 in each forward

    @property
    def key(self) -> int:
        return place_key(self.layer, self.module, self.draw)


class Keys(NamedTuple):
    """What the draws of a micro-batch follow from, int32 on the device."""

    row: Tensor  # (T,) of all tokens of the packed row
    local: Tensor  # (T_local,) of those that are computed here

    @classmethod
    def of(cls, pack: Pack, device: torch.device) -> Keys:
        """Keys of a pack; of one without keys, those of the sequences 0, 1, ..."""
        row = on_device(token_keys(pack.lengths, pack.keys or range(len(pack.lengths)), past=pack.past), device)
        start, stop = pack.local
        return cls(row, row[start:stop])

    def part(self, tokens: slice) -> Keys:
        """Keys of some of the tokens that are computed here."""
        return Keys(self.row, self.local[tokens])


@dataclass(frozen=True)
class _Running:
    """Where a forward is."""

    keys: Keys | None = None  # of its tokens
    layer: int | None = None
    own: bool = False  # whether on this rank's share of them, as between the blocks of a layer [Note: token sharding]
    # draws of this forward so far, by layer and module
    counts: dict[tuple[int | None, str], int] = field(default_factory=dict)
    module: str | None = None  # whose random calls are answered
    alone: bool = False  # whether on one whole sequence, as in a box [Note: boxes]


class Draws:
    """Counts and answers the random calls of one stage's modules.

    `widths` are the features (of attention: the heads) of each draw in the whole model; tensor parallel ranks that have
    fewer draw their part of them.
    """

    def __init__(self, widths: Mapping[Place, int], tp_rank: int = 0, tp: int = 1, *, token_sharding: bool = False):
        self.widths, self._tp_rank, self._tp = dict(widths), tp_rank, tp
        self._shards = token_sharding
        self._shared: Mapping[str, tuple[int, int]] = {}
        self._now = _Running()

    def share(self, parts: Mapping[str, tuple[int, int]]) -> None:
        """In the modules at these paths, a rank draws for one of so many parts of their features."""
        self._shared = parts

    def install(self, model: nn.Module, layers_path: str) -> None:
        """Let modules of the classes that were seen to draw do so by place."""
        kinds = {type(model.get_submodule(place.module)) for place in self.widths}
        for name, module in model.named_modules():
            if type(module) in kinds:
                let_attention_drop(module, partial(self.attention, name))
                _replace_call(module, self._answered(name, module))
        layers: Sequence[nn.Module] = model.get_submodule(layers_path)  # type: ignore[assignment]
        for index, layer in enumerate(layers):
            _replace_call(layer, self._counted(index, layer._call_impl))

    def of(self, keys: Keys | None) -> AbstractContextManager[None]:
        """Within it, draws are those of these tokens, counted from 0 outside of the layers."""
        return self._running(_Running(keys))

    def of_entry(self, index: int, keys: Keys | None) -> AbstractContextManager[None]:
        """Within it, one entry of a layer list draws for these tokens; its modules count together."""
        return self._running(_Running(keys, index, module=None if keys is None else str(index)))

    @property
    def counts(self) -> dict[tuple[int | None, str], int]:
        """The draws of this forward so far, by layer and module."""
        return dict(self._now.counts)

    @contextmanager
    def alone(self, keys: Keys, counted: Mapping[tuple[int | None, str], int]) -> Iterator[None]:
        """Within it, a module runs on one sequence of the row, after so many draws: as many as before any other."""
        whole, mine = self._now.counts, dict(counted)
        with self._running(replace(self._now, keys=keys, own=False, counts=mine, alone=True)):
            yield
        whole.update(mine)

    def inside(self) -> AbstractContextManager[None]:
        """See `Whereabouts`."""
        return self._running(replace(self._now, own=False))

    def outside(self) -> AbstractContextManager[None]:
        """See `Whereabouts`."""
        return self._running(replace(self._now, own=self._shards))

    def leave(self) -> None:
        """See `Whereabouts`."""
        self._now = replace(self._now, own=self._shards)

    def checkpointed(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For `checkpoint(context_fn=...)`: what is recomputed draws again, as if it ran where it ran first."""
        return nullcontext(), self._running(replace(self._now, counts=dict(self._now.counts)))

    @contextmanager
    def _running(self, now: _Running) -> Iterator[None]:
        before, self._now = self._now, now
        try:
            with nullcontext() if now.module is None else _Answers(self, now.module):
                yield
        finally:
            self._now = before

    def answer(self, module: str, func: Any, args: Any, kwargs: Any) -> Any:
        """What a random call returns."""
        with torch._C.DisableTorchFunction():
            if func in DROPOUTS:
                x, rate, inplace = dropout_of(args, kwargs)
                if self._now.alone and of_attention(x, len(self._current(module).row)):
                    found = self.attention(module, rate, x.shape[1])
                    return x if found is None else found(x, first_token=0, first_query=0, first_key=0)
                place, columns = self._next(module, random_call(func, args, kwargs), x)
                if x.is_meta:
                    return func(*args, **kwargs)
                keys = self._keys_here(module)
                kept = keep_mask(keys, place.key, columns, rate).view(x.shape) if rate < 1.0 else None
                out = x * 0.0 if kept is None else drop(x, kept, rate)
                return x.copy_(out) if inplace or func is torch.dropout_ else out
            drawn = func(*args, **kwargs)
            if drawn.dim() == 0:  # a coin for a whole layer: models draw it whether they use it or not
                return drawn
            place, columns = self._next(module, func.__name__, drawn)
            if drawn.is_meta:
                return drawn
            with torch.no_grad():
                u = uniform(self._keys_here(module), place.key, columns, drawn.dtype).view(drawn.shape)
                return drawn.copy_(FROM_UNIFORM[func.__name__](u, args, kwargs))

    def attention(self, module: str, rate: float, heads: int) -> AttentionDropout | None:
        """Dropout of the probabilities of a module's attention, of which `heads` are computed by these ranks."""
        place = self._count(module)
        first = self._first(place, heads)
        return AttentionDropout(rate, self._current(module).row, place.key, first)

    def _answered(self, name: str, module: nn.Module) -> Callable[..., Any]:
        call = module._call_impl

        def run(*args: Any, **kwargs: Any) -> Any:
            if not module.training:
                return call(*args, **kwargs)
            with self._running(replace(self._now, module=name)):
                return call(*args, **kwargs)

        return run

    def _counted(self, index: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._running(replace(self._now, layer=index, module=None, own=self._shards)):
                return call(*args, **kwargs)

        return run

    def _current(self, module: str) -> Keys:
        if self._now.keys is None:
            raise ConfigError(
                f"{module} draws random numbers outside of its stage's forward, where it is not known for which "
                "tokens: leave recomputation to hydra.activation_checkpointing, or set its rate to 0"
            )
        return self._now.keys

    def _keys_here(self, module: str) -> Tensor:
        """Keys of the tokens that are computed here, and just now."""
        local = self._current(module).local
        if not self._now.own:
            return local
        share = len(local) // self._tp
        return local[self._tp_rank * share : (self._tp_rank + 1) * share]

    def _next(self, module: str, call: str, x: Tensor) -> tuple[Place, range]:
        """Place and columns of a draw for each number of `x`."""
        tokens = len(self._keys_here(module))
        if not _holds_tokens(x, tokens):
            raise ConfigError(without_tokens(module, call))
        place, width = self._count(module), x.numel() // tokens
        first = self._first(place, width)
        return place, range(first, first + width)

    def _count(self, module: str) -> Place:
        layer, counts = self._now.layer, self._now.counts
        draw = counts[layer, module] = counts.get((layer, module), -1) + 1
        return Place(layer, module, draw)

    def _first(self, place: Place, width: int) -> int:
        """First of `width` features (or heads) at hand in those of the whole model."""
        whole = self.widths.get(place, width)
        if whole == width:
            return 0
        of_module = (part for path, part in self._shared.items() if place.module.startswith(f"{path}."))
        part, parts = next(of_module, (self._tp_rank, self._tp))
        if width * parts != whole:
            raise ConfigError(
                f"{place.module} draws random numbers for {whole} features, of which this rank, one of {parts}, has "
                f"{width}: set its rate to 0, or use strategies with a tp that divides {whole}"
            )
        return part * width


class Recorder(Draws):
    """Notes what a model draws when it is traced, and leaves the drawing to torch."""

    def __init__(self, tokens: int, layers_path: str, stack: Sequence[str], *, alone: bool = False):
        """`stack` holds the paths of the modules that are running, whenever something is noted. `alone`: the model runs
        one sequence by its own attention, which drops its whole matrix of probabilities at once."""
        super().__init__({})
        self._alone = alone
        self._tokens, self._prefix, self._stack = tokens, f"{layers_path}.", stack
        self.obstacle = ""  # the first draw that cannot be placed, as a sentence for the user
        self.attention_rate = 0.0  # largest of the attention's dropout

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Take a function's call and what it returned."""
        call, module = random_call(func, args, kwargs), self._stack[-1] if self._stack else ""
        if not call or not isinstance(result, Tensor) or result.dim() == 0 or self.obstacle:
            return
        if not has_rule(func):
            self.obstacle = (
                f"{module or 'the model'} draws random numbers ({call}) that would depend on which rank draws them: "
                "set its rate to 0 in the model's config, or let it use torch.nn.functional.dropout"
            )
        elif self._alone and func in DROPOUTS and of_attention(result, self._tokens):
            self.attention(module, dropout_of(args, kwargs)[1], result.shape[1])
        elif not _holds_tokens(result, self._tokens):
            self.obstacle = without_tokens(module, call)
        else:
            self.widths[self._count(module)] = result.numel() // self._tokens

    def attention(self, module: str, rate: float, heads: int) -> AttentionDropout | None:
        self.widths[self._count(module)] = heads
        self.attention_rate = max(self.attention_rate, rate)
        return None

    def _count(self, module: str) -> Place:
        layer = next((name for name in self._stack if name.startswith(self._prefix)), None)
        index = None if layer is None else int(layer.removeprefix(self._prefix).partition(".")[0])
        count = sum(place.layer == index and place.module == module for place in self.widths)
        return Place(index, module, count)


class _Answers(TorchFunctionMode):
    """Within it, random calls are answered by place."""

    def __init__(self, draws: Draws, module: str):
        super().__init__()
        self._draws, self._module = draws, module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if has_rule(func) and random_call(func, args, kwargs):
            return self._draws.answer(self._module, func, args, kwargs)
        return func(*args, **kwargs)


class Notes(TorchFunctionMode):
    """Within it, a recorder takes every call."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._recorder.note(func, args, kwargs or {}, result)
        return result


def _replace_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Not the forward: hooks draw too (noise on embeddings), and belong to the module as they do in the trace."""
    note(module, "draws")
    object.__setattr__(module, "_call_impl", call)


def without_tokens(module: str, call: str) -> str:
    """A sentence for the user about a draw that no rule fits."""
    return (
        f"{module} draws random numbers ({call}) for rows that are not the tokens of the batch, so that they would "
        "depend on what else is in it: set its rate to 0"
    )


def of_attention(x: Tensor, tokens: int) -> bool:
    """Whether `x` is the probabilities (1, heads, T, T) of one sequence."""
    return x.dim() == 4 and x.shape[2:] == (tokens, tokens)


def _holds_tokens(x: Tensor, tokens: int) -> bool:
    """Whether the first dimension that is not 1 counts tokens."""
    return tokens == 1 or next((size for size in x.shape if size != 1), 1) == tokens
