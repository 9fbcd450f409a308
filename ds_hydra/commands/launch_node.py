"""The ranks of one node, each of which lives for itself: `python -m ds_hydra.commands.launch_node`, called by `launch`.

Each rank has a context of `torch.distributed.elastic.multiprocessing` of its own, since a context ends all its
processes with the first one that fails. The arguments are those of `deepspeed.launcher.launch`, --respawn and --spares.

A spare process starts when the ranks have come to their first step, since it reads from them what it is to join. It
knocks as any process that joins does, and waits while the job has as many ranks as it began with. When a rank of its
node has finished, what still waits is ended.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_hydra.host.environment import INVITATION, JOINS, MEMBERS_FOLDER, MOST_RANKS, free_port
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, PlanError

_TURN_S = 0.1
BEFORE_AGAIN_S = 2.0  # until a process is started in place of one that has died: others may be about to end, too
_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # CUDA reads it when a script first touches it; see host/devices.py
REFUSED = frozenset(kind.exit_code for kind in (ConfigError, PlanError, CheckpointError))


@dataclass
class Job:
    """What all ranks of this node are started with."""

    command: tuple[str, ...]
    first: int  # rank of this node's first
    num_local: int
    num_ranks: int  # of the job's start
    environment: dict[str, str]
    cores: str | None  # that ranks are bound to; "": all of them, None: they are not bound
    logs: str | None  # folder of their output
    spares: int = 0  # places of this node behind its ranks

    def of_rank(self, local: int) -> dict[str, str]:
        """The environment of a rank of the job's start."""
        return {**_QUEUES, **self.environment, "RANK": str(self.first + local), "WORLD_SIZE": str(self.num_ranks),
                "LOCAL_RANK": str(local), "LOCAL_SIZE": str(self.num_local)}  # fmt: skip

    def of_joiner(self, local: int) -> dict[str, str]:
        """The environment of a process that joins: until it does it is a job of one rank."""
        alone = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "RANK": "0",
            "WORLD_SIZE": "1",
            JOINS: "1",
        }
        return {**self.of_rank(local), **alone, "LOCAL_SIZE": "1"}

    def start(self, local: int, environment: Mapping[str, str]) -> Any:
        """The context of one process."""
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

        words, environment = [word.replace("%LOCAL_RANK%", str(local)) for word in self.command], dict(environment)
        if self.cores is not None:
            from deepspeed.utils.numa import get_numactl_cmd

            cores, before = get_numactl_cmd(self.cores or None, self.num_local + self.spares, local)
            words, environment["OMP_NUM_THREADS"] = [*before, *words], str(cores)
        logs = DefaultLogsSpecs(self.logs, redirects=Std.ALL) if self.logs else DefaultLogsSpecs(os.devnull)
        return start_processes(
            name=f"rank{environment['RANK']}", entrypoint=words[0], args={0: tuple(words[1:])},
            envs={0: environment}, logs_specs=logs,
        )  # fmt: skip


@dataclass
class Node:
    """The processes of this node, by their place among them, and how those ended that have."""

    job: Job
    respawn: int
    running: dict[int, Any] = field(default_factory=dict)
    again: dict[int, float] = field(default_factory=dict)  # places whose process is started again, and when
    came: set[int] = field(default_factory=set)  # places whose process was started to join
    ended: list[int] = field(default_factory=list)  # exit codes, as they came
    spare: list[int] = field(default_factory=list)  # places whose first process is a spare that has not started
    began: float = field(default_factory=time.monotonic)
    signalled: bool = False

    def run(self) -> int:
        """Start all, and return when none runs any more: the exit code of the job, as far as this node knows."""
        from torch.distributed.elastic.multiprocessing import SignalException

        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # `_ended` says it
        try:
            for local in range(self.job.num_local):
                self.running[local] = self.job.start(local, self.job.of_rank(local))
            self.spare = list(range(self.job.num_local, self.job.num_local + self.job.spares))
            while self.running or self.again:
                try:
                    self._turn()
                    time.sleep(_TURN_S)
                except SignalException as told:
                    self._pass_on(told.sigval)
        finally:
            for context in self.running.values():
                context.close(signal.SIGKILL)
        return code_of(self.ended)

    def _turn(self) -> None:
        for local, context in list(self.running.items()):
            pid, found = context.pids()[0], context.wait(0)
            if found is not None:
                del self.running[local]
                failure = found.failures.get(0)
                self._ended(local, pid, 0 if failure is None else failure.exitcode)
        if self.again and not self.running:
            _say("no rank of this node lives any more, and none is started again")
            self.again.clear()
        if self.spare and not self.signalled and (self.folder / INVITATION).exists():
            self.again |= dict.fromkeys(self.spare, 0.0)
            self.spare.clear()
        for local in [local for local, at in self.again.items() if time.monotonic() > at]:
            del self.again[local]
            self.running[local] = self.job.start(local, self.job.of_joiner(local))
            self.came.add(local)
        if 0 in self.ended and all(self._waits(*one) for one in self.running.items()):
            for context in self.running.values():
                context.close(signal.SIGTERM)
            self.running.clear()
            self.again.clear()

    @property
    def folder(self) -> Path:
        """Where the members of this host say how to join them."""
        return Path(self.job.environment[MEMBERS_FOLDER])

    def _waits(self, local: int, context: Any) -> bool:
        """Whether a process has come to join and is no member."""
        return local in self.came and not is_member(self.folder, context.pids()[0])

    def _ended(self, local: int, pid: int, code: int) -> None:
        if code == 0 or local not in self.came or is_member(self.folder, pid):
            self.ended.append(code)
        if code == 0:
            return
        then = ""
        if self.respawn > 0 and code not in REFUSED and not self.signalled and 0 not in self.ended:
            self.respawn -= 1
            self.again[local] = time.monotonic() + BEFORE_AGAIN_S
            then = f"; a process that joins in its place starts in {BEFORE_AGAIN_S:.0f} s, {self.respawn} more may"
        lived_s, live = time.monotonic() - self.began, f"{len(self.running)} of {self.job.num_local} live"
        whose = f"rank {self.job.first + local}" if local < self.job.num_local else f"spare place {local}"
        _say(f"process {pid} of {whose} {how_ended(code)} after {lived_s:.1f} s, {live}{then}")

    def _pass_on(self, told: signal.Signals) -> None:
        """The first signal goes to all ranks, which may save and leave by it; a second one ends them."""
        self.again.clear()
        for context in self.running.values():
            if self.signalled:
                context.close(signal.SIGKILL)
            else:
                os.kill(context.pids()[0], told)
        self.signalled = True


def how_ended(code: int) -> str:
    """In words; below 0 by a signal."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"


def is_member(folder: Path, pid: int) -> bool:
    """Whether a process of this host is, or was when it ended, among the members of the job.

    One that has come to join may never have been let in: how it ends does not matter to the job.
    """
    place = folder / INVITATION
    members = json.loads(place.read_text())["members"] if place.exists() else []
    here = socket.gethostname()  # with which the name begins that members have of their host
    return any(member["pid"] == pid and member["host"].startswith(here) for member in members)


def code_of(ended: Sequence[int]) -> int:
    """The exit code for ranks that have ended with these, in this order.

    Who ends before the first that finishes was lost to a job that went on. Otherwise it has failed as the last one has.
    """
    finished = ended.index(0) if 0 in ended else None
    failed = [code for code in ended[finished or 0 :] if code]
    last = ended[-1] if ended else 1
    code = last if finished is None else (*failed, 0)[0]
    return code if code >= 0 else 128 - code


def job_of(args: Namespace, folder: Path, spares: int = 0) -> Job:
    """What DeepSpeed's options for a node say, of whose places the last ones are `spares`. ConfigError where a node has
    no others."""
    from deepspeed.accelerator import get_accelerator

    world = json.loads(base64.urlsafe_b64decode(args.world_info))
    slots = list(world.values())
    own, ranks = slots[args.node_rank], [len(one) - spares for one in slots]
    if min(ranks) < 1:
        name = list(world)[ranks.index(min(ranks))]
        raise ConfigError(
            f"--spares {spares}: node {name} has {min(ranks) + spares} places, of which one has to train: start more "
            "processes there (--num_gpus, or slots of the hostfile), or give fewer spares"
        )
    environment: dict[str, str] = {}
    get_accelerator().set_visible_devices_envs(environment, own)
    environment |= {
        "MASTER_ADDR": args.master_addr, "MASTER_PORT": str(args.master_port), "CROSS_RANK": str(args.node_rank),
        "CROSS_SIZE": str(len(slots)), MEMBERS_FOLDER: str(folder),
    }  # fmt: skip
    if args.no_python and args.module:
        raise ConfigError("--no_python and --module contradict each other: remove one")
    python = () if args.no_python else (sys.executable, "-u", *(("-m",) if args.module else ()))
    local = () if args.no_local_rank else ("--local_rank=%LOCAL_RANK%",)
    command = (*python, args.training_script, *local, *args.training_script_args)
    logs = None if args.enable_each_rank_log == "None" else args.enable_each_rank_log
    if spares:
        environment[MOST_RANKS] = str(sum(ranks))
    cores = (args.bind_core_list or "") if args.bind_cores_to_rank else None
    before, here = sum(ranks[: args.node_rank]), ranks[args.node_rank]
    return Job(command, before, here, sum(ranks), environment, cores, logs, spares)


def _say(text: str) -> None:
    print(f"[ds-hydra launch] {text}", file=sys.stderr, flush=True)


def main() -> int:
    """The exit code."""
    from deepspeed.launcher import launch

    own = {"--respawn": 0, "--spares": 0}
    while len(sys.argv) > 1 and sys.argv[1].partition("=")[0] in own:
        option, _, value = sys.argv.pop(1).partition("=")
        own[option] = int(value)
    folder = Path(tempfile.mkdtemp(prefix="ds_hydra-"))  # for this user only
    try:
        return Node(job_of(launch.parse_args(), folder, own["--spares"]), own["--respawn"]).run()
    except ConfigError as refused:
        _say(str(refused))
        return ConfigError.exit_code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
