"""The errors that users see: configuration, plan, checkpoint, numerics.

Each text says what is wrong, the numbers that disagree, the place, and the remedy.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting, a model or data that this job cannot run with; raised before any work is lost. Exit code 78."""

    exit_code = 78  # EX_CONFIG of sysexits.h: starting the same job again does not help


class PlanError(ValueError):
    """A plan or a layout that contradicts itself or the job it is meant for. Exit code 78."""

    exit_code = 78


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or that is not what was saved; names file and remedy. Exit code 74."""

    exit_code = 74  # EX_IOERR
    passing = False  # whether the same may go well a little later, as where a disk is full


class NumericsError(ArithmeticError):
    """Losses or gradients that are not finite, in too many steps in a row to go on."""

    exit_code = 1


OWN_FAULT, OTHERS_FAULT, INTERRUPTED = 1, 75, 130
"""Exit codes of all other errors: of this rank, as Python's; of another rank (EX_TEMPFAIL), where a restart helps; of
Ctrl-C, as shells have it."""
