"""An error of a model's own code in; its kind, what it says and which module ran, as a clause, out."""

from __future__ import annotations

import traceback

from torch import nn

from ds_hydra.zero_hetero.told import message_of


def failing(error: BaseException) -> str:
    """Type and message of an error, and the module in whose forward it was raised, if it was in one."""
    path = module_of(error)
    return f"{type(error).__name__}: {message_of(error)}{f' (in {path})' if path else ''}"


def module_of(error: BaseException) -> str:
    """The path of the module that ran when an error was raised, in the outermost one that has it; empty if none ran."""
    held = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    running = [one for one in held if isinstance(one, nn.Module)]
    paths = (path for root in running for path, module in root.named_modules() if path and module is running[-1])
    return next(paths, "")
