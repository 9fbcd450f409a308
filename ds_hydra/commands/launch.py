"""Start a job whose survivors live on when a rank dies: `deepspeed`, of which one word of the command changes.

  ds-hydra launch [--respawn N] [--spares N] [options of deepspeed] script.py [arguments of the script]

DeepSpeed's own launcher reads the options, the hostfile and the devices, and reaches the other nodes (by pdsh, or
without ssh where it is started on each of them). On every node `ds_hydra.commands.launch_node` then starts the ranks
in place of `deepspeed.launcher.launch`, which would end them all with the first one that dies. --respawn N: on each
node up to N processes that have died are started again, to join the job. --spares N: on each node the last N places
train nothing at first: their processes stand ready, and take the places of ranks that are lost, on any node.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ds_hydra.zero_hetero.errors import ConfigError

_THEIRS, _OURS = "deepspeed.launcher.launch", "ds_hydra.commands.launch_node"
_OWN_OPTIONS = ("respawn", "spares")
_REACHES = "pdsh"  # of DeepSpeed's ways to other nodes the one that starts a process of its own there


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra launch") -> int:
    """The exit code: 0 where the survivors finish with 0."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(f"usage: {name}\n{__doc__}")
        raise SystemExit(0 if given else 2)
    try:
        options = read_options(given)
        if options.launcher.lower() != _REACHES:
            raise ConfigError(
                f"--launcher {options.launcher}: {name} reaches other nodes by {_REACHES}, or is started on each of "
                "them with --no_ssh and --node_rank"
            )
        if options.autotuning:
            raise ConfigError("--autotuning starts jobs of its own: use 'deepspeed' for it")
        return _run(given, [f"--{own}={vars(options)[own]}" for own in _OWN_OPTIONS if vars(options)[own]])
    except (ConfigError, ValueError, RuntimeError) as refused:  # the last two are DeepSpeed's
        print(f"{name}: {refused}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """DeepSpeed's, with our options."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        for own in _OWN_OPTIONS:
            self.add_argument(f"--{own}", type=_count, default=0)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a number of processes of each node is asked for, but it is {text!r}")
    return int(text)


@contextmanager
def _with_ours() -> Iterator[None]:
    """DeepSpeed's launcher reads our options too."""
    from deepspeed.launcher import runner

    with mock.patch.object(runner, "argparse", SimpleNamespace(**{**vars(argparse), "ArgumentParser": _Parser})):
        yield


def read_options(given: Sequence[str]) -> argparse.Namespace:
    """What DeepSpeed's launcher reads, and our options; what follows the script is the script's."""
    from deepspeed.launcher import runner

    with _with_ours():
        options: argparse.Namespace = runner.parse_args(list(given))
    return options


def _run(given: list[str], more: list[str]) -> int:
    """DeepSpeed's launcher, whose processes on the nodes are ours."""
    from deepspeed.launcher import runner

    started: list[subprocess.Popen[bytes]] = []

    def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(as_ours(command, more), start_new_session=True, **options))
        return started[-1]

    def pass_on(number: int, _: object) -> None:
        for process in started:
            process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):  # over pdsh DeepSpeed's own take their place
        signal.signal(number, pass_on)
    theirs = SimpleNamespace(**{**vars(subprocess), "Popen": popen})
    with _with_ours(), mock.patch.object(runner, "subprocess", theirs):
        runner.main(given)
    code = started[0].returncode if started else 1
    return code if code >= 0 else 128 - code


def as_ours(command: Sequence[str], more: Sequence[str]) -> list[str]:
    """DeepSpeed's command for a node, or the one that ends what it has started there, as it is for ours."""
    found = [one.replace(_THEIRS, _OURS) for one in command]
    if _OURS in found:
        found[found.index(_OURS) + 1 : found.index(_OURS) + 1] = more
    return found
