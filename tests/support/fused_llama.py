"""Sizes in, the model plan of a Llama with fused weights out: parts of one weight are cut one by one."""

from __future__ import annotations

from ds_hydra.pipe.model_plan import ModelPlan, ParamSpec, ShardRule, make_buckets


def llama_plan(num_layers: int, hidden: int = 512, vocab: int = 8192) -> ModelPlan:
    """Shapes and shard rules of a Llama."""
    ffn = hidden * 11 // 4
    column, row, whole = ShardRule(dim=0), ShardRule(dim=1), ShardRule()
    specs = [ParamSpec("embed.weight", (vocab, hidden), column)]
    for layer in range(num_layers):
        shapes = {"qkv": (3 * hidden, hidden), "gate_up": (2 * ffn, hidden)}
        specs += [
            ParamSpec(f"{layer}.norm1", (hidden,), whole),
            ParamSpec(f"{layer}.qkv", shapes["qkv"], ShardRule(dim=0, parts=3)),
            ParamSpec(f"{layer}.o", (hidden, hidden), row),
            ParamSpec(f"{layer}.norm2", (hidden,), whole),
            ParamSpec(f"{layer}.gate_up", shapes["gate_up"], ShardRule(dim=0, parts=2)),
            ParamSpec(f"{layer}.down", (hidden, ffn), row),
        ]
    specs += [ParamSpec("norm", (hidden,), whole), ParamSpec("head.weight", (vocab, hidden), column)]
    by_name = {spec.name: spec for spec in specs}
    layers = tuple(frozenset(n for n in by_name if n.startswith(f"{layer}.")) for layer in range(num_layers))
    first, last = frozenset({"embed.weight"}), frozenset({"norm", "head.weight"})
    groups = [("embed", first), *((f"layer.{i}", names) for i, names in enumerate(layers)), ("head", last)]
    return ModelPlan(make_buckets(groups, by_name), first, layers, last)
