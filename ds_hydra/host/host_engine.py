"""The surface of DeepSpeed's engine: config, data, optimizer, schedulers, monitors, counters.

`HostEngine` is a DeepSpeedEngine by isinstance, so that scripts and libraries which test for one, or call its methods
that read settings, go on working.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime.engine import DeepSpeedEngine, EngineTimers
from deepspeed.utils import set_log_level_from_string
from deepspeed.utils.timer import SynchronizedWallClockTimer, ThroughputTimer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ds_hydra.config.deepspeed_settings import BATCH_KEYS
from ds_hydra.config.hydra_block import ParsedConfig
from ds_hydra.data.columns import ModelInput
from ds_hydra.data.lengths import ItemLengths
from ds_hydra.data.sampler import Order, StepLoader
from ds_hydra.data.sequences import SequenceData
from ds_hydra.data.stream import StreamSampler, StreamSteps, is_stream
from ds_hydra.data.tokens import Limits
from ds_hydra.host.devices import Flags, device_index
from ds_hydra.host.environment import JOINS
from ds_hydra.host.optimizers import OptimizerRecipe, optimizer_recipe
from ds_hydra.host.settings import (
    NO_MONITORS,
    BatchSizes,
    batch_sizes,
    deepspeed_config,
    drawn_from,
    quietly,
    refuse_batch_size,
    refuse_foreign_scheduler,
    refuse_metrics_scheduler,
    refuse_reordering,
    refused_call,
    sized,
    streamed,
    with_model_settings,
)
from ds_hydra.host.user_model import DataTypes, choose_dtype, limits_of
from ds_hydra.report.record import StepLog, StepRecord
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)


class HostEngine(DeepSpeedEngine):
    """The surface of a DeepSpeedEngine over an engine that plans whole steps.

    A subclass implements `train_batch`, `eval_batch` and `fp32_state_dict`, makes the master shards of `recipe.groups`
    for `install_optimizer`, and calls `finish_step` after each step. `scanned` are the lengths of training data that
    do not tell theirs, where they are known. Needs an initialized process group (`init_distributed`).
    """

    global_rank: int
    global_steps = 0  # of which others may ask before the constructor has come to them
    # Of DeepSpeed's own mixtures of experts, which no engine here has.
    num_experts: list[int]
    gate_modules: list[nn.Module]
    moe_layers: list[nn.Module]
    expert_parallel_group: dict[str, Any]
    expert_data_parallel_group: dict[str, Any]

    def __init__(
        self,
        parsed: ParsedConfig,
        model: nn.Module,
        *,
        optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
        model_parameters: Iterable[Any] | None = None,
        training_data: Any = None,
        lr_scheduler: LRScheduler | Callable[[Optimizer], Any] | None = None,
        args: Any = None,
        scanned: ItemLengths | None = None,
    ) -> None:
        # Not DeepSpeedEngine's, which moves and flattens the model. What its methods need of that is done below.
        nn.Module.__init__(self)
        self.hydra_config = sized(with_model_settings(parsed.hydra, model), training_data, dist.get_world_size())
        self.config = parsed.source
        self._config = deepspeed_config(parsed)
        self.client_optimizer = optimizer
        self.client_lr_scheduler = lr_scheduler
        self._set_deepspeed_defaults()
        self._do_args_sanity_check(args)
        self._configure_with_arguments(args, None)
        self._set_distributed_vars(args)
        self.global_rank = -1 if JOINS in os.environ else self.global_rank  # so that it neither reports nor reads
        if self.log_level() is not None:
            set_log_level_from_string(self.log_level())
        self._configure_python_gc()
        self._flags = Flags(self.hydra_config, self.device)

        self.module = model
        self.types = DataTypes.of(
            choose_dtype(model, fp16=self.fp16_enabled(), bf16=self.bfloat16_enabled()),
            grads=self._config.grad_accum_dtype,
            # From the config: DeepSpeed's property of this name would take FP64 gradients for FP32 ones.
            wire=self._config.communication_data_type,
        )
        self.recipe: OptimizerRecipe = optimizer_recipe(
            model,
            name=self.optimizer_name(),
            params=self.optimizer_params(),
            client=optimizer,
            model_parameters=model_parameters,
            allow_untested=bool(self.zero_allow_untested_optimizer()),
        )
        refuse_foreign_scheduler(lr_scheduler, optimizer)
        self._inputs = limits_of(self.hydra_config, model).inputs
        self._configure_data(training_data, scanned)
        self.configure_reports()

    def _set_distributed_vars(self, args: Any) -> None:
        """As DeepSpeed's, which takes LOCAL_RANK for the number of the device, on the device that this rank sees."""
        own, accelerator = self.local_rank, get_accelerator()
        if accelerator.device_name() != "cpu" and not hasattr(args, "device_rank"):
            own = device_index(own, accelerator.device_count())
        super()._set_distributed_vars(args if hasattr(args, "device_rank") else SimpleNamespace(device_rank=own))

    def _set_deepspeed_defaults(self) -> None:
        """Attributes that DeepSpeedEngine's methods and its users read."""
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self.last_step: StepRecord | None = None
        self.optimizer: Optimizer | None = None
        self.basic_optimizer: Optimizer | None = None
        self.lr_scheduler: Any = None
        self._lr_kwargs: dict[str, Any] = {}  # of the step that runs
        self.checkpoint_engine = None
        self.dist_backend = get_accelerator().communication_backend_name()
        self.mpu = self.collate_fn = None
        self.has_moe_layers = self.warn_unscaled_loss = self.enable_backward_allreduce = False
        self.num_experts, self.gate_modules, self.moe_layers = [], [], []
        self.expert_parallel_group, self.expert_data_parallel_group = {}, {}
        self.pipeline_parallelism = False
        self.sequence_parallel_size = self.mp_world_size = 1  # of what a rank hands in: each has batches of its own
        self.checkpoint_mp_rank = 0
        self.dont_change_device = self.inside_no_sync_ctxt = self.use_ds_comm = self.zenflow = False
        self.optimized_linear_base_weight_sharding = self.optimized_linear_lora_enabled = False
        self.gradient_average = self.save_zero_checkpoint = self.save_non_zero_checkpoint = True
        self.all_to_all_group = self.local_all_to_all_group = self.mesh_device = self.losses = None
        self.scale_wrt_gas = self.torch_autocast_z0_gradscaler = None
        self.loaded_checkpoint_mp_world_size = self.loaded_checkpoint_dp_world_size = None
        self.engine_timers = EngineTimers(enable_micro_timers=False, enable_global_timers=False)
        self.engine_timers_cache: dict[str, Any] = {}
        self._set_batch_sizes: dict[str, int] = {}
        self.timers = SynchronizedWallClockTimer()
        self.tput_timer = ThroughputTimer(self._config.timers_config, batch_size=1)  # idle: steps tell their speed
        self._global_grad_norm: float | None = None
        self._step_applied = False
        self._is_compiled = self._deepcompile_active = False
        self._is_gradient_accumulation_boundary = True
        self._python_gc_generation: int | None = None

    def _configure_data(self, training_data: Any, scanned: ItemLengths | None) -> None:
        self.training_data = training_data
        self.data: SequenceData | None = None
        self.sampler: Order | None = None
        self.training_dataloader: StepLoader | StreamSteps | None = None
        if training_data is None:
            refuse_reordering(self.hydra_config, "no training_data is given, and steps are handed in one by one")
            return
        if is_stream(training_data):
            self.sampler, self.training_dataloader = streamed(
                training_data, self.hydra_config, self.limits(), lambda: self.global_steps, reads=self.global_rank == 0
            )
            return
        self.data = self.sequences(training_data, scanned)
        self.sampler, self.training_dataloader = drawn_from(self.data, self.hydra_config, lambda: self.global_steps)
        if self.global_rank == 0:
            logger.info("data: %s; %d steps an epoch", self.data.counts, self.sampler.steps_per_epoch)

    def sequences(self, dataset: Any, scanned: ItemLengths | None = None) -> SequenceData:
        """The sequences of a dataset, within this job's context length and this model's vocabulary."""
        limits = self.limits()
        return SequenceData(dataset, **{one.name: getattr(limits, one.name) for one in fields(limits)}, scanned=scanned)

    def limits(self) -> Limits:
        """What this job can train on."""
        return replace(limits_of(self.hydra_config, self.module), inputs=self._inputs)

    def use_inputs(self, inputs: ModelInput) -> None:
        """Read data for a model that takes them so from now on. ConfigError where the first item does not fit it."""
        self._inputs = inputs
        if self.data is not None:
            self.data.use_inputs(inputs)
        elif isinstance(self.sampler, StreamSampler):
            self.sampler.use_inputs(inputs)

    def configure_reports(self) -> None:
        """Make monitors and log of this rank; rank 0's alone write."""
        self.monitor = MonitorMaster(self._config.monitor_config if self.global_rank >= 0 else NO_MONITORS)
        self.step_log = StepLog(
            self.global_rank,
            steps_file=self.hydra_config.steps_file,
            plans_file=self.hydra_config.plans_file,
            steps_per_print=self.steps_per_print() or 1,
            write_events=self.monitor.write_events if self.monitor.enabled else None,
        )
        atexit.register(self.step_log.close)

    # What the subclass calls.

    def install_optimizer(self, shards: Sequence[Sequence[Tensor]]) -> Optimizer:
        """Make optimizer and LR scheduler over this rank's master shards: `shards[i]` belong to `recipe.groups[i]`."""
        self.optimizer = self.basic_optimizer = self.recipe.build(shards)
        vars(self.optimizer)["overflow"] = False  # where Accelerate looks whether a step was skipped
        try:
            with quietly():
                self._configure_lr_scheduler()
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"the LR scheduler cannot be made: {error}; correct scheduler.params, or the lr_scheduler given to "
                "initialize()"
            ) from error
        refuse_metrics_scheduler(self.lr_scheduler)
        return self.optimizer

    def refuse_further_steps(self) -> None:
        """Raise ConfigError when the job has made all steps that the config asks for."""
        step, total_steps = self.global_steps + 1, self.hydra_config.total_steps
        if total_steps is not None and step > total_steps:
            raise ConfigError(
                f"step {step} was asked for, but training ends with hydra.total_steps {total_steps}: loop "
                "with `for _ in loader`, which ends there after a restart too, or raise it"
            )

    def finish_step(self, record: StepRecord, *, schedule: bool = True) -> None:
        """Record a finished step: counters, gradient norm, LR schedule, log line, JSON line, monitors.

        The LR schedule does not move in a skipped step, as in DeepSpeed, nor where `schedule` says so.
        """
        assert record.step == self.global_steps + 1, f"step {record.step} follows step {self.global_steps}"
        self.global_steps = record.step
        self.global_samples += record.num_sequences
        self.micro_steps += sum(record.num_micro_batches)
        self.skipped_steps += record.skipped
        self._global_grad_norm = record.grad_norm
        self._step_applied = not record.skipped
        if self.optimizer is not None:
            vars(self.optimizer)["overflow"] = record.skipped
        if self.lr_scheduler is not None and schedule and not record.skipped:
            self.lr_scheduler.step(**self._lr_kwargs)
        self.last_step = replace(record, total_steps=self.hydra_config.total_steps)
        self.step_log.add(self.last_step)

    def take_rank(self, rank: int, num_ranks: int) -> None:
        """From now on this process is another rank, of so many: step lines, files and monitors are rank 0's."""
        was_first, first = self.global_rank == 0, rank == 0
        self.global_rank, self.world_size = rank, num_ranks
        if first and not was_first:
            atexit.unregister(self.step_log.close)
            self.configure_reports()
            if (
                package := logging.getLogger("ds_hydra")
            ).level == logging.WARNING:  # as `show_log` has set other ranks'
                package.setLevel(logging.INFO)

    # What DeepSpeed's releases since 0.19 have, over those since 0.18.6 too.

    def log_level(self) -> str | None:
        """The config's `log_level`; None in releases that do not read one."""
        return getattr(self._config, "log_level", None)

    def _configure_python_gc(self) -> None:
        """Python's garbage collection as the config asks for it, in releases that have such a setting."""
        if configure := getattr(super(), "_configure_python_gc", None):
            configure()

    def __getattr__(self, name: str) -> Any:
        """What neither the engine nor its class has, from the model. Before 0.19 a module of the engine, such as
        `module` itself, was looked for without end."""
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("module")
        try:
            return getattr(model, name)
        except AttributeError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    # What users call.

    def train_batch_size(self) -> int:
        """Sequences of an update. Where steps are drawn from training_data or the config has no batch size: those of
        the last step, or of the first one before it has run, where that is known."""
        whole = self._batch_sizes().whole if self.sampler is None else None
        if whole is not None:
            return whole
        if self.last_step is not None:
            return self.last_step.num_sequences
        return len(self.sampler.batch(0)) if self.sampler is not None and self.sampler.known_to_all else 0

    def train_micro_batch_size_per_gpu(self) -> int:
        """Sequences of a batch that the script hands in: the config's, or what its other batch sizes make it, or 1."""
        return self._batch_sizes().micro

    def gradient_accumulation_steps(self) -> int:
        """Batches of each rank in a step of the three calls: the config's, or what its batch sizes make it, or 1."""
        return self._batch_sizes().accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the batches of a step of the three calls; a batch stays as large. ConfigError beside training_data."""
        if self.sampler is not None:
            refuse_batch_size(f"set_train_batch_size({train_batch_size})")
        micro = self._batch_sizes().micro
        steps, left = divmod(train_batch_size, micro * self.world_size)
        if left or steps < 1:
            raise ConfigError(
                f"set_train_batch_size({train_batch_size}): give a multiple of train_micro_batch_size_per_gpu {micro} "
                f"times {self.world_size} ranks"
            )
        self._set_batch_sizes = dict(zip(BATCH_KEYS, (train_batch_size, micro, steps), strict=True))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the sequences of a batch that the script hands in. ConfigError beside training_data."""
        if self.sampler is not None:
            refuse_batch_size(f"set_train_micro_batch_size({micro_batch_size})")
        steps = self._batch_sizes().accumulation
        whole = micro_batch_size * steps * self.world_size
        self._set_batch_sizes = dict(zip(BATCH_KEYS, (whole, micro_batch_size, steps), strict=True))

    def _batch_sizes(self) -> BatchSizes:
        return batch_sizes({**self.config, **self._set_batch_sizes}, self.world_size)

    def get_global_grad_norm(self) -> Tensor | None:  # type: ignore[override]  # a tensor, as DeepSpeed hands out
        """Norm of the gradients of the last step before clipping, () in FP32; None before the first step."""
        norm = self._global_grad_norm
        return None if norm is None else torch.tensor(norm, dtype=torch.float32, device=self.device)

    @property
    def data_parallel_group(self) -> Any:
        """All ranks, for a script's own collectives; which ranks share a pipeline changes from step to step."""
        return dist.group.WORLD

    seq_data_parallel_group = data_parallel_group

    @property
    def dp_world_size(self) -> int:
        """Number of ranks, each of which hands in batches of its own."""
        return int(self.world_size)

    seq_dp_world_size = dp_world_size

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        """Of each parameter of the model its name there."""
        return {parameter: name for name, parameter in self.module.named_parameters()}

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`module.generate`, with the whole model on every rank meanwhile. All ranks must call it."""
        model: Any = self.module
        return model.generate(*args, **kwargs)

    def scale(self, loss: Any) -> Any:
        """The loss itself, for `engine.scale(loss).backward()`: losses are scaled in the step, where FP16 needs it."""
        return loss

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing to do: batches are collected, and no gradient is computed before the boundary."""
        return nullcontext()

    compile = refused_call("compile", "stages are not compiled as a whole; leave it out")
    allreduce_gradients = refused_call("allreduce_gradients", "engine.step() sums gradients over all ranks")
    buffered_allreduce_fallback = refused_call("buffered_allreduce_fallback", "engine.step() sums gradients")
    register_compile_pass = refused_call("register_compile_pass", "stages are not compiled as a whole; leave it out")
    clip_fp32_gradients = refused_call("clip_fp32_gradients", "set gradient_clipping in the config")
    set_data_post_process_func = refused_call("set_data_post_process_func", "change items in the dataset")
    set_custom_curriculum_learning_schedule = refused_call(
        "set_custom_curriculum_learning_schedule", "hand the sequences of each step in, by train_batch(sequences)"
    )

    def destroy(self) -> None:
        """Print the summary, and release what DeepSpeed's engine would."""
        for name in ("step_log", "sampler", "_flags"):  # where the constructor came to them
            if (part := self.__dict__.get(name)) is not None:
                part.close()
                atexit.unregister(part.close)
        super().destroy()
