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
        (alone,) = _recorded([plain.model], inside, [(n,) for n in data.lengths], lambda: _run_alone(plain, data))
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


def _recorded(
    models: Sequence[nn.Module], inside: str, counts: Sequence[Sequence[int]], run: Callable[[], Any]
) -> list[Outputs]:
    """Of each model the outputs of the modules whose path begins with `inside`; the k-th run of one has one of
    `counts[k]` tokens."""
    found: list[Outputs] = [{} for _ in models]

    def keep(outputs: Outputs, path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            calls = outputs.setdefault(path, [])
            known = counts[len(calls)] if len(calls) < len(counts) else ()
            calls += [rows for tokens in known if (rows := _rows(out, tokens)) is not None][:1]

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
    """What the stages' modules computed for all tokens of all packs: as tensor parallel rank 0 holds it, or as all of
    them do that share the tokens."""

    def program(worker: RankOfPipeline) -> list[tuple[StagePlace, Outputs]]:
        models, shards = [part.module for part in worker.parts], worker.place.shards
        counts = [tuple({tokens: None, tokens // shards: None}) for tokens in worker.tokens(data)]
        found = _recorded(models, inside, counts, lambda: worker.forward(data, training=training))
        return [(part.place, outputs) for part, outputs in zip(worker.parts, found, strict=True)]

    joined: dict[str, Tensor] = {}
    results, _ = on_all_ranks(source, pipeline, program)
    done = [each for of_rank in results for each in of_rank]
    tokens = [sum(span.stop - span.start for span in batch.spans) for batch in data.microbatches]
    for stage in dict.fromkeys(place.stage for place, _ in done):
        sharing = [(place.tp_rank, outputs) for place, outputs in done if place.stage == stage]
        for path in _in_layers(sharing[0][1], inside, range(stage.first_layer, stage.last_layer)):
            calls = [(tp_rank, outputs.get(path, [])) for tp_rank, outputs in sharing]
            if all(len(each) == len(tokens) for _, each in calls):
                packs = [
                    _rows_of_pack([(rank, each[i]) for rank, each in calls], tokens[i]) for i in range(len(tokens))
                ]
                joined[path] = torch.cat(packs)
    return joined


def _rows_of_pack(held: Sequence[tuple[int, Tensor]], tokens: int) -> Tensor:
    """A pack's rows without its padding, of what ranks hold, each given with its tensor parallel rank."""
    of_first = [rows for tp_rank, rows in held if tp_rank == 0]
    enough = sum(map(len, of_first)) >= tokens
    return torch.cat(of_first if enough else [rows for _, rows in held])[:tokens]


def _in_layers(outputs: Outputs, inside: str, layers: range) -> Iterator[str]:
    """Paths in the stage's own layers: modules of others stand in for them."""
    return (path for path in outputs if int(path.removeprefix(inside).partition(".")[0]) in layers)
