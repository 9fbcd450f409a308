"""Training in one process, in plain torch, one sequence at a time: what a run on ranks is compared with.

It knows nothing of packs, plans or ranks: only which sequences a step has and what a token's loss counts. Models may
compute in FP64 throughout, so that two runs agree to 1e-12. Random numbers are drawn by the rule of pipe/dropout.py;
which module draws, and how often, is found by other means than the engine's: one mode around the whole forward, and
hooks on every module.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_hydra.pipe.dropout import AttentionDropout, keep_mask, place_key, uniform
from ds_hydra.pipe.loss import IGNORED, TokenLoss
from ds_hydra.plan.step_plan import Span

Sample = Mapping[str, Tensor]  # input_ids and labels, both (length,), labels not shifted; perhaps sequence_weight
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Step:
    """What one step did; gradients by parameter name, as the optimizer got them (clipped)."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    router_loss: float = 0.0  # the part of the loss that routers have


class OneProcess:
    """A model and its optimizer in one process."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        clip: float,
        masters: nn.Module | None = None,
        token_loss: TokenLoss | None = None,
    ):
        """`model` maps (1, T) token ids to (1, T, vocab) logits, or to an output that has them.

        `optimizer` is made of the model whose parameters it moves: `masters`, with the same values in another type, if
        that is not the model itself. `token_loss`: logits (T, V) and labels (T,) to the loss of each token, if not the
        cross entropy.
        """
        self.model, self.clip, self.token_loss = model, clip, token_loss
        self.router_loss = RouterLoss.of(model)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = self.parameters
        if masters is not None:
            self.masters = {name: p for name, p in masters.named_parameters() if p.requires_grad}
        self.optimizer = optimizer(model if masters is None else masters)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take parameters from elsewhere."""
        with torch.no_grad():
            for name, parameter in self.masters.items():
                parameter.copy_(values[name])

    def gradients(
        self, samples: Sequence[Sample], weights: Sequence[Tensor], keys: Sequence[Tensor] | None = None
    ) -> Step:
        """Loss, norm and clipped gradients, left in the masters; `weights[i]` is what the tokens of sample i count.

        `keys[i]` are what its random numbers follow from; None: nothing is drawn.
        """
        if self.masters is not self.parameters:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(self.masters[name])
        sums = {name: torch.zeros_like(parameter) for name, parameter in self.masters.items()}
        self.model.zero_grad()
        total = of_routers = 0.0
        drawn_with: Sequence[Any] = keys or [None] * len(samples)
        for sample, weight, drawn in zip(samples, weights, drawn_with, strict=True):
            with drawing(self.model, drawn):
                losses = token_losses(self.model, sample, self.token_loss)
                loss = losses @ weight.to(losses.dtype)
                if self.router_loss is not None:
                    counts = weight[sample["labels"][1:] != IGNORED].sum()
                    routers = float(counts) * self.router_loss.taken()
                    loss, of_routers = loss + routers, of_routers + float(routers.detach())
            loss.backward()
            total += float(loss.detach())
            for name, parameter in self.parameters.items():
                if parameter.grad is not None:
                    sums[name] += parameter.grad
                    parameter.grad = None
        for name, parameter in self.masters.items():
            parameter.grad = sums[name]
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self.clip if self.clip > 0 else float("inf"))
        gradients = {name: p.grad.clone() for name, p in self.masters.items() if p.grad is not None}
        return Step(total, float(norm), gradients, of_routers)

    def step(self, samples: Sequence[Sample], weights: Sequence[Tensor], keys: Sequence[Tensor] | None = None) -> Step:
        """`gradients`, and an update by them."""
        result = self.gradients(samples, weights, keys)
        self.optimizer.step()
        return result

    def moments(self, key: str) -> dict[str, Tensor]:
        """A state of the optimizer by parameter name."""
        return {name: self.optimizer.state[parameter][key] for name, parameter in self.masters.items()}


class RouterLoss:
    """The load balancing loss of one sequence that a model runs, by plain torch: the mean of its routers'."""

    def __init__(self, model: Any):
        self._coefficient, self._top_k = model.config.router_aux_loss_coef, model.config.num_experts_per_tok
        self._losses: list[Tensor] = []
        for name, module in model.named_modules():
            if name.endswith(("mlp.gate", "moe.gate")):
                module.register_forward_hook(lambda _module, _args, out: self._losses.append(self._of(out[0])))

    @classmethod
    def of(cls, model: Any) -> RouterLoss | None:
        """None for a model whose routers have none."""
        asked = getattr(getattr(model, "config", None), "output_router_logits", False)
        return cls(model) if asked else None

    def _of(self, logits: Tensor) -> Tensor:
        """E * sum of (share of the tokens that chose an expert) * (mean probability of it); logits (tokens, E)."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        probabilities = F.softmax(wide, dim=-1)
        chosen = F.one_hot(probabilities.topk(self._top_k, dim=-1).indices, logits.shape[-1]).sum(dim=1).to(wide)
        return logits.shape[-1] * (chosen.mean(dim=0) * probabilities.mean(dim=0)).sum()

    def taken(self) -> Tensor:
        """That of the sequence that ran last, times the model's coefficient."""
        losses, self._losses = self._losses, []
        assert losses, "the model has routers"
        return self._coefficient * torch.stack(losses).mean()


def token_losses(model: nn.Module, sample: Sample, token_loss: TokenLoss | None = None) -> Tensor:
    """(tokens - 1,) losses of one sequence, cross entropies unless it is said; 0 where nothing is to be learnt."""
    token_ids = sample["input_ids"][None]
    out = model(token_ids) if not hasattr(model, "config") else model(input_ids=token_ids, use_cache=False).logits
    logits = out[0, :-1]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    labels = sample["labels"][1:]
    if token_loss is not None:
        known = labels != IGNORED
        return torch.zeros_like(wide[:, 0]).masked_scatter(known, token_loss(wide[known], labels[known]))
    return F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="none")


def token_weights(samples: Sequence[Sample], microbatches: Sequence[Sequence[Span]], loss_norm: str) -> list[Tensor]:
    """What each token of each sample, (tokens - 1,), counts in the step's loss: the last one has no target.

    `microbatches` lists the spans of every micro-batch of the step, their sequences by position in `samples`.
    """
    learnt = [sample["labels"][1:] != IGNORED for sample in samples]
    weights = [torch.zeros(len(one), dtype=torch.float64) for one in learnt]
    if loss_norm == "token":
        total = max(1, sum(int(one.sum()) for one in learnt))
        return [one + 1.0 / total for one in weights]
    if loss_norm == "sequence":
        some = max(1, sum(bool(one.any()) for one in learnt))
        return [one + 1.0 / (max(1, int(known.sum())) * some) for one, known in zip(weights, learnt, strict=True)]
    counts = [sum(int(learnt[i][start:stop].sum()) for i, start, stop in batch) for batch in microbatches]
    some = max(1, sum(count > 0 for count in counts))
    for batch, count in zip(microbatches, counts, strict=True):
        for i, start, stop in batch:
            weights[i][start:stop] = 1.0 / (max(1, count) * some)
    return weights


VALUES: Mapping[str, Callable[..., Tensor]] = {
    "uniform_": lambda u, low=0.0, high=1.0: low + u * (high - low),
    "exponential_": lambda u, rate=1.0: -torch.log(u) / rate,
    "rand_like": lambda u: u,
}


class _Draws(TorchFunctionMode):
    def __init__(self, keys: Tensor, stack: list[tuple[int | None, str]]):
        super().__init__()
        self.keys, self.stack = keys, stack
        self.counts: dict[tuple[int | None, str], int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in VALUES:
            out = func(*args, **kwargs)
            u = uniform(self.keys, self._place(), range(out.numel() // len(self.keys)), out.dtype).view(out.shape)
            return out.copy_(VALUES[name](u, *args[1:]))
        return func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return x
        tokens, place = len(self.keys), self._place()
        if x.dim() == 4 and x.shape[2:] == (tokens, tokens):
            return AttentionDropout(p, self.keys, place)(x, first_token=0, first_query=0, first_key=0)
        keep = keep_mask(self.keys, place, range(x.numel() // tokens), p).view(x.shape)
        return x * keep / (1.0 - p)

    def _place(self) -> int:
        layer, module = self.stack[-1]
        number = self.counts.get((layer, module), 0)
        self.counts[layer, module] = number + 1
        return place_key(layer, module, number)


@contextlib.contextmanager
def drawing(model: nn.Module, keys: Tensor | None) -> Iterator[None]:
    """Within it, the model's random calls draw for one sequence whose tokens have these keys; None: as torch does."""
    if keys is None:
        yield
        return
    stack: list[tuple[int | None, str]] = []
    layers = {id(layer): index for part in _layer_lists(model) for index, layer in enumerate(part)}
    handles: list[Any] = []

    def enter(name: str, module: nn.Module) -> None:
        stack.append((layers.get(id(module), stack[-1][0] if stack else None), name))

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda m, _, name=name: enter(name, m), prepend=True))
        handles.append(module.register_forward_hook(lambda *_: stack.pop() and None))
    try:
        with _Draws(keys, stack):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _layer_lists(model: nn.Module) -> list[nn.ModuleList]:
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    config: Any = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return [part for part in found if len(part) == config.num_hidden_layers]


@contextlib.contextmanager
def float64_throughout(model: nn.Module) -> Iterator[None]:
    """Within it, the methods of the model's classes that go down to FP32 (norms, routers) compute in FP64.

    Hugging Face's norms round to FP32 whatever the model's dtype. Two runs that differ by 1e-16 then differ by 1e-7 as
    soon as one number falls to the other side of a rounding border, so a comparison of FP64 runs would say
    little. Forked ranks inherit the change.
    """
    changed: list[tuple[Any, str, Any]] = []
    try:
        for cls in {type(module) for module in model.modules()}:
            if not cls.__module__.startswith("transformers.models.") or "Rotary" in cls.__name__:
                continue
            home = inspect.getmodule(cls)
            # Of functions, those that stand in for kernels of packages, such as a delta rule's.
            functions = [(name, each) for name, each in vars(home).items() if inspect.isfunction(each)]
            kernels = [name for name, each in functions if inspect.unwrap(each) is not each]
            of_home = [(home, name) for name in (*kernels, *(n for n, _ in functions if n.startswith("apply_rotary")))]
            for owner, name in ((cls, "forward"), (cls, "_norm"), (cls, "_attn"), *of_home):
                method = vars(owner).get(name)
                wide = _widened(method, owner)
                if wide is not None:
                    changed.append((owner, name, method))
                    setattr(owner, name, wide)
        yield
    finally:
        for owner, name, method in changed:
            setattr(owner, name, method)


def _widened(function: Any, owner: Any) -> Any:
    """The function with FP64 where its source says FP32; None if it does not, or was replaced before."""
    if not inspect.isfunction(function) or "widened" in vars(function):
        return None
    plain: Any = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(plain))
    wide = re.sub(r"torch\.float(32)?\b", "torch.float64", source).replace(".float()", ".double()")
    if wide == source:
        return None
    space: dict[str, Any] = {}
    body = textwrap.indent(wide[wide.index("def ") :], "    ")
    made = f"def made(__class__):\n{body}\n    return {plain.__name__}"  # by which it finds super()
    exec(compile(made, plain.__code__.co_filename, "exec"), plain.__globals__, space)
    widened = space["made"](owner)
    if plain is not function:
        widened = _without_the_unknown(widened)
    widened.widened = True
    return widened


def _without_the_unknown(function: Any) -> Any:
    """A function that drops keywords that it does not know, as transformers' stand-ins for kernels do."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function

    @functools.wraps(function)
    def known(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name in parameters})

    return known
