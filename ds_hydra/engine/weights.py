"""What users of a DeepSpeed engine call for its weights: whole, in checkpoints and folders, or by the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from ds_hydra.checkpoint.loading import PartsToLoad
from ds_hydra.engine.crew import Crew
from ds_hydra.engine.job import Job
from ds_hydra.engine.saving import Saving
from ds_hydra.host.kept_model import KeptModel
from ds_hydra.host.lent_values import Values
from ds_hydra.host.optimizers import hooks_of_steps
from ds_hydra.host.own_updates import guard_updates
from ds_hydra.host.released import give_back, release
from ds_hydra.host.three_calls import ThreeCallEngine
from ds_hydra.pipe.models.adapted import NAMES_OF_PEFT, base_of, is_peft_model
from ds_hydra.step.update import ModelNow
from ds_hydra.zero_hetero.errors import CheckpointError

if TYPE_CHECKING:
    from ds_hydra.engine.away import Away


class EngineWithWeights(ThreeCallEngine):
    """An engine whose parameters are the master shards of its crew."""

    job: Job
    crew: Crew
    saving: Saving
    lent: Values  # to the script, by the model's parameters
    away: Away | None = None  # states that are on the host, once there were some

    def fp32_state_dict(self) -> dict[str, Tensor]:
        """Full parameters on CPU by the model's own names, tied ones under each of theirs; FP64 for an FP64 model.

        Every rank must call it, and gets all of them.
        """
        full = self.crew.masters.gather(self.crew.world.links)
        before = NAMES_OF_PEFT if is_peft_model(self.module) else ""
        return {before + path: full[name] for path, name in self.job.source.aliases.items()}

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that training needs to go on, under `save_dir`/`tag` ("global_stepN" by default).

        `client_state` is any JSON. With hydra.checkpoint.asynchronous this returns when the state is copied to host
        memory; an error of that save is raised by the next. Raises CheckpointError on all ranks. Every rank must
        call it.
        """
        with_frozen = not exclude_frozen_parameters
        self.saving.save(save_dir, tag, client_state, save_latest=save_latest, with_frozen=with_frozen)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load the checkpoint `tag`, or the one that the file `latest` names; return its path and its client_state.

        Any number of ranks can load what any other number saved. `load_module_only` loads the parameters and leaves
        optimizer, schedule, steps and data as they are. Returns (None, {}) if nothing was ever saved. Raises
        CheckpointError on all ranks if the checkpoint is damaged or ambiguous; then nothing has changed. Every rank
        must call it.
        """
        # Trainer asks for a load that is not strict where it has adapters.
        if custom_load_fn is not None or not (load_module_strict or is_peft_model(self.module)):
            raise CheckpointError(
                "load_checkpoint(custom_load_fn=..., load_module_strict=False) is not supported: a checkpoint holds "
                "exactly the model's parameters; load others with load_16bit_model()"
            )
        parts = PartsToLoad(load_optimizer_states, load_lr_scheduler_states, not load_module_only)
        return self.saving.load(load_dir, tag, parts)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str | None = None,
        exclude_frozen_parameters: bool = False,
        *,
        max_shard_size: str = "5GB",
        tokenizer: Any = None,
    ) -> bool:
        """Write the model, in the types that it is computed in, as a folder that `from_pretrained` loads.

        Rank 0 gathers and writes safetensors shards, config and tokenizer (the one given, or the one beside the model
        that was loaded). The folder's file names are Hugging Face's. Of a PEFT model the adapters are written, as
        `PeftModel.from_pretrained` loads them. Every rank must call it.
        """
        if save_filename is not None or exclude_frozen_parameters:
            raise CheckpointError(
                "save_16bit_model(save_filename=..., exclude_frozen_parameters=True) is not supported: it writes a "
                "whole Hugging Face folder under its usual names; leave these arguments out"
            )
        self.saving.save_pretrained(save_dir, max_shard_size=max_shard_size, tokenizer=tokenizer)
        return True

    def load_16bit_model(self, load_dir: str | Path) -> None:
        """Load the parameters of a Hugging Face folder; steps, optimizer and data stay. Every rank must call it.

        A rank reads only the part of each parameter that it owns, so no rank holds the whole model.
        """
        self.saving.load_pretrained(load_dir)

    def wait_for_checkpoint(self) -> None:
        """Wait until no save is under way. Raises the error of the last save in the background, if it had one."""
        self.saving.wait()

    def release_model(self) -> None:
        """Free the model's own parameters; in their place stand some that ask the masters for their values."""
        buckets = {param.name: [other.name for other in bucket.params]
                   for bucket in self.crew.masters.buckets for param in bucket.params}  # fmt: skip
        self.lent = Values(
            buckets,
            gather=lambda names: self.crew.masters.gather(self.crew.world.links, names),
            revision=lambda: (id(self.crew), self.crew.masters.revision, self.global_steps),
            device=self.device,
            dtype=self.types.compute,
            gradients_wait=lambda: self.gradients_wait() or self.shows_gradients,
            wide=[param.name for bucket in self.crew.masters.buckets if bucket.wide for param in bucket.params],
        )
        release(base_of(self.module), self.lent, self.job.source.aliases)

    def to(self, device: Any, model: bool = True, optimizer: bool = True, grad: bool = True) -> Any:  # type: ignore[override]  # moves no module
        """Move states to the host ("cpu") or back to the engine's device; returns the engine. Ranks need not agree.

        `model`: the parameters, and all memory that steps use; `optimizer`: its states; `grad`: gradients that wait for
        an update. The host keeps this rank's 1/N in pinned memory, and training goes on as if nothing had been moved,
        to the bit. A call that needs what is on the host brings it back by itself: bring it back before, where others
        use the memory of the device. On CPUs "cpu" does the same, by copies. ConfigError for another device or a type.
        """
        from ds_hydra.engine.away import Away, kinds_of, wants_host

        kinds = kinds_of(model=model, optimizer=optimizer, grad=grad)
        if self.away is None or self.away.crew is not self.crew:
            self.away = Away(self.crew)
        if not wants_host(device, self.device):
            self.away.bring_back(kinds)
            return self
        self.lent.take_back()
        if not self.away.kinds and self.crew.masters.trained.dropped_grads:  # by the optimizer's own zero_grad
            self.zero_grad()
        self.away.put(kinds)
        return self

    def offload_states(self, include: Any = None, device: Any = "cpu", **_: Any) -> None:
        """DeepSpeed's name of `to("cpu")`; `include` are members of its OffloadStateTypeEnum (default: all)."""
        names = ["hp_params", "lp_params", "optim_states", "lp_grads", "contiguous_grad_buffer"]
        kinds = zip(names, ("model", "model", "optimizer", "grad", "grad"), strict=True)
        asked = {getattr(one, "value", one) for one in (names if include is None else include)}
        wanted = {kind for name, kind in kinds if name in asked}
        self.to(getattr(device, "value", device), **{kind: kind in wanted for kind in ("model", "optimizer", "grad")})

    def reload_states(self, **_: Any) -> None:
        """DeepSpeed's name of what brings all states back to the device."""
        if self.away is not None and self.away.crew is self.crew:
            self.away.bring_back()

    def drop(self) -> None:
        """Let go of the present ranks' parts and groups, in whatever state an error has left them; after torch's own
        group has been destroyed `assemble` may follow.

        The caller must have left the `except` block of that error, and released it (`zero_hetero.told.release`).
        """
        self.__dict__.pop("saving", None)
        if (steps := self.__dict__.pop("steps", None)) is not None:
            steps.drop()
        if (crew := self.__dict__.pop("crew", None)) is not None:
            crew.drop()

    @staticmethod
    def given_back(model: Any) -> Any:
        """The model with plain parameters, where another engine has trained it. All ranks must call it."""
        give_back(model)
        return model

    def watch_model(self) -> None:
        """From now on every update asks what a script has changed in its model since."""
        optimizer, module = self.crew.update.optimizer, self.module
        kept = KeptModel(base_of(self.module), self.job.source.aliases,
                         steps_differ=lambda: any("step" in state for state in optimizer.state.values()))  # fmt: skip

        def now() -> ModelNow:
            written, found = self.lent.problem(), kept.now()
            problem = written or found.problem or hooks_of_steps(optimizer) or self._set_by_hand(optimizer, module)
            return found._replace(problem=problem)

        self.crew.update.model = now
        guard_updates(optimizer, updating=lambda: self.crew.update.is_updating, before_dropping=self.before_dropping)

    def _set_by_hand(self, optimizer: Optimizer, module: Any) -> str:
        """What a script has put in the place of what the engine trains, and by what, in words."""
        if self.module is not module:
            return (
                f"engine.module was set to a {type(self.module).__name__}, which would not be trained: the engine goes "
                f"on with the {type(module).__name__} that it was made of. Give the other model to "
                "ds_hydra.initialize(model=...)"
            )
        if self.optimizer is not optimizer:
            return (
                f"engine.optimizer was set to a {type(self.optimizer).__name__}, which makes no updates: the engine "
                f"goes on with the {type(optimizer).__name__} of the ranks' masters. Pass the optimizer to "
                "ds_hydra.initialize(optimizer=...), made of the model's parameters before it"
            )
        moved = self.crew.masters.trained.moved_parameters(optimizer.param_groups)
        return moved and (
            f"{moved} were changed after the engine was made: they are parts of the ranks' masters. Give the "
            "optimizer its groups before ds_hydra.initialize(); freeze by requires_grad_(False) of engine.module's"
        )
