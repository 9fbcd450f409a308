"""A small Llama's parameters, and the memory of a job that trains it."""

from __future__ import annotations

from ds_hydra.costs.analytic import estimate_activations
from ds_hydra.costs.memory import JobMemory
from ds_hydra.pipe.model_plan import ModelPlan, ParamSpec, ShardRule, make_buckets

GIB = 2**30


def llama_plan(layers: int = 8, hidden: int = 64, vocab: int = 1000) -> ModelPlan:
    specs = {
        "embed": ParamSpec("embed", (vocab, hidden), ShardRule(0)),
        "head": ParamSpec("head", (vocab, hidden), ShardRule(0)),
    }
    for i in range(layers):
        specs[f"l{i}"] = ParamSpec(f"l{i}", (12 * hidden, hidden), ShardRule(0))
    names = [frozenset({f"l{i}"}) for i in range(layers)]
    groups = [
        ("embeddings", frozenset({"embed"})),
        *((f"layers.{i}", n) for i, n in enumerate(names)),
        ("head", frozenset({"head"})),
    ]
    return ModelPlan(make_buckets(groups, specs), frozenset({"embed"}), tuple(names), frozenset({"head"}), 8, 8, True)


def job(num_ranks: int = 8, device: float = GIB, **changes: object) -> JobMemory:
    figures = {(tp, sp): estimate_activations(64, 256, 8, 8, 2, tp, sp) for tp in (1, 2, 4) for sp in (1, 2, 4)}
    return JobMemory(llama_plan(), num_ranks, figures, 2, device_bytes=device, vocab=1000, **changes)  # type: ignore[arg-type]
