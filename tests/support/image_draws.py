"""What an encoder draws in one process, by the rule of images/draws.py, found by other means: all images of a sequence
in one run, whose parts of each tensor are drawn for one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_hydra.pipe.dropout import keep_mask, place_key, sequence_key, step_key, token_keys
from ds_hydra.testing.drawing import drawing


class _OfImages(TorchFunctionMode):
    def __init__(self, keys: list[int]):
        super().__init__()
        self.keys, self.count = keys, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._dropout(*args, **(kwargs or {})) if func is F.dropout else func(*args, **(kwargs or {}))

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return x
        self.count += 1
        return torch.cat([self._of_one(*one, p) for one in zip(x.chunk(len(self.keys)), self.keys, strict=True)])

    def _of_one(self, x: Tensor, key: int, p: float) -> Tensor:
        rows = token_keys((x.numel() // x.shape[-1],), (key,))
        return x * keep_mask(rows, place_key(None, "images", self.count), range(x.shape[-1]), p).view(x.shape) / (1 - p)


class _WideSoftmax(TorchFunctionMode):
    """Plain attention rounds probabilities to FP32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{**(kwargs or {}), **({"dtype": torch.float64} if func is F.softmax else {})})


@contextlib.contextmanager
def drawing_images(
    model: nn.Module, encoder: tuple[str, ...], step: int, number: int, tokens: int, images: int, rows: int
) -> Iterator[None]:
    """Within it, a model draws for one sequence, the `number`-th of a step, of so many tokens and so many images of
    equal sizes with so many rows each; `encoder` are the modules that run one after the other for images."""
    key = sequence_key(step_key(0, step), number)
    of_images = _OfImages([sequence_key(key, rows * image) for image in range(images)])
    modules = [model.get_submodule(path) for path in encoder]
    handles = [module.register_forward_pre_hook(lambda *_: of_images.__enter__() and None) for module in modules]
    handles += [module.register_forward_hook(lambda *_: of_images.__exit__(None, None, None)) for module in modules]
    try:
        with _WideSoftmax(), drawing(model, token_keys((tokens,), (key,))):
            yield
    finally:
        for handle in handles:
            handle.remove()
