"""Hybrids and mixtures of experts of published sizes, estimated, counted and simulated.

  python -m tools.bench_hybrids [--quick] [--json FILE] [--only PART ...]

sizes    Qwen3-Next and Qwen3.5 on 64 GPUs by memory model and simulator: the longest sequence and a step's time, in
         slices and without, beside the same model whose every layer attends and dense ones. Nothing is run: costs
         follow from FLOPs, activations are estimated, steps are simulated with all their messages
experts  Qwen3-30B-A3B on eight ranks, experts cut by width and spread as whole ones: what a rank holds of a layer,
         intervals of its pull, bytes of its collectives, what it keeps, CPU time of a layer; counted and run, FP32

Exits non-zero if an aim is missed.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_hydra.commands.figures import guarded, run_parts
from ds_hydra.costs.analytic import ModelShape, analytic_cost_table, assumed_device, model_shape
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.memory import JobMemory
from ds_hydra.costs.shares import Terms
from ds_hydra.data.lengths import read_lengths, sample_batches
from ds_hydra.engine.costs import job_memory, within_memory, without_the_largest
from ds_hydra.pipe.model_plan import end_of_slots
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.experts import spreading_experts
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.plan.layouts import feasible_schemes
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.cutting import longest_of
from ds_hydra.planner.propose import ProposalEffort, Wider, propose_strategies, wider_shapes
from ds_hydra.profiling.stage_memory import kept_bytes
from ds_hydra.profiling.stage_timer import StageTimer, hollow_model, hollow_source
from ds_hydra.rivals.preview import Messages
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.links import LinkModel
from ds_hydra.zero_hetero.clock import HostClock
from tools import aims
from tools.systems.cells import MIXES

GPUS, NODE, DEVICE, GIB = 64, 8, "H100", 80
DEEPEST, UNLIMITED, FEW, COUNT, STEPS = 16, 1 << 24, 3, 4, 2
EFFORT = ProposalEffort(batches=4, milp_batches=2, node_limit=20, rounds=1, moves=30, corrections=1)


_SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "vocab_size": 96,
}  # fmt: skip


class Sizes(NamedTuple):
    """A config: of which model, and what it has beside the defaults of transformers."""

    architecture: str
    model_type: str
    settings: dict[str, Any]

    def fitted(self, key: str, params: int) -> Sizes:
        """With a width of its MLPs by which it has so many parameters, about."""
        config = AutoConfig.for_model(self.model_type, **self.settings)
        with torch.device("meta"):
            own = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        more = (params - own) / (3 * config.hidden_size * config.num_hidden_layers)
        return self._replace(settings=self.settings | {key: 64 * round((getattr(config, key) + more) / 64)})

    def written(self, path: Path) -> Path:
        """The config as a file."""
        path.write_text(json.dumps({
            "architectures": [self.architecture], "model_type": self.model_type, **self.settings
        }))  # fmt: skip
        return path

    @property
    def small(self) -> Sizes:
        """In small widths."""
        return self._replace(settings=self.settings | _SMALL)


class Mix(NamedTuple):
    """Lengths of sequences, and tokens of a step."""

    name: str
    context: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.context // 1024}K"

    @property
    def lengths(self) -> list[int]:
        return [int(n) for n in read_lengths(MIXES[self.name], self.context, 60_000, 1).lengths]


STEPS_OF = (Mix("pretraining", 32_768, 400_000), Mix("long", 131_072, 800_000))
HYBRIDS = {
    # As published at huggingface.co/Qwen/Qwen3.5-27B. The others are the defaults of transformers.
    "Qwen3.5-27B": Sizes("Qwen3_5ForCausalLM", "qwen3_5_text", {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "linear_num_value_heads": 48, "vocab_size": 248_320}),
    "Qwen3-Next-80B-A3B": Sizes("Qwen3NextForCausalLM", "qwen3_next", {}),
    "Qwen3.5-35B-A3B": Sizes("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", {}),
}  # fmt: skip
QUICK = {"Qwen3.5-9B": Sizes("Qwen3_5ForCausalLM", "qwen3_5_text", {})}
_DENSE = {
    "Qwen3.5-35B-A3B": {"hidden_size": 5120, "num_hidden_layers": 64},
    "Qwen3-Next-80B-A3B": {"hidden_size": 8192, "num_hidden_layers": 80},
}


def peers(name: str, own: Sizes, hybrid: Counted) -> dict[str, Sizes]:
    """What stands beside a hybrid, of as many parameters: the same whose every layer attends; where it is a mixture of
    experts also a dense decoder, wider and deeper."""
    shape = hybrid.shape
    attends = own._replace(settings=own.settings | {"layer_types": ["full_attention"] * shape.layers})
    if not hybrid.source.plan.experts:
        return {"every layer attends": attends.fitted("intermediate_size", shape.params)}
    dense = _DENSE[name] | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    return {
        "every layer attends": attends.fitted("shared_expert_intermediate_size", shape.params),
        "dense": Sizes("Qwen3ForCausalLM", "qwen3", dense | {"vocab_size": shape.vocab}).fitted(
            "intermediate_size", shape.params
        ),
    }


def _row(name: str, model: Counted, mixes: tuple[Mix, ...]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": name, "parameters, 1e9": model.shape.params / 1e9, "active, 1e9": model.shape.active / 1e9,
    }  # fmt: skip
    for key, (tokens, scheme) in model.longest().items():
        row |= {key: tokens, f"{key} by": scheme}
    for mix in mixes:
        # Where all layers are to be computed again, they are in every step.
        row[f"{mix} whole, s"] = min(model.step_s(mix, key) for key in ("whole", "again"))
        row[f"{mix} cut, s"] = model.step_s(mix, "cut")
    return row


def _missed(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Aims of a hybrid, the first row, and of what stands beside it, the second with attention in every layer."""
    hybrid, attends = rows[:2]
    if (ratio := hybrid["cut"] / max(hybrid["whole"], hybrid["again"])) < aims.CUT_OVER_WHOLE:
        yield f"{hybrid['model']}: in slices {ratio:.1f} times the longest whole one, not >= {aims.CUT_OVER_WHOLE}"
    if (ratio := hybrid["cut"] / attends["cut"]) < aims.HYBRID_LONGEST:
        yield f"{hybrid['model']}: {ratio:.2f} of the longest with attention only, not >= {aims.HYBRID_LONGEST}"
    for mix in STEPS_OF:
        whole, cut = (hybrid.get(f"{mix} {way}, s", 1.0) for way in ("whole", "cut"))
        if cut > aims.CUT_STEP * whole:
            yield f"{hybrid['model']}: steps of {mix} take {cut / whole:.3f} of those without, not <= {aims.CUT_STEP}"


def sizes(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each model: hybrids, and what stands beside them."""
    rows: list[dict[str, Any]] = []
    for name, own in (QUICK if quick else HYBRIDS).items():
        first = Counted.of(source_of(own), quick=quick)
        models = {name: first} | {
            text: Counted.of(source_of(peer), quick=quick) for text, peer in peers(name, own, first).items()
        }
        of_it = []
        for text, model in models.items():
            of_it.append(_row(text, model, () if quick else STEPS_OF))
            print(of_it[-1], file=sys.stderr, flush=True)
        missed += _missed(of_it)
        rows += of_it
    return rows


def source_of(sizes: Sizes) -> CausalLM:
    """The model without values; where it has experts, they are spread as whole ones. What is found by running layers is
    found in small widths with as many heads, and what a slice of it carries is as many times as wide in the model."""
    with tempfile.TemporaryDirectory() as folder:
        files = [one.written(Path(folder, name)) for one, name in ((sizes.small, "small.json"), (sizes, "config.json"))]
        small, model = hollow_source(files[0]), hollow_model(files[1])
    facts, width = small.facts, model.config.hidden_size
    doors = (replace(door, shape=tuple(width if n == _SMALL["hidden_size"] else n for n in door.shape))
             for door in facts.flow.doors)  # fmt: skip
    if facts.boxes:
        found, own = ({box.carries for of in facts.boxes.of for box in of}), carried(model.config)
        assert found == {carried(small.text_config)}, "in small widths what is counted was seen"
        boxes = tuple(tuple(replace(box, carries=own) for box in of) for of in facts.boxes.of)
        facts = replace(facts, boxes=replace(facts.boxes, of=boxes))
    flow = replace(facts.flow, doors=tuple(doors), vocabulary=model.config.vocab_size)
    source = CausalLM(model, facts=replace(facts, flow=flow))
    spread = spreading_experts(source)
    return spread if spread.plan.experts else source


def carried(config: Any) -> int:
    """Bytes of what a gated delta rule carries: states in FP32, and inputs of its convolution in the config's type."""
    keys, values = (
        (getattr(config, f"linear_num_{one}_heads"), getattr(config, f"linear_{one}_head_dim"))
        for one in ("key", "value")
    )
    channels = 2 * math.prod(keys) + math.prod(values)
    return 4 * math.prod(values) * keys[1] + 4 * (config.linear_conv_kernel_dim - 1) * channels


@dataclass
class Counted:
    """A model on the GPUs: what its schemes take, and what memory they have."""

    source: CausalLM
    shape: ModelShape
    schemes: tuple[ParallelScheme, ...]
    memories: dict[str, JobMemory]  # for whole sequences, the same with all layers computed again, and in slices

    @classmethod
    def of(cls, source: CausalLM, *, quick: bool) -> Counted:
        """`quick`: pipelines over all GPUs only."""
        spread = bool(source.plan.experts)
        schemes = tuple(
            scheme
            for scheme in feasible_schemes(source.plan, GPUS, NODE)
            if scheme.num_ranks.bit_count() == 1
            and scheme.pp <= DEEPEST
            and (scheme.num_ranks == GPUS or not quick)
            and scheme.ep == (scheme.tp * scheme.sp if spread else 1)
        )
        again = copy.copy(source)
        again.options = replace(source.options, activation_checkpointing=True)
        whole, less = (
            job_memory(one, schemes, GPUS, GIB * 2**30, torch.bfloat16, node_size=NODE) for one in (source, again)
        )
        # What ranks hold of a model's parameters is the same, and takes the longest to count.
        memories = {
            "whole": whole, "again": replace(whole, activations=less.activations, _cache={}),
            "cut": replace(whole, slices=True, _cache={}),
        }  # fmt: skip
        shape = model_shape(source.plan, source.width(1), source.vocab_size, source.text_config)
        return cls(source, shape, schemes, memories)

    @property
    def layers(self) -> int:
        return self.source.plan.num_layers

    @cached_property
    def tables(self) -> dict[str, CostTable]:
        return {key: self._table(key) for key in self.memories}

    def _table(self, key: str) -> CostTable:
        """Times by FLOPs with shares of memory as they are estimated; MaxLen within the memory."""
        device, memory = assumed_device(DEVICE), self.memories[key]
        table = analytic_cost_table(
            self.shape, self.schemes, UNLIMITED, device_flops=device.flops, link_bytes_per_second=device.inside,
            between_bytes_per_second=device.between, node_size=NODE,
        )  # fmt: skip
        costs = []
        for cost in table.costs:
            kept, usual = memory.activations[cost.uniform.tp, cost.uniform.sp], table.shares(cost.scheme)
            more = usual.forward if key == "again" else Terms(0.0, 0.0, 0.0)
            costs.append(replace(
                cost, a=(1.0 + more.a) * cost.a, b=(1.0 + more.b) * cost.b, c=(1.0 + more.c) * cost.c,
                shares=kept.shares(usual.forward, usual.weight),
            ))  # fmt: skip
        return within_memory(CostTable(tuple(costs), table.source), memory)

    def limit(self, cost: SchemeCost, key: str) -> int:
        """Tokens of the longest sequence that a pipeline of a scheme runs."""
        assert cost.shares is not None, "the table has them"
        return longest_of(cost, cost.shares, slices=key == "cut", layers=self.layers // cost.scheme.pp)

    def longest(self) -> dict[str, tuple[int, str]]:
        """Tokens of the longest sequence by each way, and by which scheme."""
        return {
            key: max((self.limit(cost, key), str(cost.scheme)) for cost in table.costs)
            for key, table in self.tables.items()
        }

    def few(self, key: str, context: int) -> CostTable:
        """The schemes that take the least time of all GPUs for a short sequence, a longer one and the longest."""
        kept = set()
        for length in (2048, 16_384, context):
            holding = [cost for cost in self.tables[key].costs if self.limit(cost, key) >= length]
            holding.sort(key=lambda cost: cost.load_ms([length]) * cost.scheme.num_ranks)
            kept |= {cost.scheme for cost in holding[:FEW]}
        table = self.tables[key]
        return replace(table, costs=tuple(cost for cost in table.costs if cost.scheme in kept))

    def step_s(self, mix: Mix, key: str) -> float:
        """Of the mean step of a mix, simulated, by the strategies that are proposed for it; infinite where nothing
        holds it."""
        if self.longest()[key][0] < mix.context:
            return math.inf
        table, lengths = self.few(key, mix.context), mix.lengths
        wider = Wider(wider_shapes(table, num_layers=self.layers) if key == "cut" else (), layers=self.layers)
        proposed = propose_strategies(table, GPUS, lengths, mix.tokens, mix.context, node_size=NODE, count=COUNT,
                                      effort=EFFORT, wider=wider)  # fmt: skip
        placed = {one: place_strategy(one, GPUS, self.layers) for one in proposed}
        together = without_the_largest(self.memories[key].together(placed), table, mix.context)
        strategies, table = list(together.strategies), within_memory(table, together)
        cluster = SimulatedJob(self.source.plan, self.shape.hidden, TableFile(table), LinkModel(NODE), GPUS)
        messages = Messages(cluster, mix.tokens)
        planner = Planner(
            table, strategies, PlannerOptions(layers=self.layers),
            exposed_ms=[messages.exposed_ms(one) for one in strategies], step_ms=lambda plan: messages.ms(plan, table),
        )  # fmt: skip
        batches = sample_batches(lengths, mix.tokens, STEPS, 1, mix.context)
        plans = [planner.plan(step, range(len(batch)), batch.tolist()) for step, batch in enumerate(batches)]
        return fmean(messages.ms(plan, table) for plan in plans) / 1e3


# The sizes of its published config, in three layers: one is measured, between a first stage and a last one.
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "vocab_size": 151936, "num_hidden_layers": 3, "tie_word_embeddings": False,
}  # fmt: skip
BY_WIDTH, WHOLE = ("tp8", "tp2sp4", "sp8"), ("tp8ep8", "tp2sp4ep8", "sp8ep8")
TOKENS, QUICK_TOKENS = 256, 64  # of a micro-batch


def experts(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each scheme."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(CONFIG | {"architectures": ["Qwen3MoeForCausalLM"]}))
        for texts in (BY_WIDTH, WHOLE):
            shapes = [StrategyShape.parse(text) for text in (texts[:1] if quick else texts)]
            source = hollow_source(path, StageOptions(token_sharding=True), shapes)
            rows += [_experts_row(source, shape, QUICK_TOKENS if quick else TOKENS) for shape in shapes]
    by_scheme = {row["scheme"]: row for row in rows}
    for row in rows:
        if row["scheme"] in WHOLE and (row["experts"], row["width"]) != (16, 768):
            missed.append(f"{row['scheme']} leaves {row['experts']} experts of width {row['width']}")
    if by_scheme["tp8"]["layer MiB"] != by_scheme["tp8ep8"]["layer MiB"]:
        missed.append("whole experts take another room than as many slivers")
    return rows


def _experts_row(source: CausalLM, shape: StrategyShape, tokens: int) -> dict[str, Any]:
    (pipeline,) = shape.pipelines
    assert pipeline.scheme is not None, "it is uniform"
    tp, sp, ep = pipeline.scheme.tp, pipeline.scheme.sp, pipeline.scheme.ep
    plan, strategy = source.plan, place_strategy(shape, 8, source.plan.num_layers)
    bucket = next(bucket for bucket in plan.buckets if bucket.name == "layers.1")
    slots = plan.slots(bucket, strategy.stage_of(0), 0)
    held = next(slot for slot in slots if slot.param.name.endswith("experts.down_proj")).shape
    timer = StageTimer(
        source, ParallelScheme(tp, 3, sp, ep), 1, torch.device("cpu"), torch.float32, clock=HostClock(time.process_time)
    )
    timings = [timer.time((tokens,)) for _ in range(2)]
    moved = sum(counted.call.num_bytes for counted in timings[0].calls)
    return {
        "scheme": str(PipelineShape.of(pipeline.scheme)),
        "experts": held[0],
        "width": held[2],
        "layer MiB": round(2 * end_of_slots(slots) / 2**20),  # of 16 bit parameters
        "intervals": len(plan.pull_layout(bucket, strategy).pieces[0]),
        "tokens": tokens,
        "collectives MiB": round(moved / 2**20, 1),
        "kept KiB a token": round(kept_bytes(timer, (tokens,)) / tokens / 2**10),
        "CPU ms": round(min(timing.ms for timing in timings)),
    }


PARTS = {"sizes": sizes, "experts": experts}


def main() -> int:
    """The exit code: 0, or 1 if an aim was missed."""
    return run_parts("bench_hybrids", __doc__, PARTS)


if __name__ == "__main__":
    sys.exit(guarded("bench_hybrids", main))
