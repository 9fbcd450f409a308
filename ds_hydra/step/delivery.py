"""Sends each sequence of a plan from the rank that was given it to the ranks that run it.

A plan says which pipeline runs which sequence, and all ranks know all lengths: so both ends of every message know its
size, and nothing is asked. Three sequences of 5, 9 and 4 tokens that rank 0 handed in, for `tp2 + tp1`, the second on
the pipeline of ranks 0 and 1: rank 0 keeps it and sends rank 1 a parcel of 1 + 2 * 9 numbers (its weight, its token
ids, its labels), and rank 2 one of (1 + 2 * 5) + (1 + 2 * 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ds_hydra.data.tokens import TokenSequence
from ds_hydra.pipe.placement import Strategy
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.ranks.channel import Channel


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
        for input_ids, labels, weight, fields in sequences
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
