"""The job that a simulation is of: its model, costs, links and ranks. Pure: no torch.

[Note: why a step ends]
Take messages as the strictest network does: each holds up both ends until they have come to it. Then a step ends if
every pipeline's slots do by themselves (`rendezvous.check_slots`), and if no stage has messages with a neighbour left
when it comes to its first push. For all ranks start the pulls of a phase before anything else, in one order, so these
are met. Pipelines exchange nothing with each other in their slots, so each comes to its pushes, which all ranks start
in one order too. Who waits there holds up nobody's slots, so in the end all are there. The next phase begins anew.

For tables that come without a model: what `pipe.models` reads off a real one, written down from sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from ds_hydra.costs.analytic import ModelShape
from ds_hydra.costs.cost_table import CostTable, TableFile, table_file_from_record
from ds_hydra.costs.memory import Activations, ElementBytes, JobMemory
from ds_hydra.costs.shape_costs import with_shapes
from ds_hydra.pipe.model_plan import Bucket, ModelPlan, ParamSpec, ShardRule
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.pipe.schedules.actions import backward_of_first_push
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.check import check_slots
from ds_hydra.pipe.schedules.registry import training_slots
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.simulate import schedule_batches
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import validate_plan
from ds_hydra.simulate.links import LinkModel
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from ds_hydra.zero_hetero.nodes import Cluster, node_size_of


def check_order(plan: StepPlan, table: CostTable) -> None:
    """PlanError, with the pipeline's slots, unless every rank comes to the end of the step. [Note: why a step ends]"""
    for phase in plan.phases:
        for pipeline in phase.pipelines:
            _check_pipeline(pipeline.schedule, schedule_batches(pipeline, table), pipeline.shape.pp)


@lru_cache(maxsize=4096)
def _check_pipeline(schedule: str, batches: Batches, num_stages: int) -> None:
    stages = [training_slots(schedule, batches, num_stages, stage) for stage in range(num_stages)]
    check_slots(stages, batches)
    for index, slots in enumerate(stages):
        first_push = backward_of_first_push(slots)
        if first_push is None:
            continue  # pushes start after the last slot
        at = next(number for number, slot in enumerate(slots) if first_push in slot)
        late = [str(action) for slot in slots[at + 1 :] for action in slot if not action.computes]
        if late:
            raise PlanError(f"schedule {schedule}: stage {index} pushes in {first_push}, but {' '.join(late)} follow")


HOST_LINK = 50e9
"""Bytes a second between a device and its host's memory, each way, where no other figure is given (PCIe 5)."""
NO_LIMIT = 2.0**62  # bytes of a device, for memory models: what limits a simulated plan is the table's MaxLen


@dataclass(frozen=True)
class SimulatedJob:
    """What stays the same from step to step."""

    plan: ModelPlan
    hidden: int  # features of what stages send to each other
    found: TableFile  # costs; a measured table's evidence gives each stage its own, and the update's
    links: LinkModel
    num_ranks: int
    element_bytes: int = 2  # of parameters and hidden states on their way
    memory: JobMemory | None = None
    gradient_bytes: int | None = None  # of gradients on their way; None: as many
    sum_bytes: int = 4  # of gradients where those of micro-batches add up
    cluster: Cluster | None = None  # which rank has a device of which class, where they are of several
    # Each rank's sums go to the rank so far behind it, which keeps a copy [Note: buddies]; 0: to none, as for plans.
    shift: int = 0
    lanes: bool = True  # whether pushes wait for memory beside computing, as on devices [Note: lanes]
    host_link: float = HOST_LINK  # bytes a second, each way, of each rank

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ConfigError(f"a job of {self.num_ranks} GPUs cannot be simulated; give at least 1")

    @property
    def elements(self) -> ElementBytes:
        """Bytes of elements of what a rank holds."""
        apart = self.memory is not None and self.memory.run > 0
        return ElementBytes(self.element_bytes, self.sum_bytes, wire=self.gradient_bytes, apart=apart)

    @property
    def owned(self) -> float:
        """Trained elements of each rank."""
        return sum(bucket.numel for bucket in self.plan.buckets if bucket.trainable) / self.num_ranks

    @property
    def fetch_s(self) -> float:
        """Seconds that masters on the host take to the device before a phase's pulls; 0 where they are there."""
        if self.memory is None or not self.memory.run:
            return 0.0
        return self.owned * self.memory.master_bytes / self.host_link

    def update_s(self, computing_s: float) -> float:
        """Seconds of an update that computes so long: where states are on the host they come and go meanwhile, both
        ways at once, and the last run leaves when all else is done [Note: updates by runs]."""
        if self.memory is None or not self.memory.run:
            return computing_s
        each = (1 + self.memory.optimizer_states) * self.memory.master_bytes / self.host_link
        return max(computing_s, each * self.owned) + each * min(self.owned, self.memory.run)

    @property
    def table(self) -> CostTable:
        """The costs that plans are simulated with."""
        return self.found.table

    def placed(self, shape: StrategyShape) -> Strategy:
        """A strategy's stages on the job's ranks; PlanError for other ranks."""
        return place_strategy(shape, self.num_ranks, self.plan.num_layers, self.cluster)

    def check(self, plan: StepPlan) -> None:
        """PlanError for a plan that is not right in itself, of other ranks, above MaxLen, or that would stand still.

        The plan's own times are not compared: it may have been made with another table.
        """
        limits: dict[Any, int] = {cost.scheme: cost.max_length for cost in self.table.costs}
        validate_plan(plan, limits, self.num_ranks)
        check_order(plan, self.table)

    def with_costs_of(self, strategies: Sequence[StrategyShape]) -> SimulatedJob:
        """The same job with these candidates: with costs of their pipelines, whose stages may differ, and memory.

        PlanError if there are no costs, or for other ranks. Without a memory model only uniform pipelines have costs.
        """
        if self.memory is None:
            return self
        placed = {one: self.placed(one) for one in strategies}
        memory = self.memory.together(placed)
        table = with_shapes(self.table, strategies, memory)
        return replace(self, found=replace(self.found, table=table), memory=memory)


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


_PLAN, _LINKS, _CLUSTER = TypeAdapter(ModelPlan), TypeAdapter(LinkModel), TypeAdapter(Cluster)
_NUMBERS = ("hidden", "num_ranks", "element_bytes", "gradient_bytes", "sum_bytes", "shift", "lanes")


def job_record(job: SimulatedJob) -> dict[str, Any]:
    """All of a job but its memory, which says nothing of times; `read_job` is the inverse."""
    return {
        "plan": _PLAN.dump_python(job.plan, mode="json"),
        "links": _LINKS.dump_python(job.links, mode="json"),
        "found": job.found.to_record(),
        **({"cluster": _CLUSTER.dump_python(job.cluster, mode="json")} if job.cluster else {}),
        **{name: getattr(job, name) for name in _NUMBERS},
    }


def read_job(record: Mapping[str, Any]) -> SimulatedJob:
    """The job of a record. KeyError or ValueError, of which ConfigError is one, for what `job_record` does not give."""
    return SimulatedJob(
        plan=_PLAN.validate_python(record["plan"]),
        links=_LINKS.validate_python(record["links"]),
        found=table_file_from_record(record["found"], "the simulated job's costs"),
        cluster=_CLUSTER.validate_python(record["cluster"]) if "cluster" in record else None,
        **{name: record[name] for name in _NUMBERS},
    )
