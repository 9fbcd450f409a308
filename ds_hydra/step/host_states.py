"""FP32 masters and optimizer states of a rank in the host's memory; the device updates them, some elements at a time.

[Note: updates by runs]
Masters and Adam's moments take 12 bytes of an element, and are needed for a moment of each step. On the host they leave
the device's memory to activations. The update stays the optimizer's own, on the device: it looks at one element at a
time, so it may be called for one run of them after the other. Of three runs, with copies in queues of their own:

  to the device    0  1  2
  update              0  1  2
  to the host            0  1  2

At most RUNS_AT_ONCE of the memory model are on the device. Gradients are there already, where pushes have summed them.
A run begins where a parameter of the optimizer does, and ends before it has RUN elements; so each element is updated in
the operator, and at the place in it, that it has where states are on the device, and results are equal to the bit.

Between updates the optimizer's parameters show zeros of their shape, as their gradients must be on the same device.
Pulls read masters from the host, and send what was cast to the compute dtype on the device.
"""

from __future__ import annotations

import copy
import logging
import weakref
from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hydra.pipe.on_host import Coming, HostStore
from ds_hydra.zero_hetero.masters import MasterShards, as_tensors

logger = logging.getLogger(__name__)

RUN = 1 << 24
"""Elements of a run: 64 MiB of each state, copied in 1.3 ms at 50 GB/s."""

_Key = tuple[str, torch.dtype]


class _Part(NamedTuple):
    """A parameter of the optimizer: elements [start, stop) of its run."""

    param: nn.Parameter
    start: int
    stop: int


class _Run(NamedTuple):
    """Elements [start, stop) of the masters' `flat`."""

    start: int
    stop: int
    parts: tuple[_Part, ...]


class HostStates:
    """A rank's masters, which are `on_host`, with the states of their optimizer."""

    def __init__(self, masters: MasterShards):
        self._masters, self._device = masters, masters.device
        # One queue for each direction: a link carries both at once.
        self._up, self._down = HostStore(masters.device), HostStore(masters.device)
        self._own: _Key = ("", masters.flat.dtype)  # the masters, beside states by their names
        self._homes = {self._own: self._locked(masters.flat)}
        self._cut: list[_Run] = []

    def bring_home(self, optimizer: Optimizer) -> None:
        """Give each state of the optimizer its place on the host, where it was made or loaded elsewhere."""
        for run in self._runs():
            for key, part, value in _states(optimizer, run):
                home = self._home(key)[run.start + part.start : run.start + part.stop]
                if value.data_ptr() != home.data_ptr():
                    optimizer.state[part.param][key[0]] = home.copy_(value)

    def step(self, optimizer: Optimizer) -> None:
        """The optimizer's step of all masters, run by run; states must be at home. Returns when all are again."""
        runs, groups = self._runs(), optimizer.param_groups
        if not runs:
            optimizer.step()
            return
        whole = [group["params"] for group in groups]
        options = [
            {key: own for key, own in group.items() if key != "params" and not isinstance(own, Tensor)}
            for group in groups
        ]
        options = copy.deepcopy(options)
        coming = self._bring(optimizer, runs[0])
        try:
            for number, run in enumerate(runs):
                here = {key: one.take() for key, one in coming.items()}
                coming = self._bring(optimizer, runs[number + 1]) if number + 1 < len(runs) else {}
                for group, params, own in zip(groups, whole, options, strict=True):
                    group["params"] = params if len(runs) == 1 else _among(params, run)
                    group |= copy.deepcopy(own)  # as before it: the step of another run may have counted there
                self._show(optimizer, run, here)
                optimizer.step()
                self._put_back(optimizer, run, here)
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
        self._down.settle()
        if self._device.type != "cpu":  # whoever reads them on the host need not ask
            get_accelerator().synchronize()

    def fill(self, host: Tensor, there: Tensor) -> None:
        """Copy masters to memory of the device of any type, a run at a time."""
        pieces = list(zip(host.split(RUN), there.split(RUN), strict=True))
        coming = [self._up.up(part) for part, _ in pieces[:1]]
        for number, (_, target) in enumerate(pieces):
            here = coming.pop().take()
            coming += [self._up.up(part) for part, _ in pieces[number + 1 : number + 2]]
            target.copy_(here)

    def _runs(self) -> list[_Run]:
        """All elements, in runs of the optimizer's parameters, which `param_groups` has cut."""
        if not self._cut:
            first = at = 0
            parts: list[_Part] = []
            for param, _, start, stop in self._masters.spans:  # which lie side by side, in the order of `flat`
                if parts and at + stop - start - first > RUN:
                    self._cut.append(_Run(first, at, tuple(parts)))
                    first, parts = at, []
                parts.append(_Part(param, at - first, at - first + stop - start))
                at += stop - start
            self._cut += [_Run(first, at, tuple(parts))] if parts else []
            assert at == self._masters.flat.numel(), "each element is in one parameter"
        return self._cut

    def _bring(self, optimizer: Optimizer, run: _Run) -> dict[_Key, Coming]:
        """Begin to copy a run's masters and states to the device."""
        keys = dict.fromkeys([self._own, *(key for key, _, _ in _states(optimizer, run))])
        return {key: self._up.up(self._home(key)[run.start : run.stop]) for key in keys}

    def _show(self, optimizer: Optimizer, run: _Run, here: dict[_Key, Tensor]) -> None:
        """Let the optimizer have what came to the device."""
        for key, part, _ in _states(optimizer, run):
            optimizer.state[part.param][key[0]] = here[key][part.start : part.stop]
        with as_tensors():
            for param, start, stop in run.parts:
                param.data = here[self._own][start:stop]

    def _put_back(self, optimizer: Optimizer, run: _Run, here: dict[_Key, Tensor]) -> None:
        """Begin to copy a run back to the host, with states that the update has made."""
        for key, part, value in _states(optimizer, run):
            if key not in here:
                here[key] = torch.zeros(run.stop - run.start, dtype=key[1], device=self._device)
            _same(here[key][part.start : part.stop], value)
            optimizer.state[part.param][key[0]] = self._home(key)[run.start + part.start : run.start + part.stop]
        with as_tensors():
            for param, start, stop in run.parts:
                param.data = torch.zeros((), dtype=param.dtype, device=self._device).expand(stop - start)
        for key, memory in here.items():
            self._down.down(memory, self._home(key)[run.start : run.stop])

    def _home(self, key: _Key) -> Tensor:
        """Of a state of all elements; zeros where there was none."""
        if key not in self._homes:
            self._homes[key] = self._locked(torch.zeros(self._masters.flat.numel(), dtype=key[1]))
        return self._homes[key]

    def _locked(self, host: Tensor) -> Tensor:
        """The tensor, in memory that a device reads by itself."""
        # As it is: what torch's own allocator of such memory gives out is rounded up to a power of two, of which states
        # of all elements could take twice what they need.
        if self._device.type != "cuda" or not host.nbytes:
            return host
        where, cudart = host.data_ptr(), torch.cuda.cudart()
        if int(cudart.cudaHostRegister(where, host.nbytes, 1)):
            logger.warning(
                "%d MiB of the host's memory cannot be locked for the device: updates are equal, and slower; `ulimit "
                "-l` says how much may be", host.nbytes >> 20,
            )  # fmt: skip
        else:
            weakref.finalize(host, cudart.cudaHostUnregister, where)
        return host


def _states(optimizer: Optimizer, run: _Run) -> list[tuple[_Key, _Part, Tensor]]:
    """The element-wise states of a run's parameters."""
    return [
        ((name, value.dtype), part, value)
        for part in run.parts
        for name, value in optimizer.state.get(part.param, {}).items()
        if isinstance(value, Tensor) and value.shape == (part.stop - part.start,)
    ]


def _among(params: list[nn.Parameter], run: _Run) -> list[nn.Parameter]:
    own = {id(part.param) for part in run.parts}
    return [param for param in params if id(param) in own]


def _same(there: Tensor, value: Tensor) -> None:
    """See to it that memory has a value, which usually lies there."""
    if there.data_ptr() != value.data_ptr():
        there.copy_(value)
