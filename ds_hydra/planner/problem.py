"""One step's sequences and the candidate strategies as arrays for the kernels. Pure: no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ds_hydra.cost_model import CostTable
from ds_hydra.pipe.strategy import ParallelScheme, format_strategy
from ds_hydra.zero_hetero.errors import PlanError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_EXACT_BOUND_ITEMS = 400  # more sequences than this are merged by length in the bound
_MERGE_WIDTH = 1.003  # lengths within this ratio count as the shortest of them, in the bound only


@dataclass(frozen=True)
class SchemeArrays:
    """The constants of every scheme of a cost table, (schemes,) each."""

    c: Floats
    max_length: Ints
    util_length: Ints
    pp: Ints
    num_ranks: Floats

    @classmethod
    def of(cls, table: CostTable) -> SchemeArrays:
        costs = table.costs
        return cls(
            np.array([k.c for k in costs], dtype=np.float64),
            np.array([k.max_length for k in costs], dtype=np.int64),
            np.array([k.util_length for k in costs], dtype=np.int64),
            np.array([k.scheme.pp for k in costs], dtype=np.int64),
            np.array([k.scheme.num_ranks for k in costs], dtype=np.float64),
        )


@dataclass(frozen=True)
class Groups:
    """A strategy as groups of equal pipelines, largest MaxLen first.

    `rank_order[x]` is where pipeline x (group by group) stands among the strategy's pipelines in rank order.
    """

    schemes: tuple[ParallelScheme, ...]  # in rank order
    scheme_of: Ints  # (groups,) row of the cost table
    count: Ints  # (groups,) pipelines
    rank_order: tuple[int, ...] = field(default=())

    @classmethod
    def of(cls, schemes: Sequence[ParallelScheme], table: CostTable) -> Groups:
        row = {scheme: index for index, scheme in enumerate(table.schemes)}
        for scheme in schemes:
            if scheme not in row:
                raise PlanError(f"strategy {format_strategy(schemes)!r}: {_unknown(table, scheme)}")
        counts = Counter(row[scheme] for scheme in schemes)
        order = sorted(counts, key=lambda k: (-table.costs[k].max_length, k))
        rank_order = [p for k in order for p, scheme in enumerate(schemes) if row[scheme] == k]
        return cls(
            tuple(schemes),
            np.array(order, dtype=np.int64),
            np.array([counts[k] for k in order], dtype=np.int64),
            tuple(rank_order),
        )

    @property
    def pipeline_schemes(self) -> Ints:
        """Row of the cost table for each pipeline, group by group."""
        return np.repeat(self.scheme_of, self.count)

    def __str__(self) -> str:
        return format_strategy(self.schemes)


def _unknown(table: CostTable, scheme: ParallelScheme) -> str:
    try:
        table[scheme]
    except PlanError as error:
        return str(error)
    raise AssertionError(f"{scheme} is in the table")


@dataclass(frozen=True)
class Batch:
    """A step's sequences, longest first: position[i] in the step's batch, tokens[i], work[k, i] ms by scheme.

    The merged arrays are for bounds only: runs of nearly equal lengths as `merged_count` copies of the shortest.
    """

    position: Ints
    tokens: Ints
    work: Floats
    merged_tokens: Ints
    merged_count: Ints
    merged_work: Floats
    rates: Floats  # (schemes,) least ms per token

    @property
    def size(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, lengths: Sequence[int], table: CostTable) -> Batch:
        given = np.array(lengths, dtype=np.int64)
        position = np.argsort(-given, kind="stable").astype(np.int64)
        tokens = given[position]
        work = np.stack([cost.sequence_ms(tokens) for cost in table.costs])
        merged_tokens, merged_count, merged_work = tokens, np.ones_like(tokens), work
        if len(tokens) > _EXACT_BOUND_ITEMS:
            last, merged_count = _merge(tokens)
            merged_tokens, merged_work = tokens[last], np.ascontiguousarray(work[:, last])
        rates = (merged_work / merged_tokens).min(axis=1)
        return cls(position, tokens, work, merged_tokens, merged_count, merged_work, rates)


def _merge(tokens: Ints) -> tuple[Ints, Ints]:
    """Runs of lengths within _MERGE_WIDTH of each other: index of each run's shortest, and its size."""
    last: list[int] = []
    count: list[int] = []
    longest = 0.0
    for index, length in enumerate(tokens.tolist()):
        if last and longest <= length * _MERGE_WIDTH:
            last[-1] = index
            count[-1] += 1
        else:
            last.append(index)
            count.append(1)
            longest = length
    return np.array(last, dtype=np.int64), np.array(count, dtype=np.int64)


def check_sequences(sequence_ids: Sequence[int], lengths: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Both as tuples of ints; PlanError for a length that is no whole number of at least 1 token."""
    if len(sequence_ids) != len(lengths):
        raise PlanError(f"{len(sequence_ids)} sequence ids but {len(lengths)} lengths; give one length for each id")
    if not len(lengths):
        raise PlanError("the step has no sequence; check that tokens_per_step is at least one sequence long")
    ids: list[int] = []
    tokens: list[int] = []
    for index, (sequence, length) in enumerate(zip(sequence_ids, lengths, strict=True)):
        if isinstance(length, bool | np.bool_) or not isinstance(length, int | np.integer):
            raise PlanError(
                f"sequence {sequence} (position {index}): its length {length!r} is not a whole number of tokens"
            )
        if length < 1:
            raise PlanError(
                f"sequence {sequence} (position {index}) has length {length}: at least 1 token is needed; "
                "drop empty samples from the data"
            )
        ids.append(int(sequence))
        tokens.append(int(length))
    return tuple(ids), tuple(tokens)
