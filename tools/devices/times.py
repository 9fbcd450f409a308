"""To whom time is charged on a device with a queue: by the device's clock, and by the host's for comparison."""

from __future__ import annotations

from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.clock import HostClock
from tests.support.device_steps import EXPECTED_STAGE_S, FakeDevice, FakeDeviceClock, Step, engine_steps, stage_times
from tools import aims
from tools.devices.table import Table

HEAD = ("what runs", "activity", "started s", "device's clock s", "host's clock s", "off")


def time_attribution(quick: bool) -> Table:
    """A first stage that waits for its neighbour, and a step of a whole engine, on a device that is made up."""
    table = Table("to whom time is charged on a device with a queue", HEAD)
    device, other = FakeDevice(), FakeDevice()
    by_device = stage_times(FakeDeviceClock(device), device)
    by_host = stage_times(HostClock(lambda: other.host_s), other)
    for kind, expected in EXPECTED_STAGE_S.items():
        _add(table, ("stage", kind), expected, by_device[kind], by_host[kind])
    steps: list[Step] = run_ranks(engine_steps, 1, False, timeout=300)[0]
    hosts: list[Step] = run_ranks(engine_steps, 1, True, timeout=300)[0]
    for step, host in zip(steps, hosts, strict=True):
        computing = step.launched["forward"] + step.launched["backward"]
        place = f"engine, step {step.record.step}"
        _add(table, (place, "forward, backward"), computing, step.stats.compute_s, host.stats.compute_s)
    # A step's figure holds the norm of the step and the update of the one before.
    _add(table, ("engine, step 2", "optimizer"), steps[0].launched["optimizer"], steps[1].stats.optimizer_s,
         hosts[1].stats.optimizer_s)  # fmt: skip
    return table


def _add(table: Table, names: tuple[str, str], started: float, by_device: float, by_host: float) -> None:
    off = abs(by_device - started) / started if started else by_device
    table.rows.append((*names, f"{started:.3f}", f"{by_device:.3f}", f"{by_host:.3f}", f"{off:.2%}"))
    if off > aims.CHARGED:
        table.missed.append(
            f"{', '.join(names)}: {by_device:.3f} s are charged for {started:.3f} s; aim {aims.CHARGED:.0%}"
        )
