"""A DeepSpeed `PipelineModule` in, a source of the stages of a smaller one out: FP64, fewer of its repeated layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.pipe.models.layer_list import LayerList
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.self_check.schemes import copies_at_once

_REPEATED = 3  # of equal layers that follow each other, so many are kept, or as many as a pipeline has ranges


class _Shorter:
    """What `LayerList` reads of a PipelineModule, for some of its layers, buffers in FP64."""

    def __init__(self, model: Any, repeated: int):
        self._model, specs = model, list(model._layer_specs)
        self._kept = [i for i in range(len(specs)) if i < repeated or not _same(specs[i - repeated : i + 1])]
        self._layer_specs = [specs[index] for index in self._kept]
        self.loss_fn = model.loss_fn

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._renamed(self._model.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in self._renamed(self._model.named_buffers()):
            yield name, buffer.double() if buffer.is_floating_point() else buffer

    def _renamed(self, named: Any) -> Iterator[tuple[str, Any]]:
        """Names begin with a layer's number, but for tied ones."""
        numbers = {str(old): str(new) for new, old in enumerate(self._kept)}
        for name, value in named:
            number, dot, rest = name.partition(".")
            if number in numbers or not number.isdigit():
                yield numbers.get(number, number) + dot + rest, value


def _same(specs: list[Any]) -> bool:
    """Whether all layers are made alike."""
    return len({_made(spec) for spec in specs}) == 1


def _made(spec: Any) -> str:
    if isinstance(spec, nn.Module):
        return repr((type(spec), str(spec), [tuple(p.shape) for p in spec.parameters()]))
    if not hasattr(spec, "build"):
        return repr(id(spec))  # a function
    parts = (spec.typename, spec.module_args, sorted(spec.module_kwargs.items()), getattr(spec, "key", None))
    return repr((*parts, id(getattr(spec, "forward_fn", None))))


def short_layer_list(
    model: Any, schemes: Sequence[PipelineShape], memory_bytes: float, options: StageOptions = AS_WRITTEN
) -> LayerList:
    """The source, with values drawn anew. Raises MemoryError where it is too large, ConfigError as `LayerList` does."""
    repeated = max([_REPEATED, *(scheme.parts * scheme.pp for scheme in schemes)])
    source = LayerList(_Shorter(model, repeated), options)
    params = [param for bucket in source.plan.buckets for param in bucket.params]
    bytes_needed = 8 * copies_at_once(schemes) * sum(param.numel for param in params)
    if bytes_needed > memory_bytes:
        layers = source.plan.num_layers
        raise MemoryError(f"{layers} layers take {bytes_needed / 2**30:.1f} GiB of {memory_bytes / 2**30:.1f} GiB")
    generator = torch.Generator().manual_seed(1)
    values: dict[str, Tensor] = {}
    for param in params:
        value = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        values[param.name] = value * (0.3 if value.dim() < 2 else value.shape[-1] ** -0.5)
    source.values = values
    return source
