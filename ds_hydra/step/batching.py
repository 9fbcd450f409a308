"""This rank's micro-batches of a planned step as tensors, and all ranks' agreement on the step and its loss weight.

Each rank makes a `row_of` these, all ranks gather the rows, and each reads them all by `agreed`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.data.tokens import Float64Array, TokenSequence
from ds_hydra.pipe.contexts import Contexts
from ds_hydra.pipe.dropout import sequence_key
from ds_hydra.pipe.loss import IGNORED, Objective, Predictions, Scored, TokenFunction
from ds_hydra.pipe.pinned import readable
from ds_hydra.pipe.rows import ROUTED_EXPERTS, Balance, Chunk, MicroBatch, Pack, Routes, position_ids
from ds_hydra.pipe.schedules.registry import weighs
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.plan.step_plan import MicroBatchPlan, Span, StepPlan
from ds_hydra.ranks.channel import Channel, agree
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.told import Told, mark_told

Tokens = npt.NDArray[np.int64]
Load = Callable[[int], TokenSequence]  # of a sequence id


@dataclass(frozen=True)
class RankBatches:
    """This rank's micro-batches of a step, and its share of the step's loss normaliser."""

    batches: tuple[MicroBatch, ...]
    weight: int  # this rank's share of the normaliser: targets, sequences or micro-batches
    num_padding: int  # tokens added so that every rank holds at least one, and those that share tokens equally many
    rows: tuple[tuple[Span, ...], ...] = ()  # what stands in each micro-batch, in that order

    def on(self, device: torch.device) -> RankBatches:
        """The same batches on the device, by copies that it makes while the host goes on."""
        return self if device.type == "cpu" else replace(self, batches=tuple(_copy(b, device) for b in self.batches))

    def keeping_losses(self) -> RankBatches:
        """The same batches with room for the loss of each token, where this rank has labels."""
        return replace(self, batches=tuple(map(_with_room, self.batches)))

    def keeping_scores(self) -> RankBatches:
        """The same batches, on the device, with room for the scores of each token, where this rank has labels."""
        return replace(self, batches=tuple(map(_with_room_for_scores, self.batches)))

    def predicting(self, function: TokenFunction) -> RankBatches:
        """The same batches, on the device, with room for what a function gives for each token."""
        return replace(self, batches=tuple(replace(b, predictions=Predictions(function)) for b in self.batches))

    def predicted(self) -> list[Float64Array]:
        """What the function gave, (tokens, k) of each micro-batch, without padding."""
        return [
            batch.predictions.found()[:held].double().cpu().numpy()
            for batch, held in self._held()
            if batch.labels is not None and batch.predictions is not None
        ]

    def scores(self) -> list[Float64Array]:
        """The scores that were kept, (tokens, num_scores) of each micro-batch, without padding."""
        kept = ((batch.scored.found if batch.scored else None, held) for batch, held in self._held())
        return [found[:held].cpu().numpy() for found, held in kept if found is not None]

    def chosen(self) -> list[Float64Array]:
        """The experts that were kept, (tokens, routers * chosen) of each micro-batch, without padding; 0 of routers on
        other stages."""
        kept = ((batch.routes.found if batch.routes else None, held) for batch, held in self._held())
        return [found[:held].flatten(1).double().cpu().numpy() for found, held in kept if found is not None]

    def _held(self) -> Iterator[tuple[MicroBatch, int]]:
        """Each micro-batch, and how many tokens that are no padding this rank has of it: padding stands at the end."""
        for batch, row in zip(self.batches, self.rows, strict=True):
            start, stop = batch.pack.local
            yield batch, max(0, min(stop, sum(span.stop - span.start for span in row)) - start)

    def add_losses(self, found: npt.NDArray[np.float64]) -> None:
        """Add the kept losses to found[0] and their number to found[1], by the sequence's position in the plan.

        found (2, sequences).
        """
        for batch, row in zip(self.batches, self.rows, strict=True):
            if batch.labels is None or batch.token_losses is None:
                continue
            start, stop = batch.pack.local
            positions = np.zeros(batch.pack.num_tokens, dtype=np.int64)  # padding, at the end, has no targets
            lengths = [span.stop - span.start for span in row]
            positions[: sum(lengths)] = np.repeat([span.sequence for span in row], lengths)
            counted = (batch.labels != IGNORED).cpu().numpy()
            at = positions[start:stop][counted]
            np.add.at(found[0], at, batch.token_losses.cpu().numpy()[counted])
            np.add.at(found[1], at, 1.0)


class _Row(NamedTuple):
    """What is packed together: a slice of a longer sequence, if there is one, in front of whole sequences."""

    spans: tuple[Span, ...]
    ids: tuple[int, ...]  # of the spans' sequences
    keys: tuple[int, ...]  # what is drawn for them follows from these
    chunk: Chunk | None


def build_batches(
    microbatches: Sequence[MicroBatchPlan],
    sequence_ids: Sequence[int],
    place: StagePlace,
    load: Load,
    loss_norm: str,
    device: torch.device,
    *,
    step_key: int = 0,
    balances: bool = False,
    objective: Objective | None = None,
) -> RankBatches:
    """Pack the micro-batches of one pipeline for one rank of it: all slices of a sequence, or the whole of it.

    Each rank reads the sequences that it has tokens of: later stages may look tokens up too (an embedding of every
    layer's own), only the last reads labels. What is drawn at random for a sequence follows from `step_key` and its id.
    Where the model `balances` its routers, each rank learns what its sequences count. With an `objective` the last
    stage gets the sequences' fields.
    The tensors are in the host's memory, where `device` can read them by itself. A thread may call this.
    """
    load = cache(load)  # once for all slices of a sequence
    contexts = _contexts(microbatches)
    built: list[tuple[MicroBatch, int, int]] = []
    rows = rows_of(microbatches)
    for batch, spans in zip(microbatches, rows, strict=True):
        first = spans[0]
        own = contexts.get(first.sequence)
        ids = tuple(sequence_ids[span.sequence] for span in spans)
        keys = tuple(sequence_key(step_key, sequence) for sequence in ids)
        row = _Row(spans, ids, keys, None if own is None else Chunk(first.start, first.stop, own))
        made, counted, padding = _build(row, place, load, loss_norm, device, objective)
        balance = _balance(row, made.pack, load, loss_norm, device) if balances else None
        made = _with_images(made, row, place, load)
        made = replace(made, recompute=batch.recompute, beside_us=batch.beside_us, balance=balance)
        built.append((made, counted, padding))
    return RankBatches(
        tuple(batch for batch, _, _ in built), sum(w for _, w, _ in built), sum(pad for _, _, pad in built), rows
    )


def _with_images(batch: MicroBatch, row: _Row, place: StagePlace, load: Load) -> MicroBatch:
    """A micro-batch with the images of its sequences, in a job that trains images: then all of them have some."""
    offsets = batch.pack.offsets
    first = min(bisect_right(offsets, batch.pack.local[0]), len(row.ids)) - 1  # which it holds tokens of, and has read
    images = load(row.ids[first]).images
    return batch if images is None else images.attach(batch, row.spans, [load(each) for each in row.ids], place)


def rows_of(microbatches: Sequence[MicroBatchPlan]) -> tuple[tuple[Span, ...], ...]:
    """The spans of each micro-batch of a pipeline in the order of its row: a slice stands in front of whole sequences.

    In a valid plan a sequence that several spans name runs in slices.
    """
    counts = Counter(span.sequence for batch in microbatches for span in batch.spans)
    return tuple(tuple(sorted(batch.spans, key=lambda span: counts[span.sequence] == 1)) for batch in microbatches)


def _with_room_for_scores(batch: MicroBatch) -> MicroBatch:
    if batch.routes is not None and batch.routes.wanted:
        (start, stop), routing = batch.pack.local, batch.routes.routing
        of_rank = stop - start, len(routing.paths), routing.chosen
        room = torch.zeros(of_rank, dtype=torch.int64, device=batch.position_ids.device)
        batch = replace(batch, routes=replace(batch.routes, found=room))
    if batch.scored is None or batch.labels is None:
        return batch
    shape = len(batch.labels), batch.scored.objective.num_scores
    found = torch.zeros(shape, dtype=torch.float64, device=batch.labels.device)
    return replace(batch, scored=replace(batch.scored, found=found))


def _with_room(batch: MicroBatch) -> MicroBatch:
    if batch.labels is None:
        return batch
    return replace(batch, token_losses=torch.zeros(len(batch.labels), dtype=torch.float64, device=batch.labels.device))


def _contexts(microbatches: Sequence[MicroBatchPlan]) -> dict[int, Contexts]:
    """Contexts of each sequence that runs in slices: in a valid plan, one that several spans name."""
    stops: dict[int, list[int]] = {}
    for batch in microbatches:
        for span in batch.spans:
            stops.setdefault(span.sequence, []).append(span.stop)
    return {sequence: Contexts(max(found)) for sequence, found in stops.items() if len(found) > 1}


def _build(
    row: _Row, place: StagePlace, load: Load, loss_norm: str, device: torch.device, objective: Objective | None
) -> tuple[MicroBatch, int, int]:
    # Every sequence parallel rank must hold a token: many kernels refuse an empty tensor. A row of T tokens is cut at
    # T * rank // sp, which gives everybody one as soon as T >= sp. With sp = 4 a row of 3 tokens would be cut into
    # 0 1 1 1; one token of padding makes it 1 1 1 1. Tensor parallel ranks that share tokens get equally many. The
    # padding is a sequence of its own, so no other token attends to it, and it has no target, so it adds nothing to
    # loss and gradients.
    lengths, keys = tuple(span.stop - span.start for span in row.spans), row.keys
    padding = place.padding(sum(lengths))
    if padding:
        lengths, keys = (*lengths, padding), (*keys, 0)
    pack = Pack(
        lengths, place.sp_rank, place.stage.sp, place.sp_group, keys, row.chunk, place.overlap, place.near,
        place.frugal(sum(lengths), sliced=row.chunk is not None),
    )  # fmt: skip
    start, stop = pack.local
    positions = readable(torch.from_numpy(position_ids(lengths, start, stop, past=pack.past)), device).unsqueeze(0)
    labels = weights = scored = None
    reads = objective is not None and (place.is_last or objective.routing is not None)
    numbers = np.zeros((pack.num_tokens, objective.layout.num_columns if objective is not None and reads else 0))
    tokens, targets, scale, counted = _fill(row, pack, place, load, loss_norm, numbers)
    input_ids = readable(torch.from_numpy(tokens[start:stop]), device).unsqueeze(0)
    if place.is_last:
        labels = readable(torch.from_numpy(targets[start:stop]), device)
        weights = readable(torch.from_numpy(scale[start:stop]), device)
        if objective is not None:
            scored = Scored(objective, readable(torch.from_numpy(numbers[start:stop]), device))
    routes = (
        None if objective is None else _routes(objective, numbers, pack.num_tokens - padding, (start, stop), device)
    )
    return MicroBatch(pack, positions, input_ids, labels, weights, scored=scored, routes=routes), counted, padding


def _routes(
    objective: Objective, numbers: Float64Array, real: int, held: tuple[int, int], device: torch.device
) -> Routes | None:
    """What the routers of a row are given, of which `real` tokens are no padding and a rank has those of `held`."""
    routing, found = objective.routing, objective.layout.find(ROUTED_EXPERTS)
    if routing is None:
        return None
    given = None
    if found is not None:
        numbers[real:, found[1]] = np.tile(np.arange(routing.chosen), len(routing.paths))  # any, if no two are alike
        own = numbers[slice(*held), found[1]].astype(np.int64)
        given = readable(torch.from_numpy(own.reshape(len(own), len(routing.paths), routing.chosen)), device)
    return Routes(routing, given, wanted=objective.keeps_routes)


def _balance(row: _Row, pack: Pack, load: Load, loss_norm: str, device: torch.device) -> Balance:
    """What the routers must know of the tokens that this rank holds; padding counts nothing."""
    (start, stop), offsets = pack.local, pack.offsets
    weights = np.zeros(len(pack.lengths))
    for index, sequence_id in enumerate(row.ids):
        # With the last slice of a sequence each rank counts what it held of all slices, of this one tokens or none.
        in_slices = index == 0 and pack.chunk is not None
        if in_slices or (offsets[index] < stop and offsets[index + 1] > start):
            _, targets, weight, *_ = load(sequence_id)
            count = int((targets != IGNORED).sum())
            counts = count if loss_norm == "token" else min(1, count)
            weights[index] = weight * counts / pack.whole_lengths[index] ** 2
    sequence = np.repeat(np.arange(len(pack.lengths)), pack.lengths)[start:stop]
    return Balance(readable(torch.from_numpy(sequence), device), readable(torch.from_numpy(weights), device))


def _copy(batch: MicroBatch, device: torch.device) -> MicroBatch:
    def moved(host: Tensor | None) -> Tensor | None:
        return None if host is None else host.to(device, non_blocking=True)

    return replace(
        batch,
        position_ids=batch.position_ids.to(device, non_blocking=True),
        input_ids=moved(batch.input_ids),
        labels=moved(batch.labels),
        weights=moved(batch.weights),
        balance=batch.balance and Balance(*(part.to(device, non_blocking=True) for part in batch.balance)),
        scored=batch.scored and replace(batch.scored, numbers=batch.scored.numbers.to(device, non_blocking=True)),
        routes=batch.routes and replace(batch.routes, given=moved(batch.routes.given)),
    )


def _fill(
    row: _Row, pack: Pack, place: StagePlace, load: Load, loss_norm: str, numbers: Float64Array
) -> tuple[Tokens, Tokens, Float64Array, int]:
    """Tokens, labels and unnormalised loss weights of the whole row, filled in where this rank needs them; so are the
    `numbers` of their fields, (num_tokens, columns)."""
    num_tokens = pack.num_tokens
    start, stop = pack.local
    tokens = np.zeros(num_tokens, dtype=np.int64)
    targets = np.full(num_tokens, IGNORED, dtype=np.int64)
    scale = np.zeros(num_tokens)
    whole = place.is_last and loss_norm != "token"  # needs the targets of all of a sequence
    begin, counted = 0, 0
    for span, sequence_id in zip(row.spans, row.ids, strict=True):
        end = begin + span.stop - span.start
        # Each rank reads from the data only the sequences that it has tokens of. With sp = 2 and the lengths 6 and 2,
        # rank 0 holds the tokens 0..3 and reads the first sequence only, rank 1 reads both.
        if whole or (begin < stop and end > start):
            # Labels are cut after they were made: the target of a slice's last token is the next slice's first.
            all_tokens, all_targets, weight, fields, *_ = load(sequence_id)
            tokens[begin:end] = all_tokens[span.start : span.stop]
            targets[begin:end] = all_targets[span.start : span.stop]
            scale[begin:end] = weight
            if numbers.shape[1] and fields is not None:
                numbers[begin:end] = fields[span.start : span.stop]
            if loss_norm == "sequence":
                count = int((all_targets != IGNORED).sum())
                scale[begin:end] /= max(1, count)
                counted += count > 0 and span.start == 0  # the first slice counts for all
        begin = end
    # Added over all ranks, the counts must be the step's number of targets, sequences or micro-batches. Targets are
    # spread over sequence parallel ranks, so each counts its own; a sequence or a micro-batch is whole on all of them,
    # so the first counts it for all. Tensor parallel ranks hold the same tokens: again the first counts.
    if loss_norm == "token":
        counted = int((targets[start:stop] != IGNORED).sum())
    elif loss_norm == "micro_batch":
        in_row = int((targets != IGNORED).sum())
        scale /= max(1, in_row)
        counted = int(in_row > 0)
    counts = place.is_last and place.tp_rank == 0 and (loss_norm == "token" or place.sp_rank == 0)
    return tokens, targets, scale, counted if counts else 0


_DIGEST_WORDS = 4  # a SHA-256 as int64
# In the place of a rank's weight: it could not load its sequences, or it has not built them yet, as all others.
FAILED, LATER = -1, -2


def row_of(plan: StepPlan, costs: CostTable, weight: int) -> Tensor:
    """What a rank says of a step: (9,) int64, the digests of plan and costs and its weight."""
    # Ranks whose plans differ would wait for messages that nobody sends, until a collective times out after minutes.
    # One row of 72 bytes from each rank finds that before the first byte of a step moves: 4 words of each digest and
    # the weight, which the ranks must add up anyway. Costs count where a schedule's order is made from them.
    weighed = any(weighs(pipeline.schedule) for pipeline in plan.pipelines)
    digests = plan.digest() + (_digest(costs) if weighed else bytes(8 * _DIGEST_WORDS))
    return torch.cat((torch.frombuffer(bytearray(digests), dtype=torch.int64), torch.tensor([weight])))


def row_without_plan() -> Tensor:
    """The row of a rank that could not get its plan."""
    return torch.full((2 * _DIGEST_WORDS + 1,), FAILED)


def agreed(step: int, rows: Tensor) -> int | None:
    """The sum of the weights, of all ranks' rows for the step; None where their batches are not built.

    Raises PlanError naming the ranks whose plan or costs differ from rank 0's. `step` counts from 1.
    """
    for index, what in enumerate(("another plan", "other costs, from which its schedules are made,")):
        words = rows[:, index * _DIGEST_WORDS : (index + 1) * _DIGEST_WORDS]
        differing = (words != words[0]).any(dim=1).nonzero().flatten().tolist()
        if differing:
            error = PlanError(f"step {step}: ranks {differing} hold {what} than rank 0; nothing was computed")
            raise mark_told(error, Told(differing[0], f"PlanError: {error}", here=True))
    weights = rows[:, -1]
    return None if weights[0] == LATER else int(weights.sum())


@lru_cache(maxsize=2)
def _digest(costs: CostTable) -> bytes:
    return hashlib.sha256(repr(costs.costs).encode()).digest()


@dataclass(frozen=True)
class BuiltStep:
    """A planned step on this rank: its micro-batches, phase by phase, and the costs that its schedules follow."""

    plan: StepPlan
    costs: CostTable
    batches: tuple[RankBatches, ...]  # in the host's memory

    @property
    def weight(self) -> int:
        """This rank's share of the step's loss normaliser."""
        return sum(batches.weight for batches in self.batches)


def settled(step: int, rows: Tensor, error: BaseException | None, channel: Channel) -> int | None:
    """What `agreed` makes of all ranks' rows on `step`, counted from 0. Where a rank has failed, all raise."""
    if bool((rows[:, 2 * _DIGEST_WORDS] == FAILED).any()):
        # One message more, but the step is lost anyway: the others read the error of the rank that has one.
        agree(channel, error, f"making step {step + 1} ready")
    return agreed(step + 1, rows)
