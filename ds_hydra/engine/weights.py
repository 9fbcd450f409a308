"""What users of a DeepSpeed engine call for its weights: whole, in checkpoints and folders, or by the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ds_hydra.checkpoint.loading import PartsToLoad
from ds_hydra.engine.crew import Crew
from ds_hydra.engine.job import Job
from ds_hydra.engine.saving import Saving
from ds_hydra.host.kept_model import KeptModel
from ds_hydra.host.lent_values import Values
from ds_hydra.host.optimizers import hooks_of_steps
from ds_hydra.host.released import release
from ds_hydra.host.three_calls import ThreeCallEngine
from ds_hydra.pipe.models.adapted import NAMES_OF_PEFT, base_of, is_peft_model
from ds_hydra.step.update import ModelNow
from ds_hydra.zero_hetero.errors import CheckpointError


class EngineWithWeights(ThreeCallEngine):
    """An engine whose parameters are the master shards of its crew."""

    job: Job
    crew: Crew
    saving: Saving
    lent: Values  # to the script, by the model's parameters

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
        """Write the model, in the type that it is computed in, as a folder that `from_pretrained` loads.

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
        )
        release(base_of(self.module), self.lent, self.job.source.aliases)

    def drop(self) -> None:
        """Let go of the present ranks' parts and groups, in whatever state an error has left them; after torch's own
        group has been destroyed `assemble` may follow.

        The caller must have left the `except` block of that error, and released it (`zero_hetero.errors.release`).
        """
        self.__dict__.pop("saving", None)
        if (steps := self.__dict__.pop("steps", None)) is not None:
            steps.drop()
        if (crew := self.__dict__.pop("crew", None)) is not None:
            crew.drop()

    def watch_model(self) -> None:
        """From now on every update asks what a script has changed in its model since."""
        optimizer = self.crew.update.optimizer
        kept = KeptModel(base_of(self.module), self.job.source.aliases,
                         steps_differ=lambda: any("step" in state for state in optimizer.state.values()))  # fmt: skip

        def now() -> ModelNow:
            written, found = self.lent.problem(), kept.now()
            return found._replace(problem=written or found.problem or hooks_of_steps(optimizer) or "")

        self.crew.update.model = now
