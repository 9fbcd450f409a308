"""What a launcher has set in the environment, as numbers; ConfigError for what is none. No torch."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.files import check_private

if TYPE_CHECKING:
    from ds_hydra.config.hydra_block import HydraConfig

MEMBERS_FOLDER = "DS_HYDRA_MEMBERS"
INVITATION = "invitation.json"  # in the folder of the members
JOINS = "DS_HYDRA_JOINS"
MOST_RANKS = "DS_HYDRA_MOST_RANKS"  # as many as train together; whoever is started besides is a spare
_UNTIL_BEGUN_S = 300.0

# The least and the most that each may be.
_NUMBERS = {
    "RANK": (0, None),
    "WORLD_SIZE": (1, None),
    "LOCAL_RANK": (0, None),
    "LOCAL_WORLD_SIZE": (1, None),
    "LOCAL_SIZE": (1, None),
    "MASTER_PORT": (0, 65535),
    MOST_RANKS: (1, None),
}
_OF_JOINERS = {"RANK": -1, "WORLD_SIZE": None}


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launched_number(name: str) -> int | None:
    """The value of one of the launcher's variables; None where it is not set. ConfigError if it is none of its values.

    `LOCAL_SIZE` is DeepSpeed's name of `LOCAL_WORLD_SIZE`. A process that joins a job has the rank -1 until it has
    joined, and is not told how many ranks there are.
    """
    if name in _OF_JOINERS and joins():
        return _OF_JOINERS[name]
    text, (least, most) = os.environ.get(name), _NUMBERS[name]
    if not text:
        return None
    value = int(text) if text.strip().isascii() and text.strip().isdigit() else -1
    if value < least or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(
            f"the environment has {name}={text!r}, where a launcher sets a whole number {allowed}: start the script by "
            "'deepspeed' or 'torchrun', or correct the variable"
        )
    return value


def longest_wait_s(config: HydraConfig, *, begun: bool) -> float:
    """How long a rank waits for others in one collective, in seconds.

    Before an elastic job has begun nobody goes on without others, and what one of them does alone, such as a
    self-check on a busy machine, takes longer than training may stand still.
    """
    if config.elastic is None or begun or joins():
        return config.timeout_seconds
    return _UNTIL_BEGUN_S


def launched_node_size() -> int | None:
    """Ranks of this node, as the launcher says; None where it does not."""
    size, own = launched_number("LOCAL_WORLD_SIZE"), launched_number("LOCAL_SIZE")
    # Accelerate sets LOCAL_WORLD_SIZE to 1 on CPUs where no launcher has set it, however many ranks there are.
    guessed = size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ
    return own or (None if guessed and (launched_number("WORLD_SIZE") or 1) > 1 else size)


def members_folder() -> Path | None:
    """Where processes of this host that train together tell others of it how to join them, if whoever started them
    lets survivors live (`ds-hydra launch` does); None where it ends them all with the first that dies. ConfigError for
    a folder in which others may write: the job's secret lies there."""
    text = os.environ.get(MEMBERS_FOLDER)
    try:
        if text:
            check_private(Path(text))
    except OSError as error:
        raise ConfigError(
            f"{MEMBERS_FOLDER}={text} cannot be used: {error.strerror}. Make one of your own, `mkdir -m 700 {text}`"
        ) from None
    return Path(text) if text else None


def joins() -> bool:
    """Whether this process was started to join a job that runs."""
    return JOINS in os.environ


def check_environment() -> None:
    """ConfigError for any of the launcher's numbers that is none, or for a rank that the job has not."""
    found = {name: launched_number(name) for name in _NUMBERS}
    rank, num_ranks = found["RANK"], found["WORLD_SIZE"]
    if rank is not None and num_ranks is not None and rank >= num_ranks:
        raise ConfigError(
            f"the environment has RANK={rank} with WORLD_SIZE={num_ranks}: ranks are numbered from 0; correct one"
        )
