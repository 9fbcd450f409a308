"""Where capabilities attach to the engine: found by name when a config asks for one, so that the core imports none."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.engine.calls import EngineCall
    from ds_hydra.ranks.groups import Aborting
    from ds_hydra.step.outcome import StepOutcome

Result = TypeVar("Result")
PLUGS = {
    "going on": "ds_hydra.elastic.going_on:first_assembly",
    "keeper of copies": "ds_hydra.elastic.copies:keeper_of",
    "classes of devices": "ds_hydra.mixed.classes",
    "images": "ds_hydra.images.job",
}
"""What attaches -> the function, or the module of functions, by which it does."""


def plugged(plug: str, setting: str) -> Any:
    """What a setting asks for. ConfigError where its capability is not installed."""
    module, _, name = PLUGS[plug].partition(":")
    try:
        found = import_module(module)
        return getattr(found, name) if name else found
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("ds_hydra"):
            raise
        raise ConfigError(f"{setting} needs {error.name}, which this installation does not have") from error


class GoesOn(Protocol):
    """Training that goes on in the same processes when ranks are lost or join."""

    @property
    def wanted(self) -> bool:
        """Whether a process waits to join."""

    @property
    def shift(self) -> int:
        """How far from a rank is who keeps the copy of its masters [Note: buddies]."""

    @property
    def aborting(self) -> Aborting:
        """What ends the waits of devices."""

    def train(self) -> StepOutcome:
        """The next step, whoever is lost in it."""

    def call(self, call: EngineCall[Result]) -> Result:
        """What a call of all ranks returns, for those that are left."""

    def by_fault(self, error: Exception) -> bool:
        """Whether an error is due to a rank that was lost."""

    def close(self) -> None:
        """Leave the others in good order."""
