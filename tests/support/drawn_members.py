"""What befalls members of an elastic job, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.support.simulated_members import Cluster

FAULTS_S, QUIET_S = 22.0, 150.0  # by when all has befallen it; by when it has to be quiet
KINDS = (
    "kill", "kill", "freeze", "thaw", "partition", "break", "join", "folder", "cut", "suspect", "suspect", "slow",
    "storm",
)  # fmt: skip


KIND_TO_ALL = {"kill", "break", "join"}  # with which, and a folder, nobody but the dead may end


def befall(cluster: Cluster, rng: random.Random, kind: str, soon: Callable[[], float]) -> None:
    """Draw when, whom and how."""
    num = len([key for key in cluster.nodes if key < 100])
    a, b, when, passes = rng.randrange(num), rng.randrange(num), soon(), rng.random() < 0.5
    then = when + rng.choice([0.1, 1.0, 8.0]) * rng.random()
    match kind:
        case "kill":
            cluster.at(when, lambda: cluster.kill(a))
        case "freeze" | "thaw":
            cluster.at(when, lambda: cluster.freeze(a))
            if kind == "thaw":
                cluster.at(then, lambda: cluster.thaw(a))
        case "partition":
            keys = rng.sample(range(num), num)
            middle = rng.randint(0, num)
            cluster.at(when, lambda: cluster.partition([keys[:middle], keys[middle:]]))
            if passes:
                cluster.at(then, lambda: cluster.partition([]))
        case "break":
            for _ in range(5):
                cluster.at(soon(), lambda: cluster.break_connection(a, b))
        case "cut" if a != b:
            cluster.at(when, lambda: cluster.cut.add(frozenset((a, b))))
            if passes:
                cluster.at(then, lambda: cluster.cut.discard(frozenset((a, b))))
        case "join":
            key = 100 + rng.randrange(100)
            cluster.at(when, lambda: cluster.join(key) if key not in cluster.nodes else None)
        case "folder" if cluster.folder:
            cluster.at(when, lambda: cluster.folder_fails.add(a))
        case "suspect":
            for _ in range(4):
                cluster.at(soon(), lambda: cluster.suspect(rng.randrange(num), rng.randrange(num)))
        case "slow":
            cluster.delay_s = 1.5
        case "storm":
            # Members take each other for lost, again and again, while half of what they say is lost or late.
            cluster.delay_s = 1.0
            for _ in range(40):
                x, y = rng.randrange(num), rng.randrange(num)
                cluster.at(1.0 + rng.uniform(0, 6), lambda x=x, y=y: cluster.suspect(x, y))  # type: ignore[misc]
                cluster.at(1.0 + rng.uniform(0, 6), lambda x=y, y=x: cluster.break_connection(x, y))  # type: ignore[misc]


def drawn(seed: int) -> tuple[Cluster, str]:
    """A cluster with what befalls it, drawn by a seed; and the kinds of it, in words."""
    rng = random.Random(seed)
    num, folder = rng.randint(1, 7), rng.random() < 0.5
    cluster = Cluster(seed, num, folder=folder, per_host=rng.randint(1, 3), stuck=rng.choice([0, 0, 0.05]),
                      most=num if seed % 2 else None)  # fmt: skip
    kinds = {"stuck"} if cluster.stuck else set()
    # Often within one change of views: what is rare in time is what is hard.
    span = rng.choice([0.3, 1.0, 3.0, 12.0])

    def soon() -> float:
        return 1.0 + rng.uniform(0, span)

    for _ in range(rng.choice([1, 2, 3, 5, 8])):
        kind = rng.choice(KINDS)
        kinds.add(kind)
        befall(cluster, rng, kind, soon)
    return cluster, " ".join(sorted(kinds))


def tried(seed: int) -> tuple[str, str, Cluster]:
    """What is wrong in a drawn cluster, or ""; the kinds of what befell it; and the cluster."""
    cluster, kinds = drawn(seed)
    return wrong_in(cluster, set(kinds.split())), kinds, cluster


def parted(seed: int) -> str:
    """What goes wrong, or "", among up to 24 members of which less than half, often with the coordinator, cannot reach
    the others for 1 to 30 s: of those nobody may end."""
    rng = random.Random(seed)
    num = rng.randint(3, 24)
    cluster = Cluster(seed, num, folder=rng.random() < 0.5, per_host=rng.randint(1, 8))
    order = rng.sample(range(num), num) if rng.random() < 0.5 else list(range(num))
    cut = rng.randint(1, (num - 1) // 2)
    heals = 1.0 + rng.uniform(1.0, 30.0)
    cluster.at(1.0, lambda: cluster.partition([order[:cut], order[cut:]]))
    cluster.at(heals, lambda: cluster.partition([]))
    cluster.run(heals)
    wrong = wrong_in(cluster, {"partition"})
    ended = {key: cluster.nodes[key].told or "killed" for key in order[cut:] if not cluster.nodes[key].goes_on}
    return wrong or (f"of {num} with {sorted(order[:cut])} cut for {heals - 1:.1f} s: {ended}" if ended else "")


def wrong_in(cluster: Cluster, kinds: set[str]) -> str:
    """Run a cluster, which things of these kinds befall, until all is quiet; what is wrong, or ""."""
    try:
        cluster.run(FAULTS_S)
        while cluster.now < QUIET_S and (cluster.end() or cluster.now - cluster.changed < 10.0):
            cluster.run(cluster.now + 2.0)
    except AssertionError as error:
        return str(error)
    ended = [node for node in cluster.nodes.values() if node.told]
    if ended and cluster.folder and kinds <= KIND_TO_ALL:
        return f"member {ended[0].key} ended ({ended[0].told}), and nobody was cut off"
    return cluster.end()
