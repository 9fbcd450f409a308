"""DeepSpeed's engine as its releases since 0.19 have it, over those since 0.18.6 too."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn


class AnyDeepSpeedEngine(DeepSpeedEngine):
    """A DeepSpeedEngine of any release: the three methods of DeepSpeed 0.19 that `HostEngine` needs of it."""

    def log_level(self) -> str | None:
        """The config's `log_level`; None in releases that do not read one."""
        return getattr(self._config, "log_level", None)

    def _configure_python_gc(self) -> None:
        """Python's garbage collection as the config asks for it, in releases that have such a setting."""
        if configure := getattr(super(), "_configure_python_gc", None):
            configure()

    def __getattr__(self, name: str) -> Any:
        """What neither the engine nor its class has, from the model. Before 0.19 a module of the engine, such as
        `module` itself, was looked for without end."""
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("module")
        try:
            return getattr(model, name)
        except AttributeError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None
