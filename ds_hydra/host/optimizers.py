"""Optimizers over a rank's flat master shards, as the user chose them; those that are not element-wise are refused.

A script may say of an optimizer that is not known here that it may be used ("zero_allow_untested_optimizer"), and
transformers' Trainer says so of any. Whoever divides by a norm of the whole weight, or needs it as a matrix, shows in a
small one that is updated once as it is, and once in pieces as ranks own them.

A rank owns flat intervals that cut across parameters: of a weight (4, 4) over 3 ranks, rank 0 may own the elements 0 to
4. Adam updates an element from that element alone, so 3 ranks compute what one would. LAMB divides by the norm of the
whole weight, which cannot be computed from 5 of 16 elements, and Muon needs it as a matrix. These have ways of their
own [Note: sums of whole parameters] [Note: whole matrices]; others that need such things are refused.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hydra.config.checks import nearest
from ds_hydra.pipe.models.whose_code import own_functions
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)


_ROWS, _COLUMNS, _STEPS = 6, 8, 3
_PIECES = (13, 22, 13)  # elements
_NEAR = 1e-4  # of the largest update; sums of single precision are all that right ones differ by


def is_element_wise(optimizer: Optimizer) -> bool | None:
    """Whether an optimizer of this class with these options is; None where none can be made or run to try it."""
    taken = inspect.signature(type(optimizer)).parameters
    free = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
    defaults = {key: value for key, value in optimizer.defaults.items() if free or key in taken}
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(_ROWS, _COLUMNS, generator=draw)
    sizes = torch.logspace(-3, 3, _ROWS * _COLUMNS).view_as(weight)  # so that pieces have norms of their own
    gradients = [torch.randn(_ROWS, _COLUMNS, generator=draw) * sizes for _ in range(_STEPS)]
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
        try:
            whole, cut = (
                _updated(type(optimizer), options, defaults, weight, gradients, pieces)
                for pieces in ((weight.numel(),), _PIECES)
            )
        except Exception:  # of an optimizer that runs on GPUs alone, say
            return None
        if not float((whole - cut).abs().max()) <= _NEAR * float((whole - weight.flatten()).abs().max()):
            return False
    return True


def _updated(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    weight: Tensor,
    gradients: list[Tensor],
    pieces: tuple[int, ...],
) -> Tensor:
    """The weight (elements,) after some updates, as one matrix where there is one piece."""

    def cut(values: Tensor) -> list[Tensor]:
        return [values] if len(pieces) == 1 else list(values.flatten().split(pieces))

    parameters = [nn.Parameter(piece.clone()) for piece in cut(weight)]
    make: Any = kind  # each has arguments of its own
    # Each piece has an optimizer of its own, as on the rank that owns it: one that clips by all it has differs, too.
    optimizers: list[Any] = [make([{"params": [parameter], **options}], **defaults) for parameter in parameters]
    for optimizer in optimizers:
        if hasattr(optimizer, "train"):  # as those without a schedule have
            optimizer.train()
    for gradient in gradients:
        for optimizer, parameter, piece in zip(optimizers, parameters, cut(gradient), strict=True):
            parameter.grad = piece.clone()
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


class Lion(Optimizer):
    """Sign of an interpolated momentum (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms")."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                momentum = state["exp_avg"]
                update = torch.lerp(param.grad, momentum, beta1).sign_()
                param.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                momentum.lerp_(param.grad, 1.0 - beta2)
        return loss


class UncorrectedAdam(Optimizer):
    """Adam whose moments are used as they are, as for "bias_correction": false; of a first step's gradient g they are
    (1 - beta1) g and (1 - beta2) g^2. `adam_w_mode` decays weights by themselves, and else through the gradient."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "adam_w_mode": adam_w_mode})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                grad, decay = param.grad, group["weight_decay"]
                if decay and not group["adam_w_mode"]:
                    grad = grad.add(param, alpha=decay)
                state["exp_avg"].lerp_(grad, 1.0 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
                if decay and group["adam_w_mode"]:
                    param.mul_(1.0 - group["lr"] * decay)
                param.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-group["lr"])
        return loss


ELEMENT_WISE: dict[str, type[Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "asgd": torch.optim.ASGD,
    "lion": Lion,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "sgd": torch.optim.SGD,
}
_MUON = "muon"
_WHOLE = ("adafactor", "lamb", _MUON)  # types in a config that need whole parameters, by `ds_hydra.matrices`
_WHOLE_OF_TORCH = (torch.optim.Muon, torch.optim.Adafactor)
_WHOLE_CLASSES = frozenset({"transformers.optimization.Adafactor", "deepspeed.ops.lamb.fused_lamb.FusedLamb"})
_OTHER_MUON = (
    'orthogonalizes each weight matrix (instead give the block "optimizer" with the type "Muon", or initialize() a '
    "torch.optim.Muon of the model's matrices)"
)
_OTHER_LAMB = (
    'scales each parameter\'s step by its norm in a way of its own (instead give the block "optimizer" with the type '
    '"Lamb", which is DeepSpeed\'s)'
)
_ELEMENT_WISE_ELSEWHERE = frozenset({"FusedAdam", "DeepSpeedCPUAdam", "FusedLion", "DeepSpeedCPULion"})
_NOT_ELEMENT_WISE = {
    "adafactor": (
        "factors each weight's second moment in a way of its own (instead give initialize() torch's or transformers')"
    ),
    "fusedlamb": _OTHER_LAMB,
    "lamb": _OTHER_LAMB,
    "lars": "scales each parameter's step by its norm, and neither torch nor DeepSpeed nor transformers has one",
    "lbfgs": "uses inner products over all parameters",
    "muadam": "sets rates by each parameter's shape",
    "muadamw": "sets rates by each parameter's shape",
    "muonclip": "rescales queries and keys by each head's largest logit, which packed attention does not return",
    "muon": _OTHER_MUON,
    "muonwithauxadam": _OTHER_MUON,
    "musgd": "sets rates by each parameter's shape",
    "onebitadam": "compresses gradients in its own communication",
    "onebitlamb": "scales each parameter's step by its norm",
    "sparseadam": "needs sparse gradients",
    "zerooneadam": "compresses gradients in its own communication",
}


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share optimizer settings, by the names the model gives them."""

    names: tuple[str, ...]
    settings: dict[str, Any]  # such as {"weight_decay": 0.0}; what is not in it comes from the optimizer


@dataclass(frozen=True)
class OptimizerRecipe:
    """How to make the user's optimizer once the masters exist. `groups` says which parameters they come from."""

    name: str
    groups: tuple[ParameterGroup, ...]
    make: Callable[[list[dict[str, Any]]], Optimizer]
    # What an optimizer that has made steps keeps of whole parameters, by name, until the masters have taken it.
    states: dict[str, dict[str, Any]] = field(default_factory=dict)

    def build(self, shards: Sequence[Sequence[Tensor]]) -> Optimizer:
        """The optimizer over this rank's master shards; `shards[i]` are those of `groups[i]`, and may be empty."""
        if len(shards) != len(self.groups):
            raise ValueError(f"{len(shards)} groups of shards for {len(self.groups)} parameter groups")
        groups = [{"params": list(own), **g.settings} for own, g in zip(shards, self.groups, strict=True)]
        optimizer = self.make(groups)
        if len(optimizer.param_groups) != len(groups):
            raise ConfigError(
                f"optimizer {self.name} was given {len(groups)} parameter groups but has "
                f"{len(optimizer.param_groups)}: it must keep the groups it is given"
            )
        return optimizer


def optimizer_recipe(
    model: nn.Module,
    *,
    name: str | None = None,
    params: Mapping[str, Any] | None = None,
    client: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    allow_untested: bool = False,
) -> OptimizerRecipe:
    """The user's optimizer, from an object, from a callable over parameter groups, or from a config block.

    A model whose parameters are all frozen needs none. As in DeepSpeed a client optimizer goes before the block
    (`name`, `params`). A client object keeps its identity: its groups receive the shards in place of the parameters, so
    LR schedulers made for it go on working, and so does the state of one that has made steps. Parameters that are in no
    group are frozen. Raises ConfigError for optimizers that are not element-wise (`allow_untested` admits unknown ones)
    and for parameters that are not the model's.
    """
    found = _recipe_of(model, name, params, client, model_parameters, allow_untested=allow_untested)
    if found.name != "none":
        _freeze_others(model, {own for group in found.groups for own in group.names})
    return found


def _freeze_others(model: nn.Module, named: Collection[str]) -> None:
    """Freeze the parameters that no optimizer group has: none of them would change in plain torch."""
    left = [name for name, own in model.named_parameters() if own.requires_grad and name not in named]
    for name in left:
        model.get_parameter(name).requires_grad_(False)
    if left:
        logger.warning(
            "%d parameters are in no optimizer group, the first is %s: they are frozen, which saves their gradients",
            len(left), left[0],
        )  # fmt: skip


def _recipe_of(
    model: nn.Module, name: str | None, params: Mapping[str, Any] | None,
    client: Optimizer | Callable[[Any], Optimizer] | None, model_parameters: Iterable[Any] | None, *,
    allow_untested: bool,
) -> OptimizerRecipe:  # fmt: skip
    if client is None and name is None and not any(own.requires_grad for own in model.parameters()):
        return OptimizerRecipe("none", (ParameterGroup((), {}),), lambda groups: torch.optim.SGD(groups, lr=0.0))
    if isinstance(client, Optimizer):
        whole = _needs_whole(client)
        if not whole:
            _check_class(client, allow_untested)
        # Adagrad has some from the start.
        steps = any(float(state.get("step", 1.0)) for state in client.state.values())
        if steps and whole:
            kind = type(client).__name__
            raise ConfigError(f"optimizer {kind} has already made steps, and its state is not kept: give a fresh one")
        if (hooked := hooks_of_steps(client)) is not None:
            raise ConfigError(hooked)
        groups = parameter_groups(model, client.param_groups)
        names = [name for group in groups for name in group.names]
        make = _of_matrices().of_client(client, names) if whole else _refill(client, begins=not steps)
        paths = {id(own): path for path, own in model.named_parameters()}
        states = {paths[id(own)]: {**state} for own, state in client.state.items() if own.requires_grad and steps}
        return OptimizerRecipe(type(client).__name__, groups, make, states)
    groups = parameter_groups(model, model_parameters)
    if client is None and name is not None and name.lower() in _WHOLE:
        given = [(group.names, group.settings) for group in groups]
        cut, make = _of_matrices().of_block(name.lower(), dict(params or {}), given, model)
        return OptimizerRecipe(name, tuple(ParameterGroup(names, own) for names, own in cut), make)
    if client is not None:
        return OptimizerRecipe("client callable", groups, _checked_callable(client, allow_untested))
    if name is None:
        raise ConfigError('there is no optimizer: give the block "optimizer" or initialize(optimizer=...)')
    return OptimizerRecipe(name, groups, optimizer_of_block(name, dict(params or {})))


def _needs_whole(optimizer: Optimizer) -> bool:
    """Whether it is one of those that `ds_hydra.matrices` has in its place."""
    kind = type(optimizer)
    return kind in _WHOLE_OF_TORCH or f"{kind.__module__}.{kind.__qualname__}" in _WHOLE_CLASSES


def _of_matrices() -> Any:
    """What makes optimizers of whole parameters. ConfigError where it is not installed."""
    try:
        from ds_hydra.matrices import kinds
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("ds_hydra"):
            raise
        what = "Muon, LAMB and Adafactor need"
        raise ConfigError(f"{what} {error.name}, which this installation does not have") from error
    return kinds


def hooks_of_steps(optimizer: Optimizer) -> str | None:
    """What is wrong with code of a script that runs with an optimizer's steps, or those of all; None: there is none."""
    known = type(optimizer) in ELEMENT_WISE.values()
    steps = (vars(optimizer).get("step"), type(optimizer).step) if known else ()
    if (own := next((own for step in steps for own in own_functions(step)), None)) is not None:
        return (
            f"the step of optimizer {type(optimizer).__name__} is {own.__qualname__} of {own.__module__}, which would "
            "be handed flat parts of the ranks' masters in place of the model's parameters: clip by the config's "
            "gradient_clipping, and do what else it does around engine.step() or train_batch()"
        )
    everywhere = vars(sys.modules[Optimizer.__module__])
    places = [vars(optimizer)[f"_optimizer_step_{when}_hooks"] for when in ("pre", "post")]
    places += [everywhere[f"_global_optimizer_{when}_hooks"] for when in ("pre", "post")]
    found = next((hook for hooks in places for hook in hooks.values() if own_functions(hook)), None)
    return None if found is None else (
        f"optimizer {type(optimizer).__name__} has the step hook {getattr(found, '__qualname__', found)}, which would "
        "be handed flat parts of the ranks' masters in place of the model's parameters: change gradients by "
        "parameter.register_hook(), and do what else it does around train_batch()"
    )  # fmt: skip


def parameter_groups(model: nn.Module, given: Iterable[Any] | None = None) -> tuple[ParameterGroup, ...]:
    """Groups of the model's trainable parameters, by name.

    `given` is what torch optimizers take: tensors, (name, tensor) pairs or group dicts; None is all parameters.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    items = list(given) if given is not None else list(model.parameters())
    dicts = [item for item in items if isinstance(item, Mapping)]
    loose = [item for item in items if not isinstance(item, Mapping)]
    sources: list[Mapping[str, Any]] = [*([{"params": loose}] if loose or not dicts else []), *dicts]
    groups: list[ParameterGroup] = []
    seen: set[str] = set()
    for source in sources:
        group = _named_group(source, names, seen)
        seen.update(group.names)
        groups.append(group)
    if not seen:
        raise ConfigError(
            "there is nothing to train: no parameter given to the optimizer requires a gradient; call requires_grad_() "
            "on some, or leave the optimizer out for an engine that evaluates alone"
        )
    return tuple(groups)


def _named_group(source: Mapping[str, Any], names: Mapping[int, str], seen: set[str]) -> ParameterGroup:
    params = source["params"]
    own: list[str] = []
    for item in [params] if isinstance(params, Tensor) else params:
        parameter = item[1] if isinstance(item, tuple) else item
        name = names.get(id(parameter))
        if name is None:
            shape = tuple(getattr(parameter, "shape", ()))
            raise ConfigError(
                f"the optimizer was given a parameter of shape {shape} that is not one of the model's: build it "
                "from the parameters of the model that is passed to initialize()"
            )
        if name in seen or name in own:
            raise ConfigError(f"the optimizer was given the parameter {name!r} twice; list it in one group only")
        if parameter.requires_grad:
            own.append(name)
    return ParameterGroup(tuple(own), {k: v for k, v in source.items() if k not in ("params", "param_names")})


def _check_class(optimizer: Optimizer, allow_untested: bool) -> None:
    name = type(optimizer).__name__
    if name.lower() in _NOT_ELEMENT_WISE:
        raise _refusal(name)
    if type(optimizer) in ELEMENT_WISE.values() or name in _ELEMENT_WISE_ELSEWHERE:
        return
    if allow_untested:
        tried = is_element_wise(optimizer)
        if tried is None:
            logger.warning("optimizer %s could not be tried on a small weight: if an element's update depends on other "
                           "elements, master shards, which cut across parameters, change it", name)  # fmt: skip
        elif not tried:
            raise ConfigError(
                f"optimizer {name} updates a weight otherwise in pieces than as a whole, and master shards cut across "
                "parameters: use one whose update of an element depends on that element alone, such as "
                + ", ".join(sorted(kind.__name__ for kind in ELEMENT_WISE.values()))
            )
        return
    raise ConfigError(
        f"optimizer {name} is not known to be element-wise, and master shards cut across parameters: if each "
        'element\'s update depends on that element alone, set "zero_allow_untested_optimizer": true'
    )


def _refusal(name: str) -> ConfigError:
    return ConfigError(
        f"optimizer {name} {_NOT_ELEMENT_WISE[name.lower()]}, which cannot be done on flat parts of parameters, as "
        "each rank owns them: use one of " + ", ".join(sorted(kind.__name__ for kind in ELEMENT_WISE.values()))
    )


def _refill(client: Optimizer, *, begins: bool) -> Callable[[list[dict[str, Any]]], Optimizer]:
    def make(groups: list[dict[str, Any]]) -> Optimizer:
        for own, shards in zip(client.param_groups, groups, strict=True):
            own["params"] = shards["params"]
            own.pop("param_names", None)
        if not begins:
            client.state.clear()
        elif client.state:
            made = type(client)([dict(group) for group in client.param_groups], **client.defaults)
            client.state.clear()
            client.state.update(made.state)
        return client

    return make


def _checked_callable(
    client: Callable[[Any], Optimizer], allow_untested: bool
) -> Callable[[list[dict[str, Any]]], Optimizer]:
    def make(groups: list[dict[str, Any]]) -> Optimizer:
        optimizer = client(groups)
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"initialize(optimizer=...) was given a callable that returned a {type(optimizer).__name__}; it "
                "must return a torch.optim.Optimizer"
            )
        if _needs_whole(optimizer):
            whole: Optimizer = _of_matrices().of_client(optimizer, ())(optimizer.param_groups)
            return whole
        _check_class(optimizer, allow_untested)
        return optimizer

    return make


def needs_whole(name: str) -> bool:
    """Whether a recipe's optimizer, by its name, needs whole parameters; what a callable makes is not known by then."""
    return name.lower() in _WHOLE or any(path.endswith(f".{name}") for path in _WHOLE_CLASSES)


def update_bytes(name: str) -> int:
    """Bytes of a trained element that an update by this optimizer takes, beside masters and two states of 4 bytes."""
    return 8 if name.lower() == _MUON else 0  # at most 12, and it has one state: [Note: an exchange]


def is_known(name: str) -> bool:
    """Whether a config block's optimizer is made, or refused with what it does."""
    return name.lower() in (*ELEMENT_WISE, *_NOT_ELEMENT_WISE, *_WHOLE)


def optimizer_of_block(name: str, params: dict[str, Any]) -> Callable[[list[dict[str, Any]]], Optimizer]:
    """What makes a config block's optimizer of parameter groups; ConfigError for a block that is refused.

    Adam and AdamW follow DeepSpeed's rules for them.
    """
    kind = name.lower()
    if kind in _WHOLE:
        make_whole: Callable[[list[dict[str, Any]]], Optimizer] = _of_matrices().of_block(kind, params)[1]
        return make_whole
    if kind in _NOT_ELEMENT_WISE:
        raise ConfigError(f"config: optimizer.type: {_refusal(name)}")
    if kind not in ELEMENT_WISE:
        kinds = [known.__name__ for known in ELEMENT_WISE.values()]
        raise ConfigError(f'config: optimizer.type "{name}" is not known; {nearest(name, kinds)}')
    optimizer_class = ELEMENT_WISE[kind]
    if kind in ("adam", "adamw"):
        optimizer_class, params = _adam(kind, params)

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        try:
            return optimizer_class(groups, **params)
        except (TypeError, ValueError) as error:
            accepted = ", ".join(list(inspect.signature(optimizer_class).parameters)[1:])
            raise ConfigError(f"config: optimizer.params of {name}: {error}; it takes {accepted}") from None

    # Made once for a parameter of one element and thrown away, so that wrong settings are refused now; the real one is
    # made only after the masters, minutes into the start of a large job.
    make([{"params": [nn.Parameter(torch.zeros(1))]}])
    return make


def _adam(kind: str, params: dict[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    """DeepSpeed reads "Adam" as AdamW unless adam_w_mode is false, and decays nothing unless told to.

    Its own kernels are compiled when first used; torch's fused ones do the same arithmetic and are not.
    """
    decoupled = params.pop("adam_w_mode", True) or kind == "adamw"
    if not params.pop("torch_adam", False):
        params.setdefault("weight_decay", 0.0)
    for key in ("fp32_optimizer_states", "set_grad_none"):
        params.pop(key, None)
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    if not params.pop("bias_correction", True):
        return UncorrectedAdam, {**params, "adam_w_mode": decoupled}
    if not any(params.get(key) for key in ("foreach", "capturable", "differentiable")):
        params.setdefault("fused", True)
    return (torch.optim.AdamW if decoupled else torch.optim.Adam), params
