"""Hands what stages have found of each token back to the ranks that handed the sequences in.

The way of `delivery`, the other way round, and as there both ends of every message know its size from the plan. Of two
sequences of 5 and 3 tokens packed in one row, under sp2, rank 0 has found what belongs to tokens 0..3 of the first and
rank 1 the rest: token 4 of the first, and the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from ds_hydra.data.tokens import Float64Array
from ds_hydra.pipe.placement import Strategy
from ds_hydra.pipe.rows import split_tokens
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.plan.step_plan import PipelinePlan, StepPlan
from ds_hydra.ranks.channel import Channel
from ds_hydra.step.batching import rows_of


class Piece(NamedTuple):
    """Tokens of the sequence at a position in the plan."""

    sequence: int
    start: int
    stop: int


def pieces_of(
    plan: StepPlan, strategies: Sequence[Strategy], num_ranks: int, *, token_sharding: bool, all_stages: bool = False
) -> list[list[Piece]]:
    """For each rank, of which tokens it has the scores, in the order in which it has them; `strategies` are those of
    the plan's phases. Of a tensor parallel group, whose scores are equal, its first rank has them. `all_stages`: what
    is found is of each stage, and not of the last alone."""
    found: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for phase, strategy in zip(plan.phases, strategies, strict=True):
        for planned, placed in zip(phase.pipelines, strategy.pipelines, strict=True):
            for rank in placed.ranks:
                place = StagePlace.all_of(placed, rank, lambda _: None, token_sharding=token_sharding)[-1]
                if (place.is_last or all_stages) and place.tp_rank == 0:
                    found[rank] += _of_place(planned, place)
    return found


def _of_place(planned: PipelinePlan, place: StagePlace) -> list[Piece]:
    found: list[Piece] = []
    for row in rows_of(planned.microbatches):
        lengths = [span.stop - span.start for span in row]
        total = sum(lengths)
        shares = split_tokens(total + place.padding(total), place.stage.sp)
        first = sum(shares[: place.sp_rank])
        last = first + shares[place.sp_rank]
        for span, (begin, end) in zip(row, pairwise(accumulate(lengths, initial=0)), strict=True):
            start, stop = max(begin, first), min(end, last)
            if start < stop:
                found.append(Piece(span.sequence, span.start + start - begin, span.start + stop - begin))
    return found


def collect(
    plan: StepPlan, pieces: Sequence[Sequence[Piece]], owners: Sequence[int], mine: Float64Array, channel: Channel
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
