"""Saving and loading for the engine: checkpoints, the moment when they are due, and Hugging Face folders."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hydra.checkpoint.loading import PartsToLoad
from ds_hydra.checkpoint.pretrained import load_pretrained, stored_weights, write_pretrained
from ds_hydra.config.hydra_block import WEIGHTS
from ds_hydra.engine.crew import Crew
from ds_hydra.host.ending import LEAVE, NOTHING, SAVE, Signals
from ds_hydra.host.host_engine import HostEngine
from ds_hydra.pipe.models.adapted import NAMES_OF_PEFT, base_of, is_peft_model, names_with_adapters
from ds_hydra.pipe.stage import dtype_of
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError
from ds_hydra.zero_hetero.told import release

logger = logging.getLogger(__name__)

_TRIES = 7  # of a save that is due, over 64 steps
_PAUSES_S = (1.0, 2.0, 4.0, 8.0)  # between the tries of the last one


class EngineCheckpoints:
    """Saves and loads what a crew trains. Every rank calls the same methods, with the same arguments."""

    def __init__(self, host: HostEngine, crew: Crew, signals: Signals):
        self._host, self._crew, self._signals = host, crew, signals
        self.config = crew.job.config.checkpoint
        self._due = False  # whether the last save was one that the config or a signal asked for
        self._again = -1  # the step after which one that failed is tried again

    def save(
        self,
        folder: str | Path,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        save_latest: bool = True,
        with_frozen: bool = True,
    ) -> None:
        """Save under `folder`/`tag`, in the background where the config says so."""
        self._save(folder, tag, client_state, due=False, save_latest=save_latest, with_frozen=with_frozen)

    def _save(
        self,
        folder: str | Path,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        due: bool,
        save_latest: bool = True,
        with_frozen: bool = True,
    ) -> None:
        if due != self._due:
            self.wait()  # so that what has failed is raised as what it was
        self._due = due
        self._crew.writer.on_failure = partial(_ask_again, self._signals) if due else None
        with self._crew.together("saving"):
            self._crew.checkpoints.save(
                Path(folder),
                tag,
                client_state,
                save_latest=save_latest,
                with_frozen=with_frozen,
                keep_last=self.config.keep_last if self.config else None,
                background=bool(self.config and self.config.asynchronous),
            )

    def load(self, folder: str | Path, tag: object, parts: PartsToLoad) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint; return (path, client_state), or (None, {}) if nothing was ever saved."""
        with self._crew.together("loading"):
            self._crew.next_step.forget()
            checkpoints, group = self._crew.checkpoints, self._crew.world.group
            other = None if parts.progress else checkpoints.load_of_another_engine(Path(folder), tag, group)
            loaded = other or checkpoints.load(Path(folder), tag, parts)
        if loaded[0] is not None and parts.progress:
            self._moved()
        return loaded

    def resume(self) -> None:
        """Load the newest complete checkpoint of hydra.checkpoint.dir, unless `resume` is false; first see that the
        folder can be written. CheckpointError on all ranks."""
        config = self.config
        if config is None:
            return
        checkpoints, folder = self._crew.checkpoints, Path(config.dir)
        with self._crew.together("loading"):
            checkpoints.check_folder(folder)
            if config.resume and checkpoints.resume(folder, weights=config.resume == WEIGHTS) is not None:
                self._moved()

    def _moved(self) -> None:
        """Tell the log that training continues at another step."""
        self._host.step_log.rewind(self._host.global_steps)

    def when_due(self, request: int) -> None:
        """Save if the config or a signal says so; leave if a signal says so. `request` is the largest of all ranks'."""
        if self.config is None:
            return
        step = self._host.global_steps
        if request == LEAVE:
            self._save_now(self.config.dir)
        elif request or step == self._again or (self.config.every > 0 and step % self.config.every == 0):
            self._save_or_later(self.config.dir)
            # The ranks exchanged their requests during the step. A signal that came later, such as SIGTERM during the
            # save that SIGUSR1 asked for, is more than what they know of: it must stay for the next step.
            if self._signals.request <= request:
                self._signals.request = NOTHING
        if request == LEAVE:
            logger.info("saved step %d and leaving, as a signal asked for", step)
            self._host.destroy()
            sys.exit(0)

    def _save_or_later(self, folder: str) -> None:
        """Save; what fails is tried again after 1, 2, 4, ... more steps before it ends the job: a disk may be full, or
        a file system away, for a minute. The same steps on all ranks."""
        failed: CheckpointError | None = None
        try:
            self._save(folder, due=True)
        except CheckpointError as error:
            failed = error
            failures = self._crew.writer.failures
            if not error.passing or failures >= _TRIES:
                raise
            self._again = self._host.global_steps + 2 ** (failures - 1)
            if self._host.global_rank == 0:
                logger.error("%s; try %d of %d, the next one after step %d", error, failures, _TRIES, self._again)
        release(failed)  # or it holds the frames of the save, and the world in them

    def _save_now(self, folder: str) -> None:
        """Save, and wait for it, before the job leaves."""
        for pause_s in (*_PAUSES_S, None):
            failed: CheckpointError | None = None
            try:
                self._save(folder, due=True)
                return self.wait()
            except CheckpointError as error:
                failed = error
                if not error.passing or pause_s is None:
                    raise
                if self._host.global_rank == 0:
                    logger.error("%s; trying again in %.0f s", error, pause_s)
                time.sleep(pause_s)
            release(failed)

    def wait(self) -> None:
        """Wait until no save is under way. Raises the error of the last save in the background, if it had one."""
        self._crew.writer.wait()

    def save_pretrained(self, folder: str | Path, *, max_shard_size: str, tokenizer: Any) -> None:
        """Rank 0 gathers the model, or PEFT's adapters, in its compute type and writes what `from_pretrained` loads."""
        crew, world, aliases = self._crew, self._crew.world, self._crew.job.source.aliases
        if is_peft_model(self._host.module):
            aliases = names_with_adapters(crew.job.model, aliases)
        with crew.together("saving"):
            names = frozenset(aliases.values())
            dtype = crew.job.types.compute
            weights = crew.masters.gather(world.group, names, [0], dtype)
            # Rank 0's error is told to all, so that every rank raises it. If only rank 0 raised, the others would go on
            # to the next step and wait for it there.
            error: Exception | None = None
            try:
                if world.rank == 0:
                    write_pretrained(
                        Path(folder),
                        self._host.module,
                        weights,
                        aliases,
                        dtype,
                        max_shard_size=max_shard_size,
                        tokenizer=tokenizer,
                    )
            except (OSError, CheckpointError) as raised:
                error = raised
            world.channel.settle(error, f"saving the model in {str(folder)!r}")

    def full_parameters(
        self, dtype: torch.dtype | None, ranks: Sequence[int] | None, adapters: str
    ) -> Iterator[tuple[str, Tensor]]:
        """See `HydraEngine.full_parameters`."""
        crew, model, computed_in = self._crew, self._host.module, self._crew.job.types.compute
        dtype_in = partial(dtype_of, dtype=computed_in) if dtype is None else lambda _: dtype
        masters, group, aliases = crew.masters, crew.world.group, crew.job.source.aliases
        if adapters not in ("merged", "alone"):
            raise ConfigError(f'full_parameters(adapters=...) is "merged" or "alone", and not {adapters!r}')
        if not is_peft_model(model):
            if adapters == "alone":
                raise ConfigError('full_parameters(adapters="alone") is of a PEFT model, and this one is none')
            return stored_weights(masters, group, dtype_in, model, ranks)
        from ds_hydra.checkpoint.pretrained import Merged, adapters_alone

        base = base_of(model)
        if adapters == "merged":
            return stored_weights(masters, group, dtype_in, base, ranks, Merged(base, aliases))
        names = names_with_adapters(base, aliases)
        values = masters.gather(group, frozenset(names.values()), ranks)
        return adapters_alone(model, values, names, dtype or computed_in, crew.world.device)

    def fp32_state_dict(self) -> dict[str, Tensor]:
        """See `HydraEngine.fp32_state_dict`."""
        full = self._crew.masters.gather(self._crew.world.group)
        before = NAMES_OF_PEFT if is_peft_model(self._host.module) else ""
        return {before + path: full[name] for path, name in self._crew.job.source.aliases.items()}

    def load_pretrained(self, folder: str | Path) -> None:
        """Load the parameters of a Hugging Face folder; each rank reads only what it owns."""
        crew = self._crew
        with crew.together("loading"):
            load_pretrained(crew.masters, Path(folder), crew.job.source.aliases, self._host.module, crew.world)


def _ask_again(signals: Signals) -> None:
    """A save in the background has failed: its error is raised, and it is tried again, after this step."""
    signals.request = max(signals.request, SAVE)
