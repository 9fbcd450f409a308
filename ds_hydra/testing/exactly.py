"""Models of transformers computed in FP64 throughout, so that two runs of one can be compared to 1e-12."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn


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
