"""Sizes of a Llama-like model in, its model plan out, as far as a simulation needs one; those that are shipped. Pure.

For tables that come without a model: what `pipe.models` reads off a real one, written down from sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ds_hydra.costs.activations import Activations
from ds_hydra.costs.analytic import ModelShape
from ds_hydra.costs.memory import JobMemory
from ds_hydra.costs.table_file import TableFile
from ds_hydra.pipe.model_plan import Bucket, ModelPlan, ParamSpec, ShardRule
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.simulate.job import NO_LIMIT, SimulatedJob
from ds_hydra.simulate.links import LinkModel
from ds_hydra.zero_hetero.nodes import node_size_of


class ShippedModel(NamedTuple):
    """The model of a published cost table.

    `activations`: bytes that all ranks of a stage keep together, by TP, per token, hidden unit and layer, as Hydraulis
    published them with the tables.
    """

    shape: ModelShape
    activations: Mapping[int, float]


SHIPPED = {  # by the names of `commands.shipped`
    "a800-7b": ShippedModel(
        ModelShape(4096, 32, 32, 32, 11008, 30592, 6_726_881_280), {1: 38, 2: 39, 4: 42, 8: 48, 16: 61}
    ),
    "a800-32b": ShippedModel(
        ModelShape(6656, 60, 52, 52, 17920, 30592, 32_510_200_320), {1: 36, 2: 36, 4: 37, 8: 42, 16: 50}
    ),
}


def shipped_cluster(
    name: str, found: TableFile, links: LinkModel, num_ranks: int, *, wire_bytes: int | None = None
) -> SimulatedJob:
    """Training the model of a shipped table in BF16 on so many ranks, without a memory model."""
    shape = SHIPPED[name].shape
    return SimulatedJob(llama_plan(shape), shape.hidden, found, links, num_ranks, gradient_bytes=wire_bytes)


def shipped_job(
    name: str,
    found: TableFile,
    links: LinkModel,
    num_ranks: int,
    strategies: Sequence[StrategyShape],
    *,
    grad_bytes: int | None = None,
    wire_bytes: int | None = None,
) -> SimulatedJob:
    """Training the model of a shipped table in BF16, with costs of these strategies. PlanError if there are none.

    `grad_bytes` has an element of a gradient where it adds up (None: 4), `wire_bytes` on its way (None: 2).
    """
    shape, kept = SHIPPED[name]
    job = shipped_cluster(name, found, links, num_ranks, wire_bytes=wire_bytes)
    plan = job.plan
    stages = {(s.tp, s.sp) for strategy in strategies for pipeline in strategy.pipelines for s in pipeline.stages}
    activations = {
        (tp, sp): Activations(_published(kept, tp) * shape.hidden / (tp * sp), 0.0, 0.0) for tp, sp in stages
    }
    memory = JobMemory(
        plan, job.num_ranks, activations, param_bytes=2, device_bytes=NO_LIMIT, vocab=shape.vocab,
        grad_bytes=grad_bytes, wire_bytes=wire_bytes, node_size=node_size_of(num_ranks, links.node_size),
    )  # fmt: skip
    return replace(job, memory=memory).with_costs_of(strategies)


def _published(kept: Mapping[int, float], tp: int) -> float:
    """The figure of this TP degree, or of the next one below it."""
    return kept[max(known for known in kept if known <= tp)]


def llama_plan(shape: ModelShape) -> ModelPlan:
    """Buckets of the embeddings, of each layer and of the head.

    Weights of heads may be cut anywhere: published tables have schemes, such as TP 8 of 52 heads, that no real run has.
    """
    hidden, inner, queries = shape.hidden, shape.intermediate, shape.width or shape.hidden
    keys = shape.kv_heads * queries // shape.heads

    def layer(index: int) -> tuple[ParamSpec, ...]:
        of = f"layers.{index}."
        return (
            ParamSpec(f"{of}q", (queries, hidden), ShardRule(0)),
            ParamSpec(f"{of}k", (keys, hidden), ShardRule(0)),
            ParamSpec(f"{of}v", (keys, hidden), ShardRule(0)),
            ParamSpec(f"{of}o", (hidden, queries), ShardRule(1)),
            ParamSpec(f"{of}gate", (inner, hidden), ShardRule(0)),
            ParamSpec(f"{of}up", (inner, hidden), ShardRule(0)),
            ParamSpec(f"{of}down", (hidden, inner), ShardRule(1)),
            ParamSpec(f"{of}input_norm", (hidden,)),
            ParamSpec(f"{of}output_norm", (hidden,)),
        )

    layers = [layer(index) for index in range(shape.layers)]
    embed = ParamSpec("embed", (shape.vocab, hidden), ShardRule(0))
    head = (ParamSpec("norm", (hidden,)), ParamSpec("head", (shape.vocab, hidden), ShardRule(0)))
    return ModelPlan(
        (Bucket("embed", (embed,)), *(Bucket(f"layer {i}", of) for i, of in enumerate(layers)), Bucket("head", head)),
        frozenset({"embed"}),
        tuple(frozenset(param.name for param in of) for of in layers),
        frozenset(param.name for param in head),
    )
