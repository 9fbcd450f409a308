"""Moves parameters, optimizer states and gradients of a job to the host's memory and back: the engine's `to`.

[Note: states on the host]
An inference engine on the same devices needs the memory that training has. Of the masters each rank has 1/N, so what it
keeps on the host is small; parameters and gradients of a step are not kept at all, since a pull fills them anew:

  model      values of the masters, to the host; the arena of parameters, gradients and messages, dropped
  optimizer  its states, to the host
  grad       gradients that wait for an update, to the host; memory of such that do not, dropped

Thousands of tensors are views of this memory: shards, pieces, parameters of stages and of the optimizer. The memory
below them shrinks to nothing and comes back, in another place, with the same numbers.

Such a view must not be read meanwhile. So the optimizer's parameters show zeros, and a crew brings back the states that
a part of it reads before it hands this part out. `log_probs` brings no states of the optimizer back, which only an
update needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.optim import Optimizer

from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.step.stepper import Stepper
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.masters import MasterShards, as_tensors

MODEL, OPTIMIZER, GRAD = KINDS = ("model", "optimizer", "grad")


def kinds_of(**asked: bool) -> tuple[str, ...]:
    """The kinds that are asked for, by name."""
    return tuple(kind for kind in KINDS if asked[kind])


def wants_host(device: Any, own: torch.device) -> bool:
    """Whether `to(device)` moves states to the host; else they come back. ConfigError where it can mean neither."""
    try:
        found = torch.device(device)
    except (TypeError, RuntimeError):
        found = None
    if found is not None and found.type == "cpu":
        return True
    if found is None or found.type != own.type or found.index not in (None, own.index):
        raise ConfigError(
            f'engine.to({device!r}): states can be moved to the host, "cpu", and back to the engine\'s own device '
            f"{str(own)!r}; what they are computed in is said by the config"
        )
    return False


class Away:
    """States of one crew that are on the host [Note: states on the host]. No rank waits for another one."""

    def __init__(self, masters: ModelMasters, stepper: Stepper, optimizer: Optimizer):
        self._masters, self._stepper, self._optimizer = masters, stepper, optimizer
        self._held: dict[str, list[Callable[[], None]]] = {}  # what brings each kind back, piece by piece

    @property
    def kinds(self) -> frozenset[str]:
        """What is on the host now."""
        return frozenset(self._held)

    def put(self, kinds: Collection[str]) -> None:
        """Move these kinds to the host. Nothing of the crew may be under way. Where memory of the host is short, what
        was moved so far comes back like all else."""
        _synchronize(self._device)
        waiting, masters = bool(self._stepper.plans), self._masters.trained
        if waiting and MODEL in kinds and not {MODEL, GRAD} & self.kinds:
            masters.keep_grads()  # they may lie in the arena
        movers = {MODEL: self._model, OPTIMIZER: self._states, GRAD: lambda: self._grads(waiting)}
        for kind in KINDS:
            if kind in kinds and kind not in self._held:
                pieces = self._held[kind] = []
                for piece in movers[kind]():
                    pieces.append(piece)  # one by one, for where the next one fails
        if MODEL in kinds and not waiting:
            masters.forget_grads()  # which lay in the arena
        _synchronize(self._device)
        if self._device.type != "cpu":
            get_accelerator().empty_cache()

    def bring_back(self, kinds: Collection[str] = KINDS) -> None:
        """Move these kinds back to the device; where its memory is short, a later call goes on."""
        if not self._held:
            return
        for kind in KINDS:
            pieces = self._held.get(kind)
            if kind not in kinds or pieces is None:
                continue
            while pieces:
                pieces[0]()
                pieces.pop(0)
            del self._held[kind]
        _synchronize(self._device)

    @property
    def _device(self) -> torch.device:
        return self._masters.trained.device

    def _model(self) -> Iterator[Callable[[], None]]:
        with as_tensors():
            for span in self._masters.trained.spans:
                span.param.data = _nothing(span.param)
        for masters in (self._masters.trained, self._masters.frozen):
            if not masters.on_host:
                yield from _moved(masters.flat, kept=True)
        yield partial(_show, self._masters.trained)
        arena = self._stepper.arena
        arena.filled = None
        arena.scratch.fit(0)
        for memory in (arena.params, arena.grads):
            yield from _moved(memory, kept=False)

    def _states(self) -> Iterator[Callable[[], None]]:
        if self._masters.trained.on_host:
            return
        for state in self._optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[key] = _on_host(value)
        yield partial(_return_states, self._optimizer, self._device)

    def _grads(self, waiting: bool) -> Iterator[Callable[[], None]]:
        masters = self._masters.trained
        if not waiting:
            masters.forget_grads()
            return
        masters.keep_grads()
        with as_tensors():
            for span in masters.spans:
                span.param.grad = _nothing(span.param)
        yield from _moved(masters.grads[0], kept=True)
        yield partial(_show_grads, masters)


def _moved(of: Tensor, *, kept: bool) -> Iterator[Callable[[], None]]:
    """Free the memory that a tensor is the whole of; what is given back restores it, its numbers if they are `kept`."""
    storage = of.untyped_storage()
    size = storage.nbytes()
    if not size or not storage.resizable():  # on CPUs, where NumPy has seen it: somebody may look at it there
        return
    host = _on_host(_bytes_of(storage)) if kept else None
    _synchronize(of.device)
    storage.resize_(0)

    def restore() -> None:
        storage.resize_(size)
        memory = _bytes_of(storage)
        memory.zero_() if host is None else memory.copy_(host, non_blocking=True)

    yield restore


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _on_host(value: Tensor) -> Tensor:
    """A copy, in memory from which a device reads without the processor's help."""
    host = torch.empty_like(value, device="cpu", pin_memory=value.device.type == "cuda")
    return host.copy_(value, non_blocking=True)


def _return_states(optimizer: Any, device: torch.device) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[key] = value.to(device, non_blocking=True)


def _nothing(param: Tensor) -> Tensor:
    """Zeros of a parameter's shape, without its memory."""
    return torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)


def _show(masters: MasterShards) -> None:
    """Make the optimizer's parameters views of the shards again."""
    with as_tensors():
        for param, bucket, start, stop in masters.spans:
            param.data = masters.shown(bucket, start, stop)


def _show_grads(masters: MasterShards) -> None:
    """Make gradients those of the optimizer's parameters again, but for such that it has dropped meanwhile."""
    with as_tensors():
        for param, bucket, start, stop in masters.spans:
            if param.grad is not None:
                param.grad = masters.grads[bucket][start:stop]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        get_accelerator().synchronize()
