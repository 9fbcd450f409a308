"""What a launcher has set in the environment in; numbers, or ConfigError, out. No torch."""

from __future__ import annotations

import os

from ds_hydra.zero_hetero.errors import ConfigError

# The least and the most that each may be.
_NUMBERS = {
    "RANK": (0, None),
    "WORLD_SIZE": (1, None),
    "LOCAL_RANK": (0, None),
    "LOCAL_WORLD_SIZE": (1, None),
    "LOCAL_SIZE": (1, None),
    "MASTER_PORT": (0, 65535),
}


def launched_number(name: str) -> int | None:
    """The value of one of the launcher's variables; None where it is not set. ConfigError if it is none of its values.

    `LOCAL_SIZE` is DeepSpeed's name of `LOCAL_WORLD_SIZE`.
    """
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


def check_environment() -> None:
    """ConfigError for any of the launcher's numbers that is none, or that contradicts another one."""
    found = {name: launched_number(name) for name in _NUMBERS}
    for name, of in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("LOCAL_WORLD_SIZE", "WORLD_SIZE")):
        value, bound = found[name], found[of]
        if value is not None and bound is not None and value >= bound + (name == "LOCAL_WORLD_SIZE"):
            raise ConfigError(
                f"the environment has {name}={value} with {of}={bound}: ranks are numbered from 0, and a node has no "
                "more of them than the job; correct one of the two"
            )
