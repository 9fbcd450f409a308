"""The engine: plan, pull, run, push, update, report; one call a step.

Start reading at `train_batch`: its lines stand in the order in which a step happens.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn

from ds_hydra.checkpoint.checkpointer import Checkpointer
from ds_hydra.config.hydra_block import ParsedConfig
from ds_hydra.costs.analytic import model_shape
from ds_hydra.data.sequences import SequenceData
from ds_hydra.engine.candidates import job_cost_table, proposed_strategies
from ds_hydra.engine.fingerprint import describe_job
from ds_hydra.engine.fits import check_memory, job_memory, rank_memory, within_memory
from ds_hydra.engine.plan_source import PlanSource
from ds_hydra.engine.saving import CheckpointFace
from ds_hydra.engine.signals import Signals
from ds_hydra.host.host_engine import HostEngine
from ds_hydra.host.launch import launched_node_size
from ds_hydra.host.loss_scale import LossScale
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.layer_list import LayerList
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.rows import MicroBatch
from ds_hydra.pipe.shape import ParallelScheme, format_strategy, parse_strategy
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.plan.schemes import feasible_schemes
from ds_hydra.planner import PlannedStep, StepPlan
from ds_hydra.ranks.rank_stats import RankStats, gather_stats
from ds_hydra.ranks.world import World
from ds_hydra.report.prediction import StepWatch
from ds_hydra.report.record import StepRecord
from ds_hydra.step.agreement import FAILED, agree
from ds_hydra.step.arena import Arena
from ds_hydra.step.batching import RankBatches, build_batches
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.step.strategy_runtime import StrategyRuntime
from ds_hydra.step.update import Update
from ds_hydra.watchdog import IDLE, Watchdog
from ds_hydra.zero_hetero.buffer_pool import BufferPool
from ds_hydra.zero_hetero.errors import ConfigError, PlanError

logger = logging.getLogger(__name__)


class HydraEngine(CheckpointFace, HostEngine):
    """Trains a model by heterogeneous strategies that change from step to step.

    Made by `ds_hydra.initialize`. The model's own parameters move to the meta device: from then on the master
    shards are the parameters, and `fp32_state_dict` gathers them.
    """

    def __init__(self, parsed: ParsedConfig, model: Any, **arguments: Any) -> None:
        super().__init__(parsed, model, **arguments)
        config = self.hydra_config
        node_size = config.node_size or launched_node_size() or dist.get_world_size()
        self._world = World.of_process(self.device, node_size=node_size, timeout_s=config.timeout_seconds)
        self._rank, self._num_ranks = self._world.rank, self._world.num_ranks
        self._source = model_source(model, activation_checkpointing=config.activation_checkpointing)
        self._configure_plans()
        self._configure_communication()
        self._masters = ModelMasters(
            self._source, self._rank, self._num_ranks, self.device, self.master_dtype, self.compute_dtype
        )
        self._masters.load(self._source.values, self._world.group)
        self._source.values = {}
        model.to("meta")
        groups = self._masters.trained.param_groups([{"names": group.names} for group in self.recipe.groups])
        self.install_optimizer([group["params"] for group in groups])
        self._configure_safety()
        self._resume()

    def _configure_plans(self) -> None:
        """Cost table and candidate strategies, all checked against the model and the data before step 0."""
        config, plan = self.hydra_config, self._source.plan
        lengths = [] if self.data is None else [int(n) for n in self.data.lengths if n]
        longest = max(lengths, default=config.context_length or config.tokens_per_step)
        schemes = sorted({scheme for strategy in config.schemes for scheme in strategy}) or feasible_schemes(
            plan, self._num_ranks, self._world.node_size
        )
        shape = model_shape(
            plan, max(self._source.width(i) for i in range(1, plan.num_layers)), self._source.vocab_size
        )
        job = describe_job(self._source, self.device, self.compute_dtype, self._num_ranks)
        found = job_cost_table(config, shape, schemes, longest, job)
        memory = job_memory(
            self._source, found.table.schemes, self._num_ranks, rank_memory(self.device, self._world.node_size),
            self.compute_dtype, activation_checkpointing=config.activation_checkpointing,
            measured=found.activations,
        )  # fmt: skip
        # A measured table's MaxLen holds for as many ranks as shared the masters then.
        as_measured = config.cost_table and (found.job is None or found.job.num_ranks in (0, self._num_ranks))
        self._table = found.table if as_measured else within_memory(found.table, memory)
        share = shape.params // self._num_ranks
        self._watch = StepWatch(config.cost_correction, replace(found, table=self._table), plan.num_layers, share)
        self._schemes = config.schemes or self._propose(lengths)
        self._strategies = {
            schemes: place_strategy(schemes, self._num_ranks, plan.num_layers) for schemes in self._schemes
        }
        for strategy in self._strategies.values():
            plan.check(strategy)
        where = "sequences may have" if self.data is None else f"sequence {int(self.data.lengths.argmax())} has"
        check_memory(self._table, memory, self._schemes, longest, where)

    def _propose(self, lengths: Sequence[int]) -> tuple[tuple[ParallelScheme, ...], ...]:
        """Rank 0 proposes, so that only one process compiles and searches."""
        proposed: str | None = None
        if self._rank == 0:
            strategies = proposed_strategies(
                self.hydra_config, self._table, lengths, self._num_ranks, self._world.node_size
            )
            proposed = "\n".join(format_strategy(strategy) for strategy in strategies)
            logger.info("strategies proposed for these lengths:\n  %s", proposed.replace("\n", "\n  "))
        return tuple(parse_strategy(line) for line in self._world.channel.tell(proposed).split("\n"))

    def _configure_communication(self) -> None:
        self._pool = BufferPool()
        self._arena = Arena.for_strategies(
            self._source.plan, list(self._strategies.values()), self._rank, self.device, self.compute_dtype
        )
        self._runtimes: dict[str, StrategyRuntime] = {}
        self._previous: str | None = None
        config = self.hydra_config
        self._plans = PlanSource(
            self._table,
            self._schemes,
            config.planner_options(),
            self.sampler,
            config.planner.ahead,
            self._world.channel,
        )

    def _configure_safety(self) -> None:
        """Checkpoints, signals, heartbeats: what keeps a long run from losing anything."""
        self._loss_scale = LossScale(self)
        self._checkpoints = Checkpointer(self, self._masters, self._source.aliases, self._world.background)
        self._signals = Signals()
        if self.hydra_config.checkpoint is not None:
            self._signals.install()
        self._phase = IDLE
        self._running: StrategyRuntime | None = None
        faults = self.hydra_config.faults
        assert self.optimizer is not None, "made by install_optimizer"
        self._update = Update(
            self._masters.trained, self.optimizer, self.gradient_clipping(), self._loss_scale, self._world, faults
        )
        self._watchdog = Watchdog(
            self._world.background,
            self._where,
            heartbeat_s=faults.heartbeat_seconds,
            frozen_s=faults.frozen_seconds,
            address=faults.address,
        )

    def _where(self) -> tuple[int, str]:
        """The step and phase that this rank is in."""
        running = self._running
        return self.global_steps + 1, self._phase if running is None else running.stage_runtime.phase

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """Run one step and return its loss, a scalar in FP32.

        The sequences come from `training_data`; `data_iter` is there for DeepSpeed's signature and must be None.
        Every rank must call it.
        """
        self._refuse_iterator(data_iter)
        data = self._data()
        with self._phase_of("planning"):
            loss, request = self._train_step(data)
        self._save_when_due(request)
        return loss

    def _train_step(self, data: SequenceData) -> tuple[Tensor, int]:
        """One step; its loss and what signals have asked for on any rank."""
        began = time.perf_counter()
        planned = self._plans.next(self.global_steps)
        runtime = self._runtime(planned.plan)
        batches, weight = self._batches(planned.plan, runtime, data)
        runtime.stage_runtime.phase = "pull"
        self._running = runtime
        loss = runtime.train(_weighted(batches.batches, weight, self._loss_scale.value)) / self._loss_scale.value
        self._phase, self._running = "optimizer", None
        self._update.compare(self.global_steps + 1, runtime)
        norm, optimizer_s = self._update.apply(loss)
        self._phase = "report"
        stats = self._stats(loss, runtime, batches)
        if not math.isfinite(norm):
            self._update.explain(self.global_steps + 1, planned.plan, runtime)
        self._report(planned, runtime, norm, optimizer_s, weight, stats, time.perf_counter() - began)
        self._update.count(self.global_steps, norm)
        return _total_loss(stats), int(max(rank.request for rank in stats))

    def eval_batch(self, data_iter: Any = None) -> Tensor:
        """Mean loss of a batch of sequences, without an update: a scalar in FP32, equal on all ranks.

        `data_iter` is a dataset or list of sequences like `training_data`, or an iterator whose next item is one.
        Every rank must call it with the same sequences.
        """
        batch = next(data_iter) if hasattr(data_iter, "__next__") else data_iter
        if batch is None:
            raise ConfigError("eval_batch() needs sequences: a dataset, a list of token lists, or an iterator of them")
        data = self.sequences(batch)
        ids = tuple(i for i, length in enumerate(data.lengths) if length)
        plan = self._plans.plan_once(ids, tuple(int(data.lengths[i]) for i in ids))
        runtime = self._runtime(plan)
        batches, weight = self._batches(plan, runtime, data)
        loss = runtime.evaluate(_weighted(batches.batches, weight))
        return _total_loss(self._stats(loss, runtime, batches))

    def fp32_state_dict(self) -> dict[str, Tensor]:
        """Full parameters on CPU by the model's own names, tied ones under each of theirs; FP64 for an FP64 model.

        Every rank must call it, and gets all of them.
        """
        full = self._masters.gather(self._world.links)
        return {path: full[name] for path, name in self._source.aliases.items()}

    def destroy(self) -> None:
        """End the planning process and a save that is under way, print the summary, release what DeepSpeed's would."""
        if "_watchdog" in self.__dict__:
            self._checkpoints.writer.wait()
            self._signals.remove()
            self._watchdog.close()
        plans = self.__dict__.get("_plans")
        if plans is not None:
            plans.close()
        super().destroy()

    def _data(self) -> SequenceData:
        if self.data is None:
            raise ConfigError("train_batch() needs sequences: pass training_data to initialize()")
        return self.data

    def _refuse_iterator(self, data_iter: Any) -> None:
        if data_iter is not None:
            raise ConfigError(
                "train_batch(data_iter) is not supported: steps are planned ahead from all sequences; pass the "
                "dataset as training_data to initialize() and call train_batch()"
            )

    def _runtime(self, plan: StepPlan) -> StrategyRuntime:
        """The strategy's runtime, built when it is first used; all ranks build it in the same step."""
        if plan.strategy not in self._runtimes:
            schemes = parse_strategy(plan.strategy)
            strategy = self._strategies.get(schemes) or place_strategy(
                schemes, self._num_ranks, self._source.plan.num_layers
            )
            self._runtimes[plan.strategy] = StrategyRuntime(
                strategy, self._source, self._masters, self._arena, self._pool, self._world
            )
        return self._runtimes[plan.strategy]

    def _batches(self, plan: StepPlan, runtime: StrategyRuntime, data: SequenceData) -> tuple[RankBatches, int]:
        """This rank's micro-batches, and the normaliser that all ranks agree on with the plan.

        A sequence that one rank cannot load is an error on all of them.
        """
        try:
            batches = build_batches(
                plan.pipelines[runtime.pipeline_index].microbatches,
                plan.sequence_ids,
                plan.lengths,
                runtime.place,
                data.load_sequence,
                self.hydra_config.loss_norm,
                self.device,
            )
        except Exception:
            with suppress(PlanError):
                agree(plan, FAILED, self._world.channel)
            raise
        return batches, agree(plan, batches.weight, self._world.channel)

    def _stats(self, loss: Tensor, runtime: StrategyRuntime, batches: RankBatches) -> tuple[RankStats, ...]:
        """Every rank's figures of the step. A tensor parallel group computes one loss: its first rank counts it."""
        place = runtime.place
        counts = place.tp_rank == 0
        mine = RankStats(
            loss=float(loss) if counts else 0.0,
            run_s=runtime.run_s,
            compute_s=runtime.stage_runtime.compute_s,
            exposed_pull_s=runtime.exposed_pull_s,
            exposed_push_s=runtime.exposed_push_s,
            num_padding=batches.num_padding if counts and place.is_last and place.sp_rank == 0 else 0,
            peak_memory_bytes=_peak_memory(self.device),
            request=self._signals.request,
        )
        return gather_stats(mine, self._world.channel)

    def _report(
        self,
        planned: PlannedStep,
        runtime: StrategyRuntime,
        norm: float,
        optimizer_s: float,
        weight: int,
        stats: Sequence[RankStats],
        seconds: float,
    ) -> None:
        plan, strategy = planned.plan, runtime.strategy
        pipeline_ms = [1e3 * max(stats[rank].run_s for rank in p.ranks) for p in strategy.pipelines]
        stage_ms = [
            [1e3 * max(stats[rank].compute_s for rank in stage.ranks) for stage in p.stages] for p in strategy.pipelines
        ]
        watched = self._watch.fields(
            plan, pipeline_ms=pipeline_ms, stage_ms=stage_ms, step_ms=1e3 * seconds,
            moved_bytes=runtime.pull_bytes + runtime.push_bytes,
        )  # fmt: skip
        record = StepRecord(
            step=self.global_steps + 1,
            loss=sum(rank.loss for rank in stats),
            grad_norm=norm,
            learning_rate=self.get_lr()[0],
            num_tokens=plan.num_tokens,
            num_targets=weight,
            num_sequences=len(plan.lengths),
            strategy=plan.strategy,
            changed=self._previous is not None and plan.strategy != self._previous,
            step_ms=1e3 * seconds,
            predicted_ms=plan.predicted_ms,
            num_padding=int(sum(rank.num_padding for rank in stats)),
            pipeline_ms=tuple(pipeline_ms),
            lower_bound_ms=plan.lower_bound_ms,
            planning_ms=planned.planning_ms,
            planning_hidden=planned.hidden,
            plan_source=plan.source,
            planning_fallback=planned.fallback,
            plan_digest=plan.digest().hex(),
            ids_digest=hashlib.sha256(repr(plan.sequence_ids).encode()).hexdigest()[:16],
            num_micro_batches=tuple(len(pipeline.microbatches) for pipeline in plan.pipelines),
            pull_ms=1e3 * max(rank.exposed_pull_s for rank in stats),
            push_ms=1e3 * max(rank.exposed_push_s for rank in stats),
            optimizer_ms=1e3 * optimizer_s,
            pull_bytes=runtime.pull_bytes,
            push_bytes=runtime.push_bytes,
            peak_memory_bytes=int(max(rank.peak_memory_bytes for rank in stats)),
            skipped=not math.isfinite(norm),
            skipped_steps=self.skipped_steps + (not math.isfinite(norm)),
            plan=plan.to_json(),
            **watched,
        )
        self._previous = plan.strategy
        self.finish_step(record)
        corrected = self._watch.new_table(self.global_steps)
        if corrected is not None:
            self._table = corrected
            self._plans.use_table(corrected)


def model_source(model: Any, *, activation_checkpointing: bool) -> ModelSource:
    """What kind of model the user gave, read once."""
    from transformers import PreTrainedModel

    if isinstance(model, PipelineModule):
        if activation_checkpointing:
            raise ConfigError(
                "hydra.activation_checkpointing works with Hugging Face models only; wrap the layers' own"
            )
        return LayerList(model)
    if isinstance(model, PreTrainedModel):
        return CausalLM(model, activation_checkpointing=activation_checkpointing)
    kind = type(model).__name__
    what = "a module" if isinstance(model, nn.Module) else "not even a module"
    raise ConfigError(
        f"the model is a {kind}, {what} whose layers ds_hydra cannot find: give a Hugging Face causal language "
        "model or a DeepSpeed PipelineModule"
    )


def _weighted(batches: Sequence[MicroBatch], total: int, scale: float = 1.0) -> Sequence[MicroBatch]:
    """Loss weights divided by what all ranks count of the step's normaliser, times a loss scale."""
    for batch in batches:
        if batch.weights is not None:
            batch.weights.div_(max(1, total) / scale)
    return batches


def _total_loss(stats: Sequence[RankStats]) -> Tensor:
    return torch.tensor(sum(rank.loss for rank in stats), dtype=torch.float32)


def _peak_memory(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
