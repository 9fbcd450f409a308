"""The errors that users see: configuration, plan, checkpoint, numerics.

Each text says what is wrong, the numbers that disagree, the place, and the remedy.
"""


class ConfigError(ValueError):
    """A setting, a model or data that this job cannot run with; raised before any work is lost."""


class PlanError(ValueError):
    """A plan, a strategy or a layout that contradicts itself or the job it is meant for."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or that is not what was saved; names the file and the remedy."""


class NumericsError(ArithmeticError):
    """Losses or gradients that are not finite, in too many steps in a row to go on."""
