"""Muon: momentum whose matrices are orthogonalized before they are a step (Jordan et al. 2024), beside AdamW.

Settings have DeepSpeed's names and meaning (`deepspeed/runtime/engine.py`, `MuonWithAuxAdam`); with "adjust_lr_fn" the
iteration and the scale of a step are `torch.optim.Muon`'s. Momentum is that of both: M <- mu M + (1 - mu) G, with
Nesterov's rule; decay is decoupled. What is no matrix, or has "embed" or "lm_head" in its name, takes AdamW.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from ds_hydra.config.checks import nearest
from ds_hydra.matrices.exchange import COEFFICIENTS, EPS, Coefficients, Exchange, method_of
from ds_hydra.matrices.owners import FEW_STEPS, NEAR_EVEN, deal, iteration_flops, loads, matrix_params
from ds_hydra.matrices.proof import prove
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.masters import MasterShards, as_tensors
from ds_hydra.zero_hetero.transport import Transport

logger = logging.getLogger(__name__)

Settings = Mapping[str, Any]
Made = TypeVar("Made", bound=Optimizer)
_MATRICES = ("lr", "momentum", "weight_decay", "ns_method", "nesterov", "ns_steps", "adjust_lr_fn")
_OTHERS = ("lr", "betas", "eps", "weight_decay")
_RATES = {True: "muon_lr", False: "adam_lr"}
_DEFAULTS = {True: {"lr": 0.02}, False: {"lr": 3e-4}}
_OF_BOTH = ("adam_w_mode", "per_head_muon")
_IGNORED = ("torch_adam", "fp32_optimizer_states", "set_grad_none")
_METHODS = ("gram", "standard")
_SCALES = ("original", "match_rms_adamw", None)


class Muon(Adam):
    """Groups with `use_muon` are orthogonalized, the others take AdamW, or Adam without `decoupled_weight_decay`.

    Its parameters are parts of matrices, so what they are updated by comes from their owners: `exchange.run` before
    each step. `heads` has the parameters that are matrices, by name, and in how many blocks of rows.
    """

    exchange: Exchange | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_method: str = "gram",
        ns_steps: int = FEW_STEPS,
        ns_coefficients: Coefficients = COEFFICIENTS,
        ns_eps: float = EPS,
        adjust_lr_fn: str | None = None,
        use_muon: bool = False,
        decoupled_weight_decay: bool = True,
        heads: Mapping[str, int] | None = None,
    ) -> None:
        own = {"momentum": momentum, "nesterov": nesterov, "ns_method": ns_method, "ns_steps": ns_steps,
               "ns_coefficients": ns_coefficients, "ns_eps": ns_eps, "adjust_lr_fn": adjust_lr_fn,
               "use_muon": use_muon}  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, fused=True,
                         decoupled_weight_decay=decoupled_weight_decay)  # fmt: skip
        self.defaults.update(own)
        self.heads = dict(heads or {})
        for group in self.param_groups:
            for key, value in own.items():
                group.setdefault(key, value)
            _check(group)

    def attach(
        self,
        groups: Sequence[Mapping[str, Any]],
        masters: MasterShards,
        plan: ModelPlan,
        transport: Transport,
        group: dist.ProcessGroup | None,
        shift: int = 0,
    ) -> None:
        """Compile the exchange of this job's ranks; `groups` have the `names` of the parameters of each group, `shift`
        says which rank's copy this one keeps. Every rank must call it. ConfigError where small matrices show that this
        would not be Muon."""
        for own in self.param_groups:
            if own["use_muon"]:
                prove(Muon, own)
        params = matrix_params(plan.buckets, self.heads)
        group_of = {name: number for number, group in enumerate(groups) for name in group["names"]}
        costs = []
        for param in params:
            count, rows, columns = param.batch
            method = method_of(self.param_groups[group_of[param.name]])
            costs.append((count, iteration_flops(rows, columns, method.kind, method.steps), param.apart))
        owned = deal(costs, masters.num_ranks)
        if masters.rank == 0:
            _tell(params, loads(costs, owned, masters.num_ranks))
        self.exchange = Exchange(masters, params, owned, transport, group_of, shift)

    def run_exchange(self) -> None:
        """Fetch what the next step updates matrices by; every rank must call it, with its gradients as they are to be
        used. Nothing else changes."""
        assert self.exchange is not None, "the engine has attached it"
        with torch.no_grad(), as_tensors():
            self.exchange.run(self.param_groups, self.state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient, matrices by what `run_exchange` has fetched."""
        loss = None if closure is None else closure()
        every = self.param_groups
        for group in every:
            for param in group["params"] if group["use_muon"] else ():
                if param.grad is not None:
                    self._update(param, group)
        self.param_groups = [group for group in every if not group["use_muon"]]
        try:
            super().step()
        finally:
            self.param_groups = every
        return loss

    def _update(self, param: Any, group: Settings) -> None:
        update = vars(param).pop("update", None)
        assert update is not None, "no part of a matrix is updated by its own gradient: run_exchange() comes first"
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        state["momentum_buffer"].lerp_(param.grad, 1.0 - group["momentum"])
        param.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        if update.is_cuda:
            update.record_stream(torch.cuda.current_stream(update.device))

    def keeps(self, options: Settings) -> dict[str, Tensor] | None:
        """What is kept of one element of a group with these options; None for a group that takes AdamW."""
        of = next((param for group in self.param_groups for param in group["params"]), torch.zeros(1))
        return {"momentum_buffer": torch.zeros(1, dtype=of.dtype, device=of.device)} if options["use_muon"] else None


def _check(group: Settings) -> None:
    """ValueError for settings that no step can follow."""
    for key, allowed in (("ns_method", _METHODS), ("adjust_lr_fn", _SCALES)):
        if group[key] not in allowed:
            raise ValueError(f"{key} is {group[key]!r}; it is one of {', '.join(map(repr, allowed))}")
    if not 0.0 <= group["momentum"] < 1.0:
        raise ValueError(f"momentum is {group['momentum']!r}; it is at least 0 and below 1")
    if type(group["ns_steps"]) is not int or not 1 <= group["ns_steps"] < 100:
        raise ValueError(f"ns_steps is {group['ns_steps']!r}; it is a whole number from 1 to 99")
    if not group["lr"] >= 0.0:
        raise ValueError(f"lr is {group['lr']!r}; it is at least 0")


def _tell(params: Sequence[Any], load: Sequence[int]) -> None:
    """One line of what the busiest rank has to do, beside an even share."""
    if not params:
        logger.warning("no parameter is a matrix that Muon takes: all of them take AdamW")
        return
    matrices = sum(param.batch[0] for param in params)
    ratio = max(load) * len(load) / sum(load)
    uneven = "" if ratio <= NEAR_EVEN else f", {ratio:.2f} times an even share: matrices are orthogonalized whole"
    logger.info(
        "Muon: %d matrices of %d parameters on %d ranks; the busiest rank iterates %.3g FLOP an update%s",
        matrices, len(params), len(load), max(load), uneven,
    )  # fmt: skip


def takes_muon(name: str, parameter: nn.Parameter) -> bool:
    """DeepSpeed's rule (`deepspeed.set_optimizer_flags`), unless the script has marked the parameter `use_muon`."""
    marked = vars(parameter).get("use_muon")
    if marked is not None:
        return bool(marked)
    return parameter.dim() >= 2 and not any(word in name.lower() for word in ("embed", "lm_head"))


def halves(
    named: Mapping[str, nn.Parameter], groups: Iterable[tuple[Sequence[str], Settings]], params: Settings
) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """Each group of a script, as names and settings, cut into what is orthogonalized and the rest, as DeepSpeed does;
    what a group says itself goes before "muon_lr" and "adam_lr", and these before "lr".

    ConfigError for a parameter that is to be orthogonalized and is no matrix.
    """
    given = list(groups)
    found = []
    for index, (names, own) in enumerate(given):
        for matrices in (True, False):
            asked = own.get("use_muon")
            half = tuple(n for n in names if (takes_muon(n, named[n]) if asked is None else bool(asked)) is matrices)
            if not half:
                continue
            flat = next((name for name in half if matrices and named[name].dim() < 2), None)
            if flat is not None:
                raise ConfigError(
                    f"use_muon: parameter {flat!r} has the shape {tuple(named[flat].shape)} and is no matrix: leave it "
                    "to AdamW"
                )
            keys = _MATRICES if matrices else _OTHERS
            settings = {**_DEFAULTS[matrices], **{key: params[key] for key in keys if key in params}}
            if _RATES[matrices] in params:
                settings["lr"] = params[_RATES[matrices]]
            settings |= {key: value for key, value in own.items() if key in keys or key == "initial_lr"}
            prefix = own.get("name") or (f"group{index}" if len(given) > 1 else "")
            label = ("muon" if matrices else "adam") + "-params"
            found.append((half, {**settings, "use_muon": matrices, "name": f"{prefix}-{label}" if prefix else label}))
    return found


def checked(params: Settings) -> dict[str, Any]:
    """A config block's settings. ConfigError for what is not known, which DeepSpeed passes over in silence."""
    known = {*_MATRICES, *_OTHERS, *_RATES.values(), *_OF_BOTH, *_IGNORED}
    for key in params:
        if "clip" in key:
            raise ConfigError(
                f"config: optimizer.params of Muon: {key}: clipping of queries and keys (MuonClip) needs the largest "
                "logit of each head, which packed attention does not return: leave it out"
            )
        if key not in known:
            raise ConfigError(f"config: optimizer.params of Muon: {key!r} is not known; {nearest(key, sorted(known))}")
    made = {key: value for key, value in params.items() if key not in _IGNORED}
    if "betas" in made:
        made["betas"] = tuple(made["betas"])
    return made


def heads_of(model: nn.Module, names: Iterable[str], *, per_head: bool) -> dict[str, int]:
    """In how many blocks of rows each of these parameters is orthogonalized: 1, or its heads by DeepSpeed's rule.

    ConfigError where DeepSpeed's rule is asked for and finds no heads, or its release has none.
    """
    named = dict(model.named_parameters())
    found = dict.fromkeys(names, 1)
    if not per_head:
        return found
    import deepspeed

    rule: Any = getattr(deepspeed, "_attention_head_count", None)
    if rule is None:
        raise ConfigError(
            f"config: optimizer.params.per_head_muon: DeepSpeed {deepspeed.__version__} has no rule for it: install a "
            "newer release, or leave it out"
        )
    found |= {name: heads for name in found if (heads := rule(name, named[name], model)) is not None}
    if all(heads == 1 for heads in found.values()):
        raise ConfigError(
            "config: optimizer.params.per_head_muon: DeepSpeed's rule finds no weight of queries, keys or values whose "
            "rows are the heads that the model's config names: leave it out"
        )
    return found


def of_torch(client: torch.optim.Muon, heads: Mapping[str, int]) -> Callable[[list[dict[str, Any]]], Muon]:
    """What makes torch's optimizer the engine's, of its own settings."""

    def make(groups: list[dict[str, Any]]) -> Muon:
        own = []
        for group in groups:
            settings = {**group, "ns_eps": group["eps"], "use_muon": True}
            settings["adjust_lr_fn"] = group["adjust_lr_fn"] or "original"
            own.append({key: value for key, value in settings.items() if key != "eps"})
        return become(client, Muon(own, heads=heads))

    return make


def become(client: Optimizer, made: Made) -> Made:
    """Make a script's object the engine's optimizer; it keeps its identity, for a scheduler that was made for it."""
    engines = cast("Made", client)
    engines.__class__ = type(made)
    vars(engines).pop("step", None)  # what a scheduler has put around the step of the script's class
    vars(engines).update(vars(made))
    return engines


def maker(params: Settings, heads: Mapping[str, int]) -> Callable[[list[dict[str, Any]]], Muon]:
    """What makes the optimizer of groups with the settings of `halves`. ConfigError for settings that it refuses."""
    every: dict[str, Any] = {key: value for key, value in params.items() if key in (*_MATRICES, *_OTHERS)}
    every["decoupled_weight_decay"] = bool(params.get("adam_w_mode", True))

    def make(groups: list[dict[str, Any]]) -> Muon:
        try:
            return Muon(groups, **every, heads=heads)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"config: optimizer.params of Muon: {error}") from None

    for matrices, rate in _RATES.items():  # so that wrong settings are refused before anything is allocated
        own = {"lr": params[rate]} if rate in params else {}
        make([{"params": [nn.Parameter(torch.zeros(1))], "use_muon": matrices, **own}])
    return make
