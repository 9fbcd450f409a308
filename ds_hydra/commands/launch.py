"""Start a job whose survivors live on when a rank dies: `deepspeed`, of which one word of the command changes.

  ds-hydra launch [--respawn N] [options of deepspeed] script.py [arguments of the script]

DeepSpeed's own launcher reads the options, the hostfile and the devices, and reaches the other nodes (by pdsh, or
without ssh where it is started on each of them). On every node `ds_hydra.commands.launch_node` then starts the ranks
in place of `deepspeed.launcher.launch`, which would end them all with the first one that dies. --respawn N: on each
node up to N processes that have died are started again, to join the job.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ds_hydra.zero_hetero.errors import ConfigError

_THEIRS, _OURS = "deepspeed.launcher.launch", "ds_hydra.commands.launch_node"
_RESPAWN = "--respawn"
_REACHES = "pdsh"  # of DeepSpeed's ways to other nodes the one that starts a process of its own there


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra launch") -> int:
    """The exit code: 0 where the survivors finish with 0."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(f"usage: {name}\n{__doc__}")
        raise SystemExit(0 if given else 2)
    from deepspeed.launcher import runner

    try:
        given, more = without_respawn(given, runner.parse_args)
        options = runner.parse_args(given)
        if options.launcher.lower() != _REACHES:
            raise ConfigError(
                f"--launcher {options.launcher}: {name} reaches other nodes by {_REACHES}, or is started on each of "
                "them with --no_ssh and --node_rank"
            )
        if options.autotuning:
            raise ConfigError("--autotuning starts jobs of its own: use 'deepspeed' for it")
        return _run(given, more)
    except (ConfigError, ValueError, RuntimeError) as refused:  # the last two are DeepSpeed's
        print(f"{name}: {refused}", file=sys.stderr)
        return 2


def without_respawn(given: Sequence[str], parse: Any) -> tuple[list[str], list[str]]:
    """DeepSpeed's part of the arguments, and ours; what follows the script is the script's."""
    for at, word in enumerate(given):
        found = re.fullmatch(rf"{_RESPAWN}(?:=(.*))?", word)
        if found is None:
            continue
        value, after = (found[1], at + 1) if found[1] is not None else ((given[at + 1 : at + 2] or [""])[0], at + 2)
        rest = [*given[:at], *given[after:]]
        if at > len(rest) - 1 - len(parse(rest).user_args):
            break  # behind the script
        if not value.isdecimal():
            raise ConfigError(f"{_RESPAWN} takes how often a process may be started again, but is {value!r}")
        return rest, [f"{_RESPAWN}={int(value)}"]
    return list(given), []


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
    with mock.patch.object(runner, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen})):
        runner.main(given)
    code = started[0].returncode if started else 1
    return code if code >= 0 else 128 - code


def as_ours(command: Sequence[str], more: Sequence[str]) -> list[str]:
    """DeepSpeed's command for a node, or the one that ends what it has started there, as it is for ours."""
    found = [one.replace(_THEIRS, _OURS) for one in command]
    if _OURS in found:
        found[found.index(_OURS) + 1 : found.index(_OURS) + 1] = more
    return found
