"""Compile the planner's kernels before jobs need them, as in the build of an image.

  ds-hydra warm-up

Jobs of the same release of ds-hydra, Python and numba, on the same kind of processor, then compile nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ds_hydra.commands.figures import CommandParser
from ds_hydra.planner.kernels.load import folder_of_kernels
from ds_hydra.planner.recipe import warm_up


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra warm-up") -> int:
    """Compile them, or see that they are compiled; the exit code is 0."""
    CommandParser(prog=name, description=(__doc__ or "").splitlines()[0]).parse_args(arguments)
    began = time.process_time()
    warm_up()
    took, folder = time.process_time() - began, folder_of_kernels()
    print(f"the planner's kernels are ready after {took:.1f} s of CPU, kept in {folder or 'this checkout'}")
    return 0
