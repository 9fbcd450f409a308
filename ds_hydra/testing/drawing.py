"""Random numbers of the reference: one process, one sequence, drawn by the rule of pipe/dropout.py.

The rule says what a draw depends on; which module draws, and how often, is found here by other means than the engine's:
one mode around the whole forward, and hooks on every module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_hydra.pipe.dropout import AttentionDropout, keep_mask, place_key, uniform

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
