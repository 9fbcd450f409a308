"""The model's parameters while its engine trains: copies of the masters' values, and what a script changes in them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_hydra.engine.crew import Crew
from ds_hydra.host.host_engine import HostEngine
from ds_hydra.host.kept_model import KeptModel, Twin
from ds_hydra.host.optimizers import hooks_of_steps
from ds_hydra.host.own_updates import guard_updates
from ds_hydra.host.released import Values, release
from ds_hydra.host.three_calls import ThreeCalls
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.step.update import ModelNow


class Weights:
    """Of one engine, whatever its ranks; `crew` gives its present parts."""

    def __init__(
        self,
        host: HostEngine,
        source: ModelSource,
        calls: ThreeCalls,
        crew: Callable[[], Crew],
        gradients_wait: Callable[[], bool],
    ):
        """Free the model's own parameters; in their place stand some that ask the masters for their values."""
        self._host, self._aliases, self._calls, self._crew = host, source.aliases, calls, crew
        self._source: Any = source
        self._moved: dict[str, Tensor] = {}  # buffers of layers that a script has written to, by path
        buckets = {param.name: [other.name for other in bucket.params]
                   for bucket in crew().masters.buckets for param in bucket.params}  # fmt: skip
        self.lent = Values(
            buckets,
            gather=lambda names: crew().masters.gather(crew().world.group, names),
            revision=lambda: (id(crew()), crew().masters.revision, host.global_steps),
            wide=[param.name for bucket in crew().masters.buckets if bucket.wide for param in bucket.params],
            device=host.device,
            dtype=host.types.compute,
            gradients_wait=lambda: gradients_wait() or calls.shows_gradients,
            load=lambda whole: crew().masters.take(whole),
        )
        release(base_of(host.module), self.lent, source.aliases)

    def watch_model(self) -> None:
        """From now on every update asks what a script has changed in its model since."""
        update, module, layers = self._crew().update, self._host.module, getattr(self._source, "layers_path", "")
        optimizer = update.optimizer
        host, source, base = self._host, self._source, base_of(module)
        wide = getattr(source, "wide", ())
        kept = KeptModel(
            base, self._aliases, steps_differ=lambda: self._crew().update.counts_steps, speaks=host.global_rank == 0,
            # A layer list has no forward but its layers' own.
            twin=partial(Twin, base, self._aliases, host.types.compute, wide, host.device) if layers else None,
        )  # fmt: skip

        def moved() -> Mapping[str, Tensor]:
            found = kept.moved(layers) if layers else {}
            for path, buffer in found.items():
                self._source.template.get_buffer(path).copy_(buffer)  # of which later stages are made
                self._moved[path] = buffer
            return self._moved

        def now() -> ModelNow:
            with self._crew().activity("comparing the model with what it was"):
                written, found = self.lent.problem(), kept.now(host.global_steps + 1, *self._crew().stepper.sample)
            found = found._replace(moved=_digest(self._moved))
            problem = written or found.problem or hooks_of_steps(optimizer) or self._set_by_hand(optimizer, module)
            return found._replace(problem=problem)

        update.model, self._crew().stepper.runtimes.moved = now, moved
        if self._host.hydra_config.elastic is None:
            self._crew().help = self.lent.help_others
        guard_updates(optimizer, updating=lambda: self._crew().update.is_updating,
                      before_dropping=self._calls.refuse_dropping)  # fmt: skip

    def _set_by_hand(self, optimizer: Optimizer, module: Any) -> str:
        """What a script has put in the place of what the engine trains, and by what, in words."""
        host = self._host
        if host.module is not module:
            return (
                f"engine.module was set to a {type(host.module).__name__}, which would not be trained: the engine goes "
                f"on with the {type(module).__name__} that it was made of. Give the other model to "
                "ds_hydra.initialize(model=...)"
            )
        if host.optimizer is not optimizer:
            return (
                f"engine.optimizer was set to a {type(host.optimizer).__name__}, which makes no updates: the engine "
                f"goes on with the {type(optimizer).__name__} of the ranks' masters. Pass the optimizer to "
                "ds_hydra.initialize(optimizer=...), made of the model's parameters before it"
            )
        moved = self._crew().masters.trained.moved_parameters(optimizer.param_groups)
        return moved and (
            f"{moved} were changed after the engine was made: they are parts of the ranks' masters. Give the "
            "optimizer its groups before ds_hydra.initialize(); freeze by requires_grad_(False) of engine.module's"
        )


def _digest(moved: Mapping[str, Tensor]) -> str:
    whole = hashlib.sha256()
    for path, buffer in sorted(moved.items()):
        whole.update(path.encode() + buffer.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return whole.hexdigest() if moved else ""
