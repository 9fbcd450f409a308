"""Models of transformers computed in FP64 throughout, so that two runs of one can be compared to 1e-12."""

from __future__ import annotations

import contextlib
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
            for owner, name in ((cls, "forward"), (cls, "_norm"), (home, "apply_rotary_pos_emb")):
                method = vars(owner).get(name)
                wide = _widened(method)
                if wide is not None:
                    changed.append((owner, name, method))
                    setattr(owner, name, wide)
        yield
    finally:
        for owner, name, method in changed:
            setattr(owner, name, method)


def _widened(function: Any) -> Any:
    """The function with FP64 where its source says FP32; None if it does not, or was replaced before."""
    if not inspect.isfunction(function) or "widened" in vars(function):
        return None
    source = textwrap.dedent(inspect.getsource(function))
    wide = re.sub(r"torch\.float(32)?\b", "torch.float64", source).replace(".float()", ".double()")
    if wide == source or "super()" in source:
        return None
    space: dict[str, Any] = {}
    body = wide[wide.index("def ") :]
    exec(compile(body, function.__code__.co_filename, "exec"), function.__globals__, space)
    space[function.__name__].widened = True
    return space[function.__name__]
