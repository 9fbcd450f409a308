"""A job on two hosts joined by a slow cable: bytes that cross it and steps, counted and simulated against measured.

The hosts are network namespaces on this machine. Of each strategy: bytes that enter a host in a step, by its network
interface and by the plans of pulls, pushes and messages between stages; the same as a multiple of what has to enter,
the parameters that its stages need and nobody on it owns, and the gradients of what it owns; a step's seconds by the
clock and by the simulator, fed with the cable's rate and with what steps over a fast cable have computed, and besides;
the share of the wire's time that was hidden; and plain DeepSpeed's ZeRO-1 with the same sequences. Each is a median of
the steps of its strategy, which changes in every step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tools import aims
from tools.devices.table import Table
from tools.hosts.job import Settings
from tools.hosts.namespaces import made_hosts, why_not

MEGABITS = 100.0
STRATEGIES = {
    2: ("4*tp1", "2*tp2", "2*pp2", "tp2 + 2*tp1", "tp2pp2", "pp4"),
    4: ("8*tp1", "4*tp2", "2*tp4", "2*tp2pp2", "tp4 + 2*tp2", "tp4pp2"),
}
STEPS, EACH_FAST = 20, 4


def two_hosts(quick: bool) -> Table:
    """Two hosts of two and of four ranks; quick: of two, three strategies and few steps, whose times are not judged,
    without ZeRO-1."""
    table = Table(
        f"two hosts and {MEGABITS:.0f} Mbit/s between them: a step of each strategy",
        ["ranks", "strategy", "MB into a host", "by the plan", "off", "of the least", "step s", "simulated", "off ",
         "of it computing", "besides", "hidden", "ZeRO-1 s", "of ZeRO-1"],
    )  # fmt: skip
    reason = why_not()
    if reason:
        table.rows.append(["-", f"skipped: {reason}", *["-"] * 12])
        return table
    for ranks, strategies in STRATEGIES.items():
        if not quick:
            _add(table, ranks, strategies, measured(ranks, strategies, STEPS, EACH_FAST))
        elif ranks == 2:
            found = measured(ranks, strategies[:3], 3, 3, deepspeed=False)
            _add(table, ranks, strategies[:3], found, timed=False)
    return table


def measured(
    ranks: int, strategies: tuple[str, ...], steps: int, each_fast: int, *, megabits: float = MEGABITS,
    names: tuple[str, str] = ("node0", "node1"), deepspeed: bool = True, limit_s: float = 1500.0,
) -> dict[str, Any]:  # fmt: skip
    """What a job on two hosts has found. RuntimeError, with its last words, where one fails."""
    with tempfile.TemporaryDirectory() as folder, made_hosts(megabits, names=names) as hosts:
        settings = Settings(folder, ranks, strategies, (hosts[0].device, hosts[1].device), hosts[0].address, megabits,
                            steps, each_fast, deepspeed)  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCAL_")}
        environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        jobs = [
            subprocess.Popen(host.command(*settings.command(index)), env=environment, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for index, host in enumerate(hosts)
        ]  # fmt: skip
        try:
            said = [job.communicate(timeout=limit_s)[0] for job in jobs]
        finally:
            for job in jobs:
                job.kill()
        if any(job.returncode for job in jobs):
            raise RuntimeError("\n".join(text[-3000:] for text in said))
        return json.loads(Path(folder, "found.json").read_text())


def _add(table: Table, ranks: int, strategies: tuple[str, ...], found: dict[str, Any], *, timed: bool = True) -> None:
    zero = statistics.median(step["seconds"] for step in found["deepspeed"]) if timed else None
    times_off = []
    for strategy in strategies:
        both = [pair for pair in zip(found["slow"], found["expected"], strict=True) if pair[0]["strategy"] == strategy]
        into = statistics.median(max(step["into"]) for step, _ in both)
        planned = [[sum(kind[host] for kind in plan.values()) for host in range(2)] for _, plan in both]
        off = statistics.median(
            step["into"][host] / plan[host] - 1 for (step, _), plan in zip(both, planned, strict=True)
            for host in range(2)
        )  # fmt: skip
        seconds = statistics.median(step["seconds"] for step, _ in both)
        told = found["predicted"][strategy]
        predicted = told["seconds"]
        wire_s = statistics.median(map(max, planned)) * 8 / MEGABITS / 1e6
        waited_s = statistics.median(step["pull_ms"] + step["push_ms"] for step, _ in both) / 1e3
        times_off.append(abs(predicted / seconds - 1))
        table.rows.append(
            [2 * ranks, strategy, round(into / 1e6, 2), round(statistics.median(map(max, planned)) / 1e6, 2),
             f"{off:.1%}", round(statistics.median(map(max, planned)) / found["least"][strategy], 2), round(seconds, 2),
             round(predicted, 2), f"{predicted / seconds - 1:.0%}", round(told["computing"], 2),
             round(told["added"], 2), f"{max(0.0, 1 - waited_s / wire_s):.0%}",
             *((round(zero, 2), round(seconds / zero, 2)) if zero is not None else ("-", "-"))]
        )  # fmt: skip
        if abs(off) > aims.HOSTS_BYTES:
            table.missed.append(
                f"{strategy} on {2 * ranks} ranks: bytes are {off:.1%} off (aim {aims.HOSTS_BYTES:.0%})"
            )
        if zero is not None and seconds > zero:
            table.missed.append(f"{strategy} on {2 * ranks} ranks: {seconds / zero:.2f} of ZeRO-1's step (aim 1.0)")
    if timed and statistics.median(times_off) > aims.HOSTS_STEP:
        table.missed.append(
            f"{2 * ranks} ranks: simulated steps are {statistics.median(times_off):.0%} off in the median "
            f"(aim {aims.HOSTS_STEP:.0%})"
        )
