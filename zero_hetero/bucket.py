"""Buckets: the parameters that are pulled and pushed together, as one flat tensor. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from ds_hydra.zero_hetero.errors import PlanError


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """A transformer layer, the embeddings or the head: its parameters one after the other, without gaps.

    This is all that masters need to know of a bucket: names and sizes. Shapes, shard rules and what is trained are
    known one folder above, to the `Bucket` of `pipe.model_plan`. Raises PlanError for an empty or repeated parameter.
    """

    name: str
    params: tuple[tuple[str, int], ...]  # (parameter name, elements), in flat order

    def __post_init__(self) -> None:
        names = [name for name, _ in self.params]
        # Counting each name costs the square of their number, so it is done only where some name does occur twice.
        twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
        if twice:
            raise PlanError(f"bucket {self.name!r} lists {sorted(twice)} twice; a parameter belongs to it once")
        for name, numel in self.params:
            if numel < 1:
                raise PlanError(f"bucket {self.name!r}: parameter {name!r} has {numel} elements; leave it out")

    @property
    def numel(self) -> int:
        """Elements of the bucket."""
        return sum(numel for _, numel in self.params)

    @property
    def offsets(self) -> dict[str, int]:
        """Where each parameter begins in the bucket, in elements."""
        ends = accumulate(numel for _, numel in self.params)
        return {name: end - numel for (name, numel), end in zip(self.params, ends, strict=True)}
