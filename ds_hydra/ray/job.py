"""`train`: a job on a Ray cluster, from what is asked for and its placement to its end.

[Note: places]
A job has as many places as it may have ranks, each of them a bundle of resources that Ray keeps for it: those of its
start in one placement group, which Ray gives whole or not at all, any more in a group each. A place whose actor or
process is lost gets another actor in the same bundle, and with it a process that joins. Where the node is lost, too,
Ray moves the bundle to a node that has room, or gains it; until then the actor waits. So does the actor of a place
beyond those of the start. A process that joins needs the job's invitation, which the driver carries from any actor.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_hydra.commands.launch_node import BEFORE_AGAIN_S, REFUSED, Job, code_of, how_ended
from ds_hydra.ray.actor import Ended, Rank, Where, Work
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, PlanError

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


_ASKS_S = 1.0  # an actor answers at least so often
_TURN_S = 0.2
_ANSWER_S = 30.0  # of an actor that lives
_LOST = 137  # exit code of a process whose actor is gone: the system has killed it


def ray_module() -> Any:
    """The package ray; ConfigError where it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"ds_hydra.ray needs Ray ({error}): pip install 'ds-hydra[ray]'") from error


def room(nodes: Sequence[Mapping[str, Any]], need: Mapping[str, float]) -> list[int]:
    """How many ranks each living node of `ray.nodes()` has resources for."""
    return [min(int(node["Resources"].get(name, 0) // amount) for name, amount in need.items())
            for node in nodes if node["Alive"]]  # fmt: skip


@dataclass
class Place:
    """See [Note: places]."""

    number: int
    group: Any
    bundle: int
    actor: Any = None
    asked: Any = None  # what the actor has been asked: where it is, and later how its process has ended
    where: Where | None = None
    lives: bool = False  # whether it has a process
    again: float = 0.0  # when the next actor is made, or the invitation is asked for again; 0 for never
    result: bytes | None = None

    @property
    def on(self) -> str:
        return self.where.address if self.where else "a node that is not known yet"


@dataclass
class RayJob:
    """A job while it runs [Note: places]. The driver alone decides."""

    work: Work
    ranks: int
    need: dict[str, float]
    respawn: int
    strategy: str
    runtime_env: dict[str, Any]
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    places: list[Place] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    last: tuple[str, str] = ("", "")  # of the last that failed: who it was, and its lines
    began: float = field(default_factory=time.monotonic)
    interrupted: bool = False

    def place(self, most: int, wait_s: float) -> None:
        """Get the bundles of the start, and ask for the others."""
        ray, group_of = ray_module(), importlib.import_module("ray.util").placement_group
        found = room(ray.nodes(), self.need)
        if sum(found) < self.ranks:
            _say(f"{self._lack(found)}; waiting {wait_s:.0f} s for more")
        group = group_of([self.need] * self.ranks, strategy=self.strategy)
        self.places = [Place(number, group, number) for number in range(self.ranks)]
        if not group.wait(timeout_seconds=wait_s):
            found = room(ray.nodes(), self.need)
            raise ConfigError(
                f"{self._lack(found)}. Ask for fewer ranks or resources, or raise wait_seconds={wait_s:g}"
                if sum(found) < self.ranks
                else f"the cluster has not had {self.need} free for each of {self.ranks} ranks, placed by "
                f"{self.strategy}, within {wait_s:g} s: others use it, or the strategy cannot be met"
            )
        for number in range(self.ranks, most):
            self.places.append(Place(number, group_of([self.need]), 0))

    def _lack(self, found: Sequence[int]) -> str:
        return (f"{self.ranks} ranks need {self.need} each, and the {len(found)} nodes of the cluster have room for "
                f"{sum(found)} ({' + '.join(map(str, found)) or 'none lives'})")  # fmt: skip

    def run(self) -> None:
        """From the first actor to the end of the last process."""
        for place in self.places:
            self._make_actor(place)
        self._begin(self.places[: self.ranks])
        while any(place.lives for place in self.places):
            try:
                self._turn()
            except KeyboardInterrupt:
                if self.interrupted:
                    raise
                self.interrupted = True
                _say("interrupted: the ranks are told, and may save and leave; once more ends them")
                for place in self.places:
                    if place.lives:
                        place.actor.signal.remote(signal.SIGINT)

    def _make_actor(self, place: Place) -> None:
        ray, scheduling = ray_module(), importlib.import_module("ray.util.scheduling_strategies")
        if place.actor is not None:
            ray.kill(place.actor)
        options: dict[str, Any] = {
            "num_cpus": self.need.get("CPU", 0),
            "num_gpus": self.need.get("GPU", 0),
            "resources": {name: amount for name, amount in self.need.items() if name not in ("CPU", "GPU")},
            "max_restarts": 0,  # Ray would start it without what it was told
            "scheduling_strategy": scheduling.PlacementGroupSchedulingStrategy(
                place.group, placement_group_bundle_index=place.bundle
            ),
        }
        if self.runtime_env:
            options["runtime_env"] = self.runtime_env
        place.actor = ray.remote(Rank).options(**options).remote(self.name)
        place.asked, place.again = place.actor.where.remote(), 0.0

    def _begin(self, places: Sequence[Place]) -> None:
        """Start the ranks, those of a node one after the other."""
        ray = ray_module()
        for place, where in zip(places, self._told([place.asked for place in places]), strict=True):
            place.where = where
        nodes: dict[str, list[Place]] = {}
        for place in places:
            assert place.where is not None, "all have answered"
            nodes.setdefault(place.where.node, []).append(place)
        order = [place for fellows in nodes.values() for place in fellows]
        (port,) = self._told([order[0].actor.port.remote()])
        asked, work = [], ray.put(self.work)
        for fellows in nodes.values():
            for local, place in enumerate(fellows):
                job = _job(fellows, order.index(fellows[0]), len(order), MASTER_ADDR=order[0].on, MASTER_PORT=str(port))
                asked.append(place.actor.begin.remote(work, job, local))
        self._told(asked)
        for place in order:
            place.lives, place.asked = True, place.actor.wait.remote(_ASKS_S)
        counts = ", ".join(f"{len(fellows)} on {fellows[0].on}" for fellows in nodes.values())
        _say(f"{len(order)} ranks have been started: {counts}")

    def _told(self, asked: list[Any]) -> list[Any]:
        """What actors answer; ConfigError if one refuses, RuntimeError where one is lost before the job has begun."""
        from ray.exceptions import RayError, RayTaskError

        try:
            return list(ray_module().get(asked))
        except RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise error.cause from None
            raise
        except RayError as error:
            raise RuntimeError(f"an actor was lost before the job had begun: {_first(error)}") from error

    def _turn(self) -> None:
        from ray.exceptions import ActorUnavailableError, RayError

        ray = ray_module()
        asked = {place.asked: place for place in self.places if place.asked is not None}
        for reference in ray.wait(list(asked), num_returns=len(asked), timeout=_TURN_S)[0]:
            place, answer = asked[reference], None
            try:
                answer = ray.get(reference)
            except ActorUnavailableError:  # it may come back; if it has died, the next answer says so
                place.asked = place.actor.wait.remote(_ASKS_S) if place.lives else place.actor.where.remote()
                continue
            except RayError as error:
                self._over(place, Ended(_LOST, "", True, None), f"is lost to Ray ({_first(error)})")
                continue
            if isinstance(answer, Ended):
                self._over(place, answer, how_ended(answer.code))
            elif isinstance(answer, Where):
                place.where, place.asked, place.again = answer, None, time.monotonic()
            else:
                place.asked = place.actor.wait.remote(_ASKS_S)
        over = self.interrupted or 0 in self.ended
        for place in self.places:
            if place.again and time.monotonic() > place.again and not over:
                if place.where is None:
                    self._make_actor(place)
                else:
                    self._let_join(place, place.where)

    def _let_join(self, place: Place, where: Where) -> None:
        """Start a process that joins, if any rank can say how."""
        from ray.exceptions import RayError

        ray = ray_module()
        place.again = time.monotonic() + _ASKS_S
        for other in self.places:
            if not other.lives:
                continue
            with contextlib.suppress(RayError):
                invitation = ray.get(other.actor.invitation.remote(), timeout=_ANSWER_S)
                if invitation is None:
                    continue
                job = _job([place], 0, 1)
                ray.get(place.actor.join.remote(self.work, invitation, job), timeout=_ANSWER_S)
                place.lives, place.again = True, 0.0
                place.asked = place.actor.wait.remote(_ASKS_S)
                _say(f"a process that joins starts in place {place.number} on {where.address}")
                return

    def _over(self, place: Place, end: Ended, how: str) -> None:
        """A process has ended, or an actor was lost."""
        lived, on = place.lives, place.on
        place.asked, place.lives = None, False
        if lived and end.member:
            self.ended.append(end.code)
        if end.code == 0:
            place.result = end.result
            return
        place.where = None
        then, over = "", self.interrupted or 0 in self.ended
        if self.respawn > 0 and end.code not in REFUSED and not over:
            self.respawn -= 1
            place.again = time.monotonic() + BEFORE_AGAIN_S
            then = f"; another one comes, {self.respawn} more may"
        who = f"place {place.number} on {on} {how} after {time.monotonic() - self.began:.1f} s"
        if lived and end.member:
            self.last = who, end.lines
        _say(f"{who}, {sum(one.lives for one in self.places)} live{then}")

    def results(self) -> list[Any]:
        """What the functions have returned; the error of a job that has failed."""
        code = code_of(self.ended)
        if code:
            who, lines = self.last
            kinds: list[type[Exception]] = [ConfigError, PlanError, CheckpointError]
            kind = {one.exit_code: one for one in reversed(kinds)}.get(code, RuntimeError)  # type: ignore[attr-defined]
            raise kind(f"the job has ended with exit code {code}: {who}. Its last lines:\n{lines.rstrip()}")
        load = ray_module().cloudpickle.loads
        return [load(place.result) for place in self.places if place.result is not None]

    def close(self) -> None:
        """Give everything back."""
        from ray.exceptions import RayError
        from ray.util import remove_placement_group

        ray = ray_module()
        if actors := [place.actor for place in self.places if place.actor is not None and place.where is not None]:
            with contextlib.suppress(RayError):
                ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=5.0)
        for place in self.places:
            with contextlib.suppress(RayError):
                if place.actor is not None:
                    ray.kill(place.actor)
        for group in {place.group.id: place.group for place in self.places}.values():
            remove_placement_group(group)


def _job(fellows: Sequence[Place], first: int, num_ranks: int, **environment: str) -> Job:
    """What the ranks of a node are started with. They see each other's GPUs, of which each takes one by its number."""
    if gpus := [gpu for place in fellows if place.where for gpu in place.where.gpus]:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return Job((), first, len(fellows), num_ranks, environment, None, None)


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _say(text: str) -> None:
    print(f"[ds-hydra ray] {text}", file=sys.stderr, flush=True)
