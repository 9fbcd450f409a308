"""The clusters that Hetu v2 trained on, with its own plans and its rivals' (appendix A), and costs for all. Pure.

What is assumed, as nobody has published times of layers: a device computes at a share of its peak that large products
reach (H800 0.50, H20 0.88), links inside a node carry 0.75 of their rate, a layer costs 0.25 ms to launch for each
micro-batch, tensor parallelism loses what `costs/analytic.py` says, and half of what a rank pulls and pushes in a step
at 40 GB/s is waited for. Megatron splits layers evenly, so its slowest stage paces it; DeepSpeed gives each rank the
same work and computes all layers again. With this Hetu's own layouts come within 6 % of the two times that it prints.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_hydra.costs.analytic import ModelShape, analytic_cost_table
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.memory import Activations, JobMemory
from ds_hydra.costs.shape_costs import of_class
from ds_hydra.pipe.placement import place_pipeline
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.simulate.job import SHIPPED, llama_plan
from ds_hydra.zero_hetero.nodes import Cluster

CONTEXT, SEQUENCES = 4096, 64  # of Hetu's steps
FLOPS = {"h800": 0.50 * 990e12, "h20": 0.88 * 148e12}
LINKS = {"h800": 0.75 * 400e9, "h20": 0.75 * 900e9}  # bytes/s inside a node
BYTES = {"h800": 80e9, "h20": 96e9}
LAUNCH_MS, BETWEEN, EXPOSED = 0.25, 40e9, 0.5
MODELS = {
    "32B": SHIPPED["a800-32b"].shape,
    "70B": ModelShape(8192, 80, 64, 8, 28672, 30592, 68_946_493_440),
}
_, _KEPT = SHIPPED["a800-32b"]  # bytes of activations a token, hidden unit and layer, by TP


@dataclass(frozen=True)
class Case:
    """A cluster of so many ranks of each class on nodes of eight, and what was trained on it."""

    name: str
    model: str
    h800: int
    h20: int
    hetu: str  # its own plan
    megatron: tuple[int, int, int, int]  # DP, TP, PP, sequences of a micro-batch
    deepspeed: tuple[int, int]  # DP with SP 2 and recomputation, sequences of a micro-batch
    printed_s: float | None = None

    @property
    def cluster(self) -> Cluster:
        """H800 first, as Hetu counts them; of each class the last node may have fewer than eight."""
        sizes: list[int] = []
        for count in (self.h800, self.h20):
            sizes += [8] * (count // 8) + [count % 8] * (count % 8 > 0)
        return Cluster(tuple(sizes), ("h800",) * self.h800 + ("h20",) * self.h20)


CASES = (
    Case("32B 16+16", "32B", 16, 16, "2*(tp4[0:7]@h20 > tp4[7:14]@h20 > tp4[14:37]@h800 > tp4[37:60]@h800)",
         (2, 4, 4, 2), (16, 2)),
    Case("32B 16+24", "32B", 16, 24, "2*(tp4[0:6]@h20 > tp4[6:12]@h20 > tp4[12:18]@h20 > tp4[18:39]@h800 > "
         "tp4[39:60]@h800)", (2, 4, 5, 2), (20, 4)),
    Case("32B 16+32", "32B", 16, 32, "4*(tp4[0:11]@h20 > tp4[11:22]@h20 > tp4[22:60]@h800)", (4, 4, 3, 2), (24, 1),
         6.05),
    Case("70B 16+16", "70B", 16, 16, "(tp8[0:11]@h20 > tp8[11:22]@h20 > tp8[22:51]@h800 > tp8[51:80]@h800)",
         (1, 8, 4, 1), (16, 1)),
    Case("70B 16+24", "70B", 16, 24, "(tp8[0:10]@h20 > tp8[10:20]@h20 > tp8[20:30]@h20 > tp8[30:55]@h800 > "
         "tp8[55:80]@h800)", (1, 8, 5, 1), (20, 2)),
    Case("70B 16+32", "70B", 16, 32, "2*(tp8[0:17]@h20 > tp8[17:34]@h20 > tp8[34:80]@h800)", (1, 8, 6, 1), (24, 1)),
    Case("C1", "32B", 0, 32, "2*tp4pp4@h20", (2, 4, 4, 2), (16, 2)),
    Case("C2", "32B", 0, 31, "tp4pp4@h20 + (tp4[0:16]@h20 > tp4[16:32]@h20 > tp4[32:48]@h20 > tp2[48:56]@h20 > "
         "tp1[56:60]@h20)", (1, 4, 6, 1), (12, 2)),
    Case("C3", "32B", 0, 24, "2*tp4pp3@h20", (1, 4, 6, 1), (12, 2)),
    Case("C4", "32B", 16, 32, "2*(tp4[0:5]@h20 > tp4[5:11]@h20 > tp4[11:17]@h20 > tp4[17:23]@h20 > tp4[23:41]@h800 > "
         "tp4[41:60]@h800)", (4, 4, 3, 2), (24, 1), 6.91),
    Case("C6", "32B", 15, 24, "(tp4[0:6]@h20 > tp4[6:12]@h20 > tp4[12:18]@h20 > tp4[18:39]@h800 > tp4[39:60]@h800) + "
         "(tp4[0:6]@h20 > tp4[6:12]@h20 > tp4[12:18]@h20 > tp4[18:40]@h800 > tp2[40:53]@h800 > tp1[53:60]@h800)",
         (2, 4, 4, 2), (16, 2)),
    Case("C7", "32B", 8, 24, "2*(tp4[0:9]@h20 > tp4[9:19]@h20 > tp4[19:29]@h20 > tp4[29:60]@h800)", (2, 4, 4, 2),
         (16, 2)),
)  # fmt: skip
"""C5 is "32B 16+24"."""


def rows_of(model: str, device: str, schemes: tuple[ParallelScheme, ...] = ()) -> CostTable:
    """Costs of a class: of one stage of each TP that holds the whole model, or of these schemes."""
    return analytic_cost_table(
        MODELS[model], schemes or tuple(ParallelScheme(tp) for tp in (1, 2, 4, 8)), 64 * CONTEXT,
        device_flops=FLOPS[device], link_bytes_per_second=LINKS[device], layer_overhead_ms=LAUNCH_MS,
    )  # fmt: skip


def table_of(case: Case) -> CostTable:
    """Rows of both classes that the cluster has."""
    tables = [of_class(rows_of(case.model, device), device) for device in case.cluster.classes]
    return CostTable(tuple(cost for table in tables for cost in table.costs), "FLOPs")


def memory_of(case: Case) -> JobMemory:
    """With masters sharded over all ranks and nothing computed again."""
    shape, cluster = MODELS[case.model], case.cluster
    figures = {(tp, 1): Activations(kept * shape.hidden / tp, 0.0, 0.0) for tp, kept in _KEPT.items()}
    return JobMemory(
        llama_plan(shape), cluster.num_ranks, figures, param_bytes=2, vocab=shape.vocab, node_size=cluster.node_size,
        device_bytes=min(BYTES[device] for device in cluster.classes), cluster=cluster, class_bytes=BYTES,
    )  # fmt: skip


def exchanged_ms(case: Case, strategy: StrategyShape) -> float:
    """What of pulls and pushes is waited for: by the rank that holds most, of 2 bytes each way."""
    plan = llama_plan(MODELS[case.model])
    most = 0.0
    for pipeline in dict.fromkeys(strategy.pipelines):
        for stage in place_pipeline(pipeline, 0, plan.num_layers).stages:
            most = max(most, stage.num_layers / plan.num_layers / stage.tp)
    return 1e3 * EXPOSED * 4.0 * MODELS[case.model].params * most / BETWEEN
