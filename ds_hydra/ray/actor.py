"""The actor that holds one place of a job: it starts a rank's process, watches it, and takes it along when it ends.

[Note: one actor, one process]
  ends with it   the system kills the rank's process when the actor's ends, however it does
  fenced         Ray calls an actor lost when its node is; until its process notices, it would train on beside whoever
                 came in its place. So it ends itself as soon as the process that started it, Ray's daemon of the node,
                 is gone
  asked          the job asks `wait` again and again. Between two of its answers other questions have their turn
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ds_hydra.commands.launch_node import Job, is_member
from ds_hydra.host.environment import INVITATION, MEMBERS_FOLDER, free_port
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.files import check_private, create_file

_LOOKS_S = 0.5  # between two looks at the daemon
_TURN_S = 0.05
_LINES = 30  # that are told of a process which failed


class Work(NamedTuple):
    """What every rank does: a script with its arguments, or a function, packed with its."""

    words: tuple[str, ...]  # of the script; empty for a function
    function: bytes
    folder: str  # the current one of whoever asks
    path: tuple[str, ...]  # where Python finds modules there


class Where(NamedTuple):
    """On which node an actor is, and which of its GPUs are the actor's."""

    node: str
    address: str
    gpus: tuple[str, ...]


class Ended(NamedTuple):
    """How a rank's process has ended."""

    code: int  # as of `subprocess`: below 0 for a signal
    lines: str  # its last ones
    member: bool  # whether it belonged to the job: one that has come may never have been let in
    result: bytes | None  # of a function, packed


class Rank:
    """Made an actor by `train`; Ray calls one method at a time."""

    def __init__(self, job: str) -> None:
        self._folder = Path(tempfile.gettempdir()) / f"ds_hydra-{job}"
        self._folder.mkdir(mode=0o700, exist_ok=True)  # the actors of a node share it
        check_private(self._folder)
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._reader = threading.Thread()
        self._came = False
        threading.Thread(target=_fence, args=(os.getppid(),), daemon=True).start()

    def where(self) -> Where:
        """Answers when the actor has been placed."""
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        return Where(context.get_node_id(), ray.util.get_node_ip_address(), gpus)

    def port(self) -> int:
        """A free one of this node."""
        return free_port()

    def begin(self, work: Work, job: Job, local: int) -> int:
        """Start a rank of the job's start, by its place on this node; the number of its process."""
        return self._start(work, job.of_rank(local))

    def join(self, work: Work, invitation: str, job: Job) -> int:
        """Start a process that joins. Where members are on this node, they know better than the invitation."""
        place = self._folder / INVITATION
        if not place.exists():
            new = place.with_name(f"{place.name}.{os.getpid()}")
            new.unlink(missing_ok=True)
            with create_file(new, 0o600) as file:
                file.write(invitation.encode())
            new.replace(place)
        self._came = True
        return self._start(work, job.of_joiner(0))

    def invitation(self) -> str | None:
        """What a process needs to join the job, the job's secret too; None before its first step."""
        place = self._folder / INVITATION
        return place.read_text() if place.exists() else None

    def wait(self, seconds: float) -> Ended | None:
        """How the process has ended, or None when it lives on after so many seconds."""
        assert self._process is not None, "begin or join comes first"
        deadline = time.monotonic() + seconds
        while (code := self._process.poll()) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(_TURN_S)
        self._reader.join(timeout=2.0)
        member = not self._came or is_member(self._folder, self._process.pid)
        result = self._result()
        return Ended(code, "".join(self._lines), member, result.read_bytes() if result.exists() else None)

    def signal(self, number: int) -> None:
        """Send the process a signal, if it lives."""
        if self._process is not None:
            self._process.send_signal(number)

    def close(self) -> None:
        """End the process, and remove what the job has left on this node."""
        if self._process is not None:
            self._process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _result(self) -> Path:
        return self._folder / f"result-{os.getpid()}"

    def _start(self, work: Work, environment: Mapping[str, str]) -> int:
        folder = work.folder if Path(work.folder).is_dir() else os.getcwd()
        if work.words:
            if not (Path(folder) / work.words[0]).exists():
                raise ConfigError(
                    f"{work.words[0]} is not on node {os.uname().nodename} (looked for from {folder}): put it where "
                    "every node sees it, or hand it over by runtime_env={'working_dir': ...}"
                )
            words = ["script", *work.words]
        else:
            source = self._folder / f"work-{os.getpid()}"
            source.write_bytes(pickle.dumps(work))
            words = ["function", str(source), str(self._result())]
        command = [sys.executable, "-u", "-m", "ds_hydra.ray.rank", str(os.getpid()), *words]
        environment = {**os.environ, **environment, MEMBERS_FOLDER: str(self._folder)}
        self._lines.clear()
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._pass_on, args=(self._process,), daemon=True)
        self._reader.start()
        return self._process.pid

    def _pass_on(self, process: subprocess.Popen[bytes]) -> None:
        """What the process prints is what the actor prints, which Ray brings to the driver."""
        assert process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in process.stdout:
                self._lines.append(line.decode(errors="replace"))
                print(self._lines[-1], end="", flush=True)


def _fence(daemon: int) -> None:
    while os.getppid() == daemon:
        time.sleep(_LOOKS_S)
    os._exit(1)
