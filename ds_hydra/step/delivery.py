"""Moves a plan's sequences to the ranks that run them, and the scores of their tokens back to the ranks that have them.

A plan says which pipeline runs which sequence, and all ranks know all lengths: so both ends of every message know its
size, and nothing is asked. Three sequences of 5, 9 and 4 tokens that rank 0 handed in, for `tp2 + tp1`, the second on
the pipeline of ranks 0 and 1: rank 0 keeps it and sends rank 1 a parcel of 1 + 2 * 9 numbers (its weight, its token
ids, its labels), and rank 2 one of (1 + 2 * 5) + (1 + 2 * 4).

Scores take the same way back, and both ends of every message know its size from the plan, too. Of two sequences of 5
and 3 tokens packed in one row, under sp2, rank 0 has found what belongs to tokens 0..3 of the first and rank 1 the
rest: token 4 of the first, and the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_hydra.data.tokens import Float64Array, TokenSequence
from ds_hydra.pipe.placement import Strategy
from ds_hydra.pipe.rows import split_tokens
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.plan.step_plan import PipelinePlan, StepPlan
from ds_hydra.ranks.channel import Channel
from ds_hydra.step.batching import rows_of


@dataclass(frozen=True)
class Delivered:
    """The sequences of a step that this rank runs, by their ids."""

    sequences: Mapping[int, TokenSequence]

    def load_sequence(self, sequence_id: int) -> TokenSequence:
        """The sequence of that id."""
        return self.sequences[sequence_id]

    def weighed(self, weights: Mapping[int, float]) -> Delivered:
        """The same sequences with other weights, by their ids."""
        return Delivered({number: one._replace(weight=weights[number]) for number, one in self.sequences.items()})


def runners(plan: StepPlan, strategies: Sequence[Strategy]) -> list[set[int]]:
    """For each sequence of the plan, the ranks of the pipelines that run it; `strategies` are those of its phases."""
    found: list[set[int]] = [set() for _ in plan.lengths]
    for phase, strategy in zip(plan.phases, strategies, strict=True):
        for planned, placed in zip(phase.pipelines, strategy.pipelines, strict=True):
            for batch in planned.microbatches:
                for span in batch.spans:
                    found[span.sequence].update(placed.ranks)
    return found


def deliver(
    plan: StepPlan,
    strategies: Sequence[Strategy],
    owners: Sequence[int],
    mine: Mapping[int, TokenSequence],
    channel: Channel,
    columns: int = 0,
) -> Delivered:
    """Hand every sequence of a plan to the ranks that run it; every rank must call it, with the same plan.

    `owners` are the ranks that hold the sequences, by position in the plan; `mine` are this rank's, by position. Their
    fields have so many `columns`.
    """
    rank = channel.rank
    outgoing: dict[int, list[int]] = {}  # receiver -> positions
    incoming: dict[int, list[int]] = {}  # sender -> positions
    held: dict[int, TokenSequence] = {}
    for position, (owner, ranks) in enumerate(zip(owners, runners(plan, strategies), strict=True)):
        if owner == rank:
            for receiver in ranks - {rank}:
                outgoing.setdefault(receiver, []).append(position)
            if rank in ranks:
                held[position] = mine[position]
        elif rank in ranks:
            incoming.setdefault(owner, []).append(position)
    parcels = {receiver: _pack([mine[position] for position in of]) for receiver, of in outgoing.items()}
    of_token = 2 + columns
    sizes = {sender: sum(1 + of_token * plan.lengths[at] for at in positions) for sender, positions in incoming.items()}
    for sender, parcel in channel.exchange(parcels, sizes).items():
        positions = incoming[sender]
        found = _unpack(parcel, [plan.lengths[position] for position in positions], columns)
        held.update(zip(positions, found, strict=True))
    return Delivered({plan.sequence_ids[position]: sequence for position, sequence in held.items()})


def _pack(sequences: Sequence[TokenSequence]) -> Tensor:
    """The numbers of all these sequences, one after the other; FP64 numbers, of weights and fields, travel as bits."""
    parts = [
        part
        for input_ids, labels, weight, fields, *_ in sequences
        for part in (
            np.array([weight], dtype=np.float64).view(np.int64),
            input_ids,
            labels,
            np.zeros(0, dtype=np.int64) if fields is None else np.ascontiguousarray(fields).ravel().view(np.int64),
        )
    ]
    return torch.from_numpy(np.concatenate(parts))


def _unpack(parcel: Tensor, lengths: Sequence[int], columns: int) -> list[TokenSequence]:
    """Inverse of `_pack` for sequences of these lengths, whose fields have so many columns."""
    numbers, begin, found = parcel.numpy(), 0, []
    for length in lengths:
        ids, labels = begin + 1, begin + 1 + length
        weight = float(numbers[begin : begin + 1].view(np.float64)[0])
        behind = labels + length
        begin = behind + length * columns
        fields = numbers[behind:begin].view(np.float64).reshape(length, columns) if columns else None
        found.append(TokenSequence(numbers[ids:labels], numbers[labels:behind], weight, fields))
    return found


class TokenPiece(NamedTuple):
    """Tokens of the sequence at a position in the plan."""

    sequence: int
    start: int
    stop: int


def pieces_of(
    plan: StepPlan, strategies: Sequence[Strategy], num_ranks: int, *, token_sharding: bool, all_stages: bool = False
) -> list[list[TokenPiece]]:
    """For each rank, of which tokens it has the scores, in the order in which it has them; `strategies` are those of
    the plan's phases. Of a tensor parallel group, whose scores are equal, its first rank has them. `all_stages`: what
    is found is of each stage, and not of the last alone."""
    found: list[list[TokenPiece]] = [[] for _ in range(num_ranks)]
    for phase, strategy in zip(plan.phases, strategies, strict=True):
        for planned, placed in zip(phase.pipelines, strategy.pipelines, strict=True):
            for rank in placed.ranks:
                place = StagePlace.all_of(placed, rank, lambda _: None, token_sharding=token_sharding)[-1]
                if (place.is_last or all_stages) and place.tp_rank == 0:
                    found[rank] += _of_place(planned, place)
    return found


def _of_place(planned: PipelinePlan, place: StagePlace) -> list[TokenPiece]:
    found: list[TokenPiece] = []
    for row in rows_of(planned.microbatches):
        lengths = [span.stop - span.start for span in row]
        total = sum(lengths)
        shares = split_tokens(total + place.padding(total), place.stage.sp)
        first = sum(shares[: place.sp_rank])
        last = first + shares[place.sp_rank]
        for span, (begin, end) in zip(row, pairwise(accumulate(lengths, initial=0)), strict=True):
            start, stop = max(begin, first), min(end, last)
            if start < stop:
                found.append(TokenPiece(span.sequence, span.start + start - begin, span.start + stop - begin))
    return found


def collect(
    plan: StepPlan, pieces: Sequence[Sequence[TokenPiece]], owners: Sequence[int], mine: Float64Array, channel: Channel
) -> dict[int, Float64Array]:
    """The sum of what all ranks have found of this rank's sequences, (tokens, width) each, by position in the plan.

    `mine` (tokens, width) is what this rank has found, in the order of its `pieces`; `owners` as in `deliver`. Every
    rank must call it.
    """
    rank, width = channel.rank, mine.shape[1]
    found = {at: np.zeros((plan.lengths[at], width)) for at, owner in enumerate(owners) if owner == rank}
    parcels: dict[int, list[Float64Array]] = {}
    begin = 0
    for piece in pieces[rank]:
        part = mine[begin : (begin := begin + piece.stop - piece.start)]
        if owners[piece.sequence] == rank:
            found[piece.sequence][piece.start : piece.stop] += part
        else:
            parcels.setdefault(owners[piece.sequence], []).append(part)
    coming = {
        sender: [piece for piece in of_sender if owners[piece.sequence] == rank]
        for sender, of_sender in enumerate(pieces)
        if sender != rank
    }
    sizes = {sender: width * sum(one.stop - one.start for one in of) for sender, of in coming.items() if of}
    packed = {to: torch.from_numpy(np.concatenate(parts).ravel().view(np.int64)) for to, parts in parcels.items()}
    for sender, parcel in channel.exchange(packed, sizes).items():
        numbers, begin = parcel.numpy().view(np.float64).reshape(-1, width), 0
        for piece in coming[sender]:
            found[piece.sequence][piece.start : piece.stop] += numbers[
                begin : (begin := begin + piece.stop - piece.start)
            ]
    return found
