"""A small emulated job whose times can be worked out by hand: equal buckets, 1 ms a token, links to be given."""

from __future__ import annotations

from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.emulate.cluster import EmulatedJob
from ds_hydra.pipe.model_plan import ModelPlan, ParamSpec, ShardRule, make_buckets
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.links import LinkModel, Speed

AT_ONCE = Speed(0.0, 1e30)
BUCKET_BYTES = 64 * 64 * 2


def square_model(num_layers: int) -> ModelPlan:
    """An embedding, layers and a head of one weight of 64 x 64 each."""
    names = ["embedding", *(f"layers.{index}.weight" for index in range(num_layers)), "head"]
    specs = {name: ParamSpec(name, (64, 64), ShardRule(dim=0)) for name in names}
    alone = [frozenset((name,)) for name in names]
    return ModelPlan(make_buckets(list(zip(names, alone, strict=True)), specs), alone[0], tuple(alone[1:-1]), alone[-1])


def emulated_job(
    *strategies: str,
    inside: Speed = AT_ONCE,
    between: Speed = AT_ONCE,
    node_size: int = 4,
    hidden: int = 1,
    num_ranks: int = 4,
    tokens: int = 12,
    token_ms: float = 1.0,
) -> EmulatedJob:
    """Four ranks, four sequences of three tokens a step, one in each micro-batch; a token takes 1 ms a stage."""
    schemes = [ParallelScheme.parse(text) for text in ("tp1", "tp2", "sp2", "tp2sp2", "pp2", "tp2pp2", "pp4")]
    table = CostTable(tuple(SchemeCost(scheme, 0.0, token_ms, 0.0, max_length=3) for scheme in schemes))
    cluster = SimulatedJob(square_model(4), hidden, TableFile(table), LinkModel(node_size, inside, between), num_ranks)
    return EmulatedJob(cluster, strategies, (3,) * 8, tokens, choose="cycle")
