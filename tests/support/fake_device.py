"""A device with a queue, without one: work that a host starts takes the device's time, and none of the host's.

Values are computed at once on the CPU; only time is made up. So a whole engine can run on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

LAUNCH_S = 1e-6  # of the host, for each operation
_READS = (Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.cpu, Tensor.numpy)


class FakeDevice:
    """Two lines of time, in seconds: the host's, and the device's, which works through what the host has started."""

    def __init__(self) -> None:
        self.host_s = 0.0
        self.free_s = 0.0  # when the device will have done all that was started

    def launch(self, seconds: float) -> None:
        """The host starts work and goes on."""
        self.host_s += LAUNCH_S
        self.free_s = max(self.free_s, self.host_s) + seconds

    def stand_still_until(self, moment: float) -> None:
        """The host makes the queue wait for something that is there at `moment`, and goes on."""
        self.free_s = max(self.free_s, moment)

    def wait(self) -> None:
        """The host waits until the device has done everything."""
        self.host_s = max(self.host_s, self.free_s)


class FakeDeviceClock:
    """What a clock by events is for a real device. A moment that the host has not waited for cannot be read."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def now(self) -> float:
        return max(self.device.free_s, self.device.host_s)

    def seconds(self, begin: float, end: float) -> float:
        if end > self.device.host_s:
            raise RuntimeError(f"the device comes to {end:.6f} s; the host has waited until {self.device.host_s:.6f} s")
        return end - begin

    def wait(self) -> None:
        self.device.wait()


class Queued:
    """Within it every torch operation of this thread is work for the device, and reading a value waits for it.

    `launched` are the seconds of work by what `doing` returned when it was started.
    """

    def __init__(self, device: FakeDevice, each_s: float, doing: Callable[[], str]) -> None:
        self.device, self.each_s, self.doing = device, each_s, doing
        self.launched: dict[str, float] = defaultdict(float)
        self.waits = 0
        self._modes = (_Reads(self), _Launches(self))

    def launch(self) -> None:
        self.launched[self.doing()] += self.each_s
        self.device.launch(self.each_s)

    def __enter__(self) -> Queued:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Launches(TorchDispatchMode):
    def __init__(self, queued: Queued) -> None:
        super().__init__()
        self.queued = queued

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.queued.launch()
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    def __init__(self, queued: Queued) -> None:
        super().__init__()
        self.queued = queued

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _READS:
            self.queued.waits += 1
            self.queued.device.wait()
        return result
