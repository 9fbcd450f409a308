"""Updates and gradients are the engine's: what a script does to them past its calls is refused before harm.

In a loop of torch's a script may call `optimizer.step()`, drop gradients between backward and step, and read or clip
`parameter.grad`. Here the optimizer holds flat parts of the masters, whose gradients are those of the step that ran
last, and those of the coming one are computed in `engine.step()`: a call of the first kind would make one more update
of old gradients, the others would do nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from torch.optim import Optimizer

from ds_hydra.zero_hetero.errors import ConfigError

_GUARDED = "_ds_hydra_guarded"  # attribute of an optimizer


def guard_updates(
    optimizer: Optimizer, *, updating: Callable[[], bool], before_dropping: Callable[[str], None]
) -> None:
    """From now on a `step` of the optimizer is the engine's or ConfigError; `updating` says whether the engine makes
    an update, and `before_dropping`, given a call's name, is called before the optimizer's `zero_grad`."""
    own = vars(optimizer)
    if _GUARDED in own:  # it is the script's own, and has gone from one crew to the next
        return

    def refuse_step(called: Optimizer, *_: Any) -> None:
        if not updating():
            raise ConfigError(
                f"the script called {type(called).__name__}.step() of the engine's optimizer: engine.step(), "
                "train_batch() and optimizer_step() make the updates, and this would make one more by gradients that "
                "were applied already. Leave the call out; call engine.step() where there is none"
            )

    @functools.wraps(optimizer.zero_grad)
    def zero_grad(*args: Any, **kwargs: Any) -> None:
        before_dropping(f"{type(optimizer).__name__}.zero_grad()")
        type(optimizer).zero_grad(optimizer, *args, **kwargs)

    optimizer.register_step_pre_hook(refuse_step)
    own[_GUARDED], own["zero_grad"] = True, zero_grad


def refuse_dropping(call: str) -> NoReturn:
    """Refuse a call that would drop gradients of batches which are collected."""
    raise ConfigError(
        f"{call} was called between engine.backward() and the engine.step() that makes the update, where plain "
        "DeepSpeed drops the gradients of some of these batches: here they are computed in that engine.step(), and "
        "would all count. Leave the call out, for each update begins with gradients of its own; a batch whose loss is "
        "not given to engine.backward() does not count"
    )


def refuse_reading(name: str) -> NoReturn:
    """Refuse to read the gradient of a parameter while one is to come."""
    raise ConfigError(
        f"the gradient of the parameter {name} of engine.module was read before the update, but it is among the "
        "ranks' masters, and that of batches is computed in engine.step(): clip by the config's gradient_clipping, "
        "scale by parameter.register_hook() before ds_hydra.initialize(), and read the norm after the step by "
        "engine.get_global_grad_norm()"
    )
