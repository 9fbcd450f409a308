"""Values of the masters for a script that asks by a parameter: gathered when all ranks ask, and lent, not given.

A script that ends with `if rank == 0: torch.save(engine.module.state_dict())` asks on one rank alone. Ranks whose
script has ended help it, for as long as it asks.

What a script writes to them is lost, so it is told of it: when it reads the next value, or before the next update.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.zero_hetero.errors import ConfigError

_WAIT_S = 10.0
_LOOK_S = 0.002
_END_S = 2.0  # how long a rank whose script has ended stays for others that begin to read
_ENGINES = count()  # as many as each other rank has made, in the same order
_CLOSED = 1 << 32  # more than there are ranks
REMEDY = (
    "Change it before ds_hydra.initialize(); or load a folder of weights by engine.load_16bit_model(folder), a "
    "checkpoint by engine.load_checkpoint(folder). To change or merge weights after training, save them by "
    "engine.save_16bit_model(folder) and load that folder into a plain model"
)


class Values:
    """Where the values are: gathers some of the parameters, by the model's own names; all ranks call it alike."""

    def __init__(
        self,
        buckets: Mapping[str, Sequence[str]],
        gather: Callable[[Sequence[str]], Mapping[str, Tensor]],
        revision: Callable[[], object],
        device: torch.device,
        dtype: torch.dtype,
        gradients_wait: Callable[[], bool] = lambda: False,
        wide: Collection[str] = (),
        load: Callable[[Mapping[str, Tensor]], None] | None = None,
    ):
        """`buckets`: of each parameter those that are gathered with it. `gather` maps names to whole values on CPU.
        `revision`: differs whenever the values do. `dtype`: of floating values that are handed out, but for those that
        are kept `wide`. `gradients_wait`: whether a plain parameter would have a gradient now. `load` takes values that
        all ranks have."""
        self._buckets, self._gather, self._revision = buckets, gather, revision
        self.device, self._dtype, self.gradients_wait, self._wide = device, dtype, gradients_wait, frozenset(wide)
        self._load = load
        self._found: tuple[object, Mapping[str, Tensor]] = (None, {})
        self._held: tuple[object, Mapping[str, Tensor]] = (None, {})
        self._lent: list[tuple[str, weakref.ref[Tensor], int]] = []
        self._last: Tensor | None = None  # kept until the next, for a script that does not keep what it writes to
        self._asks = f"ds_hydra/asks/{next(_ENGINES)}"  # where a rank that reads says what, by engine
        self._problem = ""
        self.training_is_over: Callable[[], Mapping[str, Any]] | None = None
        """Once training is over, what gives the model back to the script: its plain parameters, by name."""

    def of(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of a parameter's value on the device. RuntimeError unless all ranks ask for it."""
        if problem := _written(self._lent[-1:]):
            self._lent.pop()
            raise ConfigError(problem)
        value = self._gathered(name)
        if value is None:
            meet(f"the parameter {name} of engine.module", self._asks, self._buckets[name])
            self._found = self._revision(), self._gather(self._buckets[name])
            value = self._found[1][name]
        narrow = value.is_floating_point() and name not in self._wide
        return value.to(self.device, dtype or (self._dtype if narrow else value.dtype), copy=True)

    def load(self, given: Mapping[str, Tensor]) -> None:
        """Take whole values, by name. All ranks call it with the same ones; RuntimeError on those that waited too long
        for others."""
        assert self._load is not None, "of an engine"
        whole = {name: value.detach() for name, value in given.items()}  # of another engine's model it gathers them
        meet(f"load_state_dict() of {len(whole)} parameters from {min(whole)} on")
        self._load(whole)

    def _gathered(self, name: str) -> Tensor | None:
        """A parameter's present value where it is on this rank."""
        now = self._revision()
        return next((of[name] for revision, of in (self._held, self._found) if name in of and revision == now), None)

    @contextmanager
    def held(self, names: Collection[str]) -> Iterator[None]:
        """Within, each rank has these values and reads them by itself. All ranks enter it together; RuntimeError on
        those that waited too long for others."""
        before, others = self._held, len(names) - 1
        what = f"the parameter {min(names)}{f' with {others} others' if others else ''} of engine.module"
        meet(what, self._asks, sorted(names))
        self._held = self._revision(), {**before[1], **self._gather(sorted(names))}
        try:
            yield
        finally:
            self._held = before

    def help_others(self) -> None:
        """At the end of this rank's script: gather what ranks that go on read, until all have ended or none reads."""
        with suppress(RuntimeError, ValueError):  # the script has destroyed the groups, or the store's rank has left
            store: Any = dist.distributed_c10d._get_default_store()
            num_ranks, ended, until = dist.get_world_size(), f"{self._asks}/ended", time.monotonic() + _END_S
            store.add(ended, 1)
            while store.add(ended, 0) < num_ranks and time.monotonic() < until:
                what, turn, names = json.loads(store.get(self._asks)) if store.check([self._asks]) else ("", "", [])
                if not names or not 0 < store.add(turn, 0) < num_ranks:
                    time.sleep(_LOOK_S)
                    continue
                meet(what)
                self._gather(names)
                until = time.monotonic() + _END_S

    def is_changed(self, name: str, value: Tensor) -> bool:
        """Whether a copy that `of` has just given is another than the parameter's value; so it is taken to be where
        others have been gathered since."""
        right = self._gathered(name)
        return right is None or not torch.equal(value.detach(), right.to(value.device, value.dtype))

    def lend(self, name: str, part: Tensor) -> None:
        """Remember what stands for a parameter's own memory."""
        self._last = part
        self._lent = [lent for lent in self._lent if lent[1]() is not None]
        self._lent.append((name, weakref.ref(part), part._version))

    def take_back(self) -> None:
        """Before a step: what was lent takes no memory of it, and nobody asks later what is written to it."""
        self._problem = self._problem or _written(self._lent)
        self._lent, self._last = [], None

    def problem(self) -> str:
        """What a script has written to before the step, "" if nothing."""
        found, self._problem = self._problem, ""
        return found

    def __deepcopy__(self, memo: Any) -> Values:
        return self


def _written(lent: Sequence[tuple[str, weakref.ref[Tensor], int]]) -> str:
    for name, reference, version in lent:
        part = reference()
        if part is not None and part._version != version:
            return (
                f"a script has written to what it read of the parameter {name} of engine.module, which is a copy: the "
                f"ranks share its value since ds_hydra.initialize(). {REMEDY}"
            )
    return ""


def meet(what: str, asks: str = "", names: Sequence[str] = ()) -> None:
    """Return when all ranks have called this for the same thing; RuntimeError on those that waited too long for others.

    Through the ranks' common store, for a collective that some ranks never come to would hang. Who comes first says at
    `asks` which parameters are then gathered, for ranks whose script has ended.
    """
    num_ranks = dist.get_world_size()
    store: Any = dist.distributed_c10d._get_default_store()
    deadline = time.monotonic() + _WAIT_S
    turns = f"ds_hydra/meet/{what}"
    key, came = "", num_ranks + 1
    while came > num_ranks:  # the turn is over, and who ended it is about to begin the next
        if key:
            time.sleep(_LOOK_S)
        if time.monotonic() > deadline:
            _refuse_alone(what, 0, num_ranks)
        key = f"{turns}/{store.add(turns, 0)}"
        came = store.add(key, 1)
    if came == 1 and asks:
        store.set(asks, json.dumps([what, key, list(names)]))
    if came == num_ranks:
        store.add(turns, 1)
        return
    while came < num_ranks:
        time.sleep(_LOOK_S)
        # Who closes the turn learns in the same moment how many had come: either all pass or none does.
        came = store.add(key, _CLOSED if time.monotonic() > deadline else 0)
        if came >= _CLOSED and came % _CLOSED < num_ranks:
            if came < 2 * _CLOSED:
                store.add(turns, 1)
            _refuse_alone(what, came % _CLOSED, num_ranks)


def _refuse_alone(what: str, came: int, num_ranks: int) -> NoReturn:
    raise RuntimeError(
        f"{what} was read on {came} of {num_ranks} ranks. Each rank has a part of the weights, so all ranks must read "
        "them together, and write on rank 0 alone what they have read: call engine.module.state_dict(), "
        "save_pretrained() or generate() on every rank, or engine.save_16bit_model(folder), which writes on rank 0 "
        "what from_pretrained loads, or engine.fp32_state_dict()"
    )
