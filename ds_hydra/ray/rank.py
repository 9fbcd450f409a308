"""The process of one rank, started by its actor: `python -m ds_hydra.ray.rank ACTOR script|function ...`.

A process of its own, since one that trains must be free to end at once, to handle signals and to shut its sockets,
and an actor's process belongs to Ray.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from pathlib import Path

from ds_hydra.ray.actor import Work
from ds_hydra.zero_hetero.errors import ConfigError

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """This process, and what it becomes by exec, is killed when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before
        os.kill(os.getpid(), signal.SIGKILL)


def call(source: Path, target: Path) -> None:
    """Call the function that stands in one file, as `train` has packed it; what it returns goes to the other."""
    from ray import cloudpickle

    from ds_hydra.host.ending import show_refusals_plainly

    show_refusals_plainly()
    work: Work = pickle.loads(source.read_bytes())
    sys.path.extend(entry for entry in work.path if entry not in sys.path)
    try:
        function, arguments = cloudpickle.loads(work.function)
    except ImportError as error:
        raise ConfigError(
            f"the function cannot be read here ({error}): what it is imported from must be on every node; install it "
            "there, or hand it over by runtime_env={'working_dir': ...}"
        ) from error
    result = function(*arguments)
    try:
        packed = cloudpickle.dumps(result)
    except Exception as error:
        raise ConfigError(
            f"what the function returns, a {type(result).__name__}, cannot be sent ({error}): return plain data, and "
            "write the rest to files"
        ) from error
    target.write_bytes(packed)


def main() -> None:
    """See above."""
    parent, kind, *words = sys.argv[1:]
    end_with(int(parent))
    if kind == "script":
        os.execv(sys.executable, [sys.executable, "-u", *words])
    call(*map(Path, words))


if __name__ == "__main__":
    main()
