"""A job on two hosts of one name, as containers on one machine may be: a share of the table `two_hosts`."""

from __future__ import annotations

import pytest

from tools import aims
from tools.devices.two_hosts import measured
from tools.hosts.namespaces import why_not


@pytest.mark.drawn
def test_hosts_of_one_name_are_told_apart_and_bytes_between_them_are_the_plans() -> None:
    if reason := why_not():
        pytest.skip(reason)
    found = measured(1, ("2*tp1",), 1, 1, megabits=1000.0, names=("same", "same"), deepspeed=False, limit_s=300.0)
    (step,), (expected,) = found["slow"], found["expected"]
    for host, into in enumerate(step["into"]):
        planned = sum(kind[host] for kind in expected.values())
        assert 1 <= planned / found["least"]["2*tp1"] < 1.001, "each element enters a host once, gaps between them too"
        assert abs(into / planned - 1) < aims.HOSTS_BYTES
