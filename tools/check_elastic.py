"""An elastic job whose members die, freeze, part or join: one view on all that go on, how soon, and the same training.

  python -m tools.check_elastic [--quick] [--json FILE] [--only PART ...]

membership  drawn orders of events through the machines of up to seven members over a made-up network
partitions  four members in two parts, for good or for a while, with and without a folder that all see
agents      real processes and sockets, four members: from the death of one to the last survivor's next view
losses      training jobs of four ranks: faults of every kind, in every phase, of the first, a middle and the last
            member, in jobs of every mode, drawn, their copies on devices and on hosts; each compared to the bit with
            a stop and a restart on those that are left. The whole form names the cells that it has not run
crowd       what a loss costs the coordinator of 64, 256 and 1,024 members that train nothing, over real sockets
counted     what a loss moves, of a 32B model on 64 and 1,024 ranks: bytes, messages, seconds over links of 25 GB/s
turns       a job that loses a rank and gets one again, over and over: from each death to the next step's plan, and
            threads, descriptors, memory and process groups that are left
protection  what copies of masters cost on the example's model: steps with them and without, in turns in one job; bytes
            sent and kept by the formulas; and on 64 ranks of a 32B model what of a simulated step their messages take
hosts       a cable that is pulled, a host that dies whole, a host that joins; of two and three hosts made on this
            machine
courses     two at once, a node of two, a second loss in each state of the first, 8, 7, 6, 4, 6 and 8 ranks

Exits non-zero if an aim is missed.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ds_hydra.commands.figures import guarded, run_parts
from ds_hydra.zero_hetero.buddies import held_layout
from ds_hydra.zero_hetero.layout import even_layout
from ds_hydra.zero_hetero.transfer_plan import plan_transfer
from tests.support.drawn_members import tried, wrong_in
from tests.support.simulated_members import Cluster
from tools import aims, machine
from tools.elastic.crowd import crowd
from tools.elastic.hosts import hosts
from tools.elastic.protection import protection

SIDES = (((0, 1), (2, 3)), ((0,), (1, 2, 3)), ((3,), (0, 1, 2)), ((1, 3), (0, 2)))
PARAMETERS, BUCKETS, STATES, PER_NODE, LINK = 32 * 10**9, 60, 3, 8, 25e9  # of `counted`; values and two moments
FROZEN_S = 1.5  # after which agents here count a silent one as frozen


def membership(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each kind of what befell members: how many orders had it, and how many ended as they may."""
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for seed in range(250 if quick else 10_000):
        wrong, kinds, cluster = tried(seed)
        if wrong:
            missed.append(f"order {seed} ({kinds}): {wrong}")
        for kind in ("all", *kinds.split()):
            row = rows[kind]
            row[:] = row[0] + 1, row[1] + (not wrong), row[2] + bool(cluster.survivors)
    return [{"kind": kind, "orders": of, "held": held, "went on": on} for kind, (of, held, on) in sorted(rows.items())]


def partitions(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each way to part: how often which side went on."""
    rows = []
    for sides in SIDES:
        for folder in (True, False):
            for heals in (None, 3.0, 20.0):
                ends: dict[str, int] = defaultdict(int)
                for seed in range(4 if quick else 100):
                    cluster = Cluster(seed, 4, folder=folder)
                    cluster.at(1.0, lambda c=cluster, s=sides: c.partition(s))  # type: ignore[misc]
                    if heals is not None:
                        cluster.at(1.0 + heals, lambda c=cluster: c.partition([]))  # type: ignore[misc]
                    if wrong := wrong_in(cluster, {"partition"}):
                        missed.append(f"{sides}, folder {folder}, for {heals} s: {wrong}")
                    ends["+".join(map(str, cluster.survivors)) or "none"] += 1
                told = ", ".join(f"{who}: {count}" for who, count in sorted(ends.items()))
                rows.append({"parts": str(sides), "folder": folder, "for, s": heals or "good", "went on": told})
    return rows


def agents(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each way to die and each place: seconds to the next view, median and worst."""
    from tests.gloo.test_agents import run, same_last

    rows = []
    for how in ("SIGKILL", "SIGSTOP"):
        for lost in (0, 1, 3):
            times = []
            for number in range(1 if quick else 34 if how == "SIGKILL" else 10):
                with tempfile.TemporaryDirectory() as folder:
                    _, seen, gone = run(Path(folder), 4, {lost: (0.4 + 0.01 * number, how)}, until=3, frozen_s=FROZEN_S)
                stay = [rank for rank in range(4) if rank != lost]
                if [one.id for one in same_last(seen, stay).members] != stay:
                    missed.append(f"{how} of {lost}: the last view is not that of {stay}")
                times.append(max(seen[str(rank)][-1][0] for rank in stay) - gone)
            more = FROZEN_S if how == "SIGSTOP" else 0.0
            median, worst = statistics.median(times), max(times)
            limits = [machine.limit(aim, waits=True).here for aim in (aims.VIEW_MEDIAN_S, aims.VIEW_WORST_S)]
            if median > more + limits[0] or worst > more + limits[1]:
                missed.append(f"{how} of {lost}: {median:.2f} s in the median, {worst:.2f} s at worst until a view")
            rows.append({"death": how, "of": lost, "repeats": len(times), "median, s": median, "worst, s": worst})
    return rows


def losses(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each value of each coordinate: how many cells had it, and how many went on as they must."""
    from tests.support import elastic_cells as cells

    drawn, rows = cells.drawn(1 if quick else 240), dict[str, list[int]]()
    with tempfile.TemporaryDirectory() as folder:
        judge = cells.Judge(Path(folder))
        for cell, place in zip(drawn, itertools.cycle(("device", "host")), strict=False):
            wrong = judge.wrong(replace(cell.course, redundancy=place))
            missed += [f"{cell}: {what}" for what in wrong]
            for value in ("all", cell.kind, cell.phase, cell.place, cell.mode, f"copies on the {place}"):
                row = rows.setdefault(value, [0, 0])
                row[:] = row[0] + 1, row[1] + (not wrong)
    left = cells.not_run(drawn)
    print(f"cells that were not run: {sum(map(len, left.values())):,} of {len(cells.all_cells()):,}")
    for where, others in left.items() if not quick else ():
        print(f"  {where}: {', '.join(others)}")
    for mode, why in cells.NOT_RUN.items():
        print(f"  {mode}: {why}")
    return [{"of": value, "cells": of, "as they must": held} for value, (of, held) in rows.items()]


def courses(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each course."""
    from tests.support import elastic_cells as cells

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        judge = cells.Judge(Path(folder))
        for course in cells.COURSES[:1] if quick else cells.COURSES:
            wrong = judge.wrong(course)
            missed += [f"{course.name}: {what}" for what in wrong]
            rows.append({"course": course.name, "ranks": course.ranks, "as it must": "no" if wrong else "yes"})
    return rows


def turns(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each figure of a member that lives through all losses and joins: at first, and in the end."""
    from tests.support.elastic_turns import run_turns

    of = 1 if quick else 100
    with tempfile.TemporaryDirectory() as folder:
        found = run_turns(Path(folder) / "job", of)
    own = found.noted[0] if found.noted else []
    if len(own) != 2 * of + 3:
        missed.append(f"{of} losses and joins: exit codes {found.result.codes}")
        return [{"figure": "none", "at first": "", "in the end": ""}]
    median, worst = statistics.median(found.seconds), max(found.seconds)
    limits = [machine.limit(aim, waits=True) for aim in (aims.PLAN_MEDIAN_S, aims.PLAN_WORST_S)]
    if median > limits[0].here or worst > limits[1].here:
        missed.append(
            f"{median:.2f} s in the median (aim {limits[0]}), {worst:.2f} s at worst (aim {limits[1]}) from a death to "
            "the next step's plan"
        )
    rows: list[dict[str, Any]] = [
        {"figure": f"s from a death to the next plan, {of} turns: median, worst", "at first": median,
         "in the end": worst}
    ]  # fmt: skip
    for name in ("threads", "descriptors", "shared", "resident", "old_groups"):
        # In the same place of a turn, as whole as the job was at first: four ranks, in a step before a loss.
        seen = [getattr(one, name) for one in own[2::2]]
        first, last = max(seen[: max(1, len(seen) // 4)]), max(seen[-max(1, len(seen) // 4) :])
        limit = aims.TURNS_RESIDENT * first if name == "resident" else first
        if last > limit and (name == "old_groups" or not quick):  # one turn makes what a second one finds
            missed.append(f"{name} grow from {first:,} to {last:,} in {of} losses and joins")
        rows.append({"figure": name.replace("_", " "), "at first": first, "in the end": last})
    return rows


def counted(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each loss of a job of a 32B model: what going on moves, by the plans that it would be moved by."""
    del quick
    rows = []
    for ranks in (64, 1024):
        former = range(ranks)
        for what, gone in (("one", {ranks // 2}), ("a node", set(range(ranks // 2, ranks // 2 + PER_NODE)))):
            members = [rank for rank in former if rank not in gone]
            numel = PARAMETERS // BUCKETS
            source = held_layout(numel, former, members, PER_NODE)
            moved = plan_transfer(source, even_layout(numel, len(members))).slices
            far = moved.src != moved.dst
            came, sent = (np.bincount(ends[far], moved.length[far], len(members)) for ends in (moved.dst, moved.src))
            pairs = np.unique(moved.dst[far] * len(members) + moved.src[far]) // len(members)
            of_state = 4 * STATES * BUCKETS  # bytes of an element of a bucket, in all of the model
            most, copies = of_state * max(came.max(), sent.max()), of_state * -(-numel // len(members))
            rows.append({
                "ranks": ranks, "lost": what, "GB anew": of_state * came.sum() / 1e9,
                "a rank": most / 1e9,
                "its messages": STATES * BUCKETS * int(np.bincount(pairs).max()),
                "its copy": copies / 1e9,
                "s at 25 GB/s": (most + copies) / LINK, "copies, GB a step": 4 * PARAMETERS / ranks / 1e9,
            })  # fmt: skip
            if most + copies > aims.CUT_ANEW_SHARES * of_state * numel / len(members):
                missed.append(f"{what} of {ranks} lost: a rank moves {(most + copies) / 1e9:.2f} GB")
    return rows


PARTS = {
    "membership": membership, "partitions": partitions, "agents": agents, "crowd": crowd, "losses": losses,
    "courses": courses, "turns": turns, "counted": counted, "protection": protection, "hosts": hosts,
}  # fmt: skip


def main() -> int:
    """The exit code."""
    return run_parts("check_elastic", __doc__, PARTS)


if __name__ == "__main__":
    sys.exit(guarded("check_elastic", main))
