"""`train`: what it is asked for, checked, and a job on a Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ds_hydra.ray.actor import Work
from ds_hydra.ray.places import RayJob, ray_module
from ds_hydra.zero_hetero.errors import ConfigError

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


def train(
    work: str | os.PathLike[str] | Callable[..., Any],
    arguments: Sequence[Any] = (),
    *,
    ranks: int,
    most: int | None = None,
    respawn: int = 8,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    wait_seconds: float = 60.0,
    runtime_env: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Run a script, or a function, on `ranks` processes of a Ray cluster, and return when they have ended.

    `arguments` are the script's words, or what the function is called with. Each rank gets `resources`: one GPU and one
    CPU if left out, or one CPU where the cluster has no GPUs. Ray may take up to `wait_seconds` until they are there.
    `strategy` is how Ray places the ranks, one of PACK, SPREAD, STRICT_PACK and STRICT_SPREAD. `runtime_env` is Ray's,
    of the actors.

    Jobs whose config has the block `hydra.elastic` go on when ranks die: up to `respawn` are started again, to join.
    With `most` above `ranks` the job also grows to that many when the cluster has room for more.

    Returns what the function has returned in each process that came to its end, in the order of the places, and an
    empty list for a script. Raises ConfigError for what cannot be started; otherwise the error whose exit code the
    ranks ended with (ConfigError, PlanError, CheckpointError), or RuntimeError, with the last lines of a rank.
    """
    ray, own = ray_module(), False
    packed = _packed(ray, work, arguments)
    _check_numbers(ranks, most, respawn, strategy, resources)
    if not ray.is_initialized():
        ray.init()
        own = True
    try:
        need = dict(resources or _usual(ray.cluster_resources()))
        job = RayJob(packed, ranks, need, respawn, strategy, dict(runtime_env or {}))
        try:
            job.place(most or ranks, wait_seconds)
            job.run()
            return job.results()
        finally:
            job.close()
    finally:
        if own:
            ray.shutdown()


def _packed(ray: Any, work: Any, arguments: Sequence[Any]) -> Work:
    path = tuple(entry or os.getcwd() for entry in sys.path)
    if isinstance(arguments, str):
        raise ConfigError(f"arguments={arguments!r} must be a list of them, but is a string: split it")
    if callable(work):
        try:
            function = ray.cloudpickle.dumps((work, tuple(arguments)))
        except Exception as error:
            name = getattr(work, "__qualname__", type(work).__name__)
            raise ConfigError(
                f"the function {name}, or what it is called with, cannot be sent to other processes ({error}): make "
                "locks, open files, process groups and models within it, or give a script"
            ) from error
        return Work((), function, os.getcwd(), path)
    if not isinstance(work, (str, os.PathLike)):
        raise ConfigError(f"train() runs a script's path or a function, but was given a {type(work).__name__}")
    if wrong := [word for word in arguments if not isinstance(word, (str, os.PathLike))]:
        raise ConfigError(f"a script's arguments are strings, but {wrong[0]!r} is a {type(wrong[0]).__name__}")
    return Work(tuple(map(os.fspath, (work, *arguments))), b"", os.getcwd(), path)


def _check_numbers(ranks: Any, most: Any, respawn: Any, strategy: str, resources: Mapping[str, float] | None) -> None:
    for name, value, least in (("ranks", ranks, 1), ("most", most, ranks), ("respawn", respawn, 0)):
        if not (name == "most" and value is None) and (type(value) is not int or value < least):
            raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}")
    if strategy not in _STRATEGIES:
        raise ConfigError(f"strategy={strategy!r} is none of Ray's: {', '.join(_STRATEGIES)}")
    if resources is not None and not (resources and all(amount > 0 for amount in resources.values())):
        raise ConfigError(
            f"resources={dict(resources)} must name what a rank needs, each above 0, such as {{'GPU': 1, 'CPU': 8}}"
        )


def _usual(cluster: Mapping[str, float]) -> dict[str, float]:
    return {"GPU": 1.0, "CPU": 1.0} if cluster.get("GPU") else {"CPU": 1.0}
