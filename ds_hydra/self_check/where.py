"""A model and a pipeline of it that compute different losses in; the first module that computes something else out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.pipe.placement import Pipeline
from ds_hydra.pipe.stage import ModelSource, StagePlace
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
        (alone,) = _recorded([plain.model], inside, data.lengths, lambda: _run_alone(plain, data))
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


def _recorded(models: Sequence[nn.Module], inside: str, counts: list[int], run: Callable[[], Any]) -> list[Outputs]:
    """Of each model the outputs of the modules whose path begins with `inside`; the k-th run of one has `counts[k]`
    tokens."""
    found: list[Outputs] = [{} for _ in models]

    def keep(outputs: Outputs, path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            calls = outputs.setdefault(path, [])
            rows = _rows(out, counts[len(calls)]) if len(calls) < len(counts) else None
            if rows is not None:
                calls.append(rows)

        return hook

    handles = [
        module.register_forward_hook(keep(outputs, path))
        for model, outputs in zip(models, found, strict=True)
        for path, module in model.named_modules()
        if path.startswith(inside)
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found


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

    def program(worker: RankOfPipeline) -> list[tuple[StagePlace, Outputs]]:
        models, counts = [part.module for part in worker.parts], worker.tokens(data)
        found = _recorded(models, inside, counts, lambda: worker.forward(data, training=training))
        return [(part.place, outputs) for part, outputs in zip(worker.parts, found, strict=True)]

    joined: dict[str, Tensor] = {}
    results, _ = on_all_ranks(source, pipeline, program)
    done = [(place.stage, outputs) for of_rank in results for place, outputs in of_rank if place.tp_rank == 0]
    for stage in dict.fromkeys(stage for stage, _ in done):
        sharing = [outputs for held, outputs in done if held == stage]
        for path in _in_layers(sharing[0], inside, range(stage.first_layer, stage.last_layer)):
            calls = [outputs.get(path, []) for outputs in sharing]
            if all(len(each) == len(data.microbatches) for each in calls):
                joined[path] = torch.cat([part for pack in zip(*calls, strict=True) for part in pack])
    return joined


def _in_layers(outputs: Outputs, inside: str, layers: range) -> Iterator[str]:
    """Paths in the stage's own layers: modules of others stand in for them."""
    return (path for path in outputs if int(path.removeprefix(inside).partition(".")[0]) in layers)
