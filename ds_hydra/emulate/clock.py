"""Virtual time, the small model whose elements stand for more bytes, and the machine's limits. Pure: no torch.

[Note: small models]
The small plan has the buckets, parameters and shard rules of the true one, and so the same messages between the same
ranks under any strategy. Every parameter is shrunk by one factor, so that messages keep their proportions: a bucket of
two weights of 4096 x 4096 and a norm of 4096 becomes, with the factor 4096, weights of 4096 elements and a norm of 1.
A parameter that is cut keeps as many rows as its cuts need. What an element of a bucket stands for is then the true
bucket's bytes divided by the small one's elements: so a bucket has its true size, whatever rounding did to its parts.
Hidden states are small too: one feature for each token, which stands for all of them.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import NamedTuple

from ds_hydra.pipe.model_plan import Bucket, ModelPlan, ParamSpec
from ds_hydra.ranks.host_memory import available_bytes, number_in
from ds_hydra.simulate.pipeline import SUM_BYTES
from ds_hydra.zero_hetero.errors import ConfigError


class VirtualClock:
    """One rank's time in seconds; it goes back only after what is done `apart`.

    The engine dates what the rank does by it, as by any clock.
    """

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        """Seconds since the cluster was made."""
        return self._now_s

    def seconds(self, begin: float, end: float) -> float:
        """Seconds from one moment to a later one."""
        return end - begin

    def wait(self) -> None:
        """The rank itself is what the time is about: it has come to this moment."""

    def compute(self, seconds: float) -> None:
        """Let the time of some computing pass."""
        self._now_s += seconds

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is done in this context takes its time from now on, and afterwards it is now again."""
        now = self._now_s
        yield
        self._now_s = now

    def wait_until(self, time_s: float) -> None:
        """Go on at `time_s`, or at once if that has passed."""
        self._now_s = max(self._now_s, time_s)


class VirtualLane:
    """Later steps of a transfer take their time beside computing, as they do on a device, and one after the other
    [Note: lanes]."""

    early = True

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._inside = False
        self._free_s = 0.0  # when all that was begun in it is done

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See `Lane`."""
        if self._inside:
            yield
            return
        self._inside = True
        try:
            with self._clock.apart():
                self._clock.wait_until(self._free_s)
                yield
                self._free_s = self._clock.now()
        finally:
            self._inside = False

    def mark(self) -> float:
        """See `Lane`."""
        return self._clock.now()

    def wait(self, mark: float) -> None:
        """See `Lane`."""
        self._clock.wait_until(mark)


# What one rank takes, and some more for further strategies. With 4 strategies each of 8 ranks held 104 MiB that it
# shared with no other, each of 24 ranks 108 MiB; they had up to 19 threads.
RANK_BYTES = 128 << 20
RANK_TASKS = 48  # processes and threads
_COUNTLESS = 1 << 62
_FILES_BESIDE, _FILES_PER_PEER = 64, 6  # a rank holds a connection to every peer in each of its groups


class Limits(NamedTuple):
    """What is left for the ranks of an emulated cluster, and open files that one process may have."""

    memory_bytes: int
    tasks: int
    files: int


def machine_limits() -> Limits:
    """What this machine, this user and this container allow at present."""
    soft_tasks, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    soft_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    tasks = [_COUNTLESS if soft_tasks == resource.RLIM_INFINITY else soft_tasks - _tasks_of_user()]
    most, used = (number_in(f"/sys/fs/cgroup/pids.{name}") for name in ("max", "current"))
    tasks += [most - (used or 0)] if most is not None else []
    files = _COUNTLESS if soft_files == resource.RLIM_INFINITY else soft_files
    return Limits(available_bytes(), min(tasks), files)


def check_ranks(num_ranks: int, limits: Limits) -> None:
    """Raise ConfigError for a number of ranks below 1, or more than can be forked."""
    if num_ranks < 1:
        raise ConfigError(f"an emulated cluster of {num_ranks} ranks; give at least 1")
    per_rank = {
        "bytes of memory": (RANK_BYTES, limits.memory_bytes),
        "processes and threads": (RANK_TASKS, limits.tasks),
    }
    for what, (each, left) in per_rank.items():
        if num_ranks * each > left:
            raise ConfigError(
                f"an emulated cluster of {num_ranks} ranks needs about {num_ranks * each:,} {what} but there are "
                f"{left:,} left: at most {max(0, left // each)} ranks can be forked. Emulate fewer, or free some"
            )
    files = _FILES_BESIDE + _FILES_PER_PEER * num_ranks
    if files > limits.files:
        raise ConfigError(
            f"an emulated cluster of {num_ranks} ranks needs about {files:,} open files in each rank but a process may "
            f"have {limits.files:,}: raise the limit (ulimit -n) or emulate fewer"
        )


def _tasks_of_user() -> int:
    """Threads of this user's processes, which RLIMIT_NPROC counts."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == os.getuid():
                count += len(os.listdir(folder / "task"))
        except OSError:
            continue  # it has ended meanwhile
    return count


ELEMENTS = 1 << 14  # of the largest bucket, about
ROWS = 48  # of a cut parameter without units: divisible by all usual degrees


@dataclass(frozen=True)
class SmallModel:
    """A small plan and what it stands for."""

    plan: ModelPlan
    pulled_bytes: tuple[float, ...]  # by bucket: bytes on the wire that one of its elements stands for in a pull
    pushed_bytes: tuple[float, ...]  # the same in a push, by bucket that has gradients
    summed_bytes: tuple[float, ...]  # the same, of twins' sums on their way to the masters
    feature_bytes: float  # bytes on the wire of one token's hidden state


def small_model(plan: ModelPlan, hidden: int, element_bytes: int, gradient_bytes: int | None = None) -> SmallModel:
    """The small model of a true plan with `hidden` features.

    On the wire parameters and hidden states have `element_bytes`, gradients `gradient_bytes` (None: as many). Names
    have "/" in the place of ".", so that a module can have parameters of these names.
    """
    factor = max(1, ceil(max(bucket.numel for bucket in plan.buckets) / ELEMENTS))
    buckets = tuple(
        Bucket(bucket.name, tuple(_small(p, factor) for p in bucket.params), bucket.trainable, owners=bucket.owners)
        for bucket in plan.buckets
    )
    small = replace(
        plan,
        buckets=buckets,
        first=_renamed(plan.first),
        layers=tuple(_renamed(names) for names in plan.layers),
        last=_renamed(plan.last),
        alignment=1,  # gaps would be as large as norms
        no_token_sharding="the layers of an emulated stage hand all tokens on",
    )
    elements = [true.numel / few.numel for true, few in zip(plan.buckets, buckets, strict=True)]
    trained = [count for count, bucket in zip(elements, buckets, strict=True) if bucket.trainable]
    return SmallModel(
        small,
        tuple(count * element_bytes for count in elements),
        tuple(count * (gradient_bytes or element_bytes) for count in trained),
        tuple(count * SUM_BYTES for count in trained),
        float(hidden * element_bytes),
    )


def _small(param: ParamSpec, factor: int) -> ParamSpec:
    """The parameter with about 1/factor of its elements, the cut dimension first as in flat order."""
    rule, wanted, name = param.rule, param.numel / factor, _small_name(param.name)
    if rule.dim is None:
        return replace(param, name=name, shape=(max(1, round(wanted)),))
    blocks = tuple((units, units) for _, units in rule.blocks)
    rows = sum(units for _, units in blocks)
    rows = rows or rule.parts * (rule.units or min(ROWS, param.shape[rule.dim] // rule.parts))
    rule = replace(rule, dim=0, blocks=blocks)
    return replace(param, name=name, shape=(rows, max(1, round(wanted / rows))), rule=rule)


def _renamed(names: frozenset[str]) -> frozenset[str]:
    return frozenset(map(_small_name, names))


def _small_name(name: str) -> str:
    return name.replace(".", "/")
