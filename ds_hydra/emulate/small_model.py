"""A model's plan in; a small one of the same structure, and the bytes that its elements stand for, out. Pure: no torch.

[Note: small models]
The small plan has the buckets, parameters and shard rules of the true one, and so the same messages between the same
ranks under any strategy. Every parameter is shrunk by one factor, so that messages keep their proportions: a bucket of
two weights of 4096 x 4096 and a norm of 4096 becomes, with the factor 4096, weights of 4096 elements and a norm of 1.
A parameter that is cut keeps as many rows as its cuts need. What an element of a bucket stands for is then the true
bucket's bytes divided by the small one's elements: so a bucket has its true size, whatever rounding did to its parts.
Hidden states are small too: one feature for each token, which stands for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from ds_hydra.pipe.model_plan import Bucket, ModelPlan, ParamSpec
from ds_hydra.simulate.transfers import SUM_BYTES

ELEMENTS = 1 << 14  # of the largest bucket, about
ROWS = 48  # of a cut parameter without units: divisible by all usual degrees


@dataclass(frozen=True)
class SmallModel:
    """A small plan and what it stands for."""

    plan: ModelPlan
    pulled_bytes: tuple[float, ...]  # by bucket: bytes on the wire that one of its elements stands for in a pull
    pushed_bytes: tuple[float, ...]  # the same in a push, by bucket that has gradients
    summed_bytes: tuple[float, ...]  # the same, of twins' sums on their way to the masters
    feature_bytes: float  # bytes on the wire of one token's hidden state


def small_model(plan: ModelPlan, hidden: int, element_bytes: int, gradient_bytes: int | None = None) -> SmallModel:
    """The small model of a true plan with `hidden` features.

    On the wire parameters and hidden states have `element_bytes`, gradients `gradient_bytes` (None: as many). Names
    have "/" in the place of ".", so that a module can have parameters of these names.
    """
    factor = max(1, ceil(max(bucket.numel for bucket in plan.buckets) / ELEMENTS))
    buckets = tuple(
        Bucket(bucket.name, tuple(_small(param, factor) for param in bucket.params), bucket.trainable)
        for bucket in plan.buckets
    )
    small = replace(
        plan,
        buckets=buckets,
        first=_renamed(plan.first),
        layers=tuple(_renamed(names) for names in plan.layers),
        last=_renamed(plan.last),
        alignment=1,  # gaps would be as large as norms
        no_token_sharding="the layers of an emulated stage hand all tokens on",
    )
    elements = [true.numel / few.numel for true, few in zip(plan.buckets, buckets, strict=True)]
    trained = [count for count, bucket in zip(elements, buckets, strict=True) if bucket.trainable]
    return SmallModel(
        small,
        tuple(count * element_bytes for count in elements),
        tuple(count * (gradient_bytes or element_bytes) for count in trained),
        tuple(count * SUM_BYTES for count in trained),
        float(hidden * element_bytes),
    )


def _small(param: ParamSpec, factor: int) -> ParamSpec:
    """The parameter with about 1/factor of its elements, the cut dimension first as in flat order."""
    rule, wanted, name = param.rule, param.numel / factor, _small_name(param.name)
    if rule.dim is None:
        return replace(param, name=name, shape=(max(1, round(wanted)),))
    blocks = tuple((units, units) for _, units in rule.blocks)
    rows = sum(units for _, units in blocks)
    rows = rows or rule.parts * (rule.units or min(ROWS, param.shape[rule.dim] // rule.parts))
    rule = replace(rule, dim=0, blocks=blocks)
    return replace(param, name=name, shape=(rows, max(1, round(wanted / rows))), rule=rule)


def _renamed(names: frozenset[str]) -> frozenset[str]:
    return frozenset(map(_small_name, names))


def _small_name(name: str) -> str:
    return name.replace(".", "/")
