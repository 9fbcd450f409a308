"""verl on CPUs, which it has no platform for; it is to be imported before any of verl's workers."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, set_platform


class _Module(ModuleType):
    """What stands for `torch.cuda`: everything that is asked of it is nothing, or 0."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        answers = {"mem_get_info": (1, 1), "get_rng_state": torch.get_rng_state(), "get_device_name": "cpu"}
        return lambda *_, **__: answers.get(name, 0)


def _answers(value: Any) -> Any:
    return lambda *_, **__: value


def on_cpu() -> None:
    """Tell verl that its devices are CPUs."""
    given = {"device_name": "cpu", "vendor_name": "cpu"}
    answers: dict[str, Any] = {name: property(_answers(value)) for name, value in given.items()}
    answers["device_module"] = property(_answers(_Module("cpu")))
    names = {"visible_devices_envvar": "SEEN", "ray_resource_name": "CPU", "communication_backend_name": "gloo"}
    answers |= {name: _answers(value) for name, value in names.items()}
    answers |= {"ray_noset_envvars": _answers([]), "nvtx_range": lambda *_: contextlib.nullcontext()}
    answers |= {name: _answers(None) for name in PlatformBase.__abstractmethods__ if name not in answers}
    answers |= {"is_available": _answers(True), "device_count": _answers(1), "current_device": _answers("cpu")}
    set_platform(type("CpuPlatform", (PlatformBase,), answers)())
