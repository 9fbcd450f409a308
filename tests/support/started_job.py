"""A script that one rank runs as its launcher starts it, and which is ended, stopped or fails at a moment of its start.

`FAULT` is "rank|moment|kind"; the moment is noted in the file `MARK`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VICTIM, MOMENT, KIND = os.environ["FAULT"].split("|")


def fault_at(moment: str) -> None:
    """The fault, if this is its rank and moment."""
    if os.environ["RANK"] != VICTIM or moment != MOMENT:
        return
    Path(os.environ["MARK"]).write_text(repr(time.time()))
    if KIND == "raises":
        raise ValueError("mine")
    os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[KIND])


def around(owner: Any, name: str, *, before: str = "", after: str = "") -> None:
    """Let a function of `owner` have such moments."""
    original: Callable[..., Any] = owner.__dict__[name]

    def watched(*args: Any, **kwargs: Any) -> Any:
        fault_at(before)
        found = original(*args, **kwargs)
        fault_at(after)
        return found

    setattr(owner, name, watched)


def main() -> None:
    """Two steps."""
    fault_at("exec")
    import deepspeed

    import ds_hydra

    fault_at("imported")
    from ds_hydra.engine import crew
    from ds_hydra.engine.engine import HydraEngine
    from ds_hydra.host import launch
    from ds_hydra.ranks.world import World
    from ds_hydra.watchdog import watchdog
    from tests.support.small_job import sequences, small_config, small_model

    around(launch, "check_port", before="before the port", after="at the port")
    around(launch.RankMeeting, "_exchanged", before="in the meeting")
    around(watchdog, "meet", before="in the first text")
    around(watchdog, "greet", before="before heartbeats")
    around(deepspeed, "init_distributed", before="before torch", after="after torch")
    around(HydraEngine, "_read", before="before the model is read")
    around(crew, "prepare", before="before the assembly")
    around(World, "connect", before="before connecting")
    config = small_config(2, faults={"frozen_seconds": 9.0}, timeout_seconds=120, strategies=["2*tp1"])
    engine = ds_hydra.initialize(model=small_model(), training_data=sequences(), config=config)[0]
    for _ in range(2):
        engine.train_batch()


if __name__ == "__main__":
    main()
