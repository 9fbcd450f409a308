"""DeepSpeed's checkpoint methods, on an engine that has a `Checkpointer`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_hydra.checkpoint.checkpointer import Checkpointer, PartsToLoad
from ds_hydra.checkpoint.pretrained import gather_weights, load_pretrained, write_pretrained
from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.engine.signals import LEAVE, NOTHING, Signals
from ds_hydra.ranks.world import World
from ds_hydra.watchdog import Watchdog
from ds_hydra.zero_hetero.errors import CheckpointError, NumericsError

if TYPE_CHECKING:
    import torch

    from ds_hydra.engine.plan_source import PlanSource
    from ds_hydra.pipe.stage import ModelSource
    from ds_hydra.report.log import StepLog
    from ds_hydra.step.model_masters import ModelMasters
    from ds_hydra.step.strategy_runtime import StrategyRuntime

logger = logging.getLogger(__name__)


class CheckpointFace:
    """What users call to save and load. Every rank must call it, with the same arguments."""

    hydra_config: HydraConfig
    step_log: StepLog
    global_steps: int
    module: Any
    compute_dtype: torch.dtype
    _masters: ModelMasters
    _source: ModelSource
    _world: World
    _checkpoints: Checkpointer
    _plans: PlanSource
    _signals: Signals
    _watchdog: Watchdog
    _phase: str
    _running: StrategyRuntime | None

    if TYPE_CHECKING:  # the engine's

        def destroy(self) -> None: ...

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
        memory; an error of that save is raised by the next. Raises CheckpointError on all ranks alike.
        """
        config = self.hydra_config.checkpoint
        with self._phase_of("saving"):
            self._checkpoints.save(
                Path(save_dir),
                tag,
                client_state,
                save_latest=save_latest,
                with_frozen=not exclude_frozen_parameters,
                keep_last=config.keep_last if config else None,
                background=bool(config and config.asynchronous),
            )
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
        """(path, client_state) of what was loaded: `tag`, or the one that `latest` names.

        Any number of ranks loads what any other number saved. `load_module_only` loads parameters and leaves optimizer,
        schedule, steps and data as they are. (None, {}) where nothing was ever saved; CheckpointError on all ranks for
        whatever is damaged or ambiguous, and then nothing has changed.
        """
        if custom_load_fn is not None or not load_module_strict:
            raise CheckpointError(
                "load_checkpoint(custom_load_fn=..., load_module_strict=False) is not supported: a checkpoint holds "
                "exactly the model's parameters; load others with load_16bit_model()"
            )
        what = PartsToLoad(load_optimizer_states, load_lr_scheduler_states, not load_module_only)
        with self._phase_of("loading"):
            loaded = self._checkpoints.load(Path(load_dir), tag, what)
        if loaded[0] is not None and what.progress:
            self._moved()
        return loaded

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
        that was loaded). The folder's file names are Hugging Face's. Every rank must call it.
        """
        if save_filename is not None or exclude_frozen_parameters:
            raise CheckpointError(
                "save_16bit_model(save_filename=..., exclude_frozen_parameters=True) is not supported: it writes a "
                "whole Hugging Face folder under its usual names"
            )
        with self._phase_of("saving"):
            weights = gather_weights(self._masters, self._world.links, self.compute_dtype)
            error: Exception | None = None
            try:
                if self._world.rank == 0:
                    write_pretrained(
                        Path(save_dir),
                        self.module,
                        weights,
                        self._source.aliases,
                        max_shard_size=max_shard_size,
                        tokenizer=tokenizer,
                    )
            except (OSError, CheckpointError) as raised:
                error = raised
            self._world.channel.settle(error, f"saving the model in {str(save_dir)!r}")
        return True

    def load_16bit_model(self, load_dir: str | Path) -> None:
        """Take the parameters of a Hugging Face folder; steps, optimizer and data stay. Every rank must call it.

        A rank reads of each parameter only what it owns, so no rank holds the whole model.
        """
        with self._phase_of("loading"):
            load_pretrained(self._masters, Path(load_dir), self._source.aliases, self.module, self._world)

    def wait_for_checkpoint(self) -> None:
        """Return when no save is under way; raises what the last one in the background raised."""
        self._checkpoints.writer.wait()

    def _resume(self) -> None:
        """Begin where hydra.checkpoint.dir ends, if it is to be so."""
        config = self.hydra_config.checkpoint
        if config is not None and config.resume and self._checkpoints.load_newest(Path(config.dir)) is not None:
            self._moved()

    def _save_when_due(self, request: int) -> None:
        """Save if the config or a signal says so; leave if a signal says so."""
        config = self.hydra_config.checkpoint
        if config is None:
            return
        due = config.every > 0 and self.global_steps % config.every == 0
        if due or request:
            self.save_checkpoint(config.dir)
            if self._signals.request <= request:  # else it came after this step had asked all ranks
                self._signals.request = NOTHING
        if request == LEAVE:
            self.wait_for_checkpoint()
            logger.info("saved step %d and leaving, as a signal asked for", self.global_steps)
            self.destroy()
            sys.exit(0)

    @contextmanager
    def _phase_of(self, name: str) -> Iterator[None]:
        """A phase that all ranks are in together: what one of them raises concerns the others.

        Errors of checkpoints and numerics are raised on all ranks alike, so each may be dealt with where it is raised.
        """
        before, self._phase = self._phase, name
        try:
            yield
        except (CheckpointError, NumericsError):
            raise
        except BaseException as error:
            self._watchdog.report(error)
            raise
        finally:
            self._phase, self._running = before, None

    def _moved(self) -> None:
        """Training goes on at another step."""
        self._plans.restart()
        self.step_log.rewind(self.global_steps)
