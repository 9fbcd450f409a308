"""A model and a pipeline of it that compute different losses in; the first module that computes something else out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.pipe.placement import Pipeline
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.precision import doubled
from ds_hydra.self_check.runs import Data, RankOfPipeline, on_all_ranks

Outputs = dict[str, list[Tensor]]  # by module, in the order in which they end: what each call computed, tokens first


def first_to_differ(
    plain: Plain, source: ModelSource, pipeline: Pipeline, data: Data, *, training: bool, tolerance: float
) -> str | None:
    """Path of the first module of a layer whose output is not the plain model's; None if none can be told.

    Modules whose output is cut over tensor parallel ranks are passed over, and so are those that run several times.
    """
    inside = f"{plain.layers_path}."
    plain.model.train(training)
    with torch.no_grad(), doubled():
        alone = _recorded(plain.model, inside, data.lengths, lambda: _run_alone(plain, data))
    with torch.no_grad():
        staged = _of_pipeline(source, pipeline, data, inside, training=training)
    for path, calls in alone.items():
        if path not in staged or len(calls) != len(data.sequences):
            continue
        right, other = torch.cat(calls), staged[path]
        if right.shape == other.shape and not bool((right - other).abs().max() <= tolerance * right.abs().max()):
            return path
    return None


def _run_alone(plain: Plain, data: Data) -> None:
    for sequence in range(len(data.sequences)):
        plain.run(data, sequence)


def _recorded(model: nn.Module, inside: str, counts: list[int], run: Callable[[], Any]) -> Outputs:
    """Outputs of the modules whose path begins with `inside`; the k-th run of one has `counts[k]` tokens."""
    outputs: Outputs = {}

    def keep(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            calls = outputs.setdefault(path, [])
            rows = _rows(out, counts[len(calls)]) if len(calls) < len(counts) else None
            if rows is not None:
                calls.append(rows)

        return hook

    handles = [m.register_forward_hook(keep(path)) for path, m in model.named_modules() if path.startswith(inside)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _rows(out: Any, tokens: int) -> Tensor | None:
    """The first tensor of an output as (tokens, features)."""
    first = out[0] if isinstance(out, tuple | list) and out else out
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return None
    for dim in (1, 0, 2):
        if first.dim() > dim and first.shape[dim] == tokens:
            return first.detach().movedim(dim, 0).reshape(tokens, -1).clone()
    return None


def _of_pipeline(
    source: ModelSource, pipeline: Pipeline, data: Data, inside: str, *, training: bool
) -> dict[str, Tensor]:
    """What the stages' modules computed for all tokens of all packs, as tensor parallel rank 0 holds it."""

    def program(worker: RankOfPipeline) -> tuple[RankOfPipeline, Outputs]:
        module, counts = worker.module.module, worker.tokens(data)
        return worker, _recorded(module, inside, counts, lambda: worker.forward(data, training=training))

    joined: dict[str, Tensor] = {}
    results, _ = on_all_ranks(source, pipeline, program)
    done = [(worker, outputs) for worker, outputs in results if worker.place.tp_rank == 0]
    for stage in pipeline.stages:
        sharing = [outputs for worker, outputs in done if worker.place.stage == stage]
        for path in _in_layers(sharing[0], inside, range(stage.first_layer, stage.last_layer)):
            calls = [outputs.get(path, []) for outputs in sharing]
            if all(len(each) == len(data.microbatches) for each in calls):
                joined[path] = torch.cat([part for pack in zip(*calls, strict=True) for part in pack])
    return joined


def _in_layers(outputs: Outputs, inside: str, layers: range) -> Iterator[str]:
    """Paths in the stage's own layers: modules of others stand in for them."""
    return (path for path in outputs if int(path.removeprefix(inside).partition(".")[0]) in layers)
